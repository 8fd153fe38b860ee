//! One disk's NBD requests, spread over several connections between two hosts.
//!
//! ```text
//!                    ┌─ stream ─► TargetSplitter ── NBD connection ─┐
//!   QEMU ── NBD ──► SourceSplitter ─ stream ─►  …  ── NBD connection ─► the disk's NBD server
//!                    └─ stream ─►              …  ── NBD connection ─┘
//! ```
//!
//! QEMU's NBD client has one connection with 16 requests in flight, so one disk uses one link. Here each request goes
//! over the least loaded stream, and answers come in any order. A write is acknowledged when the target's disk has
//! acknowledged it, and a flush when everything is flushed. [`scheduler`](crate::scheduler) and `docs/decisions/0084`
//! describe how that stays true when streams are lost.
//!
//! - [`SourceSplitter::listen`] serves a disk on loopback, to one client that knows its name;
//!   [`run`](SourceSplitter::run) takes streams as they come, until the client disconnects.
//! - A [`Reception`] serves several disks at one address, to a client that names them itself.
//! - [`TargetSplitter::serve`] takes the other end of each of these streams to the disk.
//! - [`Pace`] holds what the source sends within a limit.
//! - What the source's cores have the time to pack by then goes packed, if they are given: see
//!   [`Packers`](drainpipe_relay::Packers). What a stream wants to send now never waits for them while the wire is idle.
//! - [`Counters`] say how far it is, and which streams live: who brings the streams brings new ones, too.
//!
//! The caller connects and encrypts the streams; to this crate, they are bytes in both directions. Memory is bounded
//! at both ends, each wait has an end, and nothing that the other host sends is trusted.

mod buffers;
mod command;
mod counters;
mod coverage;
mod digest;
mod error;
mod fences;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod greeting;
mod limits;
mod nbd;
mod pace;
mod requests;
mod scheduler;
mod source;
mod target;
mod wire;
mod zeroes;

pub use counters::{Counters, StreamCounters};
pub use error::{Malformed, Refusal, SplitterError};
pub use greeting::{SESSION_BYTES, Session};
pub use limits::{DATA_BYTES_MAX, STREAMS_MAX};
pub use pace::Pace;
pub use source::{Export, Reception, SourceSplitter, SourceWatch, There};
pub use target::{DiskServer, ServerAddress, TargetSplitter};
