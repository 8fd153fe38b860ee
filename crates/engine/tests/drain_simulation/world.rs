//! VMs, targets and migrations, as they are, whatever the drain believes.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::drain::disks::{DrainedDisk, FileSystemView};
use drainpipe_engine::drain::run::{Departure, DrainEvent, MoveEnd};
use drainpipe_engine::drain::view::{DrainView, LimitView, PlacedVm, Placement, TargetView, VmView};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{CopyReason, DiskCopy, DiskImage, DiskName};
use drainpipe_engine::transfer::memory_sample::MemorySample;

use crate::faults::{Faults, Sight};
use crate::news::News;
use crate::random::Random;

const GIB: u64 = 1 << 30;

/// Each target has one file system for disks.
const DEVICE: u64 = 7;

/// The chance per turn, in percent, that what stands still for a while goes on.
const GOES_ON: u64 = 5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Here,
    Target(usize),
    /// Handed over to this target, which has not said that the VM runs there.
    InDoubt(usize),
    /// The VM had moved, and then ended with its target.
    EndedThere,
    /// Somebody else has moved it to a host that the drain has nothing to do with.
    Elsewhere,
    /// The VM was stopped on this host, or its QEMU has ended.
    EndedHere,
}

#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub(crate) struct Vm {
    pub name: String,
    pub gib: u64,
    /// How many times it has to send its memory.
    pub times: u64,
    /// The size of its disk; 0 if it has none.
    pub disk_gib: u64,
    /// The targets that can see its disk.
    seen_by: BTreeSet<usize>,
    /// The device that holds its disk on this host.
    from_device: u64,
    pub placement: Placement,
    pub immovable: bool,
    /// The targets that would not take it.
    pub refused_by: BTreeSet<usize>,
    /// Whether somebody else has cancelled its migration.
    pub is_to_stay: bool,
    pub at: At,
    /// How often its migration was begun since the agent was last started.
    pub begun: u64,
    /// How many of these attempts its target refused, since it had no room for the VM or takes none.
    pub refused: u64,
    /// Whether it may run on its target before all its memory is there.
    pub by_post_copy: bool,
    /// Whether it was taken off the links because it did not converge.
    pub gave_way: bool,
    pub flight: Option<Flight>,
    /// The migration that is under way, or was last; 0 if there was none.
    pub migration: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Begun,
    Reserved,
    Prepared,
    /// Its disk is being copied.
    Copying(u64),
    Sending(u64),
    /// Its last bytes are on the links.
    Paused,
    Sent,
    /// It is over, but the journal does not say so yet.
    Over(End),
}

/// How a migration has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Completed,
    Failed,
    /// Its target has no room for it any more, or takes no VMs.
    Refused,
    Cancelled,
}

impl End {
    fn reported(self) -> MoveEnd {
        match self {
            Self::Completed => MoveEnd::Completed { transfer_ms: 1.0 },
            Self::Failed => MoveEnd::Failed(Problem::failed("it failed")),
            Self::Refused => MoveEnd::Failed(Problem::refused("no room is left")),
            Self::Cancelled => MoveEnd::Cancelled(Problem::failed("it was cancelled")),
        }
    }
}

/// Who cancelled a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Other,
    /// It does not matter then who else has.
    Drain,
}

/// A migration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub target: usize,
    pub step: Step,
    pub released: bool,
    pub cancelled: Option<By>,
    /// It will fail as soon as its agent looks.
    pub doomed: bool,
}

impl Flight {
    pub(crate) fn to(target: usize) -> Self {
        Self { target, step: Step::Begun, released: false, cancelled: None, doomed: false }
    }

    pub(crate) fn is_on_links(&self) -> bool {
        self.released && matches!(self.step, Step::Prepared | Step::Sending(_))
    }
}

pub(crate) struct Host {
    pub name: String,
    pub answers: bool,
    /// Whether its agent hangs.
    pub frozen: bool,
    /// Whether it is itself being drained.
    pub drained: bool,
    /// Memory, without what VMs on it or on their way to it take.
    pub gib: u64,
    /// Room for disks, counted the same way.
    disk_gib: u64,
    pub vms: Vec<PlacedVm>,
}

pub(crate) struct World {
    pub vms: Vec<Vm>,
    pub hosts: Vec<Host>,
    pub faults: Faults,
    /// Whether the journal of this host cannot be written.
    pub disk_full: bool,
    /// What the journal says of migrations that are over: whether the VM moved.
    pub results: BTreeMap<String, bool>,
    pub news: News,
    pub sights: BTreeSet<Sight>,
    /// How many other VMs somebody else moves from this host.
    pub others: u8,
    /// Whether the operator has named the first target twice.
    named_twice: bool,
}

pub(crate) fn name_of(migration: u64) -> String {
    format!("m{migration}")
}

/// The departure of any VM that somebody else has moved.
pub(crate) fn departure() -> Departure {
    Departure { target: "elsewhere".into(), migration: "by hand".into(), memory_bytes: GIB }
}

fn some_others(random: &mut Random) -> u8 {
    u8::try_from(random.below(3)).expect("a small number")
}

fn some_groups(random: &mut Random) -> BTreeSet<String> {
    if random.chance(75) { BTreeSet::new() } else { BTreeSet::from([format!("g{}", random.below(2))]) }
}

fn some_placement(random: &mut Random) -> Placement {
    let stays = random.chance(3).then(|| "its owner says so".to_owned());
    Placement { stays, apart: some_groups(random), together: some_groups(random) }
}

/// No VM is tolerated for this many rounds.
const ENDLESS: u64 = 1_000;

/// Some VMs give way and then converge, some need patience, and some never converge.
fn some_times(random: &mut Random) -> u64 {
    [2, 4, 12, ENDLESS][random.index(4)]
}

impl Vm {
    pub(crate) fn is_endless(&self) -> bool {
        self.times == ENDLESS && !self.by_post_copy
    }

    pub(crate) fn was_begun(&self) -> bool {
        self.migration > 0
    }

    pub(crate) fn has_moved(&self) -> bool {
        matches!(self.at, At::Target(_) | At::EndedThere)
    }

    /// GiB of its disk that are copied if it moves to this target.
    pub(crate) fn copied_gib(&self, target: usize) -> u64 {
        if self.seen_by.contains(&target) { 0 } else { self.disk_gib }
    }

    /// Whether the migration under way copies its disk.
    pub(crate) fn is_copied(&self) -> bool {
        self.flight.is_some_and(|flight| self.copied_gib(flight.target) > 0)
    }

    /// The devices between which its disk is copied, until its memory follows.
    pub(crate) fn device_pair(&self) -> Option<(usize, u64)> {
        let flight = self.flight.filter(|_| self.is_copied())?;
        let holds_devices =
            matches!(flight.step, Step::Begun | Step::Reserved | Step::Prepared | Step::Copying(_));
        holds_devices.then_some((flight.target, self.from_device))
    }

    fn copies(&self, target: usize) -> Vec<DrainedDisk> {
        let bytes = self.copied_gib(target) * GIB;
        let disk = DrainedDisk {
            copy: DiskCopy {
                disk: DiskName::at(0).expect("the first has a name"),
                from: self.name.clone(),
                to: self.name.clone(),
                image: DiskImage::Raw,
                size_bytes: bytes,
                allocated_bytes: bytes,
                why: CopyReason::NotSeen,
                is_flattened: false,
                from_device: None,
            },
            from_device: self.from_device,
            to_device: DEVICE,
        };
        if bytes > 0 { vec![disk] } else { vec![] }
    }

    /// Whether little of it may be left, with links that carry GiB in no time.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.flight, Some(Flight { step: Step::Sending(1..), .. }))
    }

    /// Whether it has sent more than it should have.
    pub(crate) fn overstays(&self) -> bool {
        match self.flight.map(|flight| flight.step) {
            Some(Step::Sending(gib)) => gib > 2 * self.gib,
            Some(Step::Paused | Step::Sent | Step::Over(_)) => self.times > 2,
            _ => false,
        }
    }

    /// How much it has sent after the next step: GiB by GiB in the first round, and then a round at a time.
    fn sends_next(&self, sent_gib: u64) -> u64 {
        sent_gib + if sent_gib < self.gib { 1 } else { self.gib }
    }

    fn is_free_of_groups(&self) -> bool {
        self.placement.apart.is_empty() && self.placement.together.is_empty()
    }

    fn as_placed(&self) -> PlacedVm {
        PlacedVm { name: self.name.clone(), needs_bytes: self.gib * GIB, placement: self.placement.clone() }
    }

    fn view(&self, hosts: &[Host]) -> VmView {
        let copies = hosts.iter().enumerate().map(|(index, host)| (host.name.clone(), self.copies(index)));
        let busy = self.flight.is_some() || self.at != At::Here;
        VmView {
            name: self.name.clone(),
            needs_bytes: self.gib * GIB,
            memory_bytes: self.gib * GIB,
            placement: self.placement.clone(),
            immovable: (self.immovable || busy).then(|| "it is busy".to_owned()),
            refusals: self.refused_by.iter().map(|host| (format!("h{host}"), "it does".to_owned())).collect(),
            memory: Some(MemorySample {
                zero_share: 0.0,
                dirty_bytes_per_s: 0,
                dirty_set_bytes: 0,
                compressible: None,
            }),
            copies: copies.filter(|(_, disks)| !disks.is_empty()).collect(),
        }
    }
}

impl Host {
    fn new(index: u64, random: &mut Random) -> Self {
        let vm = |at: u64, random: &mut Random| PlacedVm {
            name: format!("h{index}v{at}"),
            needs_bytes: GIB,
            placement: Placement { stays: None, ..some_placement(random) },
        };
        Self {
            name: format!("h{index}"),
            answers: true,
            frozen: false,
            drained: false,
            gib: random.below(48),
            disk_gib: random.below(24),
            vms: (0..random.below(2)).map(|at| vm(at, random)).collect(),
        }
    }

    fn unavailable(&self) -> Option<String> {
        let drained = self.drained.then(|| "it is cordoned".to_owned());
        drained.or_else(|| (!self.answers || self.frozen).then(|| "it is silent".to_owned()))
    }
}

impl World {
    pub(crate) fn new(random: &mut Random, faults: Faults) -> Self {
        let vms = (0..random.below(9)).map(|index| Vm {
            name: format!("v{index}"),
            gib: 1 + random.below(8),
            times: if faults.endless > 0 && random.chance(faults.endless) { some_times(random) } else { 1 },
            disk_gib: if random.chance(40) { 1 + random.below(8) } else { 0 },
            seen_by: (0..4).filter(|_| random.chance(30)).collect(),
            from_device: random.below(2),
            placement: some_placement(random),
            immovable: random.chance(3),
            refused_by: (0..4).filter(|_| random.chance(3)).collect(),
            is_to_stay: false,
            at: At::Here,
            begun: 0,
            refused: 0,
            gave_way: false,
            by_post_copy: false,
            flight: None,
            migration: 0,
        });
        let vms = vms.collect();
        let hosts = (0..=random.below(3)).map(|index| Host::new(index, random)).collect();
        Self {
            vms,
            hosts,
            faults,
            disk_full: false,
            results: BTreeMap::new(),
            news: News::default(),
            sights: BTreeSet::new(),
            others: if faults.moved > 0 { some_others(random) } else { 0 },
            named_twice: random.chance(faults.doubled),
        }
    }

    pub(crate) fn saw(&mut self, sight: Sight) {
        self.sights.insert(sight);
    }

    /// GiB of a target's memory that are promised to nobody.
    fn free_gib(&self, host: usize) -> u64 {
        let taken: u64 = self.known(host).map(|vm| vm.gib).sum();
        self.hosts[host].gib.saturating_sub(taken)
    }

    /// GiB of a target's file system that are promised to nobody.
    fn free_disk_gib(&self, host: usize) -> u64 {
        let taken: u64 = self.known(host).map(|vm| vm.copied_gib(host)).sum();
        self.hosts[host].disk_gib.saturating_sub(taken)
    }

    pub(crate) fn is_overcommitted(&self, host: usize) -> bool {
        self.known(host).map(|vm| vm.gib).sum::<u64>() > self.hosts[host].gib
    }

    /// The VMs that the target knows of: those on it, and those that it has promised memory.
    fn known(&self, host: usize) -> impl Iterator<Item = &Vm> {
        let is_promised = |vm: &&Vm| vm.flight.is_none_or(|flight| flight.step != Step::Begun);
        self.inhabitants(host).filter(is_promised)
    }

    /// The VMs on this target or on their way to it.
    pub(crate) fn inhabitants(&self, host: usize) -> impl Iterator<Item = &Vm> {
        self.vms.iter().filter(move |vm| match vm.at {
            At::Target(target) | At::InDoubt(target) => target == host,
            At::Here => {
                vm.flight.is_some_and(|flight| flight.target == host && !matches!(flight.step, Step::Over(_)))
            }
            At::EndedThere | At::EndedHere | At::Elsewhere => false,
        })
    }

    pub(crate) fn view(&self) -> DrainView {
        let here = self.vms.iter().filter(|vm| matches!(vm.at, At::Here | At::InDoubt(_)));
        let mut targets: Vec<TargetView> = (0..self.hosts.len()).map(|host| self.target_view(host)).collect();
        if self.named_twice {
            targets.push(targets[0].clone());
        }
        let vms = here.map(|vm| vm.view(&self.hosts)).collect();
        DrainView { host: "here".into(), vms, targets, limit: LimitView::default() }
    }

    fn target_view(&self, index: usize) -> TargetView {
        let host = &self.hosts[index];
        TargetView {
            name: host.name.clone(),
            unavailable: host.unavailable(),
            warnings: vec![],
            memory_available_bytes: self.free_gib(index) * GIB,
            file_systems: vec![FileSystemView {
                device: DEVICE,
                free_bytes: self.free_disk_gib(index) * GIB,
            }],
            makes_room: false,
            makes_room_now: false,
            vms: host.vms.iter().cloned().chain(self.known(index).map(Vm::as_placed)).collect(),
            paths_mbps: 10_000,
            paths: vec![],
            limit: LimitView::default(),
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: None,
        }
    }

    /// Changes that nobody in the drain asked for.
    pub(crate) fn change(&mut self, random: &mut Random) {
        let faults = self.faults;
        let at = random.index(self.hosts.len());
        let (vanishes, taken) = (random.chance(faults.vanish), random.chance(faults.taken));
        let free_gib = self.free_gib(at);
        let host = &mut self.hosts[at];
        if vanishes {
            host.answers = !host.answers;
        }
        if taken {
            host.gib = if random.chance(50) {
                host.gib + random.below(8)
            } else {
                host.gib - free_gib.min(random.below(8))
            };
        }
        host.frozen = for_a_while(host.frozen, faults.target_frozen, random);
        host.drained = for_a_while(host.drained, faults.target_drained, random);
        self.disk_full = for_a_while(self.disk_full, faults.disk_full, random);
        if self.hosts[at].drained {
            self.one_leaves(at, random);
        }
        if random.below(1_000) < faults.target_reboots {
            self.target_reboots(at, random);
        }
        if random.below(1_000) < faults.ends {
            self.one_ends(random);
        }
        self.others_move(random);
        self.one_changes(random);
        self.settle(random);
    }

    fn one_changes(&mut self, random: &mut Random) {
        let (immovable, cancelled) =
            (random.below(1_000) < self.faults.immovable, random.below(1_000) < self.faults.cancel_one);
        if self.vms.is_empty() || !(immovable || cancelled) {
            return;
        }
        let index = random.index(self.vms.len());
        let vm = &mut self.vms[index];
        vm.immovable ^= immovable;
        if let Some(flight) = vm.flight.as_mut().filter(|_| cancelled) {
            flight.cancelled.get_or_insert(By::Other);
        }
    }

    /// Somebody moves VMs by hand.
    fn others_move(&mut self, random: &mut Random) {
        if self.faults.moved == 0 {
            return;
        }
        if random.chance(5) {
            self.others = some_others(random);
        }
        if random.below(1_000) < self.faults.moved && !self.vms.is_empty() {
            let index = random.index(self.vms.len());
            let vm = &mut self.vms[index];
            if vm.at == At::Here && vm.flight.is_none() {
                vm.at = At::Elsewhere;
            }
        }
    }

    /// Some VM leaves a target that is being drained. Nobody here needs to know where it goes.
    fn one_leaves(&mut self, from: usize, random: &mut Random) {
        let to = random.index(self.hosts.len());
        if self.hosts[from].vms.pop().is_some() || self.hosts[to].drained {
            return;
        }
        let free_gib = self.free_gib(to);
        let may_go = |vm: &&mut Vm| {
            vm.at == At::Target(from)
                && vm.flight.is_none()
                && vm.is_free_of_groups()
                && vm.disk_gib == 0
                && vm.gib <= free_gib
        };
        if let Some(vm) = self.vms.iter_mut().find(may_go) {
            vm.at = At::Target(to);
            self.saw(Sight::MovedOn);
        }
    }

    /// What ran on the target ends, and what was on its way there is lost.
    fn target_reboots(&mut self, host: usize, random: &mut Random) {
        self.saw(Sight::TargetRebooted);
        self.hosts[host].vms.clear();
        for vm in 0..self.vms.len() {
            match (self.vms[vm].at, self.vms[vm].flight) {
                (At::Target(target), _) if target == host => self.vms[vm].at = At::EndedThere,
                (At::InDoubt(target), _) if target == host && random.chance(70) => self.revoke(vm),
                (At::Here, Some(flight)) if flight.target == host => self.doom(vm),
                _ => {}
            }
        }
    }

    /// Somebody stops a VM on this host, or its QEMU ends.
    fn one_ends(&mut self, random: &mut Random) {
        if self.vms.is_empty() {
            return;
        }
        let index = random.index(self.vms.len());
        let vm = &mut self.vms[index];
        let is_handed_over =
            vm.flight.is_some_and(|flight| matches!(flight.step, Step::Sent | Step::Over(_)));
        if vm.at == At::Here && !is_handed_over {
            vm.at = At::EndedHere;
            self.doom(index);
        }
    }

    /// A target that was silent says what has become of a VM.
    fn settle(&mut self, random: &mut Random) {
        for vm in 0..self.vms.len() {
            let At::InDoubt(target) = self.vms[vm].at else { continue };
            let host = &self.hosts[target];
            if host.answers && !host.frozen && !self.disk_full && random.chance(10) {
                if random.chance(30) {
                    self.revoke(vm);
                    continue;
                }
                self.saw(Sight::Settled);
                self.vms[vm].at = At::Target(target);
                self.note_result(vm, true);
                self.tell_settled(vm, End::Completed);
            }
        }
    }

    /// The target has promised never to run it.
    fn revoke(&mut self, vm: usize) {
        if !self.disk_full {
            self.saw(Sight::Revoked);
            self.vms[vm].at = At::Here;
            self.note_result(vm, false);
            self.tell_settled(vm, End::Failed);
        }
    }

    fn note_result(&mut self, vm: usize, completed: bool) {
        self.results.insert(name_of(self.vms[vm].migration), completed);
    }

    pub(crate) fn doom(&mut self, vm: usize) {
        if let Some(flight) = &mut self.vms[vm].flight {
            flight.doomed = true;
        }
    }

    /// Some migration takes one step.
    pub(crate) fn proceed(&mut self, random: &mut Random) -> Result<(), String> {
        let flying: Vec<usize> = (0..self.vms.len()).filter(|vm| self.vms[*vm].flight.is_some()).collect();
        if flying.is_empty() {
            return Ok(());
        }
        let vm = flying[random.index(flying.len())];
        let flight = self.vms[vm].flight.ok_or("no flight")?;
        if self.awaits_frozen(flight, random) {
            self.saw(Sight::AwaitedFrozen);
            return Ok(());
        }
        let host = &self.hosts[flight.target];
        let is_lost = !host.answers || host.frozen || flight.doomed;
        // The agent records changes to the network and the hand-over before it makes them.
        let is_unwritable =
            self.disk_full && matches!(flight.step, Step::Begun | Step::Reserved | Step::Sent);
        let fails = random.chance(self.faults.fail) || is_lost || flight.cancelled.is_some();
        match flight.step {
            Step::Over(_) if self.disk_full => {}
            Step::Over(end) => self.recorded(vm, end),
            _ if is_unwritable => self.end(vm, End::Failed),
            Step::Sent if is_lost || fails && flight.cancelled.is_none() => {
                self.leave_in_doubt(vm, flight.target);
            }
            Step::Sent => self.complete(vm, flight.target),
            _ if flight.cancelled.is_some() => self.end(vm, End::Cancelled),
            _ if fails => self.end(vm, End::Failed),
            Step::Begun if random.chance(self.faults.busy) => {
                let event = DrainEvent::Busy { vm: self.vms[vm].name.clone() };
                self.tell_maybe(vm, event, random);
            }
            Step::Begun => self.reserve(vm, flight.target)?,
            Step::Reserved => {
                self.step(vm, Step::Prepared);
                let name = self.vms[vm].name.clone();
                self.tell(vm, DrainEvent::Prepared { vm: name });
            }
            Step::Prepared if !flight.released => {}
            Step::Prepared if self.vms[vm].is_copied() => self.step(vm, Step::Copying(0)),
            Step::Prepared => self.step(vm, Step::Sending(0)),
            Step::Copying(gib) => self.copy(vm, gib, random),
            Step::Sending(gib) => self.send(vm, gib, random),
            Step::Paused => self.send_last(vm, random),
        }
        Ok(())
    }

    /// Memory is sent without the target's agent; everything else waits for it, within a bound.
    fn awaits_frozen(&self, flight: Flight, random: &mut Random) -> bool {
        let needs_it =
            !matches!(flight.step, Step::Copying(_) | Step::Sending(_) | Step::Paused | Step::Over(_))
                && (flight.step != Step::Prepared || flight.released);
        self.hosts[flight.target].frozen && needs_it && !flight.doomed && random.chance(90)
    }

    /// While the agent hangs, its QEMUs go on sending.
    pub(crate) fn send_alone(&mut self, random: &mut Random) {
        for vm in 0..self.vms.len() {
            match self.vms[vm].flight {
                Some(Flight { step: Step::Copying(gib), doomed: false, .. }) => self.copy(vm, gib, random),
                Some(Flight { step: Step::Sending(gib), doomed: false, .. }) => self.send(vm, gib, random),
                Some(Flight { step: Step::Paused, doomed: false, .. }) => self.send_last(vm, random),
                // The guest must not wait for its agent.
                Some(Flight { step: Step::Sent, doomed: false, .. }) if random.chance(30) => {
                    self.saw(Sight::GuardActed);
                    self.step(vm, Step::Over(End::Failed));
                }
                // The target does not hear from the source's agent.
                Some(_) if random.chance(5) => self.doom(vm),
                _ => {}
            }
        }
    }

    fn copy(&mut self, vm: usize, copied_gib: u64, random: &mut Random) {
        let name = self.vms[vm].name.clone();
        if copied_gib < self.vms[vm].disk_gib {
            self.step(vm, Step::Copying(copied_gib + 1));
            let bytes = (copied_gib + 1) * GIB;
            return self.tell_maybe(vm, DrainEvent::DisksCopied { vm: name, bytes }, random);
        }
        self.saw(Sight::DiskCopied);
        self.step(vm, Step::Sending(0));
        self.tell_maybe(vm, DrainEvent::MemoryFollows { vm: name }, random);
    }

    fn send(&mut self, vm: usize, sent_gib: u64, random: &mut Random) {
        let name = self.vms[vm].name.clone();
        let times = if self.vms[vm].by_post_copy { 1 } else { self.vms[vm].times };
        if sent_gib >= self.vms[vm].gib * times {
            self.step(vm, Step::Paused);
            self.tell_maybe(vm, DrainEvent::Paused { vm: name }, random);
            return;
        }
        let gib = self.vms[vm].sends_next(sent_gib);
        self.step(vm, Step::Sending(gib));
        if gib >= self.vms[vm].gib {
            // This is also reported when more rounds follow, and in each of them.
            self.tell_maybe(vm, DrainEvent::Ending { vm: name.clone() }, random);
        }
        self.tell_maybe(vm, DrainEvent::Arrived { vm: name, bytes: gib * GIB }, random);
    }

    fn send_last(&mut self, vm: usize, random: &mut Random) {
        self.step(vm, Step::Sent);
        let name = self.vms[vm].name.clone();
        if self.vms[vm].by_post_copy {
            self.saw(Sight::InParts);
            self.tell_maybe(vm, DrainEvent::RestFollows { vm: name.clone() }, random);
        }
        self.tell_maybe(vm, DrainEvent::Sent { vm: name }, random);
    }

    fn step(&mut self, vm: usize, step: Step) {
        if let Some(flight) = &mut self.vms[vm].flight {
            flight.step = step;
        }
    }

    fn reserve(&mut self, vm: usize, target: usize) -> Result<(), String> {
        if self.vms[vm].immovable {
            self.end(vm, End::Failed);
            return Ok(());
        }
        if self.hosts[target].drained {
            self.saw(Sight::RefusedByDrained);
            self.refuse(vm);
            return Ok(());
        }
        if self.vms[vm].gib > self.free_gib(target) {
            if !self.faults.memory_is_taken() {
                return Err(format!("overcommit: the plan leaves no room for {}", self.vms[vm].name));
            }
            self.refuse(vm);
            return Ok(());
        }
        if self.vms[vm].copied_gib(target) > self.free_disk_gib(target) {
            return Err(format!("overcommit: the plan leaves no room for the disk of {}", self.vms[vm].name));
        }
        self.step(vm, Step::Reserved);
        Ok(())
    }

    fn refuse(&mut self, vm: usize) {
        self.vms[vm].refused += 1;
        self.end(vm, End::Refused);
    }

    fn complete(&mut self, vm: usize, target: usize) {
        self.vms[vm].at = At::Target(target);
        self.end(vm, End::Completed);
    }

    fn leave_in_doubt(&mut self, vm: usize, target: usize) {
        self.vms[vm].at = At::InDoubt(target);
        self.vms[vm].flight = None;
        self.tell_end(vm, MoveEnd::InDoubt(Problem::failed("the target is silent")));
    }

    /// Nobody hears of the end before it is recorded.
    fn end(&mut self, vm: usize, end: End) {
        if self.disk_full {
            self.saw(Sight::EndUnrecorded);
            self.step(vm, Step::Over(end));
        } else {
            self.recorded(vm, end);
        }
    }

    fn recorded(&mut self, vm: usize, end: End) {
        self.note_result(vm, end == End::Completed);
        let flight = self.vms[vm].flight.take();
        if end == End::Cancelled && flight.is_some_and(|flight| flight.cancelled != Some(By::Drain)) {
            self.saw(Sight::CancelledByOther);
            self.vms[vm].is_to_stay = true;
        }
        self.tell_end(vm, end.reported());
    }

    fn tell_end(&mut self, vm: usize, end: MoveEnd) {
        let name = self.vms[vm].name.clone();
        self.tell(vm, DrainEvent::Ended { vm: name, end });
    }

    fn tell_settled(&mut self, vm: usize, end: End) {
        let name = self.vms[vm].name.clone();
        self.tell(vm, DrainEvent::Settled { vm: name, end: end.reported() });
    }

    fn tell(&mut self, vm: usize, event: DrainEvent) {
        self.news.tell(vm, self.vms[vm].migration, event);
    }

    fn tell_maybe(&mut self, vm: usize, event: DrainEvent, random: &mut Random) {
        if !random.chance(self.faults.lost) {
            self.tell(vm, event);
        }
    }

    /// The agent is restarted: it undoes what was not handed over, and asks the target about the rest.
    pub(crate) fn restart(&mut self) {
        self.disk_full = false;
        self.others = 0;
        for vm in 0..self.vms.len() {
            match self.vms[vm].flight {
                Some(Flight { step: Step::Sent, target, doomed, .. }) => {
                    let host = &self.hosts[target];
                    if host.answers && !host.frozen && !doomed {
                        self.complete(vm, target);
                    } else {
                        self.leave_in_doubt(vm, target);
                    }
                }
                Some(Flight { step: Step::Over(end), .. }) => self.recorded(vm, end),
                Some(_) => self.end(vm, End::Failed),
                None => {}
            }
        }
        self.news = News::default();
    }

    /// What runs here ends with the host. What was sent runs on its target if the order to run came in time.
    pub(crate) fn reboot(&mut self, random: &mut Random) {
        self.saw(Sight::HostRebooted);
        for vm in &mut self.vms {
            let is_sent = vm.flight.is_some_and(|flight| flight.step == Step::Sent && random.chance(50));
            if vm.at == At::Here && !is_sent {
                vm.at = At::EndedHere;
                if let Some(flight) = &mut vm.flight {
                    flight.step = Step::Over(End::Failed);
                }
            }
        }
        self.restart();
    }

    /// A drain begins, and counts its attempts from here.
    pub(crate) fn count_anew(&mut self) {
        for vm in &mut self.vms {
            (vm.begun, vm.refused) = (0, 0);
            vm.gave_way = false;
            vm.is_to_stay = false;
        }
    }
}

/// Whether something that begins this often, per thousand turns, lasts another turn.
fn for_a_while(lasts: bool, per_mille: u64, random: &mut Random) -> bool {
    if lasts { !random.chance(GOES_ON) } else { per_mille > 0 && random.below(1_000) < per_mille }
}
