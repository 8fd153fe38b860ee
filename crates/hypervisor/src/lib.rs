//! QEMU driven directly: VM specification, QMP client, processes.
//!
//! ```text
//! spec          what a VM is: TOML, JSON, resolved for a host
//! facts         what this host's QEMU can do
//! command_line  a specification as QEMU's arguments; pure
//! launch        a process and its control sockets
//! qcow2         which other files QEMU opens for an image; pure
//! launcher      the process that becomes QEMU, and what it gives up before
//! handed        files and taps that QEMU gets open
//! user          whom QEMU runs as
//! qmp           QEMU's control protocol
//! memory_sample what a running guest's memory looks like: zero pages, contents, rate of change
//! vmm           one running QEMU: start, attach, stop, destroy
//! cpu_priority    which VM has the cores first
//! throttle      how much of their time a guest's vCPUs may run
//! vcpus         which threads they are, and what CPU they have used
//! control_groups quotas of CPU for single threads
//! migration     the single acts of a migration; what to do when is the engine's
//! ```
//!
//! One rule holds everywhere: a guest never starts to run by itself. QEMU waits (`-S`), and
//! only [`Vmm::start`] of a fresh VM and [`migration::run`] let a guest run.

mod command_line;
mod control_groups;
pub mod cpu_models;
mod cpu_priority;
pub mod facts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod handed;
mod launch;
pub mod launcher;
mod memory_sample;
pub mod migration;
mod open_enum;
mod paths;
mod process;
pub mod qcow2;
pub mod qmp;
mod sockets;
pub mod spec;
mod tap;
mod throttle;
mod user;
mod vcpus;
mod vmm;

pub use command_line::Role;
pub use control_groups::QuotaError;
pub use facts::{HypervisorFacts, ProbeError};
pub use launch::LaunchError;
pub use launcher::Launcher;
pub use memory_sample::{Contents, MemorySample, SampleError};
pub use paths::{PathTooLong, RuntimePaths, SharedPath};
pub use process::Exit;
pub use sockets::{ConnectionUse, Pace, cut_connections, is_stopped};
pub use spec::{ResolvedSpec, VmSpec};
pub use tap::TapError;
pub use throttle::{ThrottleError, VcpuThrottle, lift_throttle, sweep_throttles};
pub use user::{DEFAULT_USER, QemuUser, UserError};
pub use vcpus::VcpuTime;
pub use vmm::{AttachError, End, EndError, RunState, StartError, Vmm};
