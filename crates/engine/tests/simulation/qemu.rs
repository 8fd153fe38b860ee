//! The two QEMUs: their copies of the VM, its disks, and the stream between them.

use crate::faults::Fault;
use crate::libvirt::By;
use crate::planted::Planted;
use crate::world::{Host, Sight, World};

/// How often QEMU comes upon a missing page with the lock that every answer needs.
const WAITS_FOR_PAGE_PERCENT: u64 = 50;

/// How often the target's QEMU notices at once that a connection is broken.
const NOTICES_PERCENT: u64 = 50;

/// How long what a source sent last may be on its way.
const LAST_BYTES_MS_MAX: u64 = 2_500;

/// How often the target's QEMU has no time to answer then, and for how long.
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

/// How far a source's QEMU is with sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sending {
    Idle,
    Active,
    PreSwitchover,
    /// It may send the rest, and gives the disks up first.
    Device {
        has_disks: bool,
    },
    /// All is there, and it has not noticed yet.
    Sent,
    /// With post-copy: what the VM needs to run is there, and QEMU is about to look at its connection for the last time.
    /// If that is broken, its migration has failed.
    LastLook,
    /// With post-copy: the rest follows. It never runs here again.
    Rest,
    /// And the connection is broken.
    Interrupted,
    /// All of the rest was sent. QEMU waits for what its target says last, and does not connect again.
    LastWord,
    Completed,
    Failed,
    Cancelled,
}

/// What a QEMU that does not answer finds when it does again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Migrate { migration: usize },
    BeginPostCopy,
    Continue,
    Cancel,
    LetRun,
}

/// What a guest may write to its disks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    Free,
    /// They are held back.
    Held,
}

#[derive(Debug)]
pub(crate) struct SourceQemu {
    pub copy: Copy,
    pub sending: Sending,
    /// The migration for which it sends.
    pub migration: usize,
    pub is_post_copy: bool,
    pub mute_until_ms: Option<f64>,
    /// Its vCPUs are held back. That needs no answer of it.
    pub is_throttled: bool,
    pub writes: Writes,
    /// A migration that fails leaves the VM as it was before QEMU stopped it.
    runs_on: bool,
    pub unread: Vec<Command>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrival {
    Built,
    Listening,
    /// With post-copy: what the VM needs to run.
    Enough,
    /// Of a domain: all is there, and libvirt has not taken the last of it.
    Unfinished,
    Complete,
    Broken,
}

/// Whether what the VM needs to run came before the rest, with post-copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parts {
    No,
    Yes,
    /// It waits for a page with the lock that every answer needs, but for what is out of band.
    WaitsForPage,
}

/// How the rest comes, with post-copy, as far as the target's QEMU knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stream {
    Whole,
    Broken,
    /// It listens for another one.
    Awaited,
}

#[derive(Debug)]
pub(crate) struct TargetQemu {
    pub copy: Copy,
    pub arrival: Arrival,
    pub migration: usize,
    pub mute_until_ms: Option<f64>,
    pub parts: Parts,
    pub rest_comes_by: Stream,
    /// All of the rest is on its way since its source has failed.
    last_bytes_at_ms: Option<f64>,
    has_unread_run: bool,
    /// It does not let the VM run.
    has_refused: bool,
    /// Of a domain: in which life of libvirt it has come.
    pub prepared_in: u32,
    /// And its agent has noted that it is whole.
    pub is_noted: bool,
}

/// What comes of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    Refused,
    /// No answer, and it may still take effect.
    None,
    /// There is no such QEMU any more.
    Gone,
}

impl Arrival {
    /// Whether the VM can run.
    pub(crate) fn suffices(self) -> bool {
        matches!(self, Self::Enough | Self::Complete)
    }
}

impl TargetQemu {
    fn answers(&self) -> bool {
        self.mute_until_ms.is_none() && self.parts != Parts::WaitsForPage
    }

    /// Whether it hears of a broken connection: not before it has read what came by that.
    fn is_noticed_by(&self, is_noticed: bool) -> bool {
        is_noticed && self.arrival == Arrival::Enough && self.last_bytes_at_ms.is_none()
    }

    /// Whether it takes what is out of band.
    pub(crate) fn takes_out_of_band(&self) -> bool {
        self.mute_until_ms.is_none()
    }
}

impl SourceQemu {
    /// Booted just now.
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
    /// Each moment that it runs, the VM becomes another one.
    pub(crate) fn guests_go_on(&mut self) {
        let source = self.source.qemu.as_mut().map(|qemu| &mut qemu.copy);
        let target = self.target.qemu.as_mut().map(|qemu| &mut qemu.copy);
        for copy in [source, target].into_iter().flatten().filter(|copy| copy.runs) {
            copy.memory += 1;
            self.newest = self.newest.max(copy.memory);
        }
    }

    /// Whether the VM as it is, and not as it was, is anywhere.
    pub(crate) fn has_newest(&self) -> bool {
        let at_target = self.target.qemu.as_ref().filter(|qemu| qemu.arrival.suffices());
        let copies = [self.source.qemu.as_ref().map(|qemu| qemu.copy), at_target.map(|qemu| qemu.copy)];
        copies.into_iter().flatten().any(|copy| copy.memory == self.newest)
    }

    /// Whether a part of the VM is at its source, which cannot run it any more, and the rest at its target.
    pub(crate) fn is_in_parts(&self) -> bool {
        let sends = |sending| matches!(sending, Sending::Rest | Sending::Interrupted | Sending::LastWord);
        let is_at_target = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival == Arrival::Enough);
        is_at_target && self.source.qemu.as_ref().is_some_and(|qemu| sends(qemu.sending))
    }

    /// Whether all of the VM came to its target by post-copy, after which no source runs it.
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

    /// It holds its lock while it sends the last bytes, and answers nothing where nobody takes them.
    pub(crate) fn waits_for_target(&self) -> bool {
        let is_parted = self.now_ms < self.network.parted_until_ms;
        let sends_rest =
            self.source.qemu.as_ref().is_some_and(|qemu| matches!(qemu.sending, Sending::Device { .. }));
        is_parted && sends_rest
    }

    /// Whether there is one, and it answers.
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
        // Those that it is asked something first never send the command itself.
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
                // Stopped before QEMU stops it.
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

    /// What a source's QEMU does once its migration has failed, or was cancelled.
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
            && qemu.arrival == Arrival::Listening
        {
            qemu.arrival = Arrival::Broken;
        }
    }

    /// Lets the target's copy run, if all of it is there.
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
        let is_there = qemu.arrival.suffices() || self.planted == Planted::RunsIncomplete;
        if !qemu.copy.runs && (refuses || !is_there) {
            qemu.has_refused = true;
            self.is_lost |= self.source.is_copy_lost;
            return Reply::Refused;
        }
        // Its main thread may come upon a missing page before it has let the VM run, or a vCPU after it.
        let is_first = !qemu.copy.runs && qemu.arrival == Arrival::Enough;
        if is_first && waits {
            (qemu.parts, qemu.has_unread_run) = (Parts::WaitsForPage, sends_first);
            self.saw(Sight::RunsMute);
            if !sends_first {
                self.let_run(Host::Target);
            }
            return Reply::None;
        }
        self.let_run(Host::Target);
        Reply::Done
    }

    /// Pages arrive.
    fn page_arrives(&mut self) {
        let Some(qemu) = self.target.qemu.as_mut().filter(|qemu| qemu.parts == Parts::WaitsForPage) else {
            return;
        };
        qemu.parts = Parts::Yes;
        if qemu.mute_until_ms.is_none() {
            self.answers_again(Host::Target);
        }
    }

    /// Whoever waits for libvirt goes on waiting.
    pub(crate) fn is_mute_no_more(&mut self, host: Host) {
        if !self.is_libvirt_mute(host) {
            return self.answers_again(host);
        }
        match host {
            Host::Source => self.source.qemu.iter_mut().for_each(|qemu| qemu.mute_until_ms = None),
            Host::Target => self.target.qemu.iter_mut().for_each(|qemu| qemu.mute_until_ms = None),
        }
    }

    /// What was sent to it meanwhile takes effect now, in its order.
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
                if qemu.parts != Parts::WaitsForPage && std::mem::take(&mut qemu.has_unread_run) {
                    self.saw(Sight::LateCommand);
                    self.command_target();
                }
            }
        }
    }

    /// Whether a QEMU does something by itself now.
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

    /// The next thing that happens to the stream.
    pub(crate) fn stream(&mut self) {
        let (is_in_parts, vm_is_busy) = (self.is_in_parts(), self.is_busy());
        let has_enough = self.target.qemu.as_ref().is_some_and(|qemu| qemu.arrival == Arrival::Enough);
        let Some(qemu) = &mut self.source.qemu else { return };
        let is_there =
            self.target.qemu.as_ref().is_some_and(|target| {
                target.migration == qemu.migration && target.arrival == Arrival::Listening
            });
        match qemu.sending {
            Sending::Sent => qemu.sending = Sending::Completed,
            Sending::Active | Sending::Device { .. } if !is_there => self.break_stream(),
            Sending::Active => {
                let is_busy = vm_is_busy && !qemu.is_post_copy;
                qemu.migration_goes_on(self.random.below(1_000) < if is_busy { 3 } else { 200 });
            }
            // Before its last byte: else the other end could not have them.
            Sending::Device { has_disks: true } => {
                qemu.copy.has_disks = false;
                qemu.sending = Sending::Device { has_disks: false };
            }
            Sending::Device { has_disks: false } if qemu.is_post_copy => self.enough_arrives(),
            Sending::Device { has_disks: false } => self.all_arrives(),
            Sending::LastLook if !has_enough => self.break_stream(),
            // Its thread waits for a core meanwhile.
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
        target.arrival = if is_domain { Arrival::Unfinished } else { Arrival::Complete };
        target.copy.memory = source.copy.memory;
        target.copy.has_disks |= self.planted == Planted::TakesDisksEarly;
    }

    fn enough_arrives(&mut self) {
        let fails = self.faults.meets(Fault::FailsWhenSent, &mut self.random);
        self.all_arrives();
        let (Some(source), Some(target)) = (&mut self.source.qemu, &mut self.target.qemu) else { return };
        (target.arrival, target.parts) = (Arrival::Enough, Parts::Yes);
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
            target.arrival = Arrival::Complete;
        }
        self.page_arrives();
    }

    /// What a source has sent before it failed arrives.
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

    /// By a new connection.
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

    /// By who asks the target's QEMU for it, out of band, while a part is to come.
    pub(crate) fn cut_connection(&mut self) {
        let is_in_part = |qemu: &&mut TargetQemu| qemu.takes_out_of_band() && qemu.arrival == Arrival::Enough;
        let Some(qemu) = self.target.qemu.as_mut().filter(is_in_part) else { return };
        let was_whole = std::mem::replace(&mut qemu.rest_comes_by, Stream::Broken) == Stream::Whole;
        if qemu.last_bytes_at_ms.take().is_some() {
            self.breach("I3: the last bytes of the VM came, and are cut off".into());
        }
        if was_whole {
            self.break_stream();
        }
    }

    /// A source's QEMU that cannot send lets the VM run by itself, but for one that waits before the last part: it
    /// does not look.
    pub(crate) fn break_stream(&mut self) {
        let Some(qemu) = &self.source.qemu else { return };
        match qemu.sending {
            // It may have sent all of what the target has got a part of.
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
                let runs_in_part = |qemu: &&mut TargetQemu| qemu.copy.runs && qemu.arrival == Arrival::Enough;
                if let Some(qemu) = self.target.qemu.as_mut().filter(runs_in_part)
                    && comes_upon_a_page
                {
                    qemu.parts = Parts::WaitsForPage;
                }
            }
            _ => {}
        }
    }

    /// What is on its way arrives, or does not.
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

    /// A target's QEMU that waits for state, and for its source to say where.
    pub(crate) fn build_incoming_vm(&mut self, migration: usize) {
        self.target.qemu = Some(TargetQemu {
            copy: Copy { runs: false, has_disks: false, memory: 0 },
            arrival: Arrival::Built,
            migration,
            mute_until_ms: None,
            parts: Parts::No,
            rest_comes_by: Stream::Whole,
            last_bytes_at_ms: None,
            has_unread_run: false,
            has_refused: false,
            prepared_in: 0,
            is_noted: false,
        });
    }

    /// A QEMU ends, or is ended with its host.
    pub(crate) fn lose(&mut self, host: Host) {
        let Some(copy) = self.copy_at(host) else { return };
        let is_in_parts = self.is_in_parts();
        // Before the hand-over the VM is the source's, and after it the target's, from when it may run there on. What
        // the target has, and cannot let run, is given up for what the source has.
        let held_it = match host {
            // The rest of what the target has.
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
