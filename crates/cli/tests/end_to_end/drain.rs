//! Emptying a host, and bringing back what left it. Whatever happens meanwhile, each VM runs exactly once, and what the
//! drain reports is true.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_api_types::{
    DrainKind, DrainPlanView, DrainView, HostStatus, MigrationView, PLAN_DEADLINE, VmState,
};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::problem::{Problem, ProblemKind};
use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::Test;
use crate::backend::Backend;
use crate::check_vms::restart_agent_with_mounts;
use crate::guest::Guest;
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("all_vms_leave_and_come_back", all_vms_leave_and_come_back),
    ("a_cordoned_host_takes_no_vm_and_starts_none", a_cordoned_host_takes_no_vm_and_starts_none),
    ("what_must_stay_stays_and_what_must_be_apart_is", what_must_stay_stays_and_what_must_be_apart_is),
    (
        "a_link_that_outruns_each_target_carries_to_both_at_once",
        a_link_that_outruns_each_target_carries_to_both_at_once,
    ),
    ("a_drain_is_cancelled_and_carried_on", a_drain_is_cancelled_and_carried_on),
    ("a_target_that_takes_no_more_is_replaced", a_target_that_takes_no_more_is_replaced),
    ("a_targets_agent_is_killed", a_targets_agent_is_killed),
    ("the_drained_hosts_agent_is_killed_or_stopped", the_drained_hosts_agent_is_killed_or_stopped),
    ("the_way_back_leaves_alone_what_has_moved_on", the_way_back_leaves_alone_what_has_moved_on),
    ("a_target_becomes_full", a_target_becomes_full),
];

/// The longest drain of three guests on a machine that runs other tests too.
const DRAIN_MAX: Duration = Duration::from_secs(150);

/// The memory of a VM without a guest.
const SMALL_MIB: u64 = 64;

/// A guest whose flight over [`slow_lab`] takes several seconds.
const GUEST_MIB: u64 = 160;

pub(crate) const NAMES: [&str; 2] = ["db", "web"];

pub(crate) fn fast_lab() -> TestLab {
    TestLab::up(&["--hosts", "a,b,c", "--link", "unlimited", "--link", "unlimited"])
}

/// A lab slow enough that a test can do in mid-flight what it wants to.
pub(crate) fn slow_lab() -> TestLab {
    TestLab::up(&["--hosts", "a,b,c", "--link", "60", "--link", "60"])
}

/// Asks a host's agent, as root on that host.
pub(crate) fn ask<T: DeserializeOwned>(
    lab: &TestLab,
    host: &str,
    path: &str,
    body: Option<Value>,
) -> Result<T, Problem> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = ApiClient::over_socket(lab.agent_socket(host).as_ref()).unwrap();
    runtime.block_on(async {
        match body {
            Some(body) => client.post_within(path, &body, PLAN_DEADLINE).await,
            None => client.get(path).await,
        }
    })
}

#[track_caller]
pub(crate) fn drain(lab: &TestLab, host: &str, request: Value) -> DrainView {
    ask(lab, host, "/v1/drain", Some(request)).unwrap()
}

#[track_caller]
pub(crate) fn resume(lab: &TestLab, host: &str, failback: bool) -> DrainView {
    ask(lab, host, "/v1/resume", Some(json!({ "failback": failback }))).unwrap()
}

#[track_caller]
pub(crate) fn view(lab: &TestLab, host: &str) -> DrainView {
    ask(lab, host, "/v1/drain", None).unwrap()
}

/// Waits until the drain or the way back has ended.
#[track_caller]
pub(crate) fn ended(lab: &TestLab, host: &str) -> DrainView {
    wait_until(lab, host, "it has ended", |view| view.ended_at.is_some())
}

#[track_caller]
pub(crate) fn wait_until(
    lab: &TestLab,
    host: &str,
    what: &str,
    is_so: impl Fn(&DrainView) -> bool,
) -> DrainView {
    let end = Instant::now() + DRAIN_MAX;
    loop {
        let view = view(lab, host);
        if is_so(&view) {
            return view;
        }
        assert!(Instant::now() < end, "{what}: not within {DRAIN_MAX:?}: {view:#?}");
        // A drain takes a minute, and reports a lot.
        thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn status(view: &DrainView) -> &DrainStatus {
    view.status.as_ref().expect("there was a drain")
}

pub(crate) fn count(view: &DrainView, state: MoveState) -> usize {
    status(view).moves.iter().filter(|one| one.state == state).count()
}

#[track_caller]
pub(crate) fn assert_state(view: &DrainView, state: DrainState, moved: usize) {
    assert_eq!((status(view).state, count(view, MoveState::Moved)), (state, moved), "{view:#?}");
}

/// A VM that runs only firmware; `more` ends its specification.
#[track_caller]
pub(crate) fn start_small(lab: &TestLab, name: &str, more: &str) {
    if Backend::of_test() == Backend::Libvirt {
        return lab.start_small_domain(name, SMALL_MIB, more);
    }
    create_small(lab, name, more);
    lab.drainpipe(&["vm", "start", name]).done();
}

#[track_caller]
fn create_small(lab: &TestLab, name: &str, more: &str) {
    let specification = format!(
        "name = \"{name}\"\nmemory_mib = {SMALL_MIB}\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n\
         accelerator = \"tcg\"\n{more}\n"
    );
    lab.create(&specification, name);
}

#[track_caller]
pub(crate) fn start_guests(lab: &TestLab) -> Vec<Guest> {
    NAMES.iter().map(|name| lab.start_guest(name, GUEST_MIB, "")).collect()
}

/// The host on which a VM runs; fails the test unless the VM runs once, and nothing of it is elsewhere.
#[track_caller]
pub(crate) fn host_of(lab: &TestLab, vm: &str) -> String {
    eventually("no copy of it is on its way", || {
        lab.vms().vms.iter().filter(|view| view.name == vm).all(|view| view.state == VmState::Running)
    });
    let list = lab.vms();
    let host = list.vms.iter().find(|view| view.name == vm).expect("it is somewhere").host.clone();
    lab.assert_runs_on(vm, &host);
    host
}

#[track_caller]
pub(crate) fn assert_nowhere_but(lab: &TestLab, vms: &[&str], hosts: &[&str]) {
    for vm in vms {
        let host = host_of(lab, vm);
        assert!(hosts.contains(&host.as_str()), "{vm} runs on {host}");
    }
}

fn all_vms_leave_and_come_back() {
    let lab = fast_lab();
    let guests = start_guests(&lab);
    let plan: DrainPlanView = ask(&lab, "a", "/v1/drain/plan", Some(json!({}))).unwrap();
    assert_eq!((plan.plan.moves.len(), plan.findings.len()), (NAMES.len(), 0), "{plan:#?}");
    assert!(!view(&lab, "a").cordoned, "a plan changes nothing");
    let begun = drain(&lab, "a", json!({}));
    assert_eq!((begun.cordoned, begun.kind), (true, Some(DrainKind::Drain)), "{begun:#?}");
    let again = ask::<DrainView>(&lab, "a", "/v1/drain", Some(json!({}))).unwrap_err();
    assert!(again.kind == ProblemKind::Conflict && again.message.contains("being drained"), "{again}");
    let drained = ended(&lab, "a");
    assert_state(&drained, DrainState::Drained, NAMES.len());
    let is_measured = |one: &MoveStatus| one.transfer_ms.is_some() && one.sent_bytes > 0;
    assert!(status(&drained).moves.iter().all(is_measured), "{drained:#?}");
    assert_nowhere_but(&lab, &NAMES, &["b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
    let hosts: Vec<HostStatus> = lab.json(&["hosts"]);
    let cordoned = hosts.iter().filter(|status| status.host.as_ref().is_some_and(|host| host.cordoned));
    assert_eq!(cordoned.map(|status| status.name.as_str()).collect::<Vec<_>>(), ["a"]);

    let back = resume(&lab, "a", true);
    assert_eq!((back.cordoned, back.kind), (false, Some(DrainKind::Failback)), "{back:#?}");
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
    assert_nowhere_but(&lab, &NAMES, &["a"]);
    guests.iter().for_each(Guest::assert_intact);
}

fn a_cordoned_host_takes_no_vm_and_starts_none() {
    let lab = fast_lab();
    start_small(&lab, "web", "");
    create_small(&lab, "off", "");
    drain(&lab, "a", json!({ "to": ["c"] }));
    assert_state(&ended(&lab, "a"), DrainState::Drained, 1);
    lab.assert_runs_on("web", "c");
    // The same after a crash.
    lab.stop_agent("a", Signal::KILL);
    lab.start_agent("a");
    let file =
        lab.write("new.toml", "name = \"new\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n");
    for arguments in [&["vm", "start", "off"][..], &["vm", "create", &file], &["migrate", "web", "a"]] {
        lab.drainpipe(arguments).refused(3, &["a is cordoned", "drainpipe resume a"]);
    }
    let elsewhere = ask::<DrainPlanView>(&lab, "c", "/v1/drain/plan", Some(json!({ "to": ["a"] }))).unwrap();
    assert!(
        elsewhere.plan.stays.iter().any(|stay| stay.why.to_string().contains("cordoned")),
        "{elsewhere:#?}"
    );
    assert_eq!(host_of(&lab, "web"), "c");
    assert!(!resume(&lab, "a", false).cordoned);
    lab.drainpipe(&["vm", "start", "off"]).done();
    lab.migrate("web", "a", &[]);
}

fn what_must_stay_stays_and_what_must_be_apart_is() {
    let lab = fast_lab();
    start_small(&lab, "bound", "[placement]\nstays = \"licence bound to this host\"");
    start_small(&lab, "one", "[placement]\napart = [\"db\"]");
    start_small(&lab, "two", "[placement]\napart = [\"db\"]");
    start_small(&lab, "three", "[placement]\napart = [\"db\"]");
    drain(&lab, "a", json!({}));
    let left = ended(&lab, "a");
    assert_state(&left, DrainState::Incomplete, 2);
    let stays = &status(&left).stays;
    let why = |vm: &str| stays.iter().find(|stay| stay.vm == vm).map(|stay| stay.why.to_string());
    assert!(why("bound").is_some_and(|why| why.contains("licence bound to this host")), "{stays:#?}");
    assert_eq!(stays.len(), 2, "{stays:#?}");
    let mut hosts: Vec<String> = ["one", "two", "three"].iter().map(|vm| host_of(&lab, vm)).collect();
    hosts.sort();
    assert_eq!(hosts, ["a", "b", "c"]);
    assert_eq!(host_of(&lab, "bound"), "a");
    let unknown =
        ask::<DrainPlanView>(&lab, "a", "/v1/drain/plan", Some(json!({ "to": ["x"] }))).unwrap_err();
    assert!(unknown.kind == ProblemKind::NotFound && unknown.message.contains("no host x"), "{unknown}");
}

fn a_link_that_outruns_each_target_carries_to_both_at_once() {
    let lab = TestLab::up(&["--hosts", "a,b,c", "--link", "400"]);
    let guests = ["web", "db"].map(|name| {
        let guest = Guest::new(name, lab.guest_address(), lab.namespace("client"));
        lab.create(&(guest.specification(GUEST_MIB, "") + "\n[placement]\napart = [\"shop\"]\n"), name);
        lab.drainpipe(&["vm", "start", name]).done();
        guest
    });
    guests.iter().for_each(Guest::wait_until_ready);
    for target in ["b", "c"] {
        lab.drainpipe(&["limit", target, "60", "--agent", &lab.agent_socket(target)]).done();
    }
    drain(&lab, "a", json!({ "option": "multichannel" }));
    wait_until(&lab, "a", "both are on the links", |view| {
        // In any case, a VM that follows another shares the links with it for a moment.
        let two_at_a_time = view.status.as_ref().is_some_and(|status| status.transfers == 2);
        two_at_a_time && count(view, MoveState::Transferring) == 2
    });
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    let mut hosts = guests.each_ref().map(|guest| host_of(&lab, &guest.name));
    hosts.sort();
    assert_eq!(hosts, ["b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
}

/// Begins to drain `a`, one VM at a time, and returns when the first is on the links.
#[track_caller]
pub(crate) fn drain_until_one_is_in_flight(lab: &TestLab, to: &[&str]) -> DrainView {
    drain(lab, "a", json!({ "to": to, "transfers": 1 }));
    wait_until(lab, "a", "one is on the links", |view| {
        status(view).moves.iter().any(|one| one.state == MoveState::Transferring && one.sent_bytes > 1 << 20)
    })
}

fn a_drain_is_cancelled_and_carried_on() {
    let lab = slow_lab();
    let guests = start_guests(&lab);
    let in_flight = drain_until_one_is_in_flight(&lab, &["b", "c"]);
    assert_eq!(count(&in_flight, MoveState::Transferring), 1, "{in_flight:#?}");
    wait_until(&lab, "a", "both links carry something", |view| {
        let links = &status(view).links;
        links.iter().map(|link| link.link.as_str()).eq(["e0", "e1"])
            && links.iter().all(|link| link.rate_mbps > 1.0)
    });
    let cancelling: DrainView = ask(&lab, "a", "/v1/drain/cancel", Some(json!(null))).unwrap();
    assert!(cancelling.ended_at.is_none() || status(&cancelling).state == DrainState::Cancelled);
    let cancelled = ended(&lab, "a");
    assert_state(&cancelled, DrainState::Cancelled, count(&cancelled, MoveState::Moved));
    assert!(count(&cancelled, MoveState::Moved) < NAMES.len(), "{cancelled:#?}");
    assert!(cancelled.cordoned, "until it is resumed");
    assert_nowhere_but(&lab, &NAMES, &["a", "b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
    let nothing = ask::<DrainView>(&lab, "a", "/v1/drain/cancel", Some(json!(null))).unwrap_err();
    assert!(nothing.message.contains("drainpipe resume a"), "{nothing}");
    let again = drain(&lab, "a", json!({}));
    assert_eq!(again.id, cancelled.id, "it is carried on");
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
    assert_nowhere_but(&lab, &NAMES, &["b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
}

fn a_target_that_takes_no_more_is_replaced() {
    let lab = slow_lab();
    let guests = start_guests(&lab);
    // Everything fits on b, which is cordoned when the first VM is on its way there.
    let plan: DrainPlanView = ask(&lab, "a", "/v1/drain/plan", Some(json!({}))).unwrap();
    let first = plan.plan.moves[0].target.clone();
    drain_until_one_is_in_flight(&lab, &["b", "c"]);
    drain(&lab, &first, json!({ "to": [if first == "b" { "c" } else { "b" }] }));
    let drained = ended(&lab, "a");
    assert_state(&drained, DrainState::Drained, NAMES.len());
    ended(&lab, &first);
    assert_nowhere_but(&lab, &NAMES, &["b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
}

/// Makes a host's agent read how much memory is available from a file that the test writes.
#[track_caller]
pub(crate) fn restart_agent_with_memory(lab: &TestLab, host: &str, available_mib: u64) {
    let file = set_memory(lab, host, available_mib);
    restart_agent_with_mounts(lab, host, &format!("mount --bind {file} /proc/meminfo"));
}

#[track_caller]
pub(crate) fn set_memory(lab: &TestLab, host: &str, available_mib: u64) -> String {
    let text = format!("MemTotal: 99999999 kB\nMemAvailable: {} kB\n", available_mib << 10);
    lab.write(&format!("meminfo-{host}"), &text)
}

fn a_target_becomes_full() {
    let lab = slow_lab();
    let mut guests = start_guests(&lab);
    guests.push(lab.start_guest("shop", GUEST_MIB, ""));
    start_small(&lab, "last", "");
    start_small(&lab, "least", "");
    restart_agent_with_memory(&lab, "b", 8 << 10);
    restart_agent_with_memory(&lab, "c", 2 << 10);
    let plan: DrainPlanView = ask(&lab, "a", "/v1/drain/plan", Some(json!({ "to": ["b", "c"] }))).unwrap();
    assert!(plan.plan.moves.iter().all(|planned| planned.target == "b"), "it has more room: {plan:#?}");
    drain_until_one_is_in_flight(&lab, &["b", "c"]);
    set_memory(&lab, "b", 0);
    // VMs that are being prepared already have what b has promised.
    let full = view(&lab, "a");
    let waiting = status(&full).moves.iter().filter(|one| one.state == MoveState::Waiting);
    let waiting: Vec<&str> = waiting.map(|one| one.vm.as_str()).collect();
    assert!(!waiting.is_empty(), "too late to see anything: {full:#?}");
    assert_state(&ended(&lab, "a"), DrainState::Drained, 5);
    assert_nowhere_but(&lab, &waiting, &["c"]);
    assert_nowhere_but(&lab, &[&NAMES[..], &["shop", "last", "least"]].concat(), &["b", "c"]);
    guests.iter().for_each(Guest::assert_intact);
}

fn a_targets_agent_is_killed() {
    let lab = slow_lab();
    let guests = start_guests(&lab);
    let in_flight = drain_until_one_is_in_flight(&lab, &["b", "c"]);
    let lost = &status(&in_flight).moves[0].target;
    lab.stop_agent(lost, Signal::KILL);
    assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
    lab.start_agent(lost);
    assert_nowhere_but(&lab, &NAMES, &[if lost == "b" { "c" } else { "b" }]);
    guests.iter().for_each(Guest::assert_intact);
}

fn the_drained_hosts_agent_is_killed_or_stopped() {
    let lab = slow_lab();
    let guests = start_guests(&lab);
    for signal in [Signal::KILL, Signal::TERM] {
        carried_on_after(signal, &lab);
        guests.iter().for_each(Guest::assert_intact);
        resume(&lab, "a", true);
        assert_state(&ended(&lab, "a"), DrainState::Drained, NAMES.len());
        assert_nowhere_but(&lab, &NAMES, &["a"]);
    }
}

#[track_caller]
fn carried_on_after(signal: Signal, lab: &TestLab) {
    let in_flight = drain_until_one_is_in_flight(lab, &["b", "c"]);
    lab.stop_agent("a", signal);
    lab.start_agent("a");
    let interrupted = view(lab, "a");
    assert_eq!(status(&interrupted).state, DrainState::Interrupted, "{interrupted:#?}");
    assert!(interrupted.cordoned && interrupted.ended_at.is_some(), "{interrupted:#?}");
    let output = lab.drainpipe(&["drain", "status", "a"]).done();
    assert!(output.contains("`drainpipe drain a --to b,c --transfers 1` continues"), "{output}");
    let again = drain(lab, "a", json!({}));
    assert_eq!(again.id, in_flight.id, "it is carried on");
    assert_state(&ended(lab, "a"), DrainState::Drained, NAMES.len());
    assert_nowhere_but(lab, &NAMES, &["b", "c"]);
}

fn the_way_back_leaves_alone_what_has_moved_on() {
    let lab = fast_lab();
    start_small(&lab, "web", "");
    start_small(&lab, "db", "");
    let never = ask::<DrainView>(&lab, "b", "/v1/resume", Some(json!({ "failback": true }))).unwrap_err();
    assert!(never.message.contains("never drained"), "{never}");
    drain(&lab, "a", json!({ "to": ["b"] }));
    assert_state(&ended(&lab, "a"), DrainState::Drained, 2);
    ask::<MigrationView>(&lab, "b", "/v1/migrations", Some(json!({ "vm": "web", "target": "c" }))).unwrap();
    eventually("it is on c alone", || {
        lab.vms().vms.iter().filter(|vm| vm.name == "web").all(|vm| vm.host == "c")
    });
    resume(&lab, "a", true);
    let back = ended(&lab, "a");
    assert_state(&back, DrainState::Incomplete, 1);
    assert!(
        status(&back)
            .stays
            .iter()
            .any(|stay| stay.vm == "web" && stay.why.to_string().contains("no longer on b")),
        "{back:#?}"
    );
    lab.assert_runs_on("web", "c");
    lab.assert_runs_on("db", "a");
}
