//! What is told of a migration: to people, and to who has several of them share the links.

use super::{Migration, Phase};
use crate::finding::Finding;
use crate::migration::progress::Progress;
use crate::migration::result::{LogLine, Outcome, PathState, PathTurn, SourceVm};
use crate::migration::step::Step;
use crate::paths::watch::PathNews;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::storage::DiskUse;

/// How many lines a migration's log may have; a migration has about twenty.
const LOG_LINES: usize = 200;

/// How far a migration is, for who has several of them share the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Steps 1 to 5.
    Preparing,
    /// Between steps 1 and 2 it waits until the target takes more VMs.
    AwaitingPlace,
    /// It could send, and waits for its turn.
    Ready,
    /// Before step 6: its disks are copied over the links.
    CopyingDisks,
    /// Steps 6 and 7: it uses the links.
    Sending,
    /// The same, and little is left: it will be paused soon.
    Ending,
    /// Step 8: the VM is paused, and its last bytes are on the links.
    SwitchingOver,
    /// From the record of the hand-over to the end of step 10: all has been sent, or it is found out whether it has.
    Sent,
    /// With post-copy: the VM runs on the target, and the rest of its memory is on the links.
    SendingRest,
    /// It is being undone.
    Undoing,
    /// It is over, or its outcome is not known until the target answers.
    Ended,
}

/// When the parts of a migration began and ended; see
/// [`MigrationResult`](crate::migration::result::MigrationResult).
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Timings {
    /// How long it waited until the target took more VMs, in steps 1 to 5.
    pub awaited_place_ms: f64,
    /// End of step 5.
    pub connected_ms: Option<f64>,
    /// Its turn to send had come.
    pub released_ms: Option<f64>,
    /// The copies of its disks had begun; absent where none is copied.
    pub disks_began_ms: Option<f64>,
    /// All of each disk was there.
    pub disks_ready_ms: Option<f64>,
    /// The VM was paused.
    pub paused_ms: Option<f64>,
    /// End of step 8.
    pub state_transferred_ms: Option<f64>,
    /// The target said that the VM runs.
    pub resumed_ms: Option<f64>,
    /// The VM was paused, and runs again on the source.
    pub resumed_here_ms: Option<f64>,
    /// With post-copy: all of its memory was there, too.
    pub rest_sent_ms: Option<f64>,
    /// It was over.
    pub ended_ms: Option<f64>,
}

impl Timings {
    /// From the pause until the VM ran again, on whichever host.
    pub fn downtime_ms(&self) -> Option<f64> {
        let resumed_ms = self.resumed_ms.or(self.resumed_here_ms)?;
        self.paused_ms.map(|paused_ms| (resumed_ms - paused_ms).max(0.0))
    }
}

impl Migration {
    pub(super) fn found(&mut self, now_ms: f64, finding: Finding) {
        // What refuses the migration is its error.
        if !finding.refuses_migration && self.findings.len() < LOG_LINES {
            self.note(now_ms, format!("{}: {} ({})", finding.severity, finding.what, finding.code));
            self.findings.push(finding);
        }
    }

    pub(super) fn bandwidth_limited(&mut self, now_ms: f64, limit_mbps: Option<u64>) {
        self.limit_mbps = limit_mbps;
        let what = limit_mbps.map_or("no bandwidth limit any more".into(), |mbps| {
            format!("limited to {mbps} Mb/s of the links' bandwidth")
        });
        self.note(now_ms, what);
    }

    pub(super) fn throttled(&mut self, now_ms: f64, percent: Option<u8>) {
        self.throttle_percent = percent;
        // Links that fail again and again shall not fill the log: each share is told once, and the end.
        let is_told =
            percent.map_or(self.phase == Phase::Copying, |_| percent <= self.most_throttled_percent);
        self.most_throttled_percent = self.most_throttled_percent.max(percent);
        if is_told {
            return;
        }
        let what = percent.map_or("the VM's CPUs are not throttled any more".into(), |percent| {
            format!("memory gets dirty too fast: the VM's CPUs are throttled by {percent} %")
        });
        self.note(now_ms, what);
    }

    pub(super) fn path_turned(&mut self, now_ms: f64, path: String, news: PathNews) {
        self.note(now_ms, format!("path {path} {news}"));
        match news {
            PathNews::Out(_) => {
                self.paths_out.insert(path.clone());
            }
            PathNews::Back => {
                self.paths_out.remove(&path);
            }
            PathNews::Carries(_) | PathNews::Unwatched(_) | PathNews::Watched => {}
        }
        if self.path_turns.len() < LOG_LINES {
            let (state, why) = match news {
                PathNews::Out(fault) => (PathState::Out, Some(fault.to_string())),
                PathNews::Back => (PathState::Back, None),
                PathNews::Carries(_) => (PathState::Weighted, Some(news.to_string())),
                PathNews::Unwatched(why) => (PathState::Unwatched, Some(why.to_string())),
                PathNews::Watched => (PathState::Watched, None),
            };
            self.path_turns.push((path, PathTurn { ms: now_ms, state, why }));
        }
    }

    pub(super) fn note(&mut self, now_ms: f64, what: impl Into<String>) {
        if self.log.len() < LOG_LINES {
            self.log.push(LogLine { ms: now_ms, step: self.step(), what: what.into() });
        }
    }

    /// The step under way, or the last one that was.
    pub fn step(&self) -> Step {
        match self.phase {
            Phase::Preparing(step) => step,
            Phase::AwaitingTurn { .. }
            | Phase::StartingDiskCopies
            | Phase::CopyingDisks
            | Phase::SynchronisingDisks
            | Phase::MirroringDisks
            | Phase::StartingTransfer => Step::ConnectHosts,
            Phase::Copying | Phase::BeginningPostCopy if self.meter.rounds() > 1 => Step::CopyDirtyMemory,
            Phase::Copying | Phase::BeginningPostCopy => Step::CopyMemory,
            Phase::EndingDiskCopies | Phase::SwitchingOver | Phase::RecordingHandOver => Step::Downtime,
            Phase::ResumingOnTarget { .. }
            | Phase::AskingSource
            | Phase::AskingTarget { .. }
            | Phase::EndingOnSource
            | Phase::Revoking
            | Phase::SendingRest
            | Phase::Reconnecting { .. }
            | Phase::EndingOnTarget => Step::ResumeOnTarget,
            Phase::CleaningUp(_) | Phase::Ended(Outcome::Completed) => Step::CleanUp,
            Phase::Undoing(_) | Phase::LookingAtVm | Phase::Ended(_) => {
                self.log.last().map_or(Step::EstablishHosts, |line| line.step)
            }
        }
    }

    /// How far it is, for who has several of them share the links.
    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::Preparing(_) if self.awaits_place_since_ms.is_some() => Stage::AwaitingPlace,
            Phase::Preparing(_) => Stage::Preparing,
            Phase::AwaitingTurn { .. } => Stage::Ready,
            Phase::Copying if self.is_ending => Stage::Ending,
            Phase::StartingDiskCopies
            | Phase::CopyingDisks
            | Phase::SynchronisingDisks
            | Phase::MirroringDisks => Stage::CopyingDisks,
            Phase::StartingTransfer if self.transfer_copies_disks() => Stage::CopyingDisks,
            Phase::StartingTransfer | Phase::Copying | Phase::BeginningPostCopy => Stage::Sending,
            Phase::EndingDiskCopies | Phase::SwitchingOver => Stage::SwitchingOver,
            // Before it runs there, and then the rest is on the links.
            Phase::RecordingHandOver | Phase::ResumingOnTarget { .. } if self.rest.follows() => {
                Stage::SwitchingOver
            }
            Phase::SendingRest | Phase::Reconnecting { .. } => Stage::SendingRest,
            Phase::RecordingHandOver
            | Phase::ResumingOnTarget { .. }
            | Phase::AskingSource
            | Phase::AskingTarget { .. }
            | Phase::EndingOnSource
            | Phase::Revoking
            | Phase::EndingOnTarget
            | Phase::CleaningUp(_) => Stage::Sent,
            Phase::Undoing(_) | Phase::LookingAtVm => Stage::Undoing,
            Phase::Ended(_) => Stage::Ended,
        }
    }

    /// Progress for people.
    pub fn progress(&self, now_ms: f64) -> Progress {
        let metered = match self.phase {
            Phase::SendingRest => self.meter.progress_of_rest(self.step(), now_ms),
            _ => self.meter.progress(self.step(), now_ms),
        };
        Progress {
            limit_mbps: self.limit_mbps,
            disks: self.disk_progress(),
            outpaced: self.outpaced(),
            throttle_percent: self.throttle_percent,
            paths_out: self.paths_out.iter().cloned().collect(),
            ..metered
        }
    }

    /// The plan, once made.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// What became of each disk that was to be copied.
    pub fn disks(&self) -> Vec<DiskUse> {
        let disks = self.plan.iter().flat_map(|plan| &plan.disks);
        let began_ms = self.timings.disks_began_ms.unwrap_or_default();
        let used = disks.map(|copy| {
            let (copied_bytes, ready_ms) = self.disk_meter.of(copy.disk);
            let same_bytes = self.disk_meter.same_bytes(copy.disk);
            DiskUse {
                copy: copy.clone(),
                copied_bytes,
                same_bytes,
                wire_bytes: self.disk_meter.wire_bytes(copy.disk),
                ready_ms: ready_ms.map(|ms| ms - began_ms),
            }
        });
        used.collect()
    }

    /// What a check before it found, and was no reason to refuse it.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// By how much of their time the VM's CPUs were held back at most, in percent; absent if they were not.
    pub fn most_throttled_percent(&self) -> Option<u8> {
        self.most_throttled_percent
    }

    /// When a path went out and came back.
    pub fn turns_of(&self, path: &str) -> Vec<PathTurn> {
        let turns = self.path_turns.iter().filter(|(of, _)| of == path);
        turns.map(|(_, turn)| turn.clone()).collect()
    }

    /// How it ended, once it has.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.phase {
            Phase::Ended(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// What the VM is doing on the source, once it has ended without moving.
    pub fn source_vm(&self) -> Option<SourceVm> {
        self.source_vm
    }

    /// What went wrong, if anything.
    pub fn error(&self) -> Option<&Problem> {
        self.error.as_ref()
    }

    /// When the parts began and ended.
    pub fn timings(&self) -> Timings {
        self.timings
    }

    /// What happened when.
    pub fn log(&self) -> &[LogLine] {
        &self.log
    }

    /// Whether it can still be cancelled.
    pub fn can_cancel(&self) -> bool {
        !self.is_handed_over()
    }
}
