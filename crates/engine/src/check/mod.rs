//! What is wrong between two hosts: facts of both and the results of trials between them in, findings
//! out.
//!
//! ```text
//! facts    what each host says of itself
//! trial    what was tried between them, and what came of it
//! sizes    which packet sizes to try next
//! finding  what is wrong, where, what it does, what mends it
//! paths, links, hosts   the rules, by what they look at
//! ```

pub mod facts;
pub mod finding;
mod hosts;
mod links;
mod paths;
pub mod sizes;
#[cfg(test)]
mod tests;
pub mod trial;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::path::{Path, find_paths};
use facts::CheckFacts;
use finding::{Finding, Place, on};
use trial::{ClockDifference, PathTrial};

/// The source, the target, and what was measured between them.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// Where a migration would begin.
    pub source: &'a CheckFacts,
    /// Where it would go.
    pub target: &'a CheckFacts,
    /// One for each of [`paths_to_try`].
    pub trials: &'a [PathTrial],
    /// Of the target against the source.
    pub clock: ClockDifference,
}

/// What a check found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckReport {
    /// Where a migration would begin.
    pub source: String,
    /// Where it would go.
    pub target: String,
    /// What is wrong, the worst first; empty when all is well.
    pub findings: Vec<Finding>,
    /// Each path that was tried, and what came of it.
    pub paths: Vec<PathTrial>,
}

/// The paths that a migration could take, to be tried before [`check`].
pub fn paths_to_try(source: &CheckFacts, target: &CheckFacts) -> Vec<Path> {
    find_paths(&source.host.links, &target.host.links)
}

/// Everything that is wrong between two hosts, the worst first. Empty when all is well.
pub fn check(pair: Pair<'_>) -> Vec<Finding> {
    let mut findings = paths::check(pair);
    findings.extend(links::check(pair));
    findings.extend(hosts::check(pair));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// All there is to say where the target's agent does not answer.
pub fn unreachable(source: &str, target: &str, why: &str) -> Finding {
    Finding::error("agent-unreachable", [Place::host(target)])
        .what(format!("{source} cannot ask {target}: {why}"))
        .effect(format!("no VM can move from {source} to {target}, and nothing else could be checked"))
        .remedy(on(target, "systemctl status drainpipe; journalctl --unit drainpipe"))
}
