//! What must happen in a migration: pure decisions, no I/O, no clock.
//!
//! Read [`migration`] first: the ten steps as one state machine.
//!
//! ```text
//! migration   one VM's way: source, target and guard; progress and result
//! drain       emptying a host: the plan, who carries it out, when it will be over
//! check       what is wrong between two hosts; finding: how that is said
//! plan        what a migration will do: option, paths, connections, relay; why not more
//! transfer    how memory goes over the paths, and how long that takes
//! storage     disks: what is copied, kept, and gone on with
//! bandwidth   limits, and how they are kept
//! paths       which link reaches which, and how well
//! host        facts, capabilities, cores, and what VMs may use
//! journal     whether a host's journal may be believed, and a VM be started
//! protocol    what two releases speak with each other
//! connections who gets in when there are too many
//! format      bytes, rates and durations as people read them
//! problem     errors; known: values of a newer peer
//! ```

pub mod bandwidth;
pub mod check;
pub mod connections;
pub mod drain;
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
pub mod paths;
pub mod plan;
pub mod problem;
pub mod protocol;
pub mod storage;
pub mod transfer;
