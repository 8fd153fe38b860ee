//! What a call names: which of a daemon's procedures, and whether it may have to wait. Pure.

use crate::packet::{QEMU_PROGRAM, REMOTE_PROGRAM};

/// Something that a daemon can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Procedure {
    pub(crate) program: u32,
    pub(crate) number: i32,
    /// For people.
    pub(crate) name: &'static str,
    pub(crate) urgency: Urgency,
}

/// Whether a call may have to wait for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    InTurn,
    /// It is what one does when others do not end.
    EndsSomething,
}

pub(crate) const fn remote(number: i32, name: &'static str) -> Procedure {
    Procedure { program: REMOTE_PROGRAM, number, name, urgency: Urgency::InTurn }
}

pub(crate) const fn urgent(number: i32, name: &'static str) -> Procedure {
    Procedure { urgency: Urgency::EndsSomething, ..remote(number, name) }
}

pub(crate) const fn qemu(number: i32, name: &'static str) -> Procedure {
    Procedure { program: QEMU_PROGRAM, ..remote(number, name) }
}
