//! The VM's disk when the target cannot see the source's: its copy there, and who writes to it.
//!
//! A number stands for what the guest has written, in its memory and on its disk: a disk with memory's number lacks
//! nothing.

use drainpipe_engine::migration::timing;
use drainpipe_engine::migration::{SourceAction, SourceEvent};
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::storage::{CopyReason, DiskCopy, DiskImage, DiskName, DiskState};

use crate::executor::{Doing, Executor, failed};
use crate::milliseconds::ms;
use crate::network::Order;
use crate::planted::Planted;
use crate::qemu::Writes;
use crate::world::{Host, Life, Sight, World};

/// One run in this many has a disk that is copied.
const COPIES_ONE_IN: u64 = 3;

/// In one of this many of those runs, the transfer itself copies the disk, before memory.
const GOES_ALONG_ONE_IN: u64 = 4;

/// The looks until the whole disk has been copied once. If the VM writes as fast as the copy goes, as much remains to
/// be copied until its writes wait for the target.
const LOOKS: u64 = 3;

/// How much is copied between two looks.
const LOOK_BYTES: u64 = 1 << 20;

/// Of this many runs, two have a hypervisor that cannot make the VM's writes wait for the target: one where the VM
/// writes fast, and one where it does not.
const HOLDS_WRITES_OF: u64 = 24;
const HOLDS_WRITES: [u64; 2] = [16, 19];

/// The longest time that ending the copies may take.
const ENDED_WITHIN_MS: f64 = ms(timing::DISKS_END_WITHIN);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mirror {
    /// The copy follows the guest.
    Copying,
    /// As before, but all of it has been there once, and memory follows. No write of the guest waits.
    Following,
    /// As before, but the VM's writes may be held back. The number is that of the looks until everything is there.
    Held(u64),
    /// The guest's writes go to the target, too. The number is that of the looks until everything is there.
    Nearing(u64),
    /// No write of the guest is complete before it is at the target.
    Synchronised,
}

/// The copy of the disk at the target.
#[derive(Debug, Default)]
pub(crate) struct CopiedDisk {
    mirror: Option<Mirror>,
    /// Whether the target's QEMU lets the source write to it.
    is_open: bool,
    looks: u64,
    /// Its content, until the VM runs with it.
    content: Option<u64>,
}

impl CopiedDisk {
    /// A new, empty disk for a VM that may come.
    pub(crate) fn made() -> Self {
        Self { content: Some(0), ..Self::default() }
    }
}

impl World {
    fn copies_disks(&self) -> bool {
        self.seed % COPIES_ONE_IN == 1 && !self.hosts.allow_post_copy() && !self.is_domain()
    }

    /// Whether the transfer itself copies the disk, before memory.
    fn goes_along(&self) -> bool {
        self.copies_disks() && self.seed % (COPIES_ONE_IN * GOES_ALONG_ONE_IN) == 1
    }

    /// Whether the hypervisor cannot make the VM's writes wait for the target, but only hold them back.
    fn holds_writes(&self) -> bool {
        self.copies_disks() && HOLDS_WRITES.contains(&(self.seed % HOLDS_WRITES_OF))
    }

    /// The plan, with the copied disk.
    pub(crate) fn with_disks(&self, plan: Plan) -> Plan {
        if !self.copies_disks() {
            return plan;
        }
        let disk = DiskCopy {
            disk: DiskName::at(0).expect("there is a first one"),
            from: "/srv/web".into(),
            to: "/srv/web".into(),
            image: DiskImage::Raw,
            size_bytes: 1 << 20,
            allocated_bytes: 1 << 20,
            why: CopyReason::NotSeen,
            is_flattened: false,
            from_device: None,
        };
        Plan { disks: vec![disk], ..plan }
    }

    /// The copy goes through both agents: it breaks when one of them is down.
    pub(crate) fn disks_go_on(&mut self) {
        let is_cut = self.source.life == Life::Down || self.target.life == Life::Down;
        if self.target.qemu.is_none() {
            self.disk.is_open = false;
        }
        let memory = self.source.qemu.as_ref().map(|qemu| qemu.copy.memory);
        if is_cut || !self.disk.is_open || memory.is_none() {
            self.disk.mirror = None;
        }
        let is_parted = self.now_ms < self.network.parted_until_ms;
        if self.disk.mirror == Some(Mirror::Synchronised) && !is_parted {
            self.disk.content = memory;
        }
        // The agent does so for a VM that stays, once its QEMU answers.
        if self.source.life == Life::Up && self.source.executor.is_none() {
            self.let_writes_go();
        }
    }

    /// Lets the VM write as it likes. Has no effect while QEMU does not answer.
    pub(crate) fn let_writes_go(&mut self) {
        if self.answers(Host::Source)
            && self.planted != Planted::WritesStayHeld
            && let Some(qemu) = &mut self.source.qemu
        {
            qemu.writes = Writes::Free;
        }
    }

    /// Holds the VM's writes back if the engine wants it now.
    pub(crate) fn follow_write_limit(&mut self, executor: &Executor) {
        if executor.holds_writes()
            && self.answers(Host::Source)
            && let Some(qemu) = &mut self.source.qemu
        {
            qemu.writes = Writes::Held;
            self.saw(Sight::WritesHeld);
        }
    }

    /// The progress of the disks that the engine hears of while memory is sent.
    pub(crate) fn held_progress(&mut self) -> Option<SourceEvent> {
        matches!(self.disk.mirror, Some(Mirror::Held(_))).then(|| self.disk_progress())
    }

    pub(crate) fn open_disks(&mut self) {
        self.disk.is_open = self.copies_disks();
    }

    /// From then on nobody writes to the target's disk.
    pub(crate) fn close_disks(&mut self) -> Result<(), ProblemKind> {
        if !self.answers(Host::Target) {
            return Err(ProblemKind::Failed);
        }
        if self.planted != Planted::DisksLeftOpen {
            self.disk.is_open = false;
        }
        Ok(())
    }

    pub(crate) fn start_disk_copies(&mut self) -> Doing {
        if !self.answers(Host::Source) || !self.disk.is_open {
            return Doing::Happened(failed("the copy does not begin"));
        }
        self.disk.looks = 0;
        if self.goes_along() {
            return Doing::Happened(SourceEvent::DisksGoAlong);
        }
        self.disk.mirror = Some(Mirror::Copying);
        Doing::Happened(SourceEvent::Done)
    }

    /// The transfer begins, and with it the copy of a disk that it copies itself.
    pub(crate) fn begin_along(&mut self) {
        if self.goes_along() && self.answers(Host::Source) && self.disk.is_open {
            self.disk.mirror = Some(Mirror::Copying);
        }
    }

    /// The state of the disks while they are copied and memory is not sent yet.
    pub(crate) fn looks_at_disks(&mut self, executor: &Executor) -> Option<SourceEvent> {
        if !executor.has_disks() || executor.last_action() == SourceAction::AwaitTurn {
            return None;
        }
        let comes_first = self.goes_along() && self.disk.mirror == Some(Mirror::Copying);
        let is_alone = comes_first
            || matches!(
                executor.last_action(),
                SourceAction::StartDiskCopies | SourceAction::SynchroniseDisks
            );
        if self.source.qemu.is_none() || self.disk.mirror.is_none() && self.keeps_mirror() {
            return Some(SourceEvent::TransferFailed(Problem::failed("the copy has failed")));
        }
        is_alone.then(|| self.disk_progress())
    }

    fn keeps_mirror(&self) -> bool {
        self.planted != Planted::CopiesEndEarly
    }

    fn disk_progress(&mut self) -> SourceEvent {
        if !self.answers(Host::Source) {
            return SourceEvent::Tick;
        }
        if self.now_ms >= self.network.parted_until_ms {
            self.disk_goes_on();
        }
        let left = match self.disk.mirror {
            Some(Mirror::Copying) if self.writes_as_fast() => LOOKS,
            Some(Mirror::Copying) => LOOKS - self.disk.looks.min(LOOKS),
            Some(Mirror::Nearing(left) | Mirror::Held(left)) => left,
            Some(Mirror::Following | Mirror::Synchronised) | None => 0,
        };
        let is_mirrored = matches!(self.disk.mirror, Some(Mirror::Synchronised) | None);
        let begun = DiskState::begun(DiskName::at(0).expect("there is a first one"));
        SourceEvent::DiskProgress(vec![DiskState {
            copied_bytes: self.disk.looks * LOOK_BYTES,
            total_bytes: (self.disk.looks + left) * LOOK_BYTES,
            is_ready: left == 0,
            is_synchronised: is_mirrored,
            ..begun
        }])
    }

    fn writes_as_fast(&self) -> bool {
        self.seed.is_multiple_of(2)
    }

    /// The copy advances by one look.
    fn disk_goes_on(&mut self) {
        self.disk.looks += 1;
        match self.disk.mirror {
            Some(Mirror::Copying) if self.goes_along() && self.disk.looks >= LOOKS => {
                self.disk.mirror = Some(Mirror::Following);
                self.saw(Sight::DisksWentAlong);
            }
            Some(Mirror::Nearing(0)) => {
                self.disk.content = self.source.qemu.as_ref().map(|qemu| qemu.copy.memory);
                self.disk.mirror = self.keeps_mirror().then_some(Mirror::Synchronised);
                self.saw(Sight::DisksCopied);
            }
            Some(Mirror::Nearing(left)) => self.disk.mirror = Some(Mirror::Nearing(left - 1)),
            Some(Mirror::Held(left)) => self.disk.mirror = Some(Mirror::Held(self.left_while_held(left))),
            _ => {}
        }
    }

    /// What is left at the next look. A VM that writes fast now and then leaves something even while its writes are
    /// held back.
    fn left_while_held(&mut self, left: u64) -> u64 {
        let is_held = self.source.qemu.as_ref().is_some_and(|qemu| qemu.writes == Writes::Held);
        match self.writes_as_fast() {
            true if is_held => left.saturating_sub(1).max(u64::from(self.random.chance(25))),
            true => LOOKS,
            false => left.saturating_sub(1),
        }
    }

    /// Called when the guard stands: from now on the VM depends on the copy.
    pub(crate) fn synchronise_disks(&mut self) -> Doing {
        if !self.answers(Host::Source) || self.disk.mirror.is_none() {
            return Doing::Happened(failed("the copy does not follow"));
        }
        let left = if self.writes_as_fast() { LOOKS } else { 0 };
        if left > 0 {
            self.saw(Sight::DisksOutpaced);
        }
        if self.holds_writes() {
            self.disk.mirror = Some(Mirror::Held(left));
            return Doing::Happened(SourceEvent::WritesHeldBack);
        }
        self.disk.mirror = Some(Mirror::Nearing(left));
        Doing::Happened(SourceEvent::Done)
    }

    /// Ends the copies at the source, and then at the target.
    pub(crate) fn end_disk_copies(&mut self) -> Doing {
        if matches!(self.planted, Planted::CopiesEndAfterRecord) {
            return Doing::Happened(SourceEvent::Done);
        }
        let is_parted = self.now_ms < self.network.parted_until_ms;
        let is_lost = self.disk.mirror.is_none() && self.keeps_mirror();
        if is_parted || is_lost || !self.answers(Host::Source) {
            let event = failed("the copy does not end");
            return Doing::Later { at_ms: self.now_ms + ENDED_WITHIN_MS, event };
        }
        if let Some(Mirror::Held(left @ 1..)) = self.disk.mirror
            && self.planted != Planted::HeldCopiesEndEarly
        {
            // The copy goes on until everything is there. What else may happen to it meanwhile is checked again each
            // time.
            self.disk.mirror = Some(Mirror::Held(left - 1));
            return Doing::Act(SourceAction::EndDiskCopies);
        }
        if let Some(mirror) = self.disk.mirror.take() {
            let memory = self.source.qemu.as_ref().map(|qemu| qemu.copy.memory);
            let left = if let Mirror::Held(left) = mirror { left } else { 0 };
            self.disk.content = memory.map(|memory| memory - left);
        }
        Doing::Rest(SourceAction::EndDiskCopies)
    }

    pub(crate) fn close_disks_there(&mut self, executor: &Executor) -> Doing {
        self.order(executor, SourceAction::EndDiskCopies, Order::CloseDisks)
    }

    /// Ends the copies as a guard does. The VM's writes are let go once it runs.
    pub(crate) fn cut_disk_copies(&mut self) {
        self.disk.mirror = None;
    }

    pub(crate) fn abandon_disk_copies(&mut self) {
        self.cut_disk_copies();
        self.let_writes_go();
    }

    /// Checks the rules about disks that hold at any time.
    pub(crate) fn check_disks(&mut self) {
        let runs_there = self.copy_at(Host::Target).is_some_and(|copy| copy.runs);
        if runs_there && self.disk.is_open {
            self.breach("I2: others may write to the disk of a VM that runs".into());
        }
        let Some(qemu) = &self.target.qemu else { return };
        if self.disk.mirror.is_some() && self.source.journal[qemu.migration].handed_over {
            self.breach("I2: the VM is handed over, and its disk is still copied".into());
        }
    }

    /// Called when the VM runs at the target for the first time.
    pub(crate) fn take_disk(&mut self, memory: u64) {
        let content = self.disk.content.take();
        if self.copies_disks() && content.is_some_and(|content| content != memory) {
            self.breach("I2: the VM runs with a disk that lacks what it has written".into());
        }
    }
}
