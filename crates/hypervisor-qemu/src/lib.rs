//! QEMU driven directly, by the traits of `drainpipe-hypervisor`.
//!
//! ```text
//! facts         what this host's QEMU can do
//! cpu_models    what it says of its CPU models
//! command_line  a specification as QEMU's arguments; pure
//! numbers       under which numbers it has files and taps open; pure
//! launch        a process and its control sockets
//! launcher      the process that becomes QEMU, and what it gives up before
//! reach         what only capabilities let a process do to QEMU
//! keeper        a program that has them, where the agent has not
//! privileges    which of the two: this process or a keeper
//! birth         what tells a process from all others
//! handed        files and taps that QEMU gets open
//! user          the user that QEMU runs as
//! qmp           QEMU's control protocol
//! memory_sample what a running guest's memory looks like: zero pages, contents, rate of change
//! vmm           one running QEMU: start, attach, stop, destroy
//! cpu_priority    which VM has the cores first
//! throttle      how much of their time a guest's vCPUs may run
//! vcpus         which threads they are, and what CPU they have used
//! control_groups quotas of CPU for single threads
//! sockets       its TCP connections
//! migration     the single acts of a migration; what to do when is the engine's
//! disks         its disks, copied to another QEMU by NBD
//! disk_moves    its disks, moved on this host
//! latest        values with later versions, each of which can be lent
//! hold          whose a VM is that may have left
//! machine       all of that by the traits
//! hypervisor    QEMUs of this host, started and found
//! ```
//!
//! One rule holds everywhere: a guest never starts to run by itself. QEMU waits (`-S`), and
//! only [`Vmm::start`] of a fresh VM and [`migration::run`] let a guest run.

mod birth;
mod command_line;
mod control_groups;
mod cpu_models;
mod cpu_priority;
mod disk_moves;
mod disks;
mod errors;
mod facts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod handed;
mod hold;
mod hypervisor;
pub mod keeper;
mod latest;
mod launch;
pub mod launcher;
mod machine;
mod memory_sample;
pub mod migration;
mod numbers;
mod paths;
mod privileges;
mod process;
pub mod qmp;
mod reach;
mod sockets;
mod tap;
mod throttle;
mod user;
mod vcpus;
mod vmm;

pub use control_groups::QuotaError;
pub use facts::{ProbeError, capabilities, host_lacks_kvm, probe};
pub use hypervisor::Qemu;
pub use launch::LaunchError;
pub use launcher::Launcher;
pub use memory_sample::SampleError;
pub use paths::RuntimePaths;
pub use privileges::Privileges;
pub use process::Process;
pub use reach::ProcessFile;
pub use sockets::{cut_connections, is_stopped};
pub use tap::TapError;
pub use throttle::{ThrottleError, VcpuThrottle, lift_throttle, lift_throttle_of, sweep_throttles};
pub use user::{QemuUser, UserError};
pub use vcpus::{VcpuTime, vcpu_threads_by_name};
pub use vmm::{AttachError, EndError, StartError, Vmm};
