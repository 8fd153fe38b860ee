//! What must happen in a migration: pure decisions, no I/O, no clock.
//!
//! Read [`migration`] first: the ten steps as one state machine.

pub mod bandwidth;
pub mod capabilities;
pub mod check;
pub mod codec;
pub mod connections;
pub mod convergence;
pub mod drain;
pub mod encryption;
pub mod experience;
pub mod facts;
#[cfg(test)]
mod fixtures;
pub mod format;
pub mod free_cores;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod idle_cores;
pub mod inbound;
pub mod journal;
mod known;
pub mod migration;
pub mod option;
pub mod pacing;
mod pairing;
pub mod path;
pub mod path_record;
pub mod plan;
pub mod prediction;
pub mod problem;
pub mod progress;
pub mod protocol;
pub mod queue;
pub mod relayed;
pub mod result;
pub mod speed;
mod standby;
pub mod standstill;
pub mod start;
pub mod step;
pub mod storage;
pub mod throttle;
pub mod vm_resources;
pub mod watch;
pub mod wire_rate;
