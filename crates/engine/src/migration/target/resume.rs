//! After a start of the agent: a VM that was recorded to run here, and may not have been let run before the agent ended.

use super::silence::HandOver;

/// How often it is tried, or its source asked, in ms, and how many times: an hour. After that the agent's next start tries
/// again.
pub const AGAIN_AFTER_MS: u64 = 5_000;
const ATTEMPTS_MAX: u32 = 720;

/// What is done next. Each action is answered by one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Say what has become of the VM; answered by one of [`Event::Left`], [`Event::Here`] and [`Event::Gone`].
    Recall,
    /// Have the hypervisor run it.
    LetRun,
    /// Ask its source whose it is; answered by [`Event::SourceSays`].
    AskSource,
    /// Record that nothing is left to do.
    Finish,
    /// It was given back to its source, which took this host for lost: record it, and forget the VM.
    Forget,
    /// Wait for [`AGAIN_AFTER_MS`].
    Pause,
    /// It is over, or nothing more is tried.
    Leave,
}

/// What has come of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The VM is none of this host's any more, or on its way to a third host: then only that migration says where it may
    /// run.
    Left,
    /// Its hypervisor is there.
    Here,
    /// It has none.
    Gone,
    /// What the source's journal says.
    SourceSays(HandOver),
    /// It is done.
    Done,
    /// It failed; tried again.
    Failed,
}

/// What sees to one such VM.
#[derive(Debug, Clone, Copy)]
pub struct Resumption {
    doing: Action,
    attempts_left: u32,
}

impl Resumption {
    /// Begins, with its first action.
    pub fn begin() -> (Self, Action) {
        (Self { doing: Action::Recall, attempts_left: ATTEMPTS_MAX }, Action::Recall)
    }

    /// Takes what has come of the last action; says what to do next.
    pub fn handle(&mut self, event: Event) -> Action {
        self.doing = match (self.doing, event) {
            (Action::Recall, Event::Left)
            | (Action::LetRun, Event::Done)
            | (Action::AskSource, Event::SourceSays(HandOver::HandedOver)) => Action::Finish,
            (Action::Recall, Event::Here) => Action::LetRun,
            (Action::Recall, Event::Gone) => Action::AskSource,
            (Action::AskSource, Event::SourceSays(HandOver::Refused)) => Action::Forget,
            (Action::Finish | Action::Forget, Event::Done) => Action::Leave,
            (Action::Pause, _) => Action::Recall,
            _ => self.again(),
        };
        self.doing
    }

    /// Its hypervisor may have no time to answer; a source that has lost its record knows nothing of it.
    fn again(&mut self) -> Action {
        self.attempts_left = self.attempts_left.saturating_sub(1);
        if self.attempts_left == 0 { Action::Leave } else { Action::Pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn does(events: &[Event]) -> Vec<Action> {
        let (mut resumption, first) = Resumption::begin();
        std::iter::once(first).chain(events.iter().map(|event| resumption.handle(*event))).collect()
    }

    #[test]
    fn one_whose_hypervisor_lives_is_let_run() {
        let done = does(&[Event::Here, Event::Failed, Event::Done, Event::Here, Event::Done, Event::Done]);
        let again = [Action::Recall, Action::LetRun, Action::Pause, Action::Recall, Action::LetRun];
        assert_eq!(done, [&again[..], &[Action::Finish, Action::Leave]].concat());
    }

    #[test]
    fn one_without_is_its_sources_if_that_says_so_and_of_one_that_has_left_nothing_is_done() {
        let refused = does(&[Event::Gone, Event::SourceSays(HandOver::Refused), Event::Done]);
        assert_eq!(refused[1..], [Action::AskSource, Action::Forget, Action::Leave]);
        assert_eq!(does(&[Event::Left, Event::Done])[1..], [Action::Finish, Action::Leave]);
    }

    #[test]
    fn a_source_that_knows_nothing_is_asked_for_an_hour() {
        let in_vain = [Event::Gone, Event::SourceSays(HandOver::Unknown), Event::Done];
        let (mut resumption, mut action) = Resumption::begin();
        let mut waited_ms = 0;
        for event in in_vain.iter().cycle().take(3 * 1_000) {
            if action == Action::Leave {
                break;
            }
            waited_ms += if action == Action::Pause { AGAIN_AFTER_MS } else { 0 };
            action = resumption.handle(*event);
        }
        assert_eq!((action, waited_ms / 60_000), (Action::Leave, 59));
    }
}
