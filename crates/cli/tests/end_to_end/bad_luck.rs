//! What goes wrong in mid-flight: whatever is killed, frozen, full or cut off, one copy of the VM runs,
//! its memory is whole, and both hosts are as they were.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use drainpipe_agent::api::types::{MigrationView, VmList, VmState};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::result::{MigrationResult, Outcome, PathState};
use drainpipe_engine::step::Step;
use drainpipe_hypervisor::RunState;
use rusqlite::Connection;
use rustix::process::{Pid, Signal, getpriority_process, kill_process};

use crate::Test;
use crate::check_vms::restart_agent_with_mounts;
use crate::drain::ask;
use crate::guest::Guest;
use crate::program::{DRAINPIPE, Output, REFUSED, Running};
use crate::support::{HostNetwork, TestLab, eventually};
use crate::switch_over_faults::{hold_until_all_is_there, run_state};

pub(crate) const TESTS: &[Test] = &[
    ("the_targets_qemu_is_killed", the_targets_qemu_is_killed),
    ("the_source_agent_is_killed", the_source_agent_is_killed),
    ("the_source_is_lost_around_the_hand_over", the_source_is_lost_around_the_hand_over),
    ("the_target_host_is_lost_after_the_hand_over", the_target_host_is_lost_after_the_hand_over),
    ("the_target_agent_is_killed", the_target_agent_is_killed),
    ("the_source_agent_freezes", the_source_agent_freezes),
    (
        "the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching",
        the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching,
    ),
    ("a_link_that_is_silent_from_the_start_is_left_out", a_link_that_is_silent_from_the_start_is_left_out),
    ("the_agents_lose_each_other", the_agents_lose_each_other),
    (
        "an_agent_is_killed_and_its_program_replaced_while_its_vm_runs",
        an_agent_is_killed_and_its_program_replaced_while_its_vm_runs,
    ),
    ("two_vms_pass_each_other_and_nothing_grows", two_vms_pass_each_other_and_nothing_grows),
];

/// A guest that is in flight for 8 s over [`slow_lab`].
const MEMORY_MIB: u64 = 160;

/// Of each link of [`slow_lab`].
const SLOW_MBPS: &str = "60";

/// A flight without KVM on a machine that runs other tests too.
const FLIGHT_MAX: Duration = Duration::from_secs(100);

/// The longest that a VM may stand still when its agent is gone: 3 s until the guard acts, the rest
/// for a busy machine.
pub(crate) const GUARDED_SILENCE_MAX: Duration = Duration::from_secs(8);

/// The same while the target's agent does not answer: 4 s.
const UNANSWERED_SILENCE_MAX: Duration = Duration::from_secs(10);

/// A lab with a guest on host `a`, and what its hosts' network was.
pub(crate) struct Scene {
    pub(crate) lab: TestLab,
    pub(crate) guest: Guest,
    network: [HostNetwork; 2],
}

impl Scene {
    #[track_caller]
    pub(crate) fn set() -> Self {
        Self::in_lab(slow_lab())
    }

    #[track_caller]
    pub(crate) fn in_lab(lab: TestLab) -> Self {
        let guest = lab.start_guest("web", MEMORY_MIB, "");
        Self::of(lab, guest)
    }

    #[track_caller]
    pub(crate) fn of(lab: TestLab, guest: Guest) -> Self {
        let network = lab.network();
        Self { lab, guest, network }
    }

    /// Begins to move the guest to `b`, by `multichannel` if nothing else is said: whether `auto` takes a relay, which
    /// lives and dies with its agent, hangs on what else the machine does. Back when memory is being copied.
    #[track_caller]
    pub(crate) fn migrate(&self, arguments: &[&str]) -> Running {
        self.migrate_to("b", arguments)
    }

    /// As [`Self::migrate`], to either host.
    #[track_caller]
    pub(crate) fn migrate_to(&self, host: &str, arguments: &[&str]) -> Running {
        let option: &[&str] =
            if arguments.contains(&"--option") { &[] } else { &["--option", "multichannel"] };
        let migrating = self.lab.start(&[&["migrate", "web", host, "--json"], arguments, option].concat());
        let source = if host == "a" { "b" } else { "a" };
        eventually("memory is copied", || {
            matches!(step(&self.lab.migrations(source)), Some(Step::CopyMemory | Step::CopyDirtyMemory))
        });
        migrating
    }

    /// Waits until the VM stands still for its switch-over. Asks for nothing that is in the journal,
    /// which the test may hold.
    #[track_caller]
    pub(crate) fn wait_until_paused(&self, id: &str) {
        let end = Instant::now() + FLIGHT_MAX;
        let path = format!("/v1/migrations/{id}");
        let view = || ask::<MigrationView>(&self.lab, "a", &path, None).unwrap();
        let step = || view().progress.map(|progress| progress.step);
        while step() != Some(Step::Blackout) {
            assert!(Instant::now() < end, "the VM is not paused within {FLIGHT_MAX:?}");
            // The pause itself may be over soon.
            thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn id(&self) -> String {
        self.migrations().remove(0).id
    }

    pub(crate) fn migrations(&self) -> Vec<MigrationView> {
        self.lab.migrations("a")
    }

    /// The step of the migration under way.
    fn step(&self) -> Option<Step> {
        step(&self.migrations())
    }

    /// The result of the last migration, once it has one.
    #[track_caller]
    pub(crate) fn last_result(&self) -> MigrationResult {
        eventually("the migration is over", || {
            self.migrations().first().is_some_and(|view| view.progress.is_none())
        });
        self.migrations().remove(0).result.unwrap()
    }

    /// Fails the test unless the guest runs whole on `host` alone, and nothing else is left.
    #[track_caller]
    pub(crate) fn assert_settled(&self, host: &str) {
        let other = if host == "a" { "b" } else { "a" };
        eventually("the other host has discarded it", || {
            let list = self.lab.vms();
            list.vms.len() == 1 && list.errors.is_empty()
        });
        self.lab.assert_runs_on("web", host);
        eventually("the guest is reached", || self.guest.control().is_some());
        self.guest.assert_intact();
        eventually("no other QEMU is left", || self.lab.qemu_pid(other, "web").is_none());
        for host in ["a", "b"] {
            eventually("no guard is left", || self.lab.pids(host, &[" guard --migration "]).is_empty());
        }
        eventually("the network is put back", || self.lab.network() == self.network);
        eventually("its QEMU goes before no other", || {
            let qemu = self.lab.qemu_pid(host, "web").expect("its QEMU runs");
            let own = getpriority_process(None).unwrap();
            thread_nices(qemu).iter().all(|nice| *nice == own)
        });
    }

    /// Fails the test unless the guest, wherever it was kept from going, goes there now.
    #[track_caller]
    pub(crate) fn assert_moves(&self, host: &str) {
        self.lab.migrate("web", host, &["--option", "multichannel"]);
        self.assert_settled(host);
    }

    /// Moves the guest back to `a`, from where the next case begins; over links that have no limit meanwhile.
    #[track_caller]
    pub(crate) fn take_back(&self) {
        self.set_rates("unlimited");
        self.lab.migrate("web", "a", &["--option", "multichannel"]);
        self.set_rates(SLOW_MBPS);
    }

    #[track_caller]
    pub(crate) fn set_rates(&self, mbps: &str) {
        for link in ["e0", "e1"] {
            self.lab.fault(&format!("rate {link} {mbps}"));
        }
    }

    pub(crate) fn kill_qemu(&self, host: &str) {
        kill_process(self.lab.qemu_pid(host, "web").expect("its QEMU runs"), Signal::KILL).unwrap();
    }
}

/// The step of the first of these migrations, if it is under way.
fn step(migrations: &[MigrationView]) -> Option<Step> {
    migrations.first()?.progress.as_ref().map(|progress| progress.step)
}

/// `nice` of each thread of a process.
fn thread_nices(pid: Pid) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    let ids = threads.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    // One may have ended meanwhile.
    ids.filter_map(|id| getpriority_process(Pid::from_raw(id)).ok()).collect()
}

/// Keeps a host's agent from recording anything, for the 5 s that it waits for.
#[track_caller]
pub(crate) fn hold_journal(lab: &TestLab, host: &str) -> HeldJournal {
    let connection = Connection::open(journal(lab, host)).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    HeldJournal { connection }
}

fn journal(lab: &TestLab, host: &str) -> PathBuf {
    lab.directory(host).join("state/journal.sqlite")
}

/// As a host's journal is when it was lost between the order to run its last VM and the next question.
#[track_caller]
pub(crate) fn record_that_it_ran(lab: &TestLab, host: &str) {
    let definition = lab.files().join("web.toml");
    let definition: toml::Value = toml::from_str(&fs::read_to_string(definition).unwrap()).unwrap();
    let definition = serde_json::to_string(&definition).unwrap();
    let connection = Connection::open(journal(lab, host)).unwrap();
    let last = "WHERE rowid = (SELECT max(rowid) FROM incoming)";
    let running = format!("UPDATE incoming SET state = 'running', vm = 'web', spec = ?1 {last}");
    connection.execute(&running, [&definition]).unwrap();
    connection.execute("INSERT INTO vms (name, spec) VALUES ('web', ?1)", [&definition]).unwrap();
}

/// As host `a`'s journal is when a hand-over that could not be recorded is found there later.
#[track_caller]
fn find_hand_over(lab: &TestLab) {
    let connection = Connection::open(journal(lab, "a")).unwrap();
    let found = "UPDATE migrations SET handed_over = 1, revoked = 0 WHERE result IS NULL";
    assert_eq!(connection.execute(found, []).unwrap(), 1);
}

/// Control traffic from and to a host passes no more.
#[track_caller]
pub(crate) fn cut_off(lab: &TestLab, host: &str) {
    let cut = "add table inet cut; \
               add chain inet cut in { type filter hook input priority 0; }; \
               add rule inet cut in iifname mgmt drop; \
               add chain inet cut out { type filter hook output priority 0; }; \
               add rule inet cut out oifname mgmt drop";
    lab.exec(host, &["nft", cut]).done();
}

/// It passes again.
#[track_caller]
pub(crate) fn rejoin(lab: &TestLab, host: &str) {
    lab.exec(host, &["nft", "delete table inet cut"]).done();
}

/// Waits for the commit point; the VM is neither here nor there then.
#[track_caller]
pub(crate) fn wait_until_handed_over(lab: &TestLab) {
    let end = Instant::now() + FLIGHT_MAX;
    while !is_handed_over(lab) {
        assert!(Instant::now() < end, "the hand-over is not recorded within {FLIGHT_MAX:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Whether host `a` has recorded a hand-over whose outcome it does not know yet.
#[track_caller]
pub(crate) fn is_handed_over(lab: &TestLab) -> bool {
    let connection = Connection::open(journal(lab, "a")).unwrap();
    let query = "SELECT count(*) FROM migrations WHERE handed_over = 1 AND result IS NULL";
    connection.query_row(query, [], |row| row.get::<_, u32>(0)).unwrap() > 0
}

/// A disk of a few MiB under the journal of a host.
pub(crate) struct SmallDisk {
    filler: PathBuf,
    bytes: usize,
}

impl SmallDisk {
    /// Starts the host's agent anew on it. It is there for this agent and its children alone, so that it goes with
    /// them.
    #[track_caller]
    pub(crate) fn under_journal(lab: &TestLab, host: &str, mib: usize) -> Self {
        let state = lab.directory(host).join("state");
        restart_agent_with_mounts(
            lab,
            host,
            &format!("mount -t tmpfs -o size={mib}m none {}", state.display()),
        );
        let root = format!("/proc/{}/root", lab.agent_pid(host).unwrap());
        let filler = PathBuf::from(format!("{root}{}", state.join("filler").display()));
        Self { filler, bytes: mib << 20 }
    }

    /// To the last byte.
    pub(crate) fn fill(&self) {
        // That it ends in an error is the purpose.
        let _ = fs::write(&self.filler, vec![0; self.bytes]);
    }

    pub(crate) fn free(&self) {
        fs::remove_file(&self.filler).unwrap();
    }
}

/// Slow enough that a test does in mid-flight what it wants to, on a busy machine too.
#[track_caller]
pub(crate) fn slow_lab() -> TestLab {
    TestLab::up(&["--link", SLOW_MBPS, "--link", SLOW_MBPS])
}

pub(crate) struct HeldJournal {
    connection: Connection,
}

impl HeldJournal {
    pub(crate) fn release(self) {
        self.connection.execute_batch("ROLLBACK").unwrap();
    }
}

#[track_caller]
pub(crate) fn result_of(output: &Output) -> MigrationResult {
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:#?}"))
}

#[track_caller]
pub(crate) fn assert_failed(output: &Output, words: &str) {
    assert_eq!(output.code, 1, "{output:#?}");
    let result = result_of(output);
    assert_eq!(result.outcome, Outcome::Failed, "{result:#?}");
    let error = result.error.clone().unwrap_or_default();
    assert!(error.contains(words), "`{words}` is missing: {result:#?}");
}

fn the_targets_qemu_is_killed() {
    let scene = Scene::set();
    the_targets_qemu_is_killed_in_flight(&scene);
    the_targets_qemu_is_killed_when_all_state_is_there(&scene);
    scene.assert_moves("b");
}

fn the_targets_qemu_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.kill_qemu("b");
    assert_failed(&migrating.wait(), "its QEMU on b has ended");
    scene.assert_settled("a");
}

fn the_targets_qemu_is_killed_when_all_state_is_there(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    scene.kill_qemu("b");
    held.release();
    assert_failed(&migrating.wait(), "");
    scene.assert_settled("a");
}

fn the_source_agent_is_killed() {
    let scene = Scene::set();
    the_source_agent_is_killed_in_flight(&scene);
    the_source_agent_is_killed_after_the_hand_over(&scene);
    scene.assert_moves("a");
}

/// The source's agent is killed in mid-flight and started anew.
#[track_caller]
pub(crate) fn runs_on_without_its_agent(scene: &Scene, migrating: Running) {
    let heartbeat = scene.guest.heartbeat();
    scene.lab.stop_agent("a", Signal::KILL);
    scene.guest.assert_answers();
    // The guard lets it run on although nobody starts the agent.
    thread::sleep(Duration::from_secs(5));
    scene.guest.assert_intact();
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.lab.start_agent("a");
    assert_failed(&migrating.wait(), "its next start undid it");
}

fn the_source_agent_is_killed_in_flight(scene: &Scene) {
    runs_on_without_its_agent(scene, scene.migrate(&[]));
    let result = scene.last_result();
    assert_eq!((result.outcome, result.requested_option), (Outcome::Failed, RequestedOption::Multichannel));
    scene.assert_settled("a");
}

fn the_source_agent_is_killed_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    scene.lab.start_agent("a");
    assert_eq!(migrating.wait().code, 0);
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_source_is_lost_around_the_hand_over() {
    let scene = Scene::set();
    a_hand_over_is_found_to_be_recorded_and_the_vm_ran_on(&scene);
    the_source_host_is_lost_after_the_hand_over(&scene);
}

fn a_hand_over_is_found_to_be_recorded_and_the_vm_ran_on(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_until_all_is_there(scene);
    scene.lab.stop_agent("a", Signal::KILL);
    held.release();
    eventually("the guard has left", || scene.lab.pids("a", &[" guard --migration "]).is_empty());
    scene.guest.assert_answers();
    find_hand_over(&scene.lab);
    scene.lab.start_agent("a");
    assert_failed(&migrating.wait(), "had run on at the source");
    scene.assert_settled("a");
}

fn the_source_host_is_lost_after_the_hand_over(scene: &Scene) {
    let _migrating = scene.migrate(&[]);
    // The target is told and does not act on it, so that the source's next start finds it open.
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    let agent = scene.lab.agent_pid("b").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    held.release();
    scene.lab.stop_agent("a", Signal::KILL);
    scene.kill_qemu("a");
    scene.lab.start_agent("a");
    scene.lab.drainpipe(&["vm", "start", "web"]).refused(3, &["is being moved"]);
    kill_process(agent, Signal::CONT).unwrap();
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_target_host_is_lost_after_the_hand_over() {
    let scene = Scene::in_lab(impatient_lab());
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    let reclaim = |host| scene.lab.drainpipe(&["vm", "reclaim", "web", "--lost", host, "--yes"]);
    reclaim("c").refused(2, &["was handed over to b, not to c"]);
    scene.lab.stop_agent("b", Signal::KILL);
    scene.kill_qemu("b");
    held.release();
    assert_eq!(migrating.wait().code, 4);
    scene.lab.drainpipe(&["vm", "reclaim", "web", "--lost", "b"]).refused(2, &["add --yes"]);
    let told = reclaim("b");
    assert_eq!(told.code, 0, "{told:#?}");
    assert!(told.stderr.contains("`drainpipe vm start web` boots it anew"), "{told:#?}");
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
    assert!(scene.lab.qemu_pid("a", "web").is_none(), "its disks may be newer than its memory");
    scene.lab.drainpipe(&["vm", "start", "web"]).done();
    scene.guest.wait_until_ready();
    scene.guest.assert_intact();
    // When the host is back, nothing of the VM is left there.
    scene.lab.start_agent("b");
    scene.assert_settled("a");
    reclaim("b").refused(3, &["is not in doubt"]);
    // Nor if it had begun to run there.
    scene.lab.stop_agent("b", Signal::KILL);
    record_that_it_ran(&scene.lab, "b");
    scene.lab.start_agent("b");
    scene.assert_settled("a");
    scene.assert_moves("b");
}

fn the_target_agent_is_killed() {
    let scene = Scene::set();
    the_target_agent_is_killed_in_flight(&scene);
    the_target_agent_is_killed_after_the_hand_over(&scene);
}

fn the_target_agent_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("b", Signal::KILL);
    let output = migrating.wait();
    assert_failed(&output, "the agent of b");
    // Nor did it fly on as if somebody had watched.
    for path in result_of(&output).paths {
        assert_eq!(path.turns[0].state, PathState::Unwatched, "{path:#?}");
    }
    scene.guest.assert_intact();
    scene.lab.start_agent("b");
    scene.assert_settled("a");
}

fn the_target_agent_is_killed_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    scene.lab.stop_agent("b", Signal::KILL);
    held.release();
    scene.lab.start_agent("b");
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Completed);
    scene.assert_settled("b");
}

fn the_source_agent_freezes() {
    // So slow that the agent wakes up before the VM is paused.
    let scene = Scene::in_lab(TestLab::up(&["--link", "40", "--link", "40"]));
    the_source_agent_freezes_while_the_vm_is_paused(&scene);
    the_source_agent_freezes_in_flight(&scene);
}

fn the_source_agent_freezes_while_the_vm_is_paused(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let id = scene.id();
    let heartbeat = scene.guest.heartbeat();
    let agents = ["b", "a"].map(|host| scene.lab.agent_pid(host).unwrap());
    // Without its target's agent the source gets no further than to the pause.
    kill_process(agents[0], Signal::STOP).unwrap();
    scene.wait_until_paused(&id);
    kill_process(agents[1], Signal::STOP).unwrap();
    scene.guest.assert_answers();
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    for agent in agents {
        kill_process(agent, Signal::CONT).unwrap();
    }
    assert_eq!(migrating.wait().code, 1);
    scene.assert_settled("a");
}

fn the_source_agent_freezes_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let heartbeat = scene.guest.heartbeat();
    let agent = scene.lab.agent_pid("a").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    thread::sleep(Duration::from_secs(6));
    kill_process(agent, Signal::CONT).unwrap();
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.assert_settled("b");
}

fn the_source_agent_is_stopped_and_ctrl_c_cancels_or_stops_watching() {
    let scene = Scene::set();
    the_source_agent_is_stopped_in_flight(&scene);
    an_agent_that_winds_up_begins_nothing(&scene);
    ctrl_c_cancels(&scene);
    a_second_ctrl_c_stops_watching(&scene);
}

fn the_source_agent_is_stopped_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.stop_agent("a", Signal::TERM);
    scene.guest.assert_intact();
    assert_eq!(scene.lab.qemu_pid("b", "web"), None, "the target has discarded it");
    assert_eq!(scene.lab.network(), scene.network, "put back before the agent ended");
    // Told by the agent that was stopped, not by its next life.
    let output = migrating.wait();
    assert_eq!(output.code, 5, "{output:#?}");
    assert_eq!(result_of(&output).outcome, Outcome::Cancelled);
    scene.lab.start_agent("a");
    scene.assert_settled("a");
}

/// While an agent winds its migrations up, it says what becomes of them and begins nothing.
fn an_agent_that_winds_up_begins_nothing(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    // So the target cannot discard the VM at once.
    let held = hold_journal(&scene.lab, "b");
    kill_process(scene.lab.agent_pid("a").unwrap(), Signal::TERM).unwrap();
    eventually("it is being stopped", || {
        let refused = scene.lab.drainpipe(&["vm", "start", "web"]);
        refused.code == REFUSED && refused.stderr.contains("is being stopped")
    });
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["is being stopped"]);
    assert!(scene.step().is_some(), "it answers what it is asked");
    held.release();
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Cancelled);
    eventually("the agent ends", || scene.lab.agent_pid("a").is_none());
    scene.lab.start_agent("a");
    scene.assert_settled("a");
}

fn ctrl_c_cancels(scene: &Scene) {
    for delay_ms in [20, 60, 150, 300] {
        let migrating = scene.lab.start(&["migrate", "web", "b", "--json"]);
        eventually("it has begun", || scene.step().is_some());
        thread::sleep(Duration::from_millis(delay_ms));
        migrating.signal(Signal::INT);
        let output = migrating.wait();
        assert_eq!(output.code, 5, "{output:#?}");
        assert_eq!(result_of(&output).outcome, Outcome::Cancelled);
        scene.assert_settled("a");
    }
    let migrating = scene.migrate(&[]);
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    assert_eq!(migrating.wait().code, 5);
    scene.assert_settled("a");
}

fn a_second_ctrl_c_stops_watching(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let agent = scene.lab.agent_pid("a").unwrap();
    kill_process(agent, Signal::STOP).unwrap();
    migrating.signal(Signal::INT);
    thread::sleep(Duration::from_secs(1));
    migrating.signal(Signal::INT);
    migrating.wait().refused(1, &["is not watched any more", "drainpipe history"]);
    kill_process(agent, Signal::CONT).unwrap();
    // Whether the frozen agent still heard the request does not matter.
    let moved = scene.last_result().outcome == Outcome::Completed;
    scene.assert_settled(if moved { "b" } else { "a" });
}

fn a_link_that_is_silent_from_the_start_is_left_out() {
    let scene = Scene::in_lab(TestLab::fast());
    scene.lab.fault("blackhole a e0");
    let moved = scene.lab.migrate("web", "b", &["--option", "multichannel"]);
    assert!(moved.fallback_reason.is_some(), "{moved:#?}");
    assert!(moved.paths.iter().all(|path| path.link == "e1"), "{moved:#?}");
    let moved = scene.lab.migrate("web", "a", &["--option", "tcp"]);
    assert!(moved.paths.iter().all(|path| path.link == "e1"), "{moved:#?}");
    scene.assert_settled("a");
}

/// Says soon that an outcome is not known.
pub(crate) fn impatient_lab() -> TestLab {
    let lab = slow_lab();
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[limits]\ndecision_s = 2\n\n[tls]");
    lab.start_agent("a");
    lab
}

fn the_agents_lose_each_other() {
    let scene = Scene::in_lab(impatient_lab());
    the_agents_lose_each_other_in_flight(&scene);
    the_agents_lose_each_other_after_the_hand_over(&scene);
}

fn the_agents_lose_each_other_in_flight(scene: &Scene) {
    let heartbeat = scene.guest.heartbeat();
    let migrating = scene.migrate(&[]);
    cut_off(&scene.lab, "b");
    // All memory arrives, and nobody can say so.
    assert_failed(&migrating.wait(), "the agent of b");
    assert!(heartbeat.longest_gap() < UNANSWERED_SILENCE_MAX, "{:?}", heartbeat.statistics());
    scene.guest.assert_intact();
    assert!(!is_handed_over(&scene.lab));
    // The target cannot know that, and keeps what may be the only whole copy.
    assert_eq!(run_state(&scene.lab, "b", "web"), RunState::Paused);
    assert_eq!(run_state(&scene.lab, "a", "web"), RunState::Running);
    rejoin(&scene.lab, "b");
    scene.assert_settled("a");
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
}

fn the_agents_lose_each_other_after_the_hand_over(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    let held = hold_journal(&scene.lab, "b");
    wait_until_handed_over(&scene.lab);
    cut_off(&scene.lab, "b");
    held.release();
    let output = migrating.wait();
    assert_eq!(output.code, 4, "{output:#?}");
    assert_eq!(result_of(&output).outcome, Outcome::Undecided);
    // It may run on the target: it does not here, nor can it be made to.
    scene.lab.drainpipe(&["migrate", "web", "b"]).refused(3, &["is being moved"]);
    scene.guest.assert_answers();
    rejoin(&scene.lab, "b");
    eventually("it is decided", || scene.migrations()[0].progress.is_none());
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    scene.assert_settled("b");
}

/// Each agent in turn, at both ends of a migration between.
fn an_agent_is_killed_and_its_program_replaced_while_its_vm_runs() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    lab.stop_agent("a", Signal::KILL);
    let old = lab.files().join("drainpipe");
    fs::copy(DRAINPIPE, &old).unwrap();
    lab.start_agent_by("a", &[old.to_str().unwrap()]);
    fs::remove_file(&old).unwrap();
    lab.assert_runs_on("web", "a");
    lab.migrate("web", "b", &[]);
    guest.assert_intact();

    let heartbeat = guest.heartbeat();
    lab.stop_agent("b", Signal::KILL);
    lab.start_agent("b");
    lab.assert_runs_on("web", "b");
    guest.assert_intact();
    assert!(heartbeat.longest_gap() < Duration::from_secs(2), "{:?}", heartbeat.statistics());
    lab.migrate("web", "a", &[]);
    guest.assert_intact();
}

/// Pools and caches are full after the second. What grows by one with each further round is seen.
const ROUNDS: usize = 7;

fn two_vms_pass_each_other_and_nothing_grows() {
    let lab = TestLab::fast();
    let guests = [lab.start_guest("web", MEMORY_MIB, ""), lab.start_guest("db", MEMORY_MIB, "")];
    lab.migrate("db", "b", &[]);
    let mut here_and_there = ["a", "b"];
    let mut at_first = None;
    for round in 0..ROUNDS {
        here_and_there.reverse();
        let moves = [("web", here_and_there[0]), ("db", here_and_there[1])];
        let moving = moves.map(|(vm, to)| lab.start(&["migrate", vm, to]));
        for output in moving.map(Running::wait) {
            assert_eq!(output.code, 0, "{output:#?}");
        }
        if round == 1 {
            at_first = Some(["a", "b"].map(|host| open_things(lab.agent_pid(host).unwrap())));
        }
    }
    for guest in &guests {
        guest.assert_intact();
    }
    let at_first = at_first.unwrap();
    eventually("no descriptor or thread is left behind", || {
        let now = ["a", "b"].map(|host| open_things(lab.agent_pid(host).unwrap()));
        now.iter().zip(&at_first).all(|(now, first)| now.0 <= first.0 + 4 && now.1 <= first.1 + 4)
    });
    for host in ["a", "b"] {
        // Their watch begins and ends with each round, at both ends in any order.
        let log = lab.agent_log(host);
        assert!(!log.contains("is not watched"), "{log}");
    }
    let list: VmList = lab.json(&["vms"]);
    assert!(list.vms.iter().all(|vm| vm.state == VmState::Running), "{list:#?}");
}

/// Descriptors and threads of a process.
fn open_things(pid: Pid) -> (usize, usize) {
    let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (count("fd"), count("task"))
}
