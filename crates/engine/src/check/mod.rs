//! What is wrong between two hosts. In: facts of both, and the results of tests between them. Out: findings.
//!
//! ```text
//! facts    what each host says of itself
//! vm       what both hosts say of a VM that may move
//! trial    what was tried between them, and what came of it
//! sizes    which packet sizes to try next
//! path_report   everything that is known of a path, for people and scripts
//! paths, links, hosts, vms   the rules, by what they look at
//! ```

pub mod facts;
mod hosts;
mod libvirt;
mod links;
pub mod path_report;
mod paths;
pub mod sizes;
#[cfg(test)]
mod tests;
pub mod trial;
pub mod vm;
mod vms;

pub use hosts::route_taken;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::finding::code::FindingCode;
use crate::finding::{ANY_FIREWALL, Finding, Place, Severity, let_in, on};
use crate::option::RequestedOption;
use crate::paths::path::{Path, Reach, find_paths};
use crate::problem::Problem;
use facts::CheckFacts;
use path_report::PathReport;
use trial::{ClockDifference, PathTrial};
use vm::VmCheck;

/// What a check looks at: the source, the target, and what is known between them.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// Where a migration would begin.
    pub source: &'a CheckFacts,
    /// Where it would go.
    pub target: &'a CheckFacts,
    /// The paths that a migration could take, from [`paths_to_try`] or its plan.
    pub paths: &'a [Path],
    /// One for each of them; absent where nothing was tried.
    pub trials: Option<&'a [PathTrial]>,
    /// Running VMs of the source that may move.
    pub vms: &'a [VmCheck],
    /// Whether a migration would use several paths at once.
    pub multichannel: bool,
    /// Whether it might, if all were well: nothing less was asked for.
    pub may_use_all: bool,
    /// The difference of the target's clock from the source's.
    pub clock: ClockDifference,
}

impl<'a> Pair<'a> {
    fn trials(self) -> &'a [PathTrial] {
        self.trials.unwrap_or_default()
    }
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
    /// Each path that was tried: what came of it, and what is at its ends.
    pub paths: Vec<PathReport>,
}

/// The paths that a migration could take, to be tried before [`check`]. `reaches` is what trying the
/// [`links_to_try`](crate::paths::path::links_to_try) has shown.
pub fn paths_to_try(source: &CheckFacts, target: &CheckFacts, reaches: &[Reach]) -> Vec<Path> {
    find_paths(&source.host, &target.host, RequestedOption::Auto, reaches)
}

/// Everything that is wrong between two hosts, the worst first. Empty when all is well.
pub fn check(pair: Pair<'_>) -> Vec<Finding> {
    let mut findings = vms::check(pair);
    findings.extend(paths::check(pair));
    findings.extend(links::check(pair));
    findings.extend(hosts::check(pair));
    findings.extend(libvirt::check(pair));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

/// The findings that a person sees before a migration: not those that are merely good to know.
pub fn worth_telling(findings: Vec<Finding>) -> Vec<Finding> {
    findings.into_iter().filter(|finding| finding.severity != Severity::Remark).collect()
}

/// Why a migration is not begun, in one message; `None` when it may be tried.
pub fn refusal(findings: &[Finding]) -> Option<Problem> {
    let refusing = findings.iter().filter(|finding| finding.refuses_migration);
    let reasons: Vec<String> =
        refusing.map(|finding| format!("{}; {}", finding.what, finding.remedy)).collect();
    (!reasons.is_empty()).then(|| Problem::refused(reasons.join(". ")))
}

/// Why one agent does not reach another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotReached {
    /// In words for people.
    pub why: String,
    /// Whether it answers, and the two do not accept each other's certificates: then nothing is wrong with the network.
    pub is_for_certificates: bool,
}

/// What mends certificates that do not accept each other.
fn renew(own: &str, other: &str) -> String {
    format!(
        "on {own} and {other}: openssl x509 -noout -subject -issuer -dates -in /etc/drainpipe/host.pem shows whose they \
         are; where the authority is: drainpipe pki host HOST --force; copy the files to that host; systemctl restart \
         drainpipe"
    )
}

/// All there is to say where the target's agent, which listens on this port, does not answer.
pub fn unreachable(source: &str, target: &str, port: u16, reason: &NotReached) -> Finding {
    let remedy = if reason.is_for_certificates {
        renew(source, target)
    } else {
        format!(
            "{}; if it runs, a firewall may drop what is sent to it; {}; {ANY_FIREWALL}",
            on(target, "systemctl status drainpipe; journalctl --unit drainpipe"),
            let_in(target, format!("tcp dport {port}"))
        )
    };
    Finding::new(FindingCode::AgentUnreachable, [Place::host(target)])
        .what(format!("{source} cannot ask {target}: {}", reason.why))
        .effect(format!("no VM can move from {source} to {target}, and nothing else could be checked"))
        .remedy(remedy)
}

/// The target's agent answers the source's, which listens on this port, and does not reach it.
pub fn no_way_back(source: &str, target: &str, port: u16, reason: &NotReached) -> Finding {
    let remedy = if reason.is_for_certificates {
        renew(source, target)
    } else {
        format!(
            "{}; {}; {ANY_FIREWALL}",
            on(target, format!("check that [[peer]] `{source}` in agent.toml has the right address")),
            let_in(source, format!("tcp dport {port}"))
        )
    };
    Finding::milder(FindingCode::AgentUnreachable, [Place::host(source)])
        .what(format!("{target} cannot ask {source}: {}", reason.why))
        .effect(format!(
            "no VM can move from {target} to {source}; and after a crash, {target} cannot ask {source} \
            which of them a VM belongs to"
        ))
        .remedy(remedy)
}
