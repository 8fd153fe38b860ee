//! What the target's agent does with orders. Each is a task in parts: between any two of them the agent may crash, or
//! whoever gave the order may hang up, which ends the task there.

use drainpipe_engine::migration::target::order::rest::{Connection, LAST_BYTES_WITHIN_MS, LOOK_EVERY_MS};
use drainpipe_engine::migration::target::order::{
    Answer as Answered, ComingVm, Order as OwnOrder, OrderAction, OrderAnswer, OrderEvent, Task as Machine,
    VmState, Why,
};
use drainpipe_engine::migration::target::permit::{Asked, PermitRefusal, may_come};
use drainpipe_engine::migration::target::silence::WatchEvent;
use drainpipe_engine::migration::target::steps::{self, OnItsWay, OrderNeed, OrderRefusal};
use drainpipe_engine::migration::target::{
    Hypervisor, IncomingState as State, KnownMigration, MigrationFacts, Received,
};
use drainpipe_engine::migration::timing;
use drainpipe_engine::problem::ProblemKind;

use crate::disks::CopiedDisk;
use crate::faults::Fault;
use crate::milliseconds::ms;
use crate::network::{Answer, Letter, Order, Question, TargetAnswer};
use crate::planted::Planted;
use crate::qemu::{IncomingStage, Last, Reply, Stream};
use crate::target::Entry;
use crate::third_host::Speaker;
use crate::world::{Host, Sight, World};

/// How long an answer may be delayed.
const RECEIVED_WAIT_MS: f64 = ms(timing::RECEIVED_WAIT);

/// How much longer a QEMU may take to say how far it is.
const LOOK_MAX_MS: f64 = ms(timing::RECEIVED_LOOK_MAX);

/// The result of one part of a task.
type Part = Result<PartStep, ProblemKind>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartStep {
    Next,
    Over(TargetAnswer),
}

const DONE: Part = Ok(PartStep::Over(TargetAnswer::Done));

/// An order being carried out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    number: u64,
    order: Order,
    migration: usize,
    /// The question to answer; `None` for an order that the agent gave itself.
    question: Option<Question>,
    /// The order, if the engine decides its course. Its machine starts when the agent has looked whether the VM is on
    /// its way.
    decided: Option<OwnOrder>,
    machine: Option<(Machine, OrderAction)>,
    part: u8,
    began_ms: f64,
    /// When it goes on, at the earliest.
    rests_until_ms: f64,
    /// Whether the VM was on its way when the task began.
    has_entry: bool,
}

/// What the target's QEMU says about the state it has received.
pub(crate) fn looked_at(world: &World) -> Result<Received, WatchEvent> {
    match &world.target.qemu {
        None => Err(WatchEvent::Gone),
        Some(_) if !world.answers(Host::Target) || world.is_being_finished() => Err(WatchEvent::Mute),
        Some(qemu) => Ok(match qemu.stage {
            IncomingStage::Unfinished if !world.is_coming() => Received::Failed,
            IncomingStage::Unfinished if qemu.last == Last::Kept => Received::Untaken,
            IncomingStage::Built | IncomingStage::Listening | IncomingStage::Unfinished => {
                Received::Incomplete
            }
            IncomingStage::Enough => Received::InPart,
            IncomingStage::Complete => Received::Whole,
            IncomingStage::Broken => Received::Failed,
        }),
    }
}

fn said(answer: Answered) -> Answer {
    answer.map_err(Why::kind).map(|said| match said {
        OrderAnswer::Done => TargetAnswer::Done,
        OrderAnswer::View(view) => TargetAnswer::View(view),
    })
}

/// The source's order, if it is one of those whose course the engine decides.
fn decided(order: Order) -> Option<OwnOrder> {
    match order {
        Order::Run => Some(OwnOrder::Run { is_sources: true }),
        Order::View => Some(OwnOrder::View),
        Order::Received => Some(OwnOrder::Receive),
        Order::Discard => Some(OwnOrder::Discard { is_sources: true }),
        Order::Finish => Some(OwnOrder::Finish),
        Order::Reconnect => Some(OwnOrder::Reconnect),
        Order::End => Some(OwnOrder::End),
        Order::Permit
        | Order::Memory
        | Order::IncomingVm
        | Order::Connect { .. }
        | Order::Complete
        | Order::CloseDisks => None,
    }
}

fn as_message(order: OwnOrder) -> Order {
    match order {
        OwnOrder::Run { .. } => Order::Run,
        OwnOrder::View => Order::View,
        OwnOrder::Receive => Order::Received,
        OwnOrder::Discard { .. } => Order::Discard,
        OwnOrder::Finish => Order::Finish,
        OwnOrder::Reconnect => Order::Reconnect,
        OwnOrder::End => Order::End,
    }
}

impl World {
    pub(crate) fn take_order(&mut self, order: Order, migration: usize, question: Question) {
        self.add_task(order, decided(order), migration, Some(question));
    }

    pub(crate) fn own_task(&mut self, order: OwnOrder, migration: usize) -> u64 {
        self.add_task(as_message(order), Some(order), migration, None)
    }

    fn add_task(
        &mut self,
        order: Order,
        decided: Option<OwnOrder>,
        migration: usize,
        question: Option<Question>,
    ) -> u64 {
        // Questions and tasks share their numbers, so all of these differ.
        let number = self.network.new_question();
        let (has_entry, began_ms) = (false, self.now_ms);
        self.target.tasks.push(Task {
            number,
            order,
            migration,
            question,
            decided,
            machine: None,
            part: 0,
            began_ms,
            rests_until_ms: began_ms,
            has_entry,
        });
        number
    }

    /// Somebody hangs up on this question, or on all of them if it is `None`: the tasks that serve them may be dropped.
    pub(crate) fn cut_tasks(&mut self, of: Option<Question>) {
        for index in (0..self.target.tasks.len()).rev() {
            let Some(question) = self.target.tasks[index].question else { continue };
            if of.is_none_or(|of| of == question) && self.random.chance(50) {
                let task = self.target.tasks.remove(index);
                self.unlock(&task);
                self.count_ended_as_run();
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

    /// When the task goes on.
    pub(crate) fn task_wakes_ms(&self, task: &Task) -> f64 {
        let entry = self.target.entries.get(&task.migration);
        let waits = entry.and_then(|entry| entry.locked_by).is_some_and(|other| other != task.number);
        if task.order.takes_turns() && waits {
            return f64::INFINITY;
        }
        if self.now_ms < task.rests_until_ms {
            return task.rests_until_ms;
        }
        let arrives = |stage| {
            matches!(stage, IncomingStage::Built | IncomingStage::Listening | IncomingStage::Unfinished)
        };
        let may_be_held_back = task.machine.is_some_and(|(_, action)| action == OrderAction::Wait);
        match self.target.qemu.as_ref().filter(|_| may_be_held_back) {
            Some(qemu) if qemu.mute_until_ms.is_some() => task.began_ms + RECEIVED_WAIT_MS + LOOK_MAX_MS,
            Some(qemu) if arrives(qemu.stage) => task.began_ms + RECEIVED_WAIT_MS,
            _ => 0.0,
        }
    }

    pub(crate) fn step_task(&mut self, index: usize) {
        let mut task = self.target.tasks[index];
        let part = if task.part == 0 { self.begin(&mut task) } else { Ok(PartStep::Next) };
        let answer = match part.and_then(|_| self.carry_on(&mut task)) {
            Ok(PartStep::Next) => {
                return self.target.tasks[index] = Task { part: task.part.saturating_add(1), ..task };
            }
            Ok(PartStep::Over(said)) => Ok(said),
            Err(kind) => Err(kind),
        };
        self.target.tasks.swap_remove(index);
        self.unlock(&task);
        if let Some(question) = task.question {
            self.send(Letter::Answer { question, answer });
        } else if let Some((_, OrderAction::Answer(answer))) = task.machine {
            let event = match (task.order, answer) {
                (Order::View, Ok(OrderAnswer::View(view))) => WatchEvent::View(Some(view)),
                (Order::View, _) => WatchEvent::View(None),
                _ => WatchEvent::Done,
            };
            self.watch_hears(task.migration, task.number, event);
        }
    }

    /// From here on, tasks of one migration wait for each other.
    fn begin(&mut self, task: &mut Task) -> Part {
        if task.question.is_some() {
            self.hears(task.migration, Speaker::Source);
        }
        let is_refused = matches!(task.order, Order::Permit | Order::Memory | Order::IncomingVm)
            && self.faults.meets(Fault::Refused, &mut self.random);
        if is_refused {
            return Err(ProblemKind::Refused);
        }
        let mut on_its_way = None;
        if let Some(entry) = self.target.entries.get_mut(&task.migration) {
            task.has_entry = true;
            let came_in_parts = entry.memory.came_in_parts() && self.planted != Planted::TakesPartBack;
            let obeys_others = self.libvirts.is_some() && self.planted != Planted::DiscardsUnlooked;
            on_its_way = Some(ComingVm { came_in_parts, obeys_others });
            if task.order.takes_turns() {
                entry.locked_by = Some(task.number);
            }
        }
        task.machine = task.decided.map(|order| Machine::begin(order, on_its_way));
        Ok(PartStep::Next)
    }

    fn carry_on(&mut self, task: &mut Task) -> Part {
        if task.machine.is_some() {
            return self.step_machine(task);
        }
        let migration = task.migration;
        match task.order {
            Order::Permit => self.permit(migration),
            Order::Memory => {
                self.reserve_memory(migration)?;
                DONE
            }
            Order::IncomingVm => self.incoming_vm(task),
            Order::Connect { is_taken } => self.connect(migration, is_taken),
            Order::Complete => {
                self.keep_last(migration)?;
                DONE
            }
            Order::CloseDisks => {
                self.may_go_on(OrderNeed::UseHypervisor, migration)?;
                self.close_disks()?;
                DONE
            }
            _ => Err(ProblemKind::NotFound),
        }
    }

    /// Takes one step of the engine's machine: carries out an action, and hands over what came of it.
    fn step_machine(&mut self, task: &mut Task) -> Part {
        let Some((mut machine, action)) = task.machine else { return Err(ProblemKind::Failed) };
        if self.planted == Planted::ForgottenDiscard && task.order == Order::Discard {
            return DONE;
        }
        if let OrderAction::Answer(answer) = action {
            return said(answer).map(PartStep::Over);
        }
        let event = self.task_performs(task, action);
        let next = machine.handle(event);
        task.machine = Some((machine, next));
        if next == OrderAction::AwaitLastBytes {
            task.rests_until_ms = self.now_ms + LOOK_EVERY_MS as f64;
        }
        match next {
            OrderAction::Answer(answer) => said(answer).map(PartStep::Over),
            _ => Ok(PartStep::Next),
        }
    }

    fn task_performs(&mut self, task: &Task, action: OrderAction) -> OrderEvent {
        let migration = task.migration;
        match action {
            OrderAction::Recall => {
                let known = self.known(task);
                if task.order == Order::Run && known.state == Some(State::Discarded) {
                    self.saw(Sight::LateRunRefused);
                }
                OrderEvent::Known(known)
            }
            OrderAction::TakeHold => self.take_hold(migration),
            OrderAction::Look | OrderAction::Wait => self.look_at_received(migration),
            OrderAction::LookAtRest => self.look_at_rest(),
            OrderAction::CheckRoom => done_unless(self.is_target_disk_full()),
            OrderAction::RecordRun => self.record_run(migration),
            OrderAction::LetRun => {
                // A QEMU that does not answer lets no VM run either.
                let _is_closed = self.close_disks();
                self.let_run_here(migration)
            }
            OrderAction::TakeLast => self.take_last(migration),
            OrderAction::LookAtVm => self.target_vm(migration),
            OrderAction::EndUnrun => self.end_unrun(migration),
            OrderAction::Adopt => {
                self.target.has_vm = true;
                self.with_entry(migration, |entry| entry.memory.let_run());
                OrderEvent::Done
            }
            OrderAction::TakeBackRun if self.is_target_disk_full() => {
                // Going by the records, the VM ran here and ended with its QEMU.
                self.is_lost |= self.target.qemu.is_none();
                OrderEvent::Failed
            }
            OrderAction::TakeBackRun => {
                self.target.journal.insert(migration, State::Discarded);
                self.saw(Sight::TakenBack);
                self.target.remains.insert(migration);
                OrderEvent::Done
            }
            OrderAction::RecordDiscard => self.record_discard(migration),
            OrderAction::Remove => done_unless(!self.remove_incoming_vm(migration, task.has_entry)),
            OrderAction::Close => done_unless(!self.finish_incoming(migration)),
            OrderAction::NoteSourceKnows => {
                self.target.known_to_source.insert(migration);
                OrderEvent::Done
            }
            OrderAction::TakeUpPart => self.take_up_missing_part(task),
            OrderAction::CutConnection => self.cut_rest(task),
            OrderAction::ListenAgain => self.listen_again(task),
            OrderAction::LookAtConnection => self.look_at_connection(),
            OrderAction::AwaitLastBytes if self.now_ms < task.began_ms + LAST_BYTES_WITHIN_MS as f64 => {
                OrderEvent::Done
            }
            OrderAction::AwaitLastBytes => OrderEvent::Late,
            OrderAction::EndVm => self.end_part(),
            OrderAction::Answer(_) => OrderEvent::Failed,
        }
    }

    /// Other tasks wait for the one under way.
    fn take_up_missing_part(&mut self, task: &Task) -> OrderEvent {
        if !self.target.entries.contains_key(&task.migration) {
            self.enter_part(task.migration);
        }
        let attempt = task.question.filter(|_| self.planted != Planted::LateAttempt);
        let entry = self.target.entries.get_mut(&task.migration);
        let is_taken_up = entry.is_none_or(|entry| entry.memory.take_up_attempt(attempt));
        if is_taken_up {
            return OrderEvent::Done;
        }
        self.saw(Sight::AttemptOvertaken);
        OrderEvent::Refused
    }

    fn with_entry(&mut self, migration: usize, act: impl FnOnce(&mut Entry)) {
        if let Some(entry) = self.target.entries.get_mut(&migration) {
            act(entry);
        }
    }

    fn known(&self, task: &Task) -> KnownMigration {
        let memory = self.target.entries.get(&task.migration).map(|entry| entry.memory);
        let found = self.found(task.migration);
        let known = KnownMigration::of(found, memory);
        let was_ordered_to_run = matches!(found.state, Some(State::Running | State::Finished));
        match self.planted {
            Planted::BelievedRecord => KnownMigration { awaits_run: false, ..known },
            Planted::TwoStarts if was_ordered_to_run => {
                KnownMigration { state: Some(State::Running), is_adopted: false, ..known }
            }
            _ => known,
        }
    }

    /// What the target finds of a migration.
    pub(crate) fn found(&self, migration: usize) -> MigrationFacts {
        let entry = self.target.entries.get(&migration);
        let lives = self.target.qemu.is_some();
        let of_vm = match self.target.has_vm {
            true if self.target.reached_at_ms.is_some() => Hypervisor::Unresponsive,
            true if lives => Hypervisor::There,
            _ => Hypervisor::None,
        };
        let on_its_way = match entry {
            Some(entry) if entry.is_unresponsive => Hypervisor::Unresponsive,
            Some(entry) if entry.is_built && !lives => Hypervisor::Ended,
            Some(entry) if entry.is_built => Hypervisor::There,
            _ => Hypervisor::None,
        };
        MigrationFacts {
            state: self.target.state(migration),
            is_adopted: self.target.has_vm,
            allows_post_copy: self.hosts.allow_post_copy(),
            is_last: self.target.journal.keys().next_back() == Some(&migration),
            of_vm,
            on_its_way,
        }
    }

    fn take_hold(&mut self, migration: usize) -> OrderEvent {
        let answers = self.answers(Host::Target);
        let Some(entry) = self.target.entries.get_mut(&migration) else { return OrderEvent::Gone };
        entry.is_unresponsive &= !answers;
        match (entry.is_unresponsive, entry.is_built) {
            (true, _) => OrderEvent::Mute,
            (false, true) => OrderEvent::Done,
            (false, false) => OrderEvent::Gone,
        }
    }

    fn look_at_received(&mut self, migration: usize) -> OrderEvent {
        let received = match looked_at(self) {
            Err(WatchEvent::Mute) => return OrderEvent::Mute,
            Err(_) => return OrderEvent::Gone,
            Ok(_) if self.planted == Planted::RunsIncomplete => Received::Whole,
            Ok(Received::InPart) if self.planted == Planted::TakesPartBack => Received::Whole,
            Ok(received) => received,
        };
        self.with_entry(migration, |entry| entry.memory.note(received));
        OrderEvent::Received(received)
    }

    fn look_at_rest(&self) -> OrderEvent {
        match looked_at(self) {
            Err(WatchEvent::Mute) if self.planted == Planted::MuteIsReady => {
                OrderEvent::Received(Received::Incomplete)
            }
            Err(WatchEvent::Mute) => OrderEvent::Mute,
            Err(_) => OrderEvent::Gone,
            Ok(Received::InPart) if self.planted == Planted::RestForgotten => {
                OrderEvent::Received(Received::Whole)
            }
            Ok(received) => OrderEvent::Received(received),
        }
    }

    fn permit(&mut self, migration: usize) -> Part {
        let asked = Asked {
            is_here: self.target.has_vm,
            is_coming: !self.target.entries.is_empty(),
            is_recorded: self.target.state(migration).is_some(),
        };
        may_come(asked).map_err(PermitRefusal::kind)?;
        // The agent does not know which VMs are its own.
        if !self.target.lost_journal.is_empty() {
            return Err(ProblemKind::Refused);
        }
        if self.target.places_awaited > 0 {
            self.target.places_awaited -= 1;
            return Ok(PartStep::Over(TargetAnswer::Busy));
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

    pub(crate) fn may_go_on(&self, need: OrderNeed, migration: usize) -> Result<(), ProblemKind> {
        let on_its_way = self.target.entries.get(&migration).map(|entry| OnItsWay {
            state: self.target.state(migration),
            is_name_taken: self.target.has_vm,
            is_built: entry.is_built && self.planted != Planted::BuildsTwice,
            is_from_before: entry.is_from_before,
        });
        match steps::may_go_on(need, on_its_way) {
            Err(OrderRefusal::NotBuilt) if self.planted == Planted::BuildsTwice => Ok(()),
            taken => taken.map_err(OrderRefusal::kind),
        }
    }

    fn incoming_vm(&mut self, task: &Task) -> Part {
        self.may_go_on(OrderNeed::Build, task.migration)?;
        // Building takes time.
        if task.part == 0 {
            return Ok(PartStep::Next);
        }
        // The remains of another incoming VM go with this.
        self.build_incoming_vm(task.migration);
        self.disk = CopiedDisk::made();
        self.with_entry(task.migration, |entry| entry.is_built = true);
        DONE
    }

    fn connect(&mut self, migration: usize, is_taken: bool) -> Part {
        self.may_go_on(OrderNeed::UseHypervisor, migration)?;
        if !is_taken {
            return Err(ProblemKind::Refused);
        }
        let answers = self.answers(Host::Target) && self.serves(Host::Target);
        let qemu = self.target.qemu.as_mut().filter(|qemu| answers && qemu.stage == IncomingStage::Built);
        let Some(qemu) = qemu else { return Err(ProblemKind::Failed) };
        qemu.stage = IncomingStage::Listening;
        self.prepare_domain();
        self.open_disks();
        self.target.network_changed_for.insert(migration);
        DONE
    }

    fn record_run(&mut self, migration: usize) -> OrderEvent {
        match self.target.state(migration) {
            Some(State::Discarded) | None if self.planted != Planted::ForgottenDiscard => {
                return OrderEvent::Refused;
            }
            Some(State::Waiting) if self.is_target_disk_full() => return OrderEvent::Failed,
            Some(State::Waiting) => drop(self.target.journal.insert(migration, State::Running)),
            _ => {}
        }
        let is_settled = self.planted == Planted::SettledUnrun;
        self.with_entry(migration, |entry| {
            entry.memory.order_to_run();
            if is_settled {
                entry.memory.let_run();
            }
        });
        OrderEvent::Done
    }

    fn let_run_here(&mut self, migration: usize) -> OrderEvent {
        let runs = self.copy_at(Host::Target).is_some_and(|copy| copy.runs);
        if runs && self.target.has_vm {
            self.breach("I1: the target starts the VM twice".into());
        }
        debug_assert!(self.target.state(migration).is_some());
        match self.command_target() {
            Reply::Done => OrderEvent::Done,
            Reply::Gone if self.planted == Planted::GoneIsRun || self.was_let_run(migration) => {
                OrderEvent::Failed
            }
            Reply::Gone => OrderEvent::Gone,
            Reply::None => OrderEvent::Mute,
            Reply::Refused => OrderEvent::Refused,
        }
    }

    fn target_vm(&mut self, migration: usize) -> OrderEvent {
        match self.bar_others(migration) {
            OrderEvent::Done => {}
            OrderEvent::Failed => return OrderEvent::Mute,
            has_run => return has_run,
        }
        match self.copy_at(Host::Target) {
            None => OrderEvent::Gone,
            Some(_) if !self.answers(Host::Target) => OrderEvent::Mute,
            Some(copy) if copy.runs => OrderEvent::Vm(VmState::HasRun),
            Some(_) => OrderEvent::Vm(VmState::AsArrived),
        }
    }

    fn record_discard(&mut self, migration: usize) -> OrderEvent {
        let state = self.target.state(migration);
        if state == Some(State::Waiting) {
            if self.is_target_disk_full() {
                return OrderEvent::Failed;
            }
            self.target.journal.insert(migration, State::Discarded);
            self.target.remains.insert(migration);
            return OrderEvent::State(Some(State::Discarded));
        }
        OrderEvent::State(state)
    }

    fn cut_rest(&mut self, task: &Task) -> OrderEvent {
        let is_whole = self.target.qemu.as_ref().is_some_and(|qemu| qemu.rest_comes_by == Stream::Whole);
        let made_by = self.target.entries.get(&task.migration).and_then(|entry| entry.rest_by);
        if is_whole && task.question.is_some() && task.question < made_by {
            self.breach("I3: an earlier attempt to connect again cuts the connection of a later one".into());
        }
        if self.planted != Planted::CutForgotten {
            self.cut_connection();
        }
        OrderEvent::Done
    }

    /// QEMU listens for a connection that brings the rest of a VM that already runs here.
    fn listen_again(&mut self, task: &Task) -> OrderEvent {
        let qemu = self.target.qemu.as_mut().filter(|qemu| qemu.stage == IncomingStage::Enough);
        let Some(qemu) = qemu.filter(|qemu| qemu.takes_out_of_band() && qemu.rest_comes_by != Stream::Whole)
        else {
            return OrderEvent::Failed;
        };
        qemu.rest_comes_by = Stream::Awaited;
        self.with_entry(task.migration, |entry| entry.rest_by = task.question);
        OrderEvent::Done
    }

    fn look_at_connection(&self) -> OrderEvent {
        let Some(qemu) = &self.target.qemu else { return OrderEvent::Failed };
        let is_broken = qemu.rest_comes_by != Stream::Whole;
        let connection = match qemu.stage {
            _ if self.planted == Planted::EndsAtOnce => Connection::Broken,
            IncomingStage::Enough if is_broken && qemu.takes_out_of_band() => Connection::Broken,
            _ if !self.answers(Host::Target) && self.planted != Planted::MuteIsEnded => Connection::Unknown,
            IncomingStage::Enough => Connection::Whole,
            _ if self.planted == Planted::MuteIsEnded => Connection::Whole,
            _ => return OrderEvent::Received(Received::Whole),
        };
        OrderEvent::Connection(connection)
    }

    /// Ends the VM, since the rest will never come.
    fn end_part(&mut self) -> OrderEvent {
        if self.target.qemu.is_some() && !self.is_lost {
            self.breach("I3: a VM is ended of which all is here, or can still come".into());
        }
        self.saw(Sight::RestLost);
        self.target.qemu = None;
        OrderEvent::Done
    }

    /// Removes the incoming VM; returns whether it could.
    fn remove_incoming_vm(&mut self, migration: usize, has_entry: bool) -> bool {
        if self.is_in_parts() && has_entry {
            self.breach(
                "I3: the target's part of the VM is discarded, which the source cannot let run".into(),
            );
        }
        if has_entry && !self.end_domain(Host::Target) {
            return false;
        }
        self.target.network_changed_for.remove(&migration);
        self.target.entries.remove(&migration);
        self.target.remains.remove(&migration);
        true
    }
}

fn done_unless(is_failed: bool) -> OrderEvent {
    if is_failed { OrderEvent::Failed } else { OrderEvent::Done }
}
