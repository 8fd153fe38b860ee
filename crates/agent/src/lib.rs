//! One agent per host: its API, its journal, and the executor of the engine's actions.
//!
//! Its modules, the top first: none imports one that stands above it (`crates/agent/layers` has all of them in order;
//! docs/decisions/0065).
//!
//! ```text
//! app        makes the parts; start and stop, and what is watched meanwhile
//! http       connections, who gets in when there are too many, and the API
//! joining    makes a fleet, joins one, leaves it; renews certificates
//! drain      empties this host, and brings back what left it
//! disk_moves moves a running VM's disk on this host
//! outgoing   migrations from here; its executor carries out what the engine says
//! check      tries everything between this host and another, and mends what it may
//! incoming   migrations to here: the target's promises, and what may come to run here
//! transfer   what migrations in either direction share: limits, connections, relay, cores
//! guard      lets a VM run on when the agent cannot
//! paths      the ways to other hosts: found, watched, tried, and counted
//! peers      the other hosts' agents: how to reach them, and what they say of this host's journal
//! vms        the VMs of this host: what runs them, their files, cores and hooks
//! host       this host: its name, hardware, network and ports
//! store      what outlives a run: configuration, journal, fleet
//! ```

pub mod app;
mod check;
mod disk_moves;
mod drain;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod guard;
mod host;
mod http;
mod incoming;
pub mod joining;
mod outgoing;
mod paths;
pub mod peers;
pub mod store;
#[cfg(test)]
mod test_host;
mod transfer;
mod vms;
