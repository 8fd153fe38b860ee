//! What outlives a run of the agent: its configuration, its journal, and the fleet that this host has joined.

pub mod config;
pub(crate) mod cpu_list;
pub(crate) mod fleet;
pub(crate) mod fleet_files;
pub(crate) mod journal;
pub(crate) mod lock;
