//! Step 2: may this VM come? What is known here of its name and of its migration decides it. Whether this host can run it, and
//! whether it takes one more now, is asked beside.

use crate::problem::ProblemKind;

/// What a target finds of a VM that asks to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// A VM of its name is one of this host's.
    pub is_here: bool,
    /// A VM of its name is on its way here, by whatever migration, or was given up and is not removed yet.
    pub is_coming: bool,
    /// The journal has a record of this migration.
    pub is_recorded: bool,
}

/// Why it may not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Its name is that of another VM, or it is here.
    NameTaken,
    /// The order is one of long ago: the VM may have been discarded since, which its source was told.
    WasHereBefore,
}

impl Refusal {
    /// As which kind of problem it is told.
    pub fn kind(self) -> ProblemKind {
        ProblemKind::Conflict
    }
}

/// Whether it may come. Nobody else is let in meanwhile, until it is recorded and on its way.
pub fn may_come(asked: Asked) -> Result<(), Refusal> {
    match asked {
        Asked { is_here: true, .. } | Asked { is_coming: true, .. } => Err(Refusal::NameTaken),
        Asked { is_recorded: true, .. } => Err(Refusal::WasHereBefore),
        Asked { is_recorded: false, .. } => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEW: Asked = Asked { is_here: false, is_coming: false, is_recorded: false };

    #[test]
    fn two_of_a_name_do_not_come_and_no_migration_begins_twice() {
        assert_eq!(may_come(NEW), Ok(()));
        assert_eq!(may_come(Asked { is_here: true, ..NEW }), Err(Refusal::NameTaken));
        assert_eq!(may_come(Asked { is_coming: true, ..NEW }), Err(Refusal::NameTaken));
        assert_eq!(may_come(Asked { is_recorded: true, ..NEW }), Err(Refusal::WasHereBefore));
    }
}
