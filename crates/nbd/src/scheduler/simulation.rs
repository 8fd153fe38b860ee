//! The real scheduler and the real fences against a modelled wire, target and disk, thousands of times.
//!
//! Streams are cut at any moment: what was sent may be lost, or arrive long after the source has given the stream up,
//! or be at the disk for any time. The disk carries out its requests in any order, and each of its connections has its
//! own cache. After every step the rules are checked, and once the faults stop, everything must be answered. Planted
//! bugs prove the rules. A failing seed replays exactly: `DRAINPIPE_SEED=17 cargo test -p drainpipe-nbd simulation`.

mod disk;
mod planted;
#[path = "../../../engine/tests/support/random.rs"]
mod random;
mod rules;
mod target;
mod world;

use self::planted::Planted;
use self::world::{Run, simulate};

/// How many seeds run unless the environment says otherwise.
const SEEDS: u64 = 3_000;

/// How many seeds run at most until a planted bug is found.
const SEEDS_PLANTED: u64 = 10_000;

fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match (number("DRAINPIPE_SEED"), number("DRAINPIPE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, seeds) => 0..seeds.unwrap_or(SEEDS),
    }
}

#[test]
fn whatever_is_lost_the_disk_is_right_and_all_is_answered() {
    let mut sum = Run::default();
    for seed in seeds() {
        let run = simulate(seed, Planted::Nothing).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        sum.resent += run.resent;
        sum.late += run.late;
        sum.fenced += run.fenced;
        sum.flushes += run.flushes;
        for (sum, of_run) in sum.compared.iter_mut().zip(run.compared) {
            *sum += of_run;
        }
    }
    let [same, different] = sum.compared;
    let met = [sum.resent, sum.late, sum.fenced, sum.flushes, same, different];
    assert!(
        seeds().count() < 1000 || met.iter().all(|count| *count > 1000),
        "these runs prove little: {sum:?}"
    );
}

fn assert_found(planted: Planted) {
    let shows = |why: &String| why.contains(planted.shows_as());
    let found = (0..SEEDS_PLANTED).find_map(|seed| simulate(seed, planted).err().filter(shows));
    assert!(found.is_some(), "{planted:?} is not found");
}

macro_rules! planted_bugs_are_found {
    ($($test:ident: $planted:ident,)*) => {
        $(#[test]
        fn $test() {
            assert_found(Planted::$planted);
        })*
    };
}

planted_bugs_are_found! {
    found_early_reply: EarlyReply,
    found_lost_flush: LostFlush,
    found_flush_of_one_stream: FlushOfOneStream,
    found_flush_that_does_not_wait: FlushDoesNotWait,
    found_resend_without_fence: NoFence,
    found_fence_that_is_not_heeded: FenceNotHeeded,
    found_fence_that_does_not_wait_for_the_disk: FenceDoesNotWait,
    found_fence_that_does_not_flush: FenceDoesNotFlush,
    found_order_that_is_lost: OverlapsAtOnce,
    found_durable_write_that_is_not: FuaForgotten,
    found_durable_write_reported_early: FuaReportedEarly,
    found_request_that_is_forgotten: NotSentAgain,
    found_difference_that_is_missed: DifferenceMissed,
    found_durable_write_that_is_compared: DurableCompared,
    found_left_content_that_is_not_durable: LeftNotDurable,
}
