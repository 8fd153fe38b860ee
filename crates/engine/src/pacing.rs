//! How fast each connection of a QEMU may send, so that all together keep to a limit.
//!
//! QEMU's own limit does not hold for multifd: it counts what a channel has sent once it has sent it, and by then has
//! given 512 KiB to each of 16 others, ten times a second. So the kernel paces each connection. Which of them QEMU uses
//! next nobody knows, so those in use share the limit, and what the others may begin with until somebody looks again is
//! kept for them. The kernel's timers are late on a busy host, and connections take turns: what was not sent for that
//! is made up for, as far as no second has more than the limit.

use std::time::Duration;

/// Somebody looks so often how much was sent, and by which connections.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The part of its equal share that a connection may begin with: one of so many.
const BEGINS_WITH_ONE_OF: u64 = 4;

/// What may be made up for, by the time that the limit gives it, and within which time. The headers that are reckoned with
/// are a little more than there are (`bandwidth_bytes_per_s` of the hypervisor), so it adds less than 2 % to a second.
const MADE_UP_MS: u64 = 40;
const MADE_UP_WITHIN_MS: i64 = 80;

/// Nothing more is made up for after a longer time without a look.
const LATE_MAX: Duration = Duration::from_millis(999);

/// What may wait in all connections together, by the time that the limit gives it. What QEMU has written when it pauses the
/// VM goes before the last of the memory.
const WAITING_MS: u64 = 20;

/// The least that may wait in one of them. Over a short way the kernel sends all of it at once, however slow the pace is.
const WAITING_BYTES_MIN: u64 = 4 << 10;

/// What the agents say to each other meanwhile, and the first packet of each connection, in bytes per second.
const BESIDE_MEMORY_BYTES_PER_S: u64 = 50_000;

/// One connection, as it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Whether something waits in it, or went out a moment ago.
    pub is_in_use: bool,
    /// What it has sent since it was made.
    pub sent_bytes: u64,
}

/// Paces the connections of one QEMU. Times are the caller's, from any beginning.
#[derive(Debug, Default)]
pub struct Pacing {
    last: Option<Look>,
    // Less than nothing after more was sent than the limit allows.
    owed_bytes: i64,
}

#[derive(Debug, Clone, Copy)]
struct Look {
    at: Duration,
    sent_bytes: u64,
    allowed_per_s: u64,
}

impl Pacing {
    /// Bytes per second for each of the connections from now on.
    pub fn look(&mut self, at: Duration, limit_bytes_per_s: u64, connections: &[Connection]) -> Vec<u64> {
        let sent_bytes = connections.iter().map(|connection| connection.sent_bytes).sum();
        let allowed_per_s = for_memory(limit_bytes_per_s);
        self.reckon(Look { at, sent_bytes, allowed_per_s });
        let rate = allowed_per_s.saturating_add_signed(self.owed_bytes * 1000 / MADE_UP_WITHIN_MS);
        let in_use: Vec<bool> = connections.iter().map(|connection| connection.is_in_use).collect();
        divided(rate, &in_use)
    }

    fn reckon(&mut self, now: Look) {
        let Some(last) = self.last.replace(now) else { return };
        // Fewer than before: one was closed, which happens at a migration's end.
        let Some(sent_bytes) = now.sent_bytes.checked_sub(last.sent_bytes) else { return };
        let since = now.at.saturating_sub(last.at).min(LATE_MAX);
        let allowed_bytes = last.allowed_per_s.saturating_mul(since.subsec_micros().into()) / 1_000_000;
        let made_up_max = signed(now.allowed_per_s * MADE_UP_MS / 1000);
        let owed_bytes = self.owed_bytes + signed(allowed_bytes) - signed(sent_bytes);
        self.owed_bytes = owed_bytes.clamp(-made_up_max, made_up_max);
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// What of a limit is left for memory.
fn for_memory(limit_bytes_per_s: u64) -> u64 {
    without(limit_bytes_per_s, BESIDE_MEMORY_BYTES_PER_S)
}

/// What of a limit is left for a relay, which sends up to `block_bytes` at once: a second may have one of these more.
pub fn for_relay(limit_bytes_per_s: u64, block_bytes: u64) -> u64 {
    without(limit_bytes_per_s, BESIDE_MEMORY_BYTES_PER_S + block_bytes)
}

fn without(limit_bytes_per_s: u64, others_bytes_per_s: u64) -> u64 {
    limit_bytes_per_s - others_bytes_per_s.min(limit_bytes_per_s / 4)
}

/// Divides a rate among connections, of which some are in use.
fn divided(bytes_per_s: u64, in_use: &[bool]) -> Vec<u64> {
    let (all, busy) = (in_use.len() as u64, in_use.iter().filter(|is_used| **is_used).count() as u64);
    let equal = bytes_per_s / all.max(1);
    if busy == 0 {
        return vec![equal.max(1); in_use.len()];
    }
    let idle_pace = (equal / BEGINS_WITH_ONE_OF).max(1);
    let busy_pace = (bytes_per_s.saturating_sub(idle_pace * (all - busy)) / busy).max(1);
    in_use.iter().map(|is_used| if *is_used { busy_pace } else { idle_pace }).collect()
}

/// How much may wait in each of so many connections.
pub fn waiting_bytes(limit_bytes_per_s: u64, connections: usize) -> u32 {
    let share = limit_bytes_per_s.saturating_mul(WAITING_MS) / 1000 / (connections as u64).max(1);
    u32::try_from(share.max(WAITING_BYTES_MIN)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_in_use_alone_gets_most() {
        assert_eq!(divided(1000, &[true]), [1000]);
        assert_eq!(divided(1000, &[false, true, false, false]), [62, 814, 62, 62]);
        assert_eq!(divided(1000, &[true; 4]), [250; 4]);
        assert_eq!(divided(1000, &[false; 4]), [250; 4]);
        assert_eq!(divided(1000, &[]), Vec::<u64>::new());
    }

    #[test]
    fn what_waits_is_little_but_never_so_little_that_a_connection_stands_still() {
        assert_eq!(waiting_bytes(125_000_000, 10), 250_000);
        assert_eq!(waiting_bytes(1_250_000, 17), 4 << 10);
        assert_eq!(waiting_bytes(u64::MAX, 1), u32::MAX);
    }

    #[test]
    fn a_small_limit_leaves_the_most_of_itself() {
        assert_eq!(for_memory(1_000_000), 950_000);
        assert_eq!(for_memory(1000), 750);
        assert_eq!(for_relay(10_000_000, 100_000), 9_850_000);
        assert_eq!(for_relay(100_000, 100_000), 75_000);
    }

    #[test]
    fn one_that_is_closed_is_no_reason_to_send_more() {
        let mut pacing = Pacing::default();
        let at = |sent_bytes| [Connection { is_in_use: true, sent_bytes }];
        let before = pacing.look(Duration::ZERO, 1_050_000, &at(1_000_000));
        assert_eq!(
            (before, pacing.look(Duration::from_secs(1), 1_050_000, &at(0))),
            (vec![1_000_000], vec![1_000_000])
        );
    }

    proptest! {
        #[test]
        fn never_more_than_is_to_be_divided(
            rate in 1_000_u64..10_000_000_000,
            in_use in prop::collection::vec(any::<bool>(), 1..64),
        ) {
            let paces = divided(rate, &in_use);
            prop_assert!(paces.iter().all(|pace| *pace > 0));
            prop_assert!(paces.iter().sum::<u64>() <= rate);
            if in_use.contains(&true) {
                let busy = in_use.iter().zip(&paces).filter(|(is_used, _)| **is_used);
                // What those get that are not in use is at most a quarter, and less than a byte for each is lost.
                let busy_pace: u64 = busy.map(|(_, pace)| pace).sum();
                prop_assert!((busy_pace + 64) * 4 >= rate * 3, "{busy_pace} of {rate}");
            }
        }

        /// A kernel sends a part of what it may, and another one each time; QEMU uses other connections each time.
        #[test]
        fn no_second_has_more_than_the_limit_and_what_is_lost_at_times_is_made_up_for(
            limit_mbps in 10_u64..10_000,
            looks in prop::collection::vec((70..100_u64, 20..30_u64, 1..17_usize), 100..300),
        ) {
            let limit = limit_mbps * 125_000;
            let (mut pacing, mut at_ms, mut sent) = (Pacing::default(), 0, [0_u64; 17]);
            let mut seen: Vec<(u64, u64)> = vec![];
            for (percent, lasts_ms, in_use) in looks {
                let connection = |(index, sent_bytes): (usize, &u64)| Connection {
                    is_in_use: index < in_use,
                    sent_bytes: *sent_bytes,
                };
                let connections: Vec<Connection> = sent.iter().enumerate().map(connection).collect();
                let paces = pacing.look(Duration::from_millis(at_ms), limit, &connections);
                for (index, pace) in paces.iter().enumerate().take(in_use) {
                    sent[index] += pace * percent * lasts_ms / 100_000;
                }
                at_ms += lasts_ms;
                seen.push((at_ms, sent.iter().sum()));
            }
            for (index, (from_ms, before)) in seen.iter().enumerate() {
                let second = seen[index..].iter().find(|(until_ms, _)| until_ms - from_ms >= 1000);
                if let Some((until_ms, after)) = second {
                    let rate = (after - before) * 1000 / (until_ms - from_ms);
                    prop_assert!(rate * 100 <= limit * 108, "{rate} of {limit}");
                }
            }
            let (all_ms, all) = seen[seen.len() - 1];
            prop_assert!(all * 1000 / all_ms * 10 >= for_memory(limit) * 8, "{all} of {limit}");
        }
    }
}
