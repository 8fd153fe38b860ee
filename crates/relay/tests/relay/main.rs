//! Real sockets from end to end: what goes in comes out, and whatever goes wrong ends it cleanly.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod answers;
mod encryption;
mod packing;
mod passing;
mod support;
