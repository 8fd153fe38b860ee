//! What libvirt says of a migration, in the words that every hypervisor has. Pure: numbers and names come in, and neutral
//! values go out.
//!
//! ```text
//! state      a domain's state and the reason for it
//! job        the statistics of a domain's job
//! lifecycle  what libvirt reports by itself
//! ```
//!
//! The numbers are those of libvirt's public header `include/libvirt/libvirt-domain.h`, as of 9.0. They never change; newer
//! versions add some.

mod job;
mod lifecycle;
mod state;

pub use job::JobStatistics;
pub use lifecycle::happening;
pub use state::{DomainState, Side};
