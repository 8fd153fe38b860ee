//! What a hypervisor is to Drainpipe: neutral words for what every one does, and a fake for tests.
//!
//! ```text
//! spec         what a VM is: TOML, JSON, resolved for a host
//! hardware     what runs guest instructions
//! facts        what a host's hypervisor can do
//! cpu_models   what its CPU models are there
//! state        what a VM is doing, and where its migration stands
//! event        what it reports by itself
//! transport    how a migration's bytes travel
//! parcel       what one act hands to the next, on the other host
//! connections  its TCP connections, where they are ours to deal with
//! qcow2        which other files an image names; pure
//! disks        its disks, copied while it runs
//! memory       what a guest's memory looks like to a migration
//! vm           the acts of a VM's life and of its migration
//! demands      what moving a VM asks for, beside its specification
//! words        texts as they may be shown; pure
//! hypervisor   what starts VMs, and finds those that run
//! fake         a hypervisor without VMs of its own, for tests
//! ```
//!
//! `drainpipe-hypervisor-qemu` drives QEMU by these traits. The agent knows no other words; what a hypervisor cannot do
//! is a capability in a host's facts, by which the engine plans.

mod connections;
pub mod cpu_models;
mod demands;
mod directory;
mod disk_moves;
mod disks;
mod end;
mod error;
mod event;
mod facts;
#[cfg(any(test, feature = "fake"))]
pub mod fake;
mod hardware;
mod hypervisor;
mod memory;
mod open_enum;
mod parcel;
pub mod qcow2;
mod role;
pub mod spec;
mod state;
mod tls_key;
mod transport;
mod vm;
pub mod words;

pub use connections::{ConnectionUse, Connections, Pace, Paces};
pub use demands::{Demands, Need};
pub use directory::{PathTooLong, SharedPath, VmDirectory};
pub use disk_moves::{DiskMoves, MoveName, MoveState};
pub use disks::{CopyState, CopyTo, DiskCopies, DiskExports, OpenDisk, export_name};
pub use end::{End, Exit};
pub use error::{VmError, VmErrorKind};
pub use event::{Happening, VmEvent};
pub use facts::{BinaryStamp, HypervisorFacts, Version};
pub use hardware::Hardware;
pub use hypervisor::{Hypervisor, Managed, ManagedVm, Unmanaged};
pub use memory::{Contents, MemorySample};
pub use parcel::{Parcel, ParcelTooLong};
pub use role::Role;
pub use spec::{Manager, OwnersAct, ResolvedSpec, VmSpec};
pub use state::{Hold, MigrationStatus, RamStatus, RunState, TransferStatus};
pub use tls_key::{BadTlsKey, TlsKey};
pub use transport::{Address, Parallel, SourceSettings, Transport, ZeroPages, Zstd};
pub use vm::{Machine, SourceVm, TargetVm, VcpuThrottle, VcpuTime, Vm};
