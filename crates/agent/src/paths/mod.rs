//! The paths to other hosts: found, watched, tested, and counted.

pub(crate) mod discovery;
pub(crate) mod link_socket;
pub(crate) mod look_pace;
pub(crate) mod multichannel;
pub(crate) mod path_counters;
pub(crate) mod path_history;
pub(crate) mod path_watch;
pub(crate) mod probe;
pub(crate) mod tracking;
