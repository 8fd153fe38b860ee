//! A disk that moves to another place on its host while its VM runs: what to do about a move whose state is not known.
//!
//! One record decides which disk the VM has. It is made while the hypervisor holds the guest's writes, and both disks
//! are the same. So before the record the old disk has everything that was ever confirmed to the guest, and after it
//! the new one, whichever process ends when.

/// What is found of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoundMove {
    /// The VM does not run.
    Off,
    /// It has the old disk, and no copy is under way.
    OnOld,
    /// It has the old disk, and that is being copied.
    Copying,
    /// Both disks are the same, and the guest's writes wait.
    Held,
    /// It has the new disk.
    OnNew,
}

/// What is to be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// The copy goes on.
    GoOn,
    /// The VM has the old disk: whatever there is of a copy is ended, and the new disk is removed.
    Undo,
    /// The record is taken back first: the hypervisor did not give the VM the new disk after all.
    RevokeAndUndo,
    /// The hypervisor gives the VM the new disk; then the old one is kept under another name.
    SwitchAndFinish,
    /// The VM has the new disk: the old one is kept under another name.
    Finish,
    /// The record is made first: a definition must name the disk that the VM has.
    RecordAndFinish,
}

/// What is to be done about a move that was left so; `is_recorded` is whether the VM's definition names the new disk.
pub fn settle(is_recorded: bool, found: FoundMove) -> Settlement {
    match (is_recorded, found) {
        (false, FoundMove::Copying) => Settlement::GoOn,
        (false, FoundMove::Off | FoundMove::OnOld | FoundMove::Held) => Settlement::Undo,
        // Only who has recorded it switches: this cannot be, and if it is, the guest writes to the new disk.
        (false, FoundMove::OnNew) => Settlement::RecordAndFinish,
        (true, FoundMove::Held) => Settlement::SwitchAndFinish,
        (true, FoundMove::Off | FoundMove::OnNew) => Settlement::Finish,
        (true, FoundMove::OnOld | FoundMove::Copying) => Settlement::RevokeAndUndo,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host with a VM whose disk moves, as far as it matters which disk has what.
    #[derive(Debug, Clone, Copy)]
    struct Model {
        is_recorded: bool,
        found: FoundMove,
        /// Whether all that was confirmed to the guest is there.
        old_has_all: bool,
        new_has_all: bool,
    }

    impl Model {
        fn at_begin() -> Self {
            Self { is_recorded: false, found: FoundMove::Copying, old_has_all: true, new_has_all: false }
        }

        /// In the order in which an agent goes on.
        fn steps() -> Vec<Self> {
            let held = Self { found: FoundMove::Held, new_has_all: true, ..Self::at_begin() };
            let recorded = Self { is_recorded: true, ..held };
            let switched = Self { found: FoundMove::OnNew, ..recorded };
            vec![Self::at_begin(), held, recorded, switched]
        }

        /// The guest writes on, where the hypervisor lets it.
        fn written(self) -> Self {
            match self.found {
                FoundMove::OnOld | FoundMove::Copying => Self { new_has_all: false, ..self },
                FoundMove::OnNew => Self { old_has_all: false, ..self },
                FoundMove::Held | FoundMove::Off => self,
            }
        }

        fn powered_off(self) -> Self {
            Self { found: FoundMove::Off, ..self }
        }

        /// A hypervisor that cannot give the VM the new disk lets the guest write to the old one.
        fn fails(self) -> Self {
            let found = if self.found == FoundMove::OnNew { self.found } else { FoundMove::OnOld };
            Self { found, ..self }
        }

        /// Which disk the VM has for good, and whether that has all.
        fn settled(self) -> (bool, bool) {
            match settle(self.is_recorded, self.found) {
                Settlement::Undo | Settlement::RevokeAndUndo | Settlement::GoOn => (false, self.old_has_all),
                _ => (true, self.new_has_all),
            }
        }
    }

    #[test]
    fn whenever_who_ends_the_vm_has_all_that_was_confirmed() {
        for step in Model::steps() {
            let agent_ends = step.written();
            let host_ends = step.written().powered_off();
            let both_end = step.written().written().powered_off();
            for left in [step, agent_ends, host_ends, both_end] {
                assert!(left.settled().1, "{left:?}");
            }
        }
    }

    #[test]
    fn a_hypervisor_that_does_not_switch_leaves_the_old_disk() {
        for step in Model::steps().into_iter().filter(|step| step.found != FoundMove::OnNew) {
            assert_eq!(step.fails().written().settled(), (false, true), "{step:?}");
        }
    }

    #[test]
    fn a_definition_ends_up_with_what_the_vm_has() {
        let has_new = |settlement| {
            let finishes = [Settlement::SwitchAndFinish, Settlement::Finish, Settlement::RecordAndFinish];
            finishes.contains(&settlement)
        };
        for is_recorded in [false, true] {
            assert!(has_new(settle(is_recorded, FoundMove::OnNew)));
            assert!(!has_new(settle(is_recorded, FoundMove::OnOld)));
            assert_eq!(has_new(settle(is_recorded, FoundMove::Off)), is_recorded);
            assert_eq!(has_new(settle(is_recorded, FoundMove::Held)), is_recorded);
        }
    }
}
