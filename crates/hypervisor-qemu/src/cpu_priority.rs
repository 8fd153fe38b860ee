//! Which of a host's VMs has priority when several want the cores.

use std::io;

use rustix::process::getpriority_process;

use crate::process::Process;

/// `nice` of a QEMU that goes first. Its threads get nine times the share of those at nice 0 (the kernel's
/// `sched_prio_to_weight`: 9548 against 1024).
const FIRST: i32 = -10;

impl Process {
    /// From now on its threads have the cores before those of this host's other VMs; not before those of other
    /// sessions, where the kernel groups tasks by them (`sched_autogroup_enabled`). Threads to which somebody gave
    /// another `nice` than this program has, from which QEMU has its own, are left alone. Needs `CAP_SYS_NICE`, or
    /// `RLIMIT_NICE` of 30 for QEMU.
    ///
    /// The number is its own record: [`Self::take_turns`] ends it, also for an agent that did not begin it.
    pub fn go_first(&self) -> io::Result<()> {
        let own = getpriority_process(None)?;
        if own > FIRST { self.renice(own, FIRST) } else { Ok(()) }
    }

    /// Takes turns with the other VMs again, if it went first. May be repeated.
    pub fn take_turns(&self) -> io::Result<()> {
        self.renice(FIRST, getpriority_process(None)?)
    }
}
