//! Operations that fail when a test wants it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::error::{VmError, VmErrorKind};

/// What a hypervisor or a VM is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Act {
    /// To start a VM.
    Start,
    /// To be taken hold of.
    Attach,
    /// To end a VM that was given up and that nobody holds.
    EndGivenUp,
    /// What the guest does.
    RunState,
    /// Where the migration stands.
    Migration,
    /// Which host the VM belongs to.
    Hold,
    /// To run the guest.
    Run,
    /// To take the last that its source has handed over.
    TakeLast,
    /// To keep others from letting its guest run.
    BarOthers,
    /// To end unless others have let its guest run.
    EndUnrun,
    /// To have the guest power off.
    StopGuest,
    /// To end.
    Destroy,
    /// To end, though its guest has never run.
    DestroyUnrun,
    /// To listen for a source.
    Listen,
    /// To listen for one once more.
    RecoverListen,
    /// To have its migration's connections cut.
    CutMigration,
    /// To begin to send.
    StartTransfer,
    /// To go over to post-copy.
    StartPostCopy,
    /// To send the last.
    SwitchOver,
    /// To take the transfer back.
    Cancel,
    /// To break a connection.
    Interrupt,
    /// To go on over another one.
    ResumeTransfer,
    /// To keep to another downtime.
    SetDowntimeLimit,
    /// To keep to a bandwidth.
    SetBandwidth,
    /// To throw away what is not sent when a connection is closed.
    DiscardUnsent,
    /// To cut its connections without asking it.
    Cut,
    /// Whether it can move a disk.
    CheckDiskMove,
    /// To copy a disk to another one on its host.
    BeginDiskMove,
    /// How far that is.
    DiskMoveState,
    /// To have each write on both disks.
    SynchroniseDiskMove,
    /// To hold the guest's writes.
    HoldWrites,
    /// To have the new disk.
    SwitchDisk,
    /// To let go of the new disk.
    AbandonDiskMove,
    /// To let go of the old disk.
    TidyDiskMove,
}

impl Act {
    /// Whether it changes nothing.
    pub(super) fn is_question(self) -> bool {
        matches!(
            self,
            Self::RunState | Self::Migration | Self::Hold | Self::CheckDiskMove | Self::DiskMoveState
        )
    }
}

/// How an act fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No answer comes in time, and the act is not done. Nobody waits: the time counts as passed.
    Mute,
    /// No answer comes in time, but the act is done.
    MuteAndDone,
    /// The act is refused.
    Refused,
    /// Somebody else has the port.
    PortTaken,
    /// The process ends as if killed.
    Ends,
    /// The guest ignores it.
    Ignored,
    /// The act fails otherwise.
    Fails,
}

impl Fault {
    pub(super) fn error(self, act: Act) -> VmError {
        let (kind, what) = match self {
            Self::Mute | Self::MuteAndDone => (VmErrorKind::Mute, "did not answer"),
            Self::Refused => (VmErrorKind::Refused, "refused"),
            Self::PortTaken => (VmErrorKind::PortTaken, "found the port taken for"),
            Self::Ends => (VmErrorKind::Gone, "ended at"),
            Self::Ignored => (VmErrorKind::GuestIgnores, "has a guest that ignores"),
            Self::Fails => (VmErrorKind::Failed, "failed at"),
        };
        VmError::new(kind, format!("the fake hypervisor {what} {act:?}"))
    }
}

/// The acts that fail now.
#[derive(Debug, Default)]
pub(super) struct Faults(Mutex<BTreeMap<Act, Planned>>);

#[derive(Debug, Clone, Copy)]
struct Planned {
    fault: Fault,
    is_once: bool,
}

impl Faults {
    pub(super) fn set(&self, act: Act, fault: Fault) {
        self.plan(act, Planned { fault, is_once: false });
    }

    pub(super) fn set_once(&self, act: Act, fault: Fault) {
        self.plan(act, Planned { fault, is_once: true });
    }

    pub(super) fn clear(&self, act: Act) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&act);
    }

    /// How this act fails, if it does.
    pub(super) fn of(&self, act: Act) -> Option<Fault> {
        let mut planned = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Planned { fault, is_once } = *planned.get(&act)?;
        if is_once {
            planned.remove(&act);
        }
        Some(fault)
    }

    fn plan(&self, act: Act, planned: Planned) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(act, planned);
    }
}
