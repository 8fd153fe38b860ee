//! Which paths would cost more than they bring, and so are kept for when the others fail.

use super::Reason;
use crate::paths::path::Path;

/// What QEMU may have given to a path's connections and the path not carried yet, in bytes: 4 MiB
/// (`net.ipv4.tcp_wmem`) in each of two, of the three that a path has at least. At the end of a round all
/// others wait for it.
const HELD_BYTES: u64 = 2 * (4 << 20);

/// Marks those that are on standby, and says why, for a VM with so much memory.
///
/// The slowest path first: it brings the time by which memory goes over all of them faster than over the
/// others, and may cost the time that it needs for what it holds when the others are done. A path of
/// unknown speed is never on standby, and beside one none is.
pub(crate) fn mark_standby(paths: &mut [Path], memory_bytes: u64) -> Vec<Reason> {
    let mut order: Vec<usize> = (0..paths.len()).filter(|&index| paths[index].speed_mbps.is_some()).collect();
    order.sort_by_key(|&index| paths[index].speed_mbps);
    let mut reasons = vec![];
    for index in order {
        let Some(speed_mbps) = known_mbps(&paths[index]) else { break };
        let others = paths.iter().enumerate().filter(|(other, path)| *other != index && !path.is_standby);
        let Some(others_mbps) = others.map(|(_, path)| known_mbps(path)).sum::<Option<f64>>() else { break };
        if others_mbps <= 0.0 {
            break;
        }
        let brings_ms = ms(memory_bytes, others_mbps) - ms(memory_bytes, others_mbps + speed_mbps);
        let costs_ms = ms(HELD_BYTES, speed_mbps);
        // A faster one brings more and costs less.
        if brings_ms >= costs_ms {
            break;
        }
        paths[index].is_standby = true;
        let path = paths[index].to_string();
        reasons.push(Reason::Standby { path, speed_mbps, brings_ms, costs_ms });
    }
    reasons
}

fn known_mbps(path: &Path) -> Option<f64> {
    path.speed_mbps.map(|speed_mbps| speed_mbps as f64)
}

fn ms(bytes: u64, speed_mbps: f64) -> f64 {
    bytes as f64 * 8.0 / 1_000.0 / speed_mbps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;

    const GIB: u64 = 1 << 30;

    fn paths(speeds_mbps: &[Option<u64>]) -> Vec<Path> {
        let path = |(index, speed_mbps): (usize, &Option<u64>)| Path {
            speed_mbps: *speed_mbps,
            ..fixtures::path(&format!("e{index}"))
        };
        speeds_mbps.iter().enumerate().map(path).collect()
    }

    fn standby(speeds_mbps: &[u64], memory_bytes: u64) -> Vec<bool> {
        let mut paths = paths(&speeds_mbps.iter().copied().map(Some).collect::<Vec<_>>());
        mark_standby(&mut paths, memory_bytes);
        paths.iter().map(|path| path.is_standby).collect()
    }

    #[test]
    fn a_path_carries_if_it_brings_more_than_it_costs() {
        assert_eq!(standby(&[1_000, 1_000], GIB), [false, false]);
        assert_eq!(standby(&[1_000, 5_000], 2 * GIB), [false, false]);
        assert_eq!(standby(&[5_000, 2_500, 1_000], 2 * GIB), [false; 3]);
        assert_eq!(standby(&[5_000, 100], 2 * GIB), [false, true]);
        assert_eq!(standby(&[5_000, 100], 64 * GIB), [false, false]);
        assert_eq!(standby(&[100, 25_000, 1_000], GIB), [true, false, true]);
        assert_eq!(standby(&[100], GIB), [false]);
        assert_eq!(standby(&[0, 0], GIB), [false, false]);
    }

    #[test]
    fn the_reason_says_what_it_brings_and_costs() {
        let reasons = mark_standby(&mut paths(&[Some(5_000), Some(100)]), GIB);
        assert_eq!(
            reasons[0].to_string(),
            "e1–e1 is on standby: with 0.10 Gb/s it brings 34 ms and may cost 671 ms"
        );
    }

    #[test]
    fn nothing_is_on_standby_while_a_speed_is_unknown() {
        assert_eq!(mark_standby(&mut paths(&[None, Some(10)]), GIB), []);
    }

    proptest! {
        #[test]
        fn the_fastest_path_always_carries(
            speeds in prop::collection::vec(any::<u64>(), 1..6),
            memory_bytes: u64,
        ) {
            let standby = standby(&speeds, memory_bytes);
            let fastest = speeds.iter().max().unwrap();
            prop_assert!(speeds.iter().zip(standby).any(|(speed, stands_by)| speed == fastest && !stands_by));
        }
    }
}
