//! One run: the drain's actions are carried out in the world, as `agent/src/drain/executor.rs` does it, and each is
//! held to the rules.

use std::collections::{BTreeSet, VecDeque};

use drainpipe_engine::drain::lint::lint;
use drainpipe_engine::drain::plan::{DrainPlan, plan};
use drainpipe_engine::drain::run::{Action, Drain, DrainLimits, Event, MoveEnd, Standing};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::problem::Problem;

use crate::faults::{Faults, Sight};
use crate::journal::{Journal, with_earlier};
use crate::planted::Planted;
use crate::random::Random;
use crate::world::{At, By, Flight, Step, Vm, World, departure, name_of};

/// No drain takes more turns: each has at most 8 VMs, 4 attempts each, of a dozen steps each, or some forty.
const TURNS_MAX: usize = 20_000;

/// How often what has ended is begun again at most.
const ROUNDS_MAX: u8 = 3;

/// For so many turns no time passes.
const RUSH: usize = 20;

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
    pub sights: BTreeSet<Sight>,
}

/// What [`Action::Plan`] will be answered with.
enum Answer {
    /// The action waits for the disk.
    Awaited,
    /// The hosts were looked at when the action was given.
    Seen(Event),
    /// They will be looked at when the answer is given.
    NotSeen(Standing),
}

/// An action that was given, and how many VMs might be on the links then.
struct Held {
    action: Action,
    transfers: u8,
}

impl Held {
    fn begins(&self, vm: &str) -> bool {
        matches!(&self.action, Action::Begin { vm: begun, .. } if begun == vm)
    }
}

/// How far the drain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    UnderWay,
    /// It says that it is over, which is to be written down.
    Over,
    Finished,
}

struct Simulation {
    limits: DrainLimits,
    random: Random,
    world: World,
    planted: Planted,
    tells: bool,
    drain: Drain,
    journal: Journal,
    /// What earlier lives of the agent have moved.
    earlier: Vec<MoveStatus>,
    /// What was given, and is done once the journal says so.
    held: VecDeque<Held>,
    /// What the agent has to tell itself.
    own_news: VecDeque<Event>,
    begun_ms: f64,
    now_ms: f64,
    /// What people do to the clock that they see.
    wall_ms: f64,
    /// Turns in which no time passes.
    rush: usize,
    rounds: u8,
    planned: usize,
    begun: usize,
    migrations: u64,
    answer: Option<Answer>,
    /// An answer that was heard, and comes once more.
    answer_again: Option<Event>,
    cancelled: bool,
    course: Course,
    /// VMs that somebody else moves from this host, by the last look.
    others: u8,
    /// VMs of which the agent has told the drain that somebody else has moved them.
    absent: BTreeSet<String>,
    /// Those of them that were not under way then, so that it has nothing to do with them any more.
    left: BTreeSet<String>,
    /// VMs that leave the links to others.
    giving_way: BTreeSet<String>,
}

/// Runs one seed to its end; the rule that was broken, if one was.
pub(crate) fn simulate(
    seed: u64,
    draw: impl FnOnce(&mut Random) -> Faults,
    planted: Planted,
) -> Result<Run, String> {
    let mut random = Random(seed);
    let faults = draw(&mut random);
    let world = World::new(&mut random, faults);
    let limits = some_limits(&mut random, faults);
    let mut simulation = Simulation::new(random, world, limits, planted)?;
    for _ in 0..TURNS_MAX {
        simulation.turn()?;
        if simulation.course == Course::Finished && !simulation.begins_again()? {
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

fn no_plan() -> DrainPlan {
    DrainPlan {
        host: "here".into(),
        moves: vec![],
        stays: vec![],
        await_room: vec![],
        transfers: 1,
        transfers_found: false,
        links_mbps: None,
        predicted_ms: 0.0,
        warnings: vec![],
    }
}

impl Simulation {
    fn new(random: Random, world: World, limits: DrainLimits, planted: Planted) -> Result<Self, String> {
        let mut simulation = Self {
            limits,
            random,
            world,
            planted,
            tells: std::env::var("DRAINPIPE_SEED").is_ok(),
            drain: Drain::begin(no_plan(), limits, 0, 0.0).0,
            journal: Journal::new(),
            earlier: vec![],
            held: VecDeque::new(),
            own_news: VecDeque::new(),
            begun_ms: 0.0,
            now_ms: 0.0,
            wall_ms: 0.0,
            rush: 0,
            rounds: 0,
            planned: 0,
            begun: 0,
            migrations: 0,
            answer: None,
            answer_again: None,
            cancelled: false,
            course: Course::UnderWay,
            others: 0,
            absent: BTreeSet::new(),
            left: BTreeSet::new(),
            giving_way: BTreeSet::new(),
        };
        simulation.start()?;
        Ok(simulation)
    }

    /// A drain begins, or is carried on.
    fn start(&mut self) -> Result<(), String> {
        let is_kept =
            |one: &MoveStatus| matches!(one.state, MoveState::Moved | MoveState::Undecided | MoveState::Left);
        self.earlier = self.journal.settled(&self.world, self.planted);
        if self.earlier.iter().any(|one| one.state == MoveState::Left) {
            self.world.saw(Sight::FoundMovedByHand);
        }
        self.journal.opened();
        self.earlier.retain(|one| is_kept(one) && self.planted != Planted::EarlierForgotten);
        if !self.earlier.is_empty() {
            self.world.saw(Sight::CarriedOn);
        }
        self.world.count_anew();
        self.held.clear();
        self.own_news.clear();
        (self.answer, self.answer_again) = (None, None);
        (self.cancelled, self.course) = (false, Course::UnderWay);
        self.giving_way.clear();
        self.absent.clear();
        self.left.clear();
        self.others = self.world.others;
        self.begun_ms = self.now_ms;
        let plan = self.sound_plan(&Standing::default())?;
        self.planned = plan.moves.len();
        let (drain, actions) = Drain::begin(plan, self.limits, self.others, self.clock_ms());
        self.drain = drain;
        self.say(|| format!("within {:?} → {actions:?}", self.limits));
        self.take(None, actions)
    }

    /// Once in a while somebody wants what has ended to be carried on.
    fn begins_again(&mut self) -> Result<bool, String> {
        self.check_end()?;
        self.rounds += 1;
        if self.rounds > ROUNDS_MAX || !self.random.chance(self.world.faults.again) {
            return Ok(false);
        }
        for _ in 0..self.random.below(40) {
            self.world.change(&mut self.random);
        }
        self.world.disk_full = false;
        self.start()?;
        Ok(true)
    }

    /// What the agent takes for the time.
    fn clock_ms(&self) -> f64 {
        if self.planted == Planted::WallClock { self.now_ms + self.wall_ms } else { self.now_ms }
    }

    fn turn(&mut self) -> Result<(), String> {
        self.rush = self.rush.saturating_sub(1);
        if self.rush == 0 {
            self.now_ms += self.random.below(400) as f64;
            self.world.change(&mut self.random);
            if self.per_mille(self.world.faults.restart) {
                return self.restart();
            }
            self.stand_still();
            self.world.proceed(&mut self.random)?;
        }
        let event = self.planted.spoil_event(self.next_event()?);
        if self.planted == Planted::LostEnd && matches!(event, Event::Ended { .. }) {
            return Ok(());
        }
        self.note_told(&event);
        let actions = self.drain.handle(self.clock_ms(), event.clone());
        self.say(|| format!("{event:?} → {actions:?}"));
        let is_passing = matches!(event, Event::Tick | Event::Arrived { .. }) && actions.is_empty();
        if is_passing && self.held.is_empty() && self.planted == Planted::Nothing {
            return Ok(());
        }
        self.take(Some(&event), actions)?;
        self.check()
    }

    /// What the drain knows from now on.
    fn note_told(&mut self, event: &Event) {
        match event {
            Event::CancelRequested => self.cancelled = true,
            Event::Left { vm, .. } if self.course == Course::UnderWay && !self.is_about_to_begin(vm) => {
                self.left.insert(vm.clone());
            }
            Event::Ended { vm, end: MoveEnd::Left(_) } => {
                self.left.insert(vm.clone());
            }
            _ => {}
        }
    }

    /// Whether a migration was wanted of it, and the drain has not heard yet what became of that.
    fn is_about_to_begin(&self, vm: &str) -> bool {
        let is_held = self.held.iter().any(|held| held.begins(vm));
        is_held || self.own_news.iter().any(|news| matches!(news, Event::Ended { vm: of, .. } if of == vm))
    }

    /// A seed that runs alone tells its story.
    fn say(&self, what: impl FnOnce() -> String) {
        if self.tells {
            println!("{:>9.0} ms  {}", self.now_ms, what());
        }
    }

    fn per_mille(&mut self, chance: u64) -> bool {
        chance > 0 && self.random.below(1_000) < chance
    }

    /// The agent, its host, or its clock.
    fn stand_still(&mut self) {
        if self.per_mille(self.world.faults.frozen) {
            self.freeze();
        }
        if self.per_mille(self.world.faults.clock) {
            self.wall_ms += self.random.below(7_200_000) as f64 - 3_600_000.0;
            match self.random.below(3) {
                0 => self.suspend(),
                1 => {
                    self.world.saw(Sight::WokenLate);
                    self.now_ms += self.random.below(3_600_000) as f64;
                }
                _ => self.rush = RUSH,
            }
        }
    }

    /// All else goes on, and the agent hears of it at once when it wakes up.
    fn freeze(&mut self) {
        for _ in 0..=self.random.below(40) {
            self.now_ms += self.random.below(1_000) as f64;
            self.world.change(&mut self.random);
            self.world.send_alone(&mut self.random);
        }
        if self.planted == Planted::DeafWhenFrozen {
            self.world.news.forget();
        }
        self.world.news.overtake();
        self.rush = 1 + self.world.news.len();
        if self.rush > 2 {
            self.world.saw(Sight::HeardAtOnce);
        }
    }

    /// The host stands still as a whole, and so does its clock. What is on its way to others is given up by them.
    fn suspend(&mut self) {
        self.world.saw(Sight::Suspended);
        for _ in 0..=self.random.below(40) {
            self.world.change(&mut self.random);
        }
        for vm in 0..self.world.vms.len() {
            let is_given_up = self.world.vms[vm].flight.is_some_and(|flight| flight.step != Step::Sent);
            if is_given_up && self.random.chance(50) {
                self.world.doom(vm);
            }
        }
    }

    fn next_event(&mut self) -> Result<Event, String> {
        if let Some(event) = self.own_news.pop_front() {
            return Ok(event);
        }
        // Told first: a new plan says nothing of a VM that has left, and the drain may be over with the next event.
        self.note_departures();
        self.note_others();
        match self.own_news.pop_front() {
            Some(event) => Ok(event),
            None => self.event_of_others(),
        }
    }

    fn note_others(&mut self) {
        let count = self.world.others;
        if count != self.others && self.planted != Planted::OthersUncounted {
            self.own_news.push_back(Event::OthersLeave { count });
        }
        self.others = count;
    }

    /// VMs that somebody else has moved meanwhile.
    fn note_departures(&mut self) {
        let is_elsewhere =
            |name: &str| self.world.vms.iter().any(|vm| vm.name == name && vm.at == At::Elsewhere);
        let is_news = |name: &&str| is_elsewhere(name) && !self.absent.contains(*name);
        let gone: Vec<String> = self.drain.unmoved().filter(is_news).map(str::to_owned).collect();
        for vm in gone {
            self.world.saw(Sight::MovedByHand);
            self.own_news.push_back(Event::Left { vm: vm.clone(), departure: departure() });
            self.absent.insert(vm);
        }
    }

    fn event_of_others(&mut self) -> Result<Event, String> {
        if self.per_mille(self.world.faults.cancel) {
            return Ok(Event::CancelRequested);
        }
        if self.random.chance(30)
            && let Some(event) = self.hear_answer()?
        {
            return Ok(event);
        }
        let heard = if self.rush > 0 || self.random.chance(70) { self.hear() } else { None };
        Ok(heard.unwrap_or(Event::Tick))
    }

    fn hear_answer(&mut self) -> Result<Option<Event>, String> {
        if let Some(event) = self.answer_again.take() {
            self.world.saw(Sight::PlanHeardTwice);
            return Ok(Some(event));
        }
        let event = match self.answer.take() {
            Some(Answer::Seen(event)) => event,
            Some(Answer::NotSeen(standing)) => self.new_plan(&standing)?,
            other => {
                self.answer = other;
                return Ok(None);
            }
        };
        self.answer_again = self.random.chance(self.world.faults.doubled).then(|| event.clone());
        Ok(Some(event))
    }

    /// What a migration tells that is not its VM's any more is of no interest.
    fn hear(&mut self) -> Option<Event> {
        let heard = self.world.news.hear(self.world.faults.doubled, &mut self.random)?;
        let vm = &self.world.vms[heard.vm];
        let is_stale = heard.migration != vm.migration || self.held.iter().any(|held| held.begins(&vm.name));
        if is_stale && self.planted != Planted::StaleNews {
            return None;
        }
        if heard.again && matches!(heard.event, Event::Ended { .. }) {
            self.world.saw(Sight::EndHeardTwice);
        }
        Some(heard.event)
    }

    fn restart(&mut self) -> Result<(), String> {
        if self.journal.is_behind() {
            self.world.saw(Sight::CrashUnwritten);
        }
        if self.random.chance(15) {
            self.world.reboot(&mut self.random);
        } else {
            self.world.restart();
        }
        self.say(|| "the agent is started anew".into());
        self.check_known()?;
        self.start()
    }

    fn is_closing(&self) -> bool {
        let total_ms = self.limits.total_ms.unwrap_or(f64::INFINITY);
        self.cancelled || self.now_ms - self.begun_ms >= total_ms
    }

    /// How the drain stands, as it is told and written down.
    fn status(&self) -> DrainStatus {
        with_earlier(self.drain.status(self.clock_ms()), &self.earlier)
    }

    /// Nothing is done before it is written down how the drain stands.
    fn take(&mut self, event: Option<&Event>, mut actions: Vec<Action>) -> Result<(), String> {
        self.planted.spoil_actions(event, &mut actions);
        let status = self.status();
        check_numbers(&status)?;
        for action in actions {
            self.check_given(&action)?;
            self.held.push_back(Held { action, transfers: status.transfers });
        }
        self.check_rows(&status)?;
        let is_written = self.journal.write(self.now_ms, status, self.world.disk_full, self.planted);
        if !is_written && self.planted != Planted::DoneUnwritten {
            if !self.held.is_empty() {
                self.world.saw(Sight::HeldByDisk);
            }
            self.planted.spoil_held(&mut self.held);
            self.note_cancelled_ahead();
            return Ok(());
        }
        while let Some(held) = self.held.pop_front() {
            self.perform(held)?;
        }
        Ok(())
    }

    /// What is to be cancelled does not wait for the disk.
    fn note_cancelled_ahead(&mut self) {
        let is_cancel = |held: &Held| matches!(held.action, Action::Cancel { .. });
        if self.held.iter().any(is_cancel) {
            self.world.saw(Sight::CancelledAhead);
        }
    }

    fn index(&self, vm: &str) -> Result<usize, String> {
        self.world.vms.iter().position(|other| other.name == vm).ok_or(format!("there is no VM {vm}"))
    }

    /// What the drain may want at this moment.
    fn check_given(&mut self, action: &Action) -> Result<(), String> {
        if self.course != Course::UnderWay {
            return Err(format!("{action:?} after it was over"));
        }
        match action {
            Action::Begin { .. } | Action::Release { .. } if self.is_closing() => {
                Err(format!("{action:?} while nothing may be"))
            }
            Action::Begin { vm, .. } if self.answer.is_some() => {
                Err(format!("{vm} is begun while nothing may be"))
            }
            Action::Begin { vm, .. } => self.check_begin(vm),
            Action::Release { vm } => self.check_turn(vm),
            Action::GiveWay { vm } => self.give_way(vm),
            Action::TakeAll { vm } if self.giving_way.remove(vm) => Ok(()),
            Action::TakeAll { vm } => Err(format!("{vm} did not give way")),
            Action::Cancel { vm } => self.take_back(vm),
            Action::Plan if self.answer.is_some() => Err("two plans are made at once".into()),
            Action::Plan => {
                self.answer = Some(Answer::Awaited);
                if self.planted != Planted::StalePlan {
                    self.answer_again = None;
                }
                Ok(())
            }
            Action::Finish => self.check_finish(),
        }
    }

    fn check_begin(&mut self, vm: &str) -> Result<(), String> {
        if self.left.contains(vm) {
            return Err(format!("{vm} is begun, and somebody else has moved it"));
        }
        let under_way = self.world.vms.iter().filter(|vm| vm.flight.is_some()).count();
        let wanted = self.held.iter().filter(|held| matches!(held.action, Action::Begin { .. })).count();
        let leaving = 1 + under_way + wanted + usize::from(self.others);
        let is_told = !self.own_news.iter().any(|news| matches!(news, Event::OthersLeave { .. }));
        if is_told && leaving > usize::from(self.limits.outbound) {
            return Err(format!("{vm} is begun while as many leave as may"));
        }
        if self.others > 0 && leaving == usize::from(self.limits.outbound) {
            self.world.saw(Sight::OutboundByOthers);
        }
        Ok(())
    }

    fn perform(&mut self, held: Held) -> Result<(), String> {
        match held.action {
            Action::Begin { vm, target } => self.begin(&vm, &target),
            Action::Release { vm } => self.release(&vm, held.transfers),
            Action::Cancel { vm } => self.cancel(&vm),
            Action::Plan => self.make_plan(),
            Action::GiveWay { .. } | Action::TakeAll { .. } => Ok(()),
            Action::Finish => {
                self.course = Course::Finished;
                Ok(())
            }
        }
    }

    fn begin(&mut self, vm: &str, target: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        let target = self.world.hosts.iter().position(|host| host.name == target).ok_or("no such target")?;
        self.begun += 1;
        self.migrations += 1;
        let vm = &mut self.world.vms[index];
        if vm.flight.is_some() || !matches!(vm.at, At::Here | At::EndedHere | At::Elsewhere) {
            return Err(format!("{} is begun while it is under way, or elsewhere", vm.name));
        }
        if vm.is_to_stay || vm.refused_by.contains(&target) {
            return Err(format!("{} is begun, and somebody does not want it", vm.name));
        }
        vm.begun += 1;
        vm.migration = self.migrations;
        // It may have given way once.
        let gives_way = u64::from(vm.times > 2);
        if vm.begun > u64::from(self.limits.attempts) + gives_way {
            return Err(format!("{} is tried too often", vm.name));
        }
        self.giving_way.remove(&vm.name);
        let (name, is_gone) = (vm.name.clone(), vm.at == At::EndedHere);
        if vm.at == At::Elsewhere {
            self.world.saw(Sight::BegunWhenMovedByHand);
            self.own_news.push_back(Event::Ended { vm: name, end: MoveEnd::Left(departure()) });
            return Ok(());
        }
        if is_gone || self.disk_fills() {
            self.world.saw(if is_gone { Sight::BegunWhenGone } else { Sight::BegunWithoutDisk });
            let problem = Problem::failed("it cannot be begun");
            self.own_news.push_back(Event::Ended { vm: name, end: MoveEnd::Failed(problem) });
            return Ok(());
        }
        self.world.vms[index].flight = Some(Flight::to(target));
        self.own_news.push_back(Event::Begun { vm: name, migration: name_of(self.migrations) });
        Ok(())
    }

    /// Whether it is full, now that a migration is to be written down.
    fn disk_fills(&mut self) -> bool {
        self.world.disk_full |= self.world.faults.disk_full > 0 && self.random.chance(3);
        self.world.disk_full
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

    fn release(&mut self, vm: &str, transfers: u8) -> Result<(), String> {
        let index = self.index(vm)?;
        // One that has failed, which was not heard yet.
        let Some(flight) = &mut self.world.vms[index].flight else { return Ok(()) };
        if matches!(flight.step, Step::Over(_)) {
            return Ok(());
        }
        if flight.released || flight.step != Step::Prepared {
            return Err(format!("{vm} is released at {:?}", flight.step));
        }
        flight.released = true;
        self.check_links(transfers)
    }

    /// Who has sent more than it should keeps nobody waiting who has not.
    fn check_turn(&self, vm: &str) -> Result<(), String> {
        let vm = &self.world.vms[self.index(vm)?];
        let status = self.drain.status(self.clock_ms());
        let waits =
            |row: &&MoveStatus| row.state == MoveState::Ready && row.attempts == 1 && row.error.is_none();
        match status.moves.iter().find(waits).filter(|_| vm.gave_way) {
            Some(row) => Err(format!("{} goes before {}, and does not converge", vm.name, row.vm)),
            None => Ok(()),
        }
    }

    /// One more may be there while another is about to be paused.
    fn check_links(&self, most: u8) -> Result<(), String> {
        let on_links =
            self.world.vms.iter().filter(|vm| vm.flight.is_some_and(|flight| flight.is_on_links()));
        let on_links: Vec<bool> = on_links.map(Vm::is_ending).collect();
        let (all, ending) = (on_links.len(), on_links.iter().filter(|is_ending| **is_ending).count());
        let most = usize::from(most);
        if all - ending > most || all > most.saturating_add(1) {
            return Err(format!("too many on the links: {all}, of which {ending} near their end"));
        }
        Ok(())
    }

    fn take_back(&mut self, vm: &str) -> Result<(), String> {
        let (is_closing, index) = (self.is_closing(), self.index(vm)?);
        let vm = &mut self.world.vms[index];
        let (overstays, gave_way) = (vm.overstays(), vm.gave_way);
        let Some(flight) = &mut vm.flight else {
            // It has ended, which was not heard yet: it had sent more than it should, or everything is given up.
            vm.gave_way |= !is_closing;
            vm.is_to_stay = false;
            return Ok(());
        };
        if !is_closing && !overstays {
            return Err(format!("{} is cancelled for no reason", vm.name));
        }
        if flight.cancelled == Some(By::Drain)
            || (!self.cancelled && flight.released && !overstays && !gave_way)
        {
            return Err(format!("{} is cancelled twice, or on the links by the deadline", vm.name));
        }
        flight.cancelled = Some(By::Drain);
        vm.gave_way |= overstays;
        Ok(())
    }

    /// One that was begun since.
    fn cancel(&mut self, vm: &str) -> Result<(), String> {
        let index = self.index(vm)?;
        if let Some(flight) = &mut self.world.vms[index].flight {
            flight.cancelled = Some(By::Drain);
        }
        Ok(())
    }

    fn make_plan(&mut self) -> Result<(), String> {
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
        self.sound_plan(standing).map(Event::Planned)
    }

    /// Only a plan in which nothing is found is carried out. Here each must be.
    fn sound_plan(&self, standing: &Standing) -> Result<DrainPlan, String> {
        let mut view = self.world.view();
        if self.planted == Planted::UndecidedForgotten {
            let is_undecided = |name: &str| {
                self.world.vms.iter().any(|vm| vm.name == name && matches!(vm.at, At::Undecided(_)))
            };
            view.vms.iter_mut().filter(|vm| is_undecided(&vm.name)).for_each(|vm| vm.immovable = None);
            view.targets.iter_mut().for_each(|target| target.vms.retain(|vm| !is_undecided(&vm.name)));
        }
        standing.complete(&mut view);
        let mut plan = plan(&view, Some(&self.limits));
        self.planted.spoil_plan(&mut plan);
        let findings = lint(&view, &plan);
        if !findings.is_empty() {
            return Err(format!("the plan is bad: {findings:?}"));
        }
        self.planted.spoil_sound(&mut plan);
        Ok(plan)
    }

    fn check_finish(&mut self) -> Result<(), String> {
        if self.answer.is_some() || self.world.vms.iter().any(|vm| vm.flight.is_some()) {
            return Err("it is over while something is under way".into());
        }
        if let Some(vm) = self.giving_way.first() {
            return Err(format!("it is over, and {vm} gives way"));
        }
        self.course = Course::Over;
        Ok(())
    }

    /// What holds at any time.
    fn check(&self) -> Result<(), String> {
        let flights: Vec<Flight> = self.world.vms.iter().filter_map(|vm| vm.flight).collect();
        if flights.len() > usize::from(self.limits.outbound) {
            return Err("too many leave this host".into());
        }
        let most = self.limits.transfers.unwrap_or(u8::MAX);
        self.check_links(most)?;
        for host in 0..self.world.hosts.len() {
            let inbound = flights.iter().filter(|flight| flight.target == host).count();
            if inbound > usize::from(self.limits.inbound) {
                return Err(format!("too many on their way to {}", self.world.hosts[host].name));
            }
            if self.world.is_overcommitted(host) {
                return Err(format!("overcommit of {}", self.world.hosts[host].name));
            }
            self.check_groups(host)?;
        }
        Ok(())
    }

    /// What is told meanwhile is so, too: of those that are under way what was heard last.
    fn check_rows(&self, status: &DrainStatus) -> Result<(), String> {
        for row in &status.moves {
            let vm = &self.world.vms[self.index(&row.vm)?];
            let is_so = match row.state {
                MoveState::Left => vm.at == At::Elsewhere,
                _ if self.left.contains(&row.vm) => false,
                MoveState::Moved => vm.has_moved(),
                MoveState::Failed | MoveState::Waiting => !vm.has_moved() && vm.flight.is_none(),
                MoveState::Undecided => vm.flight.is_none(),
                _ => vm.begun > 0 || !self.held.is_empty(),
            };
            if !is_so {
                return Err(format!("{} is {:?}, by its row {row:?}", vm.name, vm.at));
            }
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

    /// An agent that starts anew knows what its earlier lives have moved, or may have.
    fn check_known(&self) -> Result<(), String> {
        let known = self.journal.settled(&self.world, self.planted);
        for vm in self.world.vms.iter().filter(|vm| vm.was_begun()) {
            let row = known.iter().find(|row| row.vm == vm.name).map(|row| row.state);
            let is_known = match vm.at {
                At::Undecided(_) => row == Some(MoveState::Undecided),
                At::Elsewhere => row == Some(MoveState::Left),
                _ if vm.has_moved() => row == Some(MoveState::Moved),
                _ => !matches!(row, Some(MoveState::Moved | MoveState::Undecided)),
            };
            if !is_known {
                return Err(format!("{} is {:?}, and the journal does not know: {row:?}", vm.name, vm.at));
            }
        }
        Ok(())
    }

    fn ended(self) -> Result<Run, String> {
        let outcome = self.drain.outcome().ok_or("it is over, and has no outcome")?;
        let tried = || self.world.vms.iter().filter(|vm| vm.begun > 0);
        Ok(Run {
            outcome,
            vms: self.world.vms.len(),
            planned: self.planned,
            moved: self.world.vms.iter().filter(|vm| vm.has_moved()).count(),
            begun: self.begun,
            endless: tried().filter(|vm| vm.is_endless()).count(),
            slow: tried().filter(|vm| vm.times > 2).count(),
            sights: self.world.sights,
        })
    }

    /// What is told in the end is so.
    fn check_end(&self) -> Result<(), String> {
        let outcome = self.drain.outcome().ok_or("it is over, and has no outcome")?;
        let is_here = |vm: &Vm| matches!(vm.at, At::Here | At::Undecided(_));
        let here = self.world.vms.iter().any(is_here);
        let gone = self.world.vms.iter().any(|vm| vm.at == At::EndedHere);
        let is_drained =
            outcome == DrainState::Drained || outcome == DrainState::Incomplete && self.all_moved();
        // Whose last VMs were undecided when somebody cancelled it is cancelled, also when they have moved.
        let may_be_empty = is_drained || gone || outcome == DrainState::Cancelled;
        if is_drained && here || !here && !may_be_empty {
            return Err(format!("{outcome:?}, and VMs are here: {here}"));
        }
        self.check_attempts()?;
        self.check_known()?;
        self.check_told()
    }

    /// By what has become known since it ended, too.
    fn all_moved(&self) -> bool {
        let moves = self.journal.settled(&self.world, self.planted);
        let mut status = self.status();
        status.stays.retain(|stay| moves.iter().all(|one| one.vm != stay.vm));
        DrainStatus { moves, ..status }.all_moved()
    }

    fn check_attempts(&self) -> Result<(), String> {
        for row in self.drain.status(self.clock_ms()).moves {
            let vm = &self.world.vms[self.index(&row.vm)?];
            if vm.begun != u64::from(row.attempts) {
                return Err(format!("{} was begun {} times, by its row {row:?}", vm.name, vm.begun));
            }
        }
        Ok(())
    }

    /// Each VM is told of once, and what is told is so.
    fn check_told(&self) -> Result<(), String> {
        let status = self.status();
        let names = status.moves.iter().map(|row| &row.vm).chain(status.stays.iter().map(|stay| &stay.vm));
        let mut told = BTreeSet::new();
        for name in names {
            if !told.insert(name) {
                return Err(format!("{name} is told of twice"));
            }
        }
        let is_mine = |vm: &&Vm| match vm.at {
            At::Here => true,
            At::EndedHere => false,
            At::Elsewhere | At::Target(_) | At::Undecided(_) | At::EndedThere => vm.was_begun(),
        };
        let mut mine = self.world.vms.iter().filter(is_mine).map(|vm| &vm.name);
        if let Some(lost) = mine.find(|name| !told.contains(name)) {
            return Err(format!("{lost} is not in the report"));
        }
        for row in self.journal.settled(&self.world, self.planted) {
            let at = self.world.vms[self.index(&row.vm)?].at;
            let is_so = match row.state {
                MoveState::Moved => matches!(at, At::Target(_) | At::EndedThere),
                MoveState::Failed => matches!(at, At::Here | At::EndedHere) && row.error.is_some(),
                MoveState::Undecided => matches!(at, At::Undecided(_)),
                MoveState::Left => at == At::Elsewhere,
                _ => false,
            };
            if !is_so {
                return Err(format!("{} is {at:?}, by its row {row:?}", row.vm));
            }
        }
        Ok(())
    }
}

/// Whatever the clock does, what is told makes sense.
fn check_numbers(status: &DrainStatus) -> Result<(), String> {
    let numbers = [status.rate_mbps, status.elapsed_ms, status.predicted_ms, status.eta_ms.unwrap_or(0.0)];
    if numbers.iter().all(|number| number.is_finite() && *number >= 0.0) && status.transfers > 0 {
        return Ok(());
    }
    Err(format!("a number makes no sense: {status:?}"))
}
