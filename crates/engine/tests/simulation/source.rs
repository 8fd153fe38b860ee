//! The source's host: its journal, and its agent's life.

use drainpipe_engine::migration::{Limits, Migration};
use drainpipe_engine::result::Outcome;

use crate::executor::Executor;
use crate::network::HandOver;
use crate::planted::Planted;
use crate::qemu::SourceQemu;
use crate::world::{Life, Sight, World};

pub(crate) const LIMITS: Limits =
    Limits { total_ms: 60_000.0, held_ms: 60_000.0, stall_ms: 20_000.0, decision_ms: 5_000.0 };

/// What the source's journal says of a migration.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Record {
    pub handed_over: bool,
    /// The hand-over is forbidden, or was taken back.
    pub is_revoked: bool,
    pub outcome: Option<Outcome>,
    /// The operator said that its target was lost.
    pub is_reclaimed: bool,
}

#[derive(Debug)]
pub(crate) struct Source {
    pub life: Life,
    /// Which life of the agent it is.
    pub lives: u32,
    /// When it wakes up, or is started anew.
    pub wakes_ms: f64,
    pub disk_full_until_ms: f64,
    /// By the number of the migration.
    pub journal: Vec<Record>,
    pub qemu: Option<SourceQemu>,
    /// By a fault, and not because somebody ended it.
    pub is_copy_lost: bool,
    /// It has told the target to discard a copy that does not answer, since its own is there.
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
            qemu: Some(SourceQemu::booted(1)),
            is_copy_lost: false,
            has_given_up_target: false,
            executor: None,
            is_network_changed: false,
        }
    }

    pub(crate) fn has_handed_over(&self) -> bool {
        self.journal.iter().any(|record| record.handed_over)
    }

    /// The migration without a result.
    pub(crate) fn open_migration(&self) -> Option<usize> {
        self.journal.iter().position(|record| record.outcome.is_none())
    }

    fn hand_over(&self, migration: usize) -> HandOver {
        let goes_on = self.executor.as_ref().is_some_and(|executor| executor.goes_on(migration));
        let Some(record) = self.journal.get(migration) else { return HandOver::Refused };
        if record.outcome.map_or(record.handed_over, |outcome| outcome == Outcome::Completed) {
            HandOver::HandedOver
        } else if record.outcome.is_none() && goes_on {
            HandOver::Pending
        } else {
            HandOver::Refused
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
        self.source.executor = Some(Executor::new(number, migration, first, self.now_ms));
    }

    pub(crate) fn tell_hand_over(&self, migration: usize) -> HandOver {
        self.source.hand_over(migration)
    }

    pub(crate) fn crash_source(&mut self, for_ms: f64) {
        if self.source.life == Life::Down {
            return;
        }
        self.source.life = Life::Down;
        self.source.wakes_ms = self.now_ms + for_ms;
        self.source.executor = None;
        self.operator.says_lost = false;
        self.cut_tasks(None);
    }

    /// The guards are processes of their host too.
    pub(crate) fn reboot_source(&mut self, for_ms: f64) {
        self.lose(crate::world::Host::Source);
        self.dismiss_all_guards();
        self.source.is_network_changed = false;
        self.crash_source(for_ms);
        self.source.wakes_ms = self.source.wakes_ms.max(self.now_ms + for_ms);
    }

    pub(crate) fn start_source(&mut self) {
        self.source.life = Life::Up;
        self.source.lives += 1;
        self.source.is_network_changed = false;
        // Room was made, if that is what was missing.
        if self.source.disk_full_until_ms.is_infinite() {
            self.source.disk_full_until_ms = self.now_ms;
        }
        let Some(number) = self.source.open_migration() else { return };
        // Until its QEMU answers, a VM is out of reach: the agent has to be started once more.
        if self.source.qemu.is_some() && !self.answers(crate::world::Host::Source) {
            return;
        }
        let handed_over =
            self.source.journal[number].handed_over && self.planted != Planted::ForgottenHandOver;
        if handed_over {
            self.saw(Sight::RecoveredHandOver);
        }
        let (migration, first) = Migration::recover(LIMITS, handed_over, 0.0);
        self.source.executor = Some(Executor::new(number, migration, first, self.now_ms));
    }
}
