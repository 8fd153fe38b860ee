//! The disks that are copied: before memory, while the VM runs. Their copies end before the hand-over is recorded.

use super::{Migration, Phase, SourceAction};
use crate::format::{self, seconds};
use crate::migration::progress::pause_is_near;
use crate::storage::{
    DiskCopy, DiskMeter, DiskProgress, DiskState, DiskUse, HeldWrites, WriteLimit, allowance_ms,
};

const ALONG_OUTPACED: &str = "the VM writes to its disks about as fast as they are copied, and its writes \
    cannot be made to wait for the target: let it write less meanwhile (`virsh blkdeviotune` limits a \
    domain's disk); \
                              what was copied is kept for the next attempt";

const OUTPACED: &str = "the VM writes to its disks about as fast as they are copied";

const WRITES_WAIT: &str =
    "from now on, each of the VM's writes waits for the target, so that the rest shrinks";

const WRITES_HELD: &str = "from now on, the VM's writes are held back as far as necessary for the copies to \
    keep up, because its QEMU cannot make them wait for the target";

/// How far the copies of the VM's disks are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum DiskCopies {
    /// There are none, or none yet.
    #[default]
    None,
    /// The source writes to the target's disks.
    UnderWay,
    /// The same, by the transfer itself, before memory.
    Along {
        /// Whether the log says already that this may never come to an end.
        is_outpaced: bool,
    },
    /// The same, and the VM's writes are held back as far as is necessary, since they cannot be made to wait.
    Held,
    /// Nobody does any more.
    Over,
}

impl DiskCopies {
    /// Whether the source may write to the target's disks.
    fn may_write(self) -> bool {
        matches!(self, Self::UnderWay | Self::Along { .. } | Self::Held)
    }
}

/// The disks that are copied, as far as is known.
#[derive(Debug, Default)]
pub(super) struct Disks {
    copies: DiskCopies,
    meter: DiskMeter,
    held_writes: HeldWrites,
    // The lowest limit of the VM's writes that was logged.
    logged_limit: Option<WriteLimit>,
}

impl Disks {
    /// Whether the source may write to the target's.
    pub(super) fn may_be_written(&self) -> bool {
        self.copies.may_write()
    }

    /// Whether the transfer copies them before it sends memory.
    pub(super) fn go_along(&self) -> bool {
        matches!(self.copies, DiskCopies::Along { .. })
    }

    fn are_held(&self) -> bool {
        self.copies == DiskCopies::Held
    }

    pub(super) fn record(&mut self, now_ms: f64, states: &[DiskState]) {
        self.meter.record(now_ms, states);
    }

    /// Changes how far the VM's writes are held back. Logs the limit if it is lower than the last one logged.
    fn hold_writes(&mut self, change: impl FnOnce(&mut HeldWrites)) -> Option<WriteLimit> {
        change(&mut self.held_writes);
        // A limit that rises and falls again was logged before.
        let before = self.logged_limit.map_or(u64::MAX, |limit| limit.bytes_per_s);
        let limit = self.held_writes.limit().filter(|limit| limit.bytes_per_s < before)?;
        self.logged_limit = Some(limit);
        Some(limit)
    }

    /// Whether the VM writes about as fast as they are copied; once, since it may write less in a while.
    fn have_become_outpaced(&mut self) -> bool {
        if !self.meter.are_outpaced() {
            return false;
        }
        let before = std::mem::replace(&mut self.copies, DiskCopies::Along { is_outpaced: true });
        before != self.copies
    }

    /// What became of one of them.
    pub(super) fn used(&self, copy: &DiskCopy, began_ms: f64) -> DiskUse {
        let (copied_bytes, ready_ms) = self.meter.of(copy.disk);
        DiskUse {
            copy: copy.clone(),
            copied_bytes,
            same_bytes: self.meter.same_bytes(copy.disk),
            wire_bytes: self.meter.wire_bytes(copy.disk),
            ready_ms: ready_ms.map(|ms| ms - began_ms),
        }
    }

    /// Progress for people; `writes_held` where the VM's writes are held back now.
    fn progress(&self, writes_held: bool) -> Vec<DiskProgress> {
        let writes_wait = self.meter.are_mirrored() && !self.are_held();
        let each = self.meter.progress().into_iter();
        each.map(|disk| DiskProgress { writes_wait, writes_held, ..disk }).collect()
    }
}

impl Migration {
    /// Nothing where no disk is copied.
    pub(super) fn start_disk_copies(&mut self, now_ms: f64) -> Option<SourceAction> {
        if self.plan.as_ref().is_none_or(|plan| plan.disks.is_empty()) {
            return None;
        }
        // Before the action is given: it may take effect though its answer is lost.
        self.disks.copies = DiskCopies::UnderWay;
        self.timings.disks_began_ms = Some(now_ms);
        self.phase = Phase::StartingDiskCopies;
        Some(SourceAction::StartDiskCopies)
    }

    /// They begin with the transfer.
    pub(super) fn disks_go_along(&mut self) -> SourceAction {
        self.disks.copies = DiskCopies::Along { is_outpaced: false };
        if self.cancel_requested { self.undo() } else { self.start_transfer() }
    }

    /// All of each disk was there, and the transfer goes on by itself.
    pub(super) fn memory_follows(&mut self, now_ms: f64) {
        self.timings.disks_ready_ms = Some(now_ms);
        self.note(now_ms, "all of each disk is there");
        self.memory_goes(now_ms);
    }

    pub(super) fn disk_copies_started(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.phase = Phase::CopyingDisks;
        self.note(now_ms, "copying disks");
        self.cancel_requested.then(|| self.undo())
    }

    /// Whether all are there, or never will be as it is.
    pub(super) fn consider_disks(&mut self, now_ms: f64) -> Option<SourceAction> {
        match self.phase {
            Phase::CopyingDisks if self.disks.go_along() => {
                if self.disks.meter.are_ready() {
                    self.memory_follows(now_ms);
                } else if self.disks.have_become_outpaced() {
                    self.note(now_ms, ALONG_OUTPACED);
                }
                None
            }
            Phase::CopyingDisks if self.disks.meter.are_ready() => {
                Some(self.synchronise_disks(now_ms, "all of each disk is there"))
            }
            Phase::CopyingDisks if self.disks.meter.are_outpaced() => {
                Some(self.synchronise_disks(now_ms, OUTPACED))
            }
            Phase::MirroringDisks if self.disks.are_held() => {
                self.disks.held_writes.keep_up(now_ms).then(|| self.disks_keep_up(now_ms))
            }
            Phase::MirroringDisks if self.disks.meter.are_synchronised() => {
                Some(self.disks_synchronised(now_ms))
            }
            _ => None,
        }
    }

    fn synchronise_disks(&mut self, now_ms: f64, why: &str) -> SourceAction {
        self.note(now_ms, why);
        self.phase = Phase::SynchronisingDisks;
        SourceAction::SynchroniseDisks
    }

    pub(super) fn disks_mirrored(&mut self, now_ms: f64) -> Option<SourceAction> {
        if !self.disks.meter.are_ready() {
            self.note(now_ms, WRITES_WAIT);
        }
        self.mirror_disks(now_ms)
    }

    fn mirror_disks(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.phase = Phase::MirroringDisks;
        self.disks.meter.mirrored(now_ms);
        self.cancel_requested.then(|| self.undo())
    }

    pub(super) fn writes_held_back(&mut self, now_ms: f64) -> Option<SourceAction> {
        self.disks.copies = DiskCopies::Held;
        self.note(now_ms, WRITES_HELD);
        if !self.disks.meter.are_ready() {
            self.begin_holding_writes(now_ms);
        }
        self.mirror_disks(now_ms)
    }

    fn disks_keep_up(&mut self, now_ms: f64) -> SourceAction {
        self.timings.disks_ready_ms = Some(now_ms);
        self.note(now_ms, "the copies of the disks keep up with what the VM writes");
        self.start_transfer()
    }

    /// How far the VM's writes to its disks are to be held back from now on. Whoever carries the actions out sees to it before
    /// the next one. Nothing where they are not, or not any more: who ends the copies lets them go.
    pub fn write_limit(&self) -> Option<WriteLimit> {
        let are_copied =
            matches!(self.phase, Phase::MirroringDisks | Phase::StartingTransfer | Phase::Copying);
        self.disks.held_writes.limit().filter(|_| self.disks.are_held() && are_copied)
    }

    /// Whether the VM is not to be paused yet: what is left of its disks might be much.
    pub fn holds_pause(&self, now_ms: f64) -> bool {
        let is_copying = self.disks.are_held() && self.phase == Phase::Copying;
        is_copying && !self.disks.held_writes.let_pause(now_ms)
    }

    pub(super) fn record_held_writes(&mut self, now_ms: f64) {
        if self.disks.are_held() {
            // While memory takes the links and the pause is far, copies may fall behind.
            let matters = self.phase != Phase::Copying || self.pause_is_near();
            let reading = self.disks.meter.reading();
            self.change_held_writes(now_ms, |held| held.record(now_ms, reading, matters));
        }
    }

    /// Memory has come further.
    pub(super) fn consider_holding_writes(&mut self, now_ms: f64) {
        if self.disks.are_held() && self.phase == Phase::Copying && self.pause_is_near() {
            self.begin_holding_writes(now_ms);
        }
    }

    fn pause_is_near(&self) -> bool {
        pause_is_near(self.meter.rounds(), self.meter.left_ms())
    }

    fn begin_holding_writes(&mut self, now_ms: f64) {
        let most = self.disks.meter.most_bytes_per_s();
        self.change_held_writes(now_ms, |held| held.begin(most));
    }

    fn change_held_writes(&mut self, now_ms: f64, change: impl FnOnce(&mut HeldWrites)) {
        if let Some(WriteLimit { bytes_per_s, writes_per_s }) = self.disks.hold_writes(change) {
            let rate = format::bytes(bytes_per_s as f64);
            self.note(
                now_ms,
                format!("the VM's writes are held back to {writes_per_s} and {rate} each second, so that the copies keep up"),
            );
        }
    }

    /// Progress for people.
    pub(super) fn disk_progress(&self) -> Vec<DiskProgress> {
        self.disks.progress(self.write_limit().is_some())
    }

    fn disks_synchronised(&mut self, now_ms: f64) -> SourceAction {
        self.timings.disks_ready_ms = Some(now_ms);
        self.note(now_ms, "each write goes to both disks");
        self.start_transfer()
    }

    /// Nothing where no disk is copied.
    pub(super) fn end_disk_copies(&mut self) -> Option<SourceAction> {
        self.disks.may_be_written().then(|| {
            self.phase = Phase::EndingDiskCopies;
            SourceAction::EndDiskCopies
        })
    }

    pub(super) fn disk_copies_ended(&mut self, now_ms: f64) -> SourceAction {
        self.disks.copies = DiskCopies::Over;
        self.note(now_ms, "the copies of the disks are complete and closed");
        if self.cancel_requested { self.undo() } else { self.part() }
    }

    /// How long it may take, without the wait for its place at the target and for its turn.
    pub(super) fn total_ms(&self) -> f64 {
        let disks = self.plan.as_ref().filter(|_| self.limits.disks_take_longer);
        self.limits.total_ms + disks.map_or(0.0, |plan| allowance_ms(&plan.disks))
    }

    pub(super) fn disks_not_there_in_time(&self) -> String {
        if (self.disks.copies == DiskCopies::Along { is_outpaced: true }) {
            return format!(
                "the disks were not copied within {}: {ALONG_OUTPACED}",
                seconds(self.total_ms())
            );
        }
        format!(
            "the disks were not copied within {}: the paths, or the disks themselves, are too slow for \
            their data and the VM's writes; `migrate --deadline` allows more time",
            seconds(self.total_ms())
        )
    }

    /// Why it is given up, if no disk moves any more.
    pub(super) fn disks_stand_still(&self, now_ms: f64) -> Option<String> {
        let silent_ms = self.disks.meter.silent_ms(now_ms);
        let what = match self.phase {
            Phase::CopyingDisks => "nothing of the disks has been copied",
            Phase::MirroringDisks if self.disks.are_held() => {
                "the rest of the disks does not stay small, although the VM's writes are held back,"
            }
            Phase::MirroringDisks => "the rest of the disks has not shrunk",
            _ => return None,
        };
        (silent_ms >= self.limits.stall_ms).then(|| {
            format!(
                "{what} for {}; look at the links of both hosts, and at the target's disk",
                seconds(silent_ms)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::in_flight::{copying_disks, starting_disk_copies, well};
    use super::*;
    use crate::migration::result::Outcome;
    use crate::migration::{SourceEvent, Stage};
    use crate::problem::Problem;
    use crate::storage::DiskName;
    use crate::transfer::transferred::Transferred;

    /// The actions after the pause of a migration that copies disks.
    const FROM_THE_PAUSE_ON: [SourceAction; 6] = [
        SourceAction::EndDiskCopies,
        SourceAction::SwitchOver,
        SourceAction::RecordHandOver,
        SourceAction::ResumeOnTarget,
        SourceAction::CleanUp,
        SourceAction::Finish,
    ];

    fn disk(copied_bytes: u64, is_ready: bool) -> SourceEvent {
        at(DiskState { copied_bytes, total_bytes: 100, is_ready, ..begun() })
    }

    fn begun() -> DiskState {
        DiskState { same_bytes: 7, wire_bytes: 50, ..DiskState::begun(DiskName::at(0).unwrap()) }
    }

    fn at(state: DiskState) -> SourceEvent {
        SourceEvent::DiskProgress(vec![state])
    }

    /// The whole disk was copied so often, and no less is left.
    fn rewritten(times: u64) -> SourceEvent {
        at(DiskState { copied_bytes: 100 * times, total_bytes: 100 * times + 100, ..begun() })
    }

    /// Each write goes to both disks, and so much is left.
    fn left(bytes: u64) -> SourceEvent {
        at(DiskState { copied_bytes: 1_000 - bytes, total_bytes: 1_000, is_ready: bytes == 0, ..begun() })
    }

    fn synchronised() -> SourceEvent {
        let all = DiskState { copied_bytes: 100, total_bytes: 100, ..begun() };
        at(DiskState { is_ready: true, is_synchronised: true, ..all })
    }

    /// A migration whose VM has written as fast as its disk is copied for 3 s.
    fn outpaced() -> Migration {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(2_000.0, rewritten(0)), None);
        assert_eq!(migration.handle(2_900.0, rewritten(1)), Some(SourceAction::SynchroniseDisks));
        assert_eq!(migration.handle(3_000.0, SourceEvent::Done), None);
        migration
    }

    /// The actions from here to the end, if all goes well.
    fn rest(migration: &mut Migration, mut next: Option<SourceAction>) -> Vec<SourceAction> {
        let mut actions = vec![];
        while let Some(action) = next {
            actions.push(action);
            next =
                if action == SourceAction::Finish { None } else { migration.handle(9_000.0, well(action)) };
        }
        actions
    }

    #[test]
    fn disks_go_first_and_their_copies_end_before_the_record() {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(2_000.0, disk(50, false)), None);
        assert_eq!(migration.handle(3_000.0, disk(100, true)), Some(SourceAction::SynchroniseDisks));
        assert_eq!(migration.handle(3_050.0, SourceEvent::Done), None);
        assert_eq!(migration.handle(3_080.0, disk(100, true)), None, "a write may be on its way");
        assert_eq!(migration.handle(3_100.0, synchronised()), Some(SourceAction::StartTransfer));
        assert_eq!(migration.handle(3_200.0, SourceEvent::Done), None);
        let paused = migration.handle(4_000.0, SourceEvent::Paused);
        let actions = rest(&mut migration, paused);
        assert_eq!(actions, FROM_THE_PAUSE_ON);
        let used = &migration.disks()[0];
        assert_eq!((used.copied_bytes, used.same_bytes, used.ready_ms), (100, 7, Some(2_000.0)));
        assert_eq!(used.wire_bytes, Some(50));
    }

    /// A migration whose transfer has copied its disk for 1 s.
    fn going_along() -> Migration {
        let mut migration = starting_disk_copies();
        assert_eq!(migration.handle(1_000.0, SourceEvent::DisksGoAlong), Some(SourceAction::StartTransfer));
        assert_eq!(migration.handle(1_000.0, SourceEvent::Done), None);
        assert_eq!(migration.stage(), Stage::CopyingDisks);
        migration
    }

    #[test]
    fn disks_that_go_along_are_followed_by_memory_and_end_before_the_record() {
        let mut migration = going_along();
        assert_eq!(migration.handle(50_000.0, disk(50, false)), None);
        assert_eq!(migration.handle(100_000.0, disk(100, true)), None, "memory follows by itself");
        assert_eq!(
            (migration.stage(), migration.timings().disks_ready_ms),
            (Stage::Sending, Some(100_000.0))
        );
        let paused = migration.handle(101_000.0, SourceEvent::Paused);
        let actions = rest(&mut migration, paused);
        assert_eq!(actions, FROM_THE_PAUSE_ON);
    }

    #[test]
    fn a_pause_that_comes_before_the_disks_were_seen_to_be_there_is_one() {
        let mut migration = going_along();
        assert_eq!(migration.handle(2_000.0, SourceEvent::Paused), Some(SourceAction::EndDiskCopies));
        assert_eq!(migration.timings().disks_ready_ms, Some(2_000.0));
    }

    #[test]
    fn disks_that_go_along_are_never_synchronised_and_end_in_time() {
        let mut migration = going_along();
        assert_eq!(migration.handle(2_000.0, rewritten(0)), None);
        assert_eq!(migration.handle(3_000.0, rewritten(1)), None, "nobody can have the writes wait");
        assert_eq!(migration.handle(4_000.0, rewritten(2)), None);
        let mentions = migration.log().iter().filter(|line| line.what.contains("blkdeviotune")).count();
        assert_eq!(mentions, 1);
        assert_eq!(migration.handle(120_000.0, rewritten(50)), Some(SourceAction::StopTransfer));
        let mut migration = going_along();
        assert_eq!(migration.handle(2_000.0, disk(50, false)), None);
        assert_eq!(migration.handle(62_000.0, disk(50, false)), Some(SourceAction::StopTransfer));
        let mut migration = going_along();
        assert_eq!(migration.handle(2_000.0, SourceEvent::CancelRequested), Some(SourceAction::StopTransfer));
        let mut migration = going_along();
        let broke = SourceEvent::TransferFailed(Problem::failed("disk full"));
        assert_eq!(migration.handle(2_000.0, broke), Some(SourceAction::StopTransfer));
    }

    #[test]
    fn a_copy_that_breaks_or_cannot_be_ended_leaves_the_vm_here() {
        let undone = [
            SourceAction::StopTransfer,
            SourceAction::ResumeOnSource,
            SourceAction::DiscardTarget,
            SourceAction::PutBack,
            SourceAction::LookAtVm,
            SourceAction::Finish,
        ];
        let mut migration = copying_disks();
        let broke = migration.handle(2_000.0, SourceEvent::TransferFailed(Problem::failed("disk full")));
        assert_eq!(rest(&mut migration, broke), undone);
        let mut migration = copying_disks();
        migration.handle(3_000.0, disk(100, true));
        migration.handle(3_050.0, SourceEvent::Done);
        migration.handle(3_100.0, synchronised());
        migration.handle(3_200.0, SourceEvent::Done);
        assert_eq!(migration.handle(4_000.0, SourceEvent::Paused), Some(SourceAction::EndDiskCopies));
        let failed = migration.handle(5_000.0, SourceEvent::Failed(Problem::failed("it lags")));
        assert_eq!(rest(&mut migration, failed), undone);
        assert_eq!(migration.outcome(), Some(Outcome::Failed));
    }

    #[test]
    fn one_that_is_cancelled_is_undone_from_each_part() {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(2_000.0, SourceEvent::CancelRequested), Some(SourceAction::StopTransfer));
        let mut migration = copying_disks();
        migration.handle(2_000.0, disk(100, true));
        assert_eq!(migration.handle(2_050.0, SourceEvent::CancelRequested), None, "an action is under way");
        assert_eq!(migration.handle(2_100.0, SourceEvent::Done), Some(SourceAction::StopTransfer));
        assert_eq!(
            outpaced().handle(4_000.0, SourceEvent::CancelRequested),
            Some(SourceAction::StopTransfer)
        );
    }

    #[test]
    fn a_vm_that_writes_as_fast_as_is_copied_has_its_writes_wait_until_all_is_there() {
        let mut migration = outpaced();
        for (at_ms, bytes) in [(4_000.0, 60), (9_000.0, 20), (10_000.0, 0)] {
            assert_eq!(migration.handle(at_ms, left(bytes)), None);
        }
        assert_eq!(migration.handle(10_100.0, synchronised()), Some(SourceAction::StartTransfer));
        assert_eq!(migration.timings().disks_ready_ms, Some(10_100.0));
        assert!(migration.log().iter().any(|line| line.what.contains("waits for the target")));
    }

    /// The same, of a hypervisor that cannot have its writes wait.
    fn held_back() -> Migration {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(2_000.0, rewritten(0)), None);
        assert_eq!(migration.handle(2_900.0, rewritten(1)), Some(SourceAction::SynchroniseDisks));
        assert_eq!(migration.write_limit(), None);
        assert_eq!(migration.handle(3_000.0, SourceEvent::WritesHeldBack), None);
        migration
    }

    #[test]
    fn writes_that_cannot_wait_are_held_back_until_the_copies_keep_up_and_before_the_pause() {
        let mut migration = held_back();
        let first = migration.write_limit().expect("it has written as fast as is copied");
        assert!(
            migration.progress(3_000.0).disks[0].writes_held
                && !migration.progress(3_000.0).disks[0].writes_wait
        );
        for tenth in 1..=4_u32 {
            assert_eq!(migration.handle(3_000.0 + 100.0 * f64::from(tenth), left(0)), None);
        }
        assert_eq!(migration.handle(3_600.0, left(0)), Some(SourceAction::StartTransfer));
        assert_eq!(migration.handle(3_700.0, SourceEvent::Done), None);
        assert_eq!(migration.handle(3_800.0, left(0)), None);
        assert!(!migration.holds_pause(3_800.0));
        let behind =
            |copied_bytes| at(DiskState { copied_bytes, total_bytes: copied_bytes + 900_000, ..begun() });
        for second in 4..7_u32 {
            migration.handle(1_000.0 * f64::from(second), behind(u64::from(second) * 10_000_000));
        }
        assert!(migration.holds_pause(6_000.0));
        assert!(migration.write_limit().unwrap().bytes_per_s <= first.bytes_per_s);
        let paused = migration.handle(7_000.0, SourceEvent::Paused);
        let actions = rest(&mut migration, paused);
        assert_eq!(actions, FROM_THE_PAUSE_ON);
        assert_eq!(migration.write_limit(), None);
    }

    #[test]
    fn a_vm_that_writes_little_is_held_back_near_its_pause_only() {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(3_000.0, disk(100, true)), Some(SourceAction::SynchroniseDisks));
        assert_eq!(migration.handle(3_050.0, SourceEvent::WritesHeldBack), None);
        for tenth in 1..=6_u32 {
            migration.handle(3_000.0 + 100.0 * f64::from(tenth), disk(100, true));
        }
        assert_eq!((migration.stage(), migration.write_limit()), (Stage::Sending, None));
        assert_eq!(migration.handle(3_700.0, SourceEvent::Done), None);
        assert!(migration.holds_pause(3_700.0));
        let second_round = Transferred { rounds: 2, ..Transferred::default() };
        migration.handle(3_800.0, SourceEvent::Progress(second_round, vec![]));
        migration.handle(3_850.0, disk(100, true));
        assert!(migration.write_limit().is_some() && migration.holds_pause(3_850.0));
        for tenth in 1..=6_u32 {
            migration.handle(3_850.0 + 100.0 * f64::from(tenth), disk(100, true));
        }
        assert!(!migration.holds_pause(4_500.0));
    }

    #[test]
    fn writes_that_are_held_back_in_vain_are_not_for_long() {
        let mut migration = held_back();
        let behind =
            |copied_bytes| at(DiskState { copied_bytes, total_bytes: copied_bytes + 900_000, ..begun() });
        for second in 4..64_u32 {
            assert_eq!(migration.handle(1_000.0 * f64::from(second), behind(second.into())), None);
        }
        assert_eq!(migration.handle(64_000.0, behind(64)), Some(SourceAction::StopTransfer));
        let error = migration.error().unwrap().to_string();
        assert!(error.contains("does not stay small"), "{error}");
        assert_eq!(migration.write_limit(), None, "whoever stops the copies has let them go");
        assert_eq!(
            held_back().handle(4_000.0, SourceEvent::CancelRequested),
            Some(SourceAction::StopTransfer)
        );
    }

    #[test]
    fn writes_that_wait_for_the_target_do_not_do_so_in_vain() {
        let mut migration = outpaced();
        let written =
            |copied_bytes| at(DiskState { copied_bytes, total_bytes: copied_bytes + 60, ..begun() });
        for second in 4..64_u32 {
            assert_eq!(migration.handle(1_000.0 * f64::from(second), written(second.into())), None);
        }
        assert_eq!(migration.handle(64_000.0, written(64)), Some(SourceAction::StopTransfer));
        let error = migration.error().unwrap().to_string();
        assert!(error.contains("has not shrunk for 60 s"), "{error}");

        let mut migration = outpaced();
        let broke = SourceEvent::TransferFailed(Problem::failed("the target's disk is full"));
        assert_eq!(migration.handle(4_000.0, broke), Some(SourceAction::StopTransfer));
        // 20 s, and 100 s for the disk.
        let mut migration = outpaced();
        for second in 4..120_u32 {
            assert_eq!(migration.handle(1_000.0 * f64::from(second), left(900 - u64::from(second))), None);
        }
        assert_eq!(migration.handle(120_000.0, left(1)), Some(SourceAction::StopTransfer));
    }

    #[test]
    fn disks_that_stand_still_or_take_too_long_are_given_up() {
        let mut migration = copying_disks();
        assert_eq!(migration.handle(2_000.0, disk(50, false)), None);
        assert_eq!(migration.handle(61_000.0, disk(50, false)), None);
        assert_eq!(migration.handle(62_000.0, disk(50, false)), Some(SourceAction::StopTransfer));
        assert!(migration.error().unwrap().to_string().contains("for 60 s"));
        let mut migration = copying_disks();
        for second in 0..200_u32 {
            let next = migration.handle(1_000.0 * f64::from(second), disk(second.into(), false));
            if next.is_some() {
                assert!(second > 100, "10 MB/s are granted: {second}");
                return;
            }
        }
        panic!("it goes on without end");
    }
}
