//! Post-copy: the VM runs on the target, and the rest of its memory follows.

use std::time::{Duration, Instant};

use drainpipe_engine::format::bound;
use drainpipe_engine::migration::SourceEvent;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::plan::{Plan, PlanRequest};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::{MigrationStatus, Parcel, RunState};
use tokio::time::sleep;
use tracing::warn;

use super::transferring::listening_at;
use super::{Executor, hypervisor_failed};
use crate::outgoing::{Meeting, Running, meet};
use crate::vms::cpu_priority;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};
use drainpipe_api_types::{ConnectionRequest, Endpoint};

/// How long a new connection may take until pages go over it.
const RECONNECTED_WITHIN: Duration = Duration::from_secs(5);
const RECOVERED_WITHIN: Duration = Duration::from_mins(2);

/// How long QEMU may take to send what the VM needs, once the target has it or gives it up.
const LET_GO_WITHIN: Duration = Duration::from_secs(15);

/// How long a target may take for what has come before the connection broke.
const TAKEN_IN_WITHIN: Duration = Duration::from_secs(5);

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How far post-copy is.
#[derive(Default)]
pub(super) struct PostCopy {
    /// QEMU has the order to switch over to it.
    pub(super) is_begun: bool,
    // For the rest of the memory there is none.
    is_limit_lifted: bool,
    // The connection of what the VM needs to run.
    broken_since: Option<Instant>,
    reconnects: usize,
}

impl Executor {
    pub(super) async fn begin_post_copy(&mut self) -> Result<SourceEvent, Problem> {
        // Also if the answer does not come.
        self.post_copy.is_begun = true;
        self.post_copy.is_begun =
            self.vmm()?.start_post_copy(QMP_DEADLINE).await.map_err(hypervisor_failed)?;
        Ok(if self.post_copy.is_begun { SourceEvent::Done } else { SourceEvent::Converged })
    }

    /// A QEMU that takes the sending of what the VM needs for failed lets it run on. So whatever the target has, it is
    /// asked here before the VM may run there.
    pub(super) async fn await_let_go(&self) -> Result<(), Problem> {
        let end = Instant::now() + LET_GO_WITHIN;
        loop {
            let transfer = self.vmm()?.migration(QMP_DEADLINE).await.map_err(hypervisor_failed)?;
            if transfer.has_let_go() {
                return Ok(());
            }
            let status = transfer.status;
            let is_on_its_way = matches!(
                status,
                MigrationStatus::PreSwitchover
                    | MigrationStatus::Device
                    | MigrationStatus::PostcopyDevice
                    | MigrationStatus::PostcopyActive
            );
            if !is_on_its_way || Instant::now() >= end {
                let own = self.outgoing.host.name();
                return Err(Problem::failed(format!(
                    "the VM's QEMU on {own} has not let go of it: its migration is {status}"
                )));
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Whether what was sent may be a part of the VM, and its QEMU here one that cannot let it run any more.
    fn may_be_in_parts(&self) -> bool {
        self.post_copy.is_begun || self.running.is_taken_up
    }

    /// Whether its QEMU here has failed, and may have let the VM run on.
    pub(super) async fn is_astray(&self) -> Result<bool, Problem> {
        let Some(vmm) = self.vmm().ok().filter(|_| self.may_be_in_parts()) else { return Ok(false) };
        let status = vmm.migration(QMP_DEADLINE).await.map_err(hypervisor_failed)?.status;
        Ok(matches!(status, MigrationStatus::Failed | MigrationStatus::Cancelled))
    }

    /// The target was told to run the VM: whatever runs here is not it. One that stands still may have bytes of it on their
    /// way, which would end with it.
    pub(super) async fn end_if_astray(&self) -> Result<(), Problem> {
        if let Ok(vmm) = self.vmm()
            && self.is_astray().await?
            && vmm.run_state(QMP_DEADLINE).await.map_err(hypervisor_failed)? == RunState::Running
        {
            vmm.destroy(QEMU_DEADLINE).await.map_err(Problem::failed)?;
        }
        Ok(())
    }

    /// QEMU fills a limit ten times a second, and sends nothing in between: not even the page for which the VM waits. With
    /// 200 Mb/s it got 29 of these in a second (7.2), with none 4400.
    async fn lift_limit(&mut self) {
        let Ok(vmm) = self.vmm() else { return };
        // So that as little as possible goes in QEMU's last step, in which no connection can be made again.
        if let Err(error) = vmm.set_downtime_limit(0, QMP_DEADLINE).await {
            warn!(%error, "if a connection breaks at the last moment, the VM may be lost");
        }
        match vmm.set_bandwidth(None, QMP_DEADLINE).await {
            Ok(()) => self.post_copy.is_limit_lifted = true,
            Err(error) => {
                warn!(%error, "the rest of the VM's memory stays within the bandwidth limit, which slows the VM down");
            }
        }
    }

    /// Fails where what the target has, or is about to have, may be what this host cannot let run any more. What has
    /// not arrived when the connection breaks does not arrive any more.
    pub(super) async fn check_not_needed_there(&mut self, is_mute: bool) -> Result<(), Problem> {
        let Some(vmm) = self.vmm().ok().filter(|_| self.may_be_in_parts()) else { return Ok(()) };
        let status = vmm.migration(QMP_DEADLINE).await.map_err(hypervisor_failed)?.status;
        let is_needed = match status {
            // What the target has got by then it may have to take in still.
            MigrationStatus::PostcopyPaused => {
                let since = *self.post_copy.broken_since.get_or_insert_with(Instant::now);
                is_mute || since.elapsed() < TAKEN_IN_WITHIN
            }
            MigrationStatus::Device | MigrationStatus::PostcopyDevice => true,
            status => status.is_post_copy(),
        };
        if !is_needed {
            return Ok(());
        }
        let target = &self.running.target;
        Err(Problem::failed(format!("part of the VM is on its way to {target}, so it cannot go back")))
    }

    pub(super) async fn look_at_rest(&mut self) -> SourceEvent {
        if !self.post_copy.is_limit_lifted {
            self.lift_limit().await;
            if let Ok(vmm) = self.vmm() {
                cpu_priority::end_soon(vmm);
            }
        }
        let status = match self.status().await {
            Ok(Some(status)) => status,
            Err(problem) if self.vmm().is_err() => return SourceEvent::RestLost(problem),
            Ok(None) | Err(_) => return SourceEvent::Tick,
        };
        match status.status {
            MigrationStatus::Completed => SourceEvent::RestSent,
            MigrationStatus::PostcopyPaused => {
                let why = status.error_desc.unwrap_or_else(|| "its connection is broken".into());
                SourceEvent::RestInterrupted(Problem::failed(format!("QEMU: {why}")))
            }
            // It may let run what the VM was.
            MigrationStatus::Failed | MigrationStatus::Cancelled => {
                let why = status.error_desc.unwrap_or_else(|| format!("its migration is {}", status.status));
                match self.end_if_astray().await {
                    Ok(()) => SourceEvent::RestLost(Problem::failed(format!("QEMU: {why}"))),
                    Err(problem) => {
                        warn!(%problem, vm = self.running.vm, "its QEMU here does not end, and may run the old VM");
                        SourceEvent::Tick
                    }
                }
            }
            _ => {
                let now_ms = self.now_ms();
                self.sample(now_ms).await;
                SourceEvent::Progress(self.transferred(&status), self.observed.measurements.by_path())
            }
        }
    }

    /// By the next path each time, as far as there are several.
    pub(super) async fn reconnect(&mut self) -> Result<(), Problem> {
        self.vmm()?.interrupt(QEMU_DEADLINE).await.map_err(|error| {
            let Running { vm, target, .. } = &*self.running;
            let way_out = format!(
                "if this goes on, `drainpipe vm stop {vm} --force` on {target} ends the VM that stands still there"
            );
            Problem::failed(format!("{error}; {way_out}"))
        })?;
        let (made, protocol) = self.plan_again().await?;
        let plan = Plan { paths: made.paths.alone(self.post_copy.reconnects), ..made };
        self.post_copy.reconnects += 1;
        let request = ConnectionRequest {
            plan: plan.reversed(),
            migration_address: None,
            watch: None,
            parcel: Parcel::default(),
            round_trip_us: None,
            attempt: protocol.attempt_to_reconnect(since_boot_ns()),
        };
        let endpoint: Endpoint = self.peer()?.post(&self.incoming("reconnection"), &request).await?;
        let address = listening_at(&plan, &endpoint).map_err(Problem::failed)?;
        self.observed.measurements.transfer_goes_on(address);
        self.vmm()?.resume_transfer(address.into(), QMP_DEADLINE).await.map_err(hypervisor_failed)?;
        self.await_resumed().await
    }

    /// As the hosts are now: links may have failed, or come back. Whether the rest goes encrypted is not asked any more:
    /// both QEMUs do as they began.
    async fn plan_again(&self) -> Result<(Plan, Protocol), Problem> {
        let request = PlanRequest { post_copy: true, ..RequestedOption::Tcp.into() };
        let (peer, target) = (self.peer()?, &self.running.target);
        let Meeting { plan, protocol, .. } =
            meet(&self.outgoing, &peer, target, None, request, self.memory_bytes()).await?;
        Ok((plan, protocol))
    }

    /// To find out which pages are still to come takes as long as a map of them all takes on the links.
    async fn await_resumed(&self) -> Result<(), Problem> {
        let (began, target) = (Instant::now(), &self.running.target);
        loop {
            let status = self.vmm()?.migration(QMP_DEADLINE).await.map_err(hypervisor_failed)?.status;
            let within = match status {
                MigrationStatus::PostcopyActive | MigrationStatus::Completed => return Ok(()),
                MigrationStatus::PostcopyRecover => RECOVERED_WITHIN,
                _ => RECONNECTED_WITHIN,
            };
            if began.elapsed() >= within {
                let within = bound(within);
                return Err(Problem::failed(format!(
                    "no new connection to {target} within {within}: QEMU's migration is {status}; look at the links"
                )));
            }
            sleep(LOOK_EVERY).await;
        }
    }
}

/// Rises over all runs of the agent for as long as its QEMUs can live.
fn since_boot_ns() -> u64 {
    let since_boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let [seconds, nanoseconds] = [since_boot.tv_sec, since_boot.tv_nsec].map(i64::unsigned_abs);
    seconds * 1_000_000_000 + nanoseconds
}
