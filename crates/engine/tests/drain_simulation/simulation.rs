//! One run: the drain's actions are carried out in the world, and each is held to the rules.

use std::collections::BTreeSet;

use drainpipe_engine::drain::lint::lint;
use drainpipe_engine::drain::plan::{DrainPlan, plan};
use drainpipe_engine::drain::run::{Action, Drain, DrainLimits, Event, Standing};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::problem::Problem;

use crate::random::Random;
use crate::world::{At, Faults, Flight, Step, Vm, World};

/// No drain takes more turns: each has at most 8 VMs, 4 attempts each, of a dozen steps each, or some forty.
const TURNS_MAX: usize = 20_000;

/// A bug between the drain and the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    Nothing,
    /// Each migration is begun twice.
    TwoStarts,
    /// What is prepared is released at once, whatever is on the links.
    NoTurns,
    /// A release is lost.
    LostRelease,
    /// The end of a migration is lost.
    LostEnd,
    /// The plan believes in memory that is not there.
    Overcommit,
    /// It is over while migrations are under way.
    EarlyFinish,
    /// A VM is left out of the plan.
    LostVm,
}

impl Planted {
    pub(crate) const ALL: [Self; 7] = [
        Self::TwoStarts,
        Self::NoTurns,
        Self::LostRelease,
        Self::LostEnd,
        Self::Overcommit,
        Self::EarlyFinish,
        Self::LostVm,
    ];

    /// Words of the rule that it breaks.
    pub(crate) fn shows_as(self) -> &'static str {
        match self {
            Self::Nothing => "",
            Self::TwoStarts => "begun while it is under way",
            Self::NoTurns => "too many on the links",
            Self::LostRelease | Self::LostEnd => "it does not end",
            Self::Overcommit => "overcommit",
            Self::EarlyFinish => "over while",
            Self::LostVm => "not in the status",
        }
    }

    fn spoil_actions(self, event: Option<&Event>, actions: &mut Vec<Action>) {
        match self {
            Self::TwoStarts => {
                *actions = actions.iter().flat_map(|action| [action.clone(), action.clone()]).collect();
            }
            Self::LostRelease => actions.retain(|action| !matches!(action, Action::Release { .. })),
            Self::NoTurns => {
                if let Some(Event::Prepared { vm }) = event {
                    actions.retain(|action| !matches!(action, Action::Release { .. }));
                    actions.push(Action::Release { vm: vm.clone() });
                }
            }
            Self::EarlyFinish if event.is_some() => actions.push(Action::Finish),
            _ => {}
        }
    }
}

/// How a run ended.
pub(crate) struct Run {
    pub outcome: DrainState,
    pub vms: usize,
    pub planned: usize,
    pub moved: usize,
    pub begun: usize,
    /// VMs that were tried and can never be moved.
    pub endless: usize,
    /// VMs that have to send their memory more than twice.
    pub slow: usize,
}

/// What [`Action::Plan`] will be answered with.
enum Answer {
    /// The hosts were looked at when the action was given.
    Seen(Event),
    /// They will be looked at when the answer is given.
    NotSeen(Standing),
}

struct Simulation {
    seed_limits: DrainLimits,
    random: Random,
    world: World,
    planted: Planted,
    drain: Drain,
    begun_ms: f64,
    now_ms: f64,
    planned: usize,
    begun: usize,
    answer: Option<Answer>,
    cancelled: bool,
    finished: bool,
    /// VMs that somebody else moves, which are none of these.
    others: u8,
    /// VMs that leave the links to others.
    giving_way: BTreeSet<String>,
}

/// Runs one seed to its end; the rule that was broken, if one was.
pub(crate) fn simulate(seed: u64, faults: Faults, planted: Planted) -> Result<Run, String> {
    let mut random = Random(seed);
    let world = World::new(&mut random, faults);
    let limits = some_limits(&mut random, faults);
    let mut simulation = Simulation::new(random, world, limits, planted)?;
    for _ in 0..TURNS_MAX {
        simulation.turn()?;
        if simulation.finished {
            return simulation.ended();
        }
    }
    Err(format!("it does not end: {:#?}", simulation.drain))
}

fn small(random: &mut Random, bound: u64) -> u8 {
    u8::try_from(1 + random.below(bound)).expect("a small number")
}

fn some_limits(random: &mut Random, faults: Faults) -> DrainLimits {
    let has_deadline = faults.cancel > 0 && random.chance(20);
    DrainLimits {
        total_ms: has_deadline.then(|| random.below(60_000) as f64),
        outbound: small(random, 8),
        inbound: small(random, 4),
        transfers: random.chance(50).then(|| small(random, 4)),
        attempts: small(random, 3),
    }
}

impl Simulation {
    fn new(random: Random, world: World, limits: DrainLimits, planted: Planted) -> Result<Self, String> {
        let first = plan(&world.view(), Some(&limits));
        let moves = first.moves.len();
        let (drain, actions) = Drain::begin(spoiled(planted, first), limits, 0, 0.0);
        let mut simulation = Self {
            seed_limits: limits,
            random,
            world,
            planted,
            drain,
            begun_ms: 0.0,
            now_ms: 0.0,
            planned: moves,
            begun: 0,
            answer: None,
            cancelled: false,
            finished: false,
            others: 0,
            giving_way: BTreeSet::new(),
        };
        simulation.perform(None, actions)?;
        Ok(simulation)
    }

    fn turn(&mut self) -> Result<(), String> {
        self.now_ms += self.random.below(400) as f64;
        self.world.change(&mut self.random);
        let faults = self.world.faults;
        if self.random.below(1_000) < faults.restart && !self.finished {
            return self.restart();
        }
        self.world.proceed(&mut self.random)?;
        let event = self.next_event(faults)?;
        if self.planted == Planted::LostEnd && matches!(event, Event::Ended { .. }) {
            return Ok(());
        }
        if event == Event::CancelRequested {
            self.cancelled = true;
        }
        let actions = self.drain.handle(self.now_ms, event.clone());
        if actions.is_empty() && self.planted == Planted::Nothing {
            return Ok(());
        }
        self.perform(Some(&event), actions)?;
        self.check()
    }

    fn next_event(&mut self, faults: Faults) -> Result<Event, String> {
        if self.random.below(1_000) < faults.cancel {
            return Ok(Event::CancelRequested);
        }
        if self.random.chance(30) {
            match self.answer.take() {
                Some(Answer::Seen(event)) => return Ok(event),
                Some(Answer::NotSeen(standing)) => return self.new_plan(&standing),
                None => {}
            }
        }
        if faults.moved > 0 && self.random.chance(5) {
            self.others = u8::try_from(self.random.below(3)).expect("a small number");
            return Ok(Event::OthersLeave { count: self.others });
        }
        let heard = if self.random.chance(70) { self.world.hear(&mut self.random) } else { None };
        Ok(heard.unwrap_or(Event::Tick))
    }

    fn restart(&mut self) -> Result<(), String> {
        self.world.restart();
        self.answer = None;
        self.cancelled = false;
        self.giving_way.clear();
        self.others = 0;
        self.begun_ms = self.now_ms;
        let fresh = plan(&self.world.view(), Some(&self.seed_limits));
        let (drain, actions) = Drain::begin(fresh, self.seed_limits, 0, self.now_ms);
        self.drain = drain;
        self.perform(None, actions)
    }

    fn is_closing(&self) -> bool {
        let total_ms = self.seed_limits.total_ms.unwrap_or(f64::INFINITY);
        self.cancelled || self.now_ms - self.begun_ms >= total_ms
    }

    fn perform(&mut self, event: Option<&Event>, mut actions: Vec<Action>) -> Result<(), String> {
        self.planted.spoil_actions(event, &mut actions);
        for action in actions {
            if self.finished {
                return Err(format!("{action:?} after it was over"));
            }
            match action {
                Action::Begin { vm, target } => self.begin(&vm, &target)?,
                Action::GiveWay { vm } => self.give_way(&vm)?,
                Action::TakeAll { vm } => self.take_all(&vm)?,
                Action::Release { vm } => self.release(&vm)?,
                Action::Cancel { vm } => self.cancel(&vm)?,
                Action::Plan => self.make_plan()?,
                Action::Finish => self.finish()?,
            }
        }
        Ok(())
    }

    fn index(&self, vm: &str) -> Result<usize, String> {
        self.world.vms.iter().position(|other| other.name == vm).ok_or(format!("there is no VM {vm}"))
    }

    fn begin(&mut self, vm: &str, target: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        let target = self.world.hosts.iter().position(|host| host.name == target).ok_or("no such target")?;
        if self.answer.is_some() || self.is_closing() {
            return Err(format!("{vm} begun while nothing may be"));
        }
        let under_way = self.world.vms.iter().filter(|vm| vm.flight.is_some()).count();
        if under_way + usize::from(self.others) >= usize::from(self.seed_limits.outbound) {
            return Err(format!("{vm} is begun while as many leave as may"));
        }
        let vm = &mut self.world.vms[index];
        if vm.flight.is_some() || !matches!(vm.at, At::Here | At::Elsewhere) {
            return Err(format!("{} is begun while it is under way, or elsewhere", vm.name));
        }
        vm.begun += 1;
        // It may have given way once.
        let gives_way = u64::from(vm.times > 2);
        if vm.begun > u64::from(self.seed_limits.attempts) + gives_way {
            return Err(format!("{} is tried too often", vm.name));
        }
        self.giving_way.remove(&vm.name);
        if vm.at == At::Elsewhere {
            self.world.miss(index);
            return Ok(());
        }
        vm.flight = Some(Flight { target, step: Step::Begun, released: false, cancelled: false });
        self.begun += 1;
        Ok(())
    }

    fn give_way(&mut self, vm: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        let others = self.world.vms.iter().enumerate().filter(|(other, _)| *other != index);
        // One that has ended, which was not heard yet, counts.
        if !others.into_iter().any(|(_, other)| other.begun > 0) {
            return Err(format!("{vm} gives way to nobody"));
        }
        if !self.giving_way.insert(vm.to_owned()) {
            return Err(format!("{vm} gives way twice"));
        }
        Ok(())
    }

    fn take_all(&mut self, vm: &str) -> Result<(), String> {
        if self.giving_way.remove(vm) { Ok(()) } else { Err(format!("{vm} did not give way")) }
    }

    fn release(&mut self, vm: &str) -> Result<(), String> {
        if self.is_closing() {
            return Err(format!("{vm} is released while nothing may be"));
        }
        let index = self.index(vm)?;
        // One that has failed, which was not heard yet.
        let Some(flight) = &mut self.world.vms[index].flight else { return Ok(()) };
        if flight.released || flight.step != Step::Prepared {
            return Err(format!("{vm} is released at {:?}", flight.step));
        }
        flight.released = true;
        self.check_turn(index)?;
        self.check_links(self.drain.status(self.now_ms).transfers)
    }

    /// Who has sent more than it should keeps nobody waiting who has not.
    fn check_turn(&self, index: usize) -> Result<(), String> {
        let vm = &self.world.vms[index];
        let status = self.drain.status(self.now_ms);
        let waits =
            |row: &&MoveStatus| row.state == MoveState::Ready && row.attempts == 1 && row.error.is_none();
        match status.moves.iter().find(waits).filter(|_| vm.gave_way) {
            Some(row) => Err(format!("{} goes before {}, and does not converge", vm.name, row.vm)),
            None => Ok(()),
        }
    }

    /// One more may be there while another is about to be paused.
    fn check_links(&self, most: u8) -> Result<(), String> {
        let flying = self.world.vms.iter().filter_map(|vm| Some((vm, vm.flight?)));
        let on_links = flying.filter(|(_, flight)| flight.released && flight.step != Step::Sent);
        let on_links: Vec<bool> = on_links.map(|(vm, _)| vm.is_ending()).collect();
        let (all, ending) = (on_links.len(), on_links.iter().filter(|is_ending| **is_ending).count());
        let most = usize::from(most);
        if all - ending > most || all > most.saturating_add(1) {
            return Err(format!("too many on the links: {all}, of which {ending} near their end"));
        }
        Ok(())
    }

    fn cancel(&mut self, vm: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        let (ended, overstays) = (self.world.vms[index].flight.is_none(), self.world.vms[index].overstays());
        if !self.is_closing() && !overstays && !ended {
            return Err(format!("{vm} is cancelled for no reason"));
        }
        let gave_way = self.world.vms[index].gave_way;
        let Some(flight) = &mut self.world.vms[index].flight else { return Ok(()) };
        if flight.cancelled || (!self.cancelled && flight.released && !overstays && !gave_way) {
            return Err(format!("{vm} is cancelled twice, or on the links by the deadline"));
        }
        flight.cancelled = true;
        self.world.vms[index].gave_way |= overstays;
        Ok(())
    }

    fn make_plan(&mut self) -> Result<(), String> {
        if self.answer.is_some() {
            return Err("two plans are made at once".into());
        }
        let seen_now = self.random.chance(50);
        let standing = self.drain.standing();
        self.answer =
            Some(if seen_now { Answer::Seen(self.new_plan(&standing)?) } else { Answer::NotSeen(standing) });
        Ok(())
    }

    fn new_plan(&mut self, standing: &Standing) -> Result<Event, String> {
        if self.random.chance(self.world.faults.no_plan) {
            return Ok(Event::NotPlanned(Problem::failed("no host answers")));
        }
        let mut view = self.world.view();
        standing.complete(&mut view);
        let plan = plan(&view, Some(&self.seed_limits));
        let findings = lint(&view, &plan);
        if findings.is_empty() {
            Ok(Event::Planned(plan))
        } else {
            Err(format!("the plan is bad: {findings:?}"))
        }
    }

    fn finish(&mut self) -> Result<(), String> {
        if self.answer.is_some() || self.world.vms.iter().any(|vm| vm.flight.is_some()) {
            return Err("it is over while something is under way".into());
        }
        if let Some(vm) = self.giving_way.first() {
            return Err(format!("it is over, and {vm} gives way"));
        }
        self.finished = true;
        Ok(())
    }

    /// What holds at any time.
    fn check(&self) -> Result<(), String> {
        let flights: Vec<Flight> = self.world.vms.iter().filter_map(|vm| vm.flight).collect();
        if flights.len() > usize::from(self.seed_limits.outbound) {
            return Err("too many leave this host".into());
        }
        let most = self.seed_limits.transfers.unwrap_or(u8::MAX);
        self.check_links(most)?;
        for host in 0..self.world.hosts.len() {
            let inbound = flights.iter().filter(|flight| flight.target == host).count();
            if inbound > usize::from(self.seed_limits.inbound) {
                return Err(format!("too many on their way to {}", self.world.hosts[host].name));
            }
            if self.world.is_overcommitted(host) {
                return Err(format!("overcommit of {}", self.world.hosts[host].name));
            }
            self.check_groups(host)?;
        }
        Ok(())
    }

    fn check_groups(&self, host: usize) -> Result<(), String> {
        let mut groups: BTreeSet<&String> =
            self.world.hosts[host].vms.iter().flat_map(|vm| &vm.placement.apart).collect();
        let coming = self.world.inhabitants(host).flat_map(|vm| &vm.placement.apart);
        for group in coming {
            if !groups.insert(group) {
                return Err(format!("two of group {group} on {}", self.world.hosts[host].name));
            }
        }
        Ok(())
    }

    fn ended(&self) -> Result<Run, String> {
        let status = self.drain.status(self.now_ms);
        self.check_status(&status)?;
        let outcome = self.drain.outcome().ok_or("it is over, and has no outcome")?;
        let has_gone = |vm: &Vm| matches!(vm.at, At::Target(_)) || self.world.is_known_to_have_left(vm);
        let here = self.world.vms.iter().any(|vm| !has_gone(vm));
        if (outcome == DrainState::Drained) == here {
            return Err(format!("{outcome:?}, and VMs are here: {here}"));
        }
        let moved = self.world.vms.iter().filter(|vm| matches!(vm.at, At::Target(_))).count();
        let tried = || self.world.vms.iter().filter(|vm| vm.begun > 0);
        Ok(Run {
            outcome,
            vms: self.world.vms.len(),
            planned: self.planned,
            moved,
            begun: self.begun,
            endless: tried().filter(|vm| vm.is_endless()).count(),
            slow: tried().filter(|vm| vm.times > 2).count(),
        })
    }

    /// Each VM is told of once, and what is told is so.
    fn check_status(&self, status: &DrainStatus) -> Result<(), String> {
        let names = status.moves.iter().map(|row| &row.vm).chain(status.stays.iter().map(|stay| &stay.vm));
        let mut told = BTreeSet::new();
        for name in names {
            if !told.insert(name) {
                return Err(format!("{name} is told of twice"));
            }
        }
        // What had moved before the agent was started anew is not this drain's.
        let mine = self.world.vms.iter().filter(|vm| match vm.at {
            At::Target(_) => vm.begun > 0,
            At::Elsewhere => self.world.is_known_to_have_left(vm),
            At::Here | At::Undecided(_) => true,
        });
        if let Some(lost) = mine.map(|vm| &vm.name).find(|name| !told.contains(name)) {
            return Err(format!("{lost} is not in the status"));
        }
        for row in &status.moves {
            let vm = &self.world.vms[self.index(&row.vm)?];
            let is_so = match row.state {
                MoveState::Moved => matches!(vm.at, At::Target(_)),
                MoveState::Failed => {
                    matches!(vm.at, At::Here | At::Elsewhere)
                        && !self.world.is_known_to_have_left(vm)
                        && row.error.is_some()
                }
                MoveState::Left => vm.at == At::Elsewhere,
                MoveState::Undecided => matches!(vm.at, At::Undecided(_)),
                _ => false,
            };
            if !is_so || vm.begun != u64::from(row.attempts) {
                return Err(format!("{} is {:?}, by its row {row:?}", vm.name, vm.at));
            }
        }
        Ok(())
    }
}

fn spoiled(planted: Planted, mut plan: DrainPlan) -> DrainPlan {
    match planted {
        Planted::Overcommit => {
            if let Some(first) = plan.moves.first().map(|first| first.target.clone()) {
                for planned in &mut plan.moves {
                    planned.target.clone_from(&first);
                }
            }
        }
        Planted::LostVm => {
            plan.moves.pop();
        }
        _ => {}
    }
    plan
}
