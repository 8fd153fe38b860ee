//! The real engine against a modelled source, target, guard, network and operator, by the thousand.
//!
//! Any step may meet a fault: messages are lost, late, doubled, overtaken; agents crash, are started anew, fall asleep
//! and wake up with orders of long ago; hosts reboot, or are lost; QEMUs end, or do not answer for a while and obey
//! later; disks are full; journals are lost, or put back from before; clocks jump; another host meddles; somebody cancels.
//! After every step the invariants are checked, and once the faults stop, all must be settled, and a VM that can run must
//! run. A failing seed tells its story, and replays exactly: `DRAINPIPE_SEED=17 cargo test -p drainpipe-engine --test
//! simulation`, with `-- --nocapture` also one that does not fail. `make soak` runs many more seeds.

mod deadline;
mod disks;
mod executor;
mod faults;
#[path = "../../src/fixtures.rs"]
#[expect(dead_code, reason = "paths are made of links here")]
mod fixtures;
mod guard;
mod hosts;
mod journals;
mod libvirt;
mod memory;
#[path = "../support/milliseconds.rs"]
mod milliseconds;
mod network;
mod operator;
mod orders;
mod planted;
mod qemu;
#[path = "../support/random.rs"]
mod random;
mod rules;
mod source;
mod target;
mod third_host;
mod turns;
mod world;

use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::thread;

use drainpipe_engine::migration::result::Outcome;
// The crate's own fixtures call its modules by these names.
use drainpipe_engine::{host, paths};

use crate::faults::Faults;
use crate::planted::Planted;
use crate::random::Random;
use crate::world::{Run, Sight, simulate, tell};

/// How many seeds run if the environment does not say.
const SEEDS: u64 = 10_000;

/// Fewer for domains, which differ in their last steps only.
const SEEDS_OF_DOMAINS: u64 = 2_500;

/// The most seeds tried until a planted bug is found: some bugs take three faults within a second.
const SEEDS_PLANTED: u64 = 40_000;

fn seeds() -> std::ops::Range<u64> {
    seeds_or(SEEDS)
}

fn seeds_or(count: u64) -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match (number("DRAINPIPE_SEED"), number("DRAINPIPE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, seeds) => 0..seeds.unwrap_or(count),
    }
}

type Draw = fn(&mut Random) -> Faults;

/// Runs all seeds, side by side; the first that fails tells its story.
fn run_all(draw: Draw) -> Vec<Run> {
    run_each(seeds(), draw)
}

fn run_each(seeds: std::ops::Range<u64>, draw: Draw) -> Vec<Run> {
    let workers = thread::available_parallelism().map_or(1, usize::from);
    let share = |worker| seeds.clone().skip(worker).step_by(workers).map(|seed| run(seed, draw)).collect();
    let shares: Vec<Vec<Run>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|worker| scope.spawn(move || share(worker))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a seed fails; see above")).collect()
    });
    shares.into_iter().flatten().collect()
}

fn run(seed: u64, draw: Draw) -> Run {
    if seeds().count() == 1 {
        println!("{}", tell(seed, draw));
    }
    let ended = catch_unwind(|| simulate(seed, draw, Planted::Nothing));
    let ended = ended.unwrap_or_else(|_| panic!("seed {seed} panics; see above"));
    ended.unwrap_or_else(|why| panic!("{}seed {seed}: {why}", tell(seed, draw)))
}

#[test]
fn without_faults_every_migration_completes() {
    for run in run_all(|_| Faults::none()) {
        assert!(run.waits_in_vain || run.outcomes == [Outcome::Completed], "{run:?}");
        let as_ever = [
            Sight::DisksCopied,
            Sight::DisksOutpaced,
            Sight::DisksWentAlong,
            Sight::WritesHeld,
            Sight::PostCopy,
            Sight::RunsMute,
            Sight::LateCommand,
            Sight::Throttled,
        ];
        assert!(run.sights.iter().all(|sight| as_ever.contains(sight)), "{run:?}");
    }
}

#[test]
fn whoever_cancels_at_any_moment_has_the_vm_run_on_and_may_move_it_later() {
    let mut seen = BTreeSet::new();
    for run in run_all(|_| Faults::only_cancelled()) {
        let as_expected = |outcome: &Outcome| matches!(outcome, Outcome::Completed | Outcome::Cancelled);
        assert!(run.waits_in_vain || run.outcomes.iter().all(as_expected), "{run:?}");
        assert_eq!(run.outcomes.last(), Some(&Outcome::Completed), "{run:?}");
        seen.extend(run.outcomes.iter().map(|outcome| *outcome as u8));
    }
    assert!(seeds().count() == 1 || seen.len() > 1, "nobody cancelled in time");
}

#[test]
fn whatever_fails_the_vm_runs_once_and_what_is_told_is_so() {
    let mut unseen: BTreeSet<Sight> = Sight::ALL.into();
    let mut outcomes = vec![];
    for run in run_all(Faults::draw) {
        unseen.retain(|sight| !run.sights.contains(sight));
        outcomes.extend(run.outcomes);
    }
    let all = [Outcome::Completed, Outcome::Failed, Outcome::Cancelled, Outcome::Lost];
    let is_all = unseen.is_empty() && all.iter().all(|outcome| outcomes.contains(outcome));
    assert!(seeds().count() < 5_000 || is_all, "these runs prove little: {unseen:?} was not met");
}

#[test]
fn without_faults_every_domain_moves() {
    for run in run_each(seeds_or(SEEDS_OF_DOMAINS), |_| Faults::none_of_domain()) {
        assert!(run.waits_in_vain || run.outcomes == [Outcome::Completed], "{run:?}");
    }
}

#[test]
fn whatever_fails_a_domain_runs_once_and_what_is_told_is_so() {
    let mut unseen: BTreeSet<Sight> = Sight::OF_DOMAINS.into();
    for run in run_each(seeds_or(SEEDS_OF_DOMAINS), Faults::draw_of_domain) {
        unseen.retain(|sight| !run.sights.contains(sight));
    }
    let are_few = seeds_or(SEEDS_OF_DOMAINS).count() < 2_500;
    assert!(are_few || unseen.is_empty(), "these runs prove little: {unseen:?} was not met");
}

#[test]
fn a_domain_that_others_let_run_at_its_target_stays_there() {
    let sights = [Sight::OwnerResumedTarget, Sight::KeptSinceItRan];
    let mut unseen: BTreeSet<Sight> = sights.into();
    for run in run_each(seeds(), Faults::draw_of_resumed_domain) {
        unseen.retain(|sight| !run.sights.contains(sight));
    }
    let are_few = seeds().count() < 5_000;
    assert!(are_few || unseen.is_empty(), "these runs prove little: {unseen:?} was not met");
}

#[test]
fn an_attempt_to_connect_again_that_comes_late_cuts_no_later_one_off() {
    let runs = run_each(seeds(), Faults::draw_of_attempts);
    let is_met = runs.iter().any(|run| run.sights.contains(&Sight::AttemptOvertaken));
    assert!(seeds().count() < 5_000 || is_met, "these runs prove little: no attempt came after a later one");
}

fn assert_found(planted: Planted) {
    let shows = |why: &String| planted.shows_as().iter().any(|rule| why.contains(rule));
    let draw = planted.draw();
    let found = (0..SEEDS_PLANTED).find_map(|seed| simulate(seed, draw, planted).err().filter(shows));
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
    found_target_runs_before_the_record: RunsBeforeRecord,
    found_unrecorded_hand_over: UnrecordedHandOver,
    found_forgotten_hand_over: ForgottenHandOver,
    found_vain_hand_over_that_is_believed: VainHandOverBelieved,
    found_in_doubt_that_is_undone: UndoneInDoubt,
    found_silence_taken_for_success: SilenceIsSuccess,
    found_silence_taken_for_discarded: SilenceIsDiscarded,
    found_unknown_taken_for_discarded: UnknownIsDiscarded,
    found_only_copy_that_is_discarded: DiscardsOnlyCopy,
    found_wait_without_deadline: NoDeadline,
    found_two_starts: TwoStarts,
    found_forgotten_discard: ForgottenDiscard,
    found_older_journal_that_is_believed: OlderJournalBelieved,
    found_start_without_a_question: StartsUnasked,
    found_record_forgotten_before_it_is_settled: PrunesUnsettled,
    found_migration_that_another_host_gives_up: ThirdHostCloses,
    found_third_host_taken_for_the_source: ThirdHostIsSign,
    found_incoming_migration_that_is_left_open: LeavingKeepsMigration,
    found_dropped_incoming_migration: DroppedMigration,
    found_record_believed_to_be_the_deed: BelievedRecord,
    found_incoming_migration_settled_and_not_let_run: SettledUnrun,
    found_disks_taken_early: TakesDisksEarly,
    found_incomplete_vm_that_runs: RunsIncomplete,
    found_rest_that_is_forgotten: RestForgotten,
    found_one_that_never_ran_and_is_taken_for_ended: GoneIsRun,
    found_vm_that_is_let_run_though_it_may_run_on: RunsDoubted,
    found_post_copy_that_is_believed_to_be_active: StatusBelieved,
    found_vm_that_the_hypervisor_alone_stops: StoppedByHypervisor,
    found_part_that_is_discarded: TakesPartBack,
    found_mute_one_that_is_told_to_run_again_and_again: MuteIsReady,
    found_end_before_the_last_bytes_are_there: EndsAtOnce,
    found_mute_one_that_is_ended: MuteIsEnded,
    found_old_connection_that_is_left: CutForgotten,
    found_incoming_vm_that_is_built_twice: BuildsTwice,
    found_guard_that_does_not_forbid: GuardDoesNotForbid,
    found_guard_that_waits: GuardWaits,
    found_guard_that_believes_the_record: RecordBelieved,
    found_guard_that_is_ignored: ForbiddenIgnored,
    found_vm_that_nobody_looked_at: NotLookedAt,
    found_end_on_the_target_that_is_not_told: EndedIsRunning,
    found_host_taken_for_lost: LostTooSoon,
    found_throttle_that_is_kept_while_nothing_arrives: ThrottleKept,
    found_throttle_that_is_left: ThrottleLeft,
    found_copies_that_end_after_the_record: CopiesEndAfterRecord,
    found_copies_that_end_while_the_vm_writes: CopiesEndEarly,
    found_held_copies_that_end_before_all_is_there: HeldCopiesEndEarly,
    found_writes_that_stay_held_back: WritesStayHeld,
    found_disks_that_are_left_open: DisksLeftOpen,
    found_late_attempt_that_cuts_a_later_one_off: LateAttempt,
    found_memory_in_the_clear: Clear,
    found_fallback_that_is_not_told: SilentFallback,
    found_memory_that_is_not_reserved: Unreserved,
    found_job_of_libvirt_that_is_kept: JobKept,
    found_libvirt_that_is_believed_as_it_starts: RestartedBelieved,
    found_guest_that_somebody_resumes_unseen: ResumedUnseen,
    found_domain_that_runs_when_all_is_there: FinishLetsRun,
    found_domain_that_others_may_let_run_before_the_record: TakesLastEarly,
    found_domain_that_is_discarded_though_others_let_it_run: DiscardsUnlooked,
    found_domain_that_ran_and_is_taken_for_one_that_never_did: LetRunForgotten,
    found_end_that_is_not_noted: EndsUnnoted,
}
