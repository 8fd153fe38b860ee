//! VMs that change their memory faster than it can be sent, and run on the target before all of it has arrived.

use std::thread;
use std::time::Duration;

use drainpipe_api_types::VmState;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::MigrationOption;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::program::{LOST, REFUSED, Running};
use crate::scene::{MEMORY_MIB, Scene, result_of, wait_until_told_to_run};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    (
        "a_drain_takes_it_where_it_is_allowed_and_fetches_the_vm_back_so",
        a_drain_takes_it_where_it_is_allowed_and_fetches_the_vm_back_so,
    ),
    (
        "a_vm_that_converges_goes_whole_and_another_one_in_parts",
        a_vm_that_converges_goes_whole_and_another_one_in_parts,
    ),
    ("a_connection_that_breaks_is_made_anew", a_connection_that_breaks_is_made_anew),
    ("a_path_that_falls_silent_is_left_for_another", a_path_that_falls_silent_is_left_for_another),
    (
        "a_target_whose_agent_stands_still_at_the_switchover_gets_the_vm_later",
        a_target_whose_agent_stands_still_at_the_switchover_gets_the_vm_later,
    ),
    ("agents_that_are_killed_meanwhile", agents_that_are_killed_meanwhile),
    (
        "an_agent_that_is_killed_as_the_vm_is_told_to_run_there",
        an_agent_that_is_killed_as_the_vm_is_told_to_run_there,
    ),
    ("a_vm_that_stands_still_there_is_ended_by_hand", a_vm_that_stands_still_there_is_ended_by_hand),
    (
        "a_qemu_that_ends_meanwhile_is_the_end_of_the_vm_and_is_told",
        a_qemu_that_ends_meanwhile_is_the_end_of_the_vm_and_is_told,
    ),
    (
        "agents_that_are_killed_meanwhile_where_they_encrypt",
        agents_that_are_killed_meanwhile_where_they_encrypt,
    ),
];

/// The rate of the only link: the rest of the memory takes some seconds even on a host so busy that the guest writes
/// only a quarter of what it should.
const LINK_MBPS: &str = "75";

/// More than the link carries, in all of the memory.
const BUSY: &str = "drainpipe.dirty_mib_per_s=60";
const BUSY_AGAIN: Dirtying = Dirtying { mib_per_s: 60, locality_percent: 100 };

/// So little that the VM converges even on a busy host.
const QUIET: &str = "drainpipe.dirty_mib_per_s=1";

const ATTEMPTS_MAX: u32 = 5;

fn scene(kernel_parameters: &str) -> Scene {
    let lab = TestLab::up(&["--link", LINK_MBPS, "--link", LINK_MBPS]);
    let guest = lab.start_guest("web", MEMORY_MIB, kernel_parameters);
    Scene::of(lab, guest)
}

impl Scene {
    /// Returns when the guest runs on `b` and the rest of its memory is on its way.
    #[track_caller]
    fn until_the_rest_follows(&self, arguments: &[&str]) -> Running {
        let migrating =
            self.lab.start(&[&["migrate", "web", "b", "--json", "--post-copy"], arguments].concat());
        eventually("it runs on b, and the rest of its memory follows", || {
            let views = self.migrations();
            let progress = views.first().and_then(|view| view.progress.as_ref());
            progress.is_some_and(|progress| progress.rest_follows)
        });
        migrating
    }

    /// Makes the guest, which rests on `b` or comes to rest there, change its memory on `a` as before.
    #[track_caller]
    fn begin_again(&self) {
        self.guest.set_dirty(Dirtying::IDLE);
        self.lab.migrate("web", "a", &["--option", "multichannel"]);
        self.assert_settled("a");
        self.guest.set_dirty(BUSY_AGAIN);
    }

    /// Resets the connections from the source's QEMU to the target's.
    #[track_caller]
    fn break_connection(&self) {
        let to_the_target = "( dport >= :49152 and dport <= :49215 )";
        self.lab.exec("a", &["ss", "-HtnK", to_the_target]).done();
    }

    #[track_caller]
    fn assert_came_in_parts(&self, result: &MigrationResult) {
        assert_eq!((result.outcome, &result.failure.error), (Outcome::Completed, &None), "{result:#?}");
        assert!(says(result, "the rest of it will follow the VM"), "{result:#?}");
        self.assert_settled("b");
    }
}

fn a_drain_takes_it_where_it_is_allowed_and_fetches_the_vm_back_so() {
    let scene = scene(BUSY);
    let rest = scene.lab.start_guest("rest", MEMORY_MIB, "");
    let output = scene.lab.drainpipe(&["drain", "a", "--dry-run", "--post-copy"]).done();
    assert!(output.contains("web") && output.contains("rest"), "{output}");
    scene.lab.drainpipe(&["drain", "a", "--yes", "--post-copy"]).done();
    for vm in ["web", "rest"] {
        scene.lab.assert_runs_on(vm, "b");
    }
    let came_in_parts = |vm: &str, host: &str| {
        let of_vm = scene.lab.migrations(host).into_iter().filter_map(|view| view.result);
        of_vm
            .filter(|result| result.vm == vm && result.outcome == Outcome::Completed)
            .map(|result| result.times.post_copy_ms.is_some())
            .next()
            .unwrap()
    };
    assert!(came_in_parts("web", "a") && !came_in_parts("rest", "a"));
    scene.guest.assert_intact();
    rest.assert_intact();
    scene.lab.drainpipe(&["resume", "a", "--failback"]).done();
    for vm in ["web", "rest"] {
        scene.lab.assert_runs_on(vm, "a");
    }
    assert!(came_in_parts("web", "b") && !came_in_parts("rest", "b"));
    scene.guest.assert_intact();
    rest.assert_intact();
}

fn says(result: &MigrationResult, words: &str) -> bool {
    result.record.events.iter().any(|event| event.what.contains(words))
}

/// Whether a VM that writes little was on the target before it ran there. On a very busy host its guest may have to wait, and
/// then writes at once what it has missed: then it does not converge.
fn goes_whole(scene: &Scene) -> bool {
    let result = scene.lab.migrate("web", "b", &["--post-copy"]);
    assert_eq!(result.choice.option, MigrationOption::Tcp, "{result:#?}");
    scene.assert_settled("b");
    let is_whole = result.times.post_copy_ms.is_none();
    if !is_whole {
        scene.lab.migrate("web", "a", &["--option", "multichannel"]);
    }
    is_whole
}

fn a_vm_that_converges_goes_whole_and_another_one_in_parts() {
    let scene = scene(QUIET);
    scene
        .lab
        .drainpipe(&["migrate", "web", "b", "--post-copy", "--option", "multichannel"])
        .refused(REFUSED, &["post-copy goes over one connection"]);
    let output = scene.lab.drainpipe(&["migrate", "web", "b", "--post-copy", "--dry-run"]).done();
    assert!(output.contains("until the rest has followed, the VM needs both hosts"), "{output}");
    assert!((0..ATTEMPTS_MAX).any(|_| goes_whole(&scene)), "it goes in parts each time");
    for encrypt in [&[][..], &["--encrypt"]] {
        scene.begin_again();
        let migrating = scene.until_the_rest_follows(encrypt);
        let result: MigrationResult = result_of(&migrating.wait());
        scene.assert_came_in_parts(&result);
        assert!(result.times.post_copy_ms.is_some_and(|ms| ms > 0.0), "{result:#?}");
        assert_eq!(
            (result.choice.option, result.memory.throttle_percent),
            (MigrationOption::Tcp, None),
            "{result:#?}"
        );
        let protocol = result.connection_use.encryption.as_ref().and_then(|used| used.protocol.as_ref());
        assert_eq!(protocol.is_some(), !encrypt.is_empty(), "{result:#?}");
    }
    // It came from there in parts, and now moves like any other.
    scene.guest.set_dirty(Dirtying::IDLE);
    scene.assert_moves("a");
}

fn a_connection_that_breaks_is_made_anew() {
    let scene = scene(BUSY);
    // Its QEMU's main thread puts the packets that arrive for it into pages that may not be there yet.
    let heartbeat = scene.guest.heartbeat_every(Duration::from_millis(2));
    let migrating = scene.until_the_rest_follows(&[]);
    scene.break_connection();
    let result = result_of(&migrating.wait());
    assert!(says(&result, "the rest of its memory does not arrive"), "{result:#?}");
    drop(heartbeat);
    scene.assert_came_in_parts(&result);
}

fn a_path_that_falls_silent_is_left_for_another() {
    // The rest is on its way for longer than it takes to see that. A QEMU 7.2 that has handed all of it to its socket
    // waits for its target's last word, and no longer leaves a path that falls silent then (seen once).
    let lab = TestLab::up(&["--link", LINK_MBPS, "--link", LINK_MBPS]);
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[limits]\nstall_s = 2\n\n[tls]");
    lab.start_agent("a");
    let guest = lab.start_guest("web", MEMORY_MIB, BUSY);
    let scene = Scene::of(lab, guest);
    let heartbeat = scene.guest.heartbeat_every(Duration::from_millis(2));
    let migrating = scene.until_the_rest_follows(&[]);
    let used = scene.migrations()[0].progress.as_ref().unwrap().paths[0].link.clone();
    scene.lab.fault(&format!("blackhole a {used}"));
    let result = result_of(&migrating.wait());
    scene.lab.fault(&format!("heal a {used}"));
    assert!(says(&result, "nothing has arrived for 2 s"), "{result:#?}");
    drop(heartbeat);
    scene.assert_came_in_parts(&result);
}

fn a_target_whose_agent_stands_still_at_the_switchover_gets_the_vm_later() {
    let scene = scene(BUSY);
    let migrating = scene.migrate(&["--option", "tcp", "--post-copy"]);
    let agent_of_b = scene.lab.agent_pid("b").unwrap();
    kill_process(agent_of_b, Signal::STOP).unwrap();
    // Nobody can say whether it has what it needs, and it cannot go back.
    eventually("the target is asked", || scene.step() == Some(Step::ResumeOnTarget));
    kill_process(agent_of_b, Signal::CONT).unwrap();
    let result = result_of(&migrating.wait());
    assert!(says(&result, "hand-over recorded") && says(&result, "failed: "), "{result:#?}");
    scene.assert_came_in_parts(&result);
}

fn agents_that_are_killed_meanwhile() {
    kill_agents_meanwhile(&[]);
}

fn agents_that_are_killed_meanwhile_where_they_encrypt() {
    kill_agents_meanwhile(&["--encrypt"]);
}

fn kill_agents_meanwhile(arguments: &[&str]) {
    let scene = scene(BUSY);
    for killed in [&["a"][..], &["b"], &["a", "b"]] {
        if scene.lab.qemu_pid("a", "web").is_none() {
            scene.begin_again();
        }
        let migrating = scene.until_the_rest_follows(arguments);
        for host in killed {
            scene.lab.stop_agent(host, Signal::KILL);
        }
        for host in killed {
            scene.lab.start_agent(host);
        }
        drop(migrating);
        let result = scene.last_result();
        assert_eq!(
            (result.outcome, &result.failure.error),
            (Outcome::Completed, &None),
            "{killed:?}: {result:#?}"
        );
        assert!(!says(&result, "does not arrive"), "no agent is between the two QEMUs: {result:#?}");
        scene.assert_settled("b");
    }
}

/// Fails the test unless the agents report that the VM was ended on the target. It can be booted there again.
#[track_caller]
fn assert_ended_and_boots(scene: &Scene) {
    let agent_of_b = scene.lab.agent_socket("b");
    let result = scene.last_result();
    assert_lost_there(&result, "it has ended on the target");
    scene.lab.drainpipe(&["vm", "start", "web", "--agent", &agent_of_b]).done();
    scene.guest.wait_until_ready();
    scene.assert_settled("b");
}

#[track_caller]
fn assert_lost_there(result: &MigrationResult, words: &str) {
    assert_eq!((result.outcome, result.failure.source_vm), (Outcome::Lost, None), "{result:#?}");
    let error = result.failure.error.as_deref().unwrap_or_default();
    assert!(error.contains("the VM is lost: ") && error.contains(words), "{result:#?}");
}

/// The connection breaks, and the source's agent ends, while the VM, or its QEMU's main thread, waits for a page. That
/// QEMU then says nothing, not even that the VM runs.
#[track_caller]
fn kill_as_it_is_told_to_run() -> Scene {
    let scene = scene(BUSY);
    let migrating = scene.lab.start(&["migrate", "web", "b", "--json", "--post-copy", "--encrypt"]);
    assert!(wait_until_told_to_run(&scene.lab));
    thread::sleep(Duration::from_millis(20));
    scene.lab.stop_agent("a", Signal::KILL);
    scene.break_connection();
    drop(migrating);
    scene
}

fn an_agent_that_is_killed_as_the_vm_is_told_to_run_there() {
    let scene = kill_as_it_is_told_to_run();
    thread::sleep(Duration::from_secs(2));
    scene.lab.start_agent("a");
    let result = scene.last_result();
    assert_eq!((result.outcome, &result.failure.error), (Outcome::Completed, &None), "{result:#?}");
    scene.assert_settled("b");
}

fn a_vm_that_stands_still_there_is_ended_by_hand() {
    let scene = kill_as_it_is_told_to_run();
    let agent_of_b = scene.lab.agent_pid("b").unwrap();
    kill_process(agent_of_b, Signal::STOP).unwrap();
    scene.lab.start_agent("a");
    let stop = ["vm", "stop", "web", "--force"];
    let output = scene.lab.drainpipe(&stop);
    scene.lab.stop_agent("a", Signal::KILL);
    kill_process(agent_of_b, Signal::CONT).unwrap();
    output.refused(REFUSED, &["was handed over to b", "drainpipe vm stop web"]);
    let agent_of_b = scene.lab.agent_socket("b");
    scene.lab.drainpipe(&[&stop[..], &["--agent", &agent_of_b]].concat()).done();
    assert!(scene.lab.qemu_pid("b", "web").is_none());
    scene.lab.start_agent("a");
    assert_ended_and_boots(&scene);
}

fn a_qemu_that_ends_meanwhile_is_the_end_of_the_vm_and_is_told() {
    let in_part = "part of its memory was still on the source";
    let scene = scene(BUSY);
    for (host, words) in [("a", in_part), ("b", "it has ended on the target")] {
        if scene.lab.qemu_pid("a", "web").is_none() {
            scene.begin_again();
        }
        let migrating = scene.until_the_rest_follows(&[]);
        scene.kill_qemu(host);
        let output = migrating.wait();
        assert_eq!(output.code, LOST, "{output:#?}");
        assert_lost_there(&result_of(&output), words);
        let history = scene.lab.drainpipe(&["history"]).done();
        assert!(history.contains("lost"), "{history}");
        let vms = scene.lab.vms().vms;
        assert_eq!((vms.len(), vms[0].host.as_str()), (1, "b"));
        eventually("its QEMU is gone", || scene.lab.vms().vms[0].state != VmState::Running);
        let agent_of_b = scene.lab.agent_socket("b");
        scene.lab.drainpipe(&["vm", "start", "web", "--agent", &agent_of_b]).done();
        scene.guest.wait_until_ready();
        scene.assert_settled("b");
    }
}
