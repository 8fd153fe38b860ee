//! A drain under way: events in, actions out. No I/O, no clock: the caller says what time it is.
//!
//! ```text
//!           Begin              Prepared           Release           Paused, Sent           Ended
//! waiting ─────────► preparing ────────► ready ─────────► transferring ─────────► finishing ────────► moved
//!    ▲                   │                 │                   │                      │
//!    │  Plan, Planned    ▼                 ▼                   ▼                      ▼
//!    └──────────────── failed, while it may be tried again ◄───┴──────────────────────┤
//!    │                                                                                ▼
//!    └► left out: no host can take it              moved, or failed ◄────────────── in doubt
//! ```
//!
//! With disks: ready ► copying disks ► transferring, as soon as the disks are there.
//!
//! Left: VMs that were waiting, left out or failed, and that somebody else has then moved.
//!
//! What the executor must do:
//! - Each [`DrainAction::Begin`] is answered by exactly one [`DrainEvent::Ended`], whatever happens, and by one
//!   [`DrainEvent::Prepared`] before it unless it ends first. Other events of a VM come in their order, or not
//!   at all; none comes after its `Ended`, but for [`DrainEvent::Settled`] where that was in doubt.
//! - Each [`DrainAction::Plan`] is answered by [`DrainEvent::Planned`] or [`DrainEvent::NotPlanned`], within a bound. The view
//!   of the new plan is completed by the [`Drain::standing`] of the moment at which the action was given.
//! - An event may be repeated, but only until its VM is begun again, or another plan is asked for.
//! - The time never goes back. It may stand still, or be hours later at the next event.
//! - [`DrainEvent::Tick`] comes until [`DrainAction::Finish`].
//!
//! What it may rely on: no VM is begun while it is under way, nothing is begun while a plan is made, and
//! `Finish` comes once, when nothing is under way.

mod copying;
mod entry;
mod planning;
#[cfg(test)]
mod tests;
mod turns;

use super::concurrency::Concurrency;
use super::copy_concurrency::CopyConcurrency;
use super::disks::DrainedDisk;
use super::eta::Eta;
use super::limits::DrainLimits;
use super::pace::Pace;
use super::plan::DrainPlan;
use super::status::{DrainState, DrainStatus, MoveStatus};
use super::stay::Stay;
use crate::problem::Problem;
use entry::{Entry, Patience, Stage};
use planning::Planning;
pub use planning::Standing;

/// What the executor is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DrainAction {
    /// Begin the migration of this VM; it must wait before the first byte until it is released.
    Begin {
        /// The VM.
        vm: String,
        /// Where it goes.
        target: String,
        /// Whether it may run there before all its memory is there.
        post_copy: bool,
    },
    /// Let it leave the links to another one that is about to be paused, from when it is released. Until
    /// [`DrainAction::TakeAll`], and for some seconds at most.
    GiveWay {
        /// The VM.
        vm: String,
    },
    /// Let it have all of the links.
    TakeAll {
        /// The VM.
        vm: String,
    },
    /// Let its disks and its memory go over the links.
    Release {
        /// The VM.
        vm: String,
    },
    /// Have its migration undone, where that is still possible: the drain closes, or the VM does not converge.
    Cancel {
        /// The VM.
        vm: String,
    },
    /// Look again at the hosts and plan again, for the VMs that have not been begun; see
    /// [`Drain::standing`]. Answered by [`DrainEvent::Planned`].
    Plan,
    /// It is over; nothing is under way.
    Finish,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq)]
pub enum DrainEvent {
    /// [`DrainAction::Plan`] is done.
    Planned(DrainPlan),
    /// [`DrainAction::Plan`] failed.
    NotPlanned(Problem),
    /// The migration of this VM has this identifier.
    Begun {
        /// The VM.
        vm: String,
        /// Identifier of its migration.
        migration: String,
    },
    /// Its target takes no more VMs for now, of this host and others. It goes on by itself.
    Busy {
        /// The VM.
        vm: String,
    },
    /// Steps 1 to 5 of this VM are done: it waits to be released.
    Prepared {
        /// The VM.
        vm: String,
    },
    /// So much of this VM has arrived, since its migration began.
    Arrived {
        /// The VM.
        vm: String,
        /// Bytes that the target's host has confirmed.
        bytes: u64,
    },
    /// So much of the disks of this VM has been copied, since its migration began.
    DisksCopied {
        /// The VM.
        vm: String,
        /// What was gone through.
        bytes: u64,
    },
    /// All of this VM's disks is there, and its memory follows.
    MemoryFollows {
        /// The VM.
        vm: String,
    },
    /// Little of this VM is left to send, by its migration.
    Ending {
        /// The VM.
        vm: String,
    },
    /// This VM is paused for its last bytes.
    Paused {
        /// The VM.
        vm: String,
    },
    /// This VM runs on its target, and the rest of its memory is on the links.
    RestFollows {
        /// The VM.
        vm: String,
    },
    /// All of this VM has been sent; it is not resumed yet.
    Sent {
        /// The VM.
        vm: String,
    },
    /// The migration of this VM is over, or could not begin.
    Ended {
        /// The VM.
        vm: String,
        /// How.
        end: MoveEnd,
    },
    /// It is now known where this VM runs: its target has answered at last.
    Settled {
        /// The VM.
        vm: String,
        /// How its migration has ended.
        end: MoveEnd,
    },
    /// This VM, which was not under way, has left by a migration that was not this drain's.
    Left {
        /// The VM.
        vm: String,
        /// Where to.
        departure: Departure,
    },
    /// VMs leave this host from now on by migrations that are not this drain's.
    OthersLeave {
        /// How many.
        count: u8,
    },
    /// Somebody wants it cancelled.
    CancelRequested,
    /// Time has passed. Comes five times a second.
    Tick,
}

/// How the migration of a VM ended.
#[derive(Debug, Clone, PartialEq)]
pub enum MoveEnd {
    /// It runs on the target.
    Completed {
        /// From the first byte to the last, in ms.
        transfer_ms: f64,
    },
    /// It runs here.
    Failed(Problem),
    /// It has ended here, and did not run on the target.
    Lost(Problem),
    /// It runs here, because its migration was cancelled.
    Cancelled(Problem),
    /// It is not known where it runs, until the target answers.
    InDoubt(Problem),
    /// It could not begin: the VM had left by a migration that was not this drain's.
    Left(Departure),
}

/// Where a VM has gone by a migration that was not a drain's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departure {
    /// The host on which it runs.
    pub target: String,
    /// Identifier of the migration.
    pub migration: String,
    /// The VM's memory.
    pub memory_bytes: u64,
}

impl Departure {
    /// The view of this VM, which no plan was to move.
    pub fn status_of(self, vm: String) -> MoveStatus {
        Entry::departed(vm, self).status()
    }
}

/// Why nothing new is begun any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Closing {
    Cancelled,
    DeadlinePassed,
}

/// A drain under way.
#[derive(Debug)]
pub struct Drain {
    limits: DrainLimits,
    begun_ms: f64,
    predicted_ms: f64,
    predicted_most_ms: Option<f64>,
    // In the order of the plan.
    entries: Vec<Entry>,
    // VMs that were never planned to move.
    stays: Vec<Stay>,
    // Those of them that may go when room comes free.
    await_room: bool,
    concurrency: Concurrency,
    copy_concurrency: CopyConcurrency,
    // VMs that leave this host by migrations of somebody else.
    others: u8,
    pace: Pace,
    eta: Eta,
    // How much was copied of disks.
    copied_bytes: u64,
    // How many VMs have been released so far.
    turns: u64,
    planning: Planning,
    // Since a VM has moved, or was on its way to leave room.
    looks: u8,
    looked_ms: f64,
    cancel_requested: bool,
    ended: Option<(f64, DrainState)>,
}

impl Drain {
    /// Begins what the plan says, while so many VMs leave this host by migrations of somebody else; gives the first
    /// actions.
    pub fn begin(plan: DrainPlan, limits: DrainLimits, others: u8, now_ms: f64) -> (Self, Vec<DrainAction>) {
        let limits = DrainLimits {
            outbound: limits.outbound.max(1),
            inbound: limits.inbound.max(1),
            attempts: limits.attempts.max(1),
            ..limits
        };
        let most = limits.most_on_links(plan.moves.iter().map(|planned| planned.target.as_str()));
        let entries: Vec<Entry> = plan.moves.iter().cloned().map(Entry::new).collect();
        let mut drain = Self {
            limits,
            begun_ms: now_ms,
            predicted_ms: plan.predicted_ms,
            predicted_most_ms: plan.predicted_most_ms,
            concurrency: plan.concurrency(most, now_ms),
            copy_concurrency: plan.copy_concurrency(),
            others,
            pace: Pace::default(),
            eta: Eta::planned(entries.iter().map(Entry::load), plan.predicted_ms),
            copied_bytes: 0,
            turns: 0,
            entries,
            stays: plan.stays,
            await_room: !plan.await_room.is_empty(),
            planning: Planning::Not,
            looks: 0,
            looked_ms: now_ms,
            cancel_requested: false,
            ended: None,
        };
        let actions = drain.next_actions(now_ms);
        (drain, actions)
    }

    /// Where the VMs go that have not ended by now.
    fn targets_left(&self) -> impl Iterator<Item = &str> {
        let is_left = |entry: &&Entry| entry.stage == Stage::Waiting || entry.stage.is_under_way();
        self.entries.iter().filter(is_left).map(|entry| entry.planned.target.as_str())
    }

    /// Takes an event; says what to do next.
    pub fn handle(&mut self, now_ms: f64, event: DrainEvent) -> Vec<DrainAction> {
        if self.ended.is_some() {
            return vec![];
        }
        match event {
            DrainEvent::Planned(plan) => self.planned(now_ms, plan),
            DrainEvent::NotPlanned(problem) => self.not_planned(now_ms, &problem),
            DrainEvent::Begun { vm, migration } => self.of(&vm, |entry| entry.migration = Some(migration)),
            DrainEvent::Busy { vm } => self.of(&vm, Entry::busy),
            DrainEvent::Prepared { vm } => self.of(&vm, Entry::prepared),
            DrainEvent::Arrived { vm, bytes } => self.arrived(now_ms, &vm, bytes),
            DrainEvent::DisksCopied { vm, bytes } => self.disks_copied(&vm, bytes),
            DrainEvent::MemoryFollows { vm } => self.of(&vm, Entry::memory_follows),
            DrainEvent::Ending { vm } => self.of(&vm, |entry| entry.ending(now_ms)),
            DrainEvent::Paused { vm } => self.of(&vm, |entry| entry.paused(now_ms)),
            DrainEvent::RestFollows { vm } => self.of(&vm, Entry::rest_follows),
            DrainEvent::Sent { vm } => self.of(&vm, |entry| entry.sent(now_ms)),
            DrainEvent::Ended { vm, end } => self.move_ended(now_ms, &vm, Stage::is_under_way, end),
            DrainEvent::Settled { vm, end } => {
                self.move_ended(now_ms, &vm, |stage| stage == Stage::InDoubt, end);
            }
            DrainEvent::Left { vm, departure } => self.left(&vm, departure),
            DrainEvent::OthersLeave { count } => self.others = count,
            DrainEvent::CancelRequested => self.cancel_requested = true,
            DrainEvent::Tick => self.tick(now_ms),
        }
        self.next_actions(now_ms)
    }

    fn of(&mut self, vm: &str, change: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.planned.vm == vm) {
            change(entry);
        }
    }

    fn tick(&mut self, now_ms: f64) {
        if self.entries.iter().any(|entry| entry.stage.is_on_links()) {
            self.pace.sample(now_ms);
        }
        self.eta.look(now_ms, self.entries.iter().map(Entry::load));
        self.observe_copies(now_ms);
        // Beside copies of disks, what arrives of memory says nothing.
        let is_alone = !self.entries.iter().any(|entry| entry.stage == Stage::CopyingDisks);
        let on_links = if is_alone { self.staying_on_links(now_ms) } else { 0 };
        // What is sent after the pause is reported when the VM has moved. Up to a quarter of a second of all that the links
        // carry would be missing in what is measured up to then, and be added to what is measured from then on.
        let is_all_reported = !self.entries.iter().any(|entry| entry.is_being_taken_over(now_ms));
        let arrived_bytes =
            is_all_reported.then(|| self.pace.arrived_bytes().saturating_sub(self.copied_bytes));
        self.concurrency.observe(now_ms, arrived_bytes, on_links, self.turns);
    }

    /// Ends the move of a VM whose stage allows that; otherwise its end was reported before.
    fn move_ended(&mut self, now_ms: f64, vm: &str, can_end: fn(Stage) -> bool, end: MoveEnd) {
        let closing = self.closing(now_ms);
        let (attempts, planning) = (self.limits.attempts, self.planning);
        let is_this = |entry: &&mut Entry| entry.planned.vm == vm && can_end(entry.stage);
        let Some(entry) = self.entries.iter_mut().find(is_this) else { return };
        // What was in doubt has been counted.
        if let Some(ms) = entry.paused_for_ms(now_ms).filter(|_| entry.stage.is_under_way()) {
            self.eta.completed_in(ms);
        }
        if let MoveEnd::Failed(problem) = &end {
            entry.note_failure(problem);
        }
        match end {
            MoveEnd::Completed { transfer_ms } => {
                entry.moved(transfer_ms);
                self.looks = 0;
            }
            MoveEnd::Left(departure) => entry.left(departure),
            MoveEnd::InDoubt(problem) => entry.end(Stage::InDoubt, problem),
            MoveEnd::Lost(problem) => entry.end(Stage::Lost, problem),
            // Somebody else wants it to stay.
            MoveEnd::Cancelled(problem) if !entry.cancelled => entry.end(Stage::Failed, problem),
            MoveEnd::Failed(problem) | MoveEnd::Cancelled(problem) => match closing {
                Some(closing) if entry.cancelled => entry.give_up(closing),
                None if entry.cancelled && entry.patience == Patience::Yielded => {
                    entry.keep_place(planning == Planning::UnderWay);
                    self.endless_last();
                }
                None if entry.cancelled => {
                    let problem = entry.overstayed();
                    entry.end(Stage::Failed, problem);
                }
                None if entry.attempts < entry.attempts_allowed(attempts) => {
                    entry.try_again(problem, planning == Planning::UnderWay);
                    self.want_plan();
                }
                _ => entry.end(Stage::Failed, problem),
            },
        }
    }

    /// Nothing is to be done any more for a VM that somebody else has moved.
    fn left(&mut self, vm: &str, departure: Departure) {
        self.stays.retain(|stay| stay.vm != vm);
        match self.entries.iter_mut().find(|entry| entry.planned.vm == vm) {
            Some(entry) if entry.stage.is_here() => entry.left(departure),
            Some(_) => {}
            None => self.entries.push(Entry::departed(vm.into(), departure)),
        }
    }

    /// Gives every action that can be given; whatever has happened, nothing that may go on waits for more
    /// than the answers to actions that were given.
    fn next_actions(&mut self, now_ms: f64) -> Vec<DrainAction> {
        let mut actions = vec![];
        if let Some(closing) = self.closing(now_ms) {
            self.give_up(closing, &mut actions);
        } else {
            self.release(now_ms, &mut actions);
            self.look_again(now_ms);
            self.make_plan(&mut actions);
            self.begin_more(now_ms, &mut actions);
        }
        self.take_all(now_ms, &mut actions);
        self.take_back_endless(&mut actions);
        self.finish(now_ms, &mut actions);
        actions
    }

    /// Why nothing new is begun any more.
    fn closing(&self, now_ms: f64) -> Option<Closing> {
        if self.cancel_requested {
            return Some(Closing::Cancelled);
        }
        let total_ms = self.limits.total_ms?;
        (now_ms - self.begun_ms >= total_ms).then_some(Closing::DeadlinePassed)
    }

    fn give_up(&mut self, closing: Closing, actions: &mut Vec<DrainAction>) {
        if self.planning == Planning::Wanted {
            self.planning = Planning::Not;
        }
        for entry in &mut self.entries {
            let can_be_given_up = match entry.stage {
                Stage::Waiting => {
                    entry.give_up(closing);
                    false
                }
                Stage::Preparing | Stage::AwaitingPlace | Stage::Ready => true,
                Stage::CopyingDisks => closing == Closing::Cancelled,
                Stage::Transferring => closing == Closing::Cancelled || entry.patience != Patience::Untried,
                _ => false,
            };
            if can_be_given_up && !entry.cancelled {
                entry.cancelled = true;
                actions.push(DrainAction::Cancel { vm: entry.planned.vm.clone() });
            }
        }
    }

    /// A VM that does not converge keeps nobody waiting who may converge.
    fn take_back_endless(&mut self, actions: &mut Vec<DrainAction>) {
        let others_wait = self.entries.iter().any(|entry| {
            entry.patience == Patience::Untried
                && matches!(entry.stage, Stage::Waiting | Stage::Preparing | Stage::Ready)
        });
        // There is another way for it, or the links are wanted.
        let may_yield = others_wait || self.limits.post_copy;
        for entry in self.entries.iter_mut().filter(|entry| entry.overstays(may_yield)) {
            entry.cancelled = true;
            let yields = may_yield && entry.may_yield() && !entry.planned.post_copy;
            entry.patience = if yields { Patience::Yielded } else { Patience::Exhausted };
            actions.push(DrainAction::Cancel { vm: entry.planned.vm.clone() });
        }
    }

    fn endless_last(&mut self) {
        self.entries.sort_by_key(|entry| entry.patience != Patience::Untried);
    }

    fn finish(&mut self, now_ms: f64, actions: &mut Vec<DrainAction>) {
        let is_over =
            self.entries.iter().all(|entry| !entry.stage.is_under_way() && entry.stage != Stage::Waiting);
        let may_look = self.closing(now_ms).is_none() && self.may_look();
        if !is_over || may_look || self.planning != Planning::Not {
            return;
        }
        let has_gone = |entry: &Entry| matches!(entry.stage, Stage::Moved | Stage::Left);
        let is_empty = self.stays.is_empty() && self.entries.iter().all(has_gone);
        let state = match (is_empty, self.cancel_requested) {
            (true, _) => DrainState::Drained,
            (false, true) => DrainState::Cancelled,
            (false, false) => DrainState::Incomplete,
        };
        self.ended = Some((now_ms, state));
        actions.push(DrainAction::Finish);
    }

    fn count(&self, which: impl Fn(&Entry) -> bool) -> u8 {
        let count = self.entries.iter().filter(|entry| which(entry)).count();
        u8::try_from(count).unwrap_or(u8::MAX)
    }

    /// VMs that it has not moved, and is not moving.
    pub fn unmoved(&self) -> impl Iterator<Item = &str> {
        let here = self.entries.iter().filter(|entry| entry.stage.is_here());
        let stays = self.stays.iter().map(|stay| stay.vm.as_str());
        here.map(|entry| entry.planned.vm.as_str()).chain(stays)
    }

    /// VMs in doubt, and the migrations by which they may have left.
    pub fn in_doubt(&self) -> impl Iterator<Item = (&str, &str)> {
        let in_doubt = self.entries.iter().filter(|entry| entry.stage == Stage::InDoubt);
        in_doubt.filter_map(|entry| Some((entry.planned.vm.as_str(), entry.migration.as_deref()?)))
    }

    /// The disks that are copied with this VM, by the plan.
    pub fn disks_of(&self, vm: &str) -> &[DrainedDisk] {
        let entry = self.entries.iter().find(|entry| entry.planned.vm == vm);
        entry.map_or(&[], |entry| &entry.planned.disks)
    }

    /// How it ended; absent while it is under way.
    pub fn outcome(&self) -> Option<DrainState> {
        self.ended.map(|(_, state)| state)
    }

    /// How many transfers at a time carried most; absent while only one number was tried.
    pub fn found_transfers(&self) -> Option<u8> {
        self.concurrency.found()
    }

    /// Until everything that may move has moved; none while nobody knows.
    fn eta_ms(&self) -> Option<f64> {
        let one_completes =
            self.entries.iter().any(|entry| entry.stage.is_under_way() || entry.stage == Stage::Waiting);
        self.eta.left_ms(self.entries.iter().map(Entry::load), one_completes)
    }

    /// How far it has come.
    pub fn status(&self, now_ms: f64) -> DrainStatus {
        let (seen_ms, state) = match self.ended {
            Some(ended) => ended,
            None if self.cancel_requested => (now_ms, DrainState::Cancelling),
            None => (now_ms, DrainState::Moving),
        };
        let stay = |entry: &Entry| entry.as_stay();
        let mut moves: Vec<_> =
            self.entries.iter().filter(|entry| stay(entry).is_none()).map(Entry::status).collect();
        if let Some(next) = self.next_if_others_left_a_place(now_ms)
            && let Some(one) = moves.iter_mut().find(|one| one.vm == next)
        {
            let (others, outbound) = (self.others, self.limits.outbound);
            one.waits = Some(format!(
                "somebody else is moving {others} VMs away from this host, and no more than {outbound} may \
                leave at a time; it continues when there are fewer"
            ));
        }
        let is_over = self.ended.is_some();
        DrainStatus {
            state,
            moves,
            stays: self.stays.iter().cloned().chain(self.entries.iter().filter_map(stay)).collect(),
            transfers: self.concurrency.allowed(),
            rate_mbps: if is_over { 0.0 } else { self.pace.rate_mbps(now_ms) },
            links: vec![],
            elapsed_ms: seen_ms - self.begun_ms,
            predicted_ms: self.predicted_ms,
            predicted_most_ms: self.predicted_most_ms,
            eta_ms: if is_over { None } else { self.eta_ms() },
            obstacle: None,
            warnings: vec![],
        }
    }
}
