mod planted;

use proptest::prelude::*;

use super::*;

/// How many hellos the kernel keeps for a socket that is not read; later ones are lost.
const SOCKET_HOLDS: usize = 277;

/// A steady one, and those of a close look.
const HELLOS_PER_TICK: u32 = 10;

/// Numbers from 0 to 99 999: `SplitMix64`, of <https://prng.di.unimi.it/splitmix64.c>.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % 100_000
    }
}

/// A watch of this many paths whose other ends are known.
fn watch_of(paths: usize) -> PathWatch {
    watch_judged_by(JudgedBy::ALL, paths)
}

fn watch_judged_by(judged_by: JudgedBy, paths: usize) -> PathWatch {
    let mut watch = PathWatch { judged_by, ..PathWatch::new(0.0) };
    for path in 0..paths {
        watch.add(0.0);
        watch.begin(path, false, 0.0);
    }
    watch
}

/// Two hosts that watch the same paths.
struct Hosts {
    ends: [PathWatch; 2],
    now_ms: f64,
    tick: u64,
    // What waits in the sockets of an end that stands still.
    queued: Vec<(usize, Hello)>,
    // Whether a large packet of that end gets through, where a small one does.
    passes_large: fn(end: usize, path: usize) -> bool,
    changes: Vec<(f64, usize, PathChange)>,
}

impl Hosts {
    fn new(paths: usize) -> Self {
        Self::judged_by(JudgedBy::ALL, paths)
    }

    fn judged_by(judged_by: JudgedBy, paths: usize) -> Self {
        Self {
            ends: [watch_judged_by(judged_by, paths), watch_judged_by(judged_by, paths)],
            now_ms: 0.0,
            tick: 0,
            queued: vec![],
            passes_large: |_, _| true,
            changes: vec![],
        }
    }

    /// `passes(end, path, tick)`: whether a hello of that end gets through.
    fn run(&mut self, ms: f64, mut passes: impl FnMut(usize, usize, u64) -> bool) {
        self.run_with(ms, [true, true], &mut passes);
    }

    fn run_with(&mut self, ms: f64, awake: [bool; 2], passes: &mut impl FnMut(usize, usize, u64) -> bool) {
        let end_ms = self.now_ms + ms;
        while self.now_ms < end_ms {
            self.now_ms += HELLO_EVERY_MS;
            self.tick += 1;
            let tick = self.tick;
            for end in (0..2).filter(|end| awake[*end]) {
                for path in 0..self.ends[0].paths.len() {
                    for number in 0..=HELLOS_PER_TICK {
                        let hello = match number {
                            0 => self.ends[end].hello(path, self.now_ms),
                            1 => self.ends[end].large_hello(path, self.now_ms),
                            _ => self.ends[end].close_hello(path, self.now_ms),
                        };
                        let Some(hello) = hello else { continue };
                        let passes_as_large = hello.pace != Pace::Large || (self.passes_large)(end, path);
                        if !passes(end, path, tick) || !passes_as_large {
                            continue;
                        }
                        if awake[1 - end] {
                            self.ends[1 - end].heard(path, hello, self.now_ms);
                        } else if self.queued.len() < SOCKET_HOLDS * self.ends[0].paths.len() {
                            self.queued.push((path, hello));
                        }
                    }
                }
            }
            if awake == [true, true] {
                // One path's socket is read a tick before the other's.
                let path_now = usize::try_from(tick % 2).unwrap();
                let (now, later) =
                    std::mem::take(&mut self.queued).into_iter().partition(|(path, _)| *path == path_now);
                self.queued = later;
                let now: Vec<_> = now;
                for (path, hello) in now {
                    self.ends[1].heard(path, hello, self.now_ms);
                }
            }
            for end in (0..2).filter(|end| awake[*end]) {
                let changes = self.ends[end].tick(self.now_ms);
                self.changes.extend(changes.into_iter().map(|change| (self.now_ms, end, change)));
            }
        }
    }

    /// The agent of one end restarts; the other one learns of it at once.
    fn restart(&mut self, end: usize) {
        let mut fresh = PathWatch::new(self.now_ms);
        let other = &self.ends[1 - end];
        for path in 0..other.paths.len() {
            fresh.add(self.now_ms);
            fresh.begin(path, other.was_heard_there(path), self.now_ms);
        }
        self.ends[end] = fresh;
        let changes = self.ends[1 - end].restart(self.now_ms);
        self.changes.extend(changes.into_iter().map(|change| (self.now_ms, 1 - end, change)));
    }

    fn reported(&self, end: usize) -> Vec<(usize, PathNews)> {
        let here = self.changes.iter().filter(|(_, at, _)| *at == end);
        here.map(|(_, _, change)| (change.path, change.news)).collect()
    }

    fn in_use(&self) -> [Vec<bool>; 2] {
        [self.ends[0].in_use(), self.ends[1].in_use()]
    }
}

#[test]
fn good_paths_stay_in() {
    let mut hosts = Hosts::new(3);
    hosts.run(60_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
    assert_eq!(hosts.in_use(), [vec![true; 3], vec![true; 3]]);
}

#[test]
fn a_dead_path_is_out_at_both_ends_within_half_a_second() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(500.0, |_, path, _| path == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    assert!(hosts.changes.iter().all(|(_, _, change)| change.news == PathNews::Out(Fault::Silent)));
}

#[test]
fn a_one_way_path_is_out_at_both_ends() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(700.0, |end, path, _| path == 0 || end == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    let faults: Vec<_> = hosts.changes.iter().map(|(_, end, change)| (*end, change.news)).collect();
    assert!(faults.contains(&(0, PathNews::Out(Fault::Silent))), "{faults:?}");
    assert!(faults.contains(&(1, PathNews::Out(Fault::OneWay))), "{faults:?}");
}

#[test]
fn a_path_that_loses_large_packets_in_either_direction_is_out_within_two_seconds() {
    for from in [0, 1] {
        let mut hosts = Hosts::new(2);
        hosts.run(1_000.0, |_, _, _| true);
        hosts.passes_large =
            if from == 0 { |end, path| path == 0 || end == 1 } else { |end, path| path == 0 || end == 0 };
        hosts.run(1_500.0, |_, _, _| true);
        assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
        for end in [0, 1] {
            assert_eq!(hosts.reported(end), [(1, PathNews::Out(Fault::LargePackets))]);
        }
        hosts.run(20_000.0, |_, _, _| true);
        assert_eq!(hosts.changes.len(), 2, "it stays out: {:?}", hosts.changes);
        hosts.passes_large = |_, _| true;
        hosts.run(3_000.0, |_, _, _| true);
        assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
    }
}

#[test]
fn a_path_that_loses_large_packets_from_the_beginning_is_out_within_two_seconds() {
    let passes_large: [fn(usize, usize) -> bool; 3] =
        [|_, path| path != 1, |end, path| path != 1 || end == 0, |end, path| path != 1 || end == 1];
    for passes_large in passes_large {
        let mut hosts = Hosts::new(3);
        hosts.passes_large = passes_large;
        hosts.run(1_500.0, |_, _, _| true);
        assert_eq!(hosts.in_use(), [vec![true, false, true], vec![true, false, true]]);
        hosts.run(20_000.0, |_, _, _| true);
        for end in [0, 1] {
            assert_eq!(hosts.reported(end), [(1, PathNews::Out(Fault::LargePackets))], "it stays out");
        }
        hosts.passes_large = |_, _| true;
        hosts.run(3_000.0, |_, _, _| true);
        assert_eq!(hosts.in_use(), [vec![true; 3], vec![true; 3]]);
    }
}

#[test]
fn where_no_large_packet_ever_came_no_path_is_judged_by_them() {
    // Agents from before there were large hellos; one such agent; and links that all drop them.
    let passes_large: [fn(usize, usize) -> bool; 2] = [|_, _| false, |end, _| end == 0];
    for passes_large in passes_large {
        let mut hosts = Hosts::new(2);
        hosts.passes_large = passes_large;
        hosts.run(10_000.0, |_, _, _| true);
        assert_eq!(hosts.changes, []);
    }
}

#[test]
fn a_path_that_loses_large_packets_as_an_agent_is_started_anew_is_out_at_both_ends() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.restart(1);
    hosts.passes_large = |end, path| path == 0 || end == 0;
    hosts.run(3_000.0, |_, _, _| true);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
}

#[test]
fn an_agent_of_before_there_were_large_packets_that_takes_over_puts_no_path_out() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.restart(1);
    hosts.passes_large = |end, _| end == 0;
    hosts.run(10_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
}

/// Two agents on a machine that is too busy. They wait for their cores up to three times as long as they wait anyway,
/// and the reader of a path's hellos sometimes waits even longer.
struct BusyHosts<R> {
    ends: [PathWatch; 2],
    next_ms: [f64; 2],
    sockets: [Vec<(usize, Hello)>; 2],
    random: R,
    now_ms: f64,
}

/// How late each agent may look.
const LATE_MS_MAX: u64 = 145;

/// How often a path's hellos are not read when the agent looks.
const UNREAD_PERCENT: u64 = 10;

impl<R: FnMut() -> u64> BusyHosts<R> {
    fn new(random: R) -> Self {
        Self::judged_by(JudgedBy::ALL, random)
    }

    fn judged_by(judged_by: JudgedBy, random: R) -> Self {
        Self {
            ends: [watch_judged_by(judged_by, 3), watch_judged_by(judged_by, 3)],
            next_ms: [0.0, 20.0],
            sockets: [vec![], vec![]],
            random,
            now_ms: 0.0,
        }
    }

    /// The paths that went out until then, while `passes` says which ones carry.
    fn run_until(
        &mut self,
        end_ms: f64,
        passes: fn(path: usize, pace: Pace) -> bool,
    ) -> Vec<(usize, PathNews)> {
        let mut reported = vec![];
        while self.now_ms < end_ms {
            let end = usize::from(self.next_ms[1] < self.next_ms[0]);
            self.now_ms = self.next_ms[end];
            self.next_ms[end] += HELLO_EVERY_MS + ((self.random)() % (LATE_MS_MAX + 1)) as f64;
            let is_read = [(); 3].map(|()| (self.random)() % 100 >= UNREAD_PERCENT);
            let waiting = std::mem::take(&mut self.sockets[end]);
            let (read, unread): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(path, _)| is_read[*path]);
            self.sockets[end] = unread;
            for (path, hello) in read {
                self.ends[end].heard(path, hello, self.now_ms);
            }
            reported.extend(
                self.ends[end].tick(self.now_ms).into_iter().map(|change| (change.path, change.news)),
            );
            for path in 0..3 {
                let hellos =
                    [self.ends[end].hello(path, self.now_ms), self.ends[end].large_hello(path, self.now_ms)];
                let said = hellos.into_iter().flatten().filter(|hello| passes(path, hello.pace));
                self.sockets[1 - end].extend(said.map(|hello| (path, hello)));
            }
        }
        reported
    }
}

#[test]
fn agents_that_wait_for_a_core_take_no_path_out_that_is_good_and_find_one_that_is_not() {
    for seed in 0..200 {
        let mut hosts = BusyHosts::new(random(seed));
        assert_eq!(hosts.run_until(20_000.0, |_, _| true), [], "seed {seed}");
        let reported = hosts.run_until(24_000.0, |path, _| path != 1);
        assert!(
            reported.iter().all(|(path, _)| *path == 1) && reported.len() == 2,
            "seed {seed}: {reported:?}"
        );
    }
}

#[test]
fn agents_that_wait_for_a_core_find_the_path_that_loses_large_packets_from_the_beginning() {
    for seed in 0..200 {
        let mut hosts = BusyHosts::new(random(seed));
        let reported = hosts.run_until(20_000.0, |path, pace| path != 1 || pace != Pace::Large);
        assert_eq!(reported, [(1, PathNews::Out(Fault::LargePackets)); 2], "seed {seed}");
    }
}

#[test]
fn a_path_comes_back_within_three_seconds() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(5_000.0, |_, path, _| path == 0);
    hosts.run(3_000.0, |_, _, _| true);
    assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
    assert_eq!(hosts.changes.len(), 4, "{:?}", hosts.changes);
}

#[test]
fn a_flapping_path_turns_ever_more_rarely() {
    let mut hosts = Hosts::new(2);
    // Up for 1 s, down for 1 s.
    hosts.run(60_000.0, |_, path, tick| path == 0 || tick % 40 < 20);
    let changes = hosts.changes.iter().filter(|(_, end, _)| *end == 0).count();
    assert!(changes <= 3, "{:?}", hosts.changes);
}

#[test]
fn five_percent_loss_puts_a_path_out_and_keeps_it_there() {
    let mut hosts = Hosts::new(2);
    hosts.run(20_000.0, |end, path, tick| path == 0 || end == 1 || tick % 20 != 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    assert!(matches!(hosts.changes[0].2.news, PathNews::Out(Fault::Loss(_))), "{:?}", hosts.changes);
    hosts.run(10_000.0, |_, _, _| true);
    assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
}

#[test]
fn all_paths_down_changes_nothing_and_they_are_used_when_they_return() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(5_000.0, |_, _, _| false);
    hosts.run(5_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
}

#[test]
fn an_agent_that_stands_still_for_30_seconds_tears_nothing_down() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run_with(30_000.0, [true, false], &mut |_, _, _| true);
    hosts.run(5_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
}

#[test]
fn a_firewall_that_drops_hellos_puts_no_path_out_and_is_told_once() {
    let mut hosts = Hosts::new(2);
    hosts.run(10_000.0, |_, path, _| path == 0);
    assert_eq!(hosts.reported(0), [(1, PathNews::Unwatched(Unwatched::Unheard))]);
    assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
}

#[test]
fn hellos_that_come_late_are_told_too() {
    let mut hosts = Hosts::new(2);
    hosts.run(3_000.0, |_, path, _| path == 0);
    hosts.run(3_000.0, |_, _, _| true);
    assert_eq!(hosts.reported(0), [(1, PathNews::Unwatched(Unwatched::Unheard)), (1, PathNews::Watched)]);
}

#[test]
fn a_path_is_not_judged_before_its_other_end_is_known() {
    let mut watch = watch_of(1);
    watch.add(0.0);
    for tick in 1..=100_u64 {
        let now_ms = tick as f64 * HELLO_EVERY_MS;
        watch.heard(0, Hello { sequence: tick, ..Hello::FORGOTTEN }, now_ms);
        assert_eq!(watch.tick(now_ms), []);
    }
    assert_eq!(watch.in_use(), [true, true]);
}

#[test]
fn a_short_silence_on_one_path_costs_it_nothing() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(300.0, |_, path, _| path == 0);
    hosts.run(10_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
}

#[test]
fn short_silences_again_and_again_put_a_path_out_for_good() {
    let mut hosts = Hosts::new(2);
    hosts.run(60_000.0, |_, path, tick| path == 0 || tick % 20 < 14);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    assert_eq!(hosts.changes.len(), 2, "{:?}", hosts.changes);
}

#[test]
fn an_agent_that_is_started_anew_is_heard_again_and_judged() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(3_000.0, |_, _, _| false);
    hosts.restart(1);
    hosts.run(3_000.0, |_, _, _| true);
    let both = |news| [(0, news), (1, news)];
    let reported = [both(PathNews::Unwatched(Unwatched::AgentRestarted)), both(PathNews::Watched)].concat();
    assert_eq!(hosts.reported(0), reported);
    hosts.run(1_000.0, |_, path, _| path == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
}

#[test]
fn an_agent_that_is_gone_is_asked_for_whether_or_not_it_was_heard_and_on_a_busy_host() {
    for was_heard in [true, false] {
        let mut watch = watch_of(2);
        let mut now_ms = 0.0;
        if was_heard {
            (0..2).for_each(|path| watch.heard(path, Hello { sequence: 1, ..Hello::FORGOTTEN }, now_ms));
        }
        while !watch.is_deaf(now_ms) {
            // So late each time that the watch takes its own host for frozen.
            now_ms += 2.0 * SLEPT_AFTER_MS;
            let changes = watch.tick(now_ms);
            assert!(!changes.iter().any(|change| matches!(change.news, PathNews::Out(_))), "{changes:?}");
            assert!(now_ms <= DEAF_AFTER_MS + 2.0 * SLEPT_AFTER_MS, "nobody asks");
        }
        let reported = watch.restart(now_ms);
        assert!(!was_heard || reported.len() == 2, "{reported:?}");
    }
}

#[test]
fn a_path_that_fails_just_as_an_agent_is_started_anew_is_out_at_both_ends() {
    let mut hosts = Hosts::new(2);
    // Its first life ends before it has heard anything, and its second one begins when a path is dead.
    hosts.run(100.0, |end, _, _| end == 1);
    hosts.restart(1);
    hosts.run(5_000.0, |_, path, _| path == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
}

#[test]
fn a_watch_that_is_begun_anew_at_once_is_not_worth_a_word() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.restart(1);
    hosts.run(3_000.0, |_, _, _| true);
    assert_eq!(hosts.changes, []);
}

#[test]
fn five_percent_lost_at_random_puts_a_path_out_within_seconds() {
    for seed in 0..50_u64 {
        let mut hosts = Hosts::new(2);
        let mut random = random(seed);
        hosts.run(20_000.0, |_, path, _| path == 0 || random() >= 5_000);
        let (out_at_ms, _, _) = hosts.changes[0];
        assert!(out_at_ms < 5_000.0, "seed {seed}: {:?}", hosts.changes);
    }
}

/// TCP suspects a path all the time while it fills a link.
fn run_suspecting(hosts: &mut Hosts, ms: f64, passes: &mut impl FnMut(usize, usize, u64) -> bool) {
    let end_ms = hosts.now_ms + ms;
    while hosts.now_ms < end_ms {
        let now_ms = hosts.now_ms;
        hosts.ends[0].suspect(1, now_ms);
        hosts.run_with(2.0 * HELLO_EVERY_MS, [true, true], passes);
    }
}

#[test]
fn loss_that_tcp_suspects_is_found_within_a_second_or_little_more() {
    let mut after_ms = vec![];
    for seed in 0..200_u64 {
        let mut hosts = Hosts::new(2);
        hosts.run(1_000.0, |_, _, _| true);
        let mut random = random(seed);
        run_suspecting(&mut hosts, 6_000.0, &mut |end, path, _| path == 0 || end == 1 || random() >= 5_000);
        assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]], "seed {seed}");
        after_ms.push(hosts.changes[0].0 - 1_000.0);
    }
    after_ms.sort_by(f64::total_cmp);
    assert!(after_ms[100] <= 800.0 && after_ms[190] <= 1_500.0, "{after_ms:?}");
}

#[test]
fn a_path_that_loses_next_to_nothing_stays_in_whatever_tcp_suspects() {
    for seed in 0..50_u64 {
        let mut hosts = Hosts::new(2);
        let mut random = random(seed);
        run_suspecting(&mut hosts, 60_000.0, &mut |_, path, _| path == 0 || random() >= 100);
        assert_eq!(hosts.changes, [], "seed {seed}");
    }
}

#[test]
fn a_path_found_lossy_in_a_close_look_does_not_come_back_while_it_loses() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    let mut random = random(7);
    run_suspecting(&mut hosts, 1_500.0, &mut |end, path, _| path == 0 || end == 1 || random() >= 10_000);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    let changes = hosts.changes.len();
    run_suspecting(&mut hosts, 20_000.0, &mut |end, path, tick| path == 0 || end == 1 || tick % 20 != 0);
    assert_eq!(hosts.changes.len(), changes, "{:?}", hosts.changes);
    hosts.run(10_000.0, |_, _, _| true);
    assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
}

#[test]
fn a_path_that_dies_while_the_other_agent_is_started_anew_is_out() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.restart(1);
    hosts.run(3_000.0, |_, path, _| path == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
}

#[test]
fn a_firewall_is_one_still_when_the_agent_behind_it_is_started_anew() {
    for deaf in [0, 1] {
        let mut hosts = Hosts::new(2);
        let mut passes = |end, path, _| path == 0 || end == deaf;
        hosts.run(3_000.0, &mut passes);
        hosts.restart(1);
        hosts.run(5_000.0, &mut passes);
        assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
    }
}

#[test]
fn a_path_that_is_out_stays_out_at_an_agent_that_is_started_anew() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(1_000.0, |_, path, _| path == 0);
    hosts.restart(1);
    hosts.run(5_000.0, |_, path, _| path == 0);
    assert_eq!(hosts.in_use(), [vec![true, false], vec![true, false]]);
    hosts.run(3_000.0, |_, _, _| true);
    assert_eq!(hosts.in_use(), [vec![true; 2], vec![true; 2]]);
}

#[test]
fn a_watch_that_hears_nothing_says_so_whether_or_not_it_ever_heard() {
    let mut hosts = Hosts::new(2);
    hosts.run(1_000.0, |_, _, _| false);
    assert!(!hosts.ends[0].is_deaf(hosts.now_ms));
    hosts.run(4_000.0, |_, _, _| false);
    assert!(hosts.ends[0].is_deaf(hosts.now_ms));
    hosts.run(1_000.0, |_, _, _| true);
    hosts.run(1_000.0, |_, _, _| false);
    assert!(!hosts.ends[0].is_deaf(hosts.now_ms));
    hosts.run(2_000.0, |_, _, _| false);
    assert!(hosts.ends[0].is_deaf(hosts.now_ms));
}

#[test]
fn a_firewall_that_drops_the_hellos_of_one_direction_puts_no_path_out() {
    let mut hosts = Hosts::new(2);
    hosts.run(10_000.0, |end, path, _| path == 0 || end == 0);
    assert_eq!(hosts.reported(0), [(1, PathNews::Unwatched(Unwatched::Unheard))]);
    assert_eq!(hosts.reported(1), []);
}

#[test]
fn a_watch_that_is_often_late_brings_no_dead_path_back() {
    let mut watch = watch_of(2);
    let hello = |sequence| Hello { sequence, ..Hello::FORGOTTEN };
    let mut changes = vec![];
    for tick in 1..=100_u64 {
        let now_ms = tick as f64 * HELLO_EVERY_MS;
        watch.heard(0, hello(tick), now_ms);
        if tick < 20 {
            watch.heard(1, hello(tick), now_ms);
        }
        changes.extend(watch.tick(now_ms));
    }
    for tick in 21..=100_u64 {
        let now_ms = 5_000.0 + tick as f64 * 250.0;
        watch.heard(0, hello(100 + tick), now_ms);
        changes.extend(watch.tick(now_ms));
    }
    assert_eq!(changes, [PathChange { path: 1, news: PathNews::Out(Fault::Silent) }]);
}

#[test]
fn replayed_and_late_hellos_are_no_sign_of_life() {
    let mut watch = watch_of(2);
    let hello = |sequence| Hello { sequence, ..Hello::FORGOTTEN };
    let mut changes = vec![];
    for tick in 1..=40_u64 {
        let now_ms = tick as f64 * HELLO_EVERY_MS;
        watch.heard(0, hello(tick), now_ms);
        watch.heard(1, hello(tick.min(5)), now_ms);
        changes.extend(watch.tick(now_ms));
    }
    assert_eq!(changes, [PathChange { path: 1, news: PathNews::Out(Fault::Silent) }]);
}

fn hearing() -> impl Strategy<Value = Hearing> {
    prop_oneof![Just(Hearing::Never), Just(Hearing::Now), Just(Hearing::NoMore)]
}

proptest! {
    #[test]
    fn paths_come_and_go(steps in prop::collection::vec((0_u8..5, 0_usize..4, any::<u64>()), 0..200)) {
        let mut watch = PathWatch::new(0.0);
        let mut paths = 0_usize;
        for (tick, (what, path, sequence)) in steps.into_iter().enumerate() {
            let now_ms = tick as f64 * HELLO_EVERY_MS;
            match what {
                0 => {
                    watch.add(now_ms);
                    paths += 1;
                }
                1 => {
                    watch.remove(path);
                    paths -= usize::from(path < paths);
                }
                2 => watch.begin(path, sequence % 2 == 0, now_ms),
                3 => watch.heard(path, Hello { sequence, ..Hello::FORGOTTEN }, now_ms),
                _ => drop(watch.restart(now_ms)),
            }
            for change in watch.tick(now_ms) {
                prop_assert!(change.path < paths);
            }
            prop_assert_eq!(watch.in_use().len(), paths);
            prop_assert!(paths == 0 || watch.in_use().contains(&true));
        }
    }

    #[test]
    fn whatever_is_heard_some_path_is_in_use(
        hellos in prop::collection::vec(
            (0_usize..4, any::<u64>(), any::<bool>(), hearing(), any::<u8>(), 0.0..300.0_f64),
            0..300,
        ),
    ) {
        let mut watch = watch_of(3);
        let mut now_ms = 0.0;
        for (path, sequence, is_close, hearing, losses, later_ms) in hellos {
            let pace = if is_close { Pace::Close } else { Pace::Steady };
            now_ms += later_ms;
            watch.heard(path, Hello { sequence, pace, hearing, losses, ..Hello::FORGOTTEN }, now_ms);
            watch.tick(now_ms);
            prop_assert!(watch.in_use().contains(&true));
        }
    }
}
