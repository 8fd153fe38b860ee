//! Who starts QEMU and reaches into it: this process, or a keeper beside it.

use std::env;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::keeper::Keeper;
use crate::reach::{ProcessFile, Reach, Reached};

/// Names the keeper's socket, for the agent and for the guards that it starts.
const VARIABLE: &str = "DRAINPIPE_KEEPER";

/// Who has the capabilities that QEMU is started and reached into with. Clones share the connection to the keeper.
#[derive(Debug, Clone)]
pub struct Privileges {
    keeper: Option<Arc<Keeper>>,
}

impl Privileges {
    /// Those of this process, which has the capabilities itself, or is nobody to need them.
    pub fn own() -> Self {
        Self { keeper: None }
    }

    /// Those of the keeper that the environment names, if it names one. For a process to ask once.
    pub fn of_environment() -> Self {
        let socket = env::var_os(VARIABLE).filter(|path| !path.is_empty());
        Self { keeper: socket.map(|socket| Arc::new(Keeper::at(socket.into()))) }
    }

    /// The keeper, where it is not this process that starts QEMU.
    pub(crate) fn keeper(&self) -> Option<&Keeper> {
        self.keeper.as_deref()
    }

    /// Has it done to the process that `pidfd` holds.
    pub(crate) fn reach(&self, reach: Reach, pid: Pid, pidfd: BorrowedFd<'_>) -> io::Result<Reached> {
        match self.keeper() {
            Some(keeper) => keeper.reach(reach, pidfd),
            None => reach.perform(pid, pidfd),
        }
    }

    /// Opens this file of the process that has the id `pid` at the moment.
    pub fn open(&self, file: ProcessFile, pid: u32) -> io::Result<File> {
        let no_such_process = || io::Error::from(Errno::SRCH);
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(no_such_process)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        self.reach(Reach::Open { file }, pid, pidfd.as_fd())?.file()
    }
}
