//! How much may wait in the source's sockets.
//!
//! What QEMU has written and the kernel has not sent when the VM is paused is sent while it stands still. The kernel
//! lets each socket grow to 4 MiB: 64 MiB of 16 channels are 0.27 s of two links of 1 Gb/s. But while memory is
//! copied, these queues keep the links busy in moments in which a busy host does not wake the threads that fill them,
//! above all the links of a path with few channels. So they are kept short only towards the end (docs/decisions/0015).

use std::time::Duration;

use crate::paths::path::Path;

/// What the sockets may hold.
struct Limit {
    /// All together, by the time that all paths need for it.
    waiting_ms: u64,
    /// One of them at the least.
    least_bytes: u64,
}

/// At the end: below the shortest downtime limit. QEMU writes 512 KiB (128 pages) at a time to a multifd channel.
const AT_THE_END: Limit = Limit { waiting_ms: 20, least_bytes: 512 << 10 };

/// In its last moments. 512 KiB in each of 16 sockets would be 34 ms of two links of 1 Gb/s; with less, QEMU's threads wait
/// for the wire a few times in each write.
const AT_LAST: Limit = Limit { waiting_ms: 5, least_bytes: 64 << 10 };

/// What may be on its way to the target or unread there, from the beginning, in round trips: one fills the paths, a second is
/// for connections that do not share them evenly.
const UNREAD_ROUND_TRIPS: u64 = 2;

/// The least, by the time that all paths need for it: QEMU's threads wait for a core at times.
const UNREAD_US_MIN: u64 = 1_000;

/// By that time where the round trip is not known.
const UNREAD_US_UNKNOWN: u64 = 4_000;

/// One of them at the least. The kernel takes up to one and a half times as much.
const UNREAD_BYTES_MIN: u64 = 192 << 10;

/// From here on the kernel's own bound is as good, `net.ipv4.tcp_rmem`.
const UNREAD_BYTES_MAX: u64 = 6 << 20;

/// The most that the kernel lets one socket hold, `net.ipv4.tcp_wmem`.
const SOCKET_BYTES_MAX: u64 = 4 << 20;

/// The end begins when QEMU has that much left to write, besides what waits in the sockets. Twice as long
/// as the agent takes from one look at the transfer to the next. The last moments begin when QEMU has no more than that.
const END_MS: u64 = 200;

/// Limit for `TCP_NOTSENT_LOWAT` of each of `connections` that share `paths`, in bytes, when QEMU has
/// `remaining_bytes` to write and has sent `sent_mbps` recently, 0 where that is not known: where the hosts' cores are slower
/// than the links, what waits goes as slowly. None while much remains, and where the speed of a path is not known.
pub fn unsent_limit_bytes(
    paths: &[Path],
    connections: u8,
    remaining_bytes: u64,
    sent_mbps: u64,
) -> Option<u32> {
    let bytes_per_ms = bytes_per_ms(paths)?;
    let connections = u64::from(connections.max(1));
    let last_bytes = bytes_per_ms.saturating_mul(END_MS);
    let end_bytes = last_bytes.saturating_add(connections * SOCKET_BYTES_MAX);
    if remaining_bytes > end_bytes {
        return None;
    }
    let limit = if remaining_bytes > last_bytes { AT_THE_END } else { AT_LAST };
    // Only how much may wait: what was sent recently may be little, as while zero pages go, and the end must not begin too late.
    let sent = if sent_mbps > 0 { bytes_per_ms.min(sent_mbps.saturating_mul(125)) } else { bytes_per_ms };
    let share = sent.saturating_mul(limit.waiting_ms) / connections;
    Some(u32::try_from(share.max(limit.least_bytes)).unwrap_or(u32::MAX))
}

/// Limit for what each of `connections` that share `paths` may hold at the target, in bytes, where nobody has read it;
/// `round_trip` is the longest of these paths, while they are idle. None where the speed of a path is not known, or the way
/// is so long that the kernel's own bound is as good.
///
/// By default the kernel lets it grow to 6 MiB. Where the target's cores are slower than the links, all of that is read
/// while the VM stands still: 100 MiB of 16 channels.
pub fn unread_limit_bytes(paths: &[Path], connections: u8, round_trip: Option<Duration>) -> Option<u32> {
    let waiting_us = round_trip.map_or(UNREAD_US_UNKNOWN, unread_us);
    let share = bytes_per_ms(paths)?.saturating_mul(waiting_us) / 1_000 / u64::from(connections.max(1));
    let bytes = Some(share.max(UNREAD_BYTES_MIN)).filter(|bytes| *bytes <= UNREAD_BYTES_MAX);
    bytes.and_then(|bytes| u32::try_from(bytes).ok())
}

/// By the time that all paths need for it.
fn unread_us(round_trip: Duration) -> u64 {
    let round_trip_us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    round_trip_us.saturating_mul(UNREAD_ROUND_TRIPS).max(UNREAD_US_MIN)
}

/// The rate of all paths together; none if the speed of one is not known.
fn bytes_per_ms(paths: &[Path]) -> Option<u64> {
    let carrying = paths.iter().filter(|path| !path.is_standby);
    let speeds: Option<Vec<u64>> = carrying.map(|path| path.speed_mbps).collect();
    let bytes_per_ms = speeds?.into_iter().fold(0, u64::saturating_add).saturating_mul(125);
    (bytes_per_ms > 0).then_some(bytes_per_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn paths(speeds_mbps: &[Option<u64>]) -> Vec<Path> {
        let path = |speed_mbps: &Option<u64>| Path { speed_mbps: *speed_mbps, ..fixtures::path("e0") };
        speeds_mbps.iter().map(path).collect()
    }

    #[test]
    fn the_sockets_hold_twenty_milliseconds_of_all_paths_and_five_at_last() {
        let bits = |remaining_bytes| {
            let limit = unsent_limit_bytes(&paths(&[Some(10_000), Some(10_000)]), 16, remaining_bytes, 0);
            limit.map(|bytes| u64::from(bytes) * 16 * 8)
        };
        assert_eq!(bits(510_000_000), Some(20_000 * 1000 * 20));
        assert_eq!(bits(500_000_000), Some(20_000 * 1000 * 5));
    }

    #[test]
    fn a_socket_holds_a_little_at_least_and_a_u32_at_most() {
        assert_eq!(unsent_limit_bytes(&paths(&[Some(1000)]), 16, 0, 0), Some(64 << 10));
        assert_eq!(unsent_limit_bytes(&paths(&[Some(1000)]), 16, 26 << 20, 0), Some(512 << 10));
        assert_eq!(unsent_limit_bytes(&paths(&[Some(u64::MAX)]), 1, u64::MAX, 0), Some(u32::MAX));
        assert_eq!(unsent_limit_bytes(&paths(&[Some(100_000)]), 0, 0, 0), Some(62_500_000));
    }

    #[test]
    fn where_less_is_sent_than_the_paths_carry_less_waits() {
        let fast = paths(&[Some(10_000), Some(10_000)]);
        assert_eq!(unsent_limit_bytes(&fast, 16, 0, 0), unsent_limit_bytes(&fast, 16, 0, 30_000));
        assert_eq!(unsent_limit_bytes(&fast, 16, 0, 5_000), Some(5_000 * 125 * 5 / 16));
        assert_eq!(
            unsent_limit_bytes(&fast, 16, 400_000_000, 500),
            Some(64 << 10),
            "the end has begun all the same"
        );
    }

    #[test]
    fn a_path_of_unknown_speed_sets_no_limit() {
        assert_eq!(unsent_limit_bytes(&paths(&[Some(1000), None]), 16, 0, 0), None);
        assert_eq!(unsent_limit_bytes(&[], 16, 0, 0), None);
    }

    #[test]
    fn the_target_holds_two_round_trips_of_all_paths_and_a_little_each_at_least() {
        let fast = paths(&[Some(10_000), Some(10_000)]);
        let held_us = |round_trip_us: Option<u64>| {
            let bytes = unread_limit_bytes(&fast, 8, round_trip_us.map(Duration::from_micros))?;
            Some(u64::from(bytes) * 8 * 8 / 20_000)
        };
        assert_eq!(held_us(Some(1_000)), Some(2_000));
        assert_eq!(held_us(Some(3)), Some(1_000));
        assert_eq!(held_us(None), Some(4_000));
        let slow = paths(&[Some(1_000), Some(1_000)]);
        assert_eq!(unread_limit_bytes(&slow, 16, Some(Duration::from_millis(1))), Some(192 << 10));
    }

    #[test]
    fn a_far_target_and_a_path_of_unknown_speed_are_left_to_the_kernel() {
        let two = paths(&[Some(1_000), Some(1_000)]);
        assert_eq!(unread_limit_bytes(&two, 16, Some(Duration::from_millis(150))), Some(4_687_500));
        assert_eq!(unread_limit_bytes(&two, 16, Some(Duration::from_millis(300))), None);
        assert_eq!(unread_limit_bytes(&two, 16, Some(Duration::MAX)), None);
        assert_eq!(unread_limit_bytes(&paths(&[Some(1_000), None]), 16, None), None);
    }

    #[test]
    fn the_sockets_are_left_alone_until_the_end() {
        let two_links = paths(&[Some(1000), Some(1000)]);
        assert_eq!(unsent_limit_bytes(&two_links, 16, 1 << 30, 0), None);
        assert!(unsent_limit_bytes(&two_links, 16, 100_000_000, 0).is_some());
        let slow = paths(&[Some(10)]);
        assert!(unsent_limit_bytes(&slow, 16, 64 << 20, 0).is_some(), "the sockets hold 54 s of this path");
    }
}
