//! The two QEMUs: their copies of the VM, its disks, and the stream between them.

use crate::faults::Fault;
use crate::libvirt::By;
use crate::planted::Planted;
use crate::world::{Host, Sight, World};

/// How often QEMU runs into a missing page while it holds the lock that every answer needs.
const WAITS_FOR_PAGE_PERCENT: u64 = 50;

/// How often the target's QEMU notices at once that a connection has broken.
const NOTICES_PERCENT: u64 = 50;

/// How long the last bytes from a source may be on their way.
const LAST_BYTES_MS_MAX: u64 = 2_500;

/// How often the target's QEMU is too busy to answer then, and for how long.
const MUTE_AT_LAST_PERCENT: u64 = 50;
const MUTE_AT_LAST_MS: f64 = 10_000.0;

/// A copy of the VM in a QEMU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy {
    pub runs: bool,
    pub has_disks: bool,
    /// Grows as the VM runs: two copies with the same number are identical.
    pub memory: u64,
}

/// How far a source's QEMU has come with sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sending {
    Idle,
    Active,
    PreSwitchover,
    /// It may send the rest, but gives the disks up first.
    Device {
        has_disks: bool,
    },
    /// Everything has arrived, but the source has not noticed yet.
    Sent,
    /// With post-copy: what the VM needs to run has arrived, and QEMU is about to check its connection for the last
    /// time. If that is broken, its migration has failed.
    LastLook,
    /// With post-copy: the rest follows. The VM never runs here again.
    Rest,
    /// With post-copy: the rest was to follow, but the connection is broken.
    Interrupted,
    /// All of the rest was sent. QEMU waits for its target's last message, and will not connect again.
    LastWord,
    Completed,
    Failed,
    Cancelled,
}

/// A command that may reach a mute QEMU, which carries it out when it answers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Migrate { migration: usize },
    BeginPostCopy,
    Continue,
    Cancel,
    LetRun,
}

/// Whether a guest may write to its disks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    Free,
    /// The guest's writes are held back.
    Held,
}

#[derive(Debug)]
pub(crate) struct SourceQemu {
    pub copy: Copy,
    pub sending: Sending,
    /// The migration for which QEMU sends.
    pub migration: usize,
    pub is_post_copy: bool,
    pub mute_until_ms: Option<f64>,
    /// The VM's vCPUs are held back, which needs no answer from QEMU.
    pub is_throttled: bool,
    pub writes: Writes,
    /// Whether QEMU lets the VM run again if its migration fails: true if the VM ran when QEMU stopped it.
    runs_on: bool,
    pub unread: Vec<Command>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncomingStage {
    Built,
    Listening,
    /// With post-copy: the VM has what it needs to run.
    Enough,
    /// A domain: everything has arrived, but libvirt has not taken the last of it.
    Unfinished,
    Complete,
    Broken,
}

/// With post-copy: whether what the VM needs to run came before the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    No,
    Yes,
    /// QEMU waits for a page while it holds the lock that every answer needs, except out of band.
    WaitsForPage,
}

/// With post-copy: how the rest arrives, as far as the target's QEMU knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Whole,
    Broken,
    /// QEMU listens for a new connection.
    Awaited,
}

#[derive(Debug)]
pub(crate) struct TargetQemu {
    pub copy: Copy,
    pub stage: IncomingStage,
    pub migration: usize,
    pub mute_until_ms: Option<f64>,
    pub parts: Parts,
    pub rest_comes_by: Stream,
    /// When the last bytes arrive that the source sent before it failed.
    last_bytes_at_ms: Option<f64>,
    has_unread_run: bool,
    /// It refuses to let the VM run.
    has_refused: bool,
    /// For a domain: the life of libvirt in which it arrives.
    pub prepared_in: u32,
    /// For a domain: what has become of the last of it.
    pub last: Last,
    /// For a domain: whether libvirt still takes the last of it, for an agent that waits no more.
    pub finishes_late: bool,
    /// For a domain: what its owner has done about it.
    pub owner: Owner,
}

/// What a domain's owner has done on its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Idle,
    /// He waits for libvirt to let him resume it.
    Waits,
    /// It runs because he has resumed it.
    LetItRun,
}

/// What has become of the last of a domain, which libvirt takes in Finish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    ToCome,
    /// The agent has it. It ends with the agent.
    Kept,
    /// libvirt was told to take it.
    Taken,
    /// The same, and libvirt has not said that it did.
    Unsaid,
}

impl Last {
    /// Whether others may let the domain run.
    pub(crate) fn may_be_taken(self) -> bool {
        matches!(self, Self::Taken | Self::Unsaid)
    }
}

/// What comes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    Refused,
    /// No answer; the command may still take effect.
    None,
    /// That QEMU has ended.
    Gone,
}

impl IncomingStage {
    /// Whether what has arrived suffices for the VM to run.
    pub(crate) fn suffices(self) -> bool {
        matches!(self, Self::Enough | Self::Complete)
    }
}

impl TargetQemu {
    fn answers(&self) -> bool {
        self.mute_until_ms.is_none() && self.parts != Parts::WaitsForPage
    }

    /// Whether it learns of a broken connection. It does not before it has read everything that came over that.
    fn is_noticed_by(&self, is_noticed: bool) -> bool {
        is_noticed && self.stage == IncomingStage::Enough && self.last_bytes_at_ms.is_none()
    }

    /// Whether it takes commands out of band.
    pub(crate) fn takes_out_of_band(&self) -> bool {
        self.mute_until_ms.is_none()
    }
}

impl SourceQemu {
    /// A QEMU that has just booted the VM.
    pub(crate) fn booted(memory: u64) -> Self {
        Self {
            copy: Copy { runs: true, has_disks: true, memory },
            sending: Sending::Idle,
            migration: 0,
            is_post_copy: false,
            mute_until_ms: None,
            is_throttled: false,
            writes: Writes::Free,
            runs_on: true,
            unread: vec![],
        }
    }
}

impl World {
    /// With each moment that it runs, the VM's state changes.
    pub(crate) fn guests_go_on(&mut self) {
        let source = self.source.qemu.as_mut().map(|qemu| &mut qemu.copy);
        let target = self.target.qemu.as_mut().map(|qemu| &mut qemu.copy);
        for copy in [source, target].into_iter().flatten().filter(|copy| copy.runs) {
            copy.memory += 1;
            self.newest = self.newest.max(copy.memory);
        }
    }

    /// Whether the VM's newest state exists anywhere.
    pub(crate) fn has_newest(&self) -> bool {
        let at_target = self.target.qemu.as_ref().filter(|qemu| qemu.stage.suffices());
        let copies = [self.source.qemu.as_ref().map(|qemu| qemu.copy), at_target.map(|qemu| qemu.copy)];
        copies.into_iter().flatten().any(|copy| copy.memory == self.newest)
    }

    /// Whether the VM is split: its source has a part and cannot run it any more, and its target has the rest.
    pub(crate) fn is_in_parts(&self) -> bool {
        let sends = |sending| matches!(sending, Sending::Rest | Sending::Interrupted | Sending::LastWord);
        let is_at_target = self.target.qemu.as_ref().is_some_and(|qemu| qemu.stage == IncomingStage::Enough);
        is_at_target && self.source.qemu.as_ref().is_some_and(|qemu| sends(qemu.sending))
    }

    /// Whether all of the VM has come to its target by post-copy. No source can run it after that.
    fn came_whole_in_parts(&self) -> bool {
        let is_sent = self.source.qemu.as_ref().is_some_and(|qemu| qemu.sending == Sending::Completed);
        is_sent && self.target.qemu.as_ref().is_some_and(|qemu| qemu.parts != Parts::No)
    }

    pub(crate) fn copy_at(&self, host: Host) -> Option<Copy> {
        match host {
            Host::Source => self.source.qemu.as_ref().map(|qemu| qemu.copy),
            Host::Target => self.target.qemu.as_ref().map(|qemu| qemu.copy),
        }
    }

    fn copy_mut(&mut self, host: Host) -> Option<&mut Copy> {
        match host {
            Host::Source => self.source.qemu.as_mut().map(|qemu| &mut qemu.copy),
            Host::Target => self.target.qemu.as_mut().map(|qemu| &mut qemu.copy),
        }
    }

    pub(crate) fn let_run(&mut self, host: Host) {
        let Some(copy) = self.copy_at(host).filter(|copy| !copy.runs) else { return };
        if self.copy_at(host.other()).is_some_and(|other| other.runs) {
            self.breach("I1: two copies run".into());
        }
        if host == Host::Target && self.source.has_left_no_trace() {
            self.newest = copy.memory;
        }
        if copy.memory != self.newest {
            self.breach(format!("I4: {host:?} runs what the VM was, not what it is"));
        }
        if host == Host::Target {
            self.take_disk(copy.memory);
        }
        if let Some(copy) = self.copy_mut(host) {
            (copy.runs, copy.has_disks) = (true, true);
        }
    }

    fn is_mute(&self, host: Host) -> bool {
        match host {
            _ if self.is_libvirt_mute(host) => true,
            Host::Source => {
                let is_mute = self.source.qemu.as_ref().is_some_and(|qemu| qemu.mute_until_ms.is_some());
                is_mute || self.waits_for_target()
            }
            Host::Target => self.target.qemu.as_ref().is_some_and(|qemu| !qemu.answers()),
        }
    }

    /// While QEMU sends the last bytes, it holds its lock, and answers nothing until somebody takes them.
    pub(crate) fn waits_for_target(&self) -> bool {
        let is_parted = self.now_ms < self.network.parted_until_ms;
        let sends_rest =
            self.source.qemu.as_ref().is_some_and(|qemu| matches!(qemu.sending, Sending::Device { .. }));
        is_parted && sends_rest
    }

    /// Whether this host has a QEMU that answers.
    pub(crate) fn answers(&self, host: Host) -> bool {
        self.copy_at(host).is_some() && !self.is_mute(host)
    }

    pub(crate) fn command_source(&mut self, command: Command) -> Reply {
        self.command_source_by(command, By::Agent)
    }

    pub(crate) fn command_source_by(&mut self, command: Command, by: By) -> Reply {
        if let Some(reply) = self.command_domain(command, by) {
            return reply;
        }
        // Callers who first ask QEMU something never send the command itself.
        let asks_first =
            matches!(command, Command::Migrate { .. } | Command::LetRun) && self.random.chance(50);
        let Some(qemu) = &mut self.source.qemu else { return Reply::Gone };
        if qemu.mute_until_ms.is_some() {
            if !asks_first {
                qemu.unread.push(command);
            }
            return Reply::None;
        }
        self.obey(command)
    }

    pub(crate) fn obey(&mut self, command: Command) -> Reply {
        let Some(qemu) = &mut self.source.qemu else { return Reply::Gone };
        match (command, qemu.sending) {
            (
                Command::Migrate { migration },
                Sending::Idle | Sending::Failed | Sending::Cancelled | Sending::Completed,
            ) => {
                (qemu.sending, qemu.migration, qemu.is_post_copy) = (Sending::Active, migration, false);
                qemu.runs_on = true;
            }
            (Command::BeginPostCopy, Sending::Active) => {
                qemu.is_post_copy = true;
                // The agent stops the VM before QEMU does.
                let is_left_to_qemu = self.planted == Planted::StoppedByHypervisor;
                (qemu.copy.runs, qemu.runs_on) = (is_left_to_qemu, is_left_to_qemu);
            }
            (Command::Continue, Sending::PreSwitchover) => qemu.sending = Sending::Device { has_disks: true },
            (Command::Cancel, Sending::Active) => self.stop_sending(Sending::Cancelled),
            (Command::Cancel, Sending::PreSwitchover | Sending::Device { .. } | Sending::Sent) => {
                self.stop_sending(Sending::Cancelled);
                self.run_on();
            }
            (Command::Cancel, _) => {}
            (Command::LetRun, Sending::Device { .. } | Sending::Sent) => return Reply::None,
            (Command::LetRun, Sending::PreSwitchover) => {
                self.breach("I4: the VM is let run while it is about to be sent".into());
            }
            (
                Command::LetRun,
                Sending::LastLook | Sending::Rest | Sending::Interrupted | Sending::LastWord,
            )
            | (Command::Migrate { .. } | Command::BeginPostCopy | Command::Continue, _) => {
                return Reply::Refused;
            }
            (Command::LetRun, _) => self.let_run(Host::Source),
        }
        Reply::Done
    }

    /// Lets the VM run, as a source's QEMU does once its migration has failed or was cancelled.
    fn run_on(&mut self) {
        if self.source.qemu.as_ref().is_some_and(|qemu| qemu.runs_on) {
            self.let_run(Host::Source);
        }
    }

    fn stop_sending(&mut self, end: Sending) {
        let is_noticed = self.random.chance(NOTICES_PERCENT);
        if let Some(qemu) = &mut self.source.qemu {
            qemu.sending = end;
        }
        if let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.is_noticed_by(is_noticed)) {
            qemu.rest_comes_by = Stream::Broken;
        }
        if let Some(qemu) = &mut self.target.qemu
            && qemu.stage == IncomingStage::Listening
        {
            qemu.stage = IncomingStage::Broken;
        }
    }

    /// Lets the target's copy run, if it has all that it needs.
    pub(crate) fn command_target(&mut self) -> Reply {
        let refuses = self.faults.meets(Fault::RunRefused, &mut self.random);
        let sends_first = self.random.chance(50);
        let waits = self.random.chance(WAITS_FOR_PAGE_PERCENT);
        let (is_lost, is_mute) = (self.is_run_lost(), self.is_libvirt_mute(Host::Target));
        let Some(qemu) = &mut self.target.qemu else { return Reply::Gone };
        if is_mute || !qemu.answers() {
            qemu.has_unread_run |= sends_first && !is_lost;
            return Reply::None;
        }
        let is_there = qemu.stage.suffices() || self.planted == Planted::RunsIncomplete;
        if !qemu.copy.runs && (refuses || !is_there) {
            qemu.has_refused = true;
            self.is_lost |= self.source.is_copy_lost;
            return Reply::Refused;
        }
        // QEMU's main thread may run into a missing page before it has let the VM run, or a vCPU may afterwards.
        let is_first = !qemu.copy.runs && qemu.stage == IncomingStage::Enough;
        if is_first && waits {
            (qemu.parts, qemu.has_unread_run) = (Parts::WaitsForPage, sends_first);
            self.saw(Sight::RunsMute);
            if !sends_first {
                self.let_run(Host::Target);
            }
            return Reply::None;
        }
        self.let_run(Host::Target);
        self.is_agents_order();
        Reply::Done
    }

    /// The page that QEMU waits for arrives.
    fn page_arrives(&mut self) {
        let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.parts == Parts::WaitsForPage) else {
            return;
        };
        qemu.parts = Parts::Yes;
        if qemu.mute_until_ms.is_none() {
            self.answers_again(Host::Target);
        }
    }

    /// QEMU answers again; whoever waits for libvirt goes on waiting.
    pub(crate) fn is_mute_no_more(&mut self, host: Host) {
        if !self.is_libvirt_mute(host) {
            return self.answers_again(host);
        }
        match host {
            Host::Source => self.source.qemu.iter_mut().for_each(|qemu| qemu.mute_until_ms = None),
            Host::Target => self.target.qemu.iter_mut().for_each(|qemu| qemu.mute_until_ms = None),
        }
    }

    /// What was sent to it meanwhile takes effect now, in order.
    pub(crate) fn answers_again(&mut self, host: Host) {
        match host {
            Host::Source => {
                let Some(qemu) = &mut self.source.qemu else { return };
                qemu.mute_until_ms = None;
                for command in std::mem::take(&mut qemu.unread) {
                    self.obey(command);
                }
            }
            Host::Target => {
                let Some(qemu) = &mut self.target.qemu else { return };
                qemu.mute_until_ms = None;
                if std::mem::take(&mut qemu.finishes_late) {
                    self.finish_late();
                }
                let Some(qemu) = &mut self.target.qemu else { return };
                if qemu.parts != Parts::WaitsForPage && std::mem::take(&mut qemu.has_unread_run) {
                    self.saw(Sight::LateCommand);
                    self.command_target();
                }
            }
        }
    }

    /// Whether a QEMU now does something by itself.
    pub(crate) fn stream_flows(&self) -> bool {
        let sends = |sending| {
            matches!(
                sending,
                Sending::Active
                    | Sending::Device { .. }
                    | Sending::Sent
                    | Sending::LastLook
                    | Sending::Rest
                    | Sending::LastWord
            )
        };
        let parted = self.now_ms < self.network.parted_until_ms;
        self.source.qemu.as_ref().is_some_and(|qemu| sends(qemu.sending)) && !parted
    }

    /// Takes the next step of the stream.
    pub(crate) fn stream(&mut self) {
        let (is_in_parts, vm_is_busy) = (self.is_in_parts(), self.is_busy());
        let has_enough = self.target.qemu.as_ref().is_some_and(|qemu| qemu.stage == IncomingStage::Enough);
        let Some(qemu) = &mut self.source.qemu else { return };
        let is_there = self.target.qemu.as_ref().is_some_and(|target| {
            target.migration == qemu.migration && target.stage == IncomingStage::Listening
        });
        match qemu.sending {
            Sending::Sent => qemu.sending = Sending::Completed,
            Sending::Active | Sending::Device { .. } if !is_there => self.break_stream(),
            Sending::Active => {
                let is_busy = vm_is_busy && !qemu.is_post_copy;
                qemu.migration_goes_on(self.random.below(1_000) < if is_busy { 3 } else { 200 });
            }
            // The source gives the disks up before its last byte, or else the target could not have them.
            Sending::Device { has_disks: true } => {
                qemu.copy.has_disks = false;
                qemu.sending = Sending::Device { has_disks: false };
            }
            Sending::Device { has_disks: false } if qemu.is_post_copy => self.enough_arrives(),
            Sending::Device { has_disks: false } => self.all_arrives(),
            Sending::LastLook if !has_enough => self.break_stream(),
            // Meanwhile its thread waits for a core.
            Sending::LastLook if self.random.chance(80) => {}
            Sending::LastLook => qemu.sending = Sending::Rest,
            Sending::Rest | Sending::LastWord if !is_in_parts => self.break_stream(),
            Sending::Rest if self.random.chance(4) => qemu.sending = Sending::LastWord,
            Sending::LastWord if self.faults.meets(Fault::LastWordBreaks, &mut self.random) => {
                self.break_stream();
            }
            Sending::LastWord if self.random.chance(10) => self.rest_arrives(),
            Sending::Rest | Sending::LastWord => self.page_arrives(),
            _ => {}
        }
    }

    fn all_arrives(&mut self) {
        let is_domain = self.is_domain();
        let (Some(source), Some(target)) = (&mut self.source.qemu, &mut self.target.qemu) else { return };
        source.sending = Sending::Sent;
        target.stage = if is_domain { IncomingStage::Unfinished } else { IncomingStage::Complete };
        target.copy.memory = source.copy.memory;
        target.copy.has_disks |= self.planted == Planted::TakesDisksEarly;
    }

    fn enough_arrives(&mut self) {
        let fails = self.faults.meets(Fault::FailsWhenSent, &mut self.random);
        self.all_arrives();
        let (Some(source), Some(target)) = (&mut self.source.qemu, &mut self.target.qemu) else { return };
        (target.stage, target.parts) = (IncomingStage::Enough, Parts::Yes);
        source.sending = if fails { Sending::Failed } else { Sending::LastLook };
        self.saw(Sight::PostCopy);
        if fails {
            self.run_on();
        }
    }

    fn rest_arrives(&mut self) {
        if let Some(source) = &mut self.source.qemu {
            source.sending = Sending::Completed;
        }
        self.all_is_there();
    }

    fn all_is_there(&mut self) {
        if let Some(target) = &mut self.target.qemu {
            target.stage = IncomingStage::Complete;
        }
        self.page_arrives();
    }

    /// The bytes arrive that a source sent before it failed.
    pub(crate) fn last_bytes_arrive(&mut self) {
        let now_ms = self.now_ms;
        if let Some(target) = &mut self.target.qemu
            && target.last_bytes_at_ms.take_if(|at_ms| now_ms >= *at_ms).is_some()
        {
            if self.random.chance(MUTE_AT_LAST_PERCENT) {
                target.mute_until_ms = target.mute_until_ms.or(Some(now_ms + MUTE_AT_LAST_MS));
            }
            self.saw(Sight::LastBytesLate);
            self.all_is_there();
        }
    }

    /// Lets the source send the rest over a new connection; returns whether it could.
    pub(crate) fn reconnect(&mut self) -> bool {
        let is_parted = self.now_ms < self.network.parted_until_ms;
        let listens = |qemu: &TargetQemu| qemu.rest_comes_by == Stream::Awaited && qemu.takes_out_of_band();
        let is_listening = self.target.qemu.as_ref().is_some_and(listens);
        let connects = |qemu: &SourceQemu| matches!(qemu.sending, Sending::Rest | Sending::Interrupted);
        let may = !is_parted
            && self.is_in_parts()
            && self.source.qemu.as_ref().is_some_and(connects)
            && self.answers(Host::Source)
            && is_listening;
        if let (true, Some(source), Some(target)) = (may, &mut self.source.qemu, &mut self.target.qemu) {
            (source.sending, target.rest_comes_by) = (Sending::Rest, Stream::Whole);
            self.saw(Sight::Reconnected);
        }
        may
    }

    /// Cuts the connection as the target's QEMU does when asked out of band, while a part is still to come.
    pub(crate) fn cut_connection(&mut self) {
        let is_in_part =
            |qemu: &&mut TargetQemu| qemu.takes_out_of_band() && qemu.stage == IncomingStage::Enough;
        let Some(qemu) = self.target.qemu.as_mut().filter(is_in_part) else { return };
        let was_whole = std::mem::replace(&mut qemu.rest_comes_by, Stream::Broken) == Stream::Whole;
        if qemu.last_bytes_at_ms.take().is_some() {
            self.breach("I3: the last bytes of the VM came, and are cut off".into());
        }
        if was_whole {
            self.break_stream();
        }
    }

    /// A source's QEMU that cannot send lets the VM run again by itself. One that waits before the last part does not
    /// look at its connection.
    pub(crate) fn break_stream(&mut self) {
        let Some(qemu) = &self.source.qemu else { return };
        match qemu.sending {
            // It may already have sent everything that the target has a part of.
            Sending::Device { .. } if qemu.is_post_copy && self.random.chance(50) => {
                self.stop_sending(Sending::Interrupted);
                self.is_lost = true;
            }
            Sending::Active | Sending::Device { .. } | Sending::LastLook => {
                self.stop_sending(Sending::Failed);
                self.run_on();
            }
            Sending::LastWord => self.break_last_word(),
            Sending::Rest => {
                self.stop_sending(Sending::Interrupted);
                let comes_upon_a_page = self.random.chance(WAITS_FOR_PAGE_PERCENT);
                let runs_in_part =
                    |qemu: &&mut TargetQemu| qemu.copy.runs && qemu.stage == IncomingStage::Enough;
                if let Some(qemu) = self.target.qemu.as_mut().filter(runs_in_part)
                    && comes_upon_a_page
                {
                    qemu.parts = Parts::WaitsForPage;
                }
            }
            _ => {}
        }
    }

    /// The bytes on their way arrive, or do not.
    fn break_last_word(&mut self) {
        self.saw(Sight::LastWordLost);
        let arrives_ms = self.now_ms + self.random.below(LAST_BYTES_MS_MAX) as f64;
        let arrives = self.is_in_parts() && self.random.chance(50);
        if let Some(target) = self.target.qemu.as_mut().filter(|_| arrives) {
            target.last_bytes_at_ms = Some(arrives_ms);
        } else {
            self.is_lost = true;
        }
        self.stop_sending(Sending::Failed);
        self.run_on();
    }

    /// Builds the target's QEMU, which waits for state, and for its source to say where.
    pub(crate) fn build_incoming_vm(&mut self, migration: usize) {
        self.target.qemu = Some(TargetQemu {
            copy: Copy { runs: false, has_disks: false, memory: 0 },
            stage: IncomingStage::Built,
            migration,
            mute_until_ms: None,
            parts: Parts::No,
            rest_comes_by: Stream::Whole,
            last_bytes_at_ms: None,
            has_unread_run: false,
            has_refused: false,
            prepared_in: 0,
            last: Last::ToCome,
            finishes_late: false,
            owner: Owner::Idle,
        });
    }

    /// A QEMU ends by itself, or with its host.
    pub(crate) fn lose(&mut self, host: Host) {
        let Some(copy) = self.copy_at(host) else { return };
        let ran_unseen = host == Host::Target && copy.runs && self.may_go_back();
        let is_in_parts = self.is_in_parts();
        // Before the hand-over the VM is the source's; after it, the target's, once it may run there. What the target
        // has but cannot run is given up for what the source has.
        let held_it = match host {
            // The source holds the rest of what the target has.
            Host::Source
                if self.source.qemu.as_ref().is_some_and(|qemu| {
                    qemu.is_post_copy && matches!(qemu.sending, Sending::LastLook | Sending::Failed)
                }) =>
            {
                true
            }
            Host::Source => {
                self.source.is_copy_lost = true;
                let has_refused = self.target.qemu.as_ref().is_some_and(|qemu| qemu.has_refused);
                let is_handed_over = self.source.has_handed_over_in_time();
                !is_handed_over || copy.runs || self.source.has_given_up_target || has_refused
            }
            Host::Target => copy.runs || self.target.may_have_run() || self.came_whole_in_parts(),
        };
        match host {
            Host::Source => self.source.qemu = None,
            Host::Target => self.target.qemu = None,
        }
        self.is_lost |= held_it || is_in_parts || !self.has_newest();
        if ran_unseen {
            self.forget_that_it_ran();
        }
    }
}

impl SourceQemu {
    fn migration_goes_on(&mut self, is_nearly_over: bool) {
        if is_nearly_over {
            self.copy.runs = false;
            self.sending = Sending::PreSwitchover;
        }
    }
}
