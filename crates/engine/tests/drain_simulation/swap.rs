//! Two hosts that are drained into each other at the same time: each makes the room that the other one needs.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::drain::limits::DrainLimits;
use drainpipe_engine::drain::lint::lint;
use drainpipe_engine::drain::plan::{DrainPlan, plan};
use drainpipe_engine::drain::run::{Drain, DrainAction, DrainEvent, MoveEnd, Standing};
use drainpipe_engine::drain::status::MoveState;
use drainpipe_engine::drain::view::{DrainView, LimitView, PlacedVm, Placement, TargetView, VmView};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::transfer::memory_sample::MemorySample;

use crate::random::Random;

const GIB: u64 = 1 << 30;
const HOSTS: [&str; 2] = ["a", "b"];

/// Each side has at most 6 VMs of a few steps each, or of [`LONG`]. It looks for room every five seconds, at most 60
/// times while no VM of the other side is on its way.
const TURNS_MAX: usize = 50_000;

/// How many turns of its side, each of about a second, a slow VM is on the links, and more beside others. Some take
/// more than the five minutes for which the other side looks for room by itself.
const LONG: u64 = 200;

const LIMITS: DrainLimits = DrainLimits {
    total_ms: None,
    outbound: 8,
    inbound: 4,
    transfers: None,
    attempts: 2,
    post_copy: false,
    disks_first: false,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Asked,
    Reserved,
    Prepared { released: bool },
    Sent,
}

struct Vm {
    name: String,
    gib: u64,
    home: usize,
    at: usize,
    flight: Option<Step>,
}

struct Side {
    drain: Option<Drain>,
    /// The standing for which a new plan is to be made.
    planning: Option<Standing>,
    unheard: Vec<DrainEvent>,
    /// An event that was heard, and arrives once more before any other.
    again: Option<DrainEvent>,
    finished: bool,
    /// For how many turns its agent hangs.
    still: u64,
    /// How often its agent may still be restarted.
    restarts_left: u8,
    /// What it had moved when its agent was last restarted.
    earlier: BTreeSet<String>,
}

/// How the swap ended.
pub(crate) struct Swapped {
    /// The number of VMs that are still where they were.
    pub left: usize,
    /// Whether each host had room for all of the other's, and for the largest VM before any had left.
    pub has_room: bool,
}

struct World {
    random: Random,
    fail: u64,
    /// For how many turns a VM is on the links, on average.
    sends: u64,
    gib: [u64; 2],
    vms: BTreeMap<String, Vm>,
    sides: [Side; 2],
    now_ms: f64,
}

/// Runs one seed to its end; the error is the rule that was broken.
pub(crate) fn simulate(seed: u64, fail: u64) -> Result<Swapped, String> {
    let sends = if fail == 0 && seed.is_multiple_of(8) { LONG } else { 1 };
    let mut world = World::new(Random(seed), fail, sends);
    let has_room = world.has_room();
    for _ in 0..TURNS_MAX {
        world.turn()?;
        if world.sides.iter().all(|side| side.finished) {
            world.check_statuses()?;
            let left = world.vms.values().filter(|vm| vm.at == vm.home).count();
            return Ok(Swapped { left, has_room });
        }
    }
    Err("it does not end".into())
}

impl World {
    fn new(mut random: Random, fail: u64, sends: u64) -> Self {
        let mut vms = BTreeMap::new();
        let mut gib = [0, 0];
        for home in [0, 1] {
            for index in 0..random.below(7) {
                let (name, size) = (format!("{}{index}", HOSTS[home]), 1 + random.below(8));
                gib[home] += size;
                vms.insert(name.clone(), Vm { name, gib: size, home, at: home, flight: None });
            }
            gib[home] += random.below(20);
        }
        let side = || Side {
            drain: None,
            planning: None,
            unheard: vec![],
            again: None,
            finished: false,
            still: 0,
            restarts_left: 3,
            earlier: BTreeSet::new(),
        };
        Self { random, fail, sends, gib, vms, sides: [side(), side()], now_ms: 0.0 }
    }

    fn of_home(&self, home: usize) -> impl Iterator<Item = &Vm> {
        self.vms.values().filter(move |vm| vm.home == home)
    }

    fn has_room(&self) -> bool {
        let largest = self.vms.values().map(|vm| vm.gib).max().unwrap_or(0);
        let sum = |home| self.of_home(home).map(|vm| vm.gib).sum::<u64>();
        [0, 1].iter().all(|host| self.free_gib(*host) >= largest && self.gib[*host] >= sum(1 - host))
    }

    fn used_gib(&self, host: usize) -> u64 {
        let is_promised = |vm: &&Vm| vm.at != host && !matches!(vm.flight, None | Some(Step::Asked));
        let coming = self.vms.values().filter(is_promised).map(|vm| vm.gib);
        self.vms.values().filter(|vm| vm.at == host).map(|vm| vm.gib).sum::<u64>() + coming.sum::<u64>()
    }

    fn free_gib(&self, host: usize) -> u64 {
        self.gib[host].saturating_sub(self.used_gib(host))
    }

    /// A VM that came by the swap does not belong to those that the other side has to move.
    fn view(&self, side: usize) -> DrainView {
        let other = 1 - side;
        let here = self.of_home(side).filter(|vm| vm.at == side);
        let vms = here.map(|vm| VmView {
            name: vm.name.clone(),
            needs_bytes: vm.gib * GIB,
            memory_bytes: vm.gib * GIB,
            placement: Placement::default(),
            immovable: vm.flight.map(|_| "it is busy".to_owned()),
            refusals: BTreeMap::new(),
            copies: BTreeMap::new(),
            memory: Some(MemorySample {
                zero_share: 0.0,
                dirty_bytes_per_s: 0,
                dirty_set_bytes: 0,
                compressible: None,
            }),
        });
        let there = self.vms.values().filter(|vm| {
            vm.at == other || (vm.home == side && !matches!(vm.flight, None | Some(Step::Asked)))
        });
        let target = TargetView {
            name: HOSTS[other].into(),
            unavailable: None,
            warnings: vec![],
            memory_available_bytes: self.free_gib(other) * GIB,
            file_systems: vec![],
            makes_room: !self.sides[other].finished,
            makes_room_now: self.of_home(other).any(|vm| vm.flight.is_some()),
            vms: there
                .map(|vm| PlacedVm {
                    name: vm.name.clone(),
                    needs_bytes: vm.gib * GIB,
                    placement: Placement::default(),
                })
                .collect(),
            paths_mbps: 10_000,
            paths: vec![],
            limit: LimitView::default(),
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: None,
        };
        let limit = LimitView::default();
        DrainView { host: HOSTS[side].into(), vms: vms.collect(), targets: vec![target], limit }
    }

    fn turn(&mut self) -> Result<(), String> {
        self.now_ms += self.random.below(1_000) as f64;
        let side = self.random.index(2);
        if self.stands_still(side) {
            return Ok(());
        }
        self.proceed(side);
        let Some(mut drain) = self.sides[side].drain.take() else {
            let first = self.sound_plan(side, &Standing::default())?;
            let (drain, actions) = Drain::begin(first, LIMITS, 0, self.now_ms);
            self.sides[side].drain = Some(drain);
            return self.perform(side, actions);
        };
        let event = self.next_event(side)?;
        let actions = drain.handle(self.now_ms, event);
        self.sides[side].drain = Some(drain);
        self.perform(side, actions)?;
        match [0, 1].iter().find(|host| self.used_gib(**host) > self.gib[**host]) {
            Some(host) => Err(format!("overcommit of {}", HOSTS[*host])),
            None => Ok(()),
        }
    }

    /// Whether this side's agent hangs, or is restarted.
    fn stands_still(&mut self, side: usize) -> bool {
        if self.random.below(1_000) < self.fail {
            self.sides[side].still = self.random.below(200);
        }
        let may_restart = !self.sides[side].finished && self.sides[side].restarts_left > 0;
        if may_restart && self.random.below(2_000) < self.fail {
            self.restart(side);
        }
        let is_still = self.sides[side].still > 0;
        self.sides[side].still = self.sides[side].still.saturating_sub(1);
        is_still
    }

    /// What was not sent is undone, and what was sent is adopted. Then the drain continues.
    fn restart(&mut self, side: usize) {
        for vm in self.vms.values_mut().filter(|vm| vm.home == side) {
            if vm.flight.take() == Some(Step::Sent) {
                vm.at = 1 - side;
            }
        }
        let moved = self.of_home(side).filter(|vm| vm.at != side).map(|vm| vm.name.clone()).collect();
        let carried_on = &mut self.sides[side];
        (carried_on.drain, carried_on.planning, carried_on.earlier) = (None, None, moved);
        carried_on.restarts_left -= 1;
        carried_on.unheard.clear();
        carried_on.again = None;
    }

    fn next_event(&mut self, side: usize) -> Result<DrainEvent, String> {
        if let Some(event) = self.sides[side].again.take() {
            return Ok(event);
        }
        if self.random.chance(50)
            && let Some(standing) = self.sides[side].planning.take()
        {
            return self.sound_plan(side, &standing).map(DrainEvent::Planned);
        }
        let unheard = &mut self.sides[side].unheard;
        let event = if unheard.is_empty() { DrainEvent::Tick } else { unheard.remove(0) };
        if self.random.chance(self.fail) {
            self.sides[side].again = Some(event.clone());
        }
        Ok(event)
    }

    fn sound_plan(&self, side: usize, standing: &Standing) -> Result<DrainPlan, String> {
        let mut view = self.view(side);
        standing.complete(&mut view);
        let plan = plan(&view, Some(&LIMITS));
        let findings = lint(&view, &plan);
        if findings.is_empty() { Ok(plan) } else { Err(format!("the plan is bad: {findings:?}")) }
    }

    fn perform(&mut self, side: usize, actions: Vec<DrainAction>) -> Result<(), String> {
        for action in actions {
            if self.sides[side].finished {
                return Err(format!("{action:?} after it was over"));
            }
            match action {
                DrainAction::Begin { vm, target, .. } => self.begin(side, &vm, &target)?,
                DrainAction::Release { vm } => self.release(&vm),
                DrainAction::GiveWay { .. } | DrainAction::TakeAll { .. } => {}
                DrainAction::Cancel { vm } => return Err(format!("{vm} is cancelled for no reason")),
                DrainAction::Plan => {
                    self.sides[side].planning = self.sides[side].drain.as_ref().map(Drain::standing);
                }
                DrainAction::Finish => self.sides[side].finished = true,
            }
        }
        Ok(())
    }

    fn begin(&mut self, side: usize, vm: &str, target: &str) -> Result<(), String> {
        let vm = self.vms.get_mut(vm).ok_or("no such VM")?;
        if vm.flight.is_some() || vm.home != side || vm.at != side || target != HOSTS[1 - side] {
            return Err(format!("{} is moved twice, or back", vm.name));
        }
        vm.flight = Some(Step::Asked);
        Ok(())
    }

    fn release(&mut self, vm: &str) {
        if let Some(vm) = self.vms.get_mut(vm)
            && vm.flight == Some(Step::Prepared { released: false })
        {
            vm.flight = Some(Step::Prepared { released: true });
        }
    }

    /// Some migration of this side takes one step.
    fn proceed(&mut self, side: usize) {
        let flying: Vec<String> =
            self.of_home(side).filter(|vm| vm.flight.is_some()).map(|vm| vm.name.clone()).collect();
        if flying.is_empty() {
            return;
        }
        let name = flying[self.random.index(flying.len())].clone();
        let fails = self.random.chance(self.fail);
        let is_sent = self.random.below(self.sends) == 0;
        let free_gib = self.free_gib(1 - side);
        let Some(vm) = self.vms.get_mut(&name) else { return };
        let ended = |end| Some(DrainEvent::Ended { vm: name.clone(), end });
        let failed = |why: &str| ended(MoveEnd::Failed(Problem::failed(why)));
        let (next, event) = match vm.flight {
            Some(Step::Asked) if vm.gib > free_gib => (None, failed("no memory is left")),
            Some(Step::Sent) => {
                vm.at = 1 - side;
                self.sides[side].unheard.push(DrainEvent::Sent { vm: name.clone() });
                (None, ended(MoveEnd::Completed { transfer_ms: 1.0 }))
            }
            Some(_) if fails => (None, failed("it failed")),
            Some(Step::Asked) => (Some(Step::Reserved), None),
            Some(Step::Reserved) => {
                (Some(Step::Prepared { released: false }), Some(DrainEvent::Prepared { vm: name.clone() }))
            }
            Some(Step::Prepared { released: true }) if is_sent => {
                (Some(Step::Sent), Some(DrainEvent::Paused { vm: name.clone() }))
            }
            other => (other, None),
        };
        vm.flight = next;
        self.sides[side].unheard.extend(event);
    }

    fn check_statuses(&self) -> Result<(), String> {
        for (side, of_side) in self.sides.iter().enumerate() {
            let status = of_side.drain.as_ref().ok_or("it never began")?.status(self.now_ms);
            for vm in self.of_home(side) {
                let row = status.moves.iter().find(|row| row.vm == vm.name);
                let has_moved = row.is_some_and(|row| row.state == MoveState::Moved);
                let is_reported = has_moved || of_side.earlier.contains(&vm.name);
                if is_reported != (vm.at != side) || vm.flight.is_some() {
                    return Err(format!("{} is on {}, by {row:?}", vm.name, HOSTS[vm.at]));
                }
            }
        }
        Ok(())
    }
}
