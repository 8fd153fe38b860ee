//! The target's side of a migration: what its agent does with the source's orders, and what it does on its own. Events
//! in, actions out; no I/O, no clock.
//!
//! Three machines, each of which carries one thing to its end:
//! - [`order`]: one order, whoever gives it.
//! - [`silence`]: looks after one VM on its way, asks a source that has fallen silent, and gives up what it may give up.
//! - [`resume`]: when the agent starts, a VM that was recorded to run here, and that may not run yet.
//!
//! [`permit`] says which VM may come, [`promises`] whether there is memory for it, [`steps`] which orders are accepted
//! before it may run here, and [`start`] which VMs an agent takes over when it starts, and in which order.
//!
//! The rules that the tests and the simulation hold them to:
//! - A VM recorded as discarded never runs here. A VM recorded to run is never discarded, unless its hypervisor refused
//!   to run it, or had ended before the order, while the source could still have it back.
//! - The VM runs here only once that is recorded, and everything that it needs is here.
//! - What others may let run, such as libvirt's users, they cannot before the source has recorded the hand-over. If they
//!   have, it is recorded to run, and its source never has it back.
//! - The target reports that it runs here only once its hypervisor has said so, or how it has ended.
//! - Nobody waits for a hypervisor that may itself wait for a page: the connection that brings the page must come through.

pub mod order;
pub mod permit;
pub mod promises;
pub mod resume;
pub mod silence;
pub mod start;
pub mod steps;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How long a hypervisor may take for an answer that may itself wait for a page, in ms.
pub const LOOK_WITHIN_MS: u64 = 1_000;

/// The target's decision about a VM on its way, by its journal. All but the first are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncomingState {
    /// Neither may run nor was given up.
    Waiting,
    /// The source has handed it over: it runs here, or will as soon as this agent can make it.
    Running,
    /// It runs here, or did and has left, was removed, or was started again.
    Finished,
    /// Given up; it never ran here and never will under this identifier.
    Discarded,
}

/// What the target says of a VM on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IncomingView {
    /// Its state is not all here.
    Waiting,
    /// All state is here; it waits for the hand-over.
    Ready,
    /// With post-copy: what it needs to run is here, and the rest of its memory is still to come. It waits for the
    /// source's order to run.
    ReadyInPart,
    /// It runs here.
    Running,
    /// With post-copy: it was told to run here, and a part of its memory is still to come.
    RunningInPart,
    /// It was told to run here, and its QEMU has ended since.
    Ended,
    /// It was given up and never ran here.
    Discarded,
    /// There is no record of it here. It may have been lost: this promises nothing.
    Unknown,
}

/// How much of a VM its hypervisor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// Not enough to run.
    Incomplete,
    /// With post-copy: what it needs to run. The rest follows.
    InPart,
    /// All that was sent. The last of it is taken by the order to run ([`order::OrderAction::TakeLast`]).
    Untaken,
    /// All.
    Whole,
    /// Not enough to run, and no more comes: the transfer has failed.
    Failed,
}

impl Received {
    /// Whether what it needs to run is here.
    pub fn is_enough(self) -> bool {
        match self {
            Self::InPart | Self::Untaken | Self::Whole => true,
            Self::Incomplete | Self::Failed => false,
        }
    }
}

/// What a target's agent remembers of a VM on its way. No crash outlasts it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Memory {
    heard_ms: f64,
    is_whole: bool,
    came_in_parts: bool,
    allows_post_copy: bool,
    run: Run,
    last_attempt: Option<u64>,
}

/// How far a VM is on its way to run here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    NotOrdered,
    Ordered,
    Let,
    OrderedEarlier,
}

impl Memory {
    /// Begins for a VM whose source was last heard at this time.
    pub fn new(heard_ms: f64) -> Self {
        Self {
            heard_ms,
            is_whole: false,
            came_in_parts: false,
            allows_post_copy: false,
            run: Run::NotOrdered,
            last_attempt: None,
        }
    }

    /// Begins for a VM that was ordered to run here in an earlier run of the agent, and then lacked a part. It is one of
    /// this host's VMs.
    pub fn of_part(heard_ms: f64) -> Self {
        Self { allows_post_copy: true, came_in_parts: true, run: Run::OrderedEarlier, ..Self::new(heard_ms) }
    }

    /// It may run here before all its memory does.
    pub fn allow_post_copy(&mut self) {
        self.allows_post_copy = true;
    }

    /// Its source has said something.
    pub fn hear(&mut self, now_ms: f64) {
        self.heard_ms = now_ms;
    }

    /// What its hypervisor has said.
    pub fn note(&mut self, received: Received) {
        self.is_whole |= matches!(received, Received::Whole | Received::Untaken);
        self.came_in_parts |= received == Received::InPart;
    }

    /// Its hypervisor has the order to run it: that is recorded.
    pub fn order_to_run(&mut self) {
        if self.run == Run::NotOrdered {
            self.run = Run::Ordered;
        }
    }

    /// It is one of this host's VMs: its hypervisor has said that it runs, or how it has ended.
    pub fn let_run(&mut self) {
        self.run = Run::Let;
    }

    /// Whether all of its state is known to be here.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether its hypervisor was ever told to run it.
    pub fn is_ordered_to_run(&self) -> bool {
        self.run != Run::NotOrdered
    }

    /// Whether it was ordered to run here, and nobody has said yet that it does.
    pub fn awaits_run(&self) -> bool {
        self.run == Run::Ordered
    }

    /// Whether its hypervisor has said that it runs, or how it has ended.
    pub fn is_let_run(&self) -> bool {
        self.run == Run::Let
    }

    /// Whether it was ordered to run in an earlier run of the agent. Then [`resume`] sees to it that it does.
    pub fn was_ordered_earlier(&self) -> bool {
        self.run == Run::OrderedEarlier
    }

    /// Whether what it needs to run was here before the rest.
    pub fn came_in_parts(&self) -> bool {
        self.came_in_parts
    }

    /// Whether a part of it was missing when its hypervisor last said so.
    pub fn lacks_part(&self) -> bool {
        self.came_in_parts && !self.is_whole
    }

    /// Whether its hypervisor may be mute since it waits for a page.
    pub fn may_wait_for_page(&self) -> bool {
        self.awaits_run() && self.came_in_parts
    }

    /// Takes up an attempt of its source to connect again; false where that has made a later one, whose connection this one
    /// would cut. 0.1.0 does not number its attempts: each is taken up.
    pub fn take_up_attempt(&mut self, attempt: Option<u64>) -> bool {
        let is_overtaken = attempt.is_some() && attempt <= self.last_attempt;
        self.last_attempt = self.last_attempt.max(attempt);
        !is_overtaken
    }

    /// For how long its source has said nothing, in ms.
    pub fn silent_for_ms(&self, now_ms: f64) -> f64 {
        now_ms - self.heard_ms
    }
}

/// What is known here about a VM's hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hypervisor {
    /// There was none, or nobody knows of one any more.
    None,
    /// It has ended.
    Ended,
    /// It lives, and has not answered this run of the agent yet.
    Unresponsive,
    /// It can be asked.
    There,
}

/// Whether a VM may run here before all its memory does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostCopy {
    /// It may not.
    Refused,
    /// It may; and it is the last migration that brought a VM of this name.
    Allowed,
    /// It might; and a later migration brought the VM again.
    Past,
}

/// What is known of a migration when an order comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownMigration {
    /// By the journal; none where that has no record of it.
    pub state: Option<IncomingState>,
    /// The VM is one of this host's.
    pub is_adopted: bool,
    /// It is recorded to run, and its hypervisor has not said yet that it does.
    pub awaits_run: bool,
    /// See [`Memory::lacks_part`].
    pub lacks_part: bool,
    /// By the journal.
    pub post_copy: PostCopy,
    /// What the VM's hypervisor says.
    pub hypervisor: Hypervisor,
}

/// What a target finds out about a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationFacts {
    /// By the journal; none where that has no record of it.
    pub state: Option<IncomingState>,
    /// The VM is one of this host's.
    pub is_adopted: bool,
    /// By the journal, it may run here before all its memory does.
    pub allows_post_copy: bool,
    /// No later migration brought a VM of this name.
    pub is_last: bool,
    /// What the hypervisor says about the VM as one of this host's.
    pub of_vm: Hypervisor,
    /// What the hypervisor that waits for the VM on its way says.
    pub on_its_way: Hypervisor,
}

impl MigrationFacts {
    fn was_ordered_to_run(self) -> bool {
        matches!(self.state, Some(IncomingState::Running | IncomingState::Finished))
    }
}

impl KnownMigration {
    /// From what is found, and what this run of the agent remembers of a VM on its way.
    pub fn of(found: MigrationFacts, memory: Option<Memory>) -> Self {
        let hypervisor = match found.of_vm {
            Hypervisor::There | Hypervisor::Unresponsive if found.was_ordered_to_run() => found.of_vm,
            _ => found.on_its_way,
        };
        let awaits_run = match memory {
            _ if found.state != Some(IncomingState::Running) => false,
            Some(memory) if !memory.was_ordered_earlier() => !memory.is_let_run(),
            // An earlier run of the agent has recorded it, and the hypervisor has not obeyed this one yet.
            _ => matches!(hypervisor, Hypervisor::There | Hypervisor::Unresponsive),
        };
        let post_copy = match (found.allows_post_copy, found.is_last) {
            (false, _) => PostCopy::Refused,
            (true, true) => PostCopy::Allowed,
            (true, false) => PostCopy::Past,
        };
        Self {
            state: found.state,
            is_adopted: found.is_adopted,
            awaits_run,
            lacks_part: memory.is_some_and(|memory| memory.lacks_part()),
            post_copy,
            hypervisor,
        }
    }

    /// For a migration about which the journal has only the decision, or nothing.
    pub const fn by_decision_alone(state: Option<IncomingState>) -> Self {
        Self {
            state,
            is_adopted: false,
            awaits_run: false,
            lacks_part: false,
            post_copy: PostCopy::Refused,
            hypervisor: Hypervisor::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUND: MigrationFacts = MigrationFacts {
        state: Some(IncomingState::Running),
        is_adopted: true,
        allows_post_copy: true,
        is_last: true,
        of_vm: Hypervisor::None,
        on_its_way: Hypervisor::There,
    };

    #[test]
    fn that_it_runs_is_awaited_until_its_hypervisor_has_said_so() {
        let awaits = |found, memory| KnownMigration::of(found, memory).awaits_run;
        let mut memory = Memory::new(0.0);
        memory.order_to_run();
        assert!(awaits(FOUND, Some(memory)));
        assert!(!awaits(MigrationFacts { state: Some(IncomingState::Waiting), ..FOUND }, Some(memory)));
        memory.let_run();
        assert!(!awaits(FOUND, Some(memory)));
        // An earlier run of the agent ordered it, or nobody knows.
        for earlier in [Some(Memory::of_part(0.0)), None] {
            assert!(awaits(FOUND, earlier));
            assert!(!awaits(MigrationFacts { on_its_way: Hypervisor::Ended, ..FOUND }, earlier));
        }
    }

    #[test]
    fn the_hypervisor_of_one_that_was_told_is_that_of_the_hosts_vm() {
        let hypervisor = |found| KnownMigration::of(found, None).hypervisor;
        let unresponsive = MigrationFacts { of_vm: Hypervisor::Unresponsive, ..FOUND };
        assert_eq!(hypervisor(unresponsive), Hypervisor::Unresponsive);
        assert_eq!(hypervisor(FOUND), Hypervisor::There);
        // An earlier VM of that name is another VM.
        let waiting = MigrationFacts {
            state: Some(IncomingState::Waiting),
            on_its_way: Hypervisor::None,
            ..unresponsive
        };
        assert_eq!(hypervisor(waiting), Hypervisor::None);
    }

    #[test]
    fn a_later_migration_of_the_vm_ends_what_post_copy_allowed() {
        let post_copy = |found| KnownMigration::of(found, None).post_copy;
        assert_eq!(post_copy(FOUND), PostCopy::Allowed);
        assert_eq!(post_copy(MigrationFacts { is_last: false, ..FOUND }), PostCopy::Past);
        assert_eq!(post_copy(MigrationFacts { allows_post_copy: false, ..FOUND }), PostCopy::Refused);
    }
}
