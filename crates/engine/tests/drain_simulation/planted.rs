//! Bugs between the drain and the world. Each is one that somebody could write, and that the simulation must find.

use std::collections::VecDeque;

use drainpipe_engine::drain::plan::DrainPlan;
use drainpipe_engine::drain::run::{DrainAction, DrainEvent, MoveEnd};

use crate::faults::Faults;

/// A bug of the agent that carries out the drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// Each migration is begun twice.
    TwoStarts,
    /// A prepared VM is released at once, whatever is on the links.
    NoTurns,
    /// A release is lost.
    LostRelease,
    /// The end of a migration is lost.
    LostEnd,
    /// The plan counts on memory that is not there.
    Overcommit,
    /// The planner places all VMs on one target, and only the linter notices.
    BadPlan,
    /// The drain ends while migrations are under way.
    EarlyFinish,
    /// A VM is left out of the plan.
    LostVm,
    /// A report from an earlier migration of a VM is taken for one from the migration under way.
    StaleNews,
    /// The answer to an earlier request for a plan is taken for the answer to the last one.
    StalePlan,
    /// A status that could not be recorded is taken for recorded.
    BelievedRecord,
    /// Actions are carried out though the drain's status could not be recorded.
    DoneUnwritten,
    /// Actions that could not be carried out while the disk was full are forgotten.
    HeldForgotten,
    /// The agent does not hear what happens while it hangs.
    DeafWhenFrozen,
    /// The agent takes the time from a clock that people set.
    WallClock,
    /// A drain that is continued forgets what it has moved.
    EarlierForgotten,
    /// A VM that may run elsewhere is treated as one that runs here.
    InDoubtForgotten,
    /// A migration that somebody cancelled is taken for one that failed.
    CancelledIsFailed,
    /// A restarted agent takes a VM on its way for one that waits.
    Unsettled,
    /// The drain does not hear which VMs somebody else moves from this host.
    OthersUncounted,
    /// The planner checks the room for disks for each VM alone.
    DiskRoomTwice,
}

impl Planted {
    pub(crate) const ALL: [Self; 21] = [
        Self::TwoStarts,
        Self::NoTurns,
        Self::LostRelease,
        Self::LostEnd,
        Self::Overcommit,
        Self::BadPlan,
        Self::EarlyFinish,
        Self::LostVm,
        Self::StaleNews,
        Self::StalePlan,
        Self::BelievedRecord,
        Self::DoneUnwritten,
        Self::HeldForgotten,
        Self::DeafWhenFrozen,
        Self::WallClock,
        Self::EarlierForgotten,
        Self::InDoubtForgotten,
        Self::CancelledIsFailed,
        Self::Unsettled,
        Self::OthersUncounted,
        Self::DiskRoomTwice,
    ];

    /// The faults without which the bug does no harm.
    pub(crate) fn needs(self) -> Faults {
        let none = Faults::NONE;
        match self {
            Self::StaleNews | Self::StalePlan => Faults { doubled: 80, fail: 10, ..none },
            Self::BelievedRecord => Faults { disk_full: 40, cancel: 10, ..none },
            Self::DoneUnwritten => Faults { disk_full: 200, restart: 40, ..none },
            Self::HeldForgotten => Faults { disk_full: 40, ..none },
            Self::DeafWhenFrozen => Faults { frozen: 20, ..none },
            // Both bounds need testing: that there is a deadline, and that the drain does not end before it.
            Self::WallClock => Faults { clock: 20, cancel: 1, ..none },
            Self::EarlierForgotten | Self::Unsettled => Faults { restart: 20, ..none },
            Self::InDoubtForgotten => Faults { restart: 20, fail: 20, ..none },
            Self::CancelledIsFailed => Faults { cancel_one: 40, ..none },
            Self::OthersUncounted => Faults { moved: 10, ..none },
            _ => none,
        }
    }

    /// Words of the rule that the bug breaks.
    pub(crate) fn shows_as(self) -> &'static [&'static str] {
        match self {
            Self::Nothing => &[],
            Self::TwoStarts => &["begun while it is under way"],
            Self::NoTurns => &["too many on the links"],
            Self::LostRelease | Self::LostEnd | Self::HeldForgotten | Self::DeafWhenFrozen => {
                &["it does not end"]
            }
            Self::Overcommit => &["overcommit"],
            Self::DiskRoomTwice => &["no room for the disk"],
            Self::BadPlan => &["the plan is bad"],
            Self::EarlyFinish => &["over while"],
            Self::LostVm => &["not in the report"],
            Self::StaleNews => &["begun while it is under way", "is released at", "over while"],
            Self::StalePlan => &["while nothing may be"],
            Self::BelievedRecord => &["by its row"],
            Self::DoneUnwritten | Self::Unsettled | Self::EarlierForgotten => &["the journal does not know"],
            Self::WallClock => &["for no reason", "while nothing may be", "makes no sense"],
            Self::OthersUncounted => &["as many leave as may"],
            Self::CancelledIsFailed => &["somebody does not want it"],
            Self::InDoubtForgotten => &["begun while it is under way, or elsewhere"],
        }
    }

    pub(crate) fn spoil_actions(self, event: Option<&DrainEvent>, actions: &mut Vec<DrainAction>) {
        match self {
            Self::TwoStarts => {
                *actions = actions.iter().flat_map(|action| [action.clone(), action.clone()]).collect();
            }
            Self::LostRelease => actions.retain(|action| !matches!(action, DrainAction::Release { .. })),
            Self::NoTurns => {
                if let Some(DrainEvent::Prepared { vm }) = event {
                    actions.retain(|action| !matches!(action, DrainAction::Release { .. }));
                    actions.push(DrainAction::Release { vm: vm.clone() });
                }
            }
            Self::EarlyFinish if event.is_some() => actions.push(DrainAction::Finish),
            _ => {}
        }
    }

    pub(crate) fn spoil_event(self, event: DrainEvent) -> DrainEvent {
        match event {
            DrainEvent::Ended { vm, end: MoveEnd::Cancelled(problem) } if self == Self::CancelledIsFailed => {
                DrainEvent::Ended { vm, end: MoveEnd::Failed(problem) }
            }
            event => event,
        }
    }

    /// Spoils the actions that wait until the disk has room again.
    pub(crate) fn spoil_held<T>(self, held: &mut VecDeque<T>) {
        if self == Self::HeldForgotten {
            held.clear();
        }
    }

    /// Spoils a plan before the linter sees it.
    pub(crate) fn spoil_plan(self, plan: &mut DrainPlan) {
        if self == Self::BadPlan {
            all_to_the_first(plan);
        }
    }

    /// Spoils a plan after the linter has seen it.
    pub(crate) fn spoil_sound(self, plan: &mut DrainPlan) {
        match self {
            Self::Overcommit => all_to_the_first(plan),
            Self::LostVm => drop(plan.moves.pop()),
            _ => {}
        }
    }
}

fn all_to_the_first(plan: &mut DrainPlan) {
    if let Some(first) = plan.moves.first().map(|first| first.target.clone()) {
        for planned in &mut plan.moves {
            planned.target.clone_from(&first);
        }
    }
}
