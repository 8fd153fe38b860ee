//! One order that a target's agent carries out.
//!
//! ```text
//!  run      recall ─► look at what is here ─► record ─► let run ─► adopt ─► done
//!             │ discarded     │         ▲                 │  │ refused
//!             ▼               └─ take ──┘                 │  ▼
//!           remove ─►           the last                  │ look at the VM ─► it ran: adopt ─► failed
//!           discarded        ended before it was told: ┌──┘  │ as it arrived
//!                                                      ▼     ▼
//!                               failed ◄─ remove ◄─ take back
//!  view     recall ─► look, where the journal does not say it all ─► the view
//!  received take hold ─► wait ─► is there room in the journal? ─► the view
//!  discard  record ─► remove ─► note that the source knows ─► done
//!             ▲ others may let it run: recall ─► end it unless it ran ─► it ran: record that ─► let run ─► adopt ─► failed
//!  finish   recall ─► close ─► note that the source knows ─► done
//! ```
//!
//! Those about the rest of a VM that runs here in part are in [`rest`].
//!
//! libvirt's users may let a domain run as soon as its last is taken. So that is taken only by the order to run, which
//! comes after the source's record of the hand-over. One that somebody has let run is not discarded any more: its disks are
//! newer than its source's memory.

pub mod rest;

use self::rest::{Connection, Patience};
use super::{Hypervisor, IncomingState, IncomingView, KnownMigration, PostCopy, Received};
use crate::problem::ProblemKind;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Run the VM here.
    Run {
        /// By its source's word, which knows that the rest follows if not all of it is here. Else by what the journals
        /// say: of one that has lost the rest nobody knows whether the VM ran on there for a while.
        is_sources: bool,
    },
    /// Say what was decided, and what could be.
    View,
    /// Wait until what it needs to run is here.
    Receive,
    /// Never run it here.
    Discard {
        /// Its source hears of it.
        is_sources: bool,
    },
    /// The source has nothing more to ask.
    Finish,
    /// Listen for the rest of a VM that runs here, whose connection is broken.
    Reconnect,
    /// End a VM that waits for memory which will never come.
    End,
}

/// What is done next. Each action is answered by one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderAction {
    /// Say what is known; answered by [`OrderEvent::Known`].
    Recall,
    /// Take hold of a hypervisor that stood before this agent did.
    TakeHold,
    /// Ask the hypervisor what has come; answered by [`OrderEvent::Received`].
    Look,
    /// The same, of a VM that was told to run here; [`Received::InPart`] only where the rest is to come to this host.
    LookAtRest,
    /// Wait for what is to come, as long as the order says; answered by [`OrderEvent::Received`].
    Wait,
    /// Have the hypervisor take the last that its source's has handed over: only by the order to run, since others may let
    /// the VM run from then on.
    TakeLast,
    /// Fails unless the journal can record that the VM runs here: after the hand-over it would stand still until somebody
    /// makes room.
    CheckRoom,
    /// Record that it runs here; [`OrderEvent::Refused`] where it was discarded.
    RecordRun,
    /// Have the hypervisor run it; [`OrderEvent::Gone`] only where that had ended before it was told, else [`OrderEvent::Failed`].
    LetRun,
    /// Ask the hypervisor what the VM does, while nobody else lets it run; answered by [`OrderEvent::Vm`].
    LookAtVm,
    /// End the hypervisor of a VM that others may let run, while they cannot; answered by [`OrderEvent::Vm`], and nothing is
    /// ended, where they have.
    EndUnrun,
    /// Make it one of this host's VMs.
    Adopt,
    /// Record that it does not run here after all, and never did.
    TakeBackRun,
    /// Record that it will never run here, unless that it does is recorded; answered by [`OrderEvent::State`].
    RecordDiscard,
    /// End its hypervisor, put the network back.
    Remove,
    /// Put the network back, record that nothing is left to do.
    Close,
    /// Record that the source has nothing more to ask.
    NoteSourceKnows,
    /// Look after it as after one that is still to receive a part, unless somebody does; from here on, its orders wait
    /// for this one. Answered by [`OrderEvent::Refused`] where its source has made a later attempt to connect again
    /// ([`super::Memory::take_up_attempt`]).
    TakeUpPart,
    /// Break the connection by which its rest came, however whole that looks from here.
    CutConnection,
    /// Have the hypervisor wait for another one.
    ListenAgain,
    /// Ask the hypervisor whether that connection is broken; answered by [`OrderEvent::Connection`], or by
    /// [`OrderEvent::Received`] where nothing more is to come.
    LookAtConnection,
    /// Wait for [`rest::LOOK_EVERY_MS`]; answered by [`OrderEvent::Late`] from [`rest::LAST_BYTES_WITHIN_MS`] after the order.
    AwaitLastBytes,
    /// End the hypervisor, and the VM with it.
    EndVm,
    /// It is over.
    Answer(Answer),
}

/// What has come of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderEvent {
    /// What is known.
    Known(KnownMigration),
    /// What the hypervisor has.
    Received(Received),
    /// What the VM does.
    Vm(VmState),
    /// What the journal says now.
    State(Option<IncomingState>),
    /// How the connection is by which the rest comes.
    Connection(Connection),
    /// What was waited for takes too long.
    Late,
    /// It is done.
    Done,
    /// The hypervisor, or the journal, refused.
    Refused,
    /// The hypervisor lives, and did not answer in time.
    Mute,
    /// The hypervisor has ended.
    Gone,
    /// It failed otherwise.
    Failed,
}

/// What a VM does whose hypervisor refused to run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmState {
    /// It stands as it arrived.
    AsArrived,
    /// It runs, or has run: it may have run for a moment.
    HasRun,
}

/// What an order comes to.
pub type Answer = Result<OrderAnswer, Why>;

/// What is said of an order that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderAnswer {
    /// It is done.
    Done,
    /// What was decided, or could be.
    View(IncomingView),
}

/// Why an order was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// There is no record of the migration.
    NoRecord,
    /// The VM is not on its way here.
    NotOnItsWay,
    /// Nothing more is to come to it.
    NothingToCome,
    /// Its source has made a later attempt to connect again.
    Overtaken,
    /// It was given up here.
    Discarded,
    /// It runs here.
    RunsHere,
    /// Nothing waits for its state yet.
    NotBuilt,
    /// Not all that it needs is here.
    Incomplete,
    /// The transfer has failed.
    TransferFailed,
    /// Its hypervisor does not say whether it runs.
    RunsNotYet,
    /// Its hypervisor did not let it run.
    DoesNotRun,
    /// Its hypervisor does not answer.
    Mute,
    /// What was done last failed.
    Failed,
}

impl Why {
    /// The kind of problem as which it is reported.
    pub fn kind(self) -> ProblemKind {
        match self {
            Self::NoRecord | Self::NotOnItsWay => ProblemKind::NotFound,
            Self::NothingToCome | Self::Overtaken | Self::Discarded | Self::RunsHere | Self::NotBuilt => {
                ProblemKind::Conflict
            }
            Self::Incomplete
            | Self::TransferFailed
            | Self::RunsNotYet
            | Self::DoesNotRun
            | Self::Mute
            | Self::Failed => ProblemKind::Failed,
        }
    }
}

/// What a run of the agent knows of a VM on its way here when an order about it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComingVm {
    /// See [`super::Memory::came_in_parts`].
    pub came_in_parts: bool,
    /// Others than its agent may let it run, once the last of it is taken.
    pub obeys_others: bool,
}

/// An order that is being carried out.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    order: Order,
    // The VM is on its way here, as far as this run of the agent knows.
    is_on_its_way: bool,
    doing: OrderAction,
    known: Option<KnownMigration>,
    came_in_parts: bool,
    is_refused: bool,
    patience: Patience,
    said: Answer,
}

impl Task {
    /// Begins an order, with its first action.
    pub fn begin(order: Order, vm: Option<ComingVm>) -> (Self, OrderAction) {
        let is_on_its_way = vm.is_some();
        let doing = match order {
            Order::Receive if !is_on_its_way => OrderAction::Answer(Err(Why::NotOnItsWay)),
            Order::Receive => OrderAction::TakeHold,
            Order::Discard { .. } if vm.is_some_and(|vm| vm.obeys_others) => OrderAction::Recall,
            Order::Discard { .. } => OrderAction::RecordDiscard,
            Order::Run { .. } | Order::View | Order::Finish | Order::Reconnect | Order::End => {
                OrderAction::Recall
            }
        };
        let task = Self {
            order,
            is_on_its_way,
            doing,
            known: None,
            came_in_parts: vm.is_some_and(|vm| vm.came_in_parts),
            is_refused: false,
            patience: Patience::Waits,
            said: Ok(OrderAnswer::Done),
        };
        (task, doing)
    }

    /// Takes what has come of the last action; says what to do next.
    pub fn handle(&mut self, event: OrderEvent) -> OrderAction {
        if let OrderEvent::Known(known) = event {
            self.known = Some(known);
        }
        self.came_in_parts |= event == OrderEvent::Received(Received::InPart);
        self.doing = match self.order {
            Order::Run { is_sources } => self.run(event, is_sources),
            Order::View => self.view(event),
            Order::Receive => self.receive(event),
            Order::Discard { is_sources } => self.discard(event, is_sources),
            Order::Finish => self.finish(event),
            Order::Reconnect => self.reconnect(event),
            Order::End => self.end(event),
        };
        self.doing
    }

    fn run(&mut self, event: OrderEvent, is_sources: bool) -> OrderAction {
        match (self.doing, event) {
            (OrderAction::Recall, OrderEvent::Known(known)) => self.begin_run(known),
            (OrderAction::Look, OrderEvent::Received(Received::Whole))
            | (OrderAction::TakeLast, OrderEvent::Done) => OrderAction::RecordRun,
            (OrderAction::Look, OrderEvent::Received(Received::InPart)) if is_sources => {
                OrderAction::RecordRun
            }
            (OrderAction::Look, OrderEvent::Received(Received::Untaken)) => OrderAction::TakeLast,
            (OrderAction::Look, OrderEvent::Received(_)) | (OrderAction::TakeLast, OrderEvent::Gone) => {
                OrderAction::Answer(Err(Why::Incomplete))
            }
            // It ended just when it was told to run, which was not known then.
            (OrderAction::Look, OrderEvent::Gone) if self.state() == Some(IncomingState::Running) => {
                self.adopt(Err(Why::Failed))
            }
            (OrderAction::RecordRun, OrderEvent::Done) => OrderAction::LetRun,
            (OrderAction::RecordRun, OrderEvent::Refused) => OrderAction::Answer(Err(Why::Discarded)),
            (OrderAction::LetRun, OrderEvent::Done) => self.adopt(Ok(OrderAnswer::Done)),
            (OrderAction::LetRun, OrderEvent::Refused | OrderEvent::Failed) => {
                self.is_refused = event == OrderEvent::Refused;
                OrderAction::LookAtVm
            }
            // A refusal, as of a disk that another QEMU holds locked, means that the source can have it back, as long as
            // it is as it arrived; but with post-copy the source could not let it run.
            (OrderAction::LookAtVm, OrderEvent::Vm(VmState::AsArrived))
                if self.is_refused && !self.came_in_parts =>
            {
                OrderAction::TakeBackRun
            }
            // Its hypervisor ended before anybody told it to run: the VM is the source's as it was.
            (OrderAction::LetRun, OrderEvent::Gone)
                if self.state() == Some(IncomingState::Waiting) && !self.came_in_parts =>
            {
                OrderAction::TakeBackRun
            }
            // It may have run for a moment, before its QEMU ended, or before a vCPU failed, after which a second order to
            // run is refused. So its source must not let it run again; it has crashed here.
            (OrderAction::LetRun | OrderAction::LookAtVm, OrderEvent::Gone)
            | (OrderAction::LookAtVm, OrderEvent::Vm(VmState::HasRun)) => self.adopt(Err(Why::DoesNotRun)),
            (OrderAction::Adopt, _) => OrderAction::Answer(self.said),
            (OrderAction::TakeBackRun, OrderEvent::Done) => OrderAction::Remove,
            (OrderAction::Remove, OrderEvent::Done) if self.state() == Some(IncomingState::Discarded) => {
                OrderAction::Answer(Err(Why::Discarded))
            }
            // Without an answer it is not known; whoever gave the order asks again.
            (
                OrderAction::LetRun | OrderAction::LookAtVm | OrderAction::TakeBackRun | OrderAction::Remove,
                _,
            ) => OrderAction::Answer(Err(Why::DoesNotRun)),
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }

    /// The VM may be paused by now, on its way to a third host, or have left for that: an order that is repeated, or late,
    /// must not touch it.
    fn begin_run(&self, known: KnownMigration) -> OrderAction {
        if !self.is_on_its_way || known.is_adopted || known.state == Some(IncomingState::Finished) {
            return OrderAction::Answer(already_runs(known).map(|()| OrderAnswer::Done));
        }
        if known.state == Some(IncomingState::Discarded) {
            // Whoever gave it up may have been kept from removing it: an order ends when its giver hangs up.
            return OrderAction::Remove;
        }
        match known.hypervisor {
            Hypervisor::None | Hypervisor::Unresponsive => OrderAction::Answer(Err(Why::NotBuilt)),
            Hypervisor::Ended | Hypervisor::There => OrderAction::Look,
        }
    }

    fn adopt(&mut self, said: Answer) -> OrderAction {
        self.said = said;
        OrderAction::Adopt
    }

    fn state(&self) -> Option<IncomingState> {
        self.known.and_then(|known| known.state)
    }

    fn view(&self, event: OrderEvent) -> OrderAction {
        let view = match (self.known, event) {
            (_, OrderEvent::Known(known)) => match self.view_by_record(known) {
                Ok(view) => view,
                Err(action) => return action,
            },
            (Some(known), event) => match self.view_by_hypervisor(known, event) {
                Ok(view) => view,
                Err(why) => return OrderAction::Answer(Err(why)),
            },
            (None, _) => return OrderAction::Answer(Err(Why::Failed)),
        };
        OrderAction::Answer(Ok(OrderAnswer::View(view)))
    }

    /// What is to be said, or what has to be done to know it.
    fn view_by_record(&self, known: KnownMigration) -> Result<IncomingView, OrderAction> {
        match known.state {
            None => Ok(IncomingView::Unknown),
            Some(IncomingState::Discarded) => Ok(IncomingView::Discarded),
            // Its vCPU, or its hypervisor's main thread, may wait for a page, with the lock that every answer needs. Where
            // the connection is broken the page comes only if the source hears this and makes another one.
            Some(IncomingState::Running) if known.awaits_run && known.lacks_part => {
                Err(OrderAction::LookAtRest)
            }
            // The source must not let its copy go.
            Some(IncomingState::Running) if known.awaits_run => Ok(IncomingView::Ready),
            // It came whole, whatever became of it; or it came again by another migration since.
            Some(IncomingState::Running | IncomingState::Finished)
                if known.post_copy == PostCopy::Refused =>
            {
                Ok(IncomingView::Running)
            }
            Some(IncomingState::Running | IncomingState::Finished) => match known.hypervisor {
                Hypervisor::Unresponsive => Err(OrderAction::Answer(Err(Why::Mute))),
                Hypervisor::None | Hypervisor::Ended => Ok(IncomingView::Ended),
                Hypervisor::There if known.post_copy == PostCopy::Past => Ok(IncomingView::Running),
                Hypervisor::There => Err(OrderAction::LookAtRest),
            },
            Some(IncomingState::Waiting) => match known.hypervisor {
                _ if !self.is_on_its_way => Ok(IncomingView::Waiting),
                Hypervisor::None | Hypervisor::Ended => Ok(IncomingView::Waiting),
                Hypervisor::Unresponsive => Err(OrderAction::Answer(Err(Why::Mute))),
                Hypervisor::There => Err(OrderAction::Look),
            },
        }
    }

    /// An error where the hypervisor does not say: what it has may be the only copy of the VM.
    fn view_by_hypervisor(&self, known: KnownMigration, event: OrderEvent) -> Result<IncomingView, Why> {
        match (self.doing, event) {
            (OrderAction::Look, OrderEvent::Received(Received::Whole | Received::Untaken)) => {
                Ok(IncomingView::Ready)
            }
            (OrderAction::Look, OrderEvent::Received(Received::InPart)) => Ok(IncomingView::ReadyInPart),
            (OrderAction::Look, OrderEvent::Mute) => Err(Why::Mute),
            (OrderAction::Look, OrderEvent::Failed) => Err(Why::Failed),
            (OrderAction::Look, _) => Ok(IncomingView::Waiting),
            // Its main thread may itself wait for a page.
            (_, OrderEvent::Mute) if known.lacks_part => Ok(IncomingView::RunningInPart),
            (_, _) if known.awaits_run => Ok(IncomingView::Ready),
            (_, OrderEvent::Received(Received::InPart)) => Ok(IncomingView::RunningInPart),
            (_, OrderEvent::Received(_)) => Ok(IncomingView::Running),
            (_, OrderEvent::Gone) => Ok(IncomingView::Ended),
            (_, OrderEvent::Mute) => Err(Why::Mute),
            _ => Err(Why::Failed),
        }
    }

    fn receive(&mut self, event: OrderEvent) -> OrderAction {
        match (self.doing, event) {
            (OrderAction::TakeHold, OrderEvent::Done) => OrderAction::Wait,
            (OrderAction::TakeHold, OrderEvent::Gone) => OrderAction::Answer(Err(Why::NotBuilt)),
            (OrderAction::Wait, OrderEvent::Received(Received::Whole | Received::Untaken)) => {
                self.check_room(IncomingView::Ready)
            }
            (OrderAction::Wait, OrderEvent::Received(Received::InPart)) => {
                self.check_room(IncomingView::ReadyInPart)
            }
            (OrderAction::Wait, OrderEvent::Received(Received::Failed)) => {
                OrderAction::Answer(Err(Why::TransferFailed))
            }
            // Its main thread waits for pages that are late. For how long they may be is the source's to say.
            (OrderAction::TakeHold, _) | (OrderAction::Wait, OrderEvent::Received(_) | OrderEvent::Mute) => {
                self.check_room(IncomingView::Waiting)
            }
            (OrderAction::CheckRoom, OrderEvent::Done) => OrderAction::Answer(self.said),
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }

    fn check_room(&mut self, view: IncomingView) -> OrderAction {
        self.said = Ok(OrderAnswer::View(view));
        OrderAction::CheckRoom
    }

    fn discard(&mut self, event: OrderEvent, is_sources: bool) -> OrderAction {
        match (self.doing, event) {
            (
                OrderAction::Recall,
                OrderEvent::Known(KnownMigration { state: Some(IncomingState::Waiting), .. }),
            ) => OrderAction::EndUnrun,
            (OrderAction::Recall, OrderEvent::Known(_))
            | (OrderAction::EndUnrun, OrderEvent::Done | OrderEvent::Gone) => OrderAction::RecordDiscard,
            (OrderAction::EndUnrun, OrderEvent::Vm(_)) => OrderAction::RecordRun,
            (OrderAction::RecordRun, OrderEvent::Done) => OrderAction::LetRun,
            (OrderAction::RecordRun, OrderEvent::Refused) => OrderAction::Answer(Err(Why::Discarded)),
            // Whether or not it goes on running: it has run here.
            (OrderAction::LetRun, _) => self.adopt(Err(Why::RunsHere)),
            (OrderAction::Adopt, _) => OrderAction::Answer(self.said),
            (_, OrderEvent::State(Some(IncomingState::Running | IncomingState::Finished))) => {
                OrderAction::Answer(Err(Why::RunsHere))
            }
            (_, OrderEvent::State(None)) if !self.is_on_its_way => OrderAction::Answer(Err(Why::NoRecord)),
            (_, OrderEvent::State(_)) => OrderAction::Remove,
            (OrderAction::Remove, OrderEvent::Done) if is_sources => OrderAction::NoteSourceKnows,
            (OrderAction::Remove | OrderAction::NoteSourceKnows, OrderEvent::Done) => {
                OrderAction::Answer(Ok(OrderAnswer::Done))
            }
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }

    fn finish(&self, event: OrderEvent) -> OrderAction {
        match (self.doing, event) {
            (OrderAction::Recall, OrderEvent::Known(known)) => match already_runs(known) {
                Err(why) => OrderAction::Answer(Err(why)),
                Ok(()) if self.is_on_its_way => OrderAction::Close,
                Ok(()) => OrderAction::NoteSourceKnows,
            },
            (OrderAction::Close, OrderEvent::Done) => OrderAction::NoteSourceKnows,
            (OrderAction::NoteSourceKnows, OrderEvent::Done) => OrderAction::Answer(Ok(OrderAnswer::Done)),
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }
}

fn already_runs(known: KnownMigration) -> Result<(), Why> {
    match known.state {
        Some(IncomingState::Running) if known.awaits_run => Err(Why::RunsNotYet),
        Some(IncomingState::Running | IncomingState::Finished) => Ok(()),
        Some(IncomingState::Waiting | IncomingState::Discarded) => Err(Why::Discarded),
        None => Err(Why::NoRecord),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMING: KnownMigration = KnownMigration {
        hypervisor: Hypervisor::There,
        ..KnownMigration::by_decision_alone(Some(IncomingState::Waiting))
    };
    const WHOLE: OrderEvent = OrderEvent::Received(Received::Whole);
    const BY_SOURCE: Order = Order::Run { is_sources: true };

    /// What to do about an order for a VM on its way, given this outcome.
    fn does(order: Order, events: &[OrderEvent]) -> Vec<OrderAction> {
        does_with(ComingVm { came_in_parts: false, obeys_others: false }, order, events)
    }

    fn does_with(vm: ComingVm, order: Order, events: &[OrderEvent]) -> Vec<OrderAction> {
        let (mut task, first) = Task::begin(order, Some(vm));
        std::iter::once(first).chain(events.iter().map(|event| task.handle(*event))).collect()
    }

    fn ends(order: Order, known: KnownMigration, events: &[OrderEvent]) -> OrderAction {
        let events: Vec<OrderEvent> =
            [OrderEvent::Known(known)].into_iter().chain(events.iter().copied()).collect();
        *does(order, &events).last().expect("the first action is there")
    }

    #[test]
    fn it_runs_once_all_is_here_and_that_is_recorded() {
        assert_eq!(
            does(
                BY_SOURCE,
                &[OrderEvent::Known(COMING), WHOLE, OrderEvent::Done, OrderEvent::Done, OrderEvent::Done]
            ),
            [
                OrderAction::Recall,
                OrderAction::Look,
                OrderAction::RecordRun,
                OrderAction::LetRun,
                OrderAction::Adopt,
                OrderAction::Answer(Ok(OrderAnswer::Done))
            ]
        );
        for missing in [Received::Incomplete, Received::Failed] {
            assert_eq!(
                ends(BY_SOURCE, COMING, &[OrderEvent::Received(missing)]),
                OrderAction::Answer(Err(Why::Incomplete))
            );
        }
    }

    #[test]
    fn what_is_here_in_part_runs_by_its_sources_order_alone() {
        let in_part = OrderEvent::Received(Received::InPart);
        assert_eq!(ends(BY_SOURCE, COMING, &[in_part]), OrderAction::RecordRun);
        let own = Order::Run { is_sources: false };
        assert_eq!(ends(own, COMING, &[in_part]), OrderAction::Answer(Err(Why::Incomplete)));
    }

    #[test]
    fn what_was_discarded_never_runs_and_is_removed() {
        let discarded = KnownMigration { state: Some(IncomingState::Discarded), ..COMING };
        assert_eq!(ends(BY_SOURCE, discarded, &[]), OrderAction::Remove);
        assert_eq!(ends(BY_SOURCE, discarded, &[OrderEvent::Done]), OrderAction::Answer(Err(Why::Discarded)));
        assert_eq!(
            ends(BY_SOURCE, COMING, &[WHOLE, OrderEvent::Refused]),
            OrderAction::Answer(Err(Why::Discarded))
        );
    }

    #[test]
    fn one_that_never_ran_goes_back_to_its_source_and_one_that_may_have_run_does_not() {
        let run_recorded = [WHOLE, OrderEvent::Done];
        let then = |events: &[OrderEvent]| ends(BY_SOURCE, COMING, &[&run_recorded[..], events].concat());
        assert_eq!(then(&[OrderEvent::Gone]), OrderAction::TakeBackRun);
        assert_eq!(
            then(&[OrderEvent::Refused, OrderEvent::Vm(VmState::AsArrived)]),
            OrderAction::TakeBackRun
        );
        assert_eq!(then(&[OrderEvent::Refused, OrderEvent::Vm(VmState::HasRun)]), OrderAction::Adopt);
        assert_eq!(then(&[OrderEvent::Failed, OrderEvent::Gone]), OrderAction::Adopt);
        assert_eq!(
            then(&[OrderEvent::Failed, OrderEvent::Vm(VmState::AsArrived)]),
            OrderAction::Answer(Err(Why::DoesNotRun))
        );
        assert_eq!(then(&[OrderEvent::Mute]), OrderAction::Answer(Err(Why::DoesNotRun)));
        // An earlier order may have let it run.
        let ordered_before =
            KnownMigration { state: Some(IncomingState::Running), awaits_run: true, ..COMING };
        assert_eq!(
            ends(BY_SOURCE, ordered_before, &[WHOLE, OrderEvent::Done, OrderEvent::Gone]),
            OrderAction::Adopt
        );
    }

    #[test]
    fn with_post_copy_none_goes_back() {
        let in_part = [OrderEvent::Received(Received::InPart), OrderEvent::Done];
        let then = |events: &[OrderEvent]| ends(BY_SOURCE, COMING, &[&in_part[..], events].concat());
        assert_eq!(then(&[OrderEvent::Gone]), OrderAction::Adopt);
        assert_eq!(
            then(&[OrderEvent::Refused, OrderEvent::Vm(VmState::AsArrived)]),
            OrderAction::Answer(Err(Why::DoesNotRun))
        );
    }

    #[test]
    fn that_it_runs_is_said_only_once_its_hypervisor_has_said_so() {
        let view = |known| ends(Order::View, known, &[]);
        let says = |view| OrderAction::Answer(Ok(OrderAnswer::View(view)));
        let ordered = KnownMigration { state: Some(IncomingState::Running), awaits_run: true, ..COMING };
        assert_eq!(view(ordered), says(IncomingView::Ready));
        assert_eq!(view(KnownMigration { awaits_run: false, ..ordered }), says(IncomingView::Running));
        let in_part = KnownMigration { lacks_part: true, post_copy: PostCopy::Allowed, ..ordered };
        assert_eq!(view(in_part), OrderAction::LookAtRest);
        // The source makes another connection, by which the page comes that it waits for.
        assert_eq!(ends(Order::View, in_part, &[OrderEvent::Mute]), says(IncomingView::RunningInPart));
    }

    #[test]
    fn a_mute_hypervisor_may_have_the_only_copy() {
        let mute = KnownMigration { hypervisor: Hypervisor::Unresponsive, ..COMING };
        assert_eq!(ends(Order::View, mute, &[]), OrderAction::Answer(Err(Why::Mute)));
        assert_eq!(ends(Order::View, COMING, &[OrderEvent::Mute]), OrderAction::Answer(Err(Why::Mute)));
    }

    #[test]
    fn what_runs_here_is_not_discarded() {
        for state in [IncomingState::Running, IncomingState::Finished] {
            let order = Order::Discard { is_sources: true };
            let done = does(order, &[OrderEvent::State(Some(state))]);
            assert_eq!(done, [OrderAction::RecordDiscard, OrderAction::Answer(Err(Why::RunsHere))]);
        }
    }

    #[test]
    fn the_last_is_taken_by_the_order_to_run_alone() {
        let untaken = OrderEvent::Received(Received::Untaken);
        let ready = OrderAction::Answer(Ok(OrderAnswer::View(IncomingView::Ready)));
        assert_eq!(ends(Order::View, COMING, &[untaken]), ready);
        let received = does(Order::Receive, &[OrderEvent::Done, untaken, OrderEvent::Done]);
        assert_eq!(received[1..], [OrderAction::Wait, OrderAction::CheckRoom, ready]);
        let taken = [untaken, OrderEvent::Done, OrderEvent::Done];
        let run: Vec<OrderAction> = (1..=3).map(|events| ends(BY_SOURCE, COMING, &taken[..events])).collect();
        assert_eq!(run, [OrderAction::TakeLast, OrderAction::RecordRun, OrderAction::LetRun]);
        for (untaken_for, why) in [(OrderEvent::Gone, Why::Incomplete), (OrderEvent::Mute, Why::Failed)] {
            let answer = ends(BY_SOURCE, COMING, &[untaken, untaken_for]);
            assert_eq!(answer, OrderAction::Answer(Err(why)));
        }
    }

    #[test]
    fn what_others_may_let_run_is_ended_before_it_is_recorded_as_discarded_and_kept_if_they_have() {
        let domain = ComingVm { came_in_parts: false, obeys_others: true };
        let order = Order::Discard { is_sources: true };
        let discarded = OrderEvent::State(Some(IncomingState::Discarded));
        let known = OrderEvent::Known(COMING);
        assert_eq!(
            does_with(domain, order, &[known, OrderEvent::Done, discarded])[..],
            [OrderAction::Recall, OrderAction::EndUnrun, OrderAction::RecordDiscard, OrderAction::Remove]
        );
        // It may be on its way to a third host by now.
        let runs = OrderEvent::Known(KnownMigration { state: Some(IncomingState::Running), ..COMING });
        assert_eq!(does_with(domain, order, &[runs])[1..], [OrderAction::RecordDiscard]);
        for came_of_it in [OrderEvent::Done, OrderEvent::Gone, OrderEvent::Mute] {
            let has_run = OrderEvent::Vm(VmState::HasRun);
            let events = [known, has_run, OrderEvent::Done, came_of_it, OrderEvent::Done];
            assert_eq!(
                does_with(domain, order, &events)[2..],
                [
                    OrderAction::RecordRun,
                    OrderAction::LetRun,
                    OrderAction::Adopt,
                    OrderAction::Answer(Err(Why::RunsHere))
                ]
            );
        }
        // Nobody knows whether it has run.
        let unlooked = does_with(domain, order, &[known, OrderEvent::Failed]);
        assert_eq!(unlooked[2..], [OrderAction::Answer(Err(Why::Failed))]);
    }

    #[test]
    fn a_full_disk_is_told_before_the_hand_over() {
        let received = does(Order::Receive, &[OrderEvent::Done, WHOLE, OrderEvent::Failed]);
        assert_eq!(received[2..], [OrderAction::CheckRoom, OrderAction::Answer(Err(Why::Failed))]);
    }
}
