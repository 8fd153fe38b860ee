//! What a migration and its executor say to each other.

use crate::finding::Finding;
use crate::migration::progress::PathCounter;
use crate::paths::watch::PathNews;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::storage::DiskState;
use crate::transfer::transferred::Transferred;

/// Bounds of one migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// From the request to the hand-over, without the wait for its place at the target and for its turn. A
    /// migration that is not over by then is undone.
    pub total_ms: f64,
    /// Whether disks that are copied make that longer ([`crate::storage::allowance_ms`]).
    pub disks_take_longer: bool,
    /// How long it may wait for its place at the target and for its turn on the links. Who holds it ends that
    /// long before.
    pub held_ms: f64,
    /// How long a transfer may stand still.
    pub stall_ms: f64,
    /// How long the target is asked after the hand-over before the outcome is left in doubt.
    pub decision_ms: f64,
    /// Share of their time at most, in percent, for which the VM's CPUs are held back; 0 for never.
    pub throttle_percent: u8,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total_ms: 3_600_000.0,
            disks_take_longer: true,
            held_ms: 86_400_000.0,
            stall_ms: 60_000.0,
            decision_ms: 60_000.0,
            throttle_percent: 80,
        }
    }
}

/// What the executor is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceAction {
    /// Meet the target; make the plan. Answered by [`SourceEvent::Established`].
    EstablishHosts,
    /// May this caller move this VM there? Both hosts are asked. Answered by [`SourceEvent::Busy`] while the target
    /// takes no more VMs at a time: then the action is given again.
    CheckPermissions,
    /// Reserve memory on the target.
    AllocateMemory,
    /// Build the VM on the target, paused, waiting for state.
    BuildIncomingVm,
    /// Try the paths, prepare those that answer on both hosts; have the target listen. Answered by
    /// [`SourceEvent::Connected`].
    ConnectHosts,
    /// Wait for this migration's turn on the links. Answered by [`SourceEvent::Done`] when it has come, by
    /// [`SourceEvent::Tick`] while it has not: then the action is given again.
    AwaitTurn,
    /// Begin to copy the disks that the plan names. Answered by [`SourceEvent::Done`] at once, later by
    /// [`SourceEvent::DiskProgress`], also while memory is sent; or by [`SourceEvent::DisksGoAlong`].
    StartDiskCopies,
    /// All of each disk is there, or the VM writes as fast as they are copied: from now on a write of the VM is on both
    /// disks before the VM hears that it is done. Answered by [`SourceEvent::Done`] at once; by [`SourceEvent::DiskProgress`] once all
    /// is there and stays so. Or answered by [`SourceEvent::WritesHeldBack`].
    SynchroniseDisks,
    /// Begin to send. Answered by [`SourceEvent::Done`] at once, later by events of the transfer.
    StartTransfer,
    /// Have the rest of the memory follow once the VM runs on the target: the hypervisor pauses the VM, as
    /// [`SourceEvent::Paused`] reports.
    BeginPostCopy,
    /// The VM is paused: end the copies of its disks, with all there that was written, and have the target let nobody
    /// write to its own any more. Idempotent.
    EndDiskCopies,
    /// The VM is paused: send what is left, and with post-copy what it needs to run. Done when the target has received
    /// all of it.
    SwitchOver,
    /// Record durably that the VM belongs to the target from now on.
    RecordHandOver,
    /// Check what arrived; run the VM on the target. Idempotent.
    ResumeOnTarget,
    /// Has the source's hypervisor let go of the VM, as the journal says? Answered by [`SourceEvent::SourceSays`].
    AskSource,
    /// What has become of the VM there, by the target's journal? Answered by [`SourceEvent::TargetSays`].
    AskTarget,
    /// With post-copy: the connection is broken over which the rest of the memory goes. Make a new one.
    Reconnect,
    /// Have the target end its copy of the VM: the rest of its memory is lost.
    EndOnTarget,
    /// End the source's copy of the VM: it may have run on the target, so its memory here may be older than
    /// its disks.
    EndOnSource,
    /// Record durably that the VM belongs to the source after all.
    RevokeHandOver,
    /// End the source's copy of the VM; put the hosts' network back.
    CleanUp,
    /// Stop sending, memory and disks. Harmless when nothing is being sent.
    StopTransfer,
    /// Let the VM run on the source. Harmless when it does.
    ResumeOnSource,
    /// Have the target discard its copy, durably, so that it can never run.
    DiscardTarget,
    /// Put both hosts' network back.
    PutBack,
    /// All is undone: what is the VM doing on the source? Answered by [`SourceEvent::VmIs`].
    LookAtVm,
    /// It is over; nothing is under way.
    Finish,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceEvent {
    /// The action under way is done.
    Done,
    /// The action under way failed.
    Failed(Problem),
    /// [`SourceAction::StartDiskCopies`] is done, and the transfer copies the disks by itself, before memory: nothing is copied
    /// until it is begun.
    DisksGoAlong,
    /// [`SourceAction::SynchroniseDisks`] is done, and the hypervisor cannot have the VM's writes wait for the target: they are held
    /// back as [`Migration::write_limit`](super::Migration::write_limit) says.
    WritesHeldBack,
    /// [`SourceAction::EstablishHosts`] is done, with this plan.
    Established(Plan),
    /// [`SourceAction::ConnectHosts`] is done, with what is left of the plan.
    Connected(Plan),
    /// [`SourceAction::AskSource`] is done.
    SourceSays(SourceState),
    /// [`SourceAction::AskTarget`] is done.
    TargetSays(TargetState),
    /// [`SourceAction::LookAtVm`] is done.
    VmIs(VmCondition),
    /// The target takes no more VMs for now, for this reason.
    Busy(String),
    /// The transfer has come this far.
    Progress(Transferred, Vec<PathCounter>),
    /// The copies of the disks have come this far.
    DiskProgress(Vec<DiskState>),
    /// The hypervisor has paused the VM and waits for leave to send the rest.
    Paused,
    /// A check before the migration found this.
    Found(Finding),
    /// News about a path, by its name.
    PathTurned(String, PathNews),
    /// The transfer may use so many Mb/s of the links from now on; absent for all that they have.
    BandwidthLimited(Option<u64>),
    /// The VM's CPUs are held back by this share of their time, in percent, since its memory gets dirty too
    /// fast; absent when they are not any more.
    Throttled(Option<u8>),
    /// They cannot be held back, for this reason.
    NotThrottled(Problem),
    /// [`SourceAction::BeginPostCopy`] came too late: little of the VM was left, and the hypervisor has paused it.
    Converged,
    /// The transfer broke, of memory or of a disk.
    TransferFailed(Problem),
    /// With post-copy: all of the memory is on the target.
    RestSent,
    /// With post-copy: the connection is broken. Both hypervisors hold what they have.
    RestInterrupted(Problem),
    /// With post-copy: what was left of the memory on the source is lost.
    RestLost(Problem),
    /// Somebody wants it cancelled.
    CancelRequested,
    /// Time has passed.
    Tick,
}

/// What the source's hypervisor says of a VM that the journal calls handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// It stands still since all of it was sent, or its hypervisor has ended.
    LetGo,
    /// It has run on there: the record was taken for failed by whoever wrote it. Or, with post-copy, it can: nothing
    /// has been sent of what the target needs.
    Kept,
    /// With post-copy: its migration has failed, and it may have run on there. Whether the target has it, the target
    /// says.
    Astray,
}

/// What the source's hypervisor says of a VM that has not moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmCondition {
    /// It runs.
    Runs,
    /// It stands still.
    Paused,
    /// Its hypervisor has ended, in this way.
    Ended(Problem),
}

/// What the target's journal says of the VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetState {
    /// It runs there, and nothing of its memory is to come.
    Running,
    /// It was told to run there, and its hypervisor has ended since.
    Ended,
    /// It was told to run there, and a part of its memory is still to come.
    RunningInPart,
    /// All state is there, not running yet.
    Ready,
    /// It was discarded and has never run there.
    Discarded,
    /// Nothing: it has no record of this migration. It may have lost it, so this promises nothing.
    Unknown,
    /// Nothing; but the operator does: the host is lost, with all that ran there.
    Lost,
}
