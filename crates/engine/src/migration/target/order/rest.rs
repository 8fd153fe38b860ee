//! With post-copy: the rest of a VM that runs here in part, when its connection is broken.
//!
//! ```text
//!  reconnect  recall ─► look at the rest ─► take it up ─► cut the connection ─► listen again ─► done
//!  end        recall ─► look at the rest ─► look at the connection ─► broken: end the VM ─► done
//!                         ▲                   │ not, and it is late: end the VM; one that says nothing is cut off first
//!                         └── await the last ◄┘
//! ```
//!
//! Orders to reconnect are numbered by their source. One of an earlier attempt may come after a later one, if its giver's
//! kernel still had to send it: it would cut the connection of the later one. Just as the last message of the rest is on its
//! way, that would cost the VM. So it is refused.

use super::{OrderAction, OrderEvent, Task, Why};
use crate::migration::target::{Hypervisor, IncomingState, KnownMigration, PostCopy, Received};

/// How long the last bytes of a source that is gone may be on their way, and how often it is looked whether they are. In ms.
pub const LAST_BYTES_WITHIN_MS: u64 = 3_000;
/// See [`LAST_BYTES_WITHIN_MS`].
pub const LOOK_EVERY_MS: u64 = 100;

/// How the connection is by which the rest of a VM comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connection {
    /// As far as the hypervisor knows, it is whole.
    Whole,
    /// It is broken, which a hypervisor says that waits for a page, too.
    Broken,
    /// The hypervisor says nothing: it may have got all.
    Unknown,
}

/// How far an end has come that waits for the last bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    Waits,
    /// They have had their time.
    Late,
    /// And the connection is cut.
    Cut,
}

impl Task {
    pub(super) fn reconnect(&self, event: OrderEvent) -> OrderAction {
        match (self.doing, event) {
            (OrderAction::Recall, OrderEvent::Known(known)) => match lacks_rest(known) {
                Ok(Hypervisor::There) => OrderAction::LookAtRest,
                Ok(Hypervisor::Unresponsive) => OrderAction::Answer(Err(Why::Mute)),
                Ok(Hypervisor::None | Hypervisor::Ended) => OrderAction::Answer(Err(Why::NothingToCome)),
                Err(why) => OrderAction::Answer(Err(why)),
            },
            (OrderAction::LookAtRest, event) => match self.rest_is_missing(event) {
                Ok(()) => OrderAction::TakeUpPart,
                Err(why) => OrderAction::Answer(Err(why)),
            },
            (OrderAction::TakeUpPart, OrderEvent::Done) => OrderAction::CutConnection,
            (OrderAction::TakeUpPart, OrderEvent::Refused) => OrderAction::Answer(Err(Why::Overtaken)),
            // One over which nothing comes any more may look whole from here, and one that is broken is not cut.
            (OrderAction::CutConnection, _) => OrderAction::ListenAgain,
            (OrderAction::ListenAgain, OrderEvent::Done) => OrderAction::Answer(self.said),
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }

    pub(super) fn end(&mut self, event: OrderEvent) -> OrderAction {
        if event == OrderEvent::Late && self.patience == Patience::Waits {
            self.patience = Patience::Late;
        }
        match (self.doing, event) {
            (OrderAction::Recall, OrderEvent::Known(known)) => match lacks_rest(known) {
                Ok(Hypervisor::There) => OrderAction::LookAtRest,
                Ok(Hypervisor::Unresponsive) => OrderAction::Answer(Err(Why::Mute)),
                // It has ended.
                Ok(Hypervisor::None | Hypervisor::Ended) => OrderAction::Answer(self.said),
                Err(why) => OrderAction::Answer(Err(why)),
            },
            (OrderAction::LookAtRest, event) => match self.rest_is_missing(event) {
                Ok(()) => OrderAction::LookAtConnection,
                Err(why) => OrderAction::Answer(Err(why)),
            },
            (OrderAction::LookAtConnection, OrderEvent::Connection(Connection::Broken)) => OrderAction::EndVm,
            (OrderAction::LookAtConnection, OrderEvent::Connection(connection)) => {
                self.not_broken(connection)
            }
            (OrderAction::CutConnection, _) => OrderAction::AwaitLastBytes,
            (OrderAction::LookAtConnection, OrderEvent::Received(_)) => {
                OrderAction::Answer(Err(Why::NothingToCome))
            }
            (OrderAction::AwaitLastBytes, OrderEvent::Done | OrderEvent::Late) => OrderAction::LookAtRest,
            (OrderAction::EndVm, OrderEvent::Done) => OrderAction::Answer(self.said),
            _ => OrderAction::Answer(Err(Why::Failed)),
        }
    }

    fn not_broken(&mut self, connection: Connection) -> OrderAction {
        match (self.patience, connection) {
            // All that its source has sent may be on its way still.
            (Patience::Waits, _) => OrderAction::AwaitLastBytes,
            // One that waits for a page of a source that has vanished notices nothing by itself; one that has all cannot be
            // cut off any more.
            (Patience::Late, Connection::Unknown) => {
                self.patience = Patience::Cut;
                OrderAction::CutConnection
            }
            (Patience::Cut, Connection::Unknown) => OrderAction::Answer(Err(Why::Mute)),
            // Its source is gone, and the hypervisor has not noticed.
            (Patience::Late | Patience::Cut, Connection::Whole | Connection::Broken) => OrderAction::EndVm,
        }
    }

    fn rest_is_missing(&self, event: OrderEvent) -> Result<(), Why> {
        match event {
            OrderEvent::Received(Received::InPart) => Ok(()),
            // Its main thread may itself wait for a page.
            OrderEvent::Mute if self.known.is_some_and(|known| known.lacks_part) => Ok(()),
            OrderEvent::Mute => Err(Why::Mute),
            OrderEvent::Received(_) | OrderEvent::Gone => Err(Why::NothingToCome),
            _ => Err(Why::Failed),
        }
    }
}

/// Its hypervisor, if a part of the VM may be missing.
fn lacks_rest(known: KnownMigration) -> Result<Hypervisor, Why> {
    let was_ordered_to_run = matches!(known.state, Some(IncomingState::Running | IncomingState::Finished));
    if was_ordered_to_run && known.post_copy == PostCopy::Allowed {
        Ok(known.hypervisor)
    } else {
        Err(Why::NothingToCome)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ComingVm, Order, OrderAnswer};
    use super::*;
    use crate::migration::target::Memory;

    const IN_PART: KnownMigration = KnownMigration {
        state: Some(IncomingState::Running),
        is_adopted: true,
        awaits_run: false,
        lacks_part: true,
        post_copy: PostCopy::Allowed,
        hypervisor: Hypervisor::There,
    };
    const PART: OrderEvent = OrderEvent::Received(Received::InPart);
    const DONE: OrderAction = OrderAction::Answer(Ok(OrderAnswer::Done));

    fn fails(why: Why) -> OrderAction {
        OrderAction::Answer(Err(why))
    }

    #[test]
    fn an_attempt_that_was_overtaken_cuts_nothing() {
        let mut memory = Memory::of_part(0.0);
        for (attempt, is_taken_up) in
            [(None, true), (Some(7), true), (None, true), (Some(7), false), (Some(6), false), (Some(8), true)]
        {
            assert_eq!(memory.take_up_attempt(attempt), is_taken_up, "{attempt:?}");
        }
        let overtaken = [PART, OrderEvent::Refused];
        let done = does(Order::Reconnect, IN_PART, &overtaken);
        assert_eq!(done[2..], [OrderAction::TakeUpPart, fails(Why::Overtaken)]);
    }

    fn does(order: Order, known: KnownMigration, events: &[OrderEvent]) -> Vec<OrderAction> {
        let vm = ComingVm { came_in_parts: true, obeys_others: false };
        let (mut task, first) = Task::begin(order, Some(vm));
        let events = [&[OrderEvent::Known(known)], events].concat();
        std::iter::once(first).chain(events.iter().map(|event| task.handle(*event))).collect()
    }

    fn ends(order: Order, known: KnownMigration, events: &[OrderEvent]) -> OrderAction {
        *does(order, known, events).last().expect("the first action is there")
    }

    #[test]
    fn it_listens_again_once_what_is_left_of_the_connection_is_cut() {
        let done =
            does(Order::Reconnect, IN_PART, &[PART, OrderEvent::Done, OrderEvent::Failed, OrderEvent::Done]);
        let expected = [OrderAction::TakeUpPart, OrderAction::CutConnection, OrderAction::ListenAgain, DONE];
        assert_eq!(done[2..], expected);
        // QEMU may be waiting for the page that the other connection brings.
        assert_eq!(ends(Order::Reconnect, IN_PART, &[OrderEvent::Mute]), OrderAction::TakeUpPart);
    }

    #[test]
    fn what_is_here_whole_or_came_again_since_neither_listens_nor_ends() {
        for order in [Order::Reconnect, Order::End] {
            let whole = ends(order, IN_PART, &[OrderEvent::Received(Received::Whole)]);
            assert_eq!(whole, fails(Why::NothingToCome));
            for other in [
                KnownMigration { post_copy: PostCopy::Past, ..IN_PART },
                KnownMigration { post_copy: PostCopy::Refused, ..IN_PART },
                KnownMigration { state: Some(IncomingState::Waiting), ..IN_PART },
                KnownMigration { state: None, ..IN_PART },
            ] {
                assert_eq!(ends(order, other, &[]), fails(Why::NothingToCome));
            }
            let unresponsive = KnownMigration { hypervisor: Hypervisor::Unresponsive, ..IN_PART };
            assert_eq!(ends(order, unresponsive, &[]), fails(Why::Mute));
            let known_whole = KnownMigration { lacks_part: false, ..IN_PART };
            assert_eq!(ends(order, known_whole, &[OrderEvent::Mute]), fails(Why::Mute));
        }
    }

    #[test]
    fn one_whose_connection_is_broken_is_ended_at_once_and_else_once_the_last_bytes_had_their_time() {
        let is = OrderEvent::Connection;
        assert_eq!(ends(Order::End, IN_PART, &[PART, is(Connection::Broken)]), OrderAction::EndVm);
        let waits = [PART, is(Connection::Whole), OrderEvent::Done, PART, is(Connection::Whole)];
        assert_eq!(ends(Order::End, IN_PART, &waits), OrderAction::AwaitLastBytes);
        let late = [&waits[..], &[OrderEvent::Late, PART, is(Connection::Whole), OrderEvent::Done]].concat();
        let done = does(Order::End, IN_PART, &late);
        assert_eq!(done[done.len() - 2..], [OrderAction::EndVm, DONE]);
    }

    #[test]
    fn one_that_gets_the_last_bytes_meanwhile_is_not_ended() {
        let is = OrderEvent::Connection;
        let whole = OrderEvent::Received(Received::Whole);
        let at_last = [PART, is(Connection::Whole), OrderEvent::Late, PART, whole];
        assert_eq!(ends(Order::End, IN_PART, &at_last), fails(Why::NothingToCome));
    }

    #[test]
    fn one_that_says_nothing_is_cut_off_and_ended_only_if_it_notices() {
        let unknown = OrderEvent::Connection(Connection::Unknown);
        let late = [OrderEvent::Mute, unknown, OrderEvent::Late, OrderEvent::Mute, unknown];
        assert_eq!(ends(Order::End, IN_PART, &late), OrderAction::CutConnection);
        let then = |connection| {
            let cut =
                [OrderEvent::Done, OrderEvent::Late, OrderEvent::Mute, OrderEvent::Connection(connection)];
            ends(Order::End, IN_PART, &[&late[..], &cut].concat())
        };
        assert_eq!(then(Connection::Broken), OrderAction::EndVm);
        assert_eq!(then(Connection::Unknown), fails(Why::Mute));
    }

    #[test]
    fn one_that_has_ended_needs_no_end() {
        for hypervisor in [Hypervisor::None, Hypervisor::Ended] {
            assert_eq!(ends(Order::End, KnownMigration { hypervisor, ..IN_PART }, &[]), DONE);
        }
    }
}
