//! With post-copy: the rest of a VM that runs here in part, when its connection is broken.
//!
//! ```text
//!  reconnect  recall ─► look at the rest ─► take it up ─► cut the connection ─► listen again ─► done
//!  end        recall ─► look at the rest ─► look at the connection ─► broken: end the VM ─► done
//!                         ▲                   │ not, and it is late: end the VM; one that says nothing is cut off first
//!                         └── await the last ◄┘
//! ```

use super::{Action, Event, Task, Why};
use crate::migration::target::{Hypervisor, IncomingState, Known, PostCopy, Received};

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
    pub(super) fn reconnect(&self, event: Event) -> Action {
        match (self.doing, event) {
            (Action::Recall, Event::Known(known)) => match lacks_rest(known) {
                Ok(Hypervisor::There) => Action::LookAtRest,
                Ok(Hypervisor::Unresponsive) => Action::Answer(Err(Why::Mute)),
                Ok(Hypervisor::None | Hypervisor::Ended) => Action::Answer(Err(Why::NothingToCome)),
                Err(why) => Action::Answer(Err(why)),
            },
            (Action::LookAtRest, event) => match self.rest_is_missing(event) {
                Ok(()) => Action::TakeUpPart,
                Err(why) => Action::Answer(Err(why)),
            },
            (Action::TakeUpPart, Event::Done) => Action::CutConnection,
            // One over which nothing comes any more may look whole from here, and one that is broken is not cut.
            (Action::CutConnection, _) => Action::ListenAgain,
            (Action::ListenAgain, Event::Done) => Action::Answer(self.said),
            _ => Action::Answer(Err(Why::Failed)),
        }
    }

    pub(super) fn end(&mut self, event: Event) -> Action {
        if event == Event::Late && self.patience == Patience::Waits {
            self.patience = Patience::Late;
        }
        match (self.doing, event) {
            (Action::Recall, Event::Known(known)) => match lacks_rest(known) {
                Ok(Hypervisor::There) => Action::LookAtRest,
                Ok(Hypervisor::Unresponsive) => Action::Answer(Err(Why::Mute)),
                // It has ended.
                Ok(Hypervisor::None | Hypervisor::Ended) => Action::Answer(self.said),
                Err(why) => Action::Answer(Err(why)),
            },
            (Action::LookAtRest, event) => match self.rest_is_missing(event) {
                Ok(()) => Action::LookAtConnection,
                Err(why) => Action::Answer(Err(why)),
            },
            (Action::LookAtConnection, Event::Connection(Connection::Broken)) => Action::EndVm,
            (Action::LookAtConnection, Event::Connection(connection)) => self.not_broken(connection),
            (Action::CutConnection, _) => Action::AwaitLastBytes,
            (Action::LookAtConnection, Event::Received(_)) => Action::Answer(Err(Why::NothingToCome)),
            (Action::AwaitLastBytes, Event::Done | Event::Late) => Action::LookAtRest,
            (Action::EndVm, Event::Done) => Action::Answer(self.said),
            _ => Action::Answer(Err(Why::Failed)),
        }
    }

    fn not_broken(&mut self, connection: Connection) -> Action {
        match (self.patience, connection) {
            // All that its source has sent may be on its way still.
            (Patience::Waits, _) => Action::AwaitLastBytes,
            // One that waits for a page of a source that has vanished notices nothing by itself; one that has all cannot be
            // cut off any more.
            (Patience::Late, Connection::Unknown) => {
                self.patience = Patience::Cut;
                Action::CutConnection
            }
            (Patience::Cut, Connection::Unknown) => Action::Answer(Err(Why::Mute)),
            // Its source is gone, and the hypervisor has not noticed.
            (Patience::Late | Patience::Cut, Connection::Whole | Connection::Broken) => Action::EndVm,
        }
    }

    fn rest_is_missing(&self, event: Event) -> Result<(), Why> {
        match event {
            Event::Received(Received::InPart) => Ok(()),
            // Its main thread may itself wait for a page.
            Event::Mute if self.known.is_some_and(|known| known.lacks_part) => Ok(()),
            Event::Mute => Err(Why::Mute),
            Event::Received(_) | Event::Gone => Err(Why::NothingToCome),
            _ => Err(Why::Failed),
        }
    }
}

/// Its hypervisor, if it is one of which a part may be missing.
fn lacks_rest(known: Known) -> Result<Hypervisor, Why> {
    let was_told = matches!(known.state, Some(IncomingState::Running | IncomingState::Finished));
    if was_told && known.post_copy == PostCopy::Allowed {
        Ok(known.hypervisor)
    } else {
        Err(Why::NothingToCome)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Order, Said};
    use super::*;

    const IN_PART: Known = Known {
        state: Some(IncomingState::Running),
        is_adopted: true,
        awaits_run: false,
        lacks_part: true,
        post_copy: PostCopy::Allowed,
        hypervisor: Hypervisor::There,
    };
    const PART: Event = Event::Received(Received::InPart);
    const DONE: Action = Action::Answer(Ok(Said::Done));

    fn fails(why: Why) -> Action {
        Action::Answer(Err(why))
    }

    fn does(order: Order, known: Known, events: &[Event]) -> Vec<Action> {
        let (mut task, first) = Task::begin(order, true, true);
        let events = [&[Event::Known(known)], events].concat();
        std::iter::once(first).chain(events.iter().map(|event| task.handle(*event))).collect()
    }

    fn ends(order: Order, known: Known, events: &[Event]) -> Action {
        *does(order, known, events).last().expect("the first action is there")
    }

    #[test]
    fn it_listens_again_once_what_is_left_of_the_connection_is_cut() {
        let done = does(Order::Reconnect, IN_PART, &[PART, Event::Done, Event::Failed, Event::Done]);
        let expected = [Action::TakeUpPart, Action::CutConnection, Action::ListenAgain, DONE];
        assert_eq!(done[2..], expected);
        // It may wait for the page that the other connection brings.
        assert_eq!(ends(Order::Reconnect, IN_PART, &[Event::Mute]), Action::TakeUpPart);
    }

    #[test]
    fn what_is_here_whole_or_came_again_since_neither_listens_nor_ends() {
        for order in [Order::Reconnect, Order::End] {
            let whole = ends(order, IN_PART, &[Event::Received(Received::Whole)]);
            assert_eq!(whole, fails(Why::NothingToCome));
            for other in [
                Known { post_copy: PostCopy::Past, ..IN_PART },
                Known { post_copy: PostCopy::Refused, ..IN_PART },
                Known { state: Some(IncomingState::Waiting), ..IN_PART },
                Known { state: None, ..IN_PART },
            ] {
                assert_eq!(ends(order, other, &[]), fails(Why::NothingToCome));
            }
            let unresponsive = Known { hypervisor: Hypervisor::Unresponsive, ..IN_PART };
            assert_eq!(ends(order, unresponsive, &[]), fails(Why::Mute));
            let known_whole = Known { lacks_part: false, ..IN_PART };
            assert_eq!(ends(order, known_whole, &[Event::Mute]), fails(Why::Mute));
        }
    }

    #[test]
    fn one_whose_connection_is_broken_is_ended_at_once_and_else_once_the_last_bytes_had_their_time() {
        let is = Event::Connection;
        assert_eq!(ends(Order::End, IN_PART, &[PART, is(Connection::Broken)]), Action::EndVm);
        let waits = [PART, is(Connection::Whole), Event::Done, PART, is(Connection::Whole)];
        assert_eq!(ends(Order::End, IN_PART, &waits), Action::AwaitLastBytes);
        let late = [&waits[..], &[Event::Late, PART, is(Connection::Whole), Event::Done]].concat();
        let done = does(Order::End, IN_PART, &late);
        assert_eq!(done[done.len() - 2..], [Action::EndVm, DONE]);
    }

    #[test]
    fn one_that_gets_the_last_bytes_meanwhile_is_not_ended() {
        let is = Event::Connection;
        let whole = Event::Received(Received::Whole);
        let at_last = [PART, is(Connection::Whole), Event::Late, PART, whole];
        assert_eq!(ends(Order::End, IN_PART, &at_last), fails(Why::NothingToCome));
    }

    #[test]
    fn one_that_says_nothing_is_cut_off_and_ended_only_if_it_notices() {
        let unknown = Event::Connection(Connection::Unknown);
        let late = [Event::Mute, unknown, Event::Late, Event::Mute, unknown];
        assert_eq!(ends(Order::End, IN_PART, &late), Action::CutConnection);
        let then = |connection| {
            let cut = [Event::Done, Event::Late, Event::Mute, Event::Connection(connection)];
            ends(Order::End, IN_PART, &[&late[..], &cut].concat())
        };
        assert_eq!(then(Connection::Broken), Action::EndVm);
        assert_eq!(then(Connection::Unknown), fails(Why::Mute));
    }

    #[test]
    fn one_that_has_ended_needs_no_end() {
        for hypervisor in [Hypervisor::None, Hypervisor::Ended] {
            assert_eq!(ends(Order::End, Known { hypervisor, ..IN_PART }, &[]), DONE);
        }
    }
}
