//! The source's host: its journal, and its agent's life.

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::{Limits, Migration, SourceState};

use crate::executor::Executor;
use crate::journals::Older;
use crate::network::SourceAnswer;
use crate::planted::Planted;
use crate::qemu::{Sending, SourceQemu};
use crate::world::{Host, Life, Sight, World};

pub(crate) const LIMITS: Limits = Limits {
    disks_take_longer: true,
    total_ms: 60_000.0,
    held_ms: 60_000.0,
    stall_ms: 20_000.0,
    decision_ms: 5_000.0,
    throttle_percent: 80,
};

/// What the source's journal says about a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Record {
    pub handed_over: bool,
    /// The hand-over is forbidden, or was taken back.
    pub is_revoked: bool,
    pub outcome: Option<Outcome>,
    /// The operator has declared its target lost.
    pub is_reclaimed: bool,
}

#[derive(Debug)]
pub(crate) struct Source {
    pub life: Life,
    /// Which life of the agent it is.
    pub lives: u32,
    /// When it wakes up, or is restarted.
    pub wakes_ms: f64,
    pub disk_full_until_ms: f64,
    /// The right journal, by the number of the migration, even while another one lies in its place.
    pub journal: Vec<Record>,
    /// The journal that lies in the right one's place.
    pub older: Option<Older>,
    /// The last generation of the journal that the runtime directory has heard of since the host booted.
    pub witnessed: Option<u64>,
    /// When the agent asks next what others know of its journal.
    pub tells_ms: f64,
    /// A hand-over that failed to be recorded, though the next life of the agent will find the record: it lies in the
    /// journal's log, past its end, until a later record overwrites it.
    pub found_later: Option<usize>,
    /// The last hand-over that was found that way.
    found: Option<usize>,
    pub qemu: Option<SourceQemu>,
    /// Whether a fault destroyed the copy, rather than somebody's order.
    pub is_copy_lost: bool,
    /// Whether the source has told the target to discard a copy that does not answer, because its own is there.
    pub has_given_up_target: bool,
    pub executor: Option<Executor>,
    pub is_network_changed: bool,
}

impl Source {
    pub(crate) fn new() -> Self {
        Self {
            life: Life::Up,
            lives: 0,
            wakes_ms: 0.0,
            disk_full_until_ms: 0.0,
            journal: vec![],
            older: None,
            witnessed: None,
            tells_ms: 0.0,
            found_later: None,
            found: None,
            qemu: Some(SourceQemu::booted(1)),
            is_copy_lost: false,
            has_given_up_target: false,
            executor: None,
            is_network_changed: false,
        }
    }

    /// Frees the vCPUs, as whoever finds them held back does without knowing by whom.
    pub(crate) fn lift_throttle(&mut self) {
        if let Some(qemu) = &mut self.qemu {
            qemu.is_throttled = false;
        }
    }

    pub(crate) fn has_handed_over(&self) -> bool {
        self.journal.iter().any(|record| record.handed_over)
    }

    /// Whether a hand-over was recorded when it was made. One that was found later may have left the VM where it was.
    pub(crate) fn has_handed_over_in_time(&self) -> bool {
        let mut records = self.journal.iter().enumerate();
        records.any(|(number, record)| record.handed_over && self.found != Some(number))
    }

    /// Whether nothing tells that the VM ran on here after a record that seemed to have failed, because its QEMU has
    /// ended.
    pub(crate) fn has_left_no_trace(&self) -> bool {
        self.qemu.is_none() && self.found.is_some_and(|number| self.journal[number].handed_over)
    }

    /// The migration without a result.
    pub(crate) fn open_migration(&self) -> Option<usize> {
        self.journal.iter().position(|record| record.outcome.is_none())
    }

    fn hand_over(&self, migration: usize, has_let_go: bool) -> SourceAnswer {
        let goes_on = self.executor.as_ref().is_some_and(|executor| executor.goes_on(migration));
        let Some(record) = self.journal.get(migration) else { return SourceAnswer::Refused };
        match record.outcome {
            Some(Outcome::Completed) => SourceAnswer::HandedOver,
            Some(Outcome::Lost) if record.handed_over => SourceAnswer::HandedOver,
            None if record.handed_over && has_let_go => SourceAnswer::HandedOver,
            None if record.handed_over || goes_on => SourceAnswer::Pending,
            Some(_) | None => SourceAnswer::Refused,
        }
    }
}

impl World {
    pub(crate) fn is_source_disk_full(&self) -> bool {
        self.now_ms < self.source.disk_full_until_ms
    }

    /// Somebody moves the VM.
    pub(crate) fn begin_migration(&mut self) {
        let (migration, first) = Migration::begin(LIMITS);
        let number = self.source.journal.len();
        self.source.has_given_up_target = false;
        self.source.journal.push(Record::default());
        self.source.found_later = None;
        self.source.executor = Some(Executor::new(number, migration, first, self.now_ms));
    }

    pub(crate) fn tell_hand_over(&self, migration: usize) -> SourceAnswer {
        self.source.hand_over(migration, self.source_state() == Some(SourceState::LetGo))
    }

    /// What the source's QEMU says about a VM whose hand-over is recorded; `None` if it does not answer.
    pub(crate) fn source_state(&self) -> Option<SourceState> {
        let is_believed = self.planted == Planted::VainHandOverBelieved;
        let Some(qemu) = &self.source.qemu else { return Some(SourceState::LetGo) };
        match qemu.sending {
            _ if is_believed => Some(SourceState::LetGo),
            _ if !self.answers(Host::Source) => None,
            _ if qemu.copy.runs => Some(SourceState::Kept),
            _ if self.is_domain() => self.domain_state(),
            // With post-copy, nothing that the target needs has been sent.
            Sending::PreSwitchover => Some(SourceState::Kept),
            // Nobody here knows any more how much of it the target has.
            Sending::Failed | Sending::Cancelled if qemu.is_post_copy => Some(SourceState::Astray),
            // It may still fail.
            Sending::Device { .. } | Sending::LastLook => None,
            _ => Some(SourceState::LetGo),
        }
    }

    pub(crate) fn crash_source(&mut self, for_ms: f64) {
        if self.source.life == Life::Down {
            return;
        }
        self.source.life = Life::Down;
        self.source.wakes_ms = self.now_ms + for_ms;
        self.stood_still_ms = 0.0;
        self.source.executor = None;
        self.operator.says_lost = false;
        self.leave_libvirt(Host::Source);
        self.cut_tasks(None);
    }

    /// The guards end too: they are processes of this host.
    pub(crate) fn reboot_source(&mut self, for_ms: f64) {
        self.lose(Host::Source);
        self.reboot_libvirt(Host::Source);
        self.forget_witness();
        self.dismiss_all_guards();
        self.source.is_network_changed = false;
        self.crash_source(for_ms);
        self.source.wakes_ms = self.source.wakes_ms.max(self.now_ms + for_ms);
    }

    pub(crate) fn start_source(&mut self) {
        self.source.life = Life::Up;
        self.source.lives += 1;
        if !self.believes_journal() {
            return;
        }
        self.source.is_network_changed = false;
        self.source.lift_throttle();
        if let Some(older) = self.source.older {
            return self.recover_by_older_journal(older);
        }
        if let Some(number) = self.source.found_later.take() {
            self.source.journal[number].handed_over = true;
            self.source.found = Some(number);
        }
        // If the disk was full, somebody has made room.
        if self.source.disk_full_until_ms.is_infinite() {
            self.source.disk_full_until_ms = self.now_ms;
        }
        let Some(number) = self.source.open_migration() else { return };
        // The agent cannot reach a VM whose QEMU does not answer, and has to be restarted once more.
        if self.source.qemu.is_some() && !self.answers(Host::Source) {
            return;
        }
        let handed_over =
            self.source.journal[number].handed_over && self.planted != Planted::ForgottenHandOver;
        if handed_over {
            self.saw(Sight::RecoveredHandOver);
        }
        self.recover(number, handed_over);
    }

    fn recover(&mut self, number: usize, handed_over: bool) {
        let (migration, first) = Migration::recover(LIMITS, handed_over);
        self.source.executor = Some(Executor::new(number, migration, first, self.now_ms));
    }

    /// Recovers as far as the older journal knows about a migration.
    fn recover_by_older_journal(&mut self, older: Older) {
        if let Some(last) = self.source.journal.len().checked_sub(1)
            && older.has_begun
        {
            self.recover(last, false);
        }
    }
}
