//! Nothing arrives any more after the first round of a guest that goes on writing. It runs on meanwhile and afterwards,
//! and its QEMU survives.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use std::{fs, thread};

use drainpipe_engine::migration::result::Outcome;
use drainpipe_guest::client::Heartbeat;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::backend::Backend;
use crate::guest::{Guest, UNFILLED_MIB};
use crate::options;
use crate::scene::{Scene, result_of};
use crate::silences::THROTTLED_SILENCE_MAX;
use crate::support::{TestLab, eventually};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    ("nothing_arrives_any_more", nothing_arrives_any_more),
    (
        "a_throttled_vm_is_let_go_of_whatever_ends_its_migration",
        a_throttled_vm_is_let_go_of_whatever_ends_its_migration,
    ),
];

/// Faster than the links carry, so that the guest is throttled, and does not arrive before the fault.
const BUSY: Dirtying = Dirtying { mib_per_s: 80, locality_percent: 100 };

/// How the guest writes while nothing arrives: enough for QEMU to find something at each look.
const STILL_CHANGING: Dirtying = Dirtying { mib_per_s: 4, locality_percent: 100 };

/// A round is more than QEMU's sockets hold, so that QEMU waits for them.
const MEMORY_MIB: u64 = 400;

/// Longer than the 5 s after which a QEMU since 9.2 would look for changed memory, and wait for its own connections.
const STALL_S: u64 = 15;

/// How long two rounds may take on a busy machine.
const THROTTLED_WITHIN: Duration = Duration::from_secs(100);

/// What is done to the source's links for good, how it is repaired, and how the VM moves.
type Outage = (&'static str, &'static str, &'static [&'static str]);

const DOWN: Outage =
    ("ip link set e0 down; ip link set e1 down", "ip link set e0 up; ip link set e1 up", &[]);
const SILENT: Outage = (FALL_SILENT, HEARD_AGAIN, &["--throttle", "0"]);
const SILENT_ENCRYPTED: Outage = (FALL_SILENT, HEARD_AGAIN, &["--encrypt"]);
const SILENT_TCP: Outage = (FALL_SILENT, HEARD_AGAIN, &["--option", "tcp"]);
/// The messages of the path watch still pass.
const WITHOUT_LARGE_FRAMES: Outage =
    (LOSE_LARGE_FRAMES, "nft delete table inet large", &["--throttle", "99"]);

fn nothing_arrives_any_more() {
    let scene = scene(&[]);
    for outage in [DOWN, WITHOUT_LARGE_FRAMES, SILENT_ENCRYPTED] {
        survives(&scene, outage);
    }
}

fn a_throttled_vm_is_let_go_of_whatever_ends_its_migration() {
    let scene = scene(&[]);
    let before = vcpu_groups(&scene);
    // Short rounds, so that it happens soon.
    scene.guest.set_dirty(Dirtying { locality_percent: 20, ..BUSY });
    for end in [cancel, kill_agent_and_start_it_again, kill_agent_and_guard_and_start_the_agent_again] {
        let migrating = scene.migrate(&[]);
        wait_until_throttled(&scene);
        assert!(vcpu_groups(&scene).iter().any(|group| group.contains("/drainpipe-vcpu-")));
        scene.guest.assert_answers();
        end(&scene);
        drop(migrating.wait());
        eventually("its vCPUs run as they like", || vcpu_groups(&scene) == before);
        let result = scene.last_result();
        assert_ne!(result.outcome, Outcome::Completed, "{result:#?}");
        scene.lab.assert_runs_on("web", "a");
    }
    scene.guest.set_dirty(Dirtying::IDLE);
    scene.assert_moves("b");
}

#[track_caller]
fn wait_until_throttled(scene: &Scene) {
    let end = Instant::now() + THROTTLED_WITHIN;
    let progress = || scene.migrations().remove(0).progress;
    while progress().is_none_or(|progress| progress.throttle_percent.is_none()) {
        assert!(Instant::now() < end, "it is not throttled within {THROTTLED_WITHIN:?}");
        thread::sleep(Duration::from_millis(100));
    }
}

fn cancel(scene: &Scene) {
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    let result = scene.last_result();
    assert!(result.memory.throttle_percent >= Some(30), "{result:#?}");
    for what in ["throttled by 30 %", "are no longer throttled"] {
        assert!(result.record.events.iter().any(|event| event.what.contains(what)), "{what}: {result:#?}");
    }
}

fn kill_agent_and_start_it_again(scene: &Scene) {
    let before = vcpu_groups(scene);
    scene.lab.stop_agent("a", Signal::KILL);
    eventually("its guard lets them run", || vcpu_groups(scene) != before);
    scene.lab.start_agent("a");
}

fn kill_agent_and_guard_and_start_the_agent_again(scene: &Scene) {
    for guard in scene.lab.pids("a", &[" guard --migration "]) {
        kill_process(guard, Signal::KILL).unwrap();
    }
    scene.lab.stop_agent("a", Signal::KILL);
    scene.lab.start_agent("a");
}

/// The control groups of all threads of the guest's QEMU, each once.
fn vcpu_groups(scene: &Scene) -> BTreeSet<String> {
    let qemu = scene.lab.qemu_pid("a", "web").expect("its QEMU runs").as_raw_nonzero();
    let threads = fs::read_dir(format!("/proc/{qemu}/task")).unwrap();
    // A thread may have ended meanwhile.
    threads.filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("cgroup")).ok()).collect()
}

pub(crate) fn with_another_qemu() {
    let qemu = options::other_qemu().expect("the test runs only where there is one");
    // With an older machine type, QEMU waits for its connections elsewhere, without the lock.
    let scene = scene_with(&["--qemu", &qemu], Guest::on_newer_machine);
    let outages = [DOWN, SILENT_TCP, SILENT, SILENT_ENCRYPTED, WITHOUT_LARGE_FRAMES];
    for outage in whole::first_or_all(2, &outages) {
        survives(&scene, *outage);
    }
}

const LOSE_LARGE_FRAMES: &str = "nft 'add table inet large; \
    add chain inet large out { type filter hook output priority 0; }; \
    add rule inet large out oifname { e0, e1 } meta length > 1400 drop'";

const FALL_SILENT: &str = "nft 'add table inet silent; \
    add chain inet silent out { type filter hook output priority 0; }; \
    add rule inet silent out oifname { e0, e1 } drop'";
const HEARD_AGAIN: &str = "nft delete table inet silent";

/// A lab whose agents soon report that nothing arrives, though not before QEMU could wait for itself.
#[track_caller]
fn scene(arguments: &[&str]) -> Scene {
    scene_with(arguments, str::to_owned)
}

#[track_caller]
fn scene_with(arguments: &[&str], as_wanted: fn(&str) -> String) -> Scene {
    let lab = TestLab::up(&[&["--link", "150", "--link", "150"], arguments].concat());
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", &format!("[limits]\nstall_s = {STALL_S}\n\n[tls]"));
    lab.start_agent("a");
    // A larger guest needs more memory for itself.
    let filled = |unfilled_mib: u64| format!("drainpipe.memory_mib={}", MEMORY_MIB - unfilled_mib);
    let less_filled =
        |text: &str| text.replace(&filled(UNFILLED_MIB), &filled(UNFILLED_MIB + MEMORY_MIB / 8));
    if Backend::of_test() == Backend::Libvirt {
        let guest = lab.start_domain_as("a", "web", MEMORY_MIB, |xml| less_filled(&xml));
        lab.wait_for_domain("web");
        return Scene::of(lab, guest);
    }
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    let specification = less_filled(&guest.specification(MEMORY_MIB, ""));
    lab.create(&as_wanted(&specification), "web");
    lab.drainpipe(&["vm", "start", "web"]).done();
    guest.wait_until_ready();
    Scene::of(lab, guest)
}

#[track_caller]
fn survives(scene: &Scene, (fault, cure, arguments): Outage) {
    scene.guest.set_dirty(BUSY);
    let migrating = scene.migrate(arguments);
    let progress = || scene.migrations().remove(0).progress;
    eventually("memory goes again", || progress().is_some_and(|progress| progress.rounds >= 2));
    let heartbeat = scene.guest.heartbeat();
    scene.lab.exec("a", &["bash", "-c", fault]).done();
    scene.guest.set_dirty(STILL_CHANGING);
    let result = result_of(&migrating.wait());
    thread::sleep(Duration::from_secs(1));
    assert_never_silent(&heartbeat, arguments);
    // The agents report and tidy up while the links are dead.
    assert_eq!(result.outcome, Outcome::Failed, "{arguments:?}: {result:#?}");
    let error = result.failure.error.as_deref().unwrap_or_default();
    assert!(error.contains("nothing has arrived for "), "{arguments:?}: {result:#?}");
    scene.lab.assert_runs_on("web", "a");
    scene.lab.exec("a", &["bash", "-c", cure]).done();
    // By then, another look for changed memory would have come.
    thread::sleep(Duration::from_secs(6));
    assert_never_silent(&heartbeat, arguments);
    scene.guest.set_dirty(Dirtying::IDLE);
    scene.assert_settled("a");
}

#[track_caller]
fn assert_never_silent(heartbeat: &Heartbeat, arguments: &[&str]) {
    let longest = heartbeat.longest_gap();
    eprintln!("{arguments:?}: silent for {longest:.1?} at most");
    assert!(longest < THROTTLED_SILENCE_MAX, "{arguments:?}: {:#?}", heartbeat.statistics());
}
