//! What the target's agent does with orders: each is a task in parts. Between any two the agent may crash, and whoever
//! asked may hang up, which ends the task there.

use drainpipe_engine::problem::ProblemKind;

use crate::faults::Fault;
use crate::network::{Letter, Order, Question, Said};
use crate::planted::Planted;
use crate::qemu::{Arrival, Parts, Reply, TargetQemu};
use crate::strangers::Speaker;
use crate::target::State;
use crate::world::{Host, Sight, World};

/// How long an answer may be held back.
const RECEIVED_WAIT_MS: f64 = 1_000.0;

/// How much longer than that a QEMU may take to say how far it is.
const LOOK_MAX_MS: f64 = 1_000.0;

/// The part of [`Order::Run`] that is for a QEMU that refuses.
const TAKE_BACK: u8 = 3;

/// What a part of a task comes to.
type Part = Result<Step, ProblemKind>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Next,
    /// It goes on with taking back what it has recorded.
    TakeBack,
    Over(Said),
}

const DONE: Part = Ok(Step::Over(Said::Done));

/// An order that is carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    number: u64,
    order: Order,
    migration: usize,
    /// Who is to be answered; nobody where the agent gave itself the order.
    question: Option<Question>,
    part: u8,
    began_ms: f64,
    /// Whether the VM was on its way when it began.
    has_entry: bool,
}

impl World {
    pub(crate) fn take_order(&mut self, order: Order, migration: usize, question: Question) {
        self.add_task(order, migration, Some(question));
    }

    pub(crate) fn own_task(&mut self, order: Order, migration: usize) {
        self.add_task(order, migration, None);
    }

    fn add_task(&mut self, order: Order, migration: usize, question: Option<Question>) {
        // Each question is one of its own, and so is each task.
        let number = self.network.new_question();
        let (has_entry, began_ms) = (false, self.now_ms);
        self.target.tasks.push(Task { number, order, migration, question, part: 0, began_ms, has_entry });
    }

    /// Somebody hangs up, or, without a question, all do: whoever serves them may be dropped.
    pub(crate) fn cut_tasks(&mut self, of: Option<Question>) {
        for index in (0..self.target.tasks.len()).rev() {
            let Some(question) = self.target.tasks[index].question else { continue };
            if of.is_none_or(|of| of == question) && self.random.chance(50) {
                let task = self.target.tasks.remove(index);
                self.unlock(&task);
            }
        }
    }

    fn unlock(&mut self, task: &Task) {
        if let Some(entry) = self.target.entries.get_mut(&task.migration)
            && entry.locked_by == Some(task.number)
        {
            entry.locked_by = None;
        }
    }

    /// When it goes on.
    pub(crate) fn task_wakes_ms(&self, task: &Task) -> f64 {
        let entry = self.target.entries.get(&task.migration);
        let waits = entry.and_then(|entry| entry.locked_by).is_some_and(|other| other != task.number);
        if task.order.takes_turns() && waits {
            return f64::INFINITY;
        }
        let arrives = |arrival| matches!(arrival, Arrival::Built | Arrival::Listening);
        let may_be_held_back = task.order == Order::Received && task.part == 1;
        match self.target.qemu.as_ref().filter(|_| may_be_held_back) {
            Some(qemu) if qemu.mute_until_ms.is_some() => task.began_ms + RECEIVED_WAIT_MS + LOOK_MAX_MS,
            Some(qemu) if arrives(qemu.arrival) => task.began_ms + RECEIVED_WAIT_MS,
            _ => 0.0,
        }
    }

    pub(crate) fn step_task(&mut self, index: usize) {
        let mut task = self.target.tasks[index];
        let part = if task.part == 0 { self.begin(&mut task) } else { Ok(Step::Next) };
        let answer = match part.and_then(|_| self.carry_on(&task)) {
            Ok(Step::Next) => return self.target.tasks[index] = Task { part: task.part + 1, ..task },
            Ok(Step::TakeBack) => return self.target.tasks[index] = Task { part: TAKE_BACK, ..task },
            Ok(Step::Over(said)) => Ok(said),
            Err(kind) => Err(kind),
        };
        self.target.tasks.swap_remove(index);
        self.unlock(&task);
        if let Some(question) = task.question {
            if answer.is_ok() && matches!(task.order, Order::Discard | Order::Finish) {
                self.target.known_to_source.insert(task.migration);
            }
            self.send(Letter::Answer { question, answer });
        }
    }

    /// Those of one migration wait for each other from here on.
    fn begin(&mut self, task: &mut Task) -> Part {
        self.hears(task.migration, Speaker::Source);
        let is_refused = matches!(task.order, Order::Permit | Order::Memory | Order::Skeleton)
            && self.faults.meets(Fault::Refused, &mut self.random);
        if is_refused {
            return Err(ProblemKind::Refused);
        }
        if let Some(entry) = self.target.entries.get_mut(&task.migration) {
            task.has_entry = true;
            if task.order.takes_turns() {
                entry.locked_by = Some(task.number);
            }
        }
        Ok(Step::Next)
    }

    fn carry_on(&mut self, task: &Task) -> Part {
        let migration = task.migration;
        match task.order {
            Order::Permit => self.permit(migration),
            Order::Memory if task.has_entry => DONE,
            Order::Skeleton if task.has_entry => self.skeleton(task),
            Order::Connect { is_taken } if task.has_entry => self.connect(migration, is_taken),
            Order::Received if task.has_entry => self.received(task),
            Order::Run if task.has_entry => self.run(task),
            Order::Run => self.late_run(migration),
            Order::View => self.view(migration),
            Order::Discard => self.discard(task),
            Order::Reconnect => self.listen_again(),
            Order::End => self.end_part(),
            Order::Finish if task.has_entry => self.finish(migration),
            Order::Finish => self.already_runs(migration),
            _ => Err(ProblemKind::NotFound),
        }
    }

    fn permit(&mut self, migration: usize) -> Part {
        if !self.target.entries.is_empty() || self.target.has_vm || self.target.state(migration).is_some() {
            return Err(ProblemKind::Conflict);
        }
        // It does not know which VMs are its own.
        if !self.target.lost_journal.is_empty() {
            return Err(ProblemKind::Refused);
        }
        if self.target.places_awaited > 0 {
            self.target.places_awaited -= 1;
            return Ok(Step::Over(Said::Crowded));
        }
        self.record(migration, State::Waiting)?;
        self.enter(migration, self.now_ms, false);
        DONE
    }

    fn record(&mut self, migration: usize, state: State) -> Result<(), ProblemKind> {
        if self.is_target_disk_full() {
            return Err(ProblemKind::Failed);
        }
        self.target.journal.insert(migration, state);
        Ok(())
    }

    fn must_wait(&self, migration: usize) -> Result<(), ProblemKind> {
        let waits = self.target.state(migration) == Some(State::Waiting);
        if waits { Ok(()) } else { Err(ProblemKind::Conflict) }
    }

    fn skeleton(&mut self, task: &Task) -> Part {
        if task.part == 0 {
            self.must_wait(task.migration)?;
            return if self.target.has_vm { Err(ProblemKind::Conflict) } else { Ok(Step::Next) };
        }
        let stands = self.target.qemu.as_ref().is_some_and(|qemu| qemu.migration == task.migration);
        let stood_before = self.target.entries.get(&task.migration).is_some_and(|entry| entry.stood_before);
        if stands || stood_before {
            return Err(ProblemKind::Conflict);
        }
        // What is left of another one goes with it.
        self.build_skeleton(task.migration);
        DONE
    }

    fn connect(&mut self, migration: usize, is_taken: bool) -> Part {
        self.must_wait(migration)?;
        if !is_taken {
            return Err(ProblemKind::Refused);
        }
        let answers = self.answers(Host::Target);
        let qemu = self.target.qemu.as_mut().filter(|qemu| answers && qemu.arrival == Arrival::Built);
        let Some(qemu) = qemu else { return Err(ProblemKind::Failed) };
        qemu.arrival = Arrival::Listening;
        self.target.network_changed_for.insert(migration);
        DONE
    }

    fn received(&mut self, task: &Task) -> Part {
        let waiting = Ok(Step::Over(Said::Waiting));
        let Some(qemu) = &self.target.qemu else { return Err(ProblemKind::Failed) };
        match qemu.arrival {
            _ if task.part == 0 => Ok(Step::Next),
            // After the hand-over the VM would stand still until somebody makes room.
            _ if self.is_target_disk_full() => Err(ProblemKind::Failed),
            _ if qemu.mute_until_ms.is_some() => waiting,
            Arrival::Enough | Arrival::Complete => Ok(Step::Over(Said::Ready)),
            Arrival::Broken => Err(ProblemKind::Failed),
            Arrival::Built | Arrival::Listening => waiting,
        }
    }

    fn run(&mut self, task: &Task) -> Part {
        match task.part {
            0 => self.record_run(task.migration),
            1 => self.let_run_here(),
            2 => {
                self.target.has_vm = true;
                DONE
            }
            // QEMU has refused: its source can have it back.
            TAKE_BACK => {
                self.record(task.migration, State::Discarded)?;
                self.saw(Sight::TakenBack);
                self.target.remains.insert(task.migration);
                Ok(Step::Next)
            }
            _ => {
                self.remove_skeleton(task.migration, true);
                Err(ProblemKind::Failed)
            }
        }
    }

    fn record_run(&mut self, migration: usize) -> Part {
        let state = self.target.state(migration);
        if self.target.has_vm || state == Some(State::Finished) {
            if self.planted == Planted::TwoStarts && self.copy_at(Host::Target).is_some_and(|copy| copy.runs)
            {
                self.breach("I1: the target starts the VM twice".into());
            }
            return self.already_runs(migration);
        }
        let may_have_run = state == Some(State::Running);
        if self.target.qemu.is_none() && may_have_run {
            // It ended just when it was told to run: it has crashed here.
            self.target.has_vm = true;
        }
        let answers = self.answers(Host::Target);
        let is_there = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival.suffices() && answers);
        if !is_there && self.planted != Planted::RunsIncomplete {
            return Err(ProblemKind::Failed);
        }
        if state == Some(State::Discarded) && self.planted != Planted::ForgottenDiscard {
            self.saw(Sight::LateRunRefused);
            return Err(ProblemKind::Conflict);
        }
        if state == Some(State::Waiting) {
            self.record(migration, State::Running)?;
        }
        Ok(Step::Next)
    }

    fn let_run_here(&mut self) -> Part {
        match self.command_target() {
            Reply::Done => Ok(Step::Next),
            // It may have run for a moment.
            Reply::Gone => {
                self.target.has_vm = true;
                Err(ProblemKind::Failed)
            }
            Reply::None => Err(ProblemKind::Failed),
            // Its source could not let it run.
            Reply::Refused if self.is_in_parts() && self.planted != Planted::TakesPartBack => {
                Err(ProblemKind::Failed)
            }
            Reply::Refused => Ok(Step::TakeBack),
        }
    }

    /// Whether it runs here, and somebody has seen it to.
    fn is_let_run(&self, migration: usize) -> bool {
        let is_recorded = matches!(self.target.state(migration), Some(State::Running | State::Finished));
        // One that has ended may have run.
        let is_awaited = self.target.arrived.contains_key(&migration) && self.target.qemu.is_some();
        let is_on_its_way = self.target.entries.contains_key(&migration) && !self.target.has_vm;
        let is_closed = self.target.state(migration) == Some(State::Finished);
        is_closed || is_recorded && (!is_awaited && !is_on_its_way || self.planted == Planted::BelievedRecord)
    }

    fn late_run(&mut self, migration: usize) -> Part {
        if self.target.state(migration) == Some(State::Discarded) {
            self.saw(Sight::LateRunRefused);
        }
        self.already_runs(migration)
    }

    fn already_runs(&self, migration: usize) -> Part {
        if self.is_let_run(migration) {
            return DONE;
        }
        if self.target.state(migration).is_none() {
            return Err(ProblemKind::NotFound);
        }
        let is_discarded = !self.target.arrived.contains_key(&migration);
        Err(if is_discarded { ProblemKind::Conflict } else { ProblemKind::Failed })
    }

    fn view(&self, migration: usize) -> Part {
        let is_there = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival.suffices());
        let is_in_part = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival == Arrival::Enough);
        let is_mute = self.target.qemu.is_some() && !self.answers(Host::Target);
        let came_in_parts = self.target.qemu.as_ref().is_some_and(|qemu| qemu.parts != Parts::No);
        let said = match self.target.state(migration) {
            Some(State::Running) if !self.is_let_run(migration) && self.planted == Planted::MuteIsReady => {
                Said::Ready
            }
            // It may wait for a page, which comes only if its source hears this.
            Some(State::Running | State::Finished) if is_mute && came_in_parts => Said::RunningInPart,
            Some(State::Running) if is_mute && !self.is_let_run(migration) => Said::Ready,
            Some(State::Waiting | State::Running | State::Finished) if is_mute => {
                return Err(ProblemKind::Failed);
            }
            Some(State::Running | State::Finished)
                if self.is_let_run(migration) && is_in_part && self.planted != Planted::RestForgotten =>
            {
                Said::RunningInPart
            }
            Some(State::Running | State::Finished)
                if self.is_let_run(migration) && self.target.qemu.is_none() =>
            {
                Said::Ended
            }
            Some(State::Running | State::Finished) if self.is_let_run(migration) => Said::Running,
            Some(State::Running | State::Finished) => Said::Ready,
            Some(State::Discarded) => Said::Discarded,
            Some(State::Waiting) if is_in_part => Said::ReadyInPart,
            Some(State::Waiting) if is_there => Said::Ready,
            Some(State::Waiting) => Said::Waiting,
            None => Said::Unknown,
        };
        Ok(Step::Over(said))
    }

    fn discard(&mut self, task: &Task) -> Part {
        let migration = task.migration;
        if self.planted == Planted::ForgottenDiscard {
            return DONE;
        }
        match (task.part, self.target.state(migration)) {
            (0, Some(State::Running | State::Finished)) => Err(ProblemKind::Conflict),
            (0, None) => Err(ProblemKind::NotFound),
            (0, Some(state)) => {
                self.record(migration, State::Discarded)?;
                if state == State::Waiting {
                    self.target.remains.insert(migration);
                }
                Ok(Step::Next)
            }
            (1, _) => {
                self.remove_skeleton(migration, task.has_entry);
                DONE
            }
            _ => DONE,
        }
    }

    /// For the rest of a VM that runs here.
    fn listen_again(&self) -> Part {
        let waits = |qemu: &TargetQemu| qemu.arrival == Arrival::Enough && qemu.takes_out_of_band();
        if self.target.qemu.as_ref().is_some_and(waits) { DONE } else { Err(ProblemKind::Failed) }
    }

    /// The rest will never come.
    fn end_part(&mut self) -> Part {
        // It may have got all of it.
        if self.target.qemu.as_ref().is_some_and(|qemu| !qemu.takes_out_of_band()) {
            return Err(ProblemKind::Failed);
        }
        let is_in_part = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival == Arrival::Enough);
        if is_in_part && !self.is_lost {
            self.breach("I3: a VM is ended whose rest can still come".into());
        }
        if is_in_part {
            self.saw(Sight::RestLost);
            self.target.qemu = None;
        }
        DONE
    }

    fn remove_skeleton(&mut self, migration: usize, has_entry: bool) {
        if self.is_in_parts() && has_entry {
            self.breach(
                "I3: the target's part of the VM is discarded, which the source cannot let run".into(),
            );
        }
        if has_entry {
            self.target.qemu = None;
        }
        self.target.network_changed_for.remove(&migration);
        self.target.entries.remove(&migration);
        self.target.remains.remove(&migration);
    }

    fn finish(&mut self, migration: usize) -> Part {
        let is_let_run = self.is_let_run(migration) || self.target.state(migration) != Some(State::Running);
        if is_let_run && self.finish_arrival(migration) { DONE } else { Err(ProblemKind::Failed) }
    }
}
