//! One file a command.

pub(crate) mod agent;
pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod demo;
pub(crate) mod disk;
pub(crate) mod documents;
pub(crate) mod drain;
mod fix;
pub(crate) mod fleet;
pub(crate) mod history;
pub(crate) mod hosts;
pub(crate) mod journal;
pub(crate) mod lab;
pub(crate) mod limit;
pub(crate) mod migrate;
pub(crate) mod move_disk;
pub(crate) mod pki;
pub(crate) mod vm;
