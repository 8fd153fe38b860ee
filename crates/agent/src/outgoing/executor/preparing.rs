//! Steps 1, 2 and 5: the hosts meet, the target permits the VM, and they are connected.

use std::net::IpAddr;

use drainpipe_engine::check::refusal;
use drainpipe_engine::estimate::prediction;
use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::migration::SourceEvent;
use drainpipe_engine::migration::timing::{ASK_FOR_PLACE_EVERY, fills_within};
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::path_record::TrialOutcome;
use drainpipe_engine::plan::{Plan, PlanRequest, Spread};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::RunState;
use tokio::sync::mpsc;
use tracing::info;

use super::{Executor, hypervisor_failed};
use crate::check;
use crate::outgoing::disks;
use crate::outgoing::meeting::{Meeting, informed, meet, zero_share};
use crate::paths::path_watch::Joining;
use crate::paths::probe::{self, Connected, Load, ProbePorts, ProbeRequest};
use crate::peers::client::ANSWER_DEADLINE;
use crate::transfer::transport::transport;
use crate::vms::{QMP_DEADLINE, does_not_run};
use drainpipe_api_types::{ConnectionRequest, Endpoint, IncomingPermit, IncomingRequest, WatchEnd};

/// Turns of paths that may wait for the log.
const NEWS_MAX: usize = 64;

/// What the two hosts have agreed on, step by step.
#[derive(Default)]
pub(super) struct Agreed {
    pub(super) protocol: Option<Protocol>,
    pub(super) facts: Option<(HostFacts, HostFacts)>,
    pub(super) plan: Option<Plan>,
    /// Where the target takes the VM.
    pub(super) endpoint: Option<Endpoint>,
    /// From the request to the end; absent if it cannot be predicted.
    pub(super) predicted_total_ms: Option<f64>,
}

impl Executor {
    pub(super) async fn establish_hosts(&mut self) -> Result<SourceEvent, Problem> {
        let (outgoing, to, vmm) = (&self.outgoing, &self.running.target, self.claimed.vmm.as_deref());
        let asked = informed(outgoing, to, self.order.request, vmm).await?;
        let peer = self.peer()?;
        let meeting = meet(outgoing, &peer, to, self.claimed.definition.manager, asked, self.memory_bytes());
        let (meeting, zero_share) = tokio::join!(meeting, zero_share(asked, vmm));
        let mut meeting = meeting?;
        if let Some(vmm) = &self.claimed.vmm {
            meeting.plan.disks =
                disks::to_copy(&self.outgoing, &peer, &self.order.asked, &meeting, vmm).await?;
        }
        let Meeting { protocol, source, target, plan } = meeting;
        self.note_protocol(protocol, &target.release().shown_version());
        let asked = PlanRequest { zero_share, ..asked };
        self.agreed.predicted_total_ms =
            prediction::total_ms(&source, &target.facts, &plan, &asked, self.memory_bytes());
        let vmm = self.claimed.vmm.as_ref().ok_or_else(|| does_not_run(&self.claimed.definition))?;
        let vms = std::slice::from_ref(vmm);
        self.heard.findings =
            check::before_migration(&self.outgoing.checks, &peer, &self.running.target, vms, &plan).await?;
        self.agreed.facts = Some((source, target.facts));
        self.agreed.plan = Some(plan.clone());
        refusal(&self.heard.findings).map_or(Ok(SourceEvent::Established(plan)), Err)
    }

    fn note_protocol(&mut self, protocol: Protocol, target_version: &str) {
        self.agreed.protocol = Some(protocol);
        if protocol.is_of_older_release() {
            let (vm, target, number) = (&self.running.vm, &self.running.target, protocol.number());
            info!(vm, target, target_version, protocol = number, "an older drainpipe: using what both know");
        }
    }

    pub(super) async fn check_permissions(&self) -> Result<SourceEvent, Problem> {
        let vmm = self.vmm()?;
        let state = vmm.run_state(QMP_DEADLINE).await.map_err(hypervisor_failed)?;
        if state != RunState::Running {
            return Err(Problem::refused(format!(
                "VM {} is {state}; only a running VM moves",
                self.running.vm
            )));
        }
        let transfer = vmm.migration(QMP_DEADLINE).await.map_err(hypervisor_failed)?.status;
        if transfer.is_post_copy() {
            return Err(Problem::conflict(format!(
                "part of the memory of {} is still on its way to {} (post-copy); move it when all is there",
                self.running.vm,
                self.outgoing.host.name()
            )));
        }
        let request = IncomingRequest {
            id: self.running.id.clone(),
            spec: vmm.spec().with_disks_at(&self.places()),
            definition: self.definition_there(),
            may_wait: self.running.is_held(),
            cores_taken: self.outgoing.vms.cores_taken_by(&self.running.vm),
            disks: self.agreed.plan.as_ref().map(|plan| plan.disks.clone()).unwrap_or_default(),
            release: self.agreed.protocol.and_then(Protocol::release_in_step_2),
        };
        match self.peer()?.post("/v1/incoming", &request).await? {
            IncomingPermit::Granted => Ok(SourceEvent::Done),
            IncomingPermit::Busy(why) => {
                tokio::select! {
                    () = self.running.cancel.notified() => {}
                    () = tokio::time::sleep(ASK_FOR_PLACE_EVERY) => {}
                }
                Ok(SourceEvent::Busy(why))
            }
        }
    }

    pub(super) async fn connect_hosts(&mut self) -> Result<SourceEvent, Problem> {
        let no_plan = || Problem::failed("cannot connect before there is a plan");
        let (source, target) = self.agreed.facts.as_ref().ok_or_else(no_plan)?;
        let plan = self.agreed.plan.clone().ok_or_else(no_plan)?;
        let request = ProbeRequest { paths: plan.paths.iter().map(Path::reversed).collect() };
        let ports: ProbePorts = self.peer()?.post(&self.incoming("probe"), &request).await?;
        let trials = probe::try_paths(&self.outgoing.host.network, &plan.paths, &ports, Load::Large).await;
        let round_trip_us = self.round_trip_us(&trials);
        let trials: Vec<TrialOutcome> = trials.into_iter().map(|trial| trial.map(drop)).collect();
        let plan = plan.narrow(&trials, &source.name, &target.name).map_err(Problem::failed)?;
        let endpoint = match (plan.spread(), target.migration_address) {
            (Spread::Routed, Some(address)) => self.connect_routed(&plan, address, round_trip_us).await?,
            _ => self.ask_to_listen(&plan, None, round_trip_us).await?,
        };
        self.agreed.endpoint = Some(endpoint);
        self.agreed.plan = Some(plan.clone());
        Ok(SourceEvent::Connected(plan))
    }

    /// The round trip of the slowest path, if the target accepts it.
    fn round_trip_us(&self, trials: &[Connected]) -> Option<u32> {
        let longest = probe::longest_round_trip(trials);
        let round_trip = self.agreed.protocol?.round_trip_in_step_5(longest)?;
        u32::try_from(round_trip.as_micros()).ok()
    }

    async fn connect_routed(
        &mut self,
        plan: &Plan,
        target: IpAddr,
        round_trip_us: Option<u32>,
    ) -> Result<Endpoint, Problem> {
        let (tell, news) = mpsc::channel(NEWS_MAX);
        let joining = Joining {
            migration: &self.running.id,
            peer: &self.running.target,
            address: target,
            paths: &plan.paths,
            absent: &[],
            news: Some(tell),
        };
        let own = self.outgoing.transfer.watches.join(joining).await?;
        let endpoint = self.ask_to_listen(plan, Some(own), round_trip_us).await?;
        let other =
            endpoint.watch.as_ref().ok_or_else(|| Problem::failed("the target does not watch paths"))?;
        self.outgoing.transfer.watches.meet(&self.running.target, &plan.paths, other).await?;
        self.heard.news = news;
        Ok(endpoint)
    }

    async fn ask_to_listen(
        &self,
        plan: &Plan,
        watch: Option<WatchEnd>,
        round_trip_us: Option<u32>,
    ) -> Result<Endpoint, Problem> {
        let disks: Vec<usize> = plan.disks.iter().map(|disk| disk.disk.index()).collect();
        let vmm = self.vmm()?;
        let begun = vmm.begin(transport(plan, None), &disks, QMP_DEADLINE).await;
        let request = ConnectionRequest {
            plan: plan.reversed(),
            migration_address: self.agreed.facts.as_ref().and_then(|(source, _)| source.migration_address),
            watch,
            parcel: begun.map_err(Problem::refused)?,
            round_trip_us,
            attempt: None,
        };
        // The target's is of the same kind.
        let within = if vmm.starts_to_listen() {
            fills_within(self.memory_bytes()) + QMP_DEADLINE
        } else {
            ANSWER_DEADLINE
        };
        self.peer()?.post_within(&self.incoming("connection"), &request, within).await
    }
}
