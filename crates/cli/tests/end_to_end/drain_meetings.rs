//! Drains that meet other events: the journal cannot be written, the way back is cancelled, two hosts are emptied into
//! each other or into a third, VMs belong together, a VM changes its memory too fast.

use std::thread;

use drainpipe_api_types::{DrainPlanView, DrainView, MigrationView};
use drainpipe_engine::drain::status::{DrainState, MoveState};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use jiff::{SignedDuration, Timestamp};
use rustix::process::Signal;
use serde_json::json;

use crate::Test;
use crate::drain::{
    NAMES, ask, assert_nowhere_but, assert_state, count, drain, drain_until_one_is_in_flight, ended,
    fast_lab, host_of, restart_agent_with_memory, resume, slow_lab, start_guests, start_small, status, view,
    wait_until,
};
use crate::guest::Guest;
use crate::scene::{SmallDisk, result_of};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("a_drain_is_cancelled_while_its_journal_is_full", a_drain_is_cancelled_while_its_journal_is_full),
    ("the_way_back_is_cancelled_and_carried_on", the_way_back_is_cancelled_and_carried_on),
    ("two_hosts_are_emptied_into_each_other", two_hosts_are_emptied_into_each_other),
    ("two_hosts_are_emptied_into_a_third_which_takes_one_at_a_time", two_hosts_are_emptied_into_a_third),
    ("who_is_moved_by_hand_meanwhile_has_left_and_is_no_failure", who_is_moved_by_hand_meanwhile_has_left),
    ("who_changes_too_fast_goes_last_and_is_throttled", who_changes_too_fast_goes_last_and_is_throttled),
    ("what_must_be_together_goes_together_or_stays", what_must_be_together_goes_together_or_stays),
];

fn a_drain_is_cancelled_while_its_journal_is_full() {
    let lab = slow_lab();
    let disk = SmallDisk::under_journal(&lab, "a", 4);
    let guests = start_guests(&lab);
    let in_flight = drain_until_one_is_in_flight(&lab, &["b", "c"]);
    let mut moves = status(&in_flight).moves.iter();
    let first = moves.find(|one| one.state == MoveState::Transferring).unwrap();
    disk.fill();
    ask::<DrainView>(&lab, "a", "/v1/drain/cancel", Some(json!(null))).unwrap();
    let waits = wait_until(&lab, "a", "it says why it waits", |view| status(view).obstacle.is_some());
    let obstacle = status(&waits).obstacle.as_ref().unwrap();
    assert!(obstacle.message.contains("is its disk full"), "{obstacle}");
    let path = format!("/v1/migrations/{}", first.migration.as_ref().unwrap());
    eventually("what was on the links is back", || {
        let migration: MigrationView = ask(&lab, "a", &path, None).unwrap();
        migration.result.is_some_and(|result| result.outcome == Outcome::Cancelled)
    });
    assert!(view(&lab, "a").ended_at.is_none(), "its end is not written down yet");
    guests.iter().for_each(Guest::assert_intact);
    disk.free();
    let cancelled = ended(&lab, "a");
    assert_state(&cancelled, DrainState::Cancelled, 0);
    assert_eq!(status(&cancelled).obstacle, None);
    drain(&lab, "a", json!({}));
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
    guests.iter().for_each(Guest::assert_intact);
}

fn the_way_back_is_cancelled_and_carried_on() {
    let lab = slow_lab();
    let guests = start_guests(&lab);
    drain(&lab, "a", json!({}));
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
    resume(&lab, "a", true);
    wait_until(&lab, "a", "one is on the links", |view| count(view, MoveState::Transferring) > 0);
    ask::<DrainView>(&lab, "a", "/v1/drain/cancel", Some(json!(null))).unwrap();
    let cancelled = ended(&lab, "a");
    let back = count(&cancelled, MoveState::Moved);
    assert_state(&cancelled, DrainState::Cancelled, back);
    assert!(back < NAMES.len() && !cancelled.cordoned, "{cancelled:#?}");
    assert_nowhere_but(&lab, &NAMES, &["a", "b", "c"]);
    resume(&lab, "a", true);
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len() - back);
    assert_nowhere_but(&lab, &NAMES, &["a"]);
    guests.iter().for_each(Guest::assert_intact);
}

/// Somebody moves a VM that must stay, and one whose turn has not come: three are prepared while one is on the links.
/// Another one that must stay is moved after the drain.
fn who_is_moved_by_hand_meanwhile_has_left() {
    let lab = slow_lab();
    let guest = lab.start_guest("large", 160, "");
    for vm in ["bound", "late"] {
        start_small(&lab, vm, "[placement]\nstays = \"licence bound to this host\"");
    }
    for vm in ["s1", "s2", "s3", "s4"] {
        start_small(&lab, vm, "");
    }
    drain(&lab, "a", json!({ "to": ["b"], "transfers": 1 }));
    // The plan says which of them waits: on a busy host, not all memory can be sampled.
    let alone = |view: &DrainView| {
        let mut waiting = status(view).moves.iter().filter(|one| one.state == MoveState::Waiting);
        waiting.next().filter(|_| waiting.next().is_none()).map(|one| one.vm.clone())
    };
    let seen = wait_until(&lab, "a", "one is on the links and one waits", |view| {
        view.status.is_some() && count(view, MoveState::Transferring) == 1 && alone(view).is_some()
    });
    let waiting = alone(&seen).unwrap();
    // Both at once, since the drain begins with the waiting one when the one on the links has moved.
    let moving = [waiting.as_str(), "bound"].map(|vm| lab.start(&["migrate", vm, "c"]));
    for one in moving {
        one.wait().done();
    }
    let over = ended(&lab, "a");
    assert_state(&over, DrainState::Incomplete, 4);
    assert_eq!((count(&over, MoveState::Left), status(&over).stays.len()), (2, 1), "{over:#?}");
    lab.drainpipe(&["migrate", "late", "c"]).done();
    let drained = view(&lab, "a");
    assert_state(&drained, DrainState::Drained, 4);
    for vm in ["bound", "late", &waiting] {
        let one = status(&drained).moves.iter().find(|one| one.vm == vm).unwrap();
        assert_eq!((one.state, one.target.as_str()), (MoveState::Left, "c"), "{drained:#?}");
        assert_eq!(one.error, None, "{drained:#?}");
        // The drain may have come to the waiting VM when that was already on its way.
        assert!(one.attempts == 0 || one.vm == waiting, "{drained:#?}");
    }
    assert_eq!(status(&drained).stays, []);
    // What somebody else has moved is not brought back.
    resume(&lab, "a", true);
    assert_state(&ended(&lab, "a"), DrainState::Drained, 4);
    assert_nowhere_but(&lab, &["bound", "late", &waiting], &["c"]);
    guest.assert_intact();
}

fn two_hosts_are_emptied_into_each_other() {
    let lab = fast_lab();
    for vm in ["web", "shop", "db", "other"] {
        start_small(&lab, vm, "");
    }
    lab.drainpipe(&["migrate", "db", "b"]).done();
    lab.drainpipe(&["migrate", "other", "c"]).done();
    thread::scope(|scope| {
        scope.spawn(|| drain(&lab, "a", json!({ "to": ["b"] })));
        scope.spawn(|| drain(&lab, "b", json!({ "to": ["a"] })));
    });
    let both = ["a", "b"].map(|host| ended(&lab, host));
    assert_nowhere_but(&lab, &["web", "shop", "db"], &["a", "b"]);
    for (view, other) in both.iter().zip(["b", "a"]) {
        assert_ne!(status(view).state, DrainState::Drained, "one waits for the other at least: {both:#?}");
        let reported = format!("{:?}", status(view));
        assert!(reported.contains(&format!("drainpipe resume {other}")), "{view:#?}");
    }
    // First they may not change places; then they may.
    for (host, vms) in [("a", &["web", "shop"][..]), ("b", &["db"])] {
        resume(&lab, host, false);
        for vm in vms.iter().filter(|vm| host_of(&lab, vm) != host) {
            lab.drainpipe(&["migrate", vm, host]).done();
        }
    }
    let both = Some(json!({ "to": ["c"], "swap_with": "b" }));
    let refused = ask::<DrainView>(&lab, "a", "/v1/drain", both).unwrap_err();
    assert!(refused.message.contains("name no others"), "{refused}");
    let drains = [("a", json!({ "swap_with": "b" })), ("b", json!({ "swap_with": "a" }))];
    thread::scope(|scope| {
        for (host, request) in drains.clone() {
            let lab = &lab;
            scope.spawn(move || drain(lab, host, request));
        }
    });
    let has_changed = || {
        assert_nowhere_but(&lab, &["web", "shop"], &["b"]);
        assert_nowhere_but(&lab, &["db"], &["a"]);
    };
    for (host, moved) in [("a", 2), ("b", 1)] {
        assert_state(&ended(&lab, host), DrainState::Drained, moved);
    }
    has_changed();
    // A VM that came by the swap is not sent back, and no other host's VMs may come.
    for (host, request) in drains {
        drain(&lab, host, request);
        assert_eq!(status(&ended(&lab, host)).state, DrainState::Drained);
    }
    has_changed();
    let socket = lab.agent_socket("c");
    lab.drainpipe(&["migrate", "other", "a", "--agent", &socket]).refused(3, &["a is cordoned"]);
}

fn two_hosts_are_emptied_into_a_third() {
    let lab = fast_lab();
    let vms = ["a1", "a2", "c1", "c2"];
    for vm in vms {
        start_small(&lab, vm, "");
    }
    for vm in ["c1", "c2"] {
        lab.drainpipe(&["migrate", vm, "c"]).done();
    }
    lab.configure("b", "name = \"b\"\n", "name = \"b\"\ndrain.inbound = 1\n");
    lab.stop_agent("b", Signal::TERM);
    lab.start_agent("b");
    let views = thread::scope(|scope| {
        let both = ["a", "c"].map(|host| {
            let lab = &lab;
            scope.spawn(move || {
                drain(lab, host, json!({ "to": ["b"] }));
                ended(lab, host)
            })
        });
        both.map(|drained| drained.join().unwrap())
    });
    for view in &views {
        assert_state(view, DrainState::Drained, 2);
    }
    assert_nowhere_but(&lab, &vms, &["b"]);
    let mut ways = vec![];
    for (host, view) in ["a", "c"].iter().zip(&views) {
        for one in &status(view).moves {
            let path = format!("/v1/migrations/{}", one.migration.as_ref().unwrap());
            ways.push(ask::<MigrationView>(&lab, host, &path, None).unwrap().result.unwrap());
        }
    }
    let waited =
        |way: &&MigrationResult| way.record.events.iter().any(|event| event.what.contains("b takes 1 VMs"));
    assert!(ways.iter().filter(waited).count() >= 2, "{ways:#?}");
    ways.sort_by_key(place_from);
    for pair in ways.windows(2) {
        let over = started_at(&pair[0]) + SignedDuration::from_secs_f64(pair[0].times.total_ms / 1e3);
        assert!(place_from(&pair[1]) > over - SLACK, "both were on their way to b: {pair:#?}");
    }
}

/// How long a migration's end may take after its VM runs on its target.
const SLACK: SignedDuration = SignedDuration::from_millis(700);

fn started_at(way: &MigrationResult) -> Timestamp {
    way.started_at.parse().unwrap()
}

/// When the VM got its place at the target: its third step begins.
fn place_from(way: &MigrationResult) -> Timestamp {
    let event = way.record.events.iter().find(|event| event.step == Step::AllocateMemory).unwrap();
    started_at(way) + SignedDuration::from_secs_f64(event.ms / 1e3)
}

fn who_changes_too_fast_goes_last_and_is_throttled() {
    let lab = TestLab::up(&["--link", "200", "--link", "200"]);
    let guest = lab.start_guest("busy", 160, "drainpipe.dirty_mib_per_s=400");
    start_small(&lab, "idle", "");
    // On a machine without free CPU, the memory may be sampled too late.
    eventually("it is planned to go last", || {
        let plan: DrainPlanView = ask(&lab, "a", "/v1/drain/plan", Some(json!({}))).unwrap();
        let [first, last] = plan.plan.moves.as_slice() else { panic!("{plan:#?}") };
        let goes_last = last.warning.as_ref().is_some_and(|warning| warning.contains("so it goes last"));
        goes_last && [&first.vm, &last.vm] == ["idle", "busy"]
    });
    let migrating = lab.start(&["migrate", "busy", "b", "--throttle", "30", "--json"]);
    let under_way = || lab.migrations("a").into_iter().find(|view| view.vm == "busy");
    eventually("it is throttled", || {
        let progress = under_way().and_then(|view| view.progress);
        progress.is_some_and(|progress| progress.throttle_percent == Some(30))
    });
    lab.drainpipe(&["cancel", &under_way().unwrap().id]).done();
    let result = result_of(&migrating.wait());
    assert_eq!(
        (result.outcome, result.memory.throttle_percent),
        (Outcome::Cancelled, Some(30)),
        "{result:#?}"
    );
    assert!(result.record.events.iter().any(|event| event.what.contains("throttled by 30 %")), "{result:#?}");
    lab.assert_runs_on("busy", "a");
    guest.assert_answers();
}

fn what_must_be_together_goes_together_or_stays() {
    let lab = fast_lab();
    let together = |group: &str, more: &str| format!("[placement]\ntogether = [\"{group}\"]\n{more}");
    start_small(&lab, "db", &together("shop", ""));
    start_small(&lab, "web", &together("shop", ""));
    start_small(&lab, "bound", &together("house", "stays = \"licence\"\n"));
    start_small(&lab, "mate", &together("house", ""));
    // Two of them fit on each host. The room on b is larger, so placing them one by one would part them.
    restart_agent_with_memory(&lab, "b", 500);
    restart_agent_with_memory(&lab, "c", 450);
    drain(&lab, "a", json!({}));
    let drained = ended(&lab, "a");
    assert_state(&drained, DrainState::Incomplete, 2);
    assert_eq!(host_of(&lab, "db"), host_of(&lab, "web"));
    assert_nowhere_but(&lab, &["bound", "mate"], &["a"]);
    let stays = &status(&drained).stays;
    let mate = stays.iter().find(|stay| stay.vm == "mate").unwrap();
    assert!(mate.why.to_string().contains("must be together with bound"), "{stays:#?}");
}
