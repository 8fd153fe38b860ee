//! The source's orders of steps 3 to 8, before the VM may run here: which are carried out, and which are refused.

use super::IncomingState;
use crate::problem::ProblemKind;

/// What an order needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
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
pub enum Refusal {
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

impl Refusal {
    /// The kind of problem as which it is reported.
    pub fn kind(self) -> ProblemKind {
        if self == Self::NotOnItsWay { ProblemKind::NotFound } else { ProblemKind::Conflict }
    }
}

/// Whether an order may be carried out now. Orders of one migration wait for each other, so it stays so meanwhile.
pub fn may_go_on(step: Step, vm: Option<OnItsWay>) -> Result<(), Refusal> {
    let vm = vm.ok_or(Refusal::NotOnItsWay)?;
    match step {
        _ if vm.state != Some(IncomingState::Waiting) => Err(Refusal::Decided),
        // What is cleared away for it are the files of this name.
        Step::Build if vm.is_name_taken => Err(Refusal::NameTaken),
        Step::Build if vm.is_built => Err(Refusal::IsBuilt),
        Step::Build if vm.is_from_before => Err(Refusal::StartedAnew),
        Step::UseHypervisor if !vm.is_built => Err(Refusal::NotBuilt),
        Step::Prepare | Step::Build | Step::UseHypervisor => Ok(()),
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
        for step in [Step::Prepare, Step::Build, Step::UseHypervisor] {
            assert_eq!(may_go_on(step, None), Err(Refusal::NotOnItsWay));
            let states = [IncomingState::Running, IncomingState::Finished, IncomingState::Discarded];
            for state in states.map(Some).into_iter().chain([None]) {
                let decided = OnItsWay { state, is_built: true, ..PERMITTED };
                assert_eq!(may_go_on(step, Some(decided)), Err(Refusal::Decided));
            }
        }
    }

    #[test]
    fn it_is_built_once() {
        let build = |vm| may_go_on(Step::Build, Some(vm));
        assert_eq!(build(PERMITTED), Ok(()));
        assert_eq!(build(OnItsWay { is_built: true, ..PERMITTED }), Err(Refusal::IsBuilt));
        assert_eq!(build(OnItsWay { is_name_taken: true, ..PERMITTED }), Err(Refusal::NameTaken));
        assert_eq!(build(OnItsWay { is_from_before: true, ..PERMITTED }), Err(Refusal::StartedAnew));
    }

    #[test]
    fn only_what_is_built_listens() {
        assert_eq!(may_go_on(Step::UseHypervisor, Some(PERMITTED)), Err(Refusal::NotBuilt));
        let built = OnItsWay { is_built: true, is_from_before: true, ..PERMITTED };
        assert_eq!(may_go_on(Step::UseHypervisor, Some(built)), Ok(()));
        assert_eq!(may_go_on(Step::Prepare, Some(PERMITTED)), Ok(()));
    }
}
