//! Planted bugs of the watch. Somebody could write each of them, and each must break a rule of the watch.

use super::*;

/// A watch that judges a path by small hellos only.
const SMALL_HELLOS_ONLY: JudgedBy = JudgedBy { full_packets: false, ..JudgedBy::ALL };

/// A watch that does not notice when it was late itself: to it, time alone makes a silence.
const NEVER_LATE: JudgedBy = JudgedBy { own_lateness: false, ..JudgedBy::ALL };

/// Whether a path that begins to lose full packets soon goes out at both ends, while the others stay.
fn finds_what_loses_full_packets(judged_by: JudgedBy) -> bool {
    let mut hosts = Hosts::judged_by(judged_by, 3);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.passes_large = |_, path| path != 1;
    hosts.run(1_500.0, |_, _, _| true);
    hosts.in_use() == [vec![true, false, true], vec![true, false, true]]
}

/// Whether all good paths stay in, on a machine that is too busy.
fn leaves_good_paths_in(judged_by: JudgedBy) -> bool {
    (0..20)
        .all(|seed| BusyHosts::judged_by(judged_by, random(seed)).run_until(20_000.0, |_, _| true).is_empty())
}

#[test]
fn found_watch_that_judges_by_small_hellos_only() {
    assert!(finds_what_loses_full_packets(JudgedBy::ALL) && leaves_good_paths_in(JudgedBy::ALL));
    assert!(!finds_what_loses_full_packets(SMALL_HELLOS_ONLY));
    assert!(leaves_good_paths_in(SMALL_HELLOS_ONLY));
}

#[test]
fn found_watch_that_does_not_know_when_it_was_late() {
    assert!(!leaves_good_paths_in(NEVER_LATE));
    assert!(finds_what_loses_full_packets(NEVER_LATE));
}
