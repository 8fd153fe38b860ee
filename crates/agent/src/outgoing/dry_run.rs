//! A migration that is planned, predicted and checked, and not begun.

use drainpipe_engine::estimate::convergence::{self, MovingVm};
use drainpipe_engine::estimate::cores::busy_warnings;
use drainpipe_engine::estimate::prediction;
use drainpipe_engine::finding::Finding;
use drainpipe_engine::plan::{Plan, PlanRequest};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::{DiskCopies, Machine};

use super::meeting::{Meeting, asked_for, informed, meet, zero_share};
use super::{Outgoing, disks};
use crate::check;
use crate::outgoing::memory_look;
use crate::outgoing::result;
use drainpipe_api_types::{MigrateRequest, PlanView};

/// The plan of a migration that is not begun.
pub(crate) async fn dry_run(outgoing: &Outgoing, request: &MigrateRequest) -> Result<PlanView, Problem> {
    let peer = outgoing.peers.target(&request.target)?;
    let definition = outgoing.vms.definition(&request.vm)?;
    let memory_bytes = definition.memory_mib << 20;
    let vmm = outgoing.vms.running(&request.vm);
    let asked = asked_for(request);
    let asked = informed(outgoing, &request.target, asked, vmm.as_deref()).await?;
    let meeting = meet(outgoing, &peer, &request.target, definition.manager, asked, memory_bytes);
    let (meeting, zero_share) = tokio::join!(meeting, zero_share(asked, vmm.as_deref()));
    let mut meeting = meeting?;
    if let Some(vmm) = &vmm {
        meeting.plan.disks = disks::to_copy(outgoing, &peer, request, &meeting, vmm).await?;
    }
    let Meeting { source, target, plan, .. } = meeting;
    let asked = PlanRequest { zero_share, ..asked };
    let predicted_total_ms = prediction::total_ms(&source, &target.facts, &plan, &asked, memory_bytes);
    let predicted_most_ms = predicted_total_ms.and_then(|ms| prediction::most_ms(&source, &target.facts, ms));
    let warnings = busy_warnings(&source, &target.facts);
    let limits = source.limits_to(&target.facts);
    let copies = vmm.as_ref().and_then(|vmm| vmm.disk_copies()).filter(|_| !plan.disks.is_empty());
    let holds_writes = copies.is_some_and(DiskCopies::holds_writes);
    let findings = match vmm {
        Some(vmm) => {
            let outpaced = outpaced(outgoing, request, &*vmm, memory_bytes, &plan).await;
            let found =
                check::before_migration(&outgoing.checks, &peer, &request.target, &[vmm], &plan).await?;
            outpaced.into_iter().chain(found).collect()
        }
        None => vec![],
    };
    Ok(PlanView {
        vm: request.vm.clone(),
        source: source.name,
        target: target.facts.name,
        plan,
        predicted_total_ms: predicted_total_ms.map(result::tenth),
        predicted_most_ms: predicted_most_ms.map(result::tenth),
        warnings,
        bandwidth_limit_mbps: limits.all_mbps,
        storage_limit_mbps: limits.storage_mbps,
        holds_writes,
        findings,
    })
}

/// Whether the VM's memory gets dirty faster than it would be sent.
async fn outpaced(
    outgoing: &Outgoing,
    request: &MigrateRequest,
    vmm: &dyn Machine,
    memory_bytes: u64,
    plan: &Plan,
) -> Option<Finding> {
    let memory = memory_look::sample(vmm).await?;
    let throttle_max_percent =
        request.throttle_max_percent.unwrap_or(outgoing.host.config.limits.throttle_max_percent);
    let (vm, source) = (request.vm.as_str(), outgoing.host.name());
    convergence::foreseen(&MovingVm { vm, source, memory_bytes, memory, throttle_max_percent }, plan)
}
