//! The view of a migration: for people, and for a drain that has several of them share the links.

use std::collections::BTreeSet;

use super::{ENDING_MS, Migration, Phase};
use crate::finding::Finding;
use crate::finding::code::FindingCode;
use crate::format;
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

/// The view of a migration, besides its progress.
#[derive(Debug, Default)]
pub(super) struct Record {
    log: Vec<LogLine>,
    findings: Vec<Finding>,
    path_turns: Vec<(String, PathTurn)>,
    paths_out: BTreeSet<String>,
    limit_mbps: Option<u64>,
    throttled_percent: Option<u8>,
    most_throttled_percent: Option<u8>,
}

impl Record {
    /// The finding that a check before it had, if it did.
    pub(super) fn finding(&self, code: FindingCode) -> Option<&Finding> {
        self.findings.iter().find(|finding| finding.is(code))
    }

    /// The paths that are out of use.
    pub(super) fn paths_out(&self) -> &BTreeSet<String> {
        &self.paths_out
    }

    fn path_turned(&mut self, now_ms: f64, path: String, news: &PathNews) {
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

    /// Whether people know it already. Links that fail again and again must not fill the log: each share is reported
    /// once, and the end of it only while memory is copied.
    fn throttled(&mut self, percent: Option<u8>, is_copying: bool) -> bool {
        self.throttled_percent = percent;
        let is_logged = percent.map_or(is_copying, |_| percent <= self.most_throttled_percent);
        self.most_throttled_percent = self.most_throttled_percent.max(percent);
        is_logged
    }
}

impl Migration {
    pub(super) fn found(&mut self, now_ms: f64, finding: Finding) {
        // What refuses the migration is its error.
        if !finding.refuses_migration && self.record.findings.len() < LOG_LINES {
            self.note(now_ms, format!("{}: {} ({})", finding.severity, finding.what, finding.code));
            self.record.findings.push(finding);
        }
    }

    pub(super) fn bandwidth_limited(&mut self, now_ms: f64, limit_mbps: Option<u64>) {
        self.record.limit_mbps = limit_mbps;
        let what = limit_mbps.map_or("no bandwidth limit any longer".into(), |mbps| {
            format!("limited to {} of the links' bandwidth", format::mbps(mbps))
        });
        self.note(now_ms, what);
    }

    pub(super) fn throttled(&mut self, now_ms: f64, percent: Option<u8>) {
        let is_logged = self.record.throttled(percent, self.phase == Phase::Copying);
        if is_logged {
            return;
        }
        let what = percent.map_or("the VM's CPUs are no longer throttled".into(), |percent| {
            format!("memory gets dirty too fast: the VM's CPUs are throttled by {percent} %")
        });
        self.note(now_ms, what);
    }

    pub(super) fn path_turned(&mut self, now_ms: f64, path: String, news: PathNews) {
        self.note(now_ms, format!("path {path} {news}"));
        self.record.path_turned(now_ms, path, &news);
    }

    pub(super) fn note(&mut self, now_ms: f64, what: impl Into<String>) {
        if self.record.log.len() < LOG_LINES {
            self.record.log.push(LogLine { ms: now_ms, step: self.step(), what: what.into() });
        }
    }

    /// The step under way, or the last one that was.
    pub fn step(&self) -> Step {
        match self.phase {
            Phase::Preparing(step) => step,
            Phase::AwaitingPlace { .. } => Step::CheckPermissions,
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
                self.record.log.last().map_or(Step::EstablishHosts, |line| line.step)
            }
        }
    }

    /// How far it is, for who has several of them share the links.
    pub fn stage(&self) -> Stage {
        match self.phase {
            Phase::AwaitingPlace { .. } => Stage::AwaitingPlace,
            Phase::Preparing(_) => Stage::Preparing,
            Phase::AwaitingTurn { .. } => Stage::Ready,
            Phase::Copying if self.is_ending() => Stage::Ending,
            Phase::StartingDiskCopies
            | Phase::CopyingDisks
            | Phase::SynchronisingDisks
            | Phase::MirroringDisks => Stage::CopyingDisks,
            Phase::StartingTransfer if self.disks.go_along() => Stage::CopyingDisks,
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

    /// Whether little of its memory was left at the last reading.
    fn is_ending(&self) -> bool {
        self.meter.left_ms().is_some_and(|left_ms| left_ms <= ENDING_MS)
    }

    /// Progress for people.
    pub fn progress(&self, now_ms: f64) -> Progress {
        let metered = match self.phase {
            Phase::SendingRest => self.meter.progress_of_rest(self.step(), now_ms),
            _ => self.meter.progress(self.step(), now_ms),
        };
        Progress {
            limit_mbps: self.record.limit_mbps,
            disks: self.disk_progress(),
            outpaced: self.outpaced(),
            throttle_percent: self.record.throttled_percent,
            paths_out: self.record.paths_out.iter().cloned().collect(),
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
        disks.map(|copy| self.disks.used(copy, began_ms)).collect()
    }

    /// What a check before it found, and was no reason to refuse it.
    pub fn findings(&self) -> &[Finding] {
        &self.record.findings
    }

    /// By how much of their time the VM's CPUs were held back at most, in percent; absent if they were not.
    pub fn most_throttled_percent(&self) -> Option<u8> {
        self.record.most_throttled_percent
    }

    /// When a path went out and came back.
    pub fn turns_of(&self, path: &str) -> Vec<PathTurn> {
        let turns = self.record.path_turns.iter().filter(|(of, _)| of == path);
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
        &self.record.log
    }

    /// Whether it can still be cancelled.
    pub fn can_cancel(&self) -> bool {
        !self.is_handed_over()
    }
}
