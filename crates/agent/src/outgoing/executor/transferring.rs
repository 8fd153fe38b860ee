//! Steps 6 and 7: the VM's memory is sent while it runs.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use drainpipe_engine::format::one_line;
use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::migration::{SourceEvent, Stage};
use drainpipe_engine::plan::{LimitKeeper, Plan};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::transfer::downtime::downtime_limit_ms;
use drainpipe_engine::transfer::queue::unsent_limit_bytes;
use drainpipe_engine::transfer::transferred::Transferred;
use drainpipe_hypervisor::{
    Address, Happening, Machine, MigrationStatus, SourceSettings, TlsKey, TransferStatus, VmEvent, ZeroPages,
};
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::timeout;
use tracing::warn;

use super::ending::guard_acted;
use super::hooks::HELD_DOWNTIME_LIMIT_MS;
use super::{Executor, LOOK_EVERY, hypervisor_failed};
use crate::guard::Guard;
use crate::outgoing::standstill::StandstillWatch;
use crate::outgoing::target_watch::TargetWatch;
use crate::paths::link_socket::on_link;
use crate::paths::path_watch::Beginning;
use crate::transfer::bandwidth::{DiskPhase, FirstShare, Sending, Valve};
use crate::transfer::disk_streams::DiskSender;
use crate::transfer::pacer::Pacer;
use crate::transfer::relay::{OtherEnd, OutgoingRelay, RelayedStream};
use crate::transfer::transport::{connections, transport};
use crate::vms::QMP_DEADLINE;
use drainpipe_api_types::Endpoint;

/// How long it is waited for QEMU's connections, and how often it is looked for them meanwhile.
const CONNECTED_WITHIN: Duration = Duration::from_millis(500);
const CONNECTED_LOOK_EVERY: Duration = Duration::from_millis(2);

/// How soon a target says what has happened to it, once its connections have failed.
const TARGET_SAYS_WITHIN: Duration = Duration::from_millis(500);

/// How soon a transfer that somebody has aborted says so, and how often it is asked.
const ABORT_TOLD_WITHIN: Duration = Duration::from_secs(2);
const ABORT_LOOK_EVERY: Duration = Duration::from_millis(10);

impl Executor {
    pub(super) async fn start_transfer(&mut self) -> Result<(), Problem> {
        self.outgoing.transfer.first_sessions.begin_sending(&**self.vmm()?);
        let downtime_limit_ms = self.first_downtime_limit_ms();
        if self.copying.held_writes.is_begun {
            // From now on no more of its disks goes than it writes.
            self.copying.pace.is(DiskPhase::Mirrored);
        }
        // Where disks are copied it stands already.
        let guard = match self.guard.take() {
            Some(guard) => guard,
            None => self.post_guard().await?,
        };
        let (Some(plan), Some(endpoint)) = (&self.agreed.plan, &self.agreed.endpoint) else {
            return Err(Problem::failed("cannot transfer before the hosts are connected"));
        };
        let address = listening_at(plan, endpoint).map_err(Problem::failed)?;
        let (transport, now_ms) = (transport(plan, self.tls_key(plan, endpoint)?), self.now_ms());
        self.observed
            .measurements
            .transfer_begins(&self.outgoing.host.network, plan, address, now_ms)
            .await?;
        let vmm = self.vmm()?;
        let (relay, send_to) = self.relay_to(plan, endpoint, address, &guard)?;
        self.tell_watch(plan, address.port()).await;
        let valve = valve(plan, relay.as_ref(), Pacer::new(Arc::clone(vmm), address, connections(plan)));
        let comes_later = self.copying.sender.is_some() && self.disk_copies()?.go_along();
        let (share, memory_valve) =
            if comes_later { (None, Some(valve)) } else { (Some(self.first_share(plan, valve).await), None) };
        let standstill_watch = StandstillWatch::start(vmm).await;
        let settings = SourceSettings {
            downtime_limit_ms,
            bandwidth_mbps: share.as_ref().and_then(FirstShare::of_hypervisor_mbps),
            zero_pages: self.agreed.facts.as_ref().and_then(zero_pages),
        };
        let parcel = endpoint.parcel.clone();
        vmm.start_transfer(transport, send_to, settings, parcel, QMP_DEADLINE)
            .await
            .map_err(hypervisor_failed)?;
        (self.settings.bandwidth, self.copying.memory_valve) = (share.map(FirstShare::follow), memory_valve);
        (self.guard, self.relay, self.observed.standstill_watch) = (Some(guard), relay, standstill_watch);
        self.target.watch = TargetWatch::start(&self.outgoing, &self.running);
        self.keep_resets_from_qemu().await;
        self.tracked.on_way = self.send_tracked();
        Ok(())
    }

    async fn first_share(&self, plan: &Plan, valve: Valve) -> FirstShare {
        let share = FirstShare::of(&self.outgoing.transfer.bandwidth, self.sending(), plan, valve).await;
        self.keep_packets_small(share.limit_mbps()).await;
        share
    }

    /// Memory that follows its disks by itself may do so before that is seen. It has next to nothing until then, and no share yet:
    /// disks would yield to it.
    pub(super) async fn hold_memory_still(&self) -> Result<(), Problem> {
        if let Some(Valve::Hypervisor(_)) = self.copying.memory_valve {
            self.tell_hypervisor_limit(Some(0)).await?;
        }
        Ok(())
    }

    async fn tell_hypervisor_limit(&self, limit_mbps: Option<u64>) -> Result<(), Problem> {
        if let Err(error) = self.vmm()?.set_bandwidth(limit_mbps, QMP_DEADLINE).await {
            warn!(%error, "memory that follows its disks may exceed its limit at first");
        }
        Ok(())
    }

    /// From now on memory follows, within its share.
    pub(super) async fn hold_memory_back(&mut self) -> Result<(), Problem> {
        let (Some(valve), Some(plan)) = (self.copying.memory_valve.take(), &self.agreed.plan) else {
            return Ok(());
        };
        let share = self.first_share(plan, valve.awaited()).await;
        self.tell_hypervisor_limit(share.of_hypervisor_mbps()).await?;
        self.settings.bandwidth = Some(share.follow());
        Ok(())
    }

    pub(super) async fn post_guard(&self) -> Result<Guard, Problem> {
        let own_peer = self.own_connections().map(|(_, address)| address);
        let (host, running) = (&self.outgoing.host, &self.running);
        let target = host.peer(&running.target)?;
        let disks = self.copying.sender.iter().flat_map(DiskSender::disks).map(|disk| disk.address);
        let disks: Vec<SocketAddr> = disks.collect();
        Guard::start(&host.config, &running.id, &**self.vmm()?, &target, own_peer, &disks).await
    }

    /// What those must know who hold its bytes back.
    pub(super) fn sending(&self) -> Sending<'_> {
        let running = &self.running;
        Sending { migration: running.id(), target: running.target(), way_given: running.way_given() }
    }

    /// As soon as there are connections, since a target may end at any time. Those that are not there by then are
    /// looked for with the transfer.
    async fn keep_resets_from_qemu(&mut self) {
        let end = Instant::now() + CONNECTED_WITHIN;
        while self.ignore_resets() && Instant::now() < end {
            tokio::time::sleep(CONNECTED_LOOK_EVERY).await;
        }
    }

    /// Whether there are connections of multifd to come for which it is to be done again.
    fn ignore_resets(&mut self) -> bool {
        let Some((vmm, address, count)) = self.own_multifd() else { return false };
        let Some(connections) = vmm.connections() else { return false };
        self.settings.no_resets.attempt(count, || connections.ignore_resets(address));
        !self.settings.no_resets.is_over()
    }

    /// Multifd's connections must not come before the one that QEMU makes first, where the target's QEMU goes
    /// by that. The relay tells it by itself.
    async fn tell_watch(&self, plan: &Plan, port: u16) {
        let beginning = Beginning { migration: &self.running.id, port, in_order: self.in_order(plan) };
        self.outgoing.transfer.watches.begin_transfer(&self.running.target, beginning).await;
    }

    /// How many connections must come in order, if they must.
    fn in_order(&self, plan: &Plan) -> Option<usize> {
        let target = self.agreed.facts.as_ref().map(|(_, target)| target.hypervisor.capabilities);
        let apart = target.is_some_and(|target| target.tells_connections_apart);
        let connections = connections(plan);
        (!apart && plan.relay().is_none() && connections > 1).then_some(connections)
    }

    /// Those that are only made once disks are there, which may be in a moment.
    pub(super) async fn expect_connections(&self) {
        let (Some(plan), Some(endpoint)) = (&self.agreed.plan, &self.agreed.endpoint) else { return };
        let Ok(address) = listening_at(plan, endpoint) else { return };
        if self.in_order(plan).is_some() {
            self.tell_watch(plan, address.port()).await;
        }
    }

    /// What QEMU encrypts with, if it does.
    fn tls_key(&self, plan: &Plan, endpoint: &Endpoint) -> Result<Option<TlsKey>, Problem> {
        if !plan.is_encrypted_by_hypervisor() {
            return Ok(None);
        }
        endpoint.tls_key.map(Some).ok_or_else(|| self.runs_other_version())
    }

    fn runs_other_version(&self) -> Problem {
        Problem::refused(format!(
            "the agent of {} does not compress or encrypt in the same way: run the same Drainpipe on both hosts",
            self.running.target
        ))
    }

    /// What stands between QEMU and the target's `address`, if anything does, and where QEMU sends to.
    fn relay_to(
        &self,
        plan: &Plan,
        endpoint: &Endpoint,
        address: SocketAddr,
        guard: &Guard,
    ) -> Result<(Option<OutgoingRelay>, Address), Problem> {
        let Some(stream) = RelayedStream::of(plan) else { return Ok((None, address.into())) };
        let vmm = self.vmm()?;
        let token = endpoint.relay_token.ok_or_else(|| self.runs_other_version())?;
        let other = OtherEnd { identity: &self.outgoing.peers.identity, host: &self.running.target, token };
        let page_cache_mib =
            endpoint.relay_page_cache_mib.min(self.outgoing.host.config.compression.page_cache_mib);
        let packing = self.outgoing.transfer.packing()?;
        let relay = OutgoingRelay::start(&packing, &**vmm, stream, address, &other, guard, page_cache_mib)?;
        Ok((Some(relay), vmm.outgoing_relay().of_hypervisor.into()))
    }

    /// The next thing that happens to the transfer.
    pub(super) async fn transfer_event(&mut self) -> SourceEvent {
        if self.copies_disks_alone() {
            return self.disk_event().await;
        }
        let is_rest = *self.running.stage.borrow() == Stage::SendingRest;
        let look = tokio::time::sleep(LOOK_EVERY);
        tokio::pin!(look);
        loop {
            tokio::select! {
                problem = self.target.watch.trouble() => return self.broken_there(problem).await,
                event = self.heard.events.recv() => match event.as_ref().map(|event| self.migration_status(event)) {
                    Ok(Some(MigrationStatus::PreSwitchover)) if self.obeys_others() => {
                        return self.look().await;
                    }
                    Ok(Some(MigrationStatus::PreSwitchover)) => return SourceEvent::Paused,
                    Ok(Some(status)) if status.is_final() || status == MigrationStatus::PostcopyPaused => {
                        return self.look().await;
                    }
                    Ok(_) => {}
                    // Events were missed, or the connection is gone: the state tells.
                    Err(_) => break,
                },
                // What follows a VM cannot be cancelled.
                () = self.running.cancel.notified(), if !is_rest => return SourceEvent::Tick,
                () = &mut look => break,
            }
        }
        look.await;
        self.look().await
    }

    fn migration_status(&mut self, event: &VmEvent) -> Option<MigrationStatus> {
        self.observed.pause.note(event, self.now_ms(), SystemTime::now());
        match &event.what {
            Happening::Migration(status) => Some(status.clone()),
            _ => None,
        }
    }

    /// What has come by now, and nobody waits for any more.
    pub(super) fn read_events(&mut self) {
        loop {
            match self.heard.events.try_recv() {
                Ok(event) => {
                    self.migration_status(&event);
                }
                Err(TryRecvError::Lagged(_)) => {}
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }

    async fn look(&mut self) -> SourceEvent {
        if *self.running.stage.borrow() == Stage::SendingRest {
            return self.look_at_rest().await;
        }
        if let Some(event) = self.look_at_disks().await {
            return event;
        }
        if let Some(relay) = &self.relay
            && let Some(problem) = relay.problem()
        {
            let is_cut_off = relay.is_cut_off();
            return if is_cut_off { self.failed_beside_target(problem).await } else { self.broken(problem) };
        }
        let status = match self.status().await {
            Ok(Some(status)) => status,
            Ok(None) => return SourceEvent::Tick,
            Err(problem) => return SourceEvent::TransferFailed(problem),
        };
        match status.status {
            MigrationStatus::PreSwitchover => SourceEvent::Paused,
            MigrationStatus::Cancelled if self.guard_has_acted() => {
                SourceEvent::TransferFailed(guard_acted())
            }
            MigrationStatus::Cancelled if status.error_desc.is_some() => {
                SourceEvent::TransferFailed(Problem::failed(status.error_desc.unwrap_or_default()))
            }
            MigrationStatus::Failed | MigrationStatus::Cancelled | MigrationStatus::None => {
                let why = self.why_failed(&status);
                // A connection that is reset before resets are kept from QEMU is all that QEMU can tell.
                self.failed_beside_target(Problem::failed(why)).await
            }
            _ => {
                let now_ms = self.now_ms();
                self.sample(now_ms).await;
                let losing = self.observed.measurements.losing();
                if !losing.is_empty() {
                    self.outgoing.transfer.watches.suspect(&self.running.target, &losing).await;
                }
                // In its last moments the next one of a drain is there already.
                if *self.running.stage.borrow() == Stage::Sending {
                    self.observed
                        .measurements
                        .beside(self.outgoing.migrations.sending_beside(&self.running.id));
                }
                let transferred = self.transferred(&status);
                self.consider_hook(&status);
                self.follow_downtime_limit(transferred.rounds).await;
                if let Some(relay) = &mut self.relay {
                    relay.read(now_ms);
                }
                self.set_on_connections(&status, transferred.remaining_bytes);
                SourceEvent::Progress(transferred, self.observed.measurements.by_path())
            }
        }
    }

    pub(super) async fn sample(&mut self, now_ms: f64) {
        if let Some(relay) = &self.relay {
            self.observed.measurements.relayed(relay);
        }
        if let Err(problem) = self.observed.measurements.sample(&self.outgoing.host.network, now_ms).await {
            warn!(%problem, "cannot read the links' counters");
        }
    }

    /// The transfer has failed, and this host knows only that the connections ended: reports the target's reason, if it
    /// gives one.
    async fn failed_beside_target(&mut self, problem: Problem) -> SourceEvent {
        let said = timeout(TARGET_SAYS_WITHIN, self.target.watch.trouble()).await;
        self.broken(said.unwrap_or(problem))
    }

    fn obeys_others(&self) -> bool {
        self.claimed.vmm.as_ref().is_some_and(|vmm| vmm.obeys_others())
    }

    /// Anybody else who aborts the migration here ends the target's QEMU too, whose end may be reported first. Nothing is
    /// cut meanwhile: a QEMU 7.2 that was aborted and cut at once has died, and its VM with it.
    async fn broken_there(&self, problem: Problem) -> SourceEvent {
        if self.obeys_others()
            && let Ok(Some(why)) = timeout(ABORT_TOLD_WITHIN, self.why_aborted()).await
        {
            return SourceEvent::TransferFailed(Problem::failed(why));
        }
        self.broken(problem)
    }

    /// Why the transfer has ended that somebody else aborted; none if it ended otherwise.
    async fn why_aborted(&self) -> Option<String> {
        loop {
            let status = self.status().await.ok().flatten()?;
            match status.status {
                MigrationStatus::Cancelled => return status.error_desc,
                status if status.is_final() => return None,
                _ => tokio::time::sleep(ABORT_LOOK_EVERY).await,
            }
        }
    }

    /// The end of the VM's QEMU ends its connections, the relay's and the target's QEMU too.
    fn broken(&self, problem: Problem) -> SourceEvent {
        SourceEvent::TransferFailed(self.vmm().err().unwrap_or(problem))
    }

    pub(super) fn transferred(&self, status: &TransferStatus) -> Transferred {
        let ram = status.ram.unwrap_or_default();
        let dirty_bytes_per_s = ram.dirty_pages_per_second.saturating_mul(ram.page_bytes);
        Transferred {
            sent_bytes: self.observed.measurements.arrived_bytes().unwrap_or(ram.transferred_bytes),
            remaining_bytes: ram.remaining_bytes,
            total_bytes: ram.total_bytes,
            rounds: ram.rounds,
            passed_bytes: ram.transferred_bytes,
            // What is sent meanwhile is what gets dirty, however little that is: the VM is not throttled for it.
            dirty_bytes_per_s: if self.settings.downtime_limit.holds() { 0 } else { dirty_bytes_per_s },
        }
    }

    async fn follow_downtime_limit(&mut self, rounds: u64) {
        let limit = if self.settings.downtime_limit.holds() {
            self.settings.downtime_limit.rounds_held = rounds;
            HELD_DOWNTIME_LIMIT_MS
        } else {
            downtime_limit_ms(rounds.saturating_sub(self.settings.downtime_limit.rounds_held))
        };
        if limit == self.settings.downtime_limit.ms {
            return;
        }
        match self.set_downtime_limit(limit).await {
            Ok(()) => self.settings.downtime_limit.ms = limit,
            Err(error) => warn!(%error, "the downtime limit stays at {} ms", self.settings.downtime_limit.ms),
        }
    }

    async fn set_downtime_limit(&self, limit_ms: u64) -> Result<(), Problem> {
        self.vmm()?.set_downtime_limit(limit_ms, QMP_DEADLINE).await.map_err(hypervisor_failed)
    }

    /// Nothing while QEMU is too busy to answer: looking for changed memory it has been seen to be so
    /// for 5 s (7.2, without KVM). How long it may stand still is the engine's to say.
    pub(super) async fn status(&self) -> Result<Option<TransferStatus>, Problem> {
        match self.vmm()?.migration(QMP_DEADLINE).await {
            Ok(status) => Ok(Some(status)),
            // When QEMU ends, its answer fails first; that it ended tells more.
            Err(error) => match self.vmm() {
                Ok(_) if error.is_mute() => Ok(None),
                Ok(_) => Err(hypervisor_failed(error)),
                Err(problem) => Err(problem),
            },
        }
    }

    /// Sets on QEMU's connections what QEMU does not. The relay does so by itself.
    fn set_on_connections(&mut self, status: &TransferStatus, remaining_bytes: u64) {
        let Some(plan) = &self.agreed.plan else { return };
        let Some(parallel) = plan.transfer.parallel() else { return };
        // A guest that goes on writing may have much to send again in its next round.
        let unsent_bytes =
            unsent_limit_bytes(&plan.paths, parallel.channels().get(), remaining_bytes, sent_mbps(status));
        if let Some(relay) = &self.relay {
            return relay.set_short(unsent_bytes.is_some());
        }
        if status.status == MigrationStatus::Active {
            self.ignore_resets();
        }
        if let Some((vmm, address, count)) = self.own_multifd()
            && let Some(connections) = vmm.connections()
        {
            self.settings
                .unsent_limit
                .follow(unsent_bytes, count, |bytes| connections.limit_unsent(address, bytes));
        }
    }

    /// The source's QEMU and where it is connected to; none if it is the relay that is, or nothing may be set on QEMU's.
    pub(super) fn own_connections(&self) -> Option<(Arc<dyn Machine>, SocketAddr)> {
        let plan = self.agreed.plan.as_ref()?;
        let address = listening_at(plan, self.agreed.endpoint.as_ref()?).ok()?;
        let vmm = self.claimed.vmm.clone()?;
        let (source, _) = self.agreed.facts.as_ref()?;
        // What RDMA connects is no socket.
        let are_sockets = plan.relay().is_none() && !plan.transfer.is_by_rdma();
        let are_own = are_sockets && source.hypervisor.capabilities.connections_are_ours;
        are_own.then_some((vmm, address))
    }

    /// With how many connections multifd makes of them; none if there is no multifd.
    fn own_multifd(&self) -> Option<(Arc<dyn Machine>, SocketAddr, usize)> {
        let plan = self.agreed.plan.as_ref().filter(|plan| plan.transfer.parallel().is_some())?;
        let (vmm, address) = self.own_connections()?;
        Some((vmm, address, connections(plan)))
    }

    /// In QEMU's words. Of RDMA, 7.2 has them in its log alone.
    fn why_failed(&self, status: &TransferStatus) -> String {
        let said = status.error_desc.clone();
        if !self.agreed.plan.as_ref().is_some_and(|plan| plan.transfer.is_by_rdma()) {
            return format!("QEMU: {}", said.unwrap_or_else(|| format!("QEMU calls it {}", status.status)));
        }
        let log = self.vmm().map(|vmm| vmm.log_tail()).unwrap_or_default();
        let last = log.lines().rev().find(|line| !line.trim().is_empty()).map(one_line);
        let said = said.or(last).unwrap_or_else(|| status.status.to_string());
        format!(
            "the transfer by RDMA failed; look at the link, and at `rdma link` on both hosts; QEMU says: {said}"
        )
    }

    fn guard_has_acted(&self) -> bool {
        self.outgoing.journal.is_hand_over_forbidden(&self.running.id).unwrap_or(false)
    }
}

/// The target's main connection is read by one thread, which has the guest's state to take, too. With half a gibibyte of
/// zero pages it was 70 ms behind when the VM was paused (decision 88).
fn zero_pages((source, target): &(HostFacts, HostFacts)) -> Option<ZeroPages> {
    let [source, target] = [source, target].map(|facts| facts.hypervisor.capabilities.zero_pages_in_parallel);
    source.then_some(if target { ZeroPages::InParallel } else { ZeroPages::InMain })
}

/// What limits its bandwidth.
fn valve(plan: &Plan, relay: Option<&OutgoingRelay>, pacer: Pacer) -> Valve {
    match (relay, plan.limit_keeper()) {
        (Some(relay), _) => Valve::Relay(relay.limiter()),
        (None, LimitKeeper::Agents) => Valve::Hypervisor(pacer),
        (None, LimitKeeper::Hypervisor) => Valve::Hypervisor(pacer.left_to_hypervisor()),
        (None, LimitKeeper::Nobody) => Valve::Nobody,
    }
}

/// The recent rate; 0 if the hypervisor does not report it.
fn sent_mbps(status: &TransferStatus) -> u64 {
    let mbps = status.ram.map_or(0.0, |ram| ram.throughput_mbps);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    let mbps = mbps as u64;
    mbps
}

/// The address at which the target's QEMU listens, as seen from here.
pub(super) fn listening_at(plan: &Plan, endpoint: &Endpoint) -> io::Result<SocketAddr> {
    on_link(&plan.paths.first().link, endpoint.address, endpoint.port)
}

/// The address at which the target accepts copies of disks, as seen from here.
pub(super) fn disks_at(plan: &Plan, endpoint: &Endpoint, port: u16) -> io::Result<SocketAddr> {
    on_link(&plan.paths.first().link, endpoint.address, port)
}
