use super::super::limits::FIRST_ALONE_MS;
use super::super::plan::Move;
use super::super::status::MoveState;
use super::super::stay::StayReason;
use super::planning::{LOOK_AGAIN_MS, LOOKS, LOOKS_FOR_ROOM};
use super::*;
use crate::storage::{CopyReason, DiskCopy, DiskImage, DiskName};

const GIB: u64 = 1 << 30;

/// 2 × 1 Gb/s, in bytes per ms.
const LINKS: f64 = 237_500.0;

fn planned(vm: &str, target: &str) -> Move {
    Move {
        vm: vm.into(),
        target: target.into(),
        memory_bytes: GIB,
        predicted_bytes: GIB,
        is_compressed: false,
        post_copy: false,
        predicted_steps_ms: 0.0,
        predicted_transfer_ms: GIB as f64 / LINKS,
        predicted_shared_ms: GIB as f64 / LINKS,
        warning: None,
        disks: vec![],
    }
}

fn plan_of(moves: Vec<Move>, stays: &[&str]) -> DrainPlan {
    let stay = |vm: &&str| Stay { vm: (*vm).to_owned(), why: StayReason::NoTarget };
    DrainPlan {
        host: "a".into(),
        predicted_most_ms: None,
        predicted_ms: moves.len() as f64 * GIB as f64 / LINKS,
        moves,
        stays: stays.iter().map(stay).collect(),
        await_room: vec![],
        room_is_coming: false,
        transfers: 1,
        transfers_found: false,
        links_mbps: None,
        warnings: vec![],
    }
}

const LIMITS: DrainLimits = DrainLimits {
    total_ms: None,
    outbound: 8,
    inbound: 4,
    transfers: Some(1),
    attempts: 2,
    post_copy: false,
    disks_first: false,
};

fn begin(vms: &[&str]) -> (Drain, Vec<DrainAction>) {
    begin_with(vms.iter().map(|vm| planned(vm, "b")).collect(), LIMITS)
}

/// Begins a drain of which a second seems to have passed, after which more than the first VM is prepared.
fn begin_with(moves: Vec<Move>, limits: DrainLimits) -> (Drain, Vec<DrainAction>) {
    let (mut drain, mut actions) = Drain::begin(plan_of(moves, &[]), limits, 0, -FIRST_ALONE_MS);
    actions.extend(drain.handle(0.0, DrainEvent::Tick));
    (drain, actions)
}

fn begins(actions: &[DrainAction]) -> Vec<&str> {
    let begun = actions.iter().filter_map(|action| match action {
        DrainAction::Begin { vm, .. } => Some(vm.as_str()),
        _ => None,
    });
    begun.collect()
}

fn owned(vms: &[&str]) -> Vec<String> {
    vms.iter().map(ToString::to_string).collect()
}

fn prepared(vm: &str) -> DrainEvent {
    DrainEvent::Prepared { vm: vm.into() }
}

fn ending(vm: &str) -> DrainEvent {
    DrainEvent::Ending { vm: vm.into() }
}

fn paused(vm: &str) -> DrainEvent {
    DrainEvent::Paused { vm: vm.into() }
}

fn sent(vm: &str) -> DrainEvent {
    DrainEvent::Sent { vm: vm.into() }
}

fn completed(vm: &str) -> DrainEvent {
    DrainEvent::Ended { vm: vm.into(), end: MoveEnd::Completed { transfer_ms: 4_500.0 } }
}

fn failed(vm: &str) -> DrainEvent {
    DrainEvent::Ended { vm: vm.into(), end: MoveEnd::Failed(Problem::failed("connection reset")) }
}

fn refused(vm: &str) -> DrainEvent {
    DrainEvent::Ended { vm: vm.into(), end: MoveEnd::Failed(Problem::refused("b is short of memory")) }
}

fn release(vm: &str) -> DrainAction {
    DrainAction::Release { vm: vm.into() }
}

/// The actions that release a VM while another one is about to be paused.
fn release_behind(vm: &str) -> [DrainAction; 2] {
    [give_way(vm), release(vm)]
}

fn give_way(vm: &str) -> DrainAction {
    DrainAction::GiveWay { vm: vm.into() }
}

fn take_all(vm: &str) -> DrainAction {
    DrainAction::TakeAll { vm: vm.into() }
}

fn cancel(vm: &str) -> DrainAction {
    DrainAction::Cancel { vm: vm.into() }
}

fn state(drain: &Drain, vm: &str) -> MoveState {
    drain.status(0.0).moves.iter().find(|row| row.vm == vm).unwrap().state
}

fn error(drain: &Drain, vm: &str) -> String {
    let status = drain.status(0.0);
    status.moves.iter().find(|row| row.vm == vm).unwrap().error.clone().unwrap().message
}

#[test]
fn two_are_prepared_ahead_and_one_is_on_the_links() {
    let (mut drain, actions) = begin(&["v", "w", "x", "y", "z"]);
    assert_eq!(begins(&actions), ["v", "w", "x"]);
    assert_eq!(
        drain.handle(1.0, prepared("w")),
        [release("w"), DrainAction::Begin { vm: "y".into(), target: "b".into(), post_copy: false }]
    );
    assert_eq!(drain.handle(2.0, prepared("v")), []);
    assert_eq!(state(&drain, "v"), MoveState::Ready);
}

#[test]
fn the_links_are_free_once_a_vm_is_paused() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, prepared("w"));
    assert_eq!(drain.handle(3.0, paused("v")), [release("w")]);
    assert_eq!(drain.handle(4.0, paused("w")), []);
    assert_eq!(drain.handle(5.0, completed("w")), []);
    assert_eq!(drain.handle(6.0, completed("v")), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Drained));
    assert_eq!(drain.handle(7.0, DrainEvent::CancelRequested), []);
}

#[test]
fn the_first_one_is_prepared_alone_for_a_while() {
    let first = || Drain::begin(plan_of(["v", "w"].map(|vm| planned(vm, "b")).to_vec(), &[]), LIMITS, 0, 0.0);
    let begin_w = DrainAction::Begin { vm: "w".into(), target: "b".into(), post_copy: false };
    let (mut drain, actions) = first();
    assert_eq!(begins(&actions), ["v"]);
    assert_eq!(drain.handle(100.0, prepared("v")), [release("v"), begin_w.clone()]);
    let (mut drain, _) = first();
    assert_eq!(drain.handle(FIRST_ALONE_MS - 1.0, DrainEvent::Tick), []);
    assert_eq!(drain.handle(FIRST_ALONE_MS, DrainEvent::Tick), [begin_w]);
}

/// The first of five VMs is sending, and three are ready.
fn one_sends_and_three_are_ready() -> Drain {
    let moves = ["v", "w", "x", "y", "z"].map(|vm| planned(vm, "b")).to_vec();
    let (mut drain, _) = begin_with(moves, DrainLimits { inbound: 8, ..LIMITS });
    for vm in ["v", "w", "x", "y"] {
        drain.handle(1.0, prepared(vm));
    }
    drain
}

#[test]
fn the_next_one_begins_when_little_is_left_of_another() {
    let mut drain = one_sends_and_three_are_ready();
    assert_eq!(drain.handle(2.0, ending("v")), release_behind("w"));
    // Two near their pauses are enough.
    assert_eq!(drain.handle(3.0, ending("w")), []);
    assert_eq!(drain.handle(4.0, paused("v")), [take_all("w")]);
    assert_eq!(drain.handle(5.0, completed("v")), release_behind("x"));
}

#[test]
fn little_is_left_by_what_was_predicted() {
    let mut drain = one_sends_and_three_are_ready();
    drain.handle(0.0, DrainEvent::Tick);
    let told_after = |drain: &mut Drain, now_ms: f64, share: f64| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a VM")]
        let bytes = (share * GIB as f64) as u64;
        let actions = drain.handle(now_ms, DrainEvent::Arrived { vm: "v".into(), bytes });
        drain.handle(now_ms, DrainEvent::Tick);
        actions
    };
    assert_eq!(told_after(&mut drain, 2_000.0, 0.5), []);
    assert_eq!(told_after(&mut drain, 3_200.0, 0.8), [], "800 ms before its end");
    assert_eq!(told_after(&mut drain, 3_700.0, 0.925), release_behind("w"));
}

#[test]
fn what_does_not_come_to_its_end_keeps_the_links() {
    let mut drain = one_sends_and_three_are_ready();
    drain.handle(2.0, ending("v"));
    drain.handle(3.0, paused("w"));
    drain.handle(100.0, sent("w"));
    assert_eq!(drain.handle(1_500.0, DrainEvent::Tick)[..2], release_behind("x"));
    assert!(
        drain.handle(2_002.0, DrainEvent::Tick).contains(&take_all("x")),
        "it gives way for so long at most"
    );
    assert_eq!(drain.handle(3_000.0, paused("x")), [], "v has them");
    assert_eq!(drain.handle(3_100.0, sent("x")), []);
    assert!(!drain.handle(4_000.0, DrainEvent::Tick).contains(&release("y")), "it has them still");
    assert_eq!(drain.handle(4_001.0, paused("v"))[0], release("y"));
}

/// VMs of a second each fill the links one after the other, with events up to their pauses, and after these.
#[test]
fn what_a_paused_vm_has_sent_and_was_not_told_of_is_not_taken_for_slow_links() {
    let names: Vec<String> = (0..20).map(|vm| format!("v{vm}")).collect();
    let plan = DrainPlan {
        links_mbps: Some(2_000),
        ..plan_of(names.iter().map(|vm| planned(vm, "b")).collect(), &[])
    };
    let limits = DrainLimits { transfers: None, outbound: 20, inbound: 20, ..LIMITS };
    let (mut drain, _) = Drain::begin(plan, limits, 0, -FIRST_ALONE_MS);
    for vm in &names {
        drain.handle(0.0, prepared(vm));
    }
    let arrived =
        |vm: &str, sent_ms: u32| DrainEvent::Arrived { vm: vm.into(), bytes: u64::from(sent_ms) * 237_500 };
    for now in (0..20_000_u32).step_by(50) {
        let (turn, at_ms) = (now / 1_050, now % 1_050);
        let before = turn.checked_sub(1).map(|before| names[before as usize].as_str());
        let vm = names[turn as usize].as_str();
        let mut events = vec![];
        match (at_ms, before) {
            (0, Some(before)) => events.push(paused(before)),
            (100, Some(before)) => events.push(sent(before)),
            (250, Some(before)) => events.extend([arrived(before, 1_050), completed(before)]),
            (850, _) => events.push(ending(vm)),
            _ => {}
        }
        // Their number was sampled a moment ago.
        events.extend([arrived(vm, at_ms.saturating_sub(200)), DrainEvent::Tick]);
        for event in events {
            drain.handle(f64::from(now), event);
        }
        assert_eq!(drain.concurrency.allowed(), 1, "at {now} ms");
    }
}

#[test]
fn nothing_is_begun_in_the_moment_of_a_pause_while_somebody_is_ready() {
    let mut drain = one_sends_and_three_are_ready();
    let begin_z = || vec![DrainAction::Begin { vm: "z".into(), target: "b".into(), post_copy: false }];
    assert_eq!(drain.handle(2.0, ending("v")), release_behind("w"));
    assert_eq!(drain.handle(3.0, paused("v")), [take_all("w")]);
    assert_eq!(drain.handle(203.0, sent("v")), []);
    assert_eq!(drain.handle(900.0, DrainEvent::Tick), []);
    assert_eq!(drain.handle(1_003.0, DrainEvent::Tick), begin_z());
    let mut drain = one_sends_and_three_are_ready();
    drain.handle(2.0, ending("v"));
    drain.handle(3.0, paused("v"));
    assert_eq!(drain.handle(203.0, completed("v")), [], "its clients have yet to hear of it");
    assert_eq!(drain.handle(502.0, DrainEvent::Tick), []);
    assert_eq!(drain.handle(503.0, DrainEvent::Tick), begin_z());
    let (mut drain, _) = begin(&["v", "w", "x", "y", "z"]);
    drain.handle(1.0, prepared("v"));
    assert_eq!(drain.handle(2.0, failed("w")), [DrainAction::Plan], "nobody is ready");
}

#[test]
fn one_target_takes_no_more_at_a_time_than_it_may() {
    let moves = ["v", "w", "x"].map(|vm| planned(vm, if vm == "x" { "c" } else { "b" })).to_vec();
    let (_, actions) = begin_with(moves, DrainLimits { inbound: 1, ..LIMITS });
    assert_eq!(begins(&actions), ["v", "x"]);
}

#[test]
fn who_waits_for_a_place_at_its_target_keeps_nobody_from_another_one() {
    let moves = ["v", "w", "x", "y"].map(|vm| planned(vm, if vm == "y" { "c" } else { "b" })).to_vec();
    let (mut drain, actions) = begin_with(moves, LIMITS);
    assert_eq!(begins(&actions), ["v", "w", "x"]);
    let busy = |vm: &str| DrainEvent::Busy { vm: vm.into() };
    assert_eq!(begins(&drain.handle(1.0, busy("v"))), ["y"]);
    assert_eq!(drain.handle(2.0, prepared("y")), [release("y")]);
    let waits = |drain: &Drain| drain.status(0.0).moves[0].waits.clone();
    assert!(waits(&drain).unwrap().contains("b accepts no more VMs at a time"));
    assert_eq!(drain.handle(3.0, prepared("v")), []);
    assert_eq!((waits(&drain), state(&drain, "v")), (None, MoveState::Ready));
}

#[test]
fn a_vm_that_failed_goes_where_the_new_plan_says() {
    let (mut drain, _) = begin(&["v", "w"]);
    assert_eq!(drain.handle(1.0, failed("v")), [DrainAction::Plan]);
    assert_eq!(state(&drain, "v"), MoveState::Waiting);
    let before_ms = drain.status(2.0).eta_ms.unwrap();
    let slower = plan_of(vec![planned("v", "c")], &[]);
    let slower = DrainPlan { predicted_ms: 2.0 * slower.predicted_ms, ..slower };
    let actions = drain.handle(2.0, DrainEvent::Planned(slower));
    let after_ms = drain.status(2.0).eta_ms.unwrap();
    assert!((after_ms - 2.0 * before_ms).abs() < 1.0, "{before_ms} before, {after_ms} by slower links");
    assert_eq!(actions, [DrainAction::Begin { vm: "v".into(), target: "c".into(), post_copy: false }]);
    assert_eq!(drain.handle(3.0, failed("v")), []);
    assert_eq!((state(&drain, "v"), error(&drain, "v")), (MoveState::Failed, "connection reset".into()));
    assert_eq!(drain.handle(4.0, completed("w")), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Incomplete));
}

#[test]
fn that_others_took_its_room_is_no_attempt_within_bounds() {
    let (mut drain, _) = begin(&["v"]);
    let mut planned_anew = 0;
    while drain.handle(1.0, refused("v")) == [DrainAction::Plan] {
        planned_anew += 1;
        let actions = drain.handle(2.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &[])));
        assert_eq!(begins(&actions), ["v"]);
        assert!(planned_anew < 100, "without end");
    }
    // Eight attempts that do not count, and the first of two that do.
    assert_eq!(planned_anew, 9);
    assert_eq!((state(&drain, "v"), drain.outcome()), (MoveState::Failed, Some(DrainState::Incomplete)));
}

#[test]
fn what_fails_on_the_links_is_an_attempt_whoever_refuses_it() {
    let (mut drain, _) = begin(&["v"]);
    for expected in [vec![DrainAction::Plan], vec![DrainAction::Finish]] {
        drain.handle(1.0, prepared("v"));
        assert_eq!(drain.handle(2.0, refused("v")), expected);
        drain.handle(3.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &[])));
    }
}

#[test]
fn how_many_go_at_a_time_follows_the_targets_of_a_new_plan() {
    let limits = DrainLimits { inbound: 1, transfers: None, ..LIMITS };
    let both = DrainPlan { transfers: 2, ..plan_of(vec![planned("v", "b"), planned("w", "c")], &[]) };
    let (mut drain, _) = Drain::begin(both, limits, 0, 0.0);
    assert_eq!(drain.status(0.0).transfers, 2);
    drain.handle(1.0, failed("w"));
    drain.handle(2.0, DrainEvent::Planned(plan_of(vec![planned("w", "b")], &[])));
    assert_eq!(drain.status(2.0).transfers, 1);
}

#[test]
fn what_the_links_carry_is_known_anew_with_each_plan() {
    let over = |links_mbps, moves| DrainPlan { links_mbps: Some(links_mbps), ..plan_of(moves, &[]) };
    let limits = DrainLimits { transfers: None, ..LIMITS };
    let first = over(1_000, vec![planned("v", "b"), planned("w", "b")]);
    let (mut drain, _) = Drain::begin(first, limits, 0, 0.0);
    drain.handle(1.0, prepared("v"));
    // The VM fills 1 Gb/s.
    let go_on = |drain: &mut Drain, ticks: std::ops::RangeInclusive<u32>| {
        for tick in ticks {
            let now_ms = f64::from(tick) * 200.0;
            drain.handle(
                now_ms,
                DrainEvent::Arrived { vm: "v".into(), bytes: u64::from(tick) * 200 * 118_750 },
            );
            drain.handle(now_ms, DrainEvent::Tick);
        }
        drain.status(8_000.0).transfers
    };
    assert_eq!(go_on(&mut drain, 1..=20), 1, "the links are full");
    assert_eq!(drain.handle(4_000.0, failed("w")), [DrainAction::Plan]);
    drain.handle(4_000.0, DrainEvent::Planned(over(2_000, vec![planned("w", "c")])));
    assert_eq!(go_on(&mut drain, 21..=40), 2, "another link leads to c");
}

#[test]
fn who_fails_while_a_plan_is_made_is_in_the_next_one() {
    let (mut drain, _) = begin(&["v", "w"]);
    assert_eq!(drain.handle(1.0, failed("v")), [DrainAction::Plan]);
    assert_eq!(drain.handle(2.0, failed("w")), []);
    let actions = drain.handle(3.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &["w"])));
    assert_eq!(actions, [DrainAction::Plan]);
    let both = plan_of(vec![planned("v", "c"), planned("w", "b")], &[]);
    assert_eq!(begins(&drain.handle(4.0, DrainEvent::Planned(both))), ["v", "w"]);
}

#[test]
fn what_no_host_can_take_is_looked_at_again_and_then_stays() {
    let (mut drain, _) = begin(&["v"]);
    drain.handle(1.0, failed("v"));
    assert_eq!(drain.handle(2.0, DrainEvent::Planned(plan_of(vec![], &["v"]))), []);
    let mut now_ms = 2.0;
    for _ in 0..LOOKS {
        assert_eq!(drain.handle(now_ms + LOOK_AGAIN_MS - 1.0, DrainEvent::Tick), []);
        now_ms += LOOK_AGAIN_MS;
        assert_eq!(drain.handle(now_ms, DrainEvent::Tick), [DrainAction::Plan]);
        let actions = drain.handle(now_ms, DrainEvent::NotPlanned(Problem::failed("silence")));
        assert_eq!(actions.contains(&DrainAction::Finish), drain.looks == LOOKS);
    }
    assert!(error(&drain, "v").contains("connection reset; after that: there is no other host"));
}

#[test]
fn what_waits_for_room_that_is_to_come_is_looked_at_until_it_comes() {
    let busy = || DrainPlan { await_room: owned(&["w"]), ..plan_of(vec![], &["w"]) };
    let (mut drain, actions) = Drain::begin(busy(), LIMITS, 0, 0.0);
    assert_eq!(actions, []);
    let mut now_ms = 0.0;
    for _ in 0..2 * LOOKS {
        now_ms += LOOK_AGAIN_MS;
        assert_eq!(drain.handle(now_ms, DrainEvent::Tick), [DrainAction::Plan]);
        assert_eq!(drain.handle(now_ms, DrainEvent::Planned(busy())), []);
    }
    now_ms += LOOK_AGAIN_MS;
    assert_eq!(drain.handle(now_ms, DrainEvent::Tick), [DrainAction::Plan]);
    assert_eq!(
        begins(&drain.handle(now_ms, DrainEvent::Planned(plan_of(vec![planned("w", "b")], &[])))),
        ["w"]
    );
    assert_eq!(drain.handle(now_ms, completed("w")), [DrainAction::Finish]);
}

#[test]
fn looks_for_room_do_not_run_out_while_a_vm_is_on_its_way_that_leaves_some() {
    let busy =
        |room_is_coming| DrainPlan { await_room: owned(&["w"]), room_is_coming, ..plan_of(vec![], &["w"]) };
    let look = |drain: &mut Drain, now_ms: &mut f64, room_is_coming| {
        *now_ms += LOOK_AGAIN_MS;
        assert_eq!(drain.handle(*now_ms, DrainEvent::Tick), [DrainAction::Plan]);
        drain.handle(*now_ms, DrainEvent::Planned(busy(room_is_coming)))
    };
    let mut now_ms = 0.0;
    let (mut drain, _) = Drain::begin(busy(true), LIMITS, 0, now_ms);
    for _ in 0..3 * LOOKS_FOR_ROOM {
        assert_eq!(look(&mut drain, &mut now_ms, true), []);
    }
    for _ in 1..LOOKS_FOR_ROOM {
        assert_eq!(look(&mut drain, &mut now_ms, false), []);
    }
    assert_eq!(look(&mut drain, &mut now_ms, false), [DrainAction::Finish]);
    // The drain's own deadline holds all the same.
    let limits = DrainLimits { total_ms: Some(2.5 * LOOK_AGAIN_MS), ..LIMITS };
    let (mut drain, _) = Drain::begin(busy(true), limits, 0, now_ms);
    for _ in 0..2 {
        assert_eq!(look(&mut drain, &mut now_ms, true), []);
    }
    assert_eq!(drain.handle(now_ms + LOOK_AGAIN_MS, DrainEvent::Tick), [DrainAction::Finish]);
}

#[test]
fn in_doubt_is_not_tried_again() {
    let (mut drain, _) = begin(&["v"]);
    assert_eq!(drain.handle(1.0, in_doubt("v")), [DrainAction::Finish]);
    assert_eq!((state(&drain, "v"), drain.outcome()), (MoveState::InDoubt, Some(DrainState::Incomplete)));
}

fn in_doubt(vm: &str) -> DrainEvent {
    DrainEvent::Ended { vm: vm.into(), end: MoveEnd::InDoubt(Problem::failed("the target is silent")) }
}

fn settled(vm: &str, end: MoveEnd) -> DrainEvent {
    DrainEvent::Settled { vm: vm.into(), end }
}

#[test]
fn what_runs_here_after_all_goes_with_the_others() {
    let discarded = || MoveEnd::Failed(Problem::failed("b has discarded it"));
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(0.0, DrainEvent::Begun { vm: "v".into(), migration: "of v".into() });
    drain.handle(1.0, in_doubt("v"));
    assert_eq!(drain.in_doubt().collect::<Vec<_>>(), [("v", "of v")]);
    assert_eq!(drain.handle(2.0, settled("v", discarded())), [DrainAction::Plan]);
    assert_eq!(drain.handle(2.5, settled("v", discarded())), [], "once is enough");
    let actions = drain.handle(3.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &[])));
    assert_eq!(begins(&actions), ["v"]);
    drain.handle(4.0, in_doubt("v"));
    assert_eq!(drain.handle(5.0, settled("v", discarded())), []);
    assert_eq!((state(&drain, "v"), error(&drain, "v")), (MoveState::Failed, "b has discarded it".into()));
    assert_eq!(drain.handle(6.0, settled("w", discarded())), [], "it is under way");
    assert_eq!(drain.handle(7.0, completed("w")), [DrainAction::Finish]);
}

#[test]
fn what_has_moved_after_all_has_moved() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, in_doubt("v"));
    assert_eq!(drain.handle(2.0, settled("v", MoveEnd::Completed { transfer_ms: 7.0 })), []);
    assert_eq!(state(&drain, "v"), MoveState::Moved);
    assert_eq!(drain.handle(3.0, completed("w")), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Drained));
}

#[test]
fn nothing_is_tried_again_once_a_drain_is_cancelled() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, in_doubt("v"));
    drain.handle(2.0, DrainEvent::CancelRequested);
    assert_eq!(drain.handle(3.0, settled("v", MoveEnd::Failed(Problem::failed("discarded")))), []);
    assert_eq!(state(&drain, "v"), MoveState::Failed);
}

#[test]
fn a_vm_whose_migration_somebody_cancelled_is_not_tried_again() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, prepared("v"));
    let end = MoveEnd::Cancelled(Problem::failed("it was cancelled"));
    let next = drain.handle(2.0, DrainEvent::Ended { vm: "v".into(), end });
    assert!(
        next.iter().all(|action| !matches!(action, DrainAction::Begin { vm, .. } if vm == "v")),
        "{next:?}"
    );
    drain.handle(3.0, prepared("w"));
    assert_eq!(drain.handle(4.0, completed("w")), [DrainAction::Finish]);
    assert_eq!((state(&drain, "v"), drain.outcome()), (MoveState::Failed, Some(DrainState::Incomplete)));
    assert_eq!(error(&drain, "v"), "it was cancelled");
}

#[test]
fn cancelling_undoes_what_is_under_way_and_begins_nothing() {
    let (mut drain, _) = begin(&["v", "w", "x", "y"]);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, paused("v"));
    drain.handle(3.0, prepared("w"));
    assert_eq!(drain.handle(4.0, DrainEvent::CancelRequested), [cancel("w"), cancel("x"), cancel("y")]);
    assert_eq!(drain.handle(5.0, prepared("x")), []);
    drain.handle(6.0, failed("w"));
    drain.handle(7.0, failed("x"));
    drain.handle(8.0, completed("v"));
    // The VM was handed over when the order came.
    assert_eq!(drain.handle(9.0, completed("y")), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Cancelled));
    assert_eq!((state(&drain, "v"), state(&drain, "y")), (MoveState::Moved, MoveState::Moved));
    assert!(error(&drain, "w").starts_with("the drain was cancelled"));
}

#[test]
fn after_the_deadline_what_is_on_the_links_goes_on() {
    let plan = plan_of(["v", "w"].map(|vm| planned(vm, "b")).to_vec(), &[]);
    let (mut drain, _) = Drain::begin(plan, DrainLimits { total_ms: Some(100.0), ..LIMITS }, 0, 50.0);
    drain.handle(60.0, prepared("v"));
    assert_eq!(drain.handle(149.0, DrainEvent::Tick), []);
    assert_eq!(drain.handle(150.0, DrainEvent::Tick), [cancel("w")]);
    drain.handle(160.0, failed("w"));
    assert_eq!(drain.handle(170.0, completed("v")), [DrainAction::Finish]);
    assert!(error(&drain, "w").contains("deadline"));
}

#[test]
fn nothing_to_move_is_over_at_once() {
    let (drain, actions) = Drain::begin(plan_of(vec![], &["v"]), LIMITS, 0, 0.0);
    assert_eq!((actions, drain.outcome()), (vec![DrainAction::Finish], Some(DrainState::Incomplete)));
    assert_eq!(begin(&[]).0.outcome(), Some(DrainState::Drained));
}

#[test]
fn bounds_of_zero_are_bounds_of_one() {
    let none = DrainLimits { outbound: 0, inbound: 0, transfers: Some(0), attempts: 0, ..LIMITS };
    let (mut drain, actions) = Drain::begin(plan_of(vec![planned("v", "b")], &[]), none, 0, 0.0);
    assert_eq!(begins(&actions), ["v"]);
    assert_eq!(drain.handle(1.0, prepared("v")), [release("v")]);
}

fn arrived(vm: &str, gib: u64) -> DrainEvent {
    DrainEvent::Arrived { vm: vm.into(), bytes: gib * GIB + 1 }
}

#[test]
fn a_vm_that_does_not_converge_gives_the_links_to_the_others_and_is_tried_after_them() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, prepared("w"));
    assert_eq!(drain.handle(3.0, arrived("v", 1)), []);
    assert_eq!(drain.handle(4.0, arrived("v", 2)), [cancel("v")]);
    assert_eq!(drain.handle(5.0, arrived("v", 3)), []);
    let begin_again = DrainAction::Begin { vm: "v".into(), target: "b".into(), post_copy: false };
    assert_eq!(drain.handle(6.0, failed("v")), [release("w"), begin_again]);
    assert!(error(&drain, "v").contains("it waits until the others have moved"));
    assert_eq!(drain.handle(7.0, prepared("v")), []);
    assert_eq!(drain.handle(8.0, paused("w")), [release("v")]);
    drain.handle(9.0, completed("w"));
    // For a while, the VM keeps nobody waiting any more.
    assert_eq!(drain.handle(10.0, arrived("v", 19)), []);
    assert_eq!(drain.handle(11.0, arrived("v", 20)), [cancel("v")]);
    assert_eq!(drain.handle(12.0, failed("v")), [DrainAction::Finish]);
    assert_eq!((state(&drain, "v"), drain.outcome()), (MoveState::Failed, Some(DrainState::Incomplete)));
    assert!(error(&drain, "v").contains("--throttle"));
}

#[test]
fn giving_way_is_no_failure() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, arrived("v", 2));
    drain.handle(3.0, failed("v"));
    drain.handle(4.0, prepared("w"));
    drain.handle(5.0, completed("w"));
    // The first of two attempts.
    assert_eq!(drain.handle(6.0, failed("v")), [DrainAction::Plan]);
    let actions = drain.handle(7.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &[])));
    assert_eq!(begins(&actions), ["v"]);
    assert_eq!(drain.handle(8.0, failed("v")), [DrainAction::Finish]);
}

#[test]
fn a_plan_that_did_not_know_that_it_gave_way_does_not_take_its_place() {
    let (mut drain, _) = begin(&["v", "w", "x"]);
    drain.handle(1.0, prepared("v"));
    assert_eq!(drain.handle(2.0, failed("w")), [DrainAction::Plan]);
    assert_eq!(drain.handle(3.0, arrived("v", 2)), [cancel("v")]);
    drain.handle(4.0, failed("v"));
    let actions = drain.handle(5.0, DrainEvent::Planned(plan_of(vec![planned("w", "c")], &[])));
    assert_eq!(actions, [DrainAction::Plan]);
    let both = plan_of(vec![planned("v", "b"), planned("w", "c")], &[]);
    assert_eq!(begins(&drain.handle(6.0, DrainEvent::Planned(both))), ["w", "v"]);
}

#[test]
fn past_the_deadline_no_time_is_left_for_what_does_not_converge() {
    let plan = plan_of(["v", "w"].map(|vm| planned(vm, "b")).to_vec(), &[]);
    let (mut drain, _) = Drain::begin(plan, DrainLimits { total_ms: Some(100.0), ..LIMITS }, 0, 0.0);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, arrived("v", 2));
    drain.handle(3.0, failed("v"));
    drain.handle(4.0, prepared("w"));
    drain.handle(5.0, completed("w"));
    assert_eq!(drain.handle(6.0, prepared("v")), [release("v")]);
    assert_eq!(drain.handle(100.0, DrainEvent::Tick), [cancel("v")]);
}

/// Moves these VMs over links that carry `rate`, one at a time. Each takes `step_ms` to be prepared, and as long from
/// its last byte to its end. Returns the reported time left, and the true one, both from each fifth of a second on.
fn etas(plan: DrainPlan, rate: f64, step_ms: f64) -> Vec<(f64, f64)> {
    let bytes_of_each = plan.moves[0].predicted_bytes as f64;
    let (mut drain, first) = Drain::begin(plan, LIMITS, 0, 0.0);
    let due = |begun: &[&str], at_ms: f64| -> Vec<(String, f64)> {
        begun.iter().map(|vm| ((*vm).to_owned(), at_ms)).collect()
    };
    let mut preparing = due(&begins(&first), step_ms);
    let (mut on_links, mut finishing) = (Vec::<(String, f64)>::new(), Vec::<(String, f64)>::new());
    let (mut now_ms, mut estimates) = (0.0, vec![]);
    while drain.outcome().is_none() {
        now_ms += 200.0;
        let mut events = vec![DrainEvent::Tick];
        events.extend(preparing.extract_if(.., |(_, at_ms)| *at_ms <= now_ms).map(|(vm, _)| prepared(&vm)));
        events.extend(finishing.extract_if(.., |(_, at_ms)| *at_ms <= now_ms).map(|(vm, _)| completed(&vm)));
        let each = rate * 200.0 / on_links.len().max(1) as f64;
        for (vm, bytes) in &mut on_links {
            *bytes += each;
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a VM")]
            events.push(DrainEvent::Arrived { vm: vm.clone(), bytes: *bytes as u64 });
        }
        for (vm, _) in on_links.extract_if(.., |(_, bytes)| *bytes >= bytes_of_each) {
            events.push(paused(&vm));
            finishing.push((vm, now_ms + step_ms));
        }
        for event in events {
            for action in drain.handle(now_ms, event) {
                match action {
                    DrainAction::Begin { vm, .. } => preparing.push((vm, now_ms + step_ms)),
                    DrainAction::Release { vm } => on_links.push((vm, 0.0)),
                    _ => {}
                }
            }
        }
        if let Some(eta_ms) = drain.status(now_ms).eta_ms {
            estimates.push((now_ms, eta_ms));
        }
    }
    estimates.into_iter().map(|(at_ms, eta_ms)| (eta_ms, now_ms - at_ms)).collect()
}

#[test]
fn the_time_left_that_is_told_comes_true() {
    let vms = ["s", "t", "u", "v", "w", "x", "y", "z"].map(|vm| planned(vm, "b"));
    // At the planned rate, and at half of it: then the time left is right after some seconds.
    for (rate, known_after) in [(LINKS, 0), (LINKS / 2.0, 30)] {
        let estimates = etas(plan_of(vms.to_vec(), &[]), rate, 0.0);
        for (eta_ms, took_ms) in &estimates[known_after..] {
            assert!((eta_ms - took_ms).abs() < 0.1 * took_ms + 600.0, "{eta_ms} was told, {took_ms} it took");
        }
    }
}

#[test]
fn where_steps_take_longer_than_planned_the_time_left_comes_true_after_some_vms() {
    let small = |number: usize| Move {
        predicted_bytes: GIB / 8,
        predicted_steps_ms: 150.0,
        predicted_transfer_ms: 700.0,
        ..planned(&format!("vm{number}"), "b")
    };
    // Four are under way at a time, each for some 10 s, with gaps of seconds on the links: 37 s were planned.
    let plan = DrainPlan { predicted_ms: 37_000.0, ..plan_of((0..53).map(small).collect(), &[]) };
    let estimates = etas(plan, LINKS, 4_500.0);
    let took_ms = estimates[0].1;
    assert!((80_000.0..200_000.0).contains(&took_ms), "{took_ms}");
    let known = estimates.iter().filter(|(_, left_ms)| (took_ms * 0.2..took_ms * 0.85).contains(left_ms));
    for (eta_ms, left_ms) in known {
        assert!((eta_ms / left_ms - 1.0).abs() < 0.35, "{eta_ms} was told, {left_ms} it took of {took_ms}");
    }
}

fn departure() -> Departure {
    Departure { target: "z".into(), migration: "by hand".into(), memory_bytes: GIB }
}

fn left(vm: &str) -> DrainEvent {
    DrainEvent::Left { vm: vm.into(), departure: departure() }
}

#[test]
fn who_was_moved_by_somebody_else_has_left_and_is_no_failure() {
    let moves = ["v", "w", "x"].map(|vm| planned(vm, "b")).to_vec();
    let (mut drain, _) = Drain::begin(plan_of(moves, &["y"]), DrainLimits { outbound: 1, ..LIMITS }, 0, 0.0);
    assert_eq!(drain.unmoved().collect::<Vec<_>>(), ["w", "x", "y"]);
    // The drain's own moves are reported by their migrations.
    assert_eq!(drain.handle(1.0, left("v")), []);
    assert_eq!(state(&drain, "v"), MoveState::Preparing);
    assert_eq!(drain.handle(2.0, left("w")), []);
    assert_eq!(drain.handle(3.0, left("y")), []);
    assert_eq!(begins(&drain.handle(4.0, completed("v"))), ["x"]);
    let gone = DrainEvent::Ended { vm: "x".into(), end: MoveEnd::Left(departure()) };
    assert_eq!(drain.handle(5.0, gone), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Drained));
    let status = drain.status(6.0);
    assert_eq!((status.moved(), status.left(), status.all_moved()), (1, 3, true));
    for vm in ["w", "x", "y"] {
        let one = status.moves.iter().find(|one| one.vm == vm).unwrap();
        assert_eq!((one.target.as_str(), one.migration.as_deref()), ("z", Some("by hand")));
        assert_eq!((one.error.clone(), one.memory_bytes), (None, GIB));
    }
}

#[test]
fn who_has_left_after_it_had_failed_is_no_failure() {
    let (mut drain, _) = begin(&["v"]);
    drain.handle(1.0, failed("v"));
    assert_eq!(drain.handle(2.0, DrainEvent::Planned(plan_of(vec![], &["v"]))), []);
    assert_eq!(drain.handle(3.0, left("v")), [DrainAction::Finish]);
    assert_eq!((state(&drain, "v"), drain.outcome()), (MoveState::Left, Some(DrainState::Drained)));
}

#[test]
fn a_plan_that_was_made_before_it_left_moves_it_no_more() {
    let (mut drain, _) = begin(&["v"]);
    assert_eq!(drain.handle(1.0, failed("v")), [DrainAction::Plan]);
    assert_eq!(drain.handle(2.0, left("v")), []);
    let actions = drain.handle(3.0, DrainEvent::Planned(plan_of(vec![planned("v", "c")], &[])));
    assert_eq!(actions, [DrainAction::Finish]);
    assert_eq!(state(&drain, "v"), MoveState::Left);
}

#[test]
fn no_time_is_left_for_what_is_taken_back() {
    let (mut drain, _) = begin(&["v", "w"]);
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, prepared("w"));
    drain.handle(200.0, DrainEvent::Arrived { vm: "v".into(), bytes: 40 << 20 });
    drain.handle(200.0, DrainEvent::Tick);
    assert!(drain.status(200.0).eta_ms.unwrap() > 4_000.0);
    assert_eq!(drain.handle(201.0, DrainEvent::CancelRequested), [cancel("v"), cancel("w")]);
    assert_eq!(drain.status(201.0).eta_ms, Some(0.0));
}

#[test]
fn who_is_moved_by_somebody_else_counts_among_those_that_leave() {
    let moves = || ["v", "w", "x"].map(|vm| planned(vm, "b")).to_vec();
    let limits = DrainLimits { outbound: 3, transfers: Some(3), ..LIMITS };
    let all = DrainPlan { transfers: 3, ..plan_of(moves(), &[]) };
    let (mut drain, actions) = Drain::begin(all, limits, 2, -FIRST_ALONE_MS);
    assert_eq!(begins(&actions), ["v"]);
    assert_eq!(begins(&drain.handle(0.0, DrainEvent::OthersLeave { count: 1 })), ["w"]);
    assert_eq!(drain.handle(1.0, DrainEvent::OthersLeave { count: 3 }), []);
    assert_eq!(begins(&drain.handle(2.0, completed("v"))), [""; 0]);
    let waits = |drain: &Drain| drain.status(2.0).moves[2].waits.clone();
    assert!(
        waits(&drain)
            .unwrap()
            .contains("somebody else is moving 3 VMs away from this host, and no more than 3")
    );
    assert_eq!(drain.handle(2.0, DrainEvent::OthersLeave { count: 2 }), []);
    assert!(waits(&drain).is_some());
    assert_eq!(begins(&drain.handle(3.0, DrainEvent::OthersLeave { count: 1 })), ["x"]);
    assert_eq!(waits(&drain), None);
}

const WITH_POST_COPY: DrainLimits = DrainLimits { post_copy: true, ..LIMITS };

fn by_post_copy(vm: &str) -> DrainAction {
    DrainAction::Begin { vm: vm.into(), target: "b".into(), post_copy: true }
}

#[test]
fn where_post_copy_is_allowed_a_vm_that_does_not_converge_goes_by_it_next() {
    let plan = plan_of(["v"].map(|vm| planned(vm, "b")).to_vec(), &[]);
    let (mut drain, _) = Drain::begin(plan, WITH_POST_COPY, 0, 0.0);
    drain.handle(1.0, prepared("v"));
    // Though nobody waits for the links.
    assert_eq!(drain.handle(2.0, arrived("v", 2)), [cancel("v")]);
    assert_eq!(drain.handle(3.0, failed("v")), [by_post_copy("v")]);
    drain.handle(4.0, prepared("v"));
    assert_eq!(drain.handle(5.0, arrived("v", 3)), [], "it comes to an end");
    drain.handle(6.0, paused("v"));
    drain.handle(7.0, DrainEvent::RestFollows { vm: "v".into() });
    assert_eq!(state(&drain, "v"), MoveState::Transferring);
    assert_eq!(drain.handle(8.0, completed("v")), [DrainAction::Finish]);
    assert_eq!(drain.outcome(), Some(DrainState::Drained));
}

#[test]
fn what_is_planned_to_go_by_post_copy_does_and_keeps_the_links_until_all_of_it_is_there() {
    let busy = Move { post_copy: true, ..planned("v", "b") };
    let plan = plan_of(vec![busy, planned("w", "b")], &[]);
    let (mut drain, first) = Drain::begin(plan, WITH_POST_COPY, 0, 0.0);
    assert_eq!(first[0], by_post_copy("v"));
    drain.handle(1.0, prepared("v"));
    drain.handle(2.0, prepared("w"));
    drain.handle(3.0, paused("v"));
    drain.handle(4.0, DrainEvent::RestFollows { vm: "v".into() });
    assert!(
        !drain.handle(60_000.0, DrainEvent::Tick).contains(&release("w")),
        "the rest of v is on the links"
    );
    drain.handle(60_001.0, DrainEvent::Sent { vm: "v".into() });
    drain.handle(60_002.0, completed("v"));
    assert_eq!(state(&drain, "w"), MoveState::Transferring);
}

/// A VM with a disk that is copied between the same two devices.
fn with_disk(vm: &str, from_device: u64) -> Move {
    let copy = DiskCopy {
        disk: DiskName::at(0).unwrap(),
        from: format!("/srv/{vm}"),
        to: format!("/srv/{vm}"),
        image: DiskImage::Raw,
        size_bytes: GIB,
        allocated_bytes: GIB,
        why: CopyReason::NotSeen,
        is_flattened: false,
        from_device: None,
    };
    Move { disks: vec![DrainedDisk { copy, from_device, to_device: 7 }], ..planned(vm, "b") }
}

fn copied(vm: &str, bytes: u64) -> DrainEvent {
    DrainEvent::DisksCopied { vm: vm.into(), bytes }
}

fn memory_follows(vm: &str) -> DrainEvent {
    DrainEvent::MemoryFollows { vm: vm.into() }
}

#[test]
fn the_next_disk_is_copied_when_the_memory_of_the_last_one_follows() {
    let moves = vec![planned("v", "b"), with_disk("x", 1), with_disk("y", 1), with_disk("z", 2)];
    let (mut drain, actions) = begin_with(moves, LIMITS);
    assert_eq!(begins(&actions), ["v", "x", "z"], "one for each pair of devices, after all others");
    assert_eq!(drain.handle(10.0, prepared("x")), [release("x")], "its turn came when it was begun");
    assert_eq!(drain.handle(20.0, prepared("v")), [release("v")]);
    assert_eq!(drain.handle(30.0, copied("x", GIB / 2)), []);
    let row = |drain: &Drain| drain.status(0.0).moves.into_iter().find(|row| row.vm == "x").unwrap();
    let disks = row(&drain).disks.unwrap();
    assert!(disks.are_being_copied && disks.copied_bytes == GIB / 2, "{disks:?}");
    assert_eq!(begins(&drain.handle(40.0, memory_follows("x"))), ["y"]);
    assert!(!row(&drain).disks.unwrap().are_being_copied);
    assert_eq!(state(&drain, "x"), MoveState::Transferring);
    drain.handle(50.0, paused("x"));
    drain.handle(60.0, completed("x"));
    assert_eq!(state(&drain, "x"), MoveState::Moved);
}

#[test]
fn what_was_not_told_of_a_disk_follows_from_what_is() {
    let (mut drain, _) = begin_with(vec![with_disk("x", 1)], LIMITS);
    drain.handle(10.0, prepared("x"));
    drain.handle(20.0, paused("x"));
    assert_eq!(state(&drain, "x"), MoveState::Finishing);
    let (mut drain, _) = begin_with(vec![with_disk("x", 1), with_disk("y", 1)], LIMITS);
    drain.handle(10.0, prepared("x"));
    let arrived = DrainEvent::Arrived { vm: "x".into(), bytes: 1 };
    assert_eq!(begins(&drain.handle(20.0, arrived)), ["y"]);
}

#[test]
fn a_copy_that_fails_is_tried_again_and_one_under_way_survives_the_deadline() {
    let limits = DrainLimits { total_ms: Some(60_000.0), ..LIMITS };
    let (mut drain, _) = begin_with(vec![with_disk("x", 1), with_disk("y", 1)], limits);
    drain.handle(10.0, prepared("x"));
    assert_eq!(drain.handle(20.0, failed("x")), [DrainAction::Plan]);
    let again = plan_of(vec![with_disk("x", 1), with_disk("y", 1)], &[]);
    assert_eq!(begins(&drain.handle(30.0, DrainEvent::Planned(again))), ["x"]);
    drain.handle(40.0, prepared("x"));
    assert_eq!(drain.handle(70_000.0, DrainEvent::Tick), [], "it is on the links");
    assert_eq!(drain.handle(70_001.0, DrainEvent::CancelRequested), [cancel("x")]);
}

#[test]
fn who_copies_disks_does_not_give_the_links_to_others_when_it_does_not_converge() {
    let (mut drain, _) = begin_with(vec![with_disk("x", 1), planned("v", "b")], LIMITS);
    drain.handle(10.0, prepared("x"));
    let arrived = |gib| DrainEvent::Arrived { vm: "x".into(), bytes: gib * GIB };
    assert_eq!(drain.handle(20.0, arrived(4)), [], "its disks would be copied again");
    assert_eq!(drain.handle(30.0, arrived(21)), [cancel("x")], "but this has no end");
}
