//! Translates failures of QEMU into every hypervisor's.

use drainpipe_hypervisor::{VmError, VmErrorKind};

use crate::facts::ProbeError;
use crate::memory_sample::SampleError;
use crate::migration::MigrationError;
use crate::qmp::QmpError;
use crate::throttle::ThrottleError;
use crate::vmm::{AttachError, EndError, StartError};

fn kind_of(error: &QmpError) -> VmErrorKind {
    match error {
        QmpError::Closed { .. } => VmErrorKind::Gone,
        QmpError::Deadline { .. } => VmErrorKind::Mute,
        QmpError::Command { .. } => VmErrorKind::Refused,
        QmpError::Connect { .. } | QmpError::Malformed { .. } => VmErrorKind::Failed,
    }
}

impl From<QmpError> for VmError {
    fn from(error: QmpError) -> Self {
        Self::new(kind_of(&error), error)
    }
}

impl From<MigrationError> for VmError {
    fn from(error: MigrationError) -> Self {
        let kind = match &error {
            MigrationError::Qmp(error) => kind_of(error),
            MigrationError::PortTaken(_) => VmErrorKind::PortTaken,
            MigrationError::MemoryIncomplete(_) => VmErrorKind::MemoryIncomplete,
            MigrationError::CannotListen { .. }
            | MigrationError::NoPostCopy(_)
            | MigrationError::NoTls(_)
            | MigrationError::CannotWriteKey { .. }
            | MigrationError::LeftForPostCopy(_)
            | MigrationError::AllSent
            | MigrationError::Deadline { .. }
            | MigrationError::MemoryLock { .. }
            | MigrationError::NeverEnds(_) => VmErrorKind::Failed,
        };
        Self::new(kind, error)
    }
}

impl From<AttachError> for VmError {
    fn from(error: AttachError) -> Self {
        let kind = match &error {
            AttachError::NotRunning { .. } => VmErrorKind::NotRunning,
            AttachError::Qmp(error) => kind_of(error),
            AttachError::File { .. } => VmErrorKind::Failed,
        };
        Self::new(kind, error)
    }
}

impl From<EndError> for VmError {
    fn from(error: EndError) -> Self {
        let kind = match &error {
            EndError::GuestIgnores(_) => VmErrorKind::GuestIgnores,
            EndError::Qmp(error) => kind_of(error),
            EndError::Lives { .. } | EndError::StillThere { .. } | EndError::Io { .. } => VmErrorKind::Failed,
        };
        Self::new(kind, error)
    }
}

impl From<StartError> for VmError {
    fn from(error: StartError) -> Self {
        Self::failed(error)
    }
}

impl From<ProbeError> for VmError {
    fn from(error: ProbeError) -> Self {
        Self::failed(error)
    }
}

impl From<SampleError> for VmError {
    fn from(error: SampleError) -> Self {
        Self::failed(error)
    }
}

impl From<ThrottleError> for VmError {
    fn from(error: ThrottleError) -> Self {
        Self::failed(error)
    }
}
