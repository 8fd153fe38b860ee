//! Streams, compressed on their way from one host to another.
//!
//! ```text
//!   program ── Unix socket ──► Sender ── TCP ──► Receiver ── Unix socket ──► program
//! ```
//!
//! Each connection that the one program makes becomes one to the other program, in the same order of bytes.
//! Bytes go one way only. A sender is for one program and one purpose, and so is a receiver: they have
//! threads of their own, end with their value, and hold a bounded amount of memory.
//!
//! A block goes out packed when a core was free to pack it by the time the wire wanted it, and as it is
//! otherwise. So a sender is never slower than the wire alone, as long as the copying itself keeps up.

mod error;
mod figures;
mod frame;
mod host_cpu;
mod pace;
mod pack;
mod preamble;
mod queue;
mod receiver;
mod sender;
mod sockets;

pub use error::RelayError;
pub use figures::{CodecBytes, Figures};
pub use frame::BLOCK_BYTES_MAX;
pub use preamble::{TOKEN_BYTES, Token};
pub use receiver::{Receiver, ReceiverSettings};
pub use sender::{Limiter, Sender, SenderSettings};

/// Connections of one sender. Each may hold some blocks, and all of them together are bounded.
pub const CONNECTIONS_MAX: usize = 64;
