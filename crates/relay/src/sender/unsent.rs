//! What a connection's socket may hold unsent. The program counts it as sent.

use std::time::Duration;

/// By the time that the wire needs for it.
const SOCKETS: Duration = Duration::from_millis(20);

/// What one socket may hold unsent, in bytes: enough for the moments in which a busy host does not wake the
/// thread that fills it, and at most what it would hold by itself.
pub(super) const UNSENT_BYTES_MIN: u32 = 64 << 10;
/// The most of it.
pub const UNSENT_BYTES_MAX: u32 = 1 << 20;

/// `TCP_NOTSENT_LOWAT` for each of so many connections that share this rate.
pub fn unsent_bytes(wire_bytes_per_second: f64, connections: f64) -> u32 {
    let unsent = wire_bytes_per_second * SOCKETS.as_secs_f64() / connections;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it saturates, and is positive"
    )]
    (unsent as u32).clamp(UNSENT_BYTES_MIN, UNSENT_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_wire_within_bounds() {
        assert_eq!(unsent_bytes(0.0, 1.0), UNSENT_BYTES_MIN);
        assert_eq!(unsent_bytes(10_000_000.0, 1.0), 200_000);
        assert_eq!(unsent_bytes(250e6, 8.0), 625_000);
        assert_eq!(unsent_bytes(1e12, 16.0), UNSENT_BYTES_MAX);
    }
}
