//! The real planner and the real drain against modelled targets, migrations and messages, by the
//! thousand. Migrations are refused, fail at any point, are left undecided; targets vanish and return;
//! others take their memory, or their places; memory gets dirty faster than it is sent; messages are
//! late or lost, as far as `drain::run` allows; somebody cancels; the agent is started anew; two hosts
//! are drained into each other. A failing seed replays exactly:
//! `DRAINPIPE_SEED=17 cargo test -p drainpipe-engine --test drain_simulation`. `make soak` runs many
//! more seeds.

#[path = "../support/random.rs"]
mod random;
mod simulation;
mod swap;
mod world;

use drainpipe_engine::drain::status::DrainState;
use simulation::{Planted, Run, simulate};
use world::Faults;

fn seeds() -> std::ops::Range<u64> {
    seeds_or(4_000)
}

/// So many where the environment says nothing.
fn seeds_or(usual: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match (number("DRAINPIPE_SEED"), number("DRAINPIPE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, seeds) => 0..seeds.unwrap_or(usual),
    }
}

fn run(seed: u64, faults: Faults) -> Run {
    simulate(seed, faults, Planted::Nothing).unwrap_or_else(|why| panic!("seed {seed}: {why}"))
}

#[test]
fn without_faults_all_that_was_planned_moves_at_the_first_attempt() {
    let mut drained = 0;
    for seed in seeds() {
        let run = run(seed, Faults::NONE);
        assert_eq!(run.moved, run.planned, "seed {seed}");
        assert_eq!(run.begun, run.planned, "seed {seed}");
        assert_eq!(run.outcome == DrainState::Drained, run.planned == run.vms, "seed {seed}");
        drained += usize::from(run.outcome == DrainState::Drained);
    }
    assert!(drained > 0);
}

#[test]
fn whatever_fails_it_ends_and_its_report_is_true() {
    let mut seen = vec![];
    for seed in seeds() {
        let run = run(seed, Faults::up_to(1 + seed % 20));
        if !seen.contains(&run.outcome) {
            seen.push(run.outcome);
        }
    }
    let all = [DrainState::Drained, DrainState::Incomplete, DrainState::Cancelled];
    assert!(seeds().count() == 1 || all.iter().all(|outcome| seen.contains(outcome)), "only {seen:?}");
}

#[test]
fn who_does_not_converge_keeps_nobody_from_moving() {
    let mut gave_up = 0;
    for seed in seeds_or(1_000) {
        let run = run(seed, Faults { endless: 30, ..Faults::NONE });
        assert_eq!(run.moved + run.endless, run.planned, "seed {seed}");
        assert!((run.planned..=run.planned + run.slow).contains(&run.begun), "seed {seed}");
        gave_up += run.endless;
    }
    assert!(seeds().count() == 1 || gave_up > 0);
}

#[test]
fn two_hosts_change_places_where_each_has_room_for_one_vm_more() {
    let mut with_room = 0;
    for seed in seeds_or(500) {
        let swapped = swap::simulate(seed, 0).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert!(swapped.left == 0 || !swapped.has_room, "seed {seed}: {} stay", swapped.left);
        with_room += usize::from(swapped.has_room);
    }
    assert!(seeds_or(500).count() == 1 || with_room > 0);
}

#[test]
fn two_hosts_change_places_without_overcommit_whatever_fails() {
    for seed in seeds_or(500) {
        swap::simulate(seed, 1 + seed % 20).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    }
}

#[test]
fn targets_that_come_back_get_what_was_left_out() {
    for seed in seeds() {
        let run = run(seed, Faults { vanish: 1 + seed % 5, ..Faults::NONE });
        assert!(run.moved <= run.vms, "seed {seed}");
    }
}

#[test]
fn every_kind_of_planted_bug_is_found() {
    for planted in Planted::ALL {
        let found = (0..500).find_map(|seed| simulate(seed, Faults::NONE, planted).err());
        let why = found.unwrap_or_else(|| panic!("{planted:?} is not found"));
        assert!(why.contains(planted.shows_as()), "{planted:?} is found as: {why}");
    }
}
