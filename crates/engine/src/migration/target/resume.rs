//! After a start of the agent: a VM that was recorded to run here, and may not have been let run before the agent ended.

use super::silence::HandOverAnswer;

/// How often it is tried, or its source asked, in ms, and how many times: an hour. After that the agent's next start tries
/// again.
pub const AGAIN_AFTER_MS: u64 = 5_000;
const ATTEMPTS_MAX: u32 = 720;

/// What is done next. Each action is answered by one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumptionAction {
    /// Say what has become of the VM; answered by one of [`ResumptionEvent::Left`], [`ResumptionEvent::Here`] and [`ResumptionEvent::Gone`].
    Recall,
    /// Have the hypervisor run it.
    LetRun,
    /// Ask its source whose it is; answered by [`ResumptionEvent::SourceSays`].
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
pub enum ResumptionEvent {
    /// The VM is none of this host's any more, or on its way to a third host: then only that migration says where it may
    /// run.
    Left,
    /// Its hypervisor is there.
    Here,
    /// It has none.
    Gone,
    /// What the source's journal says.
    SourceSays(HandOverAnswer),
    /// It is done.
    Done,
    /// It failed; tried again.
    Failed,
}

/// What sees to one such VM.
#[derive(Debug, Clone, Copy)]
pub struct Resumption {
    doing: ResumptionAction,
    attempts_left: u32,
}

impl Resumption {
    /// Begins, with its first action.
    pub fn begin() -> (Self, ResumptionAction) {
        (Self { doing: ResumptionAction::Recall, attempts_left: ATTEMPTS_MAX }, ResumptionAction::Recall)
    }

    /// Takes what has come of the last action; says what to do next.
    pub fn handle(&mut self, event: ResumptionEvent) -> ResumptionAction {
        self.doing = match (self.doing, event) {
            (ResumptionAction::Recall, ResumptionEvent::Left)
            | (ResumptionAction::LetRun, ResumptionEvent::Done)
            | (ResumptionAction::AskSource, ResumptionEvent::SourceSays(HandOverAnswer::HandedOver)) => {
                ResumptionAction::Finish
            }
            (ResumptionAction::Recall, ResumptionEvent::Here) => ResumptionAction::LetRun,
            (ResumptionAction::Recall, ResumptionEvent::Gone) => ResumptionAction::AskSource,
            (ResumptionAction::AskSource, ResumptionEvent::SourceSays(HandOverAnswer::Refused)) => {
                ResumptionAction::Forget
            }
            (ResumptionAction::Finish | ResumptionAction::Forget, ResumptionEvent::Done) => {
                ResumptionAction::Leave
            }
            (ResumptionAction::Pause, _) => ResumptionAction::Recall,
            _ => self.again(),
        };
        self.doing
    }

    /// Its hypervisor may have no time to answer; a source that has lost its record knows nothing of it.
    fn again(&mut self) -> ResumptionAction {
        self.attempts_left = self.attempts_left.saturating_sub(1);
        if self.attempts_left == 0 { ResumptionAction::Leave } else { ResumptionAction::Pause }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn does(events: &[ResumptionEvent]) -> Vec<ResumptionAction> {
        let (mut resumption, first) = Resumption::begin();
        std::iter::once(first).chain(events.iter().map(|event| resumption.handle(*event))).collect()
    }

    #[test]
    fn one_whose_hypervisor_lives_is_let_run() {
        let done = does(&[
            ResumptionEvent::Here,
            ResumptionEvent::Failed,
            ResumptionEvent::Done,
            ResumptionEvent::Here,
            ResumptionEvent::Done,
            ResumptionEvent::Done,
        ]);
        let again = [
            ResumptionAction::Recall,
            ResumptionAction::LetRun,
            ResumptionAction::Pause,
            ResumptionAction::Recall,
            ResumptionAction::LetRun,
        ];
        assert_eq!(done, [&again[..], &[ResumptionAction::Finish, ResumptionAction::Leave]].concat());
    }

    #[test]
    fn one_without_is_its_sources_if_that_says_so_and_of_one_that_has_left_nothing_is_done() {
        let refused = does(&[
            ResumptionEvent::Gone,
            ResumptionEvent::SourceSays(HandOverAnswer::Refused),
            ResumptionEvent::Done,
        ]);
        assert_eq!(
            refused[1..],
            [ResumptionAction::AskSource, ResumptionAction::Forget, ResumptionAction::Leave]
        );
        assert_eq!(
            does(&[ResumptionEvent::Left, ResumptionEvent::Done])[1..],
            [ResumptionAction::Finish, ResumptionAction::Leave]
        );
    }

    #[test]
    fn a_source_that_knows_nothing_is_asked_for_an_hour() {
        let in_vain = [
            ResumptionEvent::Gone,
            ResumptionEvent::SourceSays(HandOverAnswer::Unknown),
            ResumptionEvent::Done,
        ];
        let (mut resumption, mut action) = Resumption::begin();
        let mut waited_ms = 0;
        for event in in_vain.iter().cycle().take(3 * 1_000) {
            if action == ResumptionAction::Leave {
                break;
            }
            waited_ms += if action == ResumptionAction::Pause { AGAIN_AFTER_MS } else { 0 };
            action = resumption.handle(*event);
        }
        assert_eq!((action, waited_ms / 60_000), (ResumptionAction::Leave, 59));
    }
}
