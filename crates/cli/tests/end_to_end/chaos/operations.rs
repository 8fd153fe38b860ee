//! What operators ask for, through the program itself, and whether what it says about it is true.

use std::time::{Duration, Instant};

use drainpipe_engine::migration::result::{MigrationResult, Outcome, PathState};

use super::plan::MoveOptions;
use crate::program::{Output, Running};
use crate::support::TestLab;

/// The longest time of any operation: the deadlines of migrations, faults, and the time that agents then need to agree.
const OPERATION_MAX: Duration = Duration::from_mins(5);

/// An operation under way.
pub(super) struct Operation {
    pub(super) what: What,
    /// The errand of the round to which it belongs.
    pub(super) errand: usize,
    running: Running,
    pub(super) began: Instant,
}

#[derive(Debug, Clone)]
pub(super) enum What {
    Move {
        vm: String,
        source: String,
        target: String,
    },
    Drain {
        host: String,
    },
    /// The VMs that a drain moved come back.
    Resume,
}

/// The outcome of an operation.
#[derive(Debug, Clone)]
pub(super) struct End {
    /// Its name in the table.
    pub(super) name: String,
    /// How often one of its paths went out of use.
    pub(super) paths_out: usize,
    /// The agent did not begin it.
    pub(super) is_refused: bool,
}

/// What the program says about where a VM is.
#[derive(Debug)]
pub(super) struct Claim {
    pub(super) vm: String,
    pub(super) host: String,
    pub(super) said: String,
    pub(super) at: Instant,
}

impl Operation {
    pub(super) fn migrate(
        lab: &TestLab,
        errand: usize,
        [vm, source, target]: [&str; 3],
        way: MoveOptions,
    ) -> Self {
        let (deadline, throttle) =
            (way.deadline_s.to_string(), way.throttle_percent.map(|max| max.to_string()));
        let mut words =
            vec!["migrate", vm, target, "--json", "--option", way.option, "--deadline", &deadline];
        words.extend(way.encrypt.then_some("--encrypt"));
        words.extend(way.post_copy.then_some("--post-copy"));
        if let Some(throttle) = &throttle {
            words.extend(["--throttle", throttle]);
        }
        let [vm, source, target] = [vm, source, target].map(str::to_owned);
        Self::start(lab, errand, &source.clone(), &words, What::Move { vm, source, target })
    }

    pub(super) fn drain(lab: &TestLab, errand: usize, host: &str, post_copy: bool, encrypt: bool) -> Self {
        let mut words = vec!["drain", host, "--yes", "--json", "--deadline", "60"];
        words.extend(encrypt.then_some("--encrypt"));
        words.extend(post_copy.then_some("--post-copy"));
        Self::start(lab, errand, host, &words, What::Drain { host: host.into() })
    }

    pub(super) fn resume(lab: &TestLab, errand: usize, host: &str) -> Self {
        let words = ["resume", host, "--failback", "--json"];
        Self::start(lab, errand, host, &words, What::Resume)
    }

    fn start(lab: &TestLab, errand: usize, host: &str, words: &[&str], what: What) -> Self {
        let socket = lab.agent_socket(host);
        let running = lab.start(&[words, &["--agent", &socket]].concat());
        Self { what, errand, running, began: Instant::now() }
    }

    pub(super) fn has_ended(&mut self) -> bool {
        self.running.has_ended()
    }

    /// What was asked for, by which errand, and the program's output.
    pub(super) fn end(self) -> (What, usize, Output) {
        (self.what, self.errand, self.running.wait())
    }

    /// What is wrong with an operation that takes too long.
    pub(super) fn overdue(&self) -> Option<String> {
        let elapsed = self.began.elapsed();
        (elapsed > OPERATION_MAX).then(|| format!("{:?} goes on after {elapsed:.0?}", self.what))
    }
}

/// The outcome of an operation, and what it says about where the VM is.
pub(super) fn judge(what: &What, output: &Output) -> Result<(End, Option<Claim>), String> {
    let end = |name: &str, paths_out| End {
        name: format!("{}: {name}", what.name()),
        paths_out,
        is_refused: (1..=3).contains(&output.code) && output.stdout.is_empty(),
    };
    if output.stderr.contains("panicked") {
        return Err(format!("{what:?}: the program panicked: {output:#?}"));
    }
    let What::Move { vm, source, target } = what else { return Ok((end(of_code(output.code), 0), None)) };
    let Ok(result) = serde_json::from_str::<MigrationResult>(&output.stdout) else {
        let is_known = (1..=7).contains(&output.code);
        return if is_known {
            Ok((end(of_code(output.code), 0), None))
        } else {
            Err(format!("{what:?}: neither a result nor a known exit code: {output:#?}"))
        };
    };
    let (name, host) = match result.outcome {
        Outcome::Completed => ("completed", Some(target)),
        Outcome::Failed => ("failed", Some(source)),
        Outcome::Cancelled => ("cancelled", Some(source)),
        Outcome::InDoubt => ("in doubt", None),
        Outcome::Lost => ("lost", None),
    };
    let turns = result.traffic.paths.iter().flat_map(|path| &path.turns);
    let paths_out = turns.filter(|turn| turn.state == PathState::Out).count();
    let said = format!("{:?}: {}", result.outcome, result.failure.error.as_deref().unwrap_or("no error"));
    let claim = host.map(|host| Claim { vm: vm.clone(), host: host.clone(), said, at: Instant::now() });
    Ok((end(name, paths_out), claim))
}

fn of_code(code: i32) -> &'static str {
    match code {
        0 => "done",
        1 => "failed, or no agent to ask",
        2 => "not known there",
        3 => "refused",
        4 => "lost sight of",
        5 => "cancelled",
        7 => "lost",
        _ => "other",
    }
}

impl What {
    fn name(&self) -> &'static str {
        match self {
            Self::Move { .. } => "migration",
            Self::Drain { .. } => "drain",
            Self::Resume => "failback",
        }
    }
}
