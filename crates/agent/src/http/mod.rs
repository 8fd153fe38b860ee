//! The agent's door: connections, which of them are kept when there are too many, and the API.

pub(crate) mod api;
pub(crate) mod connection_slots;
pub(crate) mod server;
