//! The ten steps of a migration, by name.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The ten steps, in their order. The names are those of Hyper-V's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// 1. Establish source host and target host.
    EstablishHosts = 1,
    /// 2. Check permissions: may this caller move this VM there?
    CheckPermissions,
    /// 3. Check that the target has the memory, and reserve it.
    AllocateMemory,
    /// 4. Build an incoming VM on the target from the source VM's specification.
    // Its name in 0.1.0.
    #[serde(rename = "build_skeleton")]
    BuildIncomingVm,
    /// 5. Set up the network connection between the hosts.
    ConnectHosts,
    /// 6. Copy every page, marking it clean.
    CopyMemory,
    /// 7. Copy again what got dirty, round after round, until little remains.
    CopyDirtyMemory,
    /// 8. Downtime: pause the VM, copy the rest of memory and the device state.
    // Its name in 0.1.0.
    #[serde(rename = "blackout")]
    Downtime,
    /// 9. Final check; resume the VM on the target.
    ResumeOnTarget,
    /// 10. Clean up the remains on the source.
    CleanUp,
}

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; 10] = [
        Self::EstablishHosts,
        Self::CheckPermissions,
        Self::AllocateMemory,
        Self::BuildIncomingVm,
        Self::ConnectHosts,
        Self::CopyMemory,
        Self::CopyDirtyMemory,
        Self::Downtime,
        Self::ResumeOnTarget,
        Self::CleanUp,
    ];

    /// 1 to 10.
    pub fn number(self) -> u8 {
        self as u8
    }

    /// A few words for people.
    pub fn title(self) -> &'static str {
        match self {
            Self::EstablishHosts => "establish source and target",
            Self::CheckPermissions => "check permissions",
            Self::AllocateMemory => "allocate memory on the target",
            Self::BuildIncomingVm => "build the incoming VM",
            Self::ConnectHosts => "connect the hosts",
            Self::CopyMemory => "copy memory",
            Self::CopyDirtyMemory => "copy dirty memory",
            Self::Downtime => "pause and copy the rest",
            Self::ResumeOnTarget => "resume on the target",
            Self::CleanUp => "clean up the source",
        }
    }
}
