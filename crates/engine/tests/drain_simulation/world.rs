//! VMs, targets and migrations, as they are, whatever the drain believes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use drainpipe_engine::drain::run::{Departure, Event, MoveEnd};
use drainpipe_engine::drain::view::{DrainView, MemorySample, PlacedVm, Placement, TargetView, VmView};
use drainpipe_engine::problem::Problem;

use crate::random::Random;

const GIB: u64 = 1 << 30;

/// Chances in percent: of each step of a migration, or of each turn of the simulation.
#[derive(Clone, Copy)]
pub(crate) struct Faults {
    /// A migration fails.
    pub fail: u64,
    /// A target stops or begins to answer.
    pub vanish: u64,
    /// Somebody else takes or gives back memory of a target.
    pub taken: u64,
    /// A message that may be lost is.
    pub lost: u64,
    /// A plan cannot be made.
    pub no_plan: u64,
    /// Somebody cancels the drain, per thousand turns.
    pub cancel: u64,
    /// The agent is started anew, per thousand turns.
    pub restart: u64,
    /// Its target takes no more VMs at a time when a migration asks for its place.
    pub crowded: u64,
    /// Somebody else moves a VM.
    pub moved: u64,
    /// A VM's memory gets dirty nearly as fast as it is sent, or faster: percent of the VMs.
    pub endless: u64,
}

impl Faults {
    pub(crate) const NONE: Self = Self {
        fail: 0,
        vanish: 0,
        taken: 0,
        lost: 0,
        no_plan: 0,
        cancel: 0,
        restart: 0,
        crowded: 0,
        moved: 0,
        endless: 0,
    };

    pub(crate) fn up_to(percent: u64) -> Self {
        Self {
            fail: percent,
            vanish: percent / 2,
            taken: percent / 2,
            lost: percent,
            no_plan: percent,
            cancel: percent / 4,
            restart: percent / 4,
            crowded: percent * 3,
            moved: percent / 8,
            endless: percent,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum At {
    Here,
    Target(usize),
    /// Handed over to this target, which has not said that it runs there.
    Undecided(usize),
    /// On a host that the drain has nothing to do with: somebody else has moved it there.
    Elsewhere,
}

pub(crate) struct Vm {
    pub name: String,
    pub gib: u64,
    /// How many times its memory it has to send.
    pub times: u64,
    pub placement: Placement,
    pub immovable: bool,
    pub at: At,
    pub begun: u64,
    /// It was taken from the links since it did not converge.
    pub gave_way: bool,
    pub flight: Option<Flight>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Begun,
    Reserved,
    Prepared,
    Sending(u64),
    Sent,
}

/// A migration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub target: usize,
    pub step: Step,
    pub released: bool,
    pub cancelled: bool,
}

pub(crate) struct Host {
    pub name: String,
    pub answers: bool,
    /// Without what is on it and on its way to it.
    pub gib: u64,
    pub vms: Vec<PlacedVm>,
}

pub(crate) struct World {
    pub vms: Vec<Vm>,
    pub hosts: Vec<Host>,
    pub faults: Faults,
    /// For each VM, what the drain has not heard yet.
    pub unheard: BTreeMap<usize, VecDeque<Event>>,
}

fn some_groups(random: &mut Random) -> BTreeSet<String> {
    if random.chance(75) { BTreeSet::new() } else { BTreeSet::from([format!("g{}", random.below(2))]) }
}

fn some_placement(random: &mut Random) -> Placement {
    let stays = random.chance(3).then(|| "its owner says so".to_owned());
    Placement { stays, apart: some_groups(random), together: some_groups(random) }
}

/// No VM is borne with for longer.
const ENDLESS: u64 = 1_000;

/// Some that give way and then converge, some that need patience, some that never end.
fn some_times(random: &mut Random) -> u64 {
    [2, 4, 12, ENDLESS][random.index(4)]
}

impl Vm {
    pub(crate) fn is_endless(&self) -> bool {
        self.times == ENDLESS
    }

    /// Whether little of it may be left, at links that carry GiB in no time.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.flight, Some(Flight { step: Step::Sending(1..), .. }))
    }

    /// Whether it has sent more than it should have.
    pub(crate) fn overstays(&self) -> bool {
        match self.flight.map(|flight| flight.step) {
            Some(Step::Sending(gib)) => gib > 2 * self.gib,
            Some(Step::Sent) => self.times > 2,
            _ => false,
        }
    }
}

impl World {
    pub(crate) fn new(random: &mut Random, faults: Faults) -> Self {
        let vms = (0..random.below(9)).map(|index| Vm {
            name: format!("v{index}"),
            gib: 1 + random.below(8),
            times: if faults.endless > 0 && random.chance(faults.endless) { some_times(random) } else { 1 },
            placement: some_placement(random),
            immovable: random.chance(3),
            at: At::Here,
            begun: 0,
            gave_way: false,
            flight: None,
        });
        let vms = vms.collect();
        let hosts = (0..=random.below(3)).map(|index| Host {
            name: format!("h{index}"),
            answers: true,
            gib: random.below(48),
            vms: (0..random.below(2))
                .map(|at| PlacedVm {
                    name: format!("h{index}v{at}"),
                    needs_bytes: GIB,
                    placement: Placement { stays: None, ..some_placement(random) },
                })
                .collect(),
        });
        let hosts = hosts.collect();
        Self { vms, hosts, faults, unheard: BTreeMap::new() }
    }

    /// GiB of a target that are promised to nobody.
    fn free_gib(&self, host: usize) -> u64 {
        let taken: u64 = self.known(host).map(|vm| vm.gib).sum();
        self.hosts[host].gib.saturating_sub(taken)
    }

    pub(crate) fn is_overcommitted(&self, host: usize) -> bool {
        self.known(host).map(|vm| vm.gib).sum::<u64>() > self.hosts[host].gib
    }

    /// VMs that the target knows of: those there, and those that it has promised memory.
    fn known(&self, host: usize) -> impl Iterator<Item = &Vm> {
        let is_promised = |vm: &&Vm| vm.flight.is_none_or(|flight| flight.step != Step::Begun);
        self.inhabitants(host).filter(is_promised)
    }

    /// VMs there or on their way there.
    pub(crate) fn inhabitants(&self, host: usize) -> impl Iterator<Item = &Vm> {
        self.vms.iter().filter(move |vm| match vm.at {
            At::Target(target) | At::Undecided(target) => target == host,
            At::Here => vm.flight.is_some_and(|flight| flight.target == host),
            At::Elsewhere => false,
        })
    }

    pub(crate) fn view(&self) -> DrainView {
        let here = self.vms.iter().filter(|vm| !matches!(vm.at, At::Target(_) | At::Elsewhere));
        let vms = here.map(|vm| {
            let busy = vm.flight.is_some() || vm.at != At::Here;
            VmView {
                name: vm.name.clone(),
                needs_bytes: vm.gib * GIB,
                memory_bytes: vm.gib * GIB,
                placement: vm.placement.clone(),
                immovable: (vm.immovable || busy).then(|| "it is busy".to_owned()),
                refusals: BTreeMap::new(),
                memory: Some(MemorySample {
                    zero_share: 0.0,
                    dirty_bytes_per_s: 0,
                    dirty_set_bytes: 0,
                    compressible: None,
                }),
            }
        });
        let targets = self.hosts.iter().enumerate().map(|(index, host)| TargetView {
            name: host.name.clone(),
            unavailable: (!host.answers).then(|| "it is silent".to_owned()),
            memory_available_bytes: self.free_gib(index) * GIB,
            makes_room: false,
            vms: host
                .vms
                .iter()
                .cloned()
                .chain(self.known(index).map(|vm| PlacedVm {
                    name: vm.name.clone(),
                    needs_bytes: vm.gib * GIB,
                    placement: vm.placement.clone(),
                }))
                .collect(),
            paths_mbps: 10_000,
            relay: None,
            remembered: None,
        });
        DrainView { host: "here".into(), vms: vms.collect(), targets: targets.collect() }
    }

    /// What nobody asked for.
    pub(crate) fn change(&mut self, random: &mut Random) {
        let at = random.index(self.hosts.len());
        let (vanishes, taken) = (random.chance(self.faults.vanish), random.chance(self.faults.taken));
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
        if self.faults.moved > 0 && random.chance(self.faults.moved) && !self.vms.is_empty() {
            self.move_by_hand(random.index(self.vms.len()));
        }
    }

    fn move_by_hand(&mut self, vm: usize) {
        if self.vms[vm].at == At::Here && self.vms[vm].flight.is_none() {
            self.vms[vm].at = At::Elsewhere;
            let name = self.vms[vm].name.clone();
            self.tell(vm, Event::Left { vm: name, departure: departure() });
        }
    }

    /// A migration of this VM is to begin, and somebody else has moved it.
    pub(crate) fn miss(&mut self, vm: usize) {
        self.end(vm, MoveEnd::Left(departure()));
    }

    /// Whether it is not here any more, and the drain has heard all of it.
    pub(crate) fn is_known_to_have_left(&self, vm: &Vm) -> bool {
        let is_unheard =
            |(of, events): (&usize, &VecDeque<Event>)| self.vms[*of].name == vm.name && !events.is_empty();
        vm.at == At::Elsewhere && !self.unheard.iter().any(is_unheard)
    }

    /// Some migration goes on by one step.
    pub(crate) fn proceed(&mut self, random: &mut Random) -> Result<(), String> {
        let flying: Vec<usize> = (0..self.vms.len()).filter(|vm| self.vms[*vm].flight.is_some()).collect();
        if flying.is_empty() {
            return Ok(());
        }
        let vm = flying[random.index(flying.len())];
        let flight = self.vms[vm].flight.ok_or("no flight")?;
        let answers = self.hosts[flight.target].answers;
        let fails = random.chance(self.faults.fail) || !answers || flight.cancelled;
        match flight.step {
            Step::Sent if fails && !flight.cancelled => self.leave_undecided(vm, flight.target),
            Step::Sent => self.complete(vm, flight.target),
            _ if fails => self.fail(vm, "it failed"),
            Step::Begun if random.chance(self.faults.crowded) => {
                let event = Event::Crowded { vm: self.vms[vm].name.clone() };
                self.tell_maybe(vm, event, random);
            }
            Step::Begun => self.reserve(vm, flight.target, random)?,
            Step::Reserved => {
                self.step(vm, Step::Prepared);
                let name = self.vms[vm].name.clone();
                self.tell(vm, Event::Prepared { vm: name });
            }
            Step::Prepared if !flight.released => {}
            Step::Prepared => self.step(vm, Step::Sending(0)),
            Step::Sending(gib) if gib < self.vms[vm].gib * self.vms[vm].times => {
                // In the first round GiB by GiB.
                let more = if gib < self.vms[vm].gib { 1 } else { self.vms[vm].gib };
                self.step(vm, Step::Sending(gib + more));
                let name = self.vms[vm].name.clone();
                if gib + more >= self.vms[vm].gib {
                    // Also when more rounds follow, and in each of them.
                    self.tell_maybe(vm, Event::Ending { vm: name.clone() }, random);
                }
                self.tell_maybe(vm, Event::Arrived { vm: name, bytes: (gib + more) * GIB }, random);
            }
            Step::Sending(_) => {
                self.step(vm, Step::Sent);
                let name = self.vms[vm].name.clone();
                self.tell_maybe(vm, Event::Paused { vm: name }, random);
            }
        }
        Ok(())
    }

    fn step(&mut self, vm: usize, step: Step) {
        if let Some(flight) = &mut self.vms[vm].flight {
            flight.step = step;
        }
    }

    fn reserve(&mut self, vm: usize, target: usize, random: &mut Random) -> Result<(), String> {
        if self.vms[vm].gib > self.free_gib(target) {
            if self.faults.taken == 0 {
                return Err(format!("overcommit: the plan leaves no room for {}", self.vms[vm].name));
            }
            self.fail(vm, "no memory is left");
            return Ok(());
        }
        self.step(vm, Step::Reserved);
        let event = Event::Begun { vm: self.vms[vm].name.clone(), migration: "m".into() };
        self.tell_maybe(vm, event, random);
        Ok(())
    }

    fn complete(&mut self, vm: usize, target: usize) {
        self.vms[vm].at = At::Target(target);
        self.end(vm, MoveEnd::Completed { transfer_ms: 1.0 });
    }

    fn leave_undecided(&mut self, vm: usize, target: usize) {
        self.vms[vm].at = At::Undecided(target);
        self.end(vm, MoveEnd::Undecided(Problem::failed("the target is silent")));
    }

    fn fail(&mut self, vm: usize, why: &str) {
        self.end(vm, MoveEnd::Failed(Problem::failed(why)));
    }

    fn end(&mut self, vm: usize, end: MoveEnd) {
        self.vms[vm].flight = None;
        let name = self.vms[vm].name.clone();
        self.tell(vm, Event::Ended { vm: name, end });
    }

    fn tell(&mut self, vm: usize, event: Event) {
        self.unheard.entry(vm).or_default().push_back(event);
    }

    fn tell_maybe(&mut self, vm: usize, event: Event, random: &mut Random) {
        if !random.chance(self.faults.lost) {
            self.tell(vm, event);
        }
    }

    /// Some message that was not heard yet; those of one VM in their order.
    pub(crate) fn hear(&mut self, random: &mut Random) -> Option<Event> {
        self.unheard.retain(|_, events| !events.is_empty());
        let talking: Vec<usize> = self.unheard.keys().copied().collect();
        if talking.is_empty() {
            return None;
        }
        self.unheard.get_mut(&talking[random.index(talking.len())])?.pop_front()
    }

    /// The agent starts anew: what was not handed over is undone, the target is asked of the rest.
    pub(crate) fn restart(&mut self) {
        for vm in 0..self.vms.len() {
            match self.vms[vm].flight {
                Some(Flight { step: Step::Sent, target, .. }) if self.hosts[target].answers => {
                    self.complete(vm, target);
                }
                Some(Flight { step: Step::Sent, target, .. }) => self.leave_undecided(vm, target),
                Some(_) => self.fail(vm, "the agent was started anew"),
                None => {}
            }
            self.vms[vm].begun = 0;
            self.vms[vm].gave_way = false;
        }
        self.unheard.clear();
        // Nobody tells the next drain of them.
        self.vms.retain(|vm| vm.at != At::Elsewhere);
    }
}

fn departure() -> Departure {
    Departure { target: "elsewhere".into(), migration: "by hand".into(), memory_bytes: GIB }
}
