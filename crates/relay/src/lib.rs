//! Streams from one host to another: compressed, encrypted, or both.
//!
//! ```text
//!   program ── Unix socket ──► Sender ── TCP ──► Receiver ── Unix socket ──► program
//! ```
//!
//! Each connection that one program makes becomes one to the other program, with the bytes in the same order. On the
//! first connection, the other program's answers go back too: QEMU's return path, which libvirt always asks for. A
//! sender serves one program and one purpose, and so does a receiver: they have their own threads, end with their
//! value, and hold a bounded amount of memory.
//!
//! Encrypted streams have TLS 1.3 between the two ends, each of which knows who the other must be. Nothing else is
//! sent on such a connection, and nothing is sent in the clear if that fails.
//!
//! [`Packers`] do the same for data that is sent by other code, in any order, over its own connections.
//!
//! A block is sent packed if a core was free to pack it by the time the wire wanted it, and otherwise as it is. So a
//! sender is never slower than the wire alone, as long as the copying itself keeps up.

mod answers;
mod block;
#[cfg(any(test, feature = "fuzzing"))]
mod choices;
mod delta;
mod entropy_filter;
mod error;
mod estimate;
mod figures;
mod frame;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod host_cpu;
mod idle_time;
mod multifd;
mod pace;
mod pack;
mod packers;
mod page_cache;
mod page_slots;
mod paged;
mod preamble;
mod queue;
mod receiver;
mod records;
mod refusals;
mod sender;
mod sockets;
mod tls;
mod treatment;
mod unauthenticated;
mod unpacking;
mod wire;

pub use block::BLOCK_BYTES_MAX;
pub use error::RelayError;
pub use estimate::estimate;
pub use figures::{CodecBytes, Figures};
pub use host_cpu::{Busyness, HostCpu};
pub use packers::{Bundle, BundleUnpacker, Packers, PackersSettings};
pub use preamble::{TOKEN_BYTES, Token};
pub use receiver::{Receiver, ReceiverSettings};
pub use sender::{ConcurrentSenders, Limiter, Sender, SenderSettings, UNSENT_BYTES_MAX, unsent_bytes};
pub use tls::{ClientTls, ServerTls};
pub use treatment::Treatment;

/// Connections of one sender. Each may hold some blocks, and all of them together are bounded.
pub const CONNECTIONS_MAX: usize = 64;

/// The connection that the program makes first, and by which it hears answers.
const MAIN_STREAM: usize = 0;

/// Threads of one sender that pack. Each holds memory, 1.7 MiB at most.
pub const PACKING_THREADS_MAX: usize = 16;
