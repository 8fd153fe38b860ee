//! How fast streams may send, all together: a limit that may change while they do.
//!
//! A request is sent completely before the next one, even over another stream: with a low limit, all of them at once
//! would be answered after minutes, and none before. A request whose stream is slower than the limit lets others pass.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Mutex as Line;
use tokio::sync::MutexGuard as LinePlace;
use tokio::time::{Instant, sleep};

/// What was not used may be used so much later: who waits for its turn is woken a little late.
const LATE_MAX: Duration = Duration::from_millis(20);

/// How much goes out at once, by the time that the limit gives it.
const PART_S: f64 = 0.01;

/// The same at least, and at most.
const PART_BYTES_MIN: usize = 4 << 10;
const PART_BYTES_MAX: usize = 256 << 10;

/// What some disks' streams may send, all together. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Pace {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    bucket: Mutex<Bucket>,
    line: Line<()>,
}

/// First of the line, to send one request.
pub(crate) struct Turn<'line> {
    _place: LinePlace<'line, ()>,
}

impl Pace {
    /// From now on so many bytes per second, with the splitter's own headers; `None` for no limit.
    pub fn set(&self, bytes_per_s: Option<u64>) {
        self.bucket(|bucket| bucket.bytes_per_s = bytes_per_s);
    }

    /// What was sent so far.
    pub fn sent_bytes(&self) -> u64 {
        self.bucket(|bucket| bucket.sent_bytes)
    }

    /// Whether anything is held back.
    pub(crate) fn is_limited(&self) -> bool {
        self.bucket(|bucket| bucket.bytes_per_s.is_some())
    }

    /// Waits for all requests that came before. To be polled to its end, or the place in the line is lost.
    pub(crate) async fn turn(&self) -> Turn<'_> {
        Turn { _place: self.shared.line.lock().await }
    }

    /// How much may go out at once.
    pub(crate) fn part_bytes(&self) -> usize {
        self.bucket(|bucket| bucket.part_bytes())
    }

    /// How long so much takes; nothing without a limit.
    pub(crate) fn time_of(&self, bytes: usize) -> Duration {
        let bytes_per_s = self.bucket(|bucket| bucket.bytes_per_s);
        bytes_per_s
            .map_or(Duration::ZERO, |limit| Duration::from_secs_f64(bytes as f64 / limit.max(1) as f64))
    }

    /// Waits until so much may go out.
    pub(crate) async fn take(&self, bytes: usize) {
        let wait = self.bucket(|bucket| bucket.take(bytes, Instant::now()));
        if !wait.is_zero() {
            sleep(wait).await;
        }
    }

    fn bucket<T>(&self, change: impl FnOnce(&mut Bucket) -> T) -> T {
        change(&mut self.shared.bucket.lock().expect("nothing panics with it"))
    }
}

/// When the next bytes may go out. Pure.
#[derive(Debug, Default)]
struct Bucket {
    bytes_per_s: Option<u64>,
    // When all that was taken has gone.
    free_at: Option<Instant>,
    sent_bytes: u64,
}

impl Bucket {
    fn part_bytes(&self) -> usize {
        let Some(bytes_per_s) = self.bytes_per_s else { return usize::MAX };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
        let part_bytes = (bytes_per_s as f64 * PART_S) as usize;
        part_bytes.clamp(PART_BYTES_MIN, PART_BYTES_MAX)
    }

    /// How long these bytes have to wait, which are taken by that.
    fn take(&mut self, bytes: usize, now: Instant) -> Duration {
        self.sent_bytes += bytes as u64;
        let Some(bytes_per_s) = self.bytes_per_s else {
            self.free_at = None;
            return Duration::ZERO;
        };
        let time = Duration::from_secs_f64(bytes as f64 / bytes_per_s.max(1) as f64);
        let free_at = self.free_at.unwrap_or(now);
        let earliest = now.checked_sub(LATE_MAX).map_or(free_at, |earliest| free_at.max(earliest));
        self.free_at = Some(earliest + time);
        free_at.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MEGA: u64 = 1_000_000;

    fn limited(bytes_per_s: u64) -> Bucket {
        Bucket { bytes_per_s: Some(bytes_per_s), ..Bucket::default() }
    }

    #[test]
    fn a_limit_that_is_lifted_or_raised_holds_nobody() {
        let now = Instant::now();
        let mut bucket = limited(1000);
        assert_eq!(bucket.take(10_000, now), Duration::ZERO);
        assert_eq!(bucket.take(1, now), Duration::from_secs(10));
        bucket.bytes_per_s = None;
        assert_eq!(bucket.take(usize::MAX / 2, now), Duration::ZERO);
        bucket.bytes_per_s = Some(1000);
        assert_eq!(bucket.take(1, now), Duration::ZERO);
    }

    #[test]
    fn parts_are_small_where_the_limit_is() {
        assert_eq!(Bucket::default().part_bytes(), usize::MAX);
        assert_eq!(limited(1).part_bytes(), PART_BYTES_MIN);
        assert_eq!(limited(10 * MEGA).part_bytes(), 100_000);
        assert_eq!(limited(u64::MAX).part_bytes(), PART_BYTES_MAX);
    }

    proptest! {
        /// Streams come as they like, and are woken late.
        #[test]
        fn never_more_than_the_limit_and_nearly_all_of_it(
            limit in 125_000..1_250 * MEGA,
            streams in prop::collection::vec((1_000..262_144_usize, 0..10_u64), 50..200),
        ) {
            let begin = Instant::now();
            let (mut now, mut bucket, mut bytes) = (begin, limited(limit), 0);
            for (part, late_ms) in streams {
                let wait = bucket.take(part, now);
                // What was sent before this part.
                let allowed = (now + wait - begin + LATE_MAX).as_secs_f64() * limit as f64;
                prop_assert!(bytes as f64 <= allowed + 1000.0, "{bytes} of {allowed}");
                prop_assert!(bytes as f64 + 1000.0 >= (now + wait - begin).saturating_sub(LATE_MAX).as_secs_f64() * limit as f64);
                bytes += part;
                now += wait + Duration::from_millis(if wait.is_zero() { 0 } else { late_ms });
            }
            prop_assert_eq!(bucket.sent_bytes, bytes as u64);
        }
    }

    #[tokio::test]
    async fn turns_come_in_the_order_in_which_they_were_asked_for() {
        let pace = Pace::default();
        let first = pace.turn().await;
        let (mut second, mut third) = (Box::pin(pace.turn()), Box::pin(pace.turn()));
        let soon = Duration::from_millis(1);
        assert!(tokio::time::timeout(soon, &mut second).await.is_err());
        assert!(tokio::time::timeout(soon, &mut third).await.is_err());
        drop(first);
        let second = second.await;
        assert!(tokio::time::timeout(soon, &mut third).await.is_err());
        drop(second);
        drop(third.await);
    }
}
