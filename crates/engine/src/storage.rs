//! The disks of a VM that move with it: which, how large, where to, and how far they have got.
//!
//! A disk that is copied exists twice until the hand-over. The guest writes to the source's alone, and the copy follows:
//!
//! ```text
//! steps 2, 3   the target says whether it has the room, and makes an empty disk
//! step 5       the target's hypervisor lets the source's write to it
//! before 6     the copy begins; the guest runs on
//! then         all is there, or the guest writes as fast as it is copied: from now on a write is on both disks before the
//!              guest hears that it is done, so that what is left becomes less; or, where the hypervisor cannot do that,
//!              the guest's writes are held back until what is left stays little
//! 6, 7         memory
//! 8            the guest is paused; the copy is ended, and the target lets nobody write any more
//! the commit   hand-over recorded
//! ```
//!
//! So no byte of a disk is ever written by two hosts: the copy is over on both sides before the hand-over is recorded.

mod device;
mod held;
mod identifier;
mod kept;
mod meter;
mod moving;
mod name;
mod passes;
mod places;

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use self::device::{DiskDevice, UnfitDevice};
pub use self::held::WriteLimit;
pub(crate) use self::held::{HeldWrites, Reading};
pub use self::identifier::{DeviceIdentifier, DeviceIdentifierKind};
pub use self::kept::{FileRoom, KeptPart, NotKept};
pub use self::meter::DiskMeter;
pub use self::moving::{FoundMove, Settlement, settle};
pub use self::name::{DiskName, NoDiskName};
pub use self::places::DiskPlaces;

/// Disks that one VM may have copied: what a hypervisor here gives it in all.
pub const DISKS_MAX: usize = 8;

/// Slower than this no disk is copied: 10 MB/s. A migration's deadline, unless one was asked for, waits so long for each.
const SLOWEST_BYTES_PER_MS: f64 = 10_000.0;

/// What the file of a disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiskImage {
    /// The disk, byte by byte.
    Raw,
    /// QEMU's own format.
    Qcow2 {
        /// Size of its clusters.
        cluster_bytes: u64,
    },
}

/// One disk that is copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskCopy {
    /// Which of the VM's disks.
    #[schema(value_type = String, example = "vda")]
    pub disk: DiskName,
    /// Its path on the source.
    pub from: String,
    /// Its path on the target: where nothing is yet, or that of a block device.
    pub to: String,
    /// What its file holds, on both.
    pub image: DiskImage,
    /// What the guest sees of it.
    pub size_bytes: u64,
    /// What its file takes on the source.
    pub allocated_bytes: u64,
    /// Why it is copied.
    pub why: CopyReason,
    /// Whether it stands on other images, which become part of the copy.
    #[serde(default)]
    pub is_flattened: bool,
    /// The block device that it is on; absent where it is on a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_device: Option<DiskDevice>,
}

impl DiskCopy {
    /// What its file may take on the target when all is there. What images below it take is not known.
    pub fn room_bytes(&self) -> u64 {
        if self.is_flattened { self.size_bytes.max(self.allocated_bytes) } else { self.allocated_bytes }
    }
}

/// Why a disk is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CopyReason {
    /// The target does not see it.
    NotSeen,
    /// Somebody has said where it is to go.
    AskedFor,
}

impl fmt::Display for CopyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotSeen => "the target does not see it",
            Self::AskedFor => "asked for",
        })
    }
}

/// How far the copy of one disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskState {
    /// Which of the VM's disks.
    pub disk: DiskName,
    /// What was gone through.
    pub copied_bytes: u64,
    /// What there is to go through. More than the disk has where the guest writes meanwhile.
    pub total_bytes: u64,
    /// The part that the target had already, for example from an earlier attempt, and that was not sent.
    pub same_bytes: u64,
    /// What went over the network for it, with the agents' own headers.
    pub wire_bytes: u64,
    /// Whether nothing shows on the target any more of what may have been there before.
    pub is_written_over: bool,
    /// Whether all is there, but for what the guest writes just now.
    pub is_ready: bool,
    /// Whether all is there, and no write of the guest is done before it is there too.
    pub is_synchronised: bool,
}

impl DiskState {
    /// A copy about which nothing is known yet.
    pub fn begun(disk: DiskName) -> Self {
        Self {
            disk,
            copied_bytes: 0,
            total_bytes: 0,
            same_bytes: 0,
            wire_bytes: 0,
            is_written_over: true,
            is_ready: false,
            is_synchronised: false,
        }
    }

    /// What is still to be gone through.
    pub fn left_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.copied_bytes)
    }
}

/// How far the copy of one disk is, for people.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskProgress {
    /// Which of the VM's disks.
    #[schema(value_type = String, example = "vda")]
    pub disk: DiskName,
    /// What was gone through.
    pub copied_bytes: u64,
    /// What there is to go through.
    pub total_bytes: u64,
    /// Whether all is there, but for what the guest writes just now.
    pub is_ready: bool,
    /// Whether each write of the guest waits until it is on the target too.
    #[serde(default)]
    pub writes_wait: bool,
    /// Whether the guest's writes are held back, so that the copy keeps up with them.
    #[serde(default)]
    pub writes_held: bool,
    /// Over the last two seconds.
    pub rate_gbps: f64,
    /// Until all is there, at this rate; absent while nothing is known.
    pub eta_ms: Option<f64>,
}

/// What became of one disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DiskUse {
    /// What was to be done.
    #[serde(flatten)]
    pub copy: DiskCopy,
    /// What was gone through, with what the guest wrote meanwhile.
    pub copied_bytes: u64,
    /// The part of that which the target had already, for example from an earlier attempt, and which was not sent.
    #[serde(default)]
    pub same_bytes: u64,
    /// What went over the network for it, packed where that paid, with the agents' own headers, without TCP's; absent in
    /// results of releases that did not count it.
    #[serde(default)]
    pub wire_bytes: Option<u64>,
    /// From the begin of the copies until all of this one was there; absent where that never was.
    pub ready_ms: Option<f64>,
}

/// How much longer than without disks a migration may take, unless its deadline was asked for.
pub fn allowance_ms(disks: &[DiskCopy]) -> f64 {
    disks.iter().map(|disk| disk.size_bytes as f64 / SLOWEST_BYTES_PER_MS).sum()
}
