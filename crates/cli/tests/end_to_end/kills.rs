//! Not a test: QEMUs and agents killed at each of a migration's ten steps, and what becomes of the VM, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_KILLS=1 cargo test --release -p drainpipe-cli --test end_to_end` kills each of them at each step
//! and prints a table. It needs a quiet machine: beside other tests, it misses steps of a few ms.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_api_types::{MigrationView, VmState};
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

use crate::scene::Scene;
use crate::support::{PATIENCE, TestLab, eventually};

/// How often a step is tried. Some take a few ms, and a migration may be past one before that is seen.
const ATTEMPTS: usize = 8;

/// How long a killed agent stays down. Before the pause, the source's guard meanwhile lets its VM run on.
const GONE_FOR: Duration = Duration::from_secs(6);

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    SourceQemu,
    TargetQemu,
    SourceAgent,
    TargetAgent,
    BothAgents,
}

/// When killed agents restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    AtOnce,
    Late,
}

/// What became of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fate {
    host: &'static str,
    // Whether its QEMU was killed while that was the VM's only one.
    has_died: bool,
}

impl Victim {
    /// The hosts whose agents are killed.
    fn agents(self) -> &'static [&'static str] {
        match self {
            Self::SourceQemu | Self::TargetQemu => &[],
            Self::SourceAgent => &["a"],
            Self::TargetAgent => &["b"],
            Self::BothAgents => &["a", "b"],
        }
    }

    /// The host whose QEMU is killed.
    fn qemu(self) -> Option<&'static str> {
        match self {
            Self::SourceQemu => Some("a"),
            Self::TargetQemu => Some("b"),
            _ => None,
        }
    }

    /// Whether this victim exists at this step.
    fn is_there(self, step: Step) -> bool {
        self != Self::TargetQemu || step >= Step::BuildIncomingVm
    }
}

/// Kills each victim whose name contains `filter` at each step, and prints where the VM was afterwards.
pub(crate) fn run(filter: &str) {
    use Victim::{BothAgents, SourceAgent, SourceQemu, TargetAgent, TargetQemu};
    let kinds = [
        ("source's QEMU", SourceQemu, Start::AtOnce),
        ("target's QEMU", TargetQemu, Start::AtOnce),
        ("source's agent", SourceAgent, Start::AtOnce),
        ("source's agent, started 6 s later", SourceAgent, Start::Late),
        ("target's agent", TargetAgent, Start::AtOnce),
        ("target's agent, started 6 s later", TargetAgent, Start::Late),
        ("both agents", BothAgents, Start::AtOnce),
        ("both agents, started 6 s later", BothAgents, Start::Late),
    ];
    println!("| killed at step | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 |");
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, victim, start) in kinds.into_iter().filter(|(name, ..)| name.contains(filter)) {
        let cells = at_each_step(victim, start).into_iter().map(|(step, fate)| match fate {
            Some(Fate { host, has_died: false }) => host.to_owned(),
            Some(Fate { host, has_died: true }) => format!("died, {host}"),
            None if victim.is_there(step) => "missed".to_owned(),
            None => "–".to_owned(),
        });
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
}

/// `None` for a step at which there was nothing to kill, or that was missed.
fn at_each_step(victim: Victim, start: Start) -> Vec<(Step, Option<Fate>)> {
    let lab = TestLab::up(&["--link", "300", "--link", "300"]);
    // The guest writes so that step 7 takes longer than a look at it.
    let guest = lab.start_guest("web", 160, "drainpipe.dirty_mib_per_s=8");
    let scene = Scene::of(lab, guest);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let fate = |step: Step| {
        let mut attempts = 0..ATTEMPTS;
        attempts
            .find_map(|_| victim.is_there(step).then(|| kill_at(&scene, &runtime, step, victim, start))?)
    };
    Step::ALL.map(|step| (step, fate(step))).into()
}

/// `None` if the migration was past that step before it was seen there.
fn kill_at(scene: &Scene, runtime: &Runtime, step: Step, victim: Victim, start: Start) -> Option<Fate> {
    let lab = &scene.lab;
    let agents: Vec<Pid> = victim.agents().iter().map(|host| lab.agent_pid(host).expect("it runs")).collect();
    let migrating = lab.start(&["migrate", "web", "b", "--option", "multichannel", "--json"]);
    let is_seen = sees(lab, runtime, step);
    if is_seen {
        let qemu = victim.qemu().map(|host| qemu_of(lab, host));
        for pid in agents.into_iter().chain(qemu) {
            kill_process(pid, Signal::KILL).unwrap();
        }
        if start == Start::Late {
            thread::sleep(GONE_FOR);
            // At later steps, nobody may let the VM run before the target's journal is asked.
            if step < Step::Downtime {
                scene.guest.assert_answers();
            }
        }
        victim.agents().iter().for_each(|host| lab.start_agent(host));
    }
    // The command's exit does not matter: the VM's fate is checked below.
    drop(migrating.wait());
    let fate = settled(scene);
    if fate.host == "b" {
        lab.migrate("web", "a", &["--option", "multichannel"]);
        scene.assert_settled("a");
    }
    assert!(!fate.has_died || victim.qemu().is_some(), "{victim:?} at {step:?}: {fate:?}");
    is_seen.then_some(fate)
}

/// Waits until the migration that has just begun is at this step; returns whether it was seen there.
#[track_caller]
fn sees(lab: &TestLab, runtime: &Runtime, step: Step) -> bool {
    let client = ApiClient::over_socket(lab.agent_socket("a").as_ref()).unwrap();
    let newest = || -> Option<MigrationView> {
        let list: Vec<MigrationView> = runtime.block_on(client.get("/v1/migrations?limit=1")).unwrap();
        list.into_iter().next()
    };
    let before = newest().filter(|view| view.progress.is_none()).map(|view| view.id);
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        match newest() {
            Some(MigrationView { progress: Some(progress), .. }) if progress.step >= step => {
                return progress.step == step;
            }
            Some(MigrationView { progress: None, id, .. }) if before.as_ref() != Some(&id) => return false,
            _ => thread::sleep(Duration::from_millis(1)),
        }
    }
    panic!("the migration is not at {step:?} within {PATIENCE:?}");
}

/// Uses the process's own file, since the process may be gone within a few ms.
#[track_caller]
pub(crate) fn qemu_of(lab: &TestLab, host: &str) -> Pid {
    let file = lab.directory(host).join("run/vms/web/pid");
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        let pid =
            fs::read_to_string(&file).ok().and_then(|text| text.split_whitespace().next()?.parse().ok());
        match pid.and_then(Pid::from_raw) {
            Some(pid) => return pid,
            None => thread::sleep(Duration::from_millis(1)),
        }
    }
    panic!("no QEMU on {host} within {PATIENCE:?}");
}

/// The host of the VM once everything is over; the VM is intact, and only there. One that has died is booted again
/// there.
#[track_caller]
fn settled(scene: &Scene) -> Fate {
    let lab = &scene.lab;
    let newest = || lab.migrations("a").into_iter().next();
    eventually("the migration is over", || newest().is_some_and(|view| view.progress.is_none()));
    let found = || {
        let list = lab.vms();
        match &list.vms[..] {
            [vm] if list.errors.is_empty() && matches!(vm.state, VmState::Running | VmState::Stopped) => {
                Some((if vm.host == "a" { "a" } else { "b" }, vm.state == VmState::Stopped))
            }
            _ => None,
        }
    };
    eventually("one host has the VM, and knows what it does", || found().is_some());
    let (host, has_died) = found().expect("it was there a moment ago");
    if has_died {
        lab.drainpipe(&["vm", "start", "web", "--agent", &lab.agent_socket(host)]).done();
        scene.guest.wait_until_ready();
    }
    scene.assert_settled(host);
    let outcome = newest().and_then(|view| view.result).map(|result| result.outcome);
    assert_eq!(outcome == Some(Outcome::Completed), host == "b", "what is told is what is so: {outcome:?}");
    Fate { host, has_died }
}
