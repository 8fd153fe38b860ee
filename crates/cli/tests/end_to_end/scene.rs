//! Two hosts and a VM that is slow to move, for failures in mid-flight: what can be done to them, and what must be true
//! afterwards.

use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{fs, thread};

use drainpipe_api_types::MigrationView;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use rusqlite::Connection;
use rustix::process::{Pid, Signal, getpriority_process, kill_process};

use crate::check_vms::restart_agent_with_mounts;
use crate::drain::ask;
use crate::guest::Guest;
use crate::program::{Output, Running};
use crate::support::{HostNetwork, TestLab, eventually};

/// A guest that is in flight for 8 s over [`slow_lab`].
pub(crate) const MEMORY_MIB: u64 = 160;

/// The speed of each link of [`slow_lab`].
pub(crate) const SLOW_MBPS: &str = "60";

/// The longest flight without KVM on a machine that runs other tests too.
const FLIGHT_MAX: Duration = Duration::from_secs(100);

/// Parts of the 5 s that an agent waits for its journal: how long a test may take to see that the guest stands still,
/// and how long the other agent may take to say that everything has arrived. Then, how often the test tries.
const SEEN_WITHIN: Duration = Duration::from_millis(2500);
const SAID_WITHIN: Duration = Duration::from_millis(500);
const HOLDS_MAX: usize = 5;

/// A lab with a guest on host `a`, and its hosts' network as it was before.
pub(crate) struct Scene {
    pub(crate) lab: TestLab,
    pub(crate) guest: Guest,
    pub(crate) network: [HostNetwork; 2],
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

    /// Begins to move the guest to `b`, by `multichannel` if nothing else is given: whether `auto` uses a relay, which
    /// ends with its agent, would depend on the machine's load. Returns when memory is being copied.
    #[track_caller]
    pub(crate) fn migrate(&self, arguments: &[&str]) -> Running {
        self.migrate_to("b", arguments)
    }

    /// Like [`Self::migrate`], to either host.
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

    /// Waits until the VM stands still for its switch-over. Asks nothing that needs the journal, which the test may
    /// hold.
    #[track_caller]
    pub(crate) fn wait_until_paused(&self, id: &str) {
        let end = Instant::now() + FLIGHT_MAX;
        while self.step_of(id) != Some(Step::Downtime) {
            assert!(Instant::now() < end, "the VM is not paused within {FLIGHT_MAX:?}");
            // The pause itself may be short.
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Begins to move the guest to `b`, and keeps the hand-over from being recorded, so that the target gets no order
    /// to run. Returns soon after `is_there` says that all state is on the target, when its agent has had time to say
    /// so. `is_near`, which may cost less, is asked before. The source's agent waits for 5 s, and a busy machine may
    /// notice too late; then everything is tried again.
    #[track_caller]
    pub(crate) fn migrate_and_hold(
        &self,
        is_near: impl Fn(&str) -> bool,
        is_there: impl Fn() -> bool,
    ) -> (Running, HeldJournal) {
        for _ in 0..HOLDS_MAX {
            let migrating = self.migrate(&[]);
            let id = self.id();
            let held = hold_journal(&self.lab, "a");
            // Whoever is asked may answer only after the agent has waited in vain.
            let mut asked = Instant::now();
            eventually("the guest is paused", || {
                asked = Instant::now();
                is_near(&id)
            });
            while asked.elapsed() < SEEN_WITHIN {
                if is_there() && asked.elapsed() < SEEN_WITHIN {
                    thread::sleep(SAID_WITHIN);
                    return (migrating, held);
                }
                thread::sleep(Duration::from_millis(20));
            }
            held.release();
            drop(migrating.wait());
            if self.last_result().outcome == Outcome::Completed {
                self.take_back();
            }
        }
        panic!("that all state is on the target was seen too late, {HOLDS_MAX} times")
    }

    /// The step of a migration under way. Asks nothing that needs the journal.
    #[track_caller]
    pub(crate) fn step_of(&self, id: &str) -> Option<Step> {
        let path = format!("/v1/migrations/{id}");
        let view = ask::<MigrationView>(&self.lab, "a", &path, None).unwrap();
        view.progress.map(|progress| progress.step)
    }

    pub(crate) fn id(&self) -> String {
        self.migrations().remove(0).id
    }

    pub(crate) fn migrations(&self) -> Vec<MigrationView> {
        self.lab.migrations("a")
    }

    pub(crate) fn step(&self) -> Option<Step> {
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

    /// Fails the test unless the guest runs intact on `host` alone, and nothing else is left of it.
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
        eventually("no session goes before others", || {
            let agents = ["a", "b"].into_iter().filter_map(|host| self.lab.agent_pid(host));
            agents.map(session_nice).all(|nice| nice.is_none_or(|nice| nice >= 0))
        });
    }

    /// Fails the test unless the guest now moves to where it was kept from going.
    #[track_caller]
    pub(crate) fn assert_moves(&self, host: &str) {
        self.lab.migrate("web", host, &["--option", "multichannel"]);
        self.assert_settled(host);
    }

    /// Moves the guest back to `a`, where the next case begins, over links without a limit meanwhile.
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

/// A disk of a few MiB under the journal of a host.
pub(crate) struct SmallDisk {
    filler: PathBuf,
    bytes: usize,
}

impl SmallDisk {
    /// Restarts the host's agent on this disk. Only this agent and its children see the mount, so that it ends with
    /// them.
    #[track_caller]
    pub(crate) fn under_journal(lab: &TestLab, host: &str, mib: usize) -> Self {
        let state = lab.directory(host).join("state");
        restart_agent_with_mounts(
            lab,
            host,
            &format!(
                "cp -a {0} {0}.before && mount -t tmpfs -o size={mib}m none {0} && cp -a {0}.before/. {0}",
                state.display()
            ),
        );
        let root = format!("/proc/{}/root", lab.agent_pid(host).unwrap());
        let filler = PathBuf::from(format!("{root}{}", state.join("filler").display()));
        Self { filler, bytes: mib << 20 }
    }

    /// Fills the disk to the last byte.
    pub(crate) fn fill(&self) {
        // It is meant to end in an error.
        let _ = fs::write(&self.filler, vec![0; self.bytes]);
    }

    pub(crate) fn free(&self) {
        fs::remove_file(&self.filler).unwrap();
    }
}

pub(crate) struct HeldJournal {
    connection: Connection,
}

impl HeldJournal {
    pub(crate) fn release(self) {
        self.connection.execute_batch("ROLLBACK").unwrap();
    }
}

/// The step of the first of these migrations, if it is under way.
pub(crate) fn step(migrations: &[MigrationView]) -> Option<Step> {
    migrations.first()?.progress.as_ref().map(|progress| progress.step)
}

/// The `nice` value of a process's session, where the kernel groups threads by session.
pub(crate) fn session_nice(pid: Pid) -> Option<i32> {
    let text = fs::read_to_string(format!("/proc/{}/autogroup", pid.as_raw_nonzero())).ok()?;
    text.trim().rsplit_once(" nice ")?.1.parse().ok()
}

/// The `nice` value of each thread of a process.
fn thread_nices(pid: Pid) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap();
    let ids = threads.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    // One may have ended meanwhile.
    ids.filter_map(|id| getpriority_process(Pid::from_raw(id)).ok()).collect()
}

/// Keeps a host's agent from recording anything for the 5 s that it waits for its journal.
#[track_caller]
pub(crate) fn hold_journal(lab: &TestLab, host: &str) -> HeldJournal {
    let connection = Connection::open(journal(lab, host)).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE").unwrap();
    HeldJournal { connection }
}

pub(crate) fn journal(lab: &TestLab, host: &str) -> PathBuf {
    lab.directory(host).join("state/journal.sqlite")
}

/// Makes a host's journal what it is if it was lost between the order to run its last VM and the next question.
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

/// Makes host `a`'s journal what it is if a hand-over that could not be recorded is found there later.
#[track_caller]
pub(crate) fn find_hand_over(lab: &TestLab) {
    let connection = Connection::open(journal(lab, "a")).unwrap();
    let found = "UPDATE migrations SET handed_over = 1, revoked = 0 WHERE result IS NULL";
    assert_eq!(connection.execute(found, []).unwrap(), 1);
}

/// Stops control traffic from and to a host.
#[track_caller]
pub(crate) fn cut_off(lab: &TestLab, host: &str) {
    let cut = "add table inet cut; \
               add chain inet cut in { type filter hook input priority 0; }; \
               add rule inet cut in iifname mgmt drop; \
               add chain inet cut out { type filter hook output priority 0; }; \
               add rule inet cut out oifname mgmt drop";
    lab.exec(host, &["nft", cut]).done();
}

/// Lets control traffic pass again.
#[track_caller]
pub(crate) fn rejoin(lab: &TestLab, host: &str) {
    lab.exec(host, &["nft", "delete table inet cut"]).done();
}

/// Waits for the commit point, when the VM runs on neither host.
#[track_caller]
pub(crate) fn wait_until_handed_over(lab: &TestLab) {
    let end = Instant::now() + FLIGHT_MAX;
    while !is_handed_over(lab) {
        assert!(Instant::now() < end, "the hand-over is not recorded within {FLIGHT_MAX:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Waits until host `b` has recorded that the last VM on its way runs there; false if it will not.
#[track_caller]
pub(crate) fn wait_until_told_to_run(lab: &TestLab) -> bool {
    let connection = Connection::open(journal(lab, "b")).unwrap();
    let end = Instant::now() + FLIGHT_MAX;
    while Instant::now() < end {
        match last_incoming_state(&connection).as_deref() {
            // QEMU's answer is not known yet.
            None | Some("waiting") => thread::sleep(Duration::from_millis(1)),
            state => return state == Some("running"),
        }
    }
    panic!("the VM is not told to run on the target within {FLIGHT_MAX:?}");
}

/// Whether host `b` has recorded that the last VM on its way runs there.
#[track_caller]
pub(crate) fn is_told_to_run(lab: &TestLab) -> bool {
    let connection = Connection::open(journal(lab, "b")).unwrap();
    last_incoming_state(&connection).as_deref() == Some("running")
}

fn last_incoming_state(journal: &Connection) -> Option<String> {
    let query = "SELECT state FROM incoming ORDER BY rowid DESC LIMIT 1";
    journal.query_row(query, [], |row| row.get(0)).ok()
}

/// Whether host `a` has recorded a hand-over of which it does not know the outcome yet.
#[track_caller]
pub(crate) fn is_handed_over(lab: &TestLab) -> bool {
    let connection = Connection::open(journal(lab, "a")).unwrap();
    let query = "SELECT count(*) FROM migrations WHERE handed_over = 1 AND result IS NULL";
    connection.query_row(query, [], |row| row.get::<_, u32>(0)).unwrap() > 0
}

/// A lab slow enough that a test can do in mid-flight what it wants to, even on a busy machine.
#[track_caller]
pub(crate) fn slow_lab() -> TestLab {
    TestLab::up(&["--link", SLOW_MBPS, "--link", SLOW_MBPS])
}

/// A lab whose agents soon report that an outcome is not known.
pub(crate) fn impatient_lab() -> TestLab {
    let lab = slow_lab();
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[limits]\ndecision_s = 2\n\n[tls]");
    lab.start_agent("a");
    lab
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
    let error = result.failure.error.clone().unwrap_or_default();
    assert!(error.contains(words), "`{words}` is missing: {result:#?}");
}
