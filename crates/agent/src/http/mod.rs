//! The agent's door: connections, who gets in when there are too many, and the API.

pub(crate) mod api;
pub(crate) mod connection_slots;
pub(crate) mod server;
