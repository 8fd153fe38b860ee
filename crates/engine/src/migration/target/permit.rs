//! Step 2: may this VM come? The answer depends on what this host knows of its name and its migration. Other checks say
//! whether this host can run it, and whether it takes one more VM now.

use crate::problem::ProblemKind;

/// What a target knows about a VM that asks to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// A VM with its name belongs to this host.
    pub is_here: bool,
    /// A VM with its name is on its way here by whatever migration, or was given up and is not removed yet.
    pub is_coming: bool,
    /// The journal has a record of this migration.
    pub is_recorded: bool,
}

/// Why the VM may not come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PermitRefusal {
    /// Another VM has its name, or it is already here.
    NameTaken,
    /// The order is an old one. The VM may have been discarded since, and its source told so.
    WasHereBefore,
}

impl PermitRefusal {
    /// The kind of problem that the source hears of.
    pub fn kind(self) -> ProblemKind {
        ProblemKind::Conflict
    }
}

/// Whether the VM may come. The caller lets no other VM in until this one is recorded and on its way.
pub fn may_come(asked: Asked) -> Result<(), PermitRefusal> {
    match asked {
        Asked { is_here: true, .. } | Asked { is_coming: true, .. } => Err(PermitRefusal::NameTaken),
        Asked { is_recorded: true, .. } => Err(PermitRefusal::WasHereBefore),
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
        assert_eq!(may_come(Asked { is_here: true, ..NEW }), Err(PermitRefusal::NameTaken));
        assert_eq!(may_come(Asked { is_coming: true, ..NEW }), Err(PermitRefusal::NameTaken));
        assert_eq!(may_come(Asked { is_recorded: true, ..NEW }), Err(PermitRefusal::WasHereBefore));
    }
}
