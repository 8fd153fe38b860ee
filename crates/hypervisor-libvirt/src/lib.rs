//! VMs that libvirt manages.
//!
//! ```text
//! domain     what a domain's XML says: its machine, what speaks against a migration, what the target needs
//! migration  what libvirt says of a migration: states, statistics, events
//! ```

pub mod domain;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod migration;
