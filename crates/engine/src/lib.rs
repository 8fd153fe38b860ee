//! The decisions of a migration: pure, no I/O, no clock.
//!
//! Read [`migration`] first: the ten steps as one state machine.
//!
//! Its modules, the top first: none imports one that stands above it (`crates/engine/layers`; docs/decisions/0065).
//!
//! ```text
//! journal     whether a host's journal may be believed, and a VM be started
//! drain       emptying a host: the plan, who carries it out, when it will be over
//! migration   one VM's way: source, target and guard; progress and result
//! check       what is wrong between two hosts
//! estimate    how long a migration will take, and whether it comes to an end
//! plan        what a migration will do: transfer, paths, connections, relay; why not more
//! transfer    how memory goes over the paths
//! storage     disks: what is copied, kept, and gone on with
//! paths       which link reaches which, and how well
//! host        facts, capabilities, cores, and what VMs may use
//! bandwidth   limits, and how they are kept
//! option      the performance options that can be asked for
//! protocol    what two releases speak with each other
//! finding     how it is said what is wrong
//! problem     errors
//! format      bytes, rates and durations as people read them
//! known       values of a newer peer
//! tracked     connections that firewalls go by
//! connections who gets in when there are too many
//! ```

pub mod bandwidth;
pub mod check;
pub mod connections;
pub mod drain;
pub mod estimate;
pub mod finding;
#[cfg(test)]
mod fixtures;
pub mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod host;
pub mod journal;
mod known;
pub mod migration;
pub mod option;
pub mod paths;
pub mod plan;
pub mod problem;
pub mod protocol;
pub mod storage;
pub mod tracked;
pub mod transfer;
