//! Several migrations between two hosts at once: they share the paths, the route and the watch, and one
//! that ends takes nothing from another.

use std::thread;
use std::time::Duration;

use drainpipe_agent::api::types::MigrationView;
use drainpipe_engine::result::{Outcome, PathState};
use drainpipe_engine::step::Step;
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::path_loss::turns;
use crate::program::Running;
use crate::scene::{Scene, result_of, slow_lab};
use crate::support::{HostNetwork, TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    (
        "two_vms_go_and_their_agent_is_killed_or_a_link_falls_silent",
        two_vms_go_and_their_agent_is_killed_or_a_link_falls_silent,
    ),
    (
        "one_of_two_is_cancelled_and_a_link_falls_silent_as_they_pass_each_other",
        one_of_two_is_cancelled_and_a_link_falls_silent_as_they_pass_each_other,
    ),
    ("the_target_agent_is_started_anew_in_flight", the_target_agent_is_started_anew_in_flight),
    ("an_agent_is_started_anew_while_two_vms_come", an_agent_is_started_anew_while_two_vms_come),
    (
        "an_agent_is_started_anew_while_one_vm_comes_and_one_goes",
        an_agent_is_started_anew_while_one_vm_comes_and_one_goes,
    ),
];

const MEMORY_MIB: u64 = 160;

const VMS: [&str; 2] = ["web", "db"];

/// Two guests, `web` on host `a` and `db` on the other one or on the same.
struct Two {
    lab: TestLab,
    guests: [Guest; 2],
    network: [HostNetwork; 2],
}

impl Two {
    #[track_caller]
    fn set(db_on: &str) -> Self {
        let lab = slow_lab();
        let guests = VMS.map(|vm| lab.start_guest(vm, MEMORY_MIB, ""));
        if db_on == "b" {
            lab.migrate("db", "b", &[]);
        }
        let network = lab.network();
        Self { lab, guests, network }
    }

    /// Begins to move each to its host of these; back when the memory of both is being copied.
    #[track_caller]
    fn migrate(&self, hosts: [&str; 2]) -> [Running; 2] {
        let start = |vm| {
            let host = if vm == "web" { hosts[0] } else { hosts[1] };
            self.lab.start(&["migrate", vm, host, "--option", "multichannel", "--json"])
        };
        let migrating = VMS.map(start);
        for host in ["a", "b"] {
            let leaving = hosts.iter().filter(|to| **to != host).count();
            eventually("memory is copied", || self.copying(host).len() == leaving);
        }
        migrating
    }

    /// Kills the agent of `b`; back when a new one is there, and the other one watches with it.
    #[track_caller]
    fn start_agent_anew(&self) {
        self.lab.stop_agent("b", Signal::KILL);
        self.lab.start_agent("b");
        eventually("the new agent watches", || self.lab.agent_log("a").contains("e1–e1 is watched now"));
    }

    /// The migrations from a host of which memory is being copied.
    fn copying(&self, host: &str) -> Vec<MigrationView> {
        let is_copied = |view: &MigrationView| {
            let step = view.progress.as_ref().map(|progress| progress.step);
            matches!(step, Some(Step::CopyMemory | Step::CopyDirtyMemory))
        };
        self.lab.migrations(host).into_iter().filter(is_copied).collect()
    }

    /// Fails the test unless both run whole where they belong, and nothing else is left.
    #[track_caller]
    fn assert_settled(&self, hosts: [&str; 2]) {
        for (vm, host) in VMS.iter().zip(hosts) {
            self.lab.assert_runs_on(vm, host);
        }
        for guest in &self.guests {
            eventually("the guest is reached", || guest.control().is_some());
            guest.assert_intact();
        }
        eventually("the network is put back", || self.lab.network() == self.network);
        for host in ["a", "b"] {
            eventually("no watch is left", || self.lab.migration_ports(host).is_empty());
        }
    }
}

fn two_vms_go_and_their_agent_is_killed_or_a_link_falls_silent() {
    let two = Two::set("a");
    the_source_agent_is_killed(&two);
    a_link_falls_silent(&two, ["b", "b"]);
}

fn one_of_two_is_cancelled_and_a_link_falls_silent_as_they_pass_each_other() {
    let two = Two::set("a");
    one_of_two_is_cancelled(&two);
    a_link_falls_silent(&two, ["a", "b"]);
}

#[track_caller]
fn a_link_falls_silent(two: &Two, hosts: [&str; 2]) {
    let migrating = two.migrate(hosts);
    two.lab.fault("blackhole b e1");
    thread::sleep(Duration::from_secs(2));
    for host in ["a", "b"] {
        // One watch for both, whoever sends.
        let ports = two.lab.migration_ports(host);
        assert_eq!(ports.lines().filter(|line| line.starts_with("udp")).count(), 2, "{ports}");
        let routes = two.lab.exec(host, &["ip", "route", "show", "proto", "215"]).done();
        assert!(!routes.contains("dev e1"), "{routes}");
    }
    two.lab.fault("heal b e1");
    for output in migrating.map(Running::wait) {
        let result = result_of(&output);
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        assert_eq!(turns(&result, "e0"), [], "{result:#?}");
        assert_eq!(turns(&result, "e1"), [PathState::Out, PathState::Back], "{result:#?}");
    }
    two.assert_settled(hosts);
}

fn one_of_two_is_cancelled(two: &Two) {
    let [moved, cancelled] = two.migrate(["b", "b"]);
    let copying = two.copying("a");
    let db = copying.iter().find(|view| view.vm == "db").expect("both are under way");
    two.lab.drainpipe(&["cancel", &db.id]).done();
    assert_eq!(result_of(&cancelled.wait()).outcome, Outcome::Cancelled);
    // The other one still has its paths, and their watch.
    two.lab.fault("blackhole a e0");
    let result = result_of(&moved.wait());
    two.lab.fault("heal a e0");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e0").first(), Some(&PathState::Out), "{result:#?}");
    two.assert_settled(["b", "a"]);
}

fn the_source_agent_is_killed(two: &Two) {
    let migrating = two.migrate(["b", "b"]);
    two.lab.stop_agent("a", Signal::KILL);
    two.lab.start_agent("a");
    for output in migrating.map(Running::wait) {
        assert_eq!(result_of(&output).outcome, Outcome::Failed);
    }
    two.assert_settled(["a", "a"]);
}

fn an_agent_is_started_anew_while_two_vms_come() {
    let two = Two::set("a");
    let migrating = two.migrate(["b", "b"]);
    two.start_agent_anew();
    two.lab.fault("blackhole b e1");
    let outputs = migrating.map(Running::wait);
    two.lab.fault("heal b e1");
    for output in outputs {
        let result = result_of(&output);
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        let expected = [PathState::Unwatched, PathState::Watched, PathState::Out];
        assert_eq!(turns(&result, "e1")[..3], expected, "{result:#?}");
    }
    two.assert_settled(["b", "b"]);
}

fn an_agent_is_started_anew_while_one_vm_comes_and_one_goes() {
    let two = Two::set("b");
    let [coming, going] = two.migrate(["b", "a"]);
    two.start_agent_anew();
    two.lab.fault("blackhole a e0");
    let came = result_of(&coming.wait());
    two.lab.fault("heal a e0");
    assert_eq!(came.outcome, Outcome::Completed, "{came:#?}");
    assert!(turns(&came, "e0").contains(&PathState::Out), "{came:#?}");
    // Its agent was the one that led it.
    assert_ne!(going.wait().code, 0);
    two.assert_settled(["b", "b"]);
}

fn the_target_agent_is_started_anew_in_flight() {
    let scene = Scene::in_lab(TestLab::up(&["--link", "40", "--link", "40"]));
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("b", Signal::KILL);
    scene.lab.start_agent("b");
    eventually("the new agent watches", || scene.lab.agent_log("a").contains("e1–e1 is watched now"));
    scene.lab.fault("blackhole b e1");
    let result = result_of(&migrating.wait());
    scene.lab.fault("heal b e1");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    let expected = [PathState::Unwatched, PathState::Watched, PathState::Out];
    assert_eq!(turns(&result, "e1")[..3], expected, "{result:#?}");
    scene.assert_settled("b");
}
