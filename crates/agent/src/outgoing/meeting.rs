//! Step 1: two hosts meet, and plan how a VM goes from one to the other.

use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::plan::{Plan, PlanRequest, plan};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::{Machine, Manager};

use super::Outgoing;
use crate::outgoing::memory_look;
use crate::paths::discovery::discover;
use crate::paths::path_history::{self, Learnt};
use crate::peers::client::ApiClient;
use crate::peers::release::ask_host;
use crate::vms::hypervisors::facts_for;
use drainpipe_api_types::{HostView, MigrateRequest};

/// What a request asks of the plan.
pub(super) fn asked_for(request: &MigrateRequest) -> PlanRequest {
    let MigrateRequest { encrypt, post_copy, .. } = *request;
    PlanRequest { encrypt, post_copy, ..request.option.into() }
}

/// What a caller asks for, with what is known of the VM's memory and of earlier migrations where that may decide
/// whether it is compressed.
pub(super) async fn informed(
    outgoing: &Outgoing,
    target: &str,
    request: PlanRequest,
    vmm: Option<&dyn Machine>,
) -> Result<PlanRequest, Problem> {
    if !request.option.may_compress() || request.post_copy {
        return Ok(request);
    }
    let (zero_share, memory) = match vmm {
        Some(vmm) => memory_look::contents(vmm, request.option).await,
        None => (None, None),
    };
    let free_cores = outgoing.host.idle_cores.known();
    let Learnt { saved_mbps, compressed_slower, .. } =
        path_history::of_target(&outgoing.journal, free_cores, target, request.option)?;
    Ok(PlanRequest { memory, zero_share, saved_mbps, compressed_slower, ..request })
}

/// The share of a VM's memory that is zero, where the plan does not ask: for the prediction alone.
pub(super) async fn zero_share(asked: PlanRequest, vmm: Option<&dyn Machine>) -> Option<f64> {
    match vmm.filter(|_| asked.zero_share.is_none() && !asked.post_copy) {
        Some(vmm) => memory_look::zero_share(vmm).await,
        None => asked.zero_share,
    }
}

/// What step 1 has shown.
pub(crate) struct Meeting {
    /// What the two hosts speak.
    pub(crate) protocol: Protocol,
    /// What this host has.
    pub(crate) source: HostFacts,
    /// What the target is.
    pub(crate) target: HostView,
    /// How a VM would go there.
    pub(crate) plan: Plan,
}

/// Step 1: what the hosts speak, what each has, which links reach which, and the plan that follows.
pub(crate) async fn meet(
    outgoing: &Outgoing,
    peer: &ApiClient,
    target: &str,
    manager: Option<Manager>,
    request: impl Into<PlanRequest>,
    memory_bytes: u64,
) -> Result<Meeting, Problem> {
    let (view, protocol): (HostView, _) = ask_host(outgoing.host.name(), peer, target, "/v1/host").await?;
    if view.facts.name != target {
        return Err(Problem::refused(format!(
            "the agent that should be {target} calls itself {}: correct the [[peer]] entries of {}",
            view.facts.name,
            outgoing.host.name()
        )));
    }
    let (source, mut target) = (outgoing.incoming.facts().await?, view);
    let source = facts_for(manager, source)?;
    target.facts = facts_for(manager, target.facts)?;
    let request = request.into();
    let reaches = discover(&outgoing.host, peer, [&source, &target.facts], request.option).await;
    let plan = plan(&source, &target.facts, request, &reaches, memory_bytes).map_err(Problem::refused)?;
    if let Some(why) = protocol.obstacle(plan.post_copy(), plan.is_encrypted(), &target.facts.name) {
        return Err(Problem::refused(why));
    }
    Ok(Meeting { protocol, source, target, plan })
}
