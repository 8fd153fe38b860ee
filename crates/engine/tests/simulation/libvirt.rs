//! libvirt on both hosts, when the VM is a domain: what it does with a migration by itself, and what its end leaves
//! behind.
//!
//! Modelled on what libvirt 9.0 and QEMU 7.2 were seen to do, phase by phase (docs/decisions/0071, 0072). Where nobody
//! has looked, the model assumes the worst.

use drainpipe_engine::migration::target::order::{OrderEvent, VmState};
use drainpipe_engine::migration::target::steps::OrderNeed;
use drainpipe_engine::migration::timing;
use drainpipe_engine::migration::{SourceAction, SourceEvent, SourceState};
use drainpipe_engine::problem::{Problem, ProblemKind};

use crate::executor::{Doing, Executor, failed};
use crate::faults::Fault;
use crate::milliseconds::ms;
use crate::network::Order;
use crate::planted::Planted;
use crate::qemu::{Command, IncomingStage, Last, Owner, Reply, Sending};
use crate::world::{Host, Life, Sight, World};

const ANSWER_DEADLINE_MS: f64 = ms(timing::QMP_DEADLINE);
const SWITCH_OVER_DEADLINE_MS: f64 = ms(timing::SWITCH_OVER_DEADLINE);

/// How often those who wait for libvirt ask again.
const ASK_AGAIN_MS: f64 = 50.0;

/// How long a restarted libvirt may take to look after its domain.
const LOOKS_AFTER_DOMAIN_MS_MAX: u64 = 3_000;

/// How often systemd keeps libvirt's socket while libvirt is down: then whoever speaks to it waits.
const SOCKET_STAYS_PERCENT: u64 = 50;

/// How often libvirt continues at once when QEMU waits for it.
const GOES_ON_PERCENT: u64 = 50;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Daemon {
    Up,
    /// It was asked to end and hangs, or systemd holds its socket.
    Mute,
    /// Nothing accepts connections. The agent and the guard then speak to QEMU directly.
    Ended,
    /// Until it has looked after its domain, it answers nobody who asks for that.
    Starting,
}

/// What libvirt does with the domain, on behalf of whoever asked for it over a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Job {
    None,
    /// Perform. It goes on even after its connection is closed.
    Sending {
        is_connected: bool,
    },
    /// Perform has returned. The job ends with the connection.
    Sent,
    /// It does nothing, and keeps others from letting the guest run.
    Protection,
}

/// The libvirt of one host.
#[derive(Debug, Clone)]
pub(crate) struct Libvirt {
    daemon: Daemon,
    /// Which life it is in. The connections made in one life end with it.
    life: u32,
    /// When it is killed or started, or has looked after its domain.
    pub changes_ms: f64,
    /// For how long it hangs before systemd kills it; 0 if it does not.
    away_ms: f64,
    job: Job,
    /// Whether it will let the guest that it was sending run, once it is back.
    resumes: bool,
    /// Whether an agent still has to end this host's domain, which it could not do before.
    is_to_end: bool,
}

impl Libvirt {
    fn new(life: u32) -> Self {
        Self {
            daemon: Daemon::Up,
            life,
            changes_ms: f64::INFINITY,
            away_ms: 0.0,
            job: Job::None,
            resumes: false,
            is_to_end: false,
        }
    }

    fn is_settled(&self) -> bool {
        self.daemon == Daemon::Up && !self.is_to_end
    }
}

#[derive(Debug)]
pub(crate) struct Libvirts {
    source: Libvirt,
    target: Libvirt,
    /// The migration of which Perform has returned to the agent.
    sent: Option<usize>,
}

impl Libvirts {
    pub(crate) fn new() -> Self {
        Self { source: Libvirt::new(0), target: Libvirt::new(0), sent: None }
    }

    fn of(&self, host: Host) -> &Libvirt {
        match host {
            Host::Source => &self.source,
            Host::Target => &self.target,
        }
    }

    fn of_mut(&mut self, host: Host) -> &mut Libvirt {
        match host {
            Host::Source => &mut self.source,
            Host::Target => &mut self.target,
        }
    }

    /// Brings libvirts that are away back now.
    pub(crate) fn hasten(&mut self, now_ms: f64) {
        for libvirt in [&mut self.source, &mut self.target] {
            if libvirt.changes_ms.is_finite() {
                libvirt.changes_ms = libvirt.changes_ms.min(now_ms);
            }
        }
    }

    pub(crate) fn are_settled(&self) -> bool {
        self.source.is_settled() && self.target.is_settled()
    }

    pub(crate) fn wake_ms(&self) -> [f64; 2] {
        [self.source.changes_ms, self.target.changes_ms]
    }
}

/// Who asks libvirt for something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    Agent,
    Guard,
}

/// A step of the source's part in a domain's switch-over, after Perform has returned.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LettingGo {
    AwaitSent { until_ms: f64 },
    Close,
    AwaitJobless { until_ms: f64 },
    Protect,
    Look,
}

/// Which parts of a domain's switch-over are done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SwitchedOver {
    pub has_finished: bool,
    has_let_go: bool,
}

impl World {
    pub(crate) fn is_domain(&self) -> bool {
        self.libvirts.is_some()
    }

    fn libvirt(&self, host: Host) -> Option<&Libvirt> {
        self.libvirts.as_ref().map(|libvirts| libvirts.of(host))
    }

    fn libvirt_mut(&mut self, host: Host) -> Option<&mut Libvirt> {
        self.libvirts.as_mut().map(|libvirts| libvirts.of_mut(host))
    }

    fn is_daemon(&self, host: Host, state: Daemon) -> bool {
        self.libvirt(host).is_some_and(|libvirt| libvirt.daemon == state)
    }

    /// Whether nobody can ask about the domain, neither libvirt nor QEMU in its place.
    pub(crate) fn is_libvirt_mute(&self, host: Host) -> bool {
        let is_believed = self.planted == Planted::RestartedBelieved;
        self.is_daemon(host, Daemon::Mute) || self.is_daemon(host, Daemon::Starting) && !is_believed
    }

    /// Whether libvirt does what it is asked for; true where there is none.
    pub(crate) fn serves(&self, host: Host) -> bool {
        self.libvirt(host).is_none_or(|libvirt| libvirt.daemon == Daemon::Up)
    }

    fn life_of_libvirt(&self, host: Host) -> u32 {
        self.libvirt(host).map_or(0, |libvirt| libvirt.life)
    }

    fn set_job(&mut self, job: Job) {
        if let Some(libvirts) = &mut self.libvirts {
            libvirts.source.job = job;
        }
    }

    fn job(&self) -> Job {
        self.libvirts.as_ref().map_or(Job::None, |libvirts| libvirts.source.job)
    }

    fn is_sent(&self, migration: usize) -> bool {
        self.libvirts.as_ref().is_some_and(|libvirts| libvirts.sent == Some(migration))
    }

    /// Asks libvirt to end.
    pub(crate) fn terminate_libvirt(&mut self, host: Host, for_ms: f64) {
        let now_ms = self.now_ms;
        let Some(libvirt) = self.libvirt_mut(host).filter(|libvirt| libvirt.daemon == Daemon::Up) else {
            return;
        };
        if libvirt.job != Job::Sent {
            return self.end_libvirt(host, for_ms);
        }
        // With such a job it hangs. Once systemd has killed and restarted it, it lets the guest run by itself.
        (libvirt.daemon, libvirt.resumes) = (Daemon::Mute, true);
        (libvirt.changes_ms, libvirt.away_ms) = (now_ms + for_ms, for_ms);
        self.saw(Sight::LibvirtHung);
    }

    pub(crate) fn kill_libvirt(&mut self, host: Host, for_ms: f64) {
        if self.libvirt(host).is_some_and(|libvirt| libvirt.daemon != Daemon::Ended) {
            self.end_libvirt(host, for_ms);
        }
    }

    /// Ends libvirt, and all connections with it.
    fn end_libvirt(&mut self, host: Host, for_ms: f64) {
        let has_socket = self.random.chance(SOCKET_STAYS_PERCENT);
        let now_ms = self.now_ms;
        let Some(libvirt) = self.libvirt_mut(host) else { return };
        libvirt.resumes |= matches!(libvirt.job, Job::Sending { .. });
        libvirt.job = Job::None;
        libvirt.life += 1;
        libvirt.daemon = if has_socket { Daemon::Mute } else { Daemon::Ended };
        (libvirt.changes_ms, libvirt.away_ms) = (now_ms + for_ms, 0.0);
    }

    /// Starts libvirt anew with its host.
    pub(crate) fn reboot_libvirt(&mut self, host: Host) {
        if let Some(libvirt) = self.libvirt_mut(host) {
            *libvirt = Libvirt::new(libvirt.life + 1);
        }
    }

    /// An agent has ended, and its connections with it.
    pub(crate) fn leave_libvirt(&mut self, host: Host) {
        match (host, &mut self.libvirts) {
            (Host::Source, Some(libvirts)) => libvirts.sent = None,
            (_, None) => return,
            (Host::Target, Some(_)) => {}
        }
        if !self.serves(host) {
            return;
        }
        match (host, self.job()) {
            (Host::Target, _) => {
                self.libvirt_mut(Host::Target).into_iter().for_each(|libvirt| libvirt.job = Job::None);
                self.end_what_was_to_come();
            }
            (Host::Source, Job::Sending { .. }) => self.set_job(Job::Sending { is_connected: false }),
            // The guest stands still, without a job.
            (Host::Source, _) => self.set_job(Job::None),
        }
    }

    /// Until Finish, libvirt ends a domain when the connection over which it arrives ends.
    fn end_what_was_to_come(&mut self) {
        let is_to_come = self.target.qemu.as_ref().is_some_and(|qemu| qemu.stage != IncomingStage::Complete);
        if is_to_come {
            self.lose(Host::Target);
        }
    }

    /// What libvirt does by itself.
    pub(crate) fn libvirts_go_on(&mut self) {
        if !self.is_domain() {
            return;
        }
        for host in [Host::Source, Host::Target] {
            if self.libvirt(host).is_some_and(|libvirt| self.now_ms >= libvirt.changes_ms) {
                self.change_libvirt(host);
            }
            self.end_left(host);
        }
        self.awaited_resume();
        if self.source.qemu.is_none() {
            self.set_job(Job::None);
        } else if self.serves(Host::Source) && self.answers(Host::Source) {
            self.go_on_sending();
        }
    }

    fn change_libvirt(&mut self, host: Host) {
        let looks_ms = self.random.below(LOOKS_AFTER_DOMAIN_MS_MAX) as f64;
        let now_ms = self.now_ms;
        let Some(libvirt) = self.libvirt_mut(host) else { return };
        if libvirt.daemon == Daemon::Starting {
            (libvirt.daemon, libvirt.changes_ms) = (Daemon::Up, f64::INFINITY);
            return self.look_after_domain(host);
        }
        if libvirt.away_ms > 0.0 {
            // It hung, and systemd kills it.
            return self.end_libvirt(host, 0.0);
        }
        (libvirt.daemon, libvirt.changes_ms) = (Daemon::Starting, now_ms + looks_ms);
    }

    /// libvirt is back. Commands that waited for it are carried out after that.
    fn look_after_domain(&mut self, host: Host) {
        let resumes = self.libvirt_mut(host).is_some_and(|libvirt| std::mem::take(&mut libvirt.resumes));
        if host == Host::Target {
            // libvirt does not know that the domain came in its former life.
            self.end_what_was_to_come();
        } else if resumes && self.copy_at(Host::Source).is_some_and(|copy| !copy.runs) {
            self.saw(Sight::LibvirtResumed);
            self.go_back();
        } else if resumes {
            self.obey(Command::Cancel);
        }
        let is_mute = match host {
            Host::Source => self.source.qemu.as_ref().is_some_and(|qemu| qemu.mute_until_ms.is_some()),
            Host::Target => self.target.qemu.as_ref().is_some_and(|qemu| qemu.mute_until_ms.is_some()),
        };
        if !is_mute {
            self.answers_again(host);
        }
    }

    /// libvirt stops its migration, and lets the guest run.
    fn go_back(&mut self) {
        self.obey(Command::Cancel);
        self.let_run(Host::Source);
    }

    fn go_on_sending(&mut self) {
        let Job::Sending { is_connected } = self.job() else { return };
        let Some(qemu) = &self.source.qemu else { return };
        let (migration, sending) = (qemu.migration, qemu.sending);
        match sending {
            Sending::PreSwitchover if self.random.chance(GOES_ON_PERCENT) => {
                self.obey(Command::Continue);
            }
            Sending::Completed if is_connected => {
                self.set_job(Job::Sent);
                self.libvirts.iter_mut().for_each(|libvirts| libvirts.sent = Some(migration));
            }
            // The guest stands still, and nobody knows that it was sent.
            Sending::Completed => {
                self.saw(Sight::SentForNobody);
                self.set_job(Job::None);
            }
            Sending::Idle | Sending::Failed | Sending::Cancelled => self.set_job(Job::None),
            _ => {}
        }
    }

    /// Ends the domain that an agent was to end when libvirt was down.
    fn end_left(&mut self, host: Host) {
        let is_up = match host {
            Host::Source => self.source.life == Life::Up,
            Host::Target => self.target.life == Life::Up,
        };
        let is_to_end = self.libvirt(host).is_some_and(|libvirt| libvirt.is_to_end);
        // A guest that somebody has let run is left alone.
        let runs = self.copy_at(host).is_some_and(|copy| copy.runs);
        if is_to_end && is_up && self.serves(host) && !runs {
            self.saw(Sight::LeftOneEnded);
            self.end_domain(host);
        }
    }

    /// Ends what libvirt has of the domain, or notes that it is to be ended; returns whether it was ended.
    pub(crate) fn end_domain(&mut self, host: Host) -> bool {
        let serves = self.serves(host) || self.copy_at(host).is_none();
        let is_noted = self.planted != Planted::EndsUnnoted;
        if let Some(libvirt) = self.libvirt_mut(host) {
            libvirt.is_to_end = !serves && is_noted;
        }
        match host {
            _ if !serves => {}
            Host::Source => self.source.qemu = None,
            Host::Target => self.target.qemu = None,
        }
        serves
    }

    /// A restarted agent ends the domain that was given up; returns whether it could.
    pub(crate) fn end_given_up(&mut self) -> bool {
        let can = self.serves(Host::Target);
        if can {
            self.target.qemu = None;
        }
        can
    }

    /// Whether the domain has moved, and what is left of it here is still to be ended.
    pub(crate) fn is_left_to_end(&self, host: Host) -> bool {
        self.libvirt(host).is_some_and(|libvirt| libvirt.is_to_end)
    }

    /// Somebody resumes the guest on its source if nothing keeps them from it. Whoever does so after the agent has seen
    /// it stand still, when libvirt has ended since, has the guest twice (docs/decisions/0071).
    pub(crate) fn owner_resumes(&mut self) {
        let is_let_go =
            self.source.executor.as_ref().is_some_and(|executor| executor.switched_over.has_let_go);
        let is_handed_over = is_let_go || self.source.has_handed_over() || self.source.found_later.is_some();
        let may = self.is_domain()
            && !is_handed_over
            && self.serves(Host::Source)
            && self.answers(Host::Source)
            && self.job() == Job::None;
        if may && self.copy_at(Host::Source).is_some_and(|copy| !copy.runs) {
            self.saw(Sight::OwnerResumed);
            self.let_run(Host::Source);
        }
    }

    /// The reply of libvirt, or of QEMU in its place; `None` if it is that of any QEMU.
    pub(crate) fn command_domain(&mut self, command: Command, by: By) -> Option<Reply> {
        let (daemon, job) = (self.libvirt(Host::Source)?.daemon, self.job());
        let qemu = self.source.qemu.as_mut()?;
        let (is_mute, sending) = (qemu.mute_until_ms.is_some(), qemu.sending);
        match (daemon, command, job) {
            (Daemon::Mute, ..) => Some(Reply::None),
            (Daemon::Starting, Command::Cancel | Command::LetRun, _) => {
                qemu.unread.push(command);
                Some(Reply::None)
            }
            (Daemon::Starting | Daemon::Ended, Command::Migrate { .. }, _) => Some(Reply::Refused),
            (Daemon::Ended, _, _) => {
                self.saw(Sight::QemuAskedItself);
                (command == Command::LetRun && is_at_it(sending)).then_some(Reply::None)
            }
            (Daemon::Up, Command::Migrate { .. }, Job::None) if !is_mute => {
                let reply = self.obey(command);
                if reply == Reply::Done {
                    self.set_job(Job::Sending { is_connected: true });
                }
                Some(reply)
            }
            (Daemon::Up, Command::Migrate { .. }, _) => Some(Reply::Refused),
            (Daemon::Up, Command::Cancel, Job::Sent) if by == By::Guard => {
                // The guard confirms that the domain stays, over a connection of its own.
                self.set_job(Job::None);
                self.go_back();
                Some(Reply::Done)
            }
            (Daemon::Up, Command::Cancel, Job::Sent | Job::Protection) => {
                self.set_job(Job::None);
                Some(Reply::Done)
            }
            // The agent gives its own job up first.
            (Daemon::Up, Command::LetRun, Job::Sent | Job::Protection) if by == By::Agent => {
                self.set_job(Job::None);
                None
            }
            (Daemon::Up, Command::LetRun, Job::Sending { .. } | Job::Sent | Job::Protection) => {
                Some(Reply::None)
            }
            _ => None,
        }
    }

    /// What libvirt, or QEMU in its place, says of a domain whose hand-over is recorded.
    pub(crate) fn domain_state(&self) -> Option<SourceState> {
        let qemu = self.source.qemu.as_ref()?;
        if self.is_daemon(Host::Source, Daemon::Ended) {
            return match qemu.sending {
                Sending::Completed => Some(SourceState::LetGo),
                sending if is_at_it(sending) => None,
                _ => Some(SourceState::Kept),
            };
        }
        match self.job() {
            Job::None | Job::Protection => Some(SourceState::LetGo),
            Job::Sending { .. } | Job::Sent => None,
        }
    }

    /// What the agent sees of Perform; `None` if it sees what it sees of any QEMU.
    pub(crate) fn look_at_domain(&self, executor: &Executor) -> Option<SourceEvent> {
        if !self.is_domain() {
            return None;
        }
        if self.is_sent(executor.number()) {
            return Some(SourceEvent::Paused);
        }
        if self.life_of_libvirt(Host::Source) != executor.libvirts_life {
            return Some(SourceEvent::TransferFailed(Problem::failed("libvirt has ended")));
        }
        if !self.answers(Host::Source) {
            return Some(SourceEvent::Tick);
        }
        let is_paused = |sending| is_at_it(sending) || sending == Sending::Completed;
        self.source.qemu.as_ref().filter(|qemu| is_paused(qemu.sending)).map(|_| SourceEvent::Paused)
    }

    /// Begin and Perform use connections that end with this life of libvirt.
    pub(crate) fn meet_libvirt(&self, executor: &mut Executor) {
        executor.libvirts_life = self.life_of_libvirt(Host::Source);
        executor.switched_over = SwitchedOver::default();
    }

    /// libvirt switches over by itself, and the agent waits for it.
    pub(crate) fn switch_domain_over(&self) -> Doing {
        self.then(LettingGo::AwaitSent { until_ms: self.now_ms + SWITCH_OVER_DEADLINE_MS })
    }

    pub(crate) fn let_go(&mut self, executor: &mut Executor, step: LettingGo) -> Doing {
        match step {
            LettingGo::AwaitSent { .. } if self.is_sent(executor.number()) => {
                self.go_on_switching_over(executor)
            }
            LettingGo::AwaitSent { until_ms } => {
                let has_ended = self.life_of_libvirt(Host::Source) != executor.libvirts_life;
                self.again_until(until_ms, step, has_ended, "libvirt has not sent the last of the VM")
            }
            LettingGo::Close if self.planted == Planted::JobKept => {
                executor.switched_over.has_let_go = true;
                self.go_on_switching_over(executor)
            }
            LettingGo::Close => {
                if self.serves(Host::Source) {
                    self.set_job(Job::None);
                }
                self.then(LettingGo::AwaitJobless { until_ms: self.now_ms + ANSWER_DEADLINE_MS })
            }
            LettingGo::AwaitJobless { until_ms } => {
                let is_jobless = self.asks_libvirt() && self.job() == Job::None;
                if is_jobless {
                    return self.then(LettingGo::Protect);
                }
                let is_gone = self.source.qemu.is_none();
                self.again_until(until_ms, step, is_gone, "libvirt goes on with the domain's job")
            }
            LettingGo::Protect if self.asks_libvirt() => {
                self.set_job(Job::Protection);
                self.then(LettingGo::Look)
            }
            LettingGo::Look if self.asks_libvirt() => {
                let stands_still = self.copy_at(Host::Source).is_some_and(|copy| !copy.runs);
                if !stands_still && self.planted != Planted::ResumedUnseen {
                    return Doing::Happened(failed("somebody has let it run"));
                }
                executor.switched_over.has_let_go = true;
                self.go_on_switching_over(executor)
            }
            LettingGo::Protect | LettingGo::Look => {
                let event = failed("libvirt does not answer");
                Doing::Later { at_ms: self.now_ms + ANSWER_DEADLINE_MS, event }
            }
        }
    }

    /// Whether libvirt itself answers, rather than QEMU in its place.
    fn asks_libvirt(&self) -> bool {
        self.answers(Host::Source) && !self.is_daemon(Host::Source, Daemon::Ended)
    }

    fn again_until(&self, until_ms: f64, step: LettingGo, is_in_vain: bool, why: &str) -> Doing {
        if is_in_vain || self.now_ms >= until_ms {
            return Doing::Happened(failed(why));
        }
        Doing::LetGo { at_ms: self.now_ms + ASK_AGAIN_MS, step }
    }

    fn then(&self, step: LettingGo) -> Doing {
        Doing::LetGo { at_ms: self.now_ms, step }
    }

    /// The target finishes while the source lets go: either may be first.
    pub(crate) fn go_on_switching_over(&mut self, executor: &Executor) -> Doing {
        let SwitchedOver { has_finished, has_let_go } = executor.switched_over;
        match (has_finished, has_let_go) {
            (true, true) => Doing::Rest(SourceAction::SwitchOver),
            (false, false) if self.random.chance(50) => self.then(LettingGo::Close),
            (true, false) => self.then(LettingGo::Close),
            (false, _) => self.order(executor, SourceAction::SwitchOver, Order::Complete),
        }
    }

    /// Prepare: the domain arrives over a connection of this life of libvirt.
    pub(crate) fn prepare_domain(&mut self) {
        let life = self.life_of_libvirt(Host::Target);
        if let Some(qemu) = &mut self.target.qemu {
            qemu.prepared_in = life;
        }
    }

    /// Whether the connection over which the domain arrives is still there.
    pub(crate) fn is_coming(&self) -> bool {
        let life = self.life_of_libvirt(Host::Target);
        self.target.qemu.as_ref().is_some_and(|qemu| qemu.prepared_in == life)
    }

    /// The agent keeps what Finish needs.
    pub(crate) fn keep_last(&mut self, migration: usize) -> Result<(), ProblemKind> {
        self.may_go_on(OrderNeed::UseHypervisor, migration)?;
        let is_from_before = self.target.entries.get(&migration).is_none_or(|entry| entry.is_from_before);
        if is_from_before || !self.serves(Host::Target) {
            return Err(ProblemKind::Failed);
        }
        if let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.last == Last::ToCome) {
            qemu.last = Last::Kept;
        }
        if matches!(self.planted, Planted::FinishLetsRun | Planted::TakesLastEarly) {
            self.take_last(migration);
        }
        if self.planted == Planted::FinishLetsRun {
            self.command_target();
        }
        Ok(())
    }

    /// Finish, which leaves the guest paused.
    pub(crate) fn take_last(&mut self, migration: usize) -> OrderEvent {
        let is_at_hand = self.is_coming() && self.target.entries.contains_key(&migration);
        let (serves, answers) = (self.serves(Host::Target), self.answers(Host::Target));
        // It takes so long that the agent does not wait for its answer.
        let takes_long = self.faults.meets(Fault::RunRefused, &mut self.random);
        let Some(qemu) = &mut self.target.qemu else { return OrderEvent::Gone };
        if qemu.last != Last::Kept || qemu.stage != IncomingStage::Unfinished {
            return OrderEvent::Failed;
        }
        if !(is_at_hand && serves && answers) {
            qemu.last = Last::Unsaid;
            qemu.finishes_late = is_at_hand && serves;
            return OrderEvent::Failed;
        }
        if takes_long {
            qemu.last = Last::Unsaid;
            self.finish();
            return OrderEvent::Failed;
        }
        qemu.last = Last::Taken;
        self.finish();
        OrderEvent::Done
    }

    /// Whether libvirt has not said whether it has taken the last, and does not say so now either.
    pub(crate) fn is_being_finished(&self) -> bool {
        let Some(qemu) = self.target.qemu.as_ref().filter(|qemu| qemu.last == Last::Unsaid) else {
            return false;
        };
        !self.serves(Host::Target) || qemu.stage == IncomingStage::Unfinished && self.is_coming()
    }

    /// libvirt finishes for an agent that waits no more.
    pub(crate) fn finish_late(&mut self) {
        let is_unfinished =
            self.target.qemu.as_ref().is_some_and(|qemu| qemu.stage == IncomingStage::Unfinished);
        if is_unfinished && self.is_coming() && self.serves(Host::Target) {
            self.finish();
        }
    }

    /// libvirt's job ends, and whoever waits for it may be the next.
    fn finish(&mut self) {
        let Some(qemu) = &mut self.target.qemu else { return };
        qemu.stage = IncomingStage::Complete;
        self.awaited_resume();
    }

    fn awaited_resume(&mut self) {
        let Some(qemu) = &mut self.target.qemu else { return };
        if qemu.stage == IncomingStage::Complete && qemu.owner == Owner::Waits {
            qemu.owner = Owner::Idle;
            self.owner_resumes_at_target();
        }
    }

    /// Somebody resumes the guest at its target, as soon as libvirt lets them. The agent hears of it, sooner or later.
    pub(crate) fn owner_resumes_at_target(&mut self) {
        let may = self.is_domain() && self.serves(Host::Target) && self.answers(Host::Target);
        let is_protected = self.libvirt(Host::Target).is_some_and(|libvirt| libvirt.job == Job::Protection);
        let is_heard = self.target.life != Life::Down && self.random.chance(50);
        let Some(qemu) = self.target.qemu.as_mut().filter(|_| may) else { return };
        if qemu.stage != IncomingStage::Complete || is_protected {
            if qemu.owner == Owner::Idle {
                qemu.owner = Owner::Waits;
            }
            return;
        }
        let migration = qemu.migration;
        if qemu.copy.runs {
            return;
        }
        qemu.owner = Owner::LetItRun;
        self.saw(Sight::OwnerResumedTarget);
        if is_heard {
            self.target.let_run.insert(migration);
        }
        self.let_run(Host::Target);
    }

    /// Whether others are known to have let the domain run.
    pub(crate) fn was_let_run(&self, migration: usize) -> bool {
        let is_forgotten = self.planted == Planted::LetRunForgotten && self.target.qemu.is_none();
        self.target.let_run.contains(&migration) && !is_forgotten
    }

    /// Keeps others from letting the domain run; fails where nobody says whether they have.
    pub(crate) fn bar_others(&mut self, migration: usize) -> OrderEvent {
        if self.was_let_run(migration) {
            return OrderEvent::Vm(VmState::HasRun);
        }
        let Some(qemu) = &self.target.qemu else { return OrderEvent::Done };
        if !self.is_domain() || !qemu.last.may_be_taken() {
            return OrderEvent::Done;
        }
        let runs = qemu.copy.runs;
        if !self.serves(Host::Target) || !self.answers(Host::Target) || self.is_being_finished() {
            return OrderEvent::Failed;
        }
        if runs {
            self.target.let_run.insert(migration);
            return OrderEvent::Vm(VmState::HasRun);
        }
        self.libvirt_mut(Host::Target).into_iter().for_each(|libvirt| libvirt.job = Job::Protection);
        OrderEvent::Done
    }

    /// Ends a domain that others may have let run, and have not.
    pub(crate) fn end_unrun(&mut self, migration: usize) -> OrderEvent {
        let event = self.bar_others(migration);
        match (event, &self.target.qemu) {
            (OrderEvent::Vm(_), _) => self.saw(Sight::KeptSinceItRan),
            (OrderEvent::Done, Some(qemu)) if qemu.last.may_be_taken() => {
                self.libvirt_mut(Host::Target).into_iter().for_each(|libvirt| libvirt.job = Job::None);
                self.target.qemu = None;
            }
            _ => {}
        }
        event
    }

    /// Whether nobody at the target knows that the domain runs there.
    pub(crate) fn may_go_back(&self) -> bool {
        let Some(qemu) = self.target.qemu.as_ref().filter(|_| self.is_domain()) else { return false };
        qemu.owner == Owner::LetItRun && !self.target.let_run.contains(&qemu.migration)
    }

    /// Whoever let it run before, from now on it runs by its agent's order, which needs no protection of it any more.
    pub(crate) fn is_agents_order(&mut self) {
        if let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.owner == Owner::LetItRun) {
            qemu.owner = Owner::Idle;
        }
        self.libvirt_mut(Host::Target).into_iter().for_each(|libvirt| libvirt.job = Job::None);
    }

    /// Nobody will ever know that it ran there, as its owner wanted, and the source runs what it has: a gap that is left
    /// (docs/decisions/0105).
    pub(crate) fn forget_that_it_ran(&mut self) {
        if let Some(qemu) = &self.source.qemu {
            self.newest = qemu.copy.memory;
        }
    }

    /// Whether the order to run is lost. A hanging libvirt loses it; one that has just come back carries it out late.
    pub(crate) fn is_run_lost(&self) -> bool {
        self.is_daemon(Host::Target, Daemon::Mute)
    }
}

/// Whether QEMU holds the guest still while it is sending this.
fn is_at_it(sending: Sending) -> bool {
    matches!(sending, Sending::PreSwitchover | Sending::Device { .. } | Sending::Sent)
}
