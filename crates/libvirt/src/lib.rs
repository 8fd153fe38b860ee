//! A client of libvirt's remote protocol, which a libvirt daemon speaks on its local Unix socket.
//!
//! ```text
//! we     → call      program, procedure, serial, arguments
//! daemon → reply     the same serial; what came of it, or an error
//! daemon → message   an event, any time, once somebody has subscribed
//! both   ↔ ping      keep-alive
//! ```
//!
//! ```text
//! xdr         numbers, texts and lists as bytes; pure
//! packet      what bytes belong together, and what they are; pure
//! procedure   what a call names; pure
//! parameters  values that have a name and a type of their own
//! connection  one socket, and the calls that are under way on it
//! calls       what a daemon can be asked, by theme
//! domain      what it says of a domain, which is libvirt's word for a VM
//! job_stats   what it says of a migration under way
//! events      what it says unasked
//! ```
//!
//! Nothing here decides. A migration is run phase by phase, by whoever calls the phases; see decision 68.

mod calls;
mod connection;
mod domain;
mod error;
mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod job_stats;
mod packet;
mod parameters;
mod procedure;
mod xdr;

pub use calls::{
    Begun, BlockJob, CapabilitiesOf, Checkpoint, Finished, JobStatsOf, MetadataOf, Prepared, Snapshot,
    UndefineFlags, Version, XmlFlags, migrate_flags, migrate_parameters, snapshot_flags,
};
pub use connection::Connection;
pub use domain::{Domain, DomainInfo, DomainState, DomainStatus};
pub use error::{Error, RemoteError};
pub use events::{DomainEvent, Lifecycle};
pub use job_stats::{JobKind, JobStats, MemoryStats};
pub use parameters::{Parameter, Value};
