//! Bounds on memory, and on every wait.

use std::time::Duration;

/// The longest READ or WRITE. QEMU's mirror asks for 1 MiB at most, and cuts longer requests of others by this.
pub const DATA_BYTES_MAX: u32 = 2 << 20;

/// Shorter data are sent at once: to compare them takes as long.
pub(crate) const COMPARED_BYTES_MIN: u32 = 16 << 10;

/// Shorter data are sent as they are: to pack them brings little.
pub(crate) const PACKED_BYTES_MIN: usize = 16 << 10;

/// Requests of one disk that are not answered yet. QEMU's client has 16, nbdcopy 64 on each connection.
pub(crate) const REQUESTS_MAX: usize = 64;

/// What such requests may hold of data.
pub(crate) const HELD_BYTES_MAX: usize = 64 << 20;

/// Streams of one disk at a time.
pub const STREAMS_MAX: usize = 64;

/// What one request may become: data and zeroes in turn.
pub(crate) const PIECES_MAX: usize = DATA_BYTES_MAX as usize / crate::zeroes::GRAIN_BYTES + 1;

/// What one stream may hold at the target: all pieces of all requests, fences, and a flush or two.
pub(crate) const PIECES_PER_STREAM_MAX: usize = REQUESTS_MAX * PIECES_MAX + 2 * STREAMS_MAX;

/// How often each end of a stream says that it is there, while it has nothing else to say.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(2);

/// A stream is lost when nothing has been heard on it, or taken by it, for so long.
pub(crate) const SILENCE: Duration = Duration::from_secs(20);

/// For the other end's last words, when a stream breaks.
pub(crate) const LINGER: Duration = Duration::from_secs(3);

/// For connecting, and for what is said before the first request.
pub(crate) const GREETING: Duration = Duration::from_secs(10);

/// Clients that may try a name at the same time.
pub(crate) const CANDIDATES_MAX: usize = 8;

/// For QEMU to connect, once the disk is served.
pub(crate) const CLIENT_COMES: Duration = Duration::from_mins(1);

/// How long requests wait for a stream, when all are lost.
pub(crate) const WITHOUT_STREAM: Duration = Duration::from_mins(1);

/// For the other host's disk to answer anything, while something is asked of it and there is a stream. The guest's writes
/// may wait for it.
pub(crate) const UNANSWERED: Duration = Duration::from_secs(30);

/// For the disk to answer what was asked of it, before a stream is taken from it.
pub(crate) const DISK_ANSWERS: Duration = Duration::from_mins(2);

/// How often the disk flushes while it is written to.
pub(crate) const FLUSH_EVERY: Duration = Duration::from_secs(1);

/// For a fence, which waits for the disk at the other end.
pub(crate) const FENCE: Duration = Duration::from_mins(3);
