//! The VMs of the host.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{VmName, VmSpec};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Query, Segment};
use crate::http::api::{Routes, tags};
use crate::incoming::{self, Incoming, check_nowhere_else};
use crate::outgoing::{self, Outgoing};
use crate::peers::proof::Proof;
use crate::vms::Vms;
use drainpipe_api_types::{CreateVm, ReclaimRequest, Scope, VmList, VmView};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(vms, create_vm))
        .routes(routes!(vm, remove_vm))
        .routes(routes!(vm_definition))
        .routes(routes!(start_vm))
        .routes(routes!(stop_vm))
        .routes(routes!(reclaim_vm))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct VmsQuery {
    /// The hosts whose VMs are listed.
    #[serde(default)]
    #[param(inline, required = false)]
    scope: Scope,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StopQuery {
    /// Pull the plug instead of asking the guest to power off.
    #[serde(default)]
    #[param(required = false)]
    force: bool,
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StartQuery {
    /// Hosts that cannot be asked whether they have it, and do not have it according to the caller; separated by
    /// commas.
    #[serde(default)]
    #[param(required = false)]
    although_unreachable: String,
}

/// VMs
///
/// Those on this host and on their way to it; with `scope=all`, those of its peers too.
#[utoipa::path(get, path = "/v1/vms", tag = tags::VMS, params(VmsQuery), responses(
    (status = 200, description = "The VMs, and what kept others out of the list.", body = VmList),
))]
async fn vms(State(incoming): State<Arc<Incoming>>, Query(query): Query<VmsQuery>) -> Answer<VmList> {
    Ok(Json(incoming.list_vms(query.scope).await))
}

/// One VM
#[utoipa::path(get, path = "/v1/vms/{name}", tag = tags::VMS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "The VM.", body = VmView),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
))]
async fn vm(State(vms): State<Arc<Vms>>, Segment(name): Segment<VmName>) -> Answer<VmView> {
    Ok(Json(vms.get(name.as_str()).await?))
}

/// A VM's specification
///
/// As its owner wrote it.
#[utoipa::path(get, path = "/v1/vms/{name}/definition", tag = tags::VMS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "The specification.", body = VmSpec),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
))]
async fn vm_definition(State(vms): State<Arc<Vms>>, Segment(name): Segment<VmName>) -> Answer<VmSpec> {
    Ok(Json(vms.definition(name.as_str())?))
}

/// Make a VM
///
/// It is defined, not started.
#[utoipa::path(post, path = "/v1/vms", tag = tags::VMS, request_body = CreateVm, responses(
    (status = 200, description = "Defined.", body = ()),
    (status = 409, description = "A VM of that name is here, or on its way.", body = Problem),
    (status = 422, description = "This host is cordoned, or does not let VMs use what it names.", body = Problem),
))]
async fn create_vm(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<CreateVm>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    request.spec.validate().map_err(Problem::bad_input)?;
    incoming.check_cordon(None)?;
    if incoming.entries.has(request.spec.name.as_str()) {
        let (name, host) = (&request.spec.name, incoming.host.name());
        return Err(Problem::conflict(format!("a VM {name} is on its way to {host}")).into());
    }
    incoming.files.check_allowed(&request.spec).await?;
    Ok(Json(incoming.vms.create(request.spec)?))
}

/// Remove a VM
///
/// It must not run. Its disks stay.
#[utoipa::path(delete, path = "/v1/vms/{name}", tag = tags::VMS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "Removed.", body = ()),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "It runs, or is being changed or moved.", body = Problem),
))]
async fn remove_vm(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    incoming.vms.remove(name.as_str()).await?;
    incoming::close_unfinished(&incoming, name.as_str()).await;
    Ok(Json(()))
}

/// Start a VM
///
/// The other hosts are asked whether they have it. One that cannot be asked, and may have it, is a reason to refuse.
#[utoipa::path(post, path = "/v1/vms/{name}/start", tag = tags::VMS, params(
    ("name" = VmName, Path), StartQuery
), responses(
    (status = 200, description = "Its QEMU runs, and the guest boots.", body = ()),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "It runs already, here or on another host, or is being changed or moved.", body = Problem),
    (status = 422, description = "This host is cordoned, is short of memory, cannot run it any more, or does not let VMs use what it names, or a host that may have it cannot be asked; the message says which.", body = Problem),
))]
async fn start_vm(
    State(incoming): State<Arc<Incoming>>,
    State(proof): State<Arc<Proof>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
    Query(query): Query<StartQuery>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    incoming.host.check_not_stopping()?;
    let although: BTreeSet<String> =
        query.although_unreachable.split(',').filter(|host| !host.is_empty()).map(Into::into).collect();
    let check = async |definition: VmSpec| {
        incoming.check_start(&definition)?;
        incoming.files.check_usable(&definition, &[]).await?;
        check_nowhere_else(&incoming, &proof, definition.name.as_str(), &although).await
    };
    Ok(Json(incoming.vms.start(name.as_str(), check).await?))
}

/// Stop a VM
///
/// Asks the guest to power off and waits up to a minute for it.
#[utoipa::path(post, path = "/v1/vms/{name}/stop", tag = tags::VMS, params(
    ("name" = VmName, Path), StopQuery
), responses(
    (status = 200, description = "It does not run any more.", body = ()),
    (status = 404, description = "No VM of that name here, or no host of that name.", body = Problem),
    (status = 409, description = "It does not run, or is being changed or moved.", body = Problem),
    (status = 500, description = "The guest ignores its power button.", body = Problem),
))]
async fn stop_vm(
    State(outgoing): State<Arc<Outgoing>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
    Query(query): Query<StopQuery>,
) -> Answer<()> {
    authorise(&caller, Operation::ManageVms)?;
    outgoing::check_own(&outgoing, name.as_str())?;
    if incoming::stop_ordered(&outgoing.incoming, name.as_str(), query.force).await? {
        return Ok(Json(()));
    }
    Ok(Json(outgoing.vms.stop(name.as_str(), query.force).await?))
}

/// Give a VM back to this host whose target is lost
///
/// Its hand-over is recorded, and the target does not answer. The caller says that the target is lost,
/// with all that ran there; as long as it answers, that is not believed. Then the VM is powered off here, to
/// be booted again. Answers with how the migration has ended.
#[utoipa::path(post, path = "/v1/vms/{name}/reclaim", tag = tags::VMS, request_body = ReclaimRequest, params(
    ("name" = VmName, Path)
), responses(
    (status = 200, description = "It is settled where the VM is.", body = MigrationResult),
    (status = 400, description = "It was handed over to another host.", body = Problem),
    (status = 409, description = "No hand-over of it waits for its target.", body = Problem),
    (status = 500, description = "It is still in doubt.", body = Problem),
))]
async fn reclaim_vm(
    State(outgoing): State<Arc<Outgoing>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
    Body(request): Body<ReclaimRequest>,
) -> Answer<MigrationResult> {
    authorise(&caller, Operation::ManageVms)?;
    Ok(Json(outgoing::reclaim(&outgoing, name.as_str(), &request.lost).await?))
}
