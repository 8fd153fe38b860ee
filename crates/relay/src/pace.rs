//! A limit on what is sent, in bytes per second.

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use nix::sys::socket::setsockopt;
use nix::{setsockopt_impl, sockopt_impl};

/// What was not used may be used so much later: who waits for its turn is woken a little late.
const LATE_MAX: Duration = Duration::from_millis(20);

/// Not to go out all at once, a block is sent by the kernel so much faster than the limit: in parts of 128 KiB, a second at
/// 10 Mb/s would have up to a tenth more or less than that.
const SENT_FASTER: (u64, u64) = (5, 4);

/// A block goes in parts of so much of the limit's time: where it goes as a whole, a second has two of 128 KiB more or less
/// than another, which at 10 Mb/s was a fifth.
const PART: Duration = Duration::from_millis(20);

/// The least part: what one record of TLS holds.
const PART_BYTES_MIN: usize = 16 << 10;

/// The pace of a connection that is not limited.
const UNPACED: u64 = u64::MAX;

sockopt_impl!(MaxPacingRate, SetOnly, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, u64);

/// A stream's, to send something.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct SendQuota {
    /// So much of it.
    pub(crate) bytes: usize,
    /// How fast its kernel may, in bytes per second.
    pub(crate) socket_bytes_per_s: u64,
}

/// Says when the next part of a block may go out.
#[derive(Debug)]
pub(crate) struct Pace {
    bytes_per_second: Option<u64>,
    free_at: Instant,
}

impl Pace {
    /// Without a limit.
    pub(crate) fn new(now: Instant) -> Self {
        Self { bytes_per_second: None, free_at: now }
    }

    /// Sets another limit; `None` for none.
    pub(crate) fn set(&mut self, bytes_per_second: Option<u64>, now: Instant) {
        self.bytes_per_second = bytes_per_second;
        self.free_at = now;
    }

    /// The next one, for something of so many bytes. It has to be waited for before.
    pub(crate) fn quota(&mut self, bytes: usize, now: Instant) -> SendQuota {
        let bytes = bytes.min(self.part_bytes());
        self.takes(bytes, now);
        SendQuota { bytes, socket_bytes_per_s: self.of_socket() }
    }

    fn of_socket(&self) -> u64 {
        let (faster, than) = SENT_FASTER;
        self.bytes_per_second.map_or(UNPACED, |limit| limit.saturating_mul(faster) / than)
    }

    fn part_bytes(&self) -> usize {
        let Some(bytes_per_second) = self.bytes_per_second else { return usize::MAX };
        let part = u128::from(bytes_per_second) * PART.as_millis() / 1000;
        usize::try_from(part).unwrap_or(usize::MAX).max(PART_BYTES_MIN)
    }

    /// How long the next turn has to be waited for; nothing if it is there.
    pub(crate) fn wait(&self, now: Instant) -> Option<Duration> {
        self.bytes_per_second?;
        self.free_at.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    fn takes(&mut self, bytes: usize, now: Instant) {
        let Some(bytes_per_second) = self.bytes_per_second else { return };
        let time = Duration::from_secs_f64(bytes as f64 / bytes_per_second.max(1) as f64);
        let since = now.checked_sub(LATE_MAX).map_or(self.free_at, |earliest| self.free_at.max(earliest));
        self.free_at = since + time;
    }
}

/// A connection that its kernel paces (`SO_MAX_PACING_RATE`).
#[derive(Debug)]
pub(crate) struct PacedSocket {
    bytes_per_s: u64,
}

impl PacedSocket {
    /// As it was made: not held back.
    pub(crate) fn new() -> Self {
        Self { bytes_per_s: UNPACED }
    }

    /// From now on at most so fast.
    pub(crate) fn pace(&mut self, socket: &TcpStream, bytes_per_s: u64) -> io::Result<()> {
        if self.bytes_per_s != bytes_per_s {
            setsockopt(socket, MaxPacingRate, &bytes_per_s)?;
            self.bytes_per_s = bytes_per_s;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn never_more_than_the_limit_and_nearly_all_of_it(
            limit in 1_000_000..1_000_000_000_u64,
            blocks in prop::collection::vec((1_000..131_072_usize, 0..10_u64), 50..200),
        ) {
            let begin = Instant::now();
            let (mut now, mut pace) = (begin, Pace::new(begin));
            pace.set(Some(limit), begin);
            let (mut bytes, mut last) = (0, 0);
            for (block, late_ms) in blocks {
                now += pace.wait(now).map_or(Duration::ZERO, |wait| wait + Duration::from_millis(late_ms));
                prop_assert!(pace.wait(now).is_none());
                last = pace.quota(block, now).bytes;
                bytes += last;
            }
            let allowed = (now - begin + LATE_MAX).as_secs_f64() * limit as f64;
            prop_assert!((bytes - last) as f64 <= allowed + 1.0, "{bytes} of {allowed}");
            prop_assert!((bytes + 131_072) as f64 >= (now - begin).saturating_sub(LATE_MAX).as_secs_f64() * limit as f64);
        }
    }

    #[test]
    fn a_low_limit_has_small_parts() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        let mut part_bytes = |bytes_per_second| {
            pace.set(bytes_per_second, now);
            pace.part_bytes()
        };
        assert_eq!(part_bytes(None), usize::MAX);
        assert_eq!(part_bytes(Some(12_500_000)), 250_000);
        assert_eq!(part_bytes(Some(1_250_000)), 25_000);
        assert_eq!(part_bytes(Some(1)), 16 << 10);
    }

    #[test]
    fn a_limit_that_is_lifted_holds_nobody() {
        let now = Instant::now();
        let mut pace = Pace::new(now);
        pace.takes(usize::MAX, now);
        assert_eq!(pace.wait(now), None);
        pace.set(Some(1000), now);
        pace.takes(10_000, now);
        assert_eq!(pace.wait(now), Some(Duration::from_secs(10)));
        pace.set(None, now);
        assert_eq!(pace.wait(now), None);
    }
}
