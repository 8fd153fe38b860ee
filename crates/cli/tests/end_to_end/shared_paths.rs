//! Several migrations between two hosts at once. They share paths, route and watch, and one that ends takes nothing
//! from another.

use drainpipe_api_types::MigrationView;
use drainpipe_engine::migration::result::{Outcome, PathState};
use drainpipe_engine::migration::step::Step;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::path_loss::turns;
use crate::program::{Output, Running};
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
    ("an_agent_is_started_anew_while_two_vms_come", an_agent_is_started_anew_while_two_vms_come),
    (
        "an_agent_is_started_anew_while_one_vm_comes_and_one_goes",
        an_agent_is_started_anew_while_one_vm_comes_and_one_goes,
    ),
    ("the_target_agent_is_started_anew_in_flight", the_target_agent_is_started_anew_in_flight),
];

/// The guest's memory, of which 16 MiB are filled.
const MEMORY_MIB: u64 = 128;

const VMS: [&str; 2] = ["web", "db"];

/// More than both links of [`slow_lab`] carry: no guest arrives while it does that.
pub(crate) const NEVER_DONE: Dirtying = Dirtying { mib_per_s: 20, locality_percent: 100 };

/// Two guests: `web` on host `a`, and `db` on either host.
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

    /// Begins to move each guest to its host; neither arrives before [`Self::let_arrive`]. Returns when the memory of
    /// both is being copied.
    #[track_caller]
    fn migrate(&self, hosts: [&str; 2]) -> [Running; 2] {
        let start = |vm| {
            let host = if vm == "web" { hosts[0] } else { hosts[1] };
            self.lab.start(&["migrate", vm, host, "--option", "multichannel", "--json"])
        };
        self.have_them_rewrite(NEVER_DONE);
        let migrating = VMS.map(start);
        for host in ["a", "b"] {
            let leaving = hosts.iter().filter(|to| **to != host).count();
            eventually("memory is copied", || self.copying(host).len() == leaving);
        }
        migrating
    }

    #[track_caller]
    fn have_them_rewrite(&self, dirtying: Dirtying) {
        for guest in &self.guests {
            guest.set_dirty(dirtying);
        }
    }

    /// The results after the guests have come to rest.
    #[track_caller]
    fn let_arrive<const COUNT: usize>(&self, migrating: [Running; COUNT]) -> [Output; COUNT] {
        self.have_them_rewrite(Dirtying::IDLE);
        migrating.map(Running::wait)
    }

    /// The migrations from a host whose memory is being copied.
    fn copying(&self, host: &str) -> Vec<MigrationView> {
        let is_copied = |view: &MigrationView| {
            let step = view.progress.as_ref().map(|progress| progress.step);
            matches!(step, Some(Step::CopyMemory | Step::CopyDirtyMemory))
        };
        self.lab.migrations(host).into_iter().filter(is_copied).collect()
    }

    /// Fails the test unless both run intact where they belong, and nothing else is left.
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

/// Makes a link of a host silent, and waits until neither host counts on it.
#[track_caller]
fn silence(lab: &TestLab, host: &str, link: &str) {
    lab.fault(&format!("blackhole {host} {link}"));
    wait_for_news(lab, &format!("path {link}–{link} is out"));
}

#[track_caller]
pub(crate) fn wait_for_news(lab: &TestLab, news: &str) {
    for host in ["a", "b"] {
        eventually(news, || lab.agent_log(host).contains(news));
    }
}

/// Kills the agent of `b`, and returns when a new one runs, and the other one watches with it.
#[track_caller]
fn start_agent_anew(lab: &TestLab) {
    lab.stop_agent("b", Signal::KILL);
    lab.start_agent("b");
    eventually("the new agent watches", || lab.agent_log("a").contains("e1–e1 is watched now"));
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
    silence(&two.lab, "b", "e1");
    for host in ["a", "b"] {
        // One watch for both, whoever sends.
        let ports = two.lab.migration_ports(host);
        assert_eq!(ports.lines().filter(|line| line.starts_with("udp")).count(), 2, "{ports}");
        let is_left = || {
            let routes = two.lab.exec(host, &["ip", "route", "show", "proto", "215"]).done();
            !routes.contains("dev e1")
        };
        eventually("no route goes over it", is_left);
    }
    two.lab.fault("heal b e1");
    wait_for_news(&two.lab, "path e1–e1 is back");
    for output in two.let_arrive(migrating) {
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
    // The other migration still has its paths and their watch.
    silence(&two.lab, "a", "e0");
    let [output] = two.let_arrive([moved]);
    two.lab.fault("heal a e0");
    let result = result_of(&output);
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e0").first(), Some(&PathState::Out), "{result:#?}");
    two.assert_settled(["b", "a"]);
}

fn the_source_agent_is_killed(two: &Two) {
    let migrating = two.migrate(["b", "b"]);
    two.lab.stop_agent("a", Signal::KILL);
    two.lab.start_agent("a");
    for output in two.let_arrive(migrating) {
        assert_eq!(result_of(&output).outcome, Outcome::Failed);
    }
    two.assert_settled(["a", "a"]);
}

fn an_agent_is_started_anew_while_two_vms_come() {
    let two = Two::set("a");
    let migrating = two.migrate(["b", "b"]);
    start_agent_anew(&two.lab);
    silence(&two.lab, "b", "e1");
    let outputs = two.let_arrive(migrating);
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
    start_agent_anew(&two.lab);
    silence(&two.lab, "a", "e0");
    let [came, went] = two.let_arrive([coming, going]);
    two.lab.fault("heal a e0");
    let came = result_of(&came);
    assert_eq!(came.outcome, Outcome::Completed, "{came:#?}");
    assert!(turns(&came, "e0").contains(&PathState::Out), "{came:#?}");
    // The agent that led the migration was killed.
    assert_ne!(went.code, 0);
    two.assert_settled(["b", "b"]);
}

fn the_target_agent_is_started_anew_in_flight() {
    let scene = Scene::set();
    scene.guest.set_dirty(NEVER_DONE);
    let migrating = scene.migrate(&[]);
    start_agent_anew(&scene.lab);
    silence(&scene.lab, "b", "e1");
    scene.guest.set_dirty(Dirtying::IDLE);
    let result = result_of(&migrating.wait());
    scene.lab.fault("heal b e1");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    let expected = [PathState::Unwatched, PathState::Watched, PathState::Out];
    assert_eq!(turns(&result, "e1")[..3], expected, "{result:#?}");
    scene.assert_settled("b");
}
