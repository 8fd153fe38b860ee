//! One running VM, with the operations of its life and of its migration.
//!
//! ```text
//!   source                                   target
//!                                            listen
//!   start_transfer ── memory ──────────────► (waits for the guest)
//!   (pre-switchover: guest stopped)
//!   switch_over ───── the rest ────────────► (has all; guest still stopped)
//!                                            run          ← the commit
//! ```
//!
//! Which act comes when is the engine's. Until the target's `run`, `cancel` and `run` on the source bring the guest back
//! there. With post-copy, `switch_over` is what cannot be taken back: see [`SourceVm::start_post_copy`].
//!
//! libvirt's phases are the same acts: `Begin` is the source's `begin`, `Prepare` the target's `listen`, `Perform` the
//! source's `start_transfer` up to the end of `sent`, and `Finish`, with the guest paused, the target's `take_last`. Each
//! hands a [`Parcel`] to the next one, on the other host, which the agents carry; the last one goes to `complete`.

use std::fmt;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use tokio::sync::broadcast;

use crate::connections::Connections;
use crate::demands::Demands;
use crate::directory::{SharedPath, VmDirectory};
use crate::disk_moves::DiskMoves;
use crate::disks::{DiskCopies, DiskExports};
use crate::end::{End, Exit};
use crate::error::VmError;
use crate::event::VmEvent;
use crate::facts::Version;
use crate::memory::{Contents, MemorySample};
use crate::parcel::Parcel;
use crate::role::Role;
use crate::spec::ResolvedSpec;
use crate::state::{Hold, MigrationStatus, RunState, TransferStatus};
use crate::transport::{Address, SourceSettings, Transport};

/// A VM that has a process on this host. Dropping it leaves the process running; [`crate::Hypervisor::attach`] finds it
/// again.
///
/// Acts with a deadline fail with [`crate::VmErrorKind::Mute`] when it passes.
#[async_trait]
pub trait Vm: fmt::Debug + Send + Sync {
    /// What this VM is.
    fn spec(&self) -> &ResolvedSpec;

    /// Where its files are.
    fn directory(&self) -> &VmDirectory;

    /// Process id, for people and for the kernel's counters. Another process may have it once this one has ended.
    fn pid(&self) -> u32;

    /// Version of the hypervisor that runs this VM, which an upgrade of the package does not change.
    fn version(&self) -> Version;

    /// What its process was started for, whoever started it.
    fn role(&self) -> io::Result<Role>;

    /// Where the daemon answers by which alone it is driven; `None` where it is driven by its process itself.
    fn daemon(&self) -> Option<&Path> {
        None
    }

    /// Whether others than its agent may tell its hypervisor to suspend its guest and to abort its migration. What looks
    /// like the migration's pause may be that.
    fn obeys_others(&self) -> bool {
        false
    }

    /// What happens from now on. A receiver that falls far behind is told so, and asks for the state; it is closed when the
    /// control connection ends.
    fn events(&self) -> broadcast::Receiver<VmEvent>;

    /// Whether the process has not ended.
    fn alive(&self) -> bool;

    /// How the process ended, if it has and that is known by now.
    fn exit(&self) -> Option<Exit>;

    /// Whether it got the order to end, or its guest to power off.
    fn is_ending(&self) -> bool;

    /// Its end is expected from now on, as after its guest has powered off.
    fn expect_end(&self);

    /// The end of what the process wrote, for people; nothing where its files are gone.
    fn log_tail(&self) -> String;

    /// The process' end, for whoever waits without a hold of it.
    fn end(&self) -> BoxFuture<'static, End>;

    /// Waits for the process' end; `None` if it does not come in time.
    async fn wait_exit(&self, deadline: Duration) -> Option<Exit>;

    /// CPU that the process has used so far, in seconds. Fails once it has ended: read it before.
    fn cpu_seconds(&self) -> io::Result<f64>;

    /// What it is doing.
    async fn run_state(&self, deadline: Duration) -> Result<RunState, VmError>;

    /// How far its migration is, on the source; on the target, whether all has arrived.
    async fn migration(&self, deadline: Duration) -> Result<TransferStatus, VmError>;

    /// Since when a question has waited for its answer, if one does.
    fn owes_answer_since(&self) -> Option<Instant>;

    /// Whether somebody has stopped the process, as by `SIGSTOP`. Its connections must not be cut meanwhile.
    fn is_stopped(&self) -> bool;

    /// The serial output since the last reading, at most the last 64 KiB. It stays behind when the guest moves.
    async fn read_console(&self, deadline: Duration) -> Result<String, VmError>;

    /// Lets the guest run: on the target as the commit of a migration; on the source after a failed one. Does nothing if it
    /// runs already. Refuses where the memory is not complete ([`crate::VmErrorKind::MemoryIncomplete`]), and on a source
    /// that is in post-copy.
    async fn run(&self, deadline: Duration) -> Result<(), VmError>;

    /// Presses the guest's power button and waits until it has powered off; then removes what is left. A guest that ignores
    /// the button runs on ([`crate::VmErrorKind::GuestIgnores`]).
    async fn stop_guest(&self, deadline: Duration) -> Result<(), VmError>;

    /// Ends the process and whatever the guest does, and removes what is left; may be repeated.
    async fn destroy(&self, deadline: Duration) -> Result<(), VmError>;

    /// As [`Self::destroy`], of a VM that is to be started here again: what defines it stays.
    async fn power_off(&self, deadline: Duration) -> Result<(), VmError> {
        self.destroy(deadline).await
    }

    /// Kills the process at once, and removes what is left: only where the guest has never run here.
    async fn destroy_unrun(&self, deadline: Duration) -> Result<(), VmError>;

    /// From now on it has the cores before this host's other VMs, until [`Self::take_turns`].
    fn go_first(&self) -> io::Result<()>;

    /// Takes turns with the other VMs again, if it went first. May be repeated.
    fn take_turns(&self) -> io::Result<()>;

    /// The CPU that its vCPUs have used, to be read also while nothing is answered.
    async fn vcpu_time(&self, deadline: Duration) -> Result<Box<dyn VcpuTime>, VmError>;

    /// Its vCPUs, to be held back. They run as they like until then.
    async fn vcpu_throttle(&self, deadline: Duration) -> Result<Box<dyn VcpuThrottle>, VmError>;

    /// Looks at the guest's memory while it runs. Takes some 0.2 s.
    async fn sample_memory(&self) -> Result<MemorySample, VmError>;

    /// Looks at which share of the memory is zero and at what the rest holds, and not for whether that changes. Takes some
    /// 20 ms.
    async fn sample_contents(&self) -> Result<(f64, Contents), VmError>;

    /// What moving it asks for, beside what [`Self::spec`] says.
    async fn demands(&self, deadline: Duration) -> Result<Demands, VmError> {
        let _has_none = deadline;
        Ok(Demands::default())
    }
}

/// A VM that may leave this host.
#[async_trait]
pub trait SourceVm: Vm {
    /// Makes ready to leave by this transport, with copies of these disks, and returns what the target is told before it
    /// listens. Undone by [`Self::cancel`], and by [`Self::stay`].
    async fn begin(
        &self,
        transport: Transport,
        disks: &[usize],
        deadline: Duration,
    ) -> Result<Parcel, VmError> {
        let _needs_nothing = (transport, disks, deadline);
        Ok(Parcel::default())
    }

    /// Begins to send the guest to a target that listens at `address` and has said `parcel`. Returns at once; a connection
    /// that cannot be made shows as [`MigrationStatus::Failed`].
    async fn start_transfer(
        &self,
        transport: Transport,
        address: Address,
        settings: SourceSettings,
        parcel: Parcel,
        deadline: Duration,
    ) -> Result<(), VmError>;

    /// Stops the guest while memory is still to be sent ([`Transport::PostCopy`]), and goes to pre-switchover. Whatever
    /// becomes of it, the guest runs here again only by [`Vm::run`]. False, and nothing was begun, if the guest was stopped
    /// for its last bytes by then.
    async fn start_post_copy(&self, deadline: Duration) -> Result<bool, VmError>;

    /// Lets a source in pre-switchover send the last of its memory and its devices' state.
    async fn switch_over(&self, deadline: Duration) -> Result<(), VmError>;

    /// After [`Self::switch_over`]: waits until all has been sent, and returns what the target still needs to have it all;
    /// nothing where it needs nothing but what QEMU sends.
    async fn sent(&self, deadline: Duration) -> Result<Option<Parcel>, VmError> {
        let _sends_all_by_itself = deadline;
        Ok(None)
    }

    /// After [`Self::sent`], where that returned something: from now on the hypervisor here does nothing with the VM by
    /// itself, whatever becomes of it. Fails where that is not certain.
    async fn let_go(&self, deadline: Duration) -> Result<(), VmError> {
        let _does_nothing_by_itself = deadline;
        Ok(())
    }

    /// The VM stays, and nothing of its migration is under way: gives up what [`Self::begin`] has made ready. May be
    /// repeated.
    async fn stay(&self) {}

    /// Cancels the migration and waits for its end, which may be [`MigrationStatus::Completed`] if that came too late.
    async fn cancel(&self, deadline: Duration) -> Result<MigrationStatus, VmError>;

    /// Breaks the connection of a migration in post-copy, unless it is broken, so that it can be made again.
    async fn interrupt(&self, deadline: Duration) -> Result<(), VmError>;

    /// Goes on in post-copy over another connection, to a target that listens at `address`.
    async fn resume_transfer(&self, address: Address, deadline: Duration) -> Result<(), VmError>;

    /// Changes the downtime at which the hypervisor goes to pre-switchover, also while memory travels.
    async fn set_downtime_limit(&self, downtime_limit_ms: u64, deadline: Duration) -> Result<(), VmError>;

    /// Limits what the hypervisor itself sends to so many Mb/s of the links; `None` takes the limit away.
    async fn set_bandwidth(&self, limit_mbps: Option<u64>, deadline: Duration) -> Result<(), VmError>;

    /// Which host holds the VM, as far as this host's hypervisor says. Fails where it does not say, and while the VM is
    /// in a passing state.
    async fn hold(&self, deadline: Duration) -> Result<Hold, VmError>;

    /// Its disks, to be copied; `None` where they cannot be.
    fn disk_copies(&self) -> Option<&dyn DiskCopies> {
        None
    }

    /// Its disks, to be moved on its host; `None` where they cannot be.
    fn disk_moves(&self) -> Option<&dyn DiskMoves> {
        None
    }

    /// Its TCP connections; `None` where they are not ours to deal with.
    fn connections(&self) -> Option<&dyn Connections>;

    /// Where it sends a migration that goes through a relay, which listens there.
    fn outgoing_relay(&self) -> SharedPath;

    /// The users that may connect there, where others can reach it too; nothing where nobody else can.
    fn relay_users(&self) -> io::Result<Vec<u32>> {
        Ok(vec![])
    }
}

/// A VM that may come to this host.
#[async_trait]
pub trait TargetVm: Vm {
    /// Listens for its source, whose `begin` has handed `parcel` over, and returns what the source is told. May be repeated
    /// with another address after [`crate::VmErrorKind::PortTaken`].
    async fn listen(
        &self,
        transport: Transport,
        address: Address,
        parcel: &Parcel,
        deadline: Duration,
    ) -> Result<Parcel, VmError>;

    /// Whether its process is started only when it is to listen, which takes that long.
    fn starts_to_listen(&self) -> bool {
        false
    }

    /// Keeps the last that its source hands over ([`SourceVm::sent`]) until [`Self::take_last`]. The guest does not run, and
    /// nobody can let it run.
    async fn complete(&self, parcel: Parcel, deadline: Duration) -> Result<(), VmError> {
        let _needs_nothing = (parcel, deadline);
        Err(VmError::failed("this VM's hypervisor accepts only what the source's sends"))
    }

    /// Takes what [`Self::complete`] has kept: after the hand-over alone, since others may let the guest run from then on. May
    /// be repeated.
    async fn take_last(&self, deadline: Duration) -> Result<(), VmError> {
        let _has_all = deadline;
        Ok(())
    }

    /// Keeps others from letting the guest run, until [`Vm::run`]. Whether they have let it run before, which is told also of
    /// one whose process has ended since.
    async fn bar_others(&self, deadline: Duration) -> Result<bool, VmError> {
        let _nobody_else_can = deadline;
        Ok(false)
    }

    /// As [`Self::bar_others`]; and ends one that they may have let run, and have not, so that they never can.
    async fn end_unrun(&self, deadline: Duration) -> Result<bool, VmError> {
        let _nobody_else_can = deadline;
        Ok(false)
    }

    /// Listens somewhere else for [`SourceVm::resume_transfer`], in post-copy. May be repeated as [`Self::listen`] may.
    async fn recover_listen(&self, address: Address, deadline: Duration) -> Result<(), VmError>;

    /// Shuts its migration's connections down, also where it answers nothing else.
    async fn cut_migration(&self, deadline: Duration);

    /// Removes the key of an encrypted migration that is over.
    fn forget_key(&self) -> Result<(), VmError>;

    /// Its disks, to be written to by its source; `None` where they cannot be.
    fn disk_exports(&self) -> Option<&dyn DiskExports> {
        None
    }

    /// Where it takes copies of its disks.
    fn incoming_disks(&self) -> Option<SharedPath> {
        None
    }

    /// Where it listens for a migration that comes through a relay.
    fn incoming_relay(&self) -> SharedPath;
}

/// A VM of this host, which may have come and may leave.
pub trait Machine: SourceVm + TargetVm {}

impl<T: SourceVm + TargetVm> Machine for T {}

/// CPU that a guest's vCPUs have used.
pub trait VcpuTime: fmt::Debug + Send + Sync {
    /// The time that all of them together have used so far. Fails once the VM's process has ended.
    fn used(&self) -> io::Result<Duration>;
}

/// The vCPUs of a guest, to be held back.
pub trait VcpuThrottle: fmt::Debug + Send + Sync {
    /// Holds each back for this share of its time from now on, in percent. May be repeated, with another one too.
    fn hold(&self, percent: u8) -> Result<(), VmError>;

    /// Lets them run as they like. May be repeated, also when the process has ended.
    fn lift(&self) -> Result<(), VmError>;
}
