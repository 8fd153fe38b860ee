//! The target's host: its journal, its agent's life, and what the agent does by itself: it looks after the VMs on their
//! way, and after a start it lets run what it was ordered to run.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::host::facts::MemoryNeeds;
use drainpipe_engine::migration::target::resume::{
    AGAIN_AFTER_MS, Resumption, ResumptionAction, ResumptionEvent,
};
use drainpipe_engine::migration::target::silence::{
    HandOverAnswer, SILENCE_MS, WATCH_EVERY_MS, Watch, WatchAction, WatchEvent,
};
use drainpipe_engine::migration::target::start::{
    AT_START, ONCE_IT_ANSWERS, Remains, StartStep, Waiting, lacks_part, remains, waiting,
};
use drainpipe_engine::migration::target::{Hypervisor, IncomingState as State, KnownMigration, Memory};
use drainpipe_engine::migration::timing;

use crate::memory::NEEDS;
use crate::milliseconds::ms;
use crate::network::{Letter, Question, SourceAnswer};
use crate::orders::{Task, looked_at};
use crate::planted::Planted;
use crate::qemu::{IncomingStage, Last, Parts, Reply, TargetQemu};
use crate::third_host::Speaker;
use crate::world::{Host, Life, Sight, World};

const ANSWER_DEADLINE_MS: f64 = ms(timing::QMP_DEADLINE);

/// How often an agent tries to reach a QEMU that did not answer when the agent started.
const REACHED_EVERY_MS: f64 = 5_000.0;

/// A VM on its way, as the agent remembers it; the entry does not survive a crash.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub memory: Memory,
    watch: Watch,
    next: WatchAction,
    /// When its watch goes on, at the earliest.
    at_ms: f64,
    asked: Asked,
    /// The task that its watch has started, and what came of it.
    carries: Option<u64>,
    pub carried: Option<WatchEvent>,
    /// The memory of the host that it was promised.
    pub reserved: MemoryNeeds,
    /// Whether its QEMU has been built.
    pub is_built: bool,
    /// Whether that was built before this life of the agent.
    pub is_from_before: bool,
    /// Whether the QEMU has not answered this life of the agent yet.
    pub is_unresponsive: bool,
    /// The task that works on it.
    pub locked_by: Option<u64>,
    /// The order by which its QEMU last listened for the rest.
    pub rest_by: Option<Question>,
}

/// A question to the source, and its answer.
#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    question: Option<Question>,
    answer: Option<SourceAnswer>,
}

impl Asked {
    /// What the source says, if it was not silent for too long.
    fn take(&mut self) -> HandOverAnswer {
        self.question = None;
        match self.answer.take() {
            Some(SourceAnswer::Pending) => HandOverAnswer::Pending,
            Some(SourceAnswer::HandedOver) => HandOverAnswer::HandedOver,
            Some(SourceAnswer::Refused) => HandOverAnswer::Refused,
            None => HandOverAnswer::Silent,
        }
    }

    fn hear(&mut self, question: Question, answer: SourceAnswer) -> bool {
        let is_awaited = self.question == Some(question);
        if is_awaited {
            self.answer = Some(answer);
        }
        is_awaited
    }
}

impl Entry {
    /// When its watch has something to do.
    pub(crate) fn wakes_ms(&self) -> f64 {
        match self.next {
            WatchAction::Carry(_) if self.carried.is_none() => f64::INFINITY,
            WatchAction::AskSource if self.asked.answer.is_some() => 0.0,
            _ => self.at_ms,
        }
    }

    /// Most entries need no care until their sources have fallen silent.
    fn rests_until_ms(&self, now_ms: f64) -> f64 {
        let next_ms = now_ms + WATCH_EVERY_MS as f64;
        let is_awaited = self.memory.awaits_run() || self.is_unresponsive;
        if is_awaited {
            next_ms
        } else {
            next_ms.max(now_ms + SILENCE_MS - self.memory.silent_for_ms(now_ms))
        }
    }
}

/// A VM that an earlier life of the agent was ordered to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    machine: Resumption,
    next: ResumptionAction,
    at_ms: f64,
    asked: Asked,
}

impl Arrived {
    fn new(now_ms: f64) -> Self {
        let (machine, next) = Resumption::begin();
        Self { machine, next, at_ms: now_ms, asked: Asked::default() }
    }

    pub(crate) fn wakes_ms(&self) -> f64 {
        if self.asked.answer.is_some() { 0.0 } else { self.at_ms }
    }
}

#[derive(Debug)]
pub(crate) struct Target {
    pub life: Life,
    pub wakes_ms: f64,
    /// Whether the host is lost, with all that ran there. It may come back without that.
    pub is_lost: bool,
    pub disk_full_until_ms: f64,
    pub journal: BTreeMap<usize, State>,
    /// The records of a journal that was lost; an empty one was begun in its place.
    pub lost_journal: BTreeMap<usize, State>,
    /// Records that were forgotten, since they were settled.
    pub forgotten: BTreeMap<usize, State>,
    /// The migrations of which the source knows the end, and has nothing more to ask.
    pub known_to_source: BTreeSet<usize>,
    /// The last generation of the source's journal that it has heard of.
    pub heard: u64,
    /// The migrations whose VM others are known to have let run. This ends with the host.
    pub let_run: BTreeSet<usize>,
    /// The discarded migrations whose QEMU may still be there.
    pub remains: BTreeSet<usize>,
    pub qemu: Option<TargetQemu>,
    pub entries: BTreeMap<usize, Entry>,
    pub arrived: BTreeMap<usize, Arrived>,
    /// Whether the VM is one of this host's VMs.
    pub has_vm: bool,
    /// When the agent next tries to reach a QEMU that has not answered it since it started.
    pub reached_at_ms: Option<f64>,
    /// Whether the VM runs on a third host.
    pub has_moved_on: bool,
    pub tasks: Vec<Task>,
    /// The migrations for which the target's network is changed.
    pub network_changed_for: BTreeSet<usize>,
    pub places_awaited: u64,
}

impl Target {
    pub(crate) fn new() -> Self {
        Self {
            life: Life::Up,
            wakes_ms: 0.0,
            is_lost: false,
            disk_full_until_ms: 0.0,
            journal: BTreeMap::new(),
            lost_journal: BTreeMap::new(),
            forgotten: BTreeMap::new(),
            known_to_source: BTreeSet::new(),
            heard: 0,
            let_run: BTreeSet::new(),
            remains: BTreeSet::new(),
            qemu: None,
            entries: BTreeMap::new(),
            arrived: BTreeMap::new(),
            has_vm: false,
            reached_at_ms: None,
            has_moved_on: false,
            tasks: vec![],
            network_changed_for: BTreeSet::new(),
            places_awaited: 0,
        }
    }

    pub(crate) fn state(&self, migration: usize) -> Option<State> {
        self.journal.get(&migration).copied()
    }

    /// Whether the VM may have run here, by the journal or by the lost one.
    pub(crate) fn may_have_run(&self) -> bool {
        self.journal
            .values()
            .chain(self.lost_journal.values())
            .any(|state| matches!(state, State::Running | State::Finished))
    }

    /// Whether the target's agent has nothing more to do.
    pub(crate) fn is_settled(&self) -> bool {
        self.entries.is_empty()
            && self.arrived.is_empty()
            && self.tasks.is_empty()
            && self.reached_at_ms.is_none()
    }
}

impl World {
    pub(crate) fn is_target_disk_full(&self) -> bool {
        self.now_ms < self.target.disk_full_until_ms
    }

    pub(crate) fn enter(&mut self, migration: usize, heard_ms: f64, stood_before: bool) {
        let (watch, next) = Watch::begin();
        let mut memory = Memory::new(heard_ms);
        if self.hosts.allow_post_copy() {
            memory.allow_post_copy();
        }
        let entry = Entry {
            memory,
            watch,
            next,
            at_ms: self.now_ms,
            asked: Asked::default(),
            carries: None,
            carried: None,
            reserved: if stood_before { NEEDS } else { MemoryNeeds::default() },
            is_built: stood_before,
            is_from_before: stood_before,
            is_unresponsive: stood_before && !self.answers(Host::Target),
            locked_by: None,
            rest_by: None,
        };
        let at_ms = entry.rests_until_ms(self.now_ms);
        self.target.entries.insert(migration, Entry { at_ms, ..entry });
    }

    /// Somebody has spoken about a migration. Only the source's word is a sign of life.
    pub(crate) fn hears(&mut self, migration: usize, speaker: Speaker) {
        if speaker == Speaker::ThirdHost && self.planted != Planted::ThirdHostIsSign {
            return;
        }
        let now_ms = self.now_ms;
        if let Some(entry) = self.target.entries.get_mut(&migration) {
            entry.memory.hear(now_ms);
        }
    }

    /// Nobody who knows more than the journal is left. Going by that, a VM that ended before it was let run did run
    /// here.
    pub(crate) fn count_ended_as_run(&mut self) {
        let is_recorded = self.target.journal.values().any(|state| *state == State::Running);
        self.is_lost |= is_recorded && self.target.qemu.is_none();
    }

    pub(crate) fn crash_target(&mut self, for_ms: f64) {
        if self.target.life == Life::Down {
            return;
        }
        self.leave_libvirt(Host::Target);
        if let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.last == Last::Kept) {
            qemu.last = Last::ToCome;
        }
        self.count_ended_as_run();
        let target = &mut self.target;
        (target.life, target.wakes_ms) = (Life::Down, self.now_ms + for_ms);
        target.tasks.clear();
        target.entries.clear();
        target.arrived.clear();
        target.reached_at_ms = None;
    }

    /// The target's agent is restarted on an empty journal.
    pub(crate) fn lose_target_journal(&mut self, for_ms: f64) {
        self.crash_target(for_ms);
        let lost = std::mem::take(&mut self.target.journal);
        self.target.lost_journal.extend(lost);
    }

    /// The VM moves to a third host, if it can. It then no longer belongs to this host, and the migration that brought it
    /// is closed.
    pub(crate) fn move_on(&mut self) {
        let is_whole = |qemu: &TargetQemu| qemu.copy.runs && qemu.stage == IncomingStage::Complete;
        let is_there = self.target.qemu.as_ref().is_some_and(is_whole) && self.answers(Host::Target);
        let may = self.target.life == Life::Up && self.target.has_vm && !self.is_target_disk_full();
        let may = may && self.serves(Host::Target);
        if !is_there || !may || !self.target.lost_journal.is_empty() {
            return;
        }
        self.saw(Sight::MovedOn);
        (self.target.has_moved_on, self.is_lost) = (true, true);
        (self.target.qemu, self.target.has_vm) = (None, false);
        if self.planted == Planted::LeavingKeepsMigration {
            return;
        }
        let open = self.target.journal.iter().filter(|(_, state)| **state == State::Running);
        let open: Vec<usize> = open.map(|(migration, _)| *migration).collect();
        for migration in open {
            self.target.journal.insert(migration, State::Finished);
            self.target.arrived.remove(&migration);
            self.leave(migration);
        }
    }

    /// Somebody puts the journal back, and restarts the agent on it.
    pub(crate) fn find_target_journal(&mut self) {
        let found = std::mem::take(&mut self.target.lost_journal);
        if !found.is_empty() {
            self.saw(Sight::JournalFound);
            self.target.journal.extend(found);
            self.crash_target(0.0);
        }
    }

    pub(crate) fn reboot_target(&mut self, for_ms: f64) {
        self.target.let_run.clear();
        self.lose(Host::Target);
        self.reboot_libvirt(Host::Target);
        self.crash_target(for_ms);
        self.target.network_changed_for.clear();
        self.target.wakes_ms = self.target.wakes_ms.max(self.now_ms + for_ms);
    }

    /// Starts the agent, which goes by its journal: it clears away what was discarded, takes up what waits, and lets
    /// run what it was ordered to run.
    pub(crate) fn start_target(&mut self) {
        if self.target.disk_full_until_ms.is_infinite() {
            self.target.disk_full_until_ms = self.now_ms;
        }
        // The agent has to record what it finds.
        if self.is_target_disk_full() {
            self.target.wakes_ms = self.target.disk_full_until_ms;
            return;
        }
        (self.target.life, self.target.is_lost) = (Life::Up, false);
        self.target.has_vm = self.target.may_have_run() && !self.target.has_moved_on;
        self.end_by_hand_what_nobody_reaches();
        let is_unresponsive = self.target.qemu.is_some() && !self.answers(Host::Target);
        self.target.reached_at_ms =
            (self.target.has_vm && is_unresponsive).then_some(self.now_ms + REACHED_EVERY_MS);
        for step in AT_START {
            self.take_up(step);
        }
        let still_needed = &self.target.entries;
        self.target.network_changed_for.retain(|migration| still_needed.contains_key(migration));
    }

    /// The agent reaches a QEMU that did not answer when it started, or finds that it has ended.
    pub(crate) fn reach(&mut self) {
        if !self.target.reached_at_ms.is_some_and(|at_ms| self.now_ms >= at_ms)
            || self.target.life != Life::Up
        {
            return;
        }
        if self.target.qemu.is_some() && !self.answers(Host::Target) {
            self.target.reached_at_ms = Some(self.now_ms + REACHED_EVERY_MS);
            return;
        }
        self.target.reached_at_ms = None;
        self.saw(Sight::Reached);
        for step in ONCE_IT_ANSWERS {
            self.take_up(step);
        }
    }

    fn take_up(&mut self, step: StartStep) {
        if step == StartStep::ClearDiscarded {
            return self.clear_discarded();
        }
        for (migration, state) in self.target.journal.clone() {
            match (step, state) {
                (StartStep::TakeUpWaiting, State::Waiting) => self.take_up_waiting(migration),
                (StartStep::LetRun, State::Running) if self.planted == Planted::DroppedMigration => {
                    self.target.journal.insert(migration, State::Discarded);
                    self.target.qemu = None;
                }
                (StartStep::LetRun, State::Running) if self.target.reached_at_ms.is_none() => {
                    self.target.arrived.insert(migration, Arrived::new(self.now_ms));
                }
                (StartStep::TakeUpParts, _) => self.take_up_part(migration),
                _ => {}
            }
        }
    }

    /// A QEMU that waits for a page takes commands out of band only over connections that it has used before.
    fn end_by_hand_what_nobody_reaches(&mut self) {
        let waits = self.target.qemu.as_ref().is_some_and(|qemu| qemu.parts == Parts::WaitsForPage);
        if waits && !self.stream_flows() {
            (self.target.qemu, self.is_lost) = (None, true);
        }
    }

    fn clear_discarded(&mut self) {
        let discarded = std::mem::take(&mut self.target.remains);
        if discarded.is_empty() {
            return;
        }
        let comes_again = self.target.journal.values().any(|state| *state == State::Waiting);
        let is_to_end = remains(self.target.has_vm, comes_again) == Remains::Remove;
        if is_to_end && !self.end_given_up() {
            for migration in &discarded {
                self.enter(*migration, self.now_ms - SILENCE_MS, true);
            }
            self.target.remains = discarded;
        }
    }

    fn take_up_waiting(&mut self, migration: usize) {
        let hypervisor = match self.target.qemu {
            None => Hypervisor::None,
            Some(_) if self.answers(Host::Target) => Hypervisor::There,
            Some(_) => Hypervisor::Unresponsive,
        };
        let left = match waiting(hypervisor, self.was_let_run(migration)) {
            Waiting::GiveUp => Some(State::Discarded),
            Waiting::RecordRun => Some(State::Running),
            Waiting::TakeUp => None,
        };
        if let Some(state) = left {
            self.target.journal.insert(migration, state);
            return;
        }
        // The agent asks the source at once.
        self.enter(migration, self.now_ms - SILENCE_MS, true);
        self.saw(Sight::TakenUp);
    }

    fn take_up_part(&mut self, migration: usize) {
        let known = KnownMigration::of(self.found(migration), None);
        let received = looked_at(self).ok();
        if lacks_part(known, received) && !self.target.entries.contains_key(&migration) {
            self.enter_part(migration);
        }
    }

    /// From now on, the agent looks after the VM as one of which a part is still to come.
    pub(crate) fn enter_part(&mut self, migration: usize) {
        self.enter(migration, self.now_ms, true);
        let now_ms = self.now_ms;
        if let Some(entry) = self.target.entries.get_mut(&migration) {
            (entry.memory, entry.is_unresponsive) = (Memory::of_part(now_ms), false);
        }
    }

    fn ask_source(&mut self, migration: usize) -> Question {
        let question = self.network.new_question();
        self.send(Letter::Ask { migration, question });
        question
    }

    /// Takes a step of the watch of a VM on its way.
    pub(crate) fn step_watch(&mut self, migration: usize) {
        let Some(mut entry) = self.target.entries.get(&migration).copied() else { return };
        let Some(event) = self.watch_performs(migration, &mut entry) else {
            self.target.entries.insert(migration, entry);
            return;
        };
        // The entry may have been closed meanwhile.
        let Some(now) = self.target.entries.get(&migration) else { return };
        (entry.memory, entry.locked_by) = (now.memory, now.locked_by);
        entry.next = entry.watch.handle(self.now_ms, &entry.memory, event);
        entry.at_ms = match entry.next {
            WatchAction::Rest => entry.rests_until_ms(self.now_ms),
            _ => self.now_ms,
        };
        self.target.entries.insert(migration, entry);
        if let WatchAction::Carry(order) = entry.next {
            let number = self.own_task(order, migration);
            if let Some(entry) = self.target.entries.get_mut(&migration) {
                (entry.carries, entry.carried) = (Some(number), None);
            }
        }
    }

    /// What came of its action; `None` until that is known.
    fn watch_performs(&mut self, migration: usize, entry: &mut Entry) -> Option<WatchEvent> {
        Some(match entry.next {
            WatchAction::Rest => WatchEvent::Done,
            WatchAction::TakeHold => {
                entry.is_unresponsive &= !self.answers(Host::Target);
                WatchEvent::Done
            }
            WatchAction::Recall => WatchEvent::State(self.target.state(migration)),
            WatchAction::Carry(_) => {
                entry.carries = None;
                entry.carried.take()?
            }
            WatchAction::AskSource if entry.asked.question.is_none() => {
                entry.asked.question = Some(self.ask_source(migration));
                entry.at_ms = self.now_ms + ANSWER_DEADLINE_MS;
                return None;
            }
            WatchAction::AskSource => WatchEvent::SourceSays(entry.asked.take()),
            WatchAction::Hear => {
                self.hears(migration, Speaker::Source);
                WatchEvent::Done
            }
            WatchAction::Look if entry.is_unresponsive => WatchEvent::Mute,
            WatchAction::Look => match looked_at(self) {
                Err(orders) => orders,
                Ok(received) => WatchEvent::Received(received),
            },
            WatchAction::Close => {
                self.finish_incoming(migration);
                WatchEvent::Done
            }
        })
    }

    /// A task that the watch started has ended.
    pub(crate) fn watch_hears(&mut self, migration: usize, task: u64, event: WatchEvent) {
        if let Some(entry) =
            self.target.entries.get_mut(&migration).filter(|entry| entry.carries == Some(task))
        {
            entry.carried = Some(event);
        }
    }

    /// The VM runs, and belongs to this host from now on; returns whether that could be recorded.
    pub(crate) fn finish_incoming(&mut self, migration: usize) -> bool {
        let is_running = self.target.state(migration) == Some(State::Running);
        if is_running && self.is_target_disk_full() {
            return false;
        }
        if is_running {
            self.target.journal.insert(migration, State::Finished);
        }
        self.leave(migration);
        true
    }

    /// Forgets a VM for which nothing more is to be done.
    fn leave(&mut self, migration: usize) {
        self.target.network_changed_for.remove(&migration);
        self.target.entries.remove(&migration);
    }

    /// Continues what the agent was ordered to do and had recorded, but had not done when it ended.
    pub(crate) fn step_arrived(&mut self, migration: usize) {
        let Some(mut arrived) = self.target.arrived.get(&migration).copied() else { return };
        let Some(event) = self.arrived_performs(migration, &mut arrived) else {
            self.target.arrived.insert(migration, arrived);
            return;
        };
        arrived.next = arrived.machine.handle(event);
        arrived.at_ms = match arrived.next {
            ResumptionAction::Pause => self.now_ms + AGAIN_AFTER_MS as f64,
            _ => self.now_ms,
        };
        if arrived.next == ResumptionAction::Leave {
            self.target.arrived.remove(&migration);
        } else {
            self.target.arrived.insert(migration, arrived);
        }
    }

    fn arrived_performs(&mut self, migration: usize, arrived: &mut Arrived) -> Option<ResumptionEvent> {
        let is_full = self.is_target_disk_full();
        Some(match arrived.next {
            ResumptionAction::Recall if !self.target.has_vm => ResumptionEvent::Left,
            ResumptionAction::Recall if self.target.qemu.is_some() => ResumptionEvent::Here,
            ResumptionAction::Recall => ResumptionEvent::Gone,
            ResumptionAction::LetRun if self.command_target() == Reply::Done => {
                self.saw(Sight::Adopted);
                ResumptionEvent::Done
            }
            ResumptionAction::AskSource if arrived.asked.question.is_none() => {
                arrived.asked.question = Some(self.ask_source(migration));
                arrived.at_ms = self.now_ms + ANSWER_DEADLINE_MS;
                return None;
            }
            ResumptionAction::AskSource => ResumptionEvent::SourceSays(arrived.asked.take()),
            ResumptionAction::LetRun => ResumptionEvent::Failed,
            ResumptionAction::Finish | ResumptionAction::Forget if is_full => ResumptionEvent::Failed,
            // The watch of a VM that lacks a part goes on.
            ResumptionAction::Finish => {
                self.target.journal.insert(migration, State::Finished);
                ResumptionEvent::Done
            }
            ResumptionAction::Forget => {
                self.saw(Sight::GivenBack);
                self.target.journal.insert(migration, State::Discarded);
                self.target.has_vm = false;
                ResumptionEvent::Done
            }
            ResumptionAction::Pause | ResumptionAction::Leave => ResumptionEvent::Done,
        })
    }

    /// The source has answered a question, if somebody still awaits it.
    pub(crate) fn target_hears_answer(&mut self, question: Question, hand_over: SourceAnswer) {
        let entries = self.target.entries.values_mut().map(|entry| &mut entry.asked);
        let arrived = self.target.arrived.values_mut().map(|arrived| &mut arrived.asked);
        entries.chain(arrived).any(|asked| asked.hear(question, hand_over));
    }
}
