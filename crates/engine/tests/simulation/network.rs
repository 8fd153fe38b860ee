//! Messages between the two agents: each may be lost, late, doubled, and overtaken by any other.

use drainpipe_engine::migration::target::IncomingView;
use drainpipe_engine::problem::ProblemKind;

/// What a source tells a target about one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Permit,
    Memory,
    IncomingVm,
    /// Whether the plan is one that this target takes.
    Connect {
        is_taken: bool,
    },
    Received,
    /// A domain's: libvirt is to take the last of it.
    Complete,
    CloseDisks,
    Run,
    View,
    Discard,
    Reconnect,
    End,
    Finish,
}

impl Order {
    /// Whether such orders for one migration are carried out one after the other.
    pub(crate) fn takes_turns(self) -> bool {
        matches!(
            self,
            Self::IncomingVm
                | Self::Connect { .. }
                | Self::Complete
                | Self::CloseDisks
                | Self::Run
                | Self::Discard
        )
    }
}

/// What a target answers after it has carried out an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetAnswer {
    Done,
    Busy,
    View(IncomingView),
}

pub(crate) type Answer = Result<TargetAnswer, ProblemKind>;

/// What a source says about a hand-over, by its journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SourceAnswer {
    Pending,
    HandedOver,
    Refused,
}

/// A number that distinguishes a question from all others.
pub(crate) type Question = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Letter {
    Order {
        order: Order,
        migration: usize,
        question: Question,
    },
    Answer {
        question: Question,
        answer: Answer,
    },
    /// A target asks its source.
    Ask {
        migration: usize,
        question: Question,
    },
    Tell {
        question: Question,
        hand_over: SourceAnswer,
    },
}

impl Letter {
    pub(crate) fn goes_to_target(self) -> bool {
        matches!(self, Self::Order { .. } | Self::Tell { .. })
    }
}

/// The messages on their way.
#[derive(Debug, Default)]
pub(crate) struct Network {
    /// Each with the time before which it does not arrive.
    pub letters: Vec<(f64, Letter)>,
    /// Until then nothing gets through.
    pub parted_until_ms: f64,
    questions: Question,
}

impl Network {
    pub(crate) fn new_question(&mut self) -> Question {
        self.questions += 1;
        self.questions
    }
}
