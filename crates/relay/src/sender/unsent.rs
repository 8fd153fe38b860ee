//! What a connection's socket may hold unsent. The program counts it as sent.

use std::time::Duration;

/// By the time that the wire needs for it.
const SOCKETS_MS: u64 = 20;

/// What one socket may hold unsent, in bytes: enough for the moments in which a busy host does not wake the
/// thread that fills it, and at most what it would hold by itself.
pub(super) const UNSENT_BYTES_MIN: u32 = 64 << 10;
const UNSENT_BYTES_MAX: u32 = 1 << 20;

/// `TCP_NOTSENT_LOWAT` for each of so many connections, which the wire takes so much of in this time.
pub(super) fn unsent_bytes(wire_bytes: u64, time: Duration, connections: u64) -> u32 {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    let unsent = u32::try_from(wire_bytes * SOCKETS_MS / ms / connections).unwrap_or(u32::MAX);
    unsent.clamp(UNSENT_BYTES_MIN, UNSENT_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_wire_within_bounds() {
        let second = Duration::from_secs(1);
        assert_eq!(unsent_bytes(0, second, 1), UNSENT_BYTES_MIN);
        assert_eq!(unsent_bytes(10 << 20, second, 1), (10 << 20) / 50);
        assert_eq!(unsent_bytes(1 << 40, second, 16), UNSENT_BYTES_MAX);
    }
}
