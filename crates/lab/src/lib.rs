//! Test hosts on one machine: network namespaces or emulated machines, shaped links, faults.
//!
//! ```text
//!                 client (mgmt .1, guests .1)
//!                     │             │
//!   switch:  ═══ mgmt bridge ═══ guests bridge ═══
//!              │             │     │           │
//!             mgmt        uplink  uplink      mgmt
//!            ┌─┴────────────┴─┐  ┌─┴───────────┴──┐
//!            │ a   guests br. │  │ b   guests br. │   guests attach by taps
//!            └─┬────┬─────────┘  └─┬────┬─────────┘
//!              e0   e1 ── links ── e0   e1            shaped by tbf
//! ```
//!
//! Every host, the client and the switch is a network namespace named
//! `drainpipe-<lab>-<node>`. With two hosts a link is one veth pair; with more it is a bridge in
//! the switch. Nothing is ever created in the root namespace, so labs neither see each other nor
//! the machine's own network, and all of them use the same addresses.
//!
//! [`Lab::up`] is all or nothing. What a killed `up` or `down` left is found by name and cleared
//! by the next `up` or `down` of that lab: the kernel and the names are the truth, and
//! `/run/drainpipe/lab/<lab>/lab.json` exists only while the lab is complete.

mod addresses;
mod control_groups;
mod cpus;
mod emulated;
mod enter;
mod error;
mod fault;
mod interfaces;
mod lab;
mod libvirt;
mod libvirt_daemon;
mod link_local;
mod names;
mod processes;
mod spec;
mod state;
mod status;
mod tbf;
mod tools;
mod topology;

pub use addresses::{GUEST_NETWORK, MANAGEMENT_NETWORK, client_guest_address, client_management_address};
pub use drainpipe_machine::client::Streams;
pub use error::Error;
pub use fault::{Direction, Fault, FaultParseError};
pub use interfaces::LinkState;
pub use lab::{Lab, LabSummary, Removal};
pub use libvirt::DaemonChange;
pub use libvirt::user_files as libvirt_user_files;
pub use names::{CLIENT, GUEST_BRIDGE, MANAGEMENT_INTERFACE};
pub use spec::{DEFAULT_MTU_BYTES, LabSpec, LinkAddresses, LinkSpec, MachineSpec, SpecError};
pub use status::{HostStatus, LabStatus, LibvirtStatus, LinkStatus, NodeStatus, ProcessStatus};
