//! VMs that libvirt manages.
//!
//! ```text
//! libvirt      a host's libvirt, as every hypervisor
//! machine      a domain, as every hypervisor's VM
//! outgoing     a domain that leaves: Begin and Perform
//! incoming     a domain that comes: Prepare and Finish
//! installed    which libvirt a host has, without running it
//! daemon       the connection that all domains share
//! announcing   where a domain's guest is, told to the network
//! protection   a domain that nobody else may let run
//! monitor      QEMU's own control socket, for when libvirt has ended
//! demands      what speaks against moving a domain, and what its target must have
//! snapshots    what libvirt knows of a domain's snapshots, while the domain is on its way
//! needs        which of that this host's libvirt does not have
//! files        what the agent keeps of a domain
//! meeting      where a domain's QEMU and the agent meet, if a migration goes through the agent
//! qemu_process the QEMU that runs a domain, as the kernel knows it
//! lock         locks that outlive a panic
//! phases       what libvirt's phases are told, and what they hand to each other; pure
//! images       what the files of a domain's disks hold
//! states       what libvirt says, in the words of every hypervisor; pure
//! domain       what a domain's XML says: its machine, what speaks against a migration, what the target needs; pure
//! ```
//!
//! libvirt owns its domains, and Drainpipe the hand-over: if an answer is lost in the last phase of libvirt's own
//! migration, libvirt decides by itself, and two copies may run. So the agents of both hosts run its phases one by
//! one, and the target's libvirt finishes only once the hand-over is recorded (docs/decisions/0071, 0105).

mod announcing;
mod daemon;
mod demands;
pub mod domain;
mod errors;
mod files;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod images;
mod incoming;
mod installed;
mod libvirt;
mod lock;
mod machine;
mod meeting;
mod monitor;
mod needs;
mod outgoing;
mod phases;
mod protection;
mod qemu_process;
mod snapshots;
mod sockets;
mod states;
mod versions;

pub use installed::installed_version;
pub use libvirt::Libvirt;
pub use machine::DomainVm;
pub use sockets::Sockets;
