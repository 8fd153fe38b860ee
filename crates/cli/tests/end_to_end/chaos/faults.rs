//! Causes faults, and repairs them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_lab::Fault as LabFault;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::busy::{Busy, Machine};
use super::clocks::Clocks;
use super::copies::{Copies, Copy};
use super::flood::Flood;
use super::journals::Journals;
use super::ledger::{Ledger, Victim};
use super::plan::{FaultKind, Spoil};
use crate::support::TestLab;

/// The largest frame that still passes when large frames do not.
const LARGE_BYTES: u32 = 1400;

/// How soon an agent is restarted that has ended by itself, as it does when its disk is full.
const START_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The faults that a lab has now.
pub(super) struct Faults<'lab> {
    lab: &'lab TestLab,
    machine: Arc<Machine>,
    links: Vec<String>,
    journals: Journals<'lab>,
    clocks: Clocks,
    active: Vec<Active>,
    killed_pids: BTreeSet<i32>,
    /// VMs that may have been lost with a QEMU that was killed in this round.
    may_be_lost: BTreeSet<String>,
    started_at: BTreeMap<String, Instant>,
    /// The agent that was found last on each host.
    agents: BTreeMap<String, Pid>,
}

struct Active {
    victim: Victim,
    undo: Undo,
    until: Instant,
}

enum Undo {
    StartAgent(String),
    Continue(OwnedFd),
    Heal {
        host: String,
        link: String,
    },
    FreeDisk(String),
    SetClock(String),
    /// An operator lets the agent continue with what there is, as soon as it says that it does not believe its journal.
    Adopt,
    Rest(Busy),
    Await(Flood),
}

/// Where a fault is to strike, as far as that is known.
#[derive(Debug, Clone)]
pub(super) struct Where {
    pub(super) host: String,
    pub(super) vm: String,
    /// With post-copy, a VM on its way needs both of its QEMUs.
    pub(super) needs_both: bool,
}

impl<'lab> Faults<'lab> {
    /// Gives each host a clock of its own, and its journal a disk of its own; both outlive its agent.
    pub(super) fn prepare(lab: &'lab TestLab, machine: Arc<Machine>, hosts: &[String]) -> Self {
        let clocks = Clocks::prepare(lab);
        let journals = Journals::prepare(lab, hosts, &clocks);
        let links = lab.lab().spec().link_names();
        Self {
            lab,
            machine,
            links,
            journals,
            clocks,
            active: vec![],
            killed_pids: BTreeSet::new(),
            may_be_lost: BTreeSet::new(),
            started_at: BTreeMap::new(),
            agents: BTreeMap::new(),
        }
    }

    /// Causes the fault, unless its victim suffers already or does not exist; returns whether it did.
    pub(super) fn begin(
        &mut self,
        kind: FaultKind,
        at: &Where,
        lasts: Duration,
        copies: &Copies,
        ledger: &mut Ledger,
    ) -> bool {
        let until = Instant::now() + lasts;
        let done = self.make(kind, at, copies, ledger);
        for (victim, _) in &done {
            ledger.note(&format!("fault: {kind:?} of {victim:?} for {lasts:?}"));
            ledger.fault_began(victim.clone());
        }
        let is_done = !done.is_empty();
        for (victim, undo) in done {
            match undo {
                Some(Undo::Adopt) => {}
                Some(undo) => self.active.push(Active { victim, undo, until }),
                None => ledger.fault_ended(&victim),
            }
        }
        is_done
    }

    fn make(
        &mut self,
        kind: FaultKind,
        at: &Where,
        copies: &Copies,
        ledger: &Ledger,
    ) -> Vec<(Victim, Option<Undo>)> {
        let host = &at.host;
        let agent = Victim::Agent(host.clone());
        let guard = Victim::Guard(at.vm.clone());
        let qemu = Victim::Qemu { vm: at.vm.clone(), host: host.clone() };
        let journal = Victim::Journal(host.clone());
        let disk = Victim::JournalDisk(host.clone());
        let requests = Victim::Requests(host.clone());
        let is_free = |victim: &Victim| !ledger.is_suffering(victim);
        let copy = copies.living(&at.vm).find(|copy| copy.identity.host == *host);
        match kind {
            FaultKind::KillAgent if is_free(&agent) => {
                let killed =
                    self.lab.agent_pid(host).is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok());
                let undo = Undo::StartAgent(host.clone());
                killed.then_some((agent, Some(undo))).into_iter().collect()
            }
            FaultKind::FreezeAgent if is_free(&agent) => freeze(self.lab.agent_pid(host), agent),
            FaultKind::KillGuard if is_free(&guard) => {
                let killed = self.guard(at).is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok());
                killed.then_some((guard, None)).into_iter().collect()
            }
            FaultKind::FreezeGuard if is_free(&guard) => freeze(self.guard(at), guard),
            FaultKind::KillQemu if is_free(&qemu) => {
                copy.filter(|copy| self.kill(copy, at, copies)).map(|_| (qemu, None)).into_iter().collect()
            }
            FaultKind::FreezeQemu if is_free(&qemu) => {
                freeze(copy.and_then(|copy| Pid::from_raw(copy.identity.pid)), qemu)
            }
            FaultKind::FullJournal if is_free(&disk) && is_free(&journal) => {
                self.journals.fill_disk(host);
                vec![(disk, Some(Undo::FreeDisk(host.clone())))]
            }
            FaultKind::SpoilJournal(way) if is_free(&disk) && is_free(&journal) && is_free(&agent) => {
                if self.spoil(host, way) {
                    vec![(agent, Some(Undo::StartAgent(host.clone()))), (journal, Some(Undo::Adopt))]
                } else {
                    vec![]
                }
            }
            FaultKind::Clock { ahead_s } if is_free(&Victim::Clock(host.clone())) => {
                self.clocks.set_ahead(host, ahead_s);
                let certificates = kind.is_before_certificates().then(|| Victim::Certificates(host.clone()));
                let victims = [Victim::Clock(host.clone())].into_iter().chain(certificates);
                victims.map(|victim| (victim, Some(Undo::SetClock(host.clone())))).collect()
            }
            FaultKind::BusyMachine if is_free(&Victim::Machine) => {
                vec![(Victim::Machine, Some(Undo::Rest(Busy::begin(&self.machine))))]
            }
            FaultKind::FloodOfDeletes if is_free(&requests) => {
                let flood = self.uninvolved_host(at, copies).map(|from| Flood::begin(self.lab, &from, host));
                flood.map(|flood| (requests, Some(Undo::Await(flood)))).into_iter().collect()
            }
            FaultKind::KillAgent
            | FaultKind::FreezeAgent
            | FaultKind::KillGuard
            | FaultKind::FreezeGuard
            | FaultKind::KillQemu
            | FaultKind::FreezeQemu
            | FaultKind::FullJournal
            | FaultKind::SpoilJournal(_)
            | FaultKind::Clock { .. }
            | FaultKind::BusyMachine
            | FaultKind::FloodOfDeletes => vec![],
            of_links => self.make_of_links(of_links, host, ledger),
        }
    }

    fn make_of_links(&self, kind: FaultKind, host: &str, ledger: &Ledger) -> Vec<(Victim, Option<Undo>)> {
        let links = match kind {
            FaultKind::LinkDown { link }
            | FaultKind::Silent { link, .. }
            | FaultKind::LargeFramesVanish { link }
            | FaultKind::Loss { link, .. } => &self.links[link..=link],
            _ => &self.links[..],
        };
        let mut done = Vec::new();
        for link in links {
            let victim = Victim::Link { host: host.into(), link: link.clone() };
            if ledger.is_suffering(&victim) {
                continue;
            }
            let (host, link) = (host.to_owned(), link.clone());
            let words = match kind {
                FaultKind::LinkDown { .. } | FaultKind::AllLinksDown => format!("link-down {host} {link}"),
                FaultKind::Silent { direction, .. } => format!("blackhole {host} {link} {direction}"),
                FaultKind::AllLinksSilent => format!("blackhole {host} {link}"),
                FaultKind::Loss { percent, .. } => format!("loss {host} {link} {percent}"),
                _ => format!("blackhole-above {host} {link} {LARGE_BYTES}"),
            };
            self.fault(&words);
            done.push((victim, Some(Undo::Heal { host, link })));
        }
        done
    }

    fn fault(&self, words: &str) {
        let words: Vec<&str> = words.split(' ').collect();
        self.lab.lab().fault(&LabFault::from_words(&words).unwrap()).unwrap();
    }

    /// A host that has nothing to do with this VM.
    fn uninvolved_host(&self, at: &Where, copies: &Copies) -> Option<String> {
        let has_part =
            |host: &String| *host == at.host || copies.living(&at.vm).any(|copy| copy.identity.host == *host);
        self.lab.hosts().into_iter().find(|host| !has_part(host))
    }

    fn guard(&self, at: &Where) -> Option<Pid> {
        let vm = format!(" --vm {}", at.vm);
        let of_vm = |pid: &Pid| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).replace('\0', " ").contains(&format!("{vm} "))
        };
        self.lab.pids(&at.host, &[" guard --migration "]).into_iter().find(of_vm)
    }

    /// What the VM's other QEMU does tells whether this one is needed. It is not while the other one runs the guest,
    /// except with post-copy.
    fn kill(&mut self, copy: &Copy, at: &Where, copies: &Copies) -> bool {
        let another_runs =
            copies.living(&at.vm).any(|other| other.identity.pid != copy.identity.pid && other.is_running());
        if !another_runs || at.needs_both {
            self.may_be_lost.insert(at.vm.clone());
        }
        self.killed_pids.insert(copy.identity.pid);
        Pid::from_raw(copy.identity.pid).is_some_and(|pid| kill_process(pid, Signal::KILL).is_ok())
    }

    /// Whether this QEMU was ended by a fault.
    pub(super) fn has_killed(&self, copy: &Copy) -> bool {
        self.killed_pids.contains(&copy.identity.pid)
    }

    pub(super) fn may_be_lost(&self, vm: &str) -> bool {
        self.may_be_lost.contains(vm)
    }

    pub(super) fn round_is_over(&mut self) {
        self.may_be_lost.clear();
        self.journals.round_is_over();
    }

    /// Keeps a copy of each journal, which may replace that journal later in this round.
    pub(super) fn round_begins(&mut self) {
        self.journals.copy();
    }

    /// Spoils only one host's journal in each round. If two were lost at once, an operator would need to know more than
    /// the one here does.
    fn spoil(&mut self, host: &str, way: Spoil) -> bool {
        if self.journals.spoiled().is_some() || self.lab.agent_pid(host).is_none() {
            return false;
        }
        self.lab.stop_agent(host, Signal::KILL);
        self.journals.spoil(host, way);
        true
    }

    /// The host whose journal was lost or replaced in this round.
    pub(super) fn spoiled(&self) -> Option<&str> {
        self.journals.spoiled()
    }

    /// Does what an operator does if a journal is not believed.
    pub(super) fn adopt_journals(&mut self, ledger: &mut Ledger) {
        self.journals.adopt(ledger);
    }

    /// Repairs the faults that have lasted long enough.
    pub(super) fn lift_what_is_due(&mut self, ledger: &mut Ledger) {
        let now = Instant::now();
        let (due, rest) = self.active.drain(..).partition(|one| one.until <= now);
        self.active = rest;
        self.lift(due, ledger);
    }

    /// Whether no fault is left to repair.
    pub(super) fn are_lifted(&self) -> bool {
        self.active.is_empty()
    }

    pub(super) fn lift_all(&mut self, ledger: &mut Ledger) {
        let all = self.active.drain(..).collect();
        self.lift(all, ledger);
    }

    fn lift(&mut self, due: Vec<Active>, ledger: &mut Ledger) {
        for Active { victim, undo, .. } in due {
            ledger.note(&format!("lifted: {victim:?}"));
            match undo {
                Undo::StartAgent(host) => self.start_agent(&host),
                // The process may have been killed meanwhile.
                Undo::Continue(process) => drop(pidfd_send_signal(process, Signal::CONT)),
                Undo::Heal { host, link } => self.fault(&format!("heal {host} {link}")),
                Undo::FreeDisk(host) => self.journals.free_disk(&host),
                Undo::SetClock(host) => self.clocks.set_ahead(&host, 0),
                Undo::Rest(busy) => drop(busy),
                Undo::Await(flood) => {
                    if let Some(problem) = flood.end() {
                        ledger.note(&format!("the flood ended early: {problem}"));
                        ledger.count("not done to its end: flood of deletes");
                    }
                }
                Undo::Adopt => continue,
            }
            ledger.fault_ended(&victim);
        }
    }

    fn start_agent(&mut self, host: &str) {
        self.started_at.insert(host.to_owned(), Instant::now());
        let way_in = self.journals.way_in(host);
        let [env, library, clock, program] = &self.clocks.program(host);
        self.lab.spawn_agent(host, &["nsenter", &way_in, env, library, clock, program]);
    }

    /// Restarts agents that have ended by themselves, as they may while their disks are full, or before their
    /// certificates are valid. Reports one that has ended without such a reason.
    pub(super) fn look_after_agents(&mut self, hosts: &[String], ledger: &mut Ledger) -> Option<String> {
        for host in hosts {
            let is_killed = ledger.is_suffering(&Victim::Agent(host.clone()));
            let is_starting = self.started_at.get(host).is_some_and(|at| at.elapsed() < START_AGAIN_AFTER);
            if is_killed || is_starting || self.has_agent(host) {
                continue;
            }
            let why = if ledger.has_suffered(&Victim::JournalDisk(host.clone())) {
                "its disk full"
            } else if ledger.has_suffered(&Victim::Certificates(host.clone())) {
                "its certificates not valid yet"
            } else {
                return Some(format!("the agent of {host} has ended by itself"));
            };
            ledger.note(&format!("the agent of {host} ended by itself, {why}"));
            ledger.count(&format!("agent ended by itself, {why}"));
            self.start_agent(host);
        }
        None
    }

    /// Searches all processes only if the process that was the agent last time is no longer one.
    fn has_agent(&mut self, host: &str) -> bool {
        if self.agents.get(host).is_some_and(|pid| is_agent(*pid)) {
            return true;
        }
        let found = self.lab.agent_pid(host);
        self.agents.remove(host);
        self.agents.extend(found.map(|pid| (host.to_owned(), pid)));
        found.is_some()
    }

    /// Where a host's journal can be read from outside its agent's mounts.
    pub(super) fn journal_directory(&self, host: &str) -> PathBuf {
        self.journals.directory(host)
    }
}

/// A process that has ended, but was not waited for yet, has no command line any more.
fn is_agent(pid: Pid) -> bool {
    let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    String::from_utf8_lossy(&line).contains("\0agent\0--config\0")
}

fn freeze(pid: Option<Pid>, victim: Victim) -> Vec<(Victim, Option<Undo>)> {
    let frozen = pid.and_then(|pid| {
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        pidfd_send_signal(&process, Signal::STOP).ok()?;
        Some((victim, Some(Undo::Continue(process))))
    });
    frozen.into_iter().collect()
}
