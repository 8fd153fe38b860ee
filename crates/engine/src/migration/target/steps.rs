//! The source's orders of steps 3 to 8, before the VM may run here: which are carried out, and which are refused.

use super::IncomingState;
use crate::problem::ProblemKind;

/// What an order needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderNeed {
    /// No more than that the VM waits: its disks are made, paths are tried and watched, its connections are tracked.
    Prepare,
    /// Start the hypervisor that waits for it.
    Build,
    /// That hypervisor: it listens, takes what is handed over, closes the VM's disks.
    UseHypervisor,
}

/// What there is of a VM on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnItsWay {
    /// By the journal.
    pub state: Option<IncomingState>,
    /// A VM of its name is one of this host's.
    pub is_name_taken: bool,
    /// It has a hypervisor, or had one.
    pub is_built: bool,
    /// The agent has been restarted since it may come: what it is built from is forgotten.
    pub is_from_before: bool,
}

/// Why an order is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderRefusal {
    /// The VM is not on its way here.
    NotOnItsWay,
    /// What becomes of it is decided.
    Decided,
    /// A VM of its name is here.
    NameTaken,
    /// A hypervisor waits for it, or did: a second one would take its place, with all that has come.
    IsBuilt,
    /// See [`OnItsWay::is_from_before`].
    StartedAnew,
    /// No hypervisor waits for it.
    NotBuilt,
}

impl OrderRefusal {
    /// The kind of problem as which it is reported.
    pub fn kind(self) -> ProblemKind {
        if self == Self::NotOnItsWay { ProblemKind::NotFound } else { ProblemKind::Conflict }
    }
}

/// Whether an order may be carried out now. Orders of one migration wait for each other, so it stays so meanwhile.
pub fn may_go_on(need: OrderNeed, vm: Option<OnItsWay>) -> Result<(), OrderRefusal> {
    let vm = vm.ok_or(OrderRefusal::NotOnItsWay)?;
    match need {
        _ if vm.state != Some(IncomingState::Waiting) => Err(OrderRefusal::Decided),
        // What is cleared away for it are the files of this name.
        OrderNeed::Build if vm.is_name_taken => Err(OrderRefusal::NameTaken),
        OrderNeed::Build if vm.is_built => Err(OrderRefusal::IsBuilt),
        OrderNeed::Build if vm.is_from_before => Err(OrderRefusal::StartedAnew),
        OrderNeed::UseHypervisor if !vm.is_built => Err(OrderRefusal::NotBuilt),
        OrderNeed::Prepare | OrderNeed::Build | OrderNeed::UseHypervisor => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERMITTED: OnItsWay = OnItsWay {
        state: Some(IncomingState::Waiting),
        is_name_taken: false,
        is_built: false,
        is_from_before: false,
    };

    #[test]
    fn what_is_decided_or_not_on_its_way_goes_no_further() {
        for need in [OrderNeed::Prepare, OrderNeed::Build, OrderNeed::UseHypervisor] {
            assert_eq!(may_go_on(need, None), Err(OrderRefusal::NotOnItsWay));
            let states = [IncomingState::Running, IncomingState::Finished, IncomingState::Discarded];
            for state in states.map(Some).into_iter().chain([None]) {
                let decided = OnItsWay { state, is_built: true, ..PERMITTED };
                assert_eq!(may_go_on(need, Some(decided)), Err(OrderRefusal::Decided));
            }
        }
    }

    #[test]
    fn it_is_built_once() {
        let build = |vm| may_go_on(OrderNeed::Build, Some(vm));
        assert_eq!(build(PERMITTED), Ok(()));
        assert_eq!(build(OnItsWay { is_built: true, ..PERMITTED }), Err(OrderRefusal::IsBuilt));
        assert_eq!(build(OnItsWay { is_name_taken: true, ..PERMITTED }), Err(OrderRefusal::NameTaken));
        assert_eq!(build(OnItsWay { is_from_before: true, ..PERMITTED }), Err(OrderRefusal::StartedAnew));
    }

    #[test]
    fn only_what_is_built_listens() {
        assert_eq!(may_go_on(OrderNeed::UseHypervisor, Some(PERMITTED)), Err(OrderRefusal::NotBuilt));
        let built = OnItsWay { is_built: true, is_from_before: true, ..PERMITTED };
        assert_eq!(may_go_on(OrderNeed::UseHypervisor, Some(built)), Ok(()));
        assert_eq!(may_go_on(OrderNeed::Prepare, Some(PERMITTED)), Ok(()));
    }
}
