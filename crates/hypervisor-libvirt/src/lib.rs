//! VMs that libvirt manages.
//!
//! ```text
//! domain     what a domain's XML says: its machine, what speaks against a migration, what the target needs
//! ```

pub mod domain;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
