//! The target's host: its journal, its agent's life, and what the agent does by itself: it looks after the VMs on
//! their way, and after a start lets run what was told to run before.

use std::collections::{BTreeMap, BTreeSet};

use crate::network::{HandOver, Letter, Order, Question};
use crate::orders::Task;
use crate::planted::Planted;
use crate::qemu::{Arrival, Parts, Reply, TargetQemu};
use crate::strangers::Speaker;
use crate::world::{Host, Life, Sight, World};

const SILENCE_MS: f64 = 10_000.0;
const LOOK_EVERY_MS: f64 = 2_000.0;
const GIVE_UP_AFTER_MS: f64 = 120_000.0;
const GIVE_POST_COPY_UP_AFTER_MS: f64 = 1_800_000.0;
const ANSWER_DEADLINE_MS: f64 = 5_000.0;
const ASK_EVERY_MS: f64 = 5_000.0;

/// What the target has decided about a VM on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Waiting,
    Running,
    Finished,
    Discarded,
}

/// A VM on its way, as the agent has it in mind: no crash outlasts it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    pub heard_ms: f64,
    /// When it is settled whose it is, if its source says nothing until then.
    pub settles_ms: f64,
    pub question: Option<(Question, f64)>,
    /// Its skeleton stood before this agent did.
    pub stood_before: bool,
    /// The task that is at it.
    pub locked_by: Option<u64>,
}

/// What was told to run in an earlier life of the agent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrived {
    pub at_ms: f64,
    pub question: Option<(Question, f64)>,
}

#[derive(Debug)]
pub(crate) struct Target {
    pub life: Life,
    pub wakes_ms: f64,
    /// With all that ran there; it may come back without.
    pub is_lost: bool,
    pub disk_full_until_ms: f64,
    pub journal: BTreeMap<usize, State>,
    /// What is not in the journal any more: it was lost, and an empty one was begun.
    pub lost_journal: BTreeMap<usize, State>,
    /// What was forgotten, since it was settled.
    pub forgotten: BTreeMap<usize, State>,
    /// Their sources have nothing more to ask.
    pub known_to_source: BTreeSet<usize>,
    /// The last generation of the source's journal that it has heard of.
    pub heard: u64,
    /// Of those that were discarded, the ones whose QEMU may still be there.
    pub remains: BTreeSet<usize>,
    pub qemu: Option<TargetQemu>,
    pub entries: BTreeMap<usize, Entry>,
    pub arrived: BTreeMap<usize, Arrived>,
    /// It is among the VMs of this host.
    pub has_vm: bool,
    /// It runs on a third host.
    pub has_moved_on: bool,
    pub tasks: Vec<Task>,
    /// The migrations for which its network is changed.
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
            remains: BTreeSet::new(),
            qemu: None,
            entries: BTreeMap::new(),
            arrived: BTreeMap::new(),
            has_vm: false,
            has_moved_on: false,
            tasks: vec![],
            network_changed_for: BTreeSet::new(),
            places_awaited: 0,
        }
    }

    pub(crate) fn state(&self, migration: usize) -> Option<State> {
        self.journal.get(&migration).copied()
    }

    /// Whether the VM may have run here, by the journal, or by what it was.
    pub(crate) fn may_have_run(&self) -> bool {
        self.journal
            .values()
            .chain(self.lost_journal.values())
            .any(|state| matches!(state, State::Running | State::Finished))
    }

    /// Whether its agent has nothing more to do.
    pub(crate) fn is_settled(&self) -> bool {
        self.entries.is_empty() && self.arrived.is_empty() && self.tasks.is_empty()
    }
}

impl World {
    pub(crate) fn is_target_disk_full(&self) -> bool {
        self.now_ms < self.target.disk_full_until_ms
    }

    pub(crate) fn enter(&mut self, migration: usize, heard_ms: f64, stood_before: bool) {
        let entry = Entry {
            heard_ms,
            settles_ms: heard_ms + SILENCE_MS,
            question: None,
            stood_before,
            locked_by: None,
        };
        self.target.entries.insert(migration, entry);
    }

    /// Somebody has said something. Only of its source that is a sign of life.
    pub(crate) fn hears(&mut self, migration: usize, speaker: Speaker) {
        if speaker == Speaker::Stranger && self.planted != Planted::StrangerIsSign {
            return;
        }
        let now_ms = self.now_ms;
        // What was told to run is told again until it does.
        let is_told = self.target.state(migration) == Some(State::Running) && !self.target.has_vm;
        if let Some(entry) = self.target.entries.get_mut(&migration) {
            entry.heard_ms = now_ms;
            let told_again_ms =
                if is_told { entry.settles_ms.min(now_ms + LOOK_EVERY_MS) } else { f64::INFINITY };
            entry.settles_ms = told_again_ms.min(now_ms + SILENCE_MS);
        }
    }

    pub(crate) fn crash_target(&mut self, for_ms: f64) {
        if self.target.life == Life::Down {
            return;
        }
        let target = &mut self.target;
        (target.life, target.wakes_ms) = (Life::Down, self.now_ms + for_ms);
        target.tasks.clear();
        target.entries.clear();
        target.arrived.clear();
    }

    /// Its agent is started anew on an empty journal.
    pub(crate) fn lose_target_journal(&mut self, for_ms: f64) {
        self.crash_target(for_ms);
        let lost = std::mem::take(&mut self.target.journal);
        self.target.lost_journal.extend(lost);
    }

    /// The VM goes to a third host, if it can: then it is none of this host's any more, and its arrival is closed.
    pub(crate) fn move_on(&mut self) {
        let is_whole = |qemu: &TargetQemu| qemu.copy.runs && qemu.arrival == Arrival::Complete;
        let is_there = self.target.qemu.as_ref().is_some_and(is_whole) && self.answers(Host::Target);
        let may = self.target.life == Life::Up && self.target.has_vm && !self.is_target_disk_full();
        if !is_there || !may || !self.target.lost_journal.is_empty() {
            return;
        }
        self.saw(Sight::MovedOn);
        (self.target.has_moved_on, self.is_lost) = (true, true);
        (self.target.qemu, self.target.has_vm) = (None, false);
        if self.planted == Planted::LeavingKeepsArrival {
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

    /// Somebody has put the journal back, and starts the agent anew on it.
    pub(crate) fn find_target_journal(&mut self) {
        let found = std::mem::take(&mut self.target.lost_journal);
        if !found.is_empty() {
            self.saw(Sight::JournalFound);
            self.target.journal.extend(found);
            self.crash_target(0.0);
        }
    }

    pub(crate) fn reboot_target(&mut self, for_ms: f64) {
        self.lose(Host::Target);
        self.crash_target(for_ms);
        self.target.network_changed_for.clear();
        self.target.wakes_ms = self.target.wakes_ms.max(self.now_ms + for_ms);
    }

    /// By its journal: what was discarded is cleared away, what waits is taken up, what was told to run is let run.
    pub(crate) fn start_target(&mut self) {
        if self.target.disk_full_until_ms.is_infinite() {
            self.target.disk_full_until_ms = self.now_ms;
        }
        // What it finds has to be recorded.
        if self.is_target_disk_full() {
            self.target.wakes_ms = self.target.disk_full_until_ms;
            return;
        }
        (self.target.life, self.target.is_lost) = (Life::Up, false);
        self.target.has_vm = self.target.may_have_run() && !self.target.has_moved_on;
        self.end_by_hand_what_nobody_reaches();
        self.clear_discarded();
        for (migration, state) in self.target.journal.clone() {
            match state {
                State::Waiting => self.take_up(migration),
                State::Running if self.planted == Planted::DroppedArrival => {
                    self.target.journal.insert(migration, State::Discarded);
                    self.target.qemu = None;
                }
                State::Running => {
                    self.target.arrived.insert(migration, Arrived { at_ms: self.now_ms, question: None });
                }
                State::Finished | State::Discarded => {}
            }
        }
        let still_needed = &self.target.entries;
        self.target.network_changed_for.retain(|migration| still_needed.contains_key(migration));
    }

    /// A QEMU that waits for a page takes what is out of band from those alone who have spoken to it before.
    fn end_by_hand_what_nobody_reaches(&mut self) {
        let waits = self.target.qemu.as_ref().is_some_and(|qemu| qemu.parts == Parts::WaitsForPage);
        if waits && !self.stream_flows() {
            (self.target.qemu, self.is_lost) = (None, true);
        }
    }

    fn clear_discarded(&mut self) {
        let comes_again = self.target.journal.values().any(|state| *state == State::Waiting);
        if !std::mem::take(&mut self.target.remains).is_empty() && !self.target.has_vm && !comes_again {
            self.target.qemu = None;
        }
    }

    fn take_up(&mut self, migration: usize) {
        if self.target.qemu.is_none() {
            self.target.journal.insert(migration, State::Discarded);
            return;
        }
        // Its source is asked at once.
        self.enter(migration, self.now_ms - SILENCE_MS, true);
        self.saw(Sight::TakenUp);
    }

    pub(crate) fn ask_source(&mut self, migration: usize) -> (Question, f64) {
        let question = self.network.new_question();
        self.send(Letter::Ask { migration, question });
        (question, self.now_ms + ANSWER_DEADLINE_MS)
    }

    /// When something is to be done for a VM on its way.
    pub(crate) fn entry_wakes_ms(entry: &Entry) -> f64 {
        entry.question.map_or(entry.settles_ms, |(_, until_ms)| until_ms)
    }

    /// Its source is silent: whose is it?
    pub(crate) fn settle(&mut self, migration: usize) {
        let looks_again_ms = self.now_ms + LOOK_EVERY_MS;
        let Some(entry) = self.target.entries.get_mut(&migration) else { return };
        entry.settles_ms = looks_again_ms;
        let (was_asked, heard_ms) = (entry.question.take().is_some(), entry.heard_ms);
        match self.target.state(migration) {
            Some(State::Running | State::Finished) => {
                let is_closed = self.target.state(migration) == Some(State::Finished);
                if self.target.has_vm || is_closed || self.planted == Planted::SettledUnrun {
                    self.finish_arrival(migration);
                } else {
                    self.own_task(Order::Run, migration);
                }
            }
            _ if !was_asked => {
                let question = self.ask_source(migration);
                if let Some(entry) = self.target.entries.get_mut(&migration) {
                    entry.question = Some(question);
                }
            }
            _ if self.now_ms - heard_ms > self.kept_for_ms() && !self.has_all_state() => {
                self.own_task(Order::Discard, migration);
            }
            _ => {}
        }
    }

    fn kept_for_ms(&self) -> f64 {
        if self.hosts.allow_post_copy() { GIVE_POST_COPY_UP_AFTER_MS } else { GIVE_UP_AFTER_MS }
    }

    fn is_here_in_part(&self) -> bool {
        self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival == Arrival::Enough)
    }

    fn has_all_state(&self) -> bool {
        self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival.suffices())
    }

    /// It runs, and is this host's from now on.
    pub(crate) fn finish_arrival(&mut self, migration: usize) -> bool {
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

    /// There is nothing more to do for it.
    fn leave(&mut self, migration: usize) {
        self.target.network_changed_for.remove(&migration);
        self.target.entries.remove(&migration);
    }

    /// Lets run what its agent stopped at between the record and the deed. Where its QEMU is gone, its source is asked.
    pub(crate) fn step_arrived(&mut self, migration: usize) {
        let Some(mut arrived) = self.target.arrived.remove(&migration) else { return };
        if self.target.qemu.is_some() {
            if self.command_target() == Reply::Done && self.finish_arrival(migration) {
                self.saw(Sight::Adopted);
                return;
            }
            arrived.at_ms = self.now_ms + LOOK_EVERY_MS;
        } else {
            let was_asked = arrived.question.take().is_some();
            arrived.at_ms = self.now_ms + ASK_EVERY_MS;
            if !was_asked {
                let asked = self.ask_source(migration);
                (arrived.question, arrived.at_ms) = (Some(asked), asked.1);
            }
        }
        self.target.arrived.insert(migration, arrived);
    }

    /// What its source says, if that is still wanted.
    pub(crate) fn target_is_told(&mut self, question: Question, hand_over: HandOver) {
        let asked = |asked: Option<(Question, f64)>| asked.is_some_and(|(asked, _)| asked == question);
        let entry = self.target.entries.iter_mut().find(|(_, entry)| asked(entry.question));
        if let Some((&migration, entry)) = entry {
            entry.question = None;
            match hand_over {
                HandOver::Pending => self.hears(migration, Speaker::Source),
                // What is here in part, its source lets run, or nobody.
                HandOver::HandedOver if self.is_here_in_part() => self.hears(migration, Speaker::Source),
                HandOver::HandedOver => self.own_task(Order::Run, migration),
                HandOver::Refused => self.own_task(Order::Discard, migration),
            }
            return;
        }
        let arrived = self.target.arrived.iter_mut().find(|(_, arrived)| asked(arrived.question));
        let Some((&migration, arrived)) = arrived else { return };
        (arrived.question, arrived.at_ms) = (None, self.now_ms + ASK_EVERY_MS);
        if hand_over == HandOver::Pending || self.is_target_disk_full() {
            return;
        }
        self.target.arrived.remove(&migration);
        if hand_over == HandOver::HandedOver {
            self.target.journal.insert(migration, State::Finished);
        } else {
            self.saw(Sight::GivenBack);
            self.target.journal.insert(migration, State::Discarded);
            self.target.has_vm = false;
        }
    }
}
