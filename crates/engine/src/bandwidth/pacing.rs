//! How fast each connection of a QEMU may send, so that all together keep to a limit.
//!
//! QEMU's own limit does not hold for multifd: QEMU counts what a channel has sent only afterwards, and has by then
//! given 512 KiB to each of 16 others, ten times a second. So the kernel paces each connection. Nobody knows which
//! connection QEMU will use next. So those in use share the limit, and what the others may begin with until somebody
//! looks again is reserved for them.
//!
//! The kernel sends less than it may: its timers are late, a higher pace counts only from the next acknowledgement on
//! while a lower one counts at once (`tcp_update_pacing_rate`, Linux 6.1), and what is reserved for idle connections
//! is not used. With 17 connections and 10 Mb/s, up to half was lost. So the agent measures what comes of a pace, and
//! sets the pace accordingly.

use std::time::Duration;

/// Somebody looks so often how much was sent, and by which connections.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The part of its equal share that a connection may begin with: one of so many.
const BEGINS_WITH_ONE_OF: u64 = 4;

/// The least that one at rest may begin with, and that one in use may send, in bytes per second. The kernel waits after each
/// packet by the pace at which that went, and takes a higher pace only with the next one's acknowledgement: after two
/// segments at 255 bytes per second, a connection was mute for 18 s, and for as long its QEMU waited. At rest it costs next to
/// nothing, since a first packet goes at once in any case.
const AT_REST_LEAST_BYTES_PER_S: u64 = 64 << 10;
const IN_USE_LEAST_BYTES_PER_S: u64 = 8 << 10;

/// What is aimed at, as a part of the limit: what a second has more or less than that is to be within the limit, too.
const AIM_PERCENT: u64 = 98;

/// Time constant in which it is learnt what comes of a pace. The same for more and for less: what is learnt of noise would
/// lean to one side.
const LEARNT_WITHIN_S: f64 = 0.25;

/// Bytes on the links for each byte of the pace: before anything is known, headers alone (1514 of 1428 bytes, with IPv6 and
/// an MTU of 1500). The least bounds how far a pace rises where the links or QEMU are slower than the limit.
const YIELD_AT_FIRST: f64 = 1.06;
const YIELD_LEAST: f64 = 0.4;
const YIELD_MOST: f64 = 1.2;

/// Less than was allowed is made up for, more is saved, within such a time.
const MADE_UP_WITHIN_S: f64 = 0.25;

/// So much at most, by the time that the limit gives it: less than a second may have too much.
const MADE_UP_S: f64 = 0.025;
const SAVED_S: f64 = 0.2;

/// Nothing is learnt from a longer time without a look, or made up for.
const LATE_MAX: Duration = Duration::from_millis(999);

/// What may wait in all connections together, by the time that the limit gives it. What QEMU has written when it pauses the
/// VM goes before the last of the memory.
const WAITING_MS: u64 = 20;

/// The least that may wait in one of them. Over a short way the kernel sends all of it at once, however slow the pace is.
const WAITING_BYTES_MIN: u64 = 4 << 10;

/// One connection's equal share below which its packets are to be small: it would wait for over 50 ms after one of 64 KiB,
/// and for four times as long if it was not in use.
const SMALL_PACKETS_BELOW_BYTES_PER_S: u64 = 20 * (64 << 10);

/// What the agents say to each other meanwhile, in bytes per second: some 25,000 with two paths that are watched, nearly
/// nothing with one.
const BESIDE_MEMORY_BYTES_PER_S: u64 = 30_000;

/// The same, and the first packet of each of a relay's connections: nobody learns what comes of its pace.
const BESIDE_RELAY_BYTES_PER_S: u64 = 50_000;

/// How much of a link's bytes, as its kernel counts them, are a relay's own: Ethernet, IPv6 and TCP leave so much of them
/// with an MTU of 1500.
const PAYLOAD_SHARE: (u64, u64) = (1428, 1514);

/// Bytes per second in a Mb/s.
pub const BYTES_PER_S_OF_MBPS: u64 = 125_000;

/// One connection, as it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connection {
    /// Whether something waits in it, or went out a moment ago.
    pub is_in_use: bool,
    /// Whether something waits in it.
    pub has_unsent: bool,
    /// What the link has carried of it since it was made, with headers.
    pub link_bytes: u64,
}

/// Paces the connections of one QEMU. Times are the caller's, from any beginning.
#[derive(Debug)]
pub struct Pacing {
    last: Option<PacingSample>,
    // Bytes on the links for each byte of the pace.
    yields: f64,
    // Less than nothing after more was sent than the limit allows.
    owed_bytes: f64,
}

#[derive(Debug, Clone, Copy)]
struct PacingSample {
    at: Duration,
    link_bytes: u64,
    allowed_per_s: f64,
    pace_per_s: f64,
    has_unsent: bool,
}

impl Default for Pacing {
    fn default() -> Self {
        Self { last: None, yields: YIELD_AT_FIRST, owed_bytes: 0.0 }
    }
}

impl Pacing {
    /// Bytes per second for each of the connections from now on, of a limit in bytes per second of the links.
    pub fn look(&mut self, at: Duration, limit_bytes_per_s: u64, connections: &[Connection]) -> Vec<u64> {
        let link_bytes = connections.iter().map(|connection| connection.link_bytes).sum();
        let in_use: Vec<bool> = connections.iter().map(|connection| connection.is_in_use).collect();
        let allowed_per_s = for_memory(limit_bytes_per_s) as f64;
        if let Some(last) = self.last {
            self.learn(last, at, link_bytes);
        }
        self.owed_bytes = self.owed_bytes.clamp(-allowed_per_s * SAVED_S, allowed_per_s * MADE_UP_S);
        let pace_per_s = ((allowed_per_s + self.owed_bytes / MADE_UP_WITHIN_S) / self.yields).max(1.0);
        let has_unsent = connections.iter().any(|connection| connection.has_unsent);
        self.last = Some(PacingSample { at, link_bytes, allowed_per_s, pace_per_s, has_unsent });
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 or more")]
        let pace_per_s = pace_per_s as u64;
        divided(pace_per_s, &in_use)
    }

    fn learn(&mut self, last: PacingSample, at: Duration, link_bytes: u64) {
        // Fewer than before: one was closed, which happens at a migration's end.
        let Some(sent_bytes) = link_bytes.checked_sub(last.link_bytes) else { return };
        let since_s = at.saturating_sub(last.at).min(LATE_MAX).as_secs_f64();
        let sent_bytes = sent_bytes as f64;
        self.owed_bytes += last.allowed_per_s * since_s - sent_bytes;
        let asked_bytes = last.pace_per_s * since_s;
        // Where QEMU had nothing to send, that is no fault of the pace.
        if last.has_unsent && asked_bytes > 0.0 {
            let learnt = (since_s / LEARNT_WITHIN_S).min(1.0);
            self.yields += (sent_bytes / asked_bytes - self.yields) * learnt;
            self.yields = self.yields.clamp(YIELD_LEAST, YIELD_MOST);
        }
    }
}

/// What memory is to take of a limit.
fn for_memory(limit_bytes_per_s: u64) -> u64 {
    aimed_at(limit_bytes_per_s, BESIDE_MEMORY_BYTES_PER_S)
}

fn aimed_at(limit_bytes_per_s: u64, beside_bytes_per_s: u64) -> u64 {
    let left = limit_bytes_per_s - beside_bytes_per_s.min(limit_bytes_per_s / 4);
    left.saturating_mul(AIM_PERCENT) / 100
}

/// The part of a limit, in bytes per second of the links, that is left for what a relay sends.
pub fn for_relay(limit_bytes_per_s: u64) -> u64 {
    let (payload, frame) = PAYLOAD_SHARE;
    aimed_at(limit_bytes_per_s, BESIDE_RELAY_BYTES_PER_S).saturating_mul(payload) / frame
}

/// Whether a packet of 64 KiB is too much for one of so many connections: its pace would hold for too long after it.
pub fn needs_small_packets(limit_bytes_per_s: u64, connections: usize) -> bool {
    limit_bytes_per_s / (connections as u64).max(1) < SMALL_PACKETS_BELOW_BYTES_PER_S
}

/// Divides a rate among connections, some of which are in use.
fn divided(bytes_per_s: u64, in_use: &[bool]) -> Vec<u64> {
    let (all, busy) = (in_use.len() as u64, in_use.iter().filter(|is_used| **is_used).count() as u64);
    let equal = bytes_per_s / all.max(1);
    if busy == 0 {
        return vec![equal.max(AT_REST_LEAST_BYTES_PER_S); in_use.len()];
    }
    let kept = equal / BEGINS_WITH_ONE_OF;
    let idle_pace = kept.max(AT_REST_LEAST_BYTES_PER_S);
    let busy_pace = (bytes_per_s.saturating_sub(kept * (all - busy)) / busy).max(IN_USE_LEAST_BYTES_PER_S);
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
        let mega = 1_000_000;
        assert_eq!(divided(mega, &[true]), [mega]);
        assert_eq!(
            divided(4 * mega, &[false, true, false, false]),
            [mega / 4, 3_250_000, mega / 4, mega / 4]
        );
        assert_eq!(divided(mega, &[true; 4]), [mega / 4; 4]);
        assert_eq!(divided(mega, &[false; 4]), [mega / 4; 4]);
        assert_eq!(divided(mega, &[]), Vec::<u64>::new());
    }

    #[test]
    fn none_is_so_slow_that_it_is_mute_for_long_after_a_packet() {
        let mut in_use = [false; 17];
        assert_eq!(divided(17_000, &in_use), [64 << 10; 17]);
        in_use[0] = true;
        assert_eq!(divided(17_000, &in_use)[..2], [13_000, 64 << 10]);
        assert_eq!(divided(17_000, &[true; 17]), [8 << 10; 17]);
    }

    #[test]
    fn what_waits_is_little_but_never_so_little_that_a_connection_stands_still() {
        assert_eq!(waiting_bytes(125_000_000, 10), 250_000);
        assert_eq!(waiting_bytes(1_250_000, 17), 4 << 10);
        assert_eq!(waiting_bytes(u64::MAX, 1), u32::MAX);
    }

    #[test]
    fn a_small_limit_leaves_the_most_of_itself() {
        assert_eq!(for_memory(1_000_000), 950_600);
        assert_eq!(for_relay(1_000_000), 878_116);
        assert_eq!(for_memory(1000), 735);
        assert_eq!(for_relay(15_190_000), 13_994_400);
    }

    #[test]
    fn many_connections_need_small_packets_at_a_low_limit_and_one_does_not() {
        let needs = |mbps, connections| needs_small_packets(mbps * BYTES_PER_S_OF_MBPS, connections);
        assert!(needs(10, 17) && needs(100, 17) && needs(1, 1));
        assert!(!needs(11, 1) && !needs(300, 17) && !needs(1000, 51) && !needs(11, 0));
    }

    #[test]
    fn one_that_is_closed_is_no_reason_to_send_more() {
        let mut pacing = Pacing::default();
        let at = |link_bytes| [Connection { is_in_use: true, has_unsent: true, link_bytes }];
        let before = pacing.look(Duration::ZERO, 1_050_000, &at(1_000_000));
        assert_eq!(before, pacing.look(Duration::from_secs(1), 1_050_000, &at(0)));
    }

    proptest! {
        #[test]
        fn never_more_than_is_to_be_divided(
            rate in 17_000_000_u64..10_000_000_000,
            in_use in prop::collection::vec(any::<bool>(), 1..64),
        ) {
            let paces = divided(rate, &in_use);
            prop_assert!(paces.iter().all(|pace| *pace > 0));
            prop_assert!(paces.iter().sum::<u64>() <= rate);
            if in_use.contains(&true) {
                let busy = in_use.iter().zip(&paces).filter(|(is_used, _)| **is_used);
                // Connections that are not in use get at most a quarter, and less than a byte is lost for each.
                let busy_pace: u64 = busy.map(|(_, pace)| pace).sum();
                prop_assert!((busy_pace + 64) * 4 >= rate * 3, "{busy_pace} of {rate}");
            }
        }

        /// A kernel sends a part of what it may, somewhat another one each time; QEMU uses other connections each time.
        #[test]
        fn each_second_has_nearly_the_limit_and_none_has_more(
            limit_mbps in 10_u64..10_000,
            sent_percent in 60..106_u64,
            looks in prop::collection::vec((0..15_u64, 20..30_u64, 9..17_usize), 200..300),
        ) {
            let limit = limit_mbps * 125_000;
            let (mut pacing, mut at_ms, mut sent) = (Pacing::default(), 0, [0_u64; 17]);
            let mut seen: Vec<(u64, u64)> = vec![];
            for (late_percent, lasts_ms, in_use) in looks {
                let connection = |(index, link_bytes): (usize, &u64)| Connection {
                    is_in_use: index < in_use,
                    has_unsent: index < in_use,
                    link_bytes: *link_bytes,
                };
                let connections: Vec<Connection> = sent.iter().enumerate().map(connection).collect();
                let paces = pacing.look(Duration::from_millis(at_ms), limit, &connections);
                for (index, pace) in paces.iter().enumerate().take(in_use) {
                    sent[index] += pace * (sent_percent - late_percent) * lasts_ms / 100_000;
                }
                at_ms += lasts_ms;
                seen.push((at_ms, sent.iter().sum()));
            }
            for (index, (from_ms, before)) in seen.iter().enumerate() {
                let second = seen[index..].iter().find(|(until_ms, _)| until_ms - from_ms >= 1000);
                if let Some((until_ms, after)) = second {
                    let rate = (after - before) * 1000 / (until_ms - from_ms);
                    prop_assert!(rate * 100 <= for_memory(limit) * 106, "{rate} of {limit} from {from_ms} ms on");
                    let is_learnt = *from_ms >= 1000;
                    prop_assert!(!is_learnt || rate * 100 >= for_memory(limit) * 97, "{rate} of {limit} from {from_ms} ms on");
                }
            }
        }
    }
}
