//! One run: the drain's actions are carried out in the world, as `agent/src/drain/executor.rs` does, and each is
//! checked against the rules.

mod deeds;
mod rules;

use std::collections::{BTreeSet, VecDeque};

use drainpipe_engine::drain::limits::DrainLimits;
use drainpipe_engine::drain::plan::DrainPlan;
use drainpipe_engine::drain::run::{Drain, DrainAction, DrainEvent, MoveEnd, Standing};
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};

use self::rules::check_numbers;
use crate::faults::{Faults, Sight};
use crate::journal::{Journal, with_earlier};
use crate::planted::Planted;
use crate::random::Random;
use crate::world::{At, Step, World, departure};

/// No drain takes more turns. Each has at most 8 VMs with 4 attempts and 8 refusals each, and each of these takes a
/// dozen steps, or some forty.
const TURNS_MAX: usize = 20_000;

/// How often a drain that has ended is begun again at most.
const ROUNDS_MAX: u8 = 3;

/// The number of turns during which no time passes.
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

/// How [`DrainAction::Plan`] will be answered.
enum Answer {
    /// The action waits for the disk.
    Awaited,
    /// The hosts were looked at when the action was given.
    Seen(DrainEvent),
    /// They will be looked at when the answer is given.
    NotSeen(Standing),
}

/// An action of the drain, and how many VMs might be on the links when it was given.
struct PendingAction {
    action: DrainAction,
    transfers: u8,
}

impl PendingAction {
    fn begins(&self, vm: &str) -> bool {
        matches!(&self.action, DrainAction::Begin { vm: begun, .. } if begun == vm)
    }
}

/// The state of the drain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    UnderWay,
    /// The drain is over, but the journal does not say so yet.
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
    /// Actions that are carried out once the journal is written.
    pending: VecDeque<PendingAction>,
    /// Events that the agent itself gives to the drain.
    own_news: VecDeque<DrainEvent>,
    begun_ms: f64,
    now_ms: f64,
    /// By how much people have moved the clock that they see.
    wall_ms: f64,
    /// For how many more turns no time passes.
    rush: usize,
    rounds: u8,
    planned: usize,
    begun: usize,
    migrations: u64,
    answer: Option<Answer>,
    /// An answer that was heard, and will arrive once more.
    answer_again: Option<DrainEvent>,
    cancelled: bool,
    course: Course,
    /// How many VMs somebody else moves from this host, by the last look.
    others: u8,
    /// VMs that somebody else has moved, as the agent has told the drain.
    absent: BTreeSet<String>,
    /// Those of them that were not under way then, so that the drain is done with them.
    left: BTreeSet<String>,
    /// VMs that leave their place on the links to others.
    giving_way: BTreeSet<String>,
}

/// Runs one seed to its end; the error is the rule that was broken.
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
        post_copy: random.chance(30),
        disks_first: random.chance(30),
    }
}

fn no_plan() -> DrainPlan {
    DrainPlan {
        host: "here".into(),
        moves: vec![],
        stays: vec![],
        await_room: vec![],
        room_is_coming: false,
        transfers: 1,
        transfers_found: false,
        links_mbps: None,
        predicted_ms: 0.0,
        predicted_most_ms: None,
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
            pending: VecDeque::new(),
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

    /// Begins or continues a drain.
    fn start(&mut self) -> Result<(), String> {
        let is_kept =
            |one: &MoveStatus| matches!(one.state, MoveState::Moved | MoveState::InDoubt | MoveState::Left);
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
        self.pending.clear();
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

    /// Once in a while, somebody wants a drain that has ended to continue.
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

    /// The time, as the agent sees it.
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
        if self.planted == Planted::LostEnd && matches!(event, DrainEvent::Ended { .. }) {
            return Ok(());
        }
        self.note_known(&event);
        let actions = self.drain.handle(self.clock_ms(), event.clone());
        self.say(|| format!("{event:?} → {actions:?}"));
        let is_passing = matches!(event, DrainEvent::Tick | DrainEvent::Arrived { .. }) && actions.is_empty();
        if is_passing && self.pending.is_empty() && self.planted == Planted::Nothing {
            return self.check();
        }
        self.take(Some(&event), actions)?;
        self.check()
    }

    /// Notes what the drain knows from now on.
    fn note_known(&mut self, event: &DrainEvent) {
        match event {
            DrainEvent::CancelRequested => self.cancelled = true,
            DrainEvent::Left { vm, .. } if self.course == Course::UnderWay && !self.is_about_to_begin(vm) => {
                self.left.insert(vm.clone());
            }
            DrainEvent::Ended { vm, end: MoveEnd::Left(_) } => {
                self.left.insert(vm.clone());
            }
            _ => {}
        }
    }

    /// Whether the drain wants to begin a migration of the VM, and has not heard yet what became of that.
    fn is_about_to_begin(&self, vm: &str) -> bool {
        let is_held = self.pending.iter().any(|pending| pending.begins(vm));
        is_held
            || self.own_news.iter().any(|news| matches!(news, DrainEvent::Ended { vm: of, .. } if of == vm))
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

    /// The agent, its host or its clock stands still for a while.
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

    /// Everything else goes on, and the agent hears of it all at once when it wakes up.
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

    /// The whole host stands still, with its clock. Other hosts give up what is on its way to them.
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

    fn next_event(&mut self) -> Result<DrainEvent, String> {
        if let Some(event) = self.own_news.pop_front() {
            return Ok(event);
        }
        // These events come first: a new plan does not mention a VM that has left, and the drain may end with the next
        // event.
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
            self.own_news.push_back(DrainEvent::OthersLeave { count });
        }
        self.others = count;
    }

    /// Reports the VMs that somebody else has moved meanwhile.
    fn note_departures(&mut self) {
        let is_elsewhere =
            |name: &str| self.world.vms.iter().any(|vm| vm.name == name && vm.at == At::Elsewhere);
        let is_news = |name: &&str| is_elsewhere(name) && !self.absent.contains(*name);
        let gone: Vec<String> = self.drain.unmoved().filter(is_news).map(str::to_owned).collect();
        for vm in gone {
            self.world.saw(Sight::MovedByHand);
            self.own_news.push_back(DrainEvent::Left { vm: vm.clone(), departure: departure() });
            self.absent.insert(vm);
        }
    }

    fn event_of_others(&mut self) -> Result<DrainEvent, String> {
        if self.per_mille(self.world.faults.cancel) {
            return Ok(DrainEvent::CancelRequested);
        }
        if self.random.chance(30)
            && let Some(event) = self.hear_answer()?
        {
            return Ok(event);
        }
        let heard = if self.rush > 0 || self.random.chance(70) { self.hear() } else { None };
        Ok(heard.unwrap_or(DrainEvent::Tick))
    }

    fn hear_answer(&mut self) -> Result<Option<DrainEvent>, String> {
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

    /// The next message to the drain. One from a migration that its VM has left behind is ignored.
    fn hear(&mut self) -> Option<DrainEvent> {
        let heard = self.world.news.hear(self.world.faults.doubled, &mut self.random)?;
        let vm = &self.world.vms[heard.vm];
        let is_stale =
            heard.migration != vm.migration || self.pending.iter().any(|pending| pending.begins(&vm.name));
        if is_stale && self.planted != Planted::StaleNews {
            return None;
        }
        if heard.again && matches!(heard.event, DrainEvent::Ended { .. }) {
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

    /// The drain's status, as it is reported and recorded.
    fn status(&self) -> DrainStatus {
        with_earlier(self.drain.status(self.clock_ms()), &self.earlier)
    }

    /// Hands actions over; none is carried out before the drain's status is recorded.
    fn take(&mut self, event: Option<&DrainEvent>, mut actions: Vec<DrainAction>) -> Result<(), String> {
        self.planted.spoil_actions(event, &mut actions);
        let status = self.status();
        check_numbers(&status)?;
        for action in actions {
            self.check_given(&action)?;
            self.pending.push_back(PendingAction { action, transfers: status.transfers });
        }
        self.check_rows(&status)?;
        let is_written = self.journal.write(self.now_ms, status, self.world.disk_full, self.planted);
        if !is_written && self.planted != Planted::DoneUnwritten {
            if !self.pending.is_empty() {
                self.world.saw(Sight::HeldByDisk);
            }
            self.planted.spoil_held(&mut self.pending);
            self.note_cancelled_ahead();
            return Ok(());
        }
        while let Some(pending) = self.pending.pop_front() {
            self.perform(pending)?;
        }
        Ok(())
    }

    /// A cancelled VM does not wait for the disk.
    fn note_cancelled_ahead(&mut self) {
        let is_cancel = |pending: &PendingAction| matches!(pending.action, DrainAction::Cancel { .. });
        if self.pending.iter().any(is_cancel) {
            self.world.saw(Sight::CancelledAhead);
        }
    }

    fn index(&self, vm: &str) -> Result<usize, String> {
        self.world.vms.iter().position(|other| other.name == vm).ok_or(format!("there is no VM {vm}"))
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
}
