//! What is known about the VMs and the hosts that may take them at the moment of planning.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::disks::{DrainedDisk, FileSystemView};
use crate::bandwidth::LimitChange;
use crate::plan::NoPostCopy;
use crate::transfer::memory_sample::MemorySample;
use crate::transfer::relayed::RelayMeans;

/// Everything that a plan is made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainView {
    /// The host to be emptied.
    pub host: String,
    /// The VMs on it that have a QEMU, by name.
    pub vms: Vec<VmView>,
    /// The hosts that were named as targets, or all peers.
    pub targets: Vec<TargetView>,
    /// How much of that host's links migrations may take.
    #[serde(default)]
    pub limit: LimitView,
}

/// How much of a host's links migrations may take, in each direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitView {
    /// Mb/s that hold now; absent for no limit.
    pub mbps: Option<u64>,
    /// What holds later, within a day, the first first.
    pub later: Vec<LimitChange>,
}

/// A VM that is to leave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// Memory that its target must have, QEMU's own included.
    pub needs_bytes: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// Where it may be.
    pub placement: Placement,
    /// Why it cannot be moved now, wherever to: paused, being moved already, no answer.
    pub immovable: Option<String>,
    /// Why it cannot go to a target, by the target's name.
    pub refusals: BTreeMap<String, String>,
    /// What its memory looks like; absent when it could not be looked at.
    pub memory: Option<MemorySample>,
    /// The disks that would be copied with it, by the target's name; none to one that sees all of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub copies: BTreeMap<String, Vec<DrainedDisk>>,
}

impl VmView {
    /// The disks that would be copied to this target.
    pub fn copies_to(&self, target: &str) -> &[DrainedDisk] {
        self.copies.get(target).map_or(&[], Vec::as_slice)
    }
}

/// Where its owner allows a VM to be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Why it must not be moved, in its owner's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stays: Option<String>,
    /// Groups whose VMs must all be on different hosts.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub apart: BTreeSet<String>,
    /// Groups whose VMs must all be on one host.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub together: BTreeSet<String>,
}

/// A host that may take VMs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TargetView {
    /// Its name.
    pub name: String,
    /// Why it takes none: cordoned, silent, no path to it.
    pub unavailable: Option<String>,
    /// What a person should know of the way there.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Memory that is free there and promised to nobody.
    pub memory_available_bytes: u64,
    /// Its file systems on which disks would be made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub file_systems: Vec<FileSystemView>,
    /// Whether room may come free there by itself: its own VMs are on their way here, or will be.
    #[serde(default)]
    pub makes_room: bool,
    /// Whether one of these VMs is on its way.
    #[serde(default)]
    pub makes_room_now: bool,
    /// The VMs there, on their way there too.
    pub vms: Vec<PlacedVm>,
    /// Speed of all paths to it that carry at once, within both hosts' limits, in Mb/s; 0 where that is not known.
    pub paths_mbps: u64,
    /// These paths.
    #[serde(default)]
    pub paths: Vec<PathView>,
    /// How much of its links migrations may take.
    #[serde(default)]
    pub limit: LimitView,
    /// Free cores of the host that has fewer, this one or it; absent while that is not known.
    #[serde(default)]
    pub free_cores: Option<f64>,
    /// What a relay to it would have; absent where the option that was asked for compresses nothing.
    #[serde(default)]
    pub relay: Option<RelayMeans>,
    /// Why VMs cannot be post-copied there; absent where they can.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub no_post_copy: Option<NoPostCopy>,
    /// What migrations to it were like.
    pub path_history: Option<PathHistory>,
}

/// A path to a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathView {
    /// The link of the host that is to be emptied; of a VLAN its card, which it shares with others.
    pub link: String,
    /// Speed of that link, in Mb/s; absent where it is not known.
    pub link_mbps: Option<u64>,
    /// Speed of the path, which is that of its slower end, in Mb/s; absent where it is not known.
    pub mbps: Option<u64>,
}

/// A VM on a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlacedVm {
    /// Its name.
    pub name: String,
    /// Memory that it needs on a host.
    pub needs_bytes: u64,
    /// Where it may be.
    pub placement: Placement,
}

/// What was learnt from earlier migrations from one host to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathHistory {
    /// What one VM's transfer carried that had the links for itself, in Mb/s, while it sent: the median. Where none
    /// had, what all of them together may have carried.
    pub transfer_mbps: f64,
    /// From the request to the first byte, in ms: the median.
    pub setup_ms: f64,
    /// From the end of the transfer to the end of the migration, in ms: the median.
    pub completion_ms: f64,
    /// How many transfers at a time carried most, if a drain has found it.
    pub transfers: Option<FoundTransfers>,
    /// What the copies of one VM's disks carried, in Mb/s: the median. Absent where none was copied.
    #[serde(default)]
    pub disk_mbps: Option<f64>,
}

/// How many transfers at a time a drain has found to carry most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FoundTransfers {
    /// To all of its targets together.
    pub transfers: u8,
    /// To how many targets VMs were still to go when it found that; at least 1.
    pub targets: u8,
}
