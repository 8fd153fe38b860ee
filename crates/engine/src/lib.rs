//! What must happen in a migration: pure decisions, no I/O, no clock.

pub mod option;
pub mod result;
pub mod step;
