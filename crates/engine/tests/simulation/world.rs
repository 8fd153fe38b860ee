//! The world of one run: who acts next, and which faults strike.

use std::collections::BTreeSet;

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::target::promises::Promise;

use crate::disks::CopiedDisk;
use crate::executor::Executor;
use crate::faults::{Fault, Faults};
use crate::guard::Guard;
use crate::hosts::Hosts;
use crate::libvirt::Libvirts;
use crate::network::{Letter, Network};
use crate::operator::Operator;
use crate::planted::Planted;
use crate::random::Random;
use crate::source::Source;
use crate::target::Target;

/// A run takes some hundred steps with faults, and some fifty without. The rest is for what remains when the faults
/// stop: guards, questions and waits of a minute.
const STEPS_MAX: u32 = 20_000;

/// The longest story that somebody may want to read.
const STORY_STEPS_MAX: u32 = 4_000;

/// How much later than others a message or its duplicate may arrive.
const LATE_MS_MAX: u64 = 20_000;

/// How often a migration asks for a turn that never comes.
const TURNS_IN_VAIN: u64 = 1_000;

/// How long slow guards may stand still.
const GUARDS_PAUSE_MS: u64 = 30_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Host {
    Source,
    Target,
}

impl Host {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::Source => Self::Target,
            Self::Target => Self::Source,
        }
    }
}

/// Whether an agent lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Up,
    /// Stopped where it was; it will go on from there.
    Frozen,
    Down,
}

/// Something remarkable that a run has met. The runs together must have met all of these, or they would prove little.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sight {
    Adopted,
    DisksCopied,
    DisksOutpaced,
    DisksWentAlong,
    WritesHeld,
    Forgotten,
    GivenBack,
    GuardActed,
    GuardOrdered,
    GuardRevoked,
    HandOverForbidden,
    HandOverInVain,
    JournalDoubted,
    JournalFound,
    LastBytesLate,
    LastWordLost,
    MovedOn,
    LateCommand,
    LateRunRefused,
    NotRecorded,
    PostCopy,
    PostTaken,
    Reached,
    Reclaimed,
    Reconnected,
    RecoveredHandOver,
    RestLost,
    Revoked,
    RunsMute,
    StartRefused,
    ThirdHostAsked,
    TakenBack,
    TakenUp,
    Throttled,
    InDoubt,
    /// An attempt to connect again came after a later one.
    AttemptOvertaken,
    // Only domains show these.
    LeftOneEnded,
    LibvirtHung,
    LibvirtResumed,
    NoRoom,
    OwnerResumed,
    OwnerResumedTarget,
    KeptSinceItRan,
    QemuAskedItself,
    SentForNobody,
}

impl Sight {
    /// All that runs with domains must meet.
    pub(crate) const OF_DOMAINS: [Self; 7] = [
        Self::LeftOneEnded,
        Self::LibvirtHung,
        Self::LibvirtResumed,
        Self::NoRoom,
        Self::OwnerResumed,
        Self::QemuAskedItself,
        Self::SentForNobody,
    ];

    /// All that runs without domains must meet.
    pub(crate) const ALL: [Self; 35] = [
        Self::Adopted,
        Self::DisksCopied,
        Self::DisksOutpaced,
        Self::DisksWentAlong,
        Self::WritesHeld,
        Self::Forgotten,
        Self::GivenBack,
        Self::GuardActed,
        Self::GuardOrdered,
        Self::GuardRevoked,
        Self::HandOverForbidden,
        Self::HandOverInVain,
        Self::JournalDoubted,
        Self::JournalFound,
        Self::LastBytesLate,
        Self::LastWordLost,
        Self::MovedOn,
        Self::LateCommand,
        Self::LateRunRefused,
        Self::NotRecorded,
        Self::PostCopy,
        Self::PostTaken,
        Self::Reached,
        Self::Reclaimed,
        Self::Reconnected,
        Self::RecoveredHandOver,
        Self::RestLost,
        Self::Revoked,
        Self::RunsMute,
        Self::StartRefused,
        Self::ThirdHostAsked,
        Self::TakenBack,
        Self::TakenUp,
        Self::Throttled,
        Self::InDoubt,
    ];
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub outcomes: Vec<Outcome>,
    pub sights: BTreeSet<Sight>,
    /// Whether a migration's turn never came while there were faults.
    pub waits_in_vain: bool,
}

pub(crate) struct World {
    pub seed: u64,
    pub disk: CopiedDisk,
    pub random: Random,
    pub faults: Faults,
    pub planted: Planted,
    pub hosts: Hosts,
    /// `None` unless the VM is a domain.
    pub libvirts: Option<Libvirts>,
    /// What a VM of another host was promised at the target.
    pub neighbour: Option<Promise>,
    pub now_ms: f64,
    pub network: Network,
    pub source: Source,
    pub target: Target,
    pub guards: Vec<Guard>,
    /// How long guards stand still after each of their actions, at most.
    pub guards_pause_ms: u64,
    /// For how long the guest has stood still while its guard could have let it run.
    pub stood_still_ms: f64,
    pub checked_ms: f64,
    /// How much time was skipped in this step, though somebody had something to do.
    pub passed_over_ms: f64,
    /// When the third host asks next.
    pub third_host_asks_ms: f64,
    pub operator: Operator,
    /// The VM's newest state.
    pub newest: u64,
    /// Whether the host that held the VM has ended, with its memory: then the VM need not run on.
    pub is_lost: bool,
    pub turns_awaited: u64,
    waits_in_vain: bool,
    pub resumes_failed: u32,
    pub outcomes: Vec<Outcome>,
    sights: BTreeSet<Sight>,
    broken: Option<String>,
    is_healed: bool,
    /// `None` unless somebody wants to read it.
    story: Option<Vec<String>>,
}

#[derive(Debug)]
enum Actor {
    Executor,
    Stream,
    Operator,
    Letter(usize),
    Guard(usize),
    Task(usize),
    Entry(usize),
    Arrived(usize),
}

/// Runs one seed to its end; the error is the rule that was broken.
pub(crate) fn simulate(seed: u64, draw: fn(&mut Random) -> Faults, planted: Planted) -> Result<Run, String> {
    World::new(seed, draw, planted).go_on()
}

/// The story of a run, line by line.
pub(crate) fn tell(seed: u64, draw: fn(&mut Random) -> Faults) -> String {
    let mut world = World::new(seed, draw, Planted::Nothing);
    let mut story = world.faults.to_string();
    world.story = Some(vec![]);
    for _ in 0..STORY_STEPS_MAX {
        world.step();
        world.check();
        for line in world.story.iter_mut().flat_map(std::mem::take) {
            story.push_str(&line);
        }
        if world.broken.is_some() || world.is_over() {
            break;
        }
    }
    story
}

impl World {
    fn new(seed: u64, draw: fn(&mut Random) -> Faults, planted: Planted) -> Self {
        let mut random = Random(seed);
        let faults = draw(&mut random);
        let hosts = Hosts::draw(&mut random);
        let hosts = if faults.are_of_domain() { hosts.with_libvirt() } else { hosts };
        let mut target = Target::new();
        target.places_awaited = random.below(8).saturating_sub(4);
        let turns_awaited = turns_awaited(&mut random);
        Self {
            seed,
            disk: CopiedDisk::default(),
            hosts,
            libvirts: faults.are_of_domain().then(Libvirts::new),
            neighbour: None,
            planted,
            now_ms: 0.0,
            network: Network::default(),
            source: Source::new(),
            target,
            guards: vec![],
            guards_pause_ms: if faults.guards_are_slow() { GUARDS_PAUSE_MS } else { 0 },
            stood_still_ms: 0.0,
            checked_ms: 0.0,
            passed_over_ms: 0.0,
            third_host_asks_ms: f64::INFINITY,
            operator: Operator::default(),
            newest: 1,
            is_lost: false,
            waits_in_vain: turns_awaited == TURNS_IN_VAIN,
            turns_awaited,
            resumes_failed: 0,
            outcomes: vec![],
            sights: BTreeSet::new(),
            broken: None,
            faults,
            is_healed: false,
            story: None,
            random,
        }
    }

    /// Whether the VM dirties its memory so fast that the transfer hardly finishes while it runs.
    pub(crate) fn is_busy(&self) -> bool {
        self.hosts.allow_post_copy() || self.seed.is_multiple_of(4)
    }

    fn go_on(mut self) -> Result<Run, String> {
        for _ in 0..STEPS_MAX {
            self.step();
            self.check();
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
            if self.is_over() {
                self.check_end()?;
                let (outcomes, sights) = (self.outcomes, self.sights);
                return Ok(Run { outcomes, sights, waits_in_vain: self.waits_in_vain });
            }
        }
        Err(format!("I5: it does not end: {:#?} {:#?} {:#?}", self.source, self.target, self.guards))
    }

    pub(crate) fn breach(&mut self, rule: String) {
        self.broken.get_or_insert(rule);
    }

    pub(crate) fn note(&mut self, what: impl FnOnce(&Self) -> String) {
        if self.story.is_some() {
            let line = format!("{:9.0} ms  {}\n", self.now_ms, what(self));
            self.story.iter_mut().for_each(|story| story.push(line.clone()));
        }
    }

    pub(crate) fn saw(&mut self, sight: Sight) {
        self.sights.insert(sight);
    }

    fn step(&mut self) {
        self.now_ms += self.random.below(20) as f64;
        self.guests_go_on();
        self.libvirts_go_on();
        self.disks_go_on();
        self.last_bytes_arrive();
        self.wake_up();
        self.tell_of_journal();
        self.hear_of_journal();
        self.third_host_asks();
        let executor = self.source.executor.as_ref();
        let is_being_decided =
            executor.map_or(self.source.open_migration().is_some(), Executor::is_being_decided);
        self.faults.gather(executor.and_then(Executor::action), is_being_decided);
        if let Some(fault) = self.faults.strike(&mut self.random) {
            self.strike(fault);
        }
        if self.faults.are_over() && !self.is_healed {
            self.heal();
        }
        let actors = self.actors();
        let is_slow = self.faults.meets(Fault::Slow, &mut self.random);
        let began_ms = self.now_ms;
        self.passed_over_ms = 0.0;
        if actors.is_empty() || is_slow {
            self.now_ms = self.now_ms.max(self.next_wake_ms());
            self.passed_over_ms = if actors.is_empty() { 0.0 } else { self.now_ms - began_ms };
        } else {
            let chosen = self.random.index(actors.len());
            self.act_of(&actors[chosen]);
        }
    }

    fn act_of(&mut self, actor: &Actor) {
        self.note(|world| world.describe(actor));
        match *actor {
            Actor::Executor => self.step_executor(),
            Actor::Stream => self.stream(),
            Actor::Operator => self.operate(),
            Actor::Letter(index) => self.deliver(index),
            Actor::Guard(number) => self.step_guard(number),
            Actor::Task(index) => self.step_task(index),
            Actor::Entry(migration) => self.step_watch(migration),
            Actor::Arrived(migration) => self.step_arrived(migration),
        }
    }

    fn describe(&self, actor: &Actor) -> String {
        let source = self.source.qemu.as_ref().map(|qemu| (qemu.copy.runs, qemu.sending));
        let target = self.target.qemu.as_ref().map(|qemu| (qemu.copy.runs, qemu.stage));
        let acts = match *actor {
            Actor::Executor => self.source.executor.as_ref().map_or_else(String::new, Executor::describe),
            Actor::Letter(index) => format!("{:?}", self.network.letters[index].1),
            Actor::Guard(number) => format!("{:?}", self.guards[number]),
            Actor::Task(index) => format!("{:?}", self.target.tasks[index]),
            _ => format!("{actor:?}"),
        };
        format!("{acts}  [{source:?} {target:?} {:?}]", self.target.journal)
    }

    /// All who can do something now.
    fn actors(&self) -> Vec<Actor> {
        let now_ms = self.now_ms;
        let mut actors = Vec::with_capacity(8);
        if self.source.life == Life::Up
            && self.source.executor.as_ref().is_some_and(|executor| executor.wakes_ms() <= now_ms)
        {
            actors.push(Actor::Executor);
        }
        if self.stream_flows() {
            actors.push(Actor::Stream);
        }
        if self.has_to_operate() {
            actors.push(Actor::Operator);
        }
        let letters = self.network.letters.iter().enumerate();
        let arriving =
            letters.filter(|(_, (at_ms, letter))| *at_ms <= now_ms && self.is_let_through(*letter));
        actors.extend(arriving.map(|(index, _)| Actor::Letter(index)));
        let guards = self.guards.iter().enumerate().filter(|(_, guard)| self.guard_is_ready(guard));
        actors.extend(guards.map(|(number, _)| Actor::Guard(number)));
        if self.target.life == Life::Up {
            let tasks = self.target.tasks.iter().enumerate();
            let going_on = tasks.filter(|(_, task)| self.task_wakes_ms(task) <= now_ms);
            actors.extend(going_on.map(|(index, _)| Actor::Task(index)));
            let silent = self.target.entries.iter().filter(|(_, entry)| entry.wakes_ms() <= now_ms);
            actors.extend(silent.map(|(migration, _)| Actor::Entry(*migration)));
            let arrived = self.target.arrived.iter().filter(|(_, arrived)| arrived.wakes_ms() <= now_ms);
            actors.extend(arrived.map(|(migration, _)| Actor::Arrived(*migration)));
        }
        actors
    }

    /// Whether the letter reaches somebody now: a frozen agent receives it later.
    fn is_let_through(&self, letter: Letter) -> bool {
        self.now_ms >= self.network.parted_until_ms && self.life_of_addressee(letter) != Life::Frozen
    }

    /// The life of the agent to which the letter goes; guards live on without theirs.
    fn life_of_addressee(&self, letter: Letter) -> Life {
        match letter {
            Letter::Answer { question, .. } if self.guards.iter().any(|guard| guard.has_asked(question)) => {
                Life::Up
            }
            _ if letter.goes_to_target() => self.target.life,
            _ => self.source.life,
        }
    }

    fn next_wake_ms(&self) -> f64 {
        let mut next_ms = f64::INFINITY;
        let mut wakes = |at_ms: f64| {
            if at_ms > self.now_ms {
                next_ms = next_ms.min(at_ms);
            }
        };
        wakes(self.network.parted_until_ms);
        self.network.letters.iter().for_each(|(at_ms, _)| wakes(*at_ms));
        self.guards.iter().filter(|guard| !guard.has_left()).for_each(|guard| wakes(guard.at_ms));
        [self.source.wakes_ms, self.target.wakes_ms].into_iter().for_each(&mut wakes);
        let mute = [self.source.qemu.as_ref().and_then(|qemu| qemu.mute_until_ms)].into_iter();
        mute.chain([self.target.qemu.as_ref().and_then(|qemu| qemu.mute_until_ms)])
            .flatten()
            .for_each(&mut wakes);
        self.target.reached_at_ms.into_iter().for_each(&mut wakes);
        self.libvirts.iter().flat_map(Libvirts::wake_ms).for_each(&mut wakes);
        self.source.executor.iter().for_each(|executor| wakes(executor.wakes_ms()));
        self.target.tasks.iter().for_each(|task| wakes(self.task_wakes_ms(task)));
        self.target.entries.values().for_each(|entry| wakes(entry.wakes_ms()));
        self.target.arrived.values().for_each(|arrived| wakes(arrived.wakes_ms()));
        if !self.target.entries.is_empty() {
            wakes(self.third_host_asks_ms);
        }
        // Nothing is left to do but to look again.
        if next_ms.is_finite() { next_ms } else { self.now_ms + 1_000.0 }
    }

    pub(crate) fn send(&mut self, letter: Letter) {
        if self.faults.meets(Fault::Lost, &mut self.random) {
            return;
        }
        let is_late = self.faults.meets(Fault::Delayed, &mut self.random);
        let is_doubled = self.faults.meets(Fault::Duplicated, &mut self.random);
        for is_late in std::iter::once(is_late).chain(is_doubled.then_some(true)) {
            let late_ms = if is_late { self.random.below(LATE_MS_MAX) } else { 0 };
            self.network.letters.push((self.now_ms + late_ms as f64, letter));
        }
    }

    fn deliver(&mut self, index: usize) {
        let (_, letter) = self.network.letters.swap_remove(index);
        if self.life_of_addressee(letter) == Life::Down {
            return;
        }
        match letter {
            Letter::Order { order, migration, question } => self.take_order(order, migration, question),
            Letter::Answer { question, answer } => {
                if let Some(guard) = self.guards.iter_mut().find(|guard| guard.has_asked(question)) {
                    guard.take_answer(answer);
                } else if let Some(executor) = &mut self.source.executor {
                    executor.take_answer(question, answer);
                }
            }
            // What such a journal says binds nobody, and the target takes it for silence.
            Letter::Ask { .. } if self.source.older.is_some() => {}
            Letter::Ask { migration, question } => {
                let hand_over = self.tell_hand_over(migration);
                self.send(Letter::Tell { question, hand_over });
            }
            Letter::Tell { question, hand_over } => self.target_hears_answer(question, hand_over),
        }
    }

    fn wake_up(&mut self) {
        for host in [Host::Source, Host::Target] {
            let mute_until_ms = match host {
                Host::Source => self.source.qemu.as_ref().and_then(|qemu| qemu.mute_until_ms),
                Host::Target => self.target.qemu.as_ref().and_then(|qemu| qemu.mute_until_ms),
            };
            if mute_until_ms.is_some_and(|until_ms| self.now_ms >= until_ms) {
                self.is_mute_no_more(host);
            }
        }
        self.reach();
        if self.now_ms >= self.source.wakes_ms {
            match self.source.life {
                Life::Up => {}
                Life::Frozen => self.source.life = Life::Up,
                Life::Down => self.start_source(),
            }
        }
        if self.now_ms >= self.target.wakes_ms {
            match self.target.life {
                Life::Up => {}
                Life::Frozen => self.target.life = Life::Up,
                Life::Down => self.start_target(),
            }
        }
    }

    fn strike(&mut self, fault: Fault) {
        self.note(|_| format!("FAULT {fault:?}"));
        let whole_ms = [100, 2_000, 8_000, 30_000, 150_000][self.random.index(5)];
        let for_ms = whole_ms as f64;
        let until_ms = self.now_ms + for_ms;
        // Infinite until somebody makes room and restarts the agent.
        let full_until_ms = if self.random.chance(30) { f64::INFINITY } else { until_ms };
        match fault {
            Fault::Partition => self.network.parted_until_ms = until_ms,
            Fault::StreamBreaks => self.break_stream(),
            Fault::SourceCrashes => self.crash_source(for_ms),
            Fault::SourceFreezes if self.source.life == Life::Up => {
                (self.source.life, self.source.wakes_ms) = (Life::Frozen, until_ms);
            }
            Fault::SourceReboots => self.reboot_source(for_ms),
            Fault::SourceDiskFull => self.source.disk_full_until_ms = full_until_ms,
            Fault::SourceQemuMute => {
                if let Some(qemu) = &mut self.source.qemu {
                    qemu.mute_until_ms = Some(until_ms);
                }
            }
            Fault::SourceQemuEnds => self.lose(Host::Source),
            Fault::GuardEnds => self.dismiss_all_guards(),
            Fault::GuardsAreSlow => self.guards_pause_ms = whole_ms,
            Fault::TargetCrashes => self.crash_target(for_ms),
            Fault::TargetFreezes if self.target.life == Life::Up => {
                (self.target.life, self.target.wakes_ms) = (Life::Frozen, until_ms);
            }
            Fault::TargetReboots => self.reboot_target(for_ms),
            Fault::TargetDiskFull => self.target.disk_full_until_ms = full_until_ms,
            Fault::TargetQemuMute => {
                if let Some(qemu) = &mut self.target.qemu {
                    qemu.mute_until_ms = Some(until_ms);
                }
            }
            Fault::TargetQemuEnds => self.lose(Host::Target),
            // The VM has left the target: the operator would look where it is.
            Fault::TargetLost if self.target.has_moved_on => {}
            Fault::TargetLost => {
                let comes_back = self.random.chance(75);
                self.reboot_target(if comes_back { 10.0 * for_ms } else { f64::INFINITY });
                self.target.is_lost = true;
            }
            Fault::TargetJournalLost => self.lose_target_journal(for_ms),
            Fault::SourceJournalOlder => self.put_older_journal(for_ms),
            Fault::SourceLibvirtTerminated => self.terminate_libvirt(Host::Source, for_ms),
            Fault::SourceLibvirtKilled => self.kill_libvirt(Host::Source, for_ms),
            Fault::TargetLibvirtTerminated => self.terminate_libvirt(Host::Target, for_ms),
            Fault::TargetLibvirtKilled => self.kill_libvirt(Host::Target, for_ms),
            Fault::OwnerResumes => self.owner_resumes(),
            Fault::OwnerResumesTarget => self.owner_resumes_at_target(),
            Fault::NeighbourGoesOn => self.neighbour_goes_on(),
            Fault::MovesOn => self.move_on(),
            Fault::TargetForgets => self.forget_settled(),
            Fault::Meddles => self.meddle(),
            Fault::Cancelled => {
                if let Some(executor) = &mut self.source.executor {
                    executor.request_cancel();
                }
            }
            Fault::ClockJumps => self.jump_clock(),
            _ => {}
        }
    }

    /// Moves the clock by hours, forwards or back.
    fn jump_clock(&mut self) {
        let by_ms = self.random.below(10 * 3_600_000) as f64 - 5.0 * 3_600_000.0;
        if let Some(executor) = &mut self.source.executor {
            executor.jump(by_ms);
        }
    }

    /// From here on nothing goes wrong, and everything that went wrong is repaired, except a lost host.
    fn heal(&mut self) {
        self.is_healed = true;
        let now_ms = self.now_ms;
        self.network.parted_until_ms = self.network.parted_until_ms.min(now_ms);
        self.source.disk_full_until_ms = self.source.disk_full_until_ms.min(now_ms);
        self.target.disk_full_until_ms = self.target.disk_full_until_ms.min(now_ms);
        self.source.wakes_ms = self.source.wakes_ms.min(now_ms);
        (self.guards_pause_ms, self.neighbour) = (0, None);
        self.libvirts.iter_mut().for_each(|libvirts| libvirts.hasten(now_ms));
        if !self.target.is_lost {
            self.target.wakes_ms = self.target.wakes_ms.min(now_ms);
        }
        (self.turns_awaited, self.target.places_awaited) = (0, 0);
        self.find_target_journal();
        self.find_source_journal();
    }

    /// Whether nobody has anything under way.
    pub(crate) fn is_quiet(&self) -> bool {
        let guards = self.guards.iter().all(Guard::has_left);
        let agents = self.source.life == Life::Up && (self.target.life == Life::Up || self.target.is_lost);
        let nothing_open = self.source.executor.is_none()
            && self.source.open_migration().is_none()
            && self.source.older.is_none();
        let is_mute = |host| self.copy_at(host).is_some() && !self.answers(host);
        guards
            && agents
            && nothing_open
            && self.libvirts.as_ref().is_none_or(Libvirts::are_settled)
            && self.target.is_settled()
            && self.network.letters.is_empty()
            && ![Host::Source, Host::Target].into_iter().any(is_mute)
    }

    fn is_over(&self) -> bool {
        self.faults.are_over() && self.is_quiet() && !self.has_to_operate()
    }
}

/// Mostly its turn comes at once; often, soon; and sometimes not before the deadline of a minute.
fn turns_awaited(random: &mut Random) -> u64 {
    match random.below(20) {
        0..14 => 0,
        14..19 => random.below(20),
        _ => TURNS_IN_VAIN,
    }
}
