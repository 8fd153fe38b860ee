//! A lab with its VMs, errands and faults, checked all the time.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_guest::protocol::{Dirtying, HEARTBEAT_PORT};

use super::busy::Machine;
use super::copies::Copy;
use super::course::Course;
use super::faults::{Faults, Where};
use super::ledger::{Ledger, Victim};
use super::monitor::Monitor;
use super::operations::{Claim, End, Operation, What, judge};
use super::plan::{Bounds, Errand, Fault, HostRole, Moment, MoveOptions, Round, When};
use super::settled::{Unsettled, unsettled};
use super::silences::Silences;
use super::violation::Violation;
use super::{HOSTS, directory};
use crate::drain::ask;
use crate::guest::Guest;
use crate::support::{TestLab, threads};

/// How often the world is checked for violations.
const LOOK_EVERY: Duration = Duration::from_millis(10);
const CHECK_EVERY: Duration = Duration::from_millis(200);

/// How soon everything must be over and reported as it is, after all faults are lifted.
const SETTLE_MAX: Duration = Duration::from_mins(4);

/// How soon what an agent said about a VM must be true.
const CLAIM_GRACE: Duration = Duration::from_secs(5);

/// The name under which that is counted.
pub(super) const REPORTED_AS_LOST: &str = "VM lost with the QEMU that was killed, told so, and started again";
const MISSED: &str = "fault: its moment did not come";

/// What a world consists of.
pub(super) struct Setting {
    /// The memory of each VM.
    pub(super) memory_mib: u64,
    /// How fast each VM rewrites its memory.
    pub(super) dirty_mib_per_s: Vec<u32>,
    /// The name of its directory.
    pub(super) name: String,
    /// The machine of the lab.
    pub(super) machine: Arc<Machine>,
}

/// A lab with its VMs, and what is known about them.
pub(super) struct World<'lab> {
    // Dropped before the lab that it observes.
    silences: Silences,
    faults: Faults<'lab>,
    monitor: Monitor,
    ledger: Ledger,
    hosts: Vec<String>,
    names: Vec<String>,
    guests: BTreeMap<String, Guest>,
    operations: Vec<Operation>,
    claims: Vec<Claim>,
    /// When each VM was last sent somewhere.
    sent: BTreeMap<String, Instant>,
    /// How operations have ended since the last call of [`Self::take_ends`].
    ends: Vec<End>,
    checked_at: Instant,
    lab: &'lab TestLab,
}

impl<'lab> World<'lab> {
    /// Boots the VMs, on all hosts in turn.
    pub(super) fn set(lab: &'lab TestLab, monitor: Monitor, setting: &Setting) -> Self {
        let hosts = HOSTS.map(str::to_owned).to_vec();
        let directory = directory().join(&setting.name);
        let names = (0..setting.dirty_mib_per_s.len()).map(|number| format!("vm{number}")).collect();
        let mut world = Self {
            silences: Silences::start(&lab.lab()).unwrap(),
            faults: Faults::prepare(lab, Arc::clone(&setting.machine), &hosts),
            monitor,
            ledger: Ledger::create(directory).unwrap(),
            hosts,
            names,
            guests: BTreeMap::new(),
            operations: vec![],
            claims: vec![],
            sent: BTreeMap::new(),
            ends: vec![],
            checked_at: Instant::now(),
            lab,
        };
        for (number, dirty_mib_per_s) in setting.dirty_mib_per_s.iter().enumerate() {
            world.boot(number, setting.memory_mib, *dirty_mib_per_s);
        }
        world.guests.values().for_each(Guest::wait_until_ready);
        world.names.iter().for_each(|vm| world.silences.expect(vm, world.heartbeat(vm)));
        world
    }

    fn boot(&mut self, number: usize, memory_mib: u64, dirty_mib_per_s: u32) {
        let (name, host) = (&self.names[number], &self.hosts[number % self.hosts.len()]);
        let guest = Guest::new(name, self.lab.guest_address(), self.lab.namespace("client"));
        let parameters = format!("drainpipe.dirty_mib_per_s={dirty_mib_per_s}");
        let file = self.lab.write(&format!("{name}.toml"), &guest.specification(memory_mib, &parameters));
        let socket = self.lab.agent_socket(host);
        self.lab.drainpipe(&["vm", "create", &file, "--agent", &socket]).done();
        self.lab.drainpipe(&["vm", "start", name, "--agent", &socket]).done();
        self.guests.insert(name.clone(), guest);
    }

    /// What was done so far.
    pub(super) fn table(&mut self) -> String {
        let table = self.ledger.table();
        self.ledger.note(&table);
        table
    }

    /// Makes all VMs rewrite this much of their memory from now on.
    pub(super) fn set_dirty(&self, mib_per_s: u32) {
        let dirtying = Dirtying { mib_per_s, locality_percent: 100 };
        for guest in self.guests.values() {
            guest.set_dirty(dirtying);
        }
    }

    /// The ends of all operations since the last call.
    pub(super) fn take_ends(&mut self) -> Vec<End> {
        std::mem::take(&mut self.ends)
    }

    /// The longest silence of a VM since the last call.
    pub(super) fn take_longest_silence(&mut self) -> Duration {
        self.ledger.take_longest_silence()
    }

    /// How many faults were caused.
    pub(super) fn faults_done(&self) -> usize {
        self.ledger.counted_as("fault: ") - self.counted(MISSED)
    }

    /// How often this is in the table.
    pub(super) fn counted(&self, what: &str) -> usize {
        self.ledger.counted(what)
    }

    fn heartbeat(&self, vm: &str) -> SocketAddr {
        SocketAddr::from((self.guests[vm].address(), HEARTBEAT_PORT))
    }

    /// The limits of the decisions.
    pub(super) fn bounds(&self) -> Bounds {
        let links = self.lab.lab().spec().links.len();
        Bounds { vms: self.names.len(), hosts: self.hosts.len(), links, moves_max: self.names.len().min(4) }
    }

    /// Runs one storm, and waits for everything to settle.
    pub(super) fn round(&mut self, number: usize, round: &Round) -> Result<(), Violation> {
        self.ledger.note(&format!("round {number}: {:?}", round.errands));
        round.faults.iter().for_each(|fault| self.ledger.note(&format!("  to come: {fault}")));
        let mut courses: Vec<Course> = round.errands.iter().map(Course::of).collect();
        let mut faults: Vec<Fault> = round.faults.clone();
        self.ledger.round_begins(round.promise);
        self.faults.round_begins();
        let began = Instant::now();
        let is_over = |chaos: &Self, courses: &[Course]| {
            let all_have_begun = courses.iter().all(|course| course.has_begun && course.next.is_none());
            let is_calm = !round.outlasts_errands || chaos.faults.are_lifted();
            began.elapsed() > round.storm_max || (all_have_begun && chaos.operations.is_empty() && is_calm)
        };
        while !is_over(self, &courses) {
            self.see(&mut courses);
            self.begin_errands(&mut courses, began);
            faults.retain(|fault| !self.begin_fault(fault, &courses, began));
            self.faults.lift_what_is_due(&mut self.ledger);
            self.check(&mut courses)?;
        }
        for _ in &faults {
            self.ledger.count(MISSED);
        }
        self.faults.lift_all(&mut self.ledger);
        self.settle(&mut courses)?;
        self.assert_intact()?;
        self.ledger.count("round");
        self.ledger.round_is_over();
        self.faults.round_is_over();
        self.monitor.copies().forget_the_ended();
        Ok(())
    }

    /// Waits for a moment, and hands it to the errands.
    fn see(&mut self, courses: &mut [Course]) {
        let mut seen = self.monitor.next(LOOK_EVERY);
        while let Some(moment) = seen {
            self.ledger.note(&format!("seen: {} on {}: {:?}", moment.vm, moment.host, moment.moment));
            if moment.moment == Moment::Paused {
                self.ledger.paused(&moment.vm, moment.at);
            }
            for course in courses.iter_mut() {
                course.sees(&moment);
            }
            seen = self.monitor.next(Duration::ZERO);
        }
    }

    fn begin_errands(&mut self, courses: &mut [Course], began: Instant) {
        for (number, course) in courses.iter_mut().enumerate() {
            if !course.has_begun && began.elapsed() >= course.begins {
                course.has_begun = true;
                self.begin(number, course);
            }
            let runs_there = course.seen.iter().any(|(moment, _)| *moment == Moment::Resumed);
            if course.has_begun && runs_there && course.next.is_some_and(|next| next.at_once) {
                self.go_on(number, course);
            }
        }
    }

    fn begin(&mut self, number: usize, course: &mut Course) {
        match course.errand {
            Errand::Move { vm, turn, way, .. } => {
                let vm = self.names[vm].clone();
                let at = self.monitor.copies().runs_on(&vm).map(str::to_owned);
                let Some(source) = at else { return };
                let target = self.further(&source, turn);
                self.send(number, [&vm, &source, &target], way);
                (course.source, course.target, course.vm) = (Some(source), Some(target), Some(vm));
            }
            Errand::DrainAndBack { host, post_copy, encrypt } => {
                let host = self.hosts[host].clone();
                for vm in &self.names {
                    self.ledger.moves(vm, self.hosts.iter().cloned());
                }
                self.ledger.note(&format!("drain of {host}"));
                self.operations.push(Operation::drain(self.lab, number, &host, post_copy, encrypt));
                course.source = Some(host);
            }
        }
    }

    /// The second move of a VM.
    fn go_on(&mut self, number: usize, course: &mut Course) {
        let (Some(next), Some(vm)) = (course.next.take(), course.vm.clone()) else { return };
        let at = self.monitor.copies().runs_on(&vm).map(str::to_owned);
        let Some(source) = at else { return };
        let target = self.further(&source, next.turn);
        course.gone_on = Some(next);
        self.send(number, [&vm, &source, &target], next.way);
    }

    fn send(&mut self, number: usize, [vm, source, target]: [&str; 3], way: MoveOptions) {
        self.ledger.note(&format!("{vm}: {source} to {target}, {way:?}"));
        self.ledger.moves(vm, [source.to_owned(), target.to_owned()]);
        // What was said about the VM is out of date as soon as it moves on.
        self.claims.retain(|claim| claim.vm != vm);
        let operation = Operation::migrate(self.lab, number, [vm, source, target], way);
        self.sent.insert(vm.to_owned(), operation.began);
        self.operations.push(operation);
    }

    fn further(&self, host: &str, turn: usize) -> String {
        let at = self.hosts.iter().position(|name| name == host).expect("one of the lab's hosts");
        self.hosts[(at + turn) % self.hosts.len()].clone()
    }

    /// Begins a fault; returns whether that is done, or has become impossible.
    fn begin_fault(&mut self, fault: &Fault, courses: &[Course], began: Instant) -> bool {
        let course = &courses[fault.errand];
        let is_due = match fault.when {
            When::At(after) => began.elapsed() >= after,
            When::After(moment, after) => {
                course.seen.iter().any(|(seen, at)| *seen == moment && at.elapsed() >= after)
            }
        };
        let Some(at) = is_due.then(|| self.place(fault.place, course)).flatten() else { return false };
        // Causing a fault may take seconds, in which the monitor must hear what QEMUs say.
        let copies = self.monitor.copies().clone();
        let is_done = self.faults.begin(fault.kind, &at, fault.lasts, &copies, &mut self.ledger);
        let is_running = copies.runs_on(&at.vm).is_some();
        if self.faults.may_be_lost(&at.vm) && is_running {
            self.silences.expect_nothing(&at.vm);
        }
        let name = fault.kind.name();
        self.ledger.count(&if is_done { format!("fault: {name}") } else { format!("not done: {name}") });
        true
    }

    /// `None` while the errand has not begun.
    fn place(&self, place: HostRole, course: &Course) -> Option<Where> {
        let source = course.source.clone()?;
        let target = course.target.clone().unwrap_or_else(|| self.further(&source, 1));
        let third = self.hosts.iter().find(|host| **host != source && **host != target).cloned()?;
        let vm = course.vm.clone().unwrap_or_else(|| self.names[0].clone());
        let host = match place {
            HostRole::Source => source,
            HostRole::Target => target,
            HostRole::Third => third,
        };
        Some(Where { host, vm, needs_both: course.has_post_copy() })
    }

    /// Checks what must hold at any time.
    fn check(&mut self, courses: &mut [Course]) -> Result<(), Violation> {
        if self.checked_at.elapsed() < CHECK_EVERY {
            return Ok(());
        }
        self.checked_at = Instant::now();
        self.take_results(courses)?;
        self.check_copies()?;
        self.check_claims()?;
        self.check_silences()?;
        self.faults.adopt_journals(&mut self.ledger);
        let ended = self.faults.look_after_agents(&self.hosts, &mut self.ledger);
        ended.map_or(Ok(()), |ended| Err(Violation::Broken(ended)))
    }

    fn take_results(&mut self, courses: &mut [Course]) -> Result<(), Violation> {
        for mut operation in std::mem::take(&mut self.operations) {
            if !operation.has_ended() {
                if let Some(overdue) = operation.overdue() {
                    return Err(Violation::Endless(overdue));
                }
                self.operations.push(operation);
                continue;
            }
            let began = operation.began;
            let (what, number, output) = operation.end();
            let (end, claim) = judge(&what, &output).map_err(Violation::Broken)?;
            self.ledger.count(&end.name);
            let said = claim.as_ref().map_or(output.stderr.trim(), |claim| &claim.said);
            self.ledger.note(&format!("{what:?} ended: {}: {said}", end.name));
            let course = &mut courses[number];
            let again = course.gone_on.take_if(|next| {
                let is_second =
                    matches!(&what, What::Move { source, .. } if course.source.as_ref() != Some(source));
                next.insists && end.is_refused && is_second
            });
            if again.is_some() {
                course.next = again;
            } else {
                self.ends.push(end);
            }
            // The VM may have moved on while its source was still tidying up.
            let is_last = |vm: &str| self.sent.get(vm).is_none_or(|sent| *sent <= began);
            self.claims.extend(claim.filter(|claim| is_last(&claim.vm)));
            match what {
                What::Move { .. } => self.go_on(number, course),
                What::Drain { host } => self.operations.push(Operation::resume(self.lab, number, &host)),
                What::Resume => {}
            }
        }
        Ok(())
    }

    fn check_copies(&self) -> Result<(), Violation> {
        let copies = self.monitor.copies();
        if let Some(two) = copies.two_at_once() {
            return Err(Violation::TwoCopies(two));
        }
        let is_expected =
            |copy: &&Copy| self.faults.has_killed(copy) || self.faults.may_be_lost(&copy.identity.vm);
        match copies.ended_while_running().find(|copy| !is_expected(copy)) {
            Some(copy) => Err(Violation::Lost(copy.to_string())),
            None => Ok(()),
        }
    }

    /// What an agent says about a VM must come true within a while.
    fn check_claims(&mut self) -> Result<(), Violation> {
        let copies = self.monitor.copies();
        self.claims.retain(|claim| copies.runs_on(&claim.vm) != Some(&claim.host));
        let false_one = self
            .claims
            .iter()
            .find(|claim| claim.at.elapsed() > CLAIM_GRACE && !self.faults.may_be_lost(&claim.vm));
        match false_one {
            Some(Claim { vm, host, said, .. }) => {
                let on = copies.runs_on(vm);
                Err(Violation::Untrue(format!(
                    "{vm} was said to be on {host} ({said}); by its QEMU it runs on {on:?}"
                )))
            }
            None => Ok(()),
        }
    }

    fn check_silences(&mut self) -> Result<(), Violation> {
        for silence in self.silences.take() {
            if let Some(violation) = self.ledger.judge_silence(&silence.vm, silence.since, silence.until) {
                return Err(Violation::Silent(violation));
            }
            if silence.is_over {
                let length = silence.until - silence.since;
                self.ledger.note(&format!("{} was silent for {length:.1?}", silence.vm));
            }
        }
        Ok(())
    }

    /// Waits until everything is over and reported as it is.
    fn settle(&mut self, courses: &mut [Course]) -> Result<(), Violation> {
        self.ledger.note("all faults are lifted");
        for course in courses.iter_mut() {
            course.next = None;
        }
        let began = Instant::now();
        loop {
            self.see(courses);
            self.check(courses)?;
            let state = self.unsettled();
            let why = match state {
                None => break,
                Some(Unsettled::Ended { vm, host }) => {
                    self.start_again(&vm, &host)?;
                    continue;
                }
                Some(Unsettled::Cordoned { host }) => {
                    self.operate(&host, &["resume", &host])?;
                    continue;
                }
                Some(Unsettled::Stale { vm, host }) => {
                    self.ledger.count("VM removed where an older journal lists it");
                    self.forget(&vm, &host)?;
                    continue;
                }
                Some(Unsettled::Forgotten { vm }) => {
                    self.ledger.count("VM defined anew, its journal lost");
                    let file = self.lab.files().join(format!("{vm}.toml")).display().to_string();
                    self.operate(&self.hosts[0].clone(), &["vm", "create", &file])?;
                    continue;
                }
                Some(Unsettled::Yet(why)) => why,
            };
            if began.elapsed() > SETTLE_MAX {
                return Err(Violation::Endless(format!(
                    "{SETTLE_MAX:?} after all faults were lifted: {why}"
                )));
            }
            thread::sleep(CHECK_EVERY);
        }
        self.ledger.settled_after(began.elapsed());
        self.ledger.note(&format!("settled after {:.1?}", began.elapsed()));
        Ok(())
    }

    fn unsettled(&self) -> Option<Unsettled> {
        if let Some(one) = self.operations.first() {
            return Some(Unsettled::Yet(format!("{:?} has not ended", one.what)));
        }
        let is_lost = |host: &&String| self.ledger.is_suffering(&Victim::Journal((*host).clone()));
        if let Some(host) = self.hosts.iter().find(is_lost) {
            return Some(Unsettled::Yet(format!("the journal of {host} is not adopted")));
        }
        unsettled(self.lab, &self.hosts, &self.names, &self.monitor, &self.faults)
    }

    /// Starts a VM again that was lost with its QEMU.
    fn start_again(&mut self, vm: &str, host: &str) -> Result<(), Violation> {
        self.ledger.count(REPORTED_AS_LOST);
        self.ledger.note(&format!("{vm} is started again on {host}"));
        self.silences.expect_nothing(vm);
        self.operate(host, &["vm", "start", vm])?;
        self.guests[vm].wait_until_ready();
        Ok(())
    }

    /// Uses the API: the program would first ask the host on which it finds the VM, which may be the one where it runs.
    fn forget(&mut self, vm: &str, host: &str) -> Result<(), Violation> {
        self.ledger.note(&format!("on {host}: {vm} is removed"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let client = ApiClient::over_socket(self.lab.agent_socket(host).as_ref()).unwrap();
        runtime
            .block_on(client.delete::<()>(&format!("/v1/vms/{vm}")))
            .map_err(|problem| Violation::Broken(format!("{vm} is not removed on {host}: {problem}")))
    }

    /// Runs an operator's command, which must succeed.
    fn operate(&mut self, host: &str, words: &[&str]) -> Result<(), Violation> {
        self.ledger.note(&format!("on {host}: {words:?}"));
        let output = self.lab.drainpipe(&[words, &["--agent", &self.lab.agent_socket(host)]].concat());
        if output.code == 0 {
            return Ok(());
        }
        Err(Violation::Broken(format!("{words:?} on {host} is not done: {output:#?}")))
    }

    /// Checks that every page of each VM is as it was written.
    fn assert_intact(&mut self) -> Result<(), Violation> {
        for (vm, guest) in &self.guests {
            self.silences.expect(vm, self.heartbeat(vm));
            let found = guest.verify();
            if found.pages == 0 || found.bad > 0 {
                return Err(Violation::Broken(format!("{vm}: bad pages: {found}")));
            }
            self.ledger.count("VM whose pages were checked");
        }
        match self.hosts.iter().find(|host| self.lab.agent_log(host).contains("panicked")) {
            Some(host) => Err(Violation::Broken(format!("the agent of {host} has panicked"))),
            None => Ok(()),
        }
    }

    /// Keeps everything that helps to understand the violation, and returns where.
    pub(super) fn keep(&mut self, violation: &Violation) -> PathBuf {
        self.ledger.note(&format!("VIOLATION: {violation}"));
        self.table();
        let directory = self.ledger.directory().to_owned();
        // As much as can be read.
        let _ = fs::write(directory.join("qemus.txt"), self.monitor.copies().tell());
        for host in &self.hosts {
            let kept = directory.join(host);
            let _ = fs::create_dir_all(&kept);
            let _ = fs::copy(self.lab.directory(host).join("agent.log"), kept.join("agent.log"));
            copy_files(&self.faults.journal_directory(host), &kept, "journal");
            let vms = ask::<serde_json::Value>(self.lab, host, "/v1/vms", None);
            let migrations = ask::<serde_json::Value>(self.lab, host, "/v1/migrations?limit=20", None);
            let _ = fs::write(kept.join("told.txt"), format!("{vms:#?}\n{migrations:#?}\n"));
            for vm in &self.names {
                let run = self.lab.directory(host).join("run/vms").join(vm);
                let _ = fs::copy(run.join("qemu.log"), kept.join(format!("{vm}.qemu.log")));
                if let Some(pid) = self.lab.qemu_pid(host, vm) {
                    let _ = fs::write(kept.join(format!("{vm}.threads")), threads(&pid.to_string()));
                }
            }
        }
        directory.canonicalize().unwrap_or(directory)
    }
}

/// Copies files whose names begin with this.
fn copy_files(from: &Path, to: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(from) else { return };
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            let _ = fs::copy(entry.path(), to.join(entry.file_name()));
        }
    }
}
