//! The single operations of a migration. Which one comes when is not decided here.
//!
//! ```text
//!   source                                   target
//!                                            listen
//!   start ───────── setup, active ─────────► (inmigrate)
//!   (pre-switchover: guest stopped)
//!   switch_over ─── device, completed ─────► completed (guest still stopped)
//!                                            run          ← the commit
//! ```
//!
//! Until the target's `run`, `cancel` and `run` on the source bring the guest back there. Once a
//! source reports `completed` it never runs its guest again by itself.
//!
//! With [`Transport::PostCopy`] there may be a switchover while memory is still to be sent:
//!
//! ```text
//!   source                                   target
//!                                            listen
//!   start ───────── active ────────────────► (inmigrate)
//!   start_post_copy
//!   (pre-switchover: guest stopped)
//!   switch_over ─── postcopy-active ───────► postcopy-active (inmigrate, then paused: lets_run)
//!   (finish-migrate: never runs again)       run          ← the guest runs and fetches pages
//!   pages           completed ─────────────► completed
//!
//!                   if the connection breaks:
//!   (postcopy-paused)                        (postcopy-paused: the guest waits for pages)
//!                                            recover_listen
//!   resume ──────── postcopy-recover, postcopy-active ──► (the guest goes on)
//! ```
//!
//! Here `switch_over` is what cannot be taken back, not the target's `run`: before it, `cancel` and `run` on the
//! source bring the guest back; after it, they mostly cannot ([`MigrationError::LeftForPostCopy`]). The guest needs
//! both QEMUs until both say `completed`. Without `start_post_copy`, everything is as in the first picture.
//!
//! After a migration with [`Transport::PostCopy`] that failed or was cancelled, whether `start_post_copy` was called
//! or not, a QEMU 7.2's next migration with another transport fails at the target, at its end: the target gets a
//! reset, apparently because the source still has a return path that nobody reads. The guest must then be run at the
//! source again, as after any such failure, and the migration after that succeeds. One with [`Transport::PostCopy`]
//! succeeds at once.

mod status;
mod tls;
mod transport;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use drainpipe_engine::format::bound;
use drainpipe_engine::host::facts::RdmaFacts;
use drainpipe_hypervisor::{Address, MigrationStatus, RunState, SourceSettings, TransferStatus, Transport};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use self::status::MigrationInfo;
use self::transport::{Side, bandwidth_parameters, parameters, uri, wants};
use crate::qmp::{QmpClient, QmpError};
use crate::vmm::Vmm;

pub use tls::forget_key;
pub use transport::bandwidth_bytes_per_s;

/// Between two looks at a state that QEMU does not announce by an event.
const POLL_EVERY: Duration = Duration::from_millis(5);
/// How often to look again for times that QEMU has not computed yet.
const UNFINISHED_TIMES_POLLS_MAX: u32 = 20;
/// A cancelled migration normally ends within a few ms; past this its connections are cut.
const CANCEL_BEFORE_YANK: Duration = Duration::from_millis(100);

/// Why an act of a migration did not succeed.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// QEMU refused, or does not answer.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Something else listens there.
    #[error("port {} of {} is taken; try another one of the migration ports", .0.port(), .0.ip())]
    PortTaken(SocketAddr),
    /// The address is not one of this host's.
    #[error("cannot listen at {address} for a migration: {source}; is it an address of this host?")]
    CannotListen {
        /// Where the target should listen.
        address: SocketAddr,
        /// What the kernel said.
        source: io::Error,
    },
    /// QEMU may not fetch pages.
    #[error(
        "no post-copy to this host: QEMU says `{0}`. Its user needs `userfaultfd`: install Drainpipe's \
         packaging/udev.rules, which serve QEMU 8.0 and newer, or set vm.unprivileged_userfaultfd=1 by sysctl(8)"
    )]
    NoPostCopy(String),
    /// QEMU cannot encrypt, or not with this key.
    #[error(
        "the VM's QEMU does not encrypt: it says `{0}`; a QEMU that was built without GnuTLS can move this \
        VM only without `--post-copy`"
    )]
    NoTls(String),
    /// QEMU may not lock the guest's memory.
    #[error(
        "the VM's QEMU may not lock {needed_mib} MiB of memory, which RDMA needs: {source}; start the agent with \
         LimitMEMLOCK=infinity, then shut the VM down and start it again, or move it by another option"
    )]
    MemoryLock {
        /// How much it would lock.
        needed_mib: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// The key could not be laid where QEMU reads it.
    #[error("cannot write or remove the key of an encrypted migration in {path}: {source}")]
    CannotWriteKey {
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The guest must not run now.
    #[error("the guest cannot run here: QEMU is in state `{0}`, its memory is not complete")]
    MemoryIncomplete(RunState),
    /// A source is asked to go on with a guest whose state the target has.
    #[error(
        "the guest cannot run here any more: its switchover to post-copy has begun, and QEMU, which calls \
        it `{0}`, cannot go back from there; it runs at the target, or can only be ended and booted again"
    )]
    LeftForPostCopy(MigrationStatus),
    /// A source in post-copy has nothing more to send.
    #[error(
        "all of the VM's memory was sent, and the last of it arrives once the links between the hosts work \
        again; look at them"
    )]
    AllSent,
    /// A state did not come in time.
    #[error("QEMU is still `{state}` after {} while waiting to {what}", bound(*deadline))]
    Deadline {
        /// What was waited for.
        what: &'static str,
        /// The state at the end.
        state: String,
        /// How long was waited.
        deadline: Duration,
    },
    /// A migration has failed, and QEMU waits for its own threads since. See `Process::ignore_resets`.
    #[error(
        "QEMU has not ended the previous migration, which it calls `{0}`, and accepts no other one: a \
        defect of QEMU's multifd after a connection was reset; the VM keeps running, but must be shut down \
        and started again before it can move"
    )]
    NeverEnds(MigrationStatus),
}

/// Makes a target ([`crate::Role::Incoming`]) listen for its source. May be repeated with another
/// address after [`MigrationError::PortTaken`] and [`MigrationError::CannotListen`].
pub async fn listen(
    vmm: &Vmm,
    transport: Transport,
    address: impl Into<Address>,
    deadline: Duration,
) -> Result<(), MigrationError> {
    let address = address.into();
    check_address(&address)?;
    allow_memory_lock(vmm, transport)?;
    set_up(vmm, transport, Side::Target, deadline).await.map_err(|error| match error {
        MigrationError::Qmp(QmpError::Command { desc, .. })
            if transport.is_post_copy() && desc.contains("is not supported") =>
        {
            MigrationError::NoPostCopy(desc)
        }
        error => error,
    })?;
    let arguments = json!({ "uri": uri(transport, &address) });
    Ok(execute(vmm, "migrate-incoming", arguments, deadline).await?)
}

/// Makes a target in [`MigrationStatus::PostcopyPaused`] listen somewhere else, for [`resume`]. May be repeated as
/// [`listen`] may, also while it listens, as when nobody came.
///
/// Where it listened last it still does (QEMU 7.2 and 10.0): that port is taken, and a source may resume there without
/// this.
pub async fn recover_listen(
    vmm: &Vmm,
    address: impl Into<Address>,
    deadline: Duration,
) -> Result<(), MigrationError> {
    let address = address.into();
    check_address(&address)?;
    // Out of band: its main thread may itself wait for a page.
    let (arguments, end) =
        (json!({ "uri": uri(Transport::CLEAR_POST_COPY, &address) }), Instant::now() + deadline);
    loop {
        let recover =
            vmm.qmp().execute_out_of_band::<IgnoredAny>("migrate-recover", arguments.clone(), deadline);
        match recover.await {
            Ok(_) => return Ok(()),
            // It has not noticed yet that its connection is broken.
            Err(QmpError::Command { .. }) if Instant::now() < end => sleep(POLL_EVERY).await,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Tries the address before QEMU does: once QEMU 10.0 has failed to listen, it refuses every
/// further attempt and has to be restarted.
fn check_address(address: &Address) -> Result<(), MigrationError> {
    let &Address::Tcp(address) = address else { return Ok(()) };
    match TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(MigrationError::PortTaken(address)),
        Err(source) => Err(MigrationError::CannotListen { address, source }),
    }
}

/// RDMA locks all memory that it carries, and QEMU 7.2 only says that the migration has failed where it may not.
fn allow_memory_lock(vmm: &Vmm, transport: Transport) -> Result<(), MigrationError> {
    if transport != Transport::Rdma {
        return Ok(());
    }
    let needed_bytes = RdmaFacts::locked_bytes(vmm.spec().memory_kib() << 10);
    let allowed = vmm.process().allow_memory_lock(needed_bytes);
    allowed.map_err(|source| MigrationError::MemoryLock { needed_mib: needed_bytes >> 20, source })
}

/// Begins to send a source's guest to a target that listens at `address`. Returns at once; a
/// connection that cannot be made shows in [`status`] as [`MigrationStatus::Failed`].
pub async fn start(
    vmm: &Vmm,
    transport: Transport,
    address: impl Into<Address>,
    settings: SourceSettings,
    deadline: Duration,
) -> Result<(), MigrationError> {
    let address = address.into();
    await_end_of_last(vmm, deadline).await?;
    allow_memory_lock(vmm, transport)?;
    set_up(vmm, transport, Side::Source(settings), deadline).await?;
    Ok(execute(vmm, "migrate", json!({ "uri": uri(transport, &address) }), deadline).await?)
}

/// Stops the guest of a source whose memory travels ([`Transport::PostCopy`]), and has it go to pre-switchover, however
/// much memory is left. The switchover is then one to post-copy. It may be cancelled until [`switch_over`]. Whatever
/// becomes of it, also of a `start_post_copy` that fails, the guest runs here again only by [`run`].
///
/// QEMU would stop the guest itself. But if the connection breaks as the last page has been sent, QEMU 10.0 calls the
/// migration failed and has the guest go on as it was before QEMU stopped it: running, beside the target's. One that it
/// found stopped stays so. The guest is stopped for up to one of QEMU's iterations longer, which take 50 ms.
///
/// False, and nothing was begun, if QEMU has stopped the guest itself by then, since little was left.
pub async fn start_post_copy(vmm: &Vmm, deadline: Duration) -> Result<bool, QmpError> {
    execute(vmm, "stop", Value::Null, deadline).await?;
    if vmm.run_state(deadline).await? != RunState::Paused {
        return Ok(false);
    }
    execute(vmm, "migrate-start-postcopy", Value::Null, deadline).await?;
    Ok(true)
}

/// Has a source in [`MigrationStatus::PostcopyPaused`] go on over another connection, to its target, which is paused
/// too and listens at `address` ([`recover_listen`]). Returns at once; after a connection that cannot be made it is
/// still paused.
pub async fn resume(vmm: &Vmm, address: impl Into<Address>, deadline: Duration) -> Result<(), QmpError> {
    let arguments = json!({ "uri": uri(Transport::CLEAR_POST_COPY, &address.into()), "resume": true });
    execute(vmm, "migrate", arguments, deadline).await
}

/// Changes the `downtime_limit_ms` that was given to [`start`], also while memory travels.
///
/// After a switchover to post-copy it says how much of the memory QEMU sends in its last step, in which it takes a broken
/// connection for the end ([`interrupt`]); with 0 that is nothing but the end of the stream.
pub async fn set_downtime_limit(
    vmm: &Vmm,
    downtime_limit_ms: u64,
    deadline: Duration,
) -> Result<(), QmpError> {
    let arguments = json!({ "downtime-limit": downtime_limit_ms });
    execute(vmm, "migrate-set-parameters", arguments, deadline).await
}

/// Limits what a source sends to so many Mb/s of its links, also while memory travels; `None` takes the
/// limit away. The last of the memory, for which the guest is paused, QEMU sends without a limit. With multifd it keeps
/// to no limit below some 600 Mb/s: see [`Vmm::pace`].
///
/// In post-copy a limit is hard on the guest: QEMU fills it ten times a second, and sends nothing in between, so that a
/// page that the guest waits for comes up to 100 ms later. At 1 to 200 Mb/s a guest got 9 to 29 such pages a second of
/// QEMU 7.2.22, 26 to 139 of 10.0.2, and 4000 without a limit. QEMU 10.0 sends no less than 10 Mb/s then. What is set in
/// pre-switchover QEMU 7.2 forgets; after [`switch_over`] it takes it.
pub async fn set_bandwidth(vmm: &Vmm, limit_mbps: Option<u64>, deadline: Duration) -> Result<(), QmpError> {
    execute(vmm, "migrate-set-parameters", bandwidth_parameters(limit_mbps), deadline).await
}

/// How far a migration is, on the source; on the target, whether all has arrived.
pub async fn status(vmm: &Vmm, deadline: Duration) -> Result<TransferStatus, QmpError> {
    let query = async || -> Result<TransferStatus, QmpError> {
        let info: MigrationInfo = vmm.qmp().execute("query-migrate", Value::Null, deadline).await?;
        Ok(info.into())
    };
    let mut status = query().await?;
    // QEMU 7.2 says `completed` a moment before it has computed its times.
    for _ in 0..UNFINISHED_TIMES_POLLS_MAX {
        if status.status != MigrationStatus::Completed || status.total_ms != Some(0) {
            break;
        }
        sleep(POLL_EVERY).await;
        status = query().await?;
    }
    Ok(status)
}

/// Lets a source in pre-switchover send the last of its memory and its devices' state; after [`start_post_copy`] the
/// state alone, and then the memory that the target has not got.
pub async fn switch_over(vmm: &Vmm, deadline: Duration) -> Result<(), QmpError> {
    execute(vmm, "migrate-continue", json!({ "state": "pre-switchover" }), deadline).await
}

/// Breaks the connection of a source's migration in post-copy, unless it is broken, so that it can be made again with
/// [`resume`]. For a target there is [`cut`] and [`recover_listen`].
///
/// Refuses once QEMU has sent all memory ([`MigrationError::AllSent`]): it then waits for its target's last word, and has no
/// way to connect again. A connection that breaks there is the end to 10.0, which calls the migration failed, and 7.2 waits
/// without end. The kernel sends what is on its way until it arrives.
pub async fn interrupt(vmm: &Vmm, deadline: Duration) -> Result<(), MigrationError> {
    let end = Instant::now() + deadline;
    let mut is_cut = false;
    loop {
        let now = status(vmm, deadline).await?;
        match now.status {
            MigrationStatus::PostcopyPaused => return Ok(()),
            MigrationStatus::PostcopyActive if !is_cut && now.has_sent_all() => {
                return Err(MigrationError::AllSent);
            }
            state if Instant::now() >= end || !state.is_post_copy() => {
                let state = state.to_string();
                return Err(MigrationError::Deadline { what: "break a connection", state, deadline });
            }
            _ if is_cut => sleep(POLL_EVERY).await,
            _ => {
                cut(vmm, deadline).await;
                is_cut = true;
            }
        }
    }
}

/// Whether a target may run its guest before all memory is there.
pub(crate) async fn allows_post_copy(vmm: &Vmm, deadline: Duration) -> Result<bool, QmpError> {
    let capabilities = capabilities(vmm, deadline).await?;
    Ok(capabilities.iter().any(|known| known.state && known.capability == "postcopy-ram"))
}

/// Cancels a source's migration and waits for its end, which may be `completed` if the
/// cancellation came too late. The guest runs on by itself if it ran before.
///
/// After the switchover to post-copy this is for a guest that never ran at its target, and never will: QEMU 7.2 may end
/// the migration then, so that `run` brings the guest back, or wait for its target without end; 10.0 refuses.
pub async fn cancel(vmm: &Vmm, deadline: Duration) -> Result<MigrationStatus, MigrationError> {
    if let Err(error) = execute(vmm, "migrate_cancel", Value::Null, deadline).await {
        // QEMU 10.0 refuses then.
        refuse_in_post_copy(vmm, deadline).await?;
        return Err(error.into());
    }
    let end = Instant::now() + deadline;
    let cut_at = Instant::now() + CANCEL_BEFORE_YANK.min(deadline / 2);
    if let Some(status) = final_status(vmm, cut_at, deadline).await? {
        return Ok(status);
    }
    // With a silent network QEMU's threads wait in `send`, and cancelling alone does not wake all
    // of them.
    cut(vmm, deadline).await;
    final_status(vmm, end, deadline).await?.ok_or_else(|| MigrationError::Deadline {
        what: "cancel the migration",
        state: MigrationStatus::Cancelling.to_string(),
        deadline,
    })
}

/// Fails on a source whose switchover to post-copy has begun.
async fn refuse_in_post_copy(vmm: &Vmm, deadline: Duration) -> Result<(), MigrationError> {
    let status = status(vmm, deadline).await?;
    if status.has_left_for_post_copy() {
        return Err(MigrationError::LeftForPostCopy(status.status));
    }
    Ok(())
}

/// Shuts the connections of a migration down, also of a QEMU whose main thread stands still. Nothing to cut is no
/// failure: it may just have ended.
pub async fn cut(vmm: &Vmm, deadline: Duration) {
    let instances = json!({ "instances": [{ "type": "migration" }] });
    drop(vmm.qmp().execute_out_of_band::<IgnoredAny>("yank", instances, deadline).await);
}

/// Waits until QEMU has tidied up after the migration before. It says `failed` as soon as one channel
/// breaks, while others may still be sending. A `migrate` in between is refused with "duplicate yank
/// instance", and QEMU 7.2 then takes no further one, ever, and ends no cancellation.
async fn await_end_of_last(vmm: &Vmm, deadline: Duration) -> Result<(), MigrationError> {
    let end = Instant::now() + deadline;
    let cut_at = Instant::now() + CANCEL_BEFORE_YANK.min(deadline / 2);
    let mut is_cut = false;
    while holds_connections(vmm, deadline).await? {
        let now = Instant::now();
        if now >= end {
            return Err(MigrationError::NeverEnds(status(vmm, deadline).await?.status));
        }
        if now >= cut_at && !is_cut {
            cut(vmm, deadline).await;
            is_cut = true;
        }
        sleep(POLL_EVERY).await;
    }
    Ok(())
}

/// Whether QEMU still has a migration's connections that `yank` would cut.
async fn holds_connections(vmm: &Vmm, deadline: Duration) -> Result<bool, QmpError> {
    #[derive(Deserialize)]
    struct Instance {
        r#type: String,
    }
    let instances: Vec<Instance> = vmm.qmp().execute("query-yank", Value::Null, deadline).await?;
    Ok(instances.iter().any(|instance| instance.r#type == "migration"))
}

/// None if it has not ended by `end`. QEMU may take until `deadline` for an answer.
async fn final_status(
    vmm: &Vmm,
    end: Instant,
    deadline: Duration,
) -> Result<Option<MigrationStatus>, QmpError> {
    loop {
        let now = status(vmm, deadline).await?.status;
        if now.is_final() {
            return Ok(Some(now));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        sleep(POLL_EVERY).await;
    }
}

/// Lets the guest run: on the target as the commit of a migration, or once its status
/// [lets it](MigrationStatus::lets_run) in post-copy; on the source after a failed one (which is to be cancelled first if
/// it has not ended). Does nothing if it runs already.
///
/// Waits while QEMU is still ending a migration. Refuses in `inmigrate`: there `cont` would not
/// run the guest now, but make QEMU run it by itself once all has arrived. Refuses on a source that is in post-copy;
/// after one that has completed it does not, as after any migration.
pub async fn run(vmm: &Vmm, deadline: Duration) -> Result<(), MigrationError> {
    let end = Instant::now() + deadline;
    let mut resumed = false;
    loop {
        match vmm.run_state(deadline).await? {
            // A guest that sleeps goes on sleeping.
            RunState::Running | RunState::Suspended => break,
            state @ RunState::Inmigrate => return Err(MigrationError::MemoryIncomplete(state)),
            state if Instant::now() >= end => {
                let state = state.to_string();
                return Err(MigrationError::Deadline { what: "run the guest", state, deadline });
            }
            RunState::FinishMigrate => {
                refuse_in_post_copy(vmm, deadline).await?;
                sleep(POLL_EVERY).await;
            }
            _ if resumed => sleep(POLL_EVERY).await,
            _ => {
                execute(vmm, "cont", Value::Null, deadline).await?;
                resumed = true;
            }
        }
    }
    announce(vmm, deadline).await;
    Ok(())
}

/// Tells the switches where the guest's addresses are. A target's QEMU does so when the state
/// arrives, but then nothing is decided yet, and a source's after a failure never does, also if it lets
/// the guest run by itself.
async fn announce(vmm: &Vmm, deadline: Duration) {
    if let Err(error) = announce_self(vmm.qmp(), deadline).await {
        let vm = &vmm.spec().spec().name;
        tracing::warn!(%vm, %error, "could not announce to the network where the guest runs");
    }
}

/// Has a QEMU tell the network where its guest is, several times, as it does by itself when a guest has arrived.
pub async fn announce_self(qmp: &QmpClient, deadline: Duration) -> Result<(), QmpError> {
    let schedule = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
    qmp.execute::<IgnoredAny>("announce-self", schedule, deadline).await.map(drop)
}

async fn set_up(
    vmm: &Vmm,
    transport: Transport,
    side: Side,
    deadline: Duration,
) -> Result<(), MigrationError> {
    set_capabilities(vmm, transport, side, deadline).await?;
    let mut parameters = parameters(transport, side);
    parameters["tls-creds"] = tls::set_up(vmm, transport.tls(), side, deadline).await?.into();
    Ok(execute(vmm, "migrate-set-parameters", parameters, deadline).await?)
}

async fn set_capabilities(
    vmm: &Vmm,
    transport: Transport,
    side: Side,
    deadline: Duration,
) -> Result<(), MigrationError> {
    let states: Vec<Value> = capabilities(vmm, deadline)
        .await?
        .iter()
        .map(|Capability { capability, .. }| {
            json!({ "capability": capability, "state": wants(transport, side, capability) })
        })
        .collect();
    let arguments = json!({ "capabilities": states });
    Ok(execute(vmm, "migrate-set-capabilities", arguments, deadline).await?)
}

#[derive(Deserialize)]
struct Capability {
    capability: String,
    state: bool,
}

async fn capabilities(vmm: &Vmm, deadline: Duration) -> Result<Vec<Capability>, QmpError> {
    vmm.qmp().execute("query-migrate-capabilities", Value::Null, deadline).await
}

/// Runs a command whose result says nothing.
async fn execute(vmm: &Vmm, command: &str, arguments: Value, deadline: Duration) -> Result<(), QmpError> {
    vmm.qmp().execute::<IgnoredAny>(command, arguments, deadline).await.map(drop)
}
