//! The table of the tested paths.

use drainpipe_engine::check::facts::BondFacts;
use drainpipe_engine::check::path_report::{PathEndFacts, PathReport};
use drainpipe_engine::check::trial::PacketTrial;
use drainpipe_engine::format::{mbps, round_trip};

/// Head and rows. What no link has has no column.
pub(super) fn table(
    source: &str,
    target: &str,
    paths: &[PathReport],
) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let each = |cell: fn(&PathReport) -> String| paths.iter().map(cell).collect::<Vec<_>>();
    let ends = |word: fn(&PathEndFacts) -> Option<String>| -> Option<Vec<String>> {
        let words: Vec<[Option<String>; 2]> =
            paths.iter().map(|path| [word(&path.source), word(&path.target)]).collect();
        let says_something = words.iter().flatten().any(Option::is_some);
        says_something.then(|| words.into_iter().map(|words| at_both(source, target, words)).collect())
    };
    let unknown = || vec!["unknown".to_owned(); paths.len()];
    let columns = [
        ("path", Some(each(|path| path.trial.path.to_string()))),
        ("speed", Some(ends(speed).unwrap_or_else(unknown))),
        ("largest packet", Some(each(largest_packet))),
        ("there and back", Some(each(there_and_back))),
        ("lost", Some(each(lost))),
        ("receive queues", ends(queues)),
        ("bond", ends(|end| end.bond.as_ref().map(bond))),
        ("RDMA", ends(|end| end.rdma_device.clone())),
    ];
    let shown = columns.into_iter().filter_map(|(name, cells)| Some((name, cells?)));
    let (head, cells): (Vec<_>, Vec<_>) = shown.unzip();
    let row = |index: usize| cells.iter().map(|column| column[index].clone()).collect();
    (head, (0..paths.len()).map(row).collect())
}

/// One word where it is the same at both ends.
fn at_both(source: &str, target: &str, words: [Option<String>; 2]) -> String {
    let [own, other] = words.map(|word| word.unwrap_or_else(|| "–".into()));
    if own == other { own } else { format!("{own} at {source}, {other} at {target}") }
}

fn speed(end: &PathEndFacts) -> Option<String> {
    end.speed_mbps.map(mbps)
}

fn largest_packet(path: &PathReport) -> String {
    let size =
        |packets: &PacketTrial| packets.arrived_bytes_max.map_or("none".into(), |bytes| bytes.to_string());
    let [there, back] = [size(&path.trial.forward), size(&path.trial.backward)];
    if there == back { there } else { format!("{there} there, {back} back") }
}

fn there_and_back(path: &PathReport) -> String {
    path.trial.least_round_trip_ms().map_or("unknown".into(), round_trip)
}

fn lost(path: &PathReport) -> String {
    let [forward, backward] = [&path.trial.forward, &path.trial.backward];
    let sent = forward.sent.saturating_add(backward.sent);
    let arrived = forward.arrived.saturating_add(backward.arrived);
    format!("{} of {sent}", sent.saturating_sub(arrived))
}

/// Such as `8`, `1 of 8 used`, `1, RPS`.
fn queues(end: &PathEndFacts) -> Option<String> {
    let queues = end.receive_queues?;
    let used = end.receive_queues_in_use.filter(|used| *used != queues);
    let count = used.map_or_else(|| queues.to_string(), |used| format!("{used} of {queues} used"));
    Some(if end.receive_steering == Some(true) { format!("{count}, RPS") } else { count })
}

/// Such as `802.3ad layer3+4 of 2`.
fn bond(bond: &BondFacts) -> String {
    let BondFacts { mode, transmit_hash, members } = bond;
    transmit_hash
        .as_ref()
        .map_or_else(|| format!("{mode} of {members}"), |hash| format!("{mode} {hash} of {members}"))
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::check::trial::PathTrial;
    use drainpipe_engine::paths::path::Path;

    use super::*;

    fn path(source: PathEndFacts, target: PathEndFacts) -> PathReport {
        let passing =
            PacketTrial { sent_bytes_max: Some(1500), arrived_bytes_max: Some(1500), sent: 9, arrived: 9 };
        let path = Path {
            link: "e0".into(),
            address: [10, 0, 0, 1].into(),
            peer_link: "e0".into(),
            peer_address: [10, 0, 0, 2].into(),
            speed_mbps: Some(1000),
            is_standby: false,
            mtu_bytes: None,
        };
        let trial = PathTrial {
            path,
            connection_error: None,
            forward: PacketTrial { arrived: 8, ..passing.clone() },
            backward: passing,
            round_trip_ms: Some(0.25),
            tcp_round_trip: None,
        };
        PathReport { trial, source, target }
    }

    fn card() -> PathEndFacts {
        PathEndFacts { speed_mbps: Some(10_000), receive_queues: Some(8), ..PathEndFacts::default() }
    }

    #[test]
    fn what_no_link_has_has_no_column() {
        let (head, rows) = table("a", "b", &[path(PathEndFacts::default(), PathEndFacts::default())]);
        assert_eq!(head, ["path", "speed", "largest packet", "there and back", "lost"]);
        assert_eq!(rows, [["e0–e0", "unknown", "1500", "0.250 ms", "1 of 18"]]);
    }

    #[test]
    fn ends_that_differ_are_told_apart() {
        let team = BondFacts { mode: "802.3ad".into(), transmit_hash: Some("layer3+4".into()), members: 2 };
        let source = PathEndFacts { bond: Some(team), rdma_device: Some("mlx5_0".into()), ..card() };
        let target = PathEndFacts {
            speed_mbps: Some(1000),
            receive_queues_in_use: Some(1),
            receive_steering: Some(true),
            ..card()
        };
        let (head, rows) = table("a", "b", &[path(source, target), path(card(), card())]);
        assert_eq!(head[5..], ["receive queues", "bond", "RDMA"]);
        assert_eq!(rows[0][1], "10000 Mb/s at a, 1000 Mb/s at b");
        let differing =
            ["8 at a, 1 of 8 used, RPS at b", "802.3ad layer3+4 of 2 at a, – at b", "mlx5_0 at a, – at b"];
        assert_eq!(rows[0][5..], differing);
        assert_eq!(rows[1][1], "10000 Mb/s");
        assert_eq!(rows[1][5..], ["8", "–", "–"]);
    }
}
