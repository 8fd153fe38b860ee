//! What a source's agent says to its target's, step by step; and what a target asks.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use drainpipe_engine::bandwidth::classes::TrafficClass;
use drainpipe_engine::host::facts::MigrationLink;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Parcel;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::host::Host;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::error::ApiError;
use crate::http::api::extract::{Body, MigrationId, Query};
use crate::http::api::forward::refuse_host;
use crate::http::api::{Routes, tags};
use crate::incoming::{self, Incoming};
use crate::outgoing::{self, Outgoing};
use crate::paths::discovery::{self, DiscoveryPorts, DiscoveryRequest};
use crate::paths::probe::{ProbePorts, ProbeRequest};
use crate::transfer::bandwidth::Sent;
use drainpipe_api_types::{
    BandwidthShare, ConnectionRequest, Endpoint, HandOverView, IncomingPermit, IncomingRequest, IncomingView,
    TargetUse, TrackedRequest, TrackedTaken, WatchEnd, WatchRequest,
};

/// Longest that a caller may have an answer held back.
const WAIT_MAX: Duration = Duration::from_mins(1);

/// Most paths of one migration.
const PATHS_MAX: usize = 64;

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(try_links))
        .routes(routes!(permit))
        .routes(routes!(view, discard))
        .routes(routes!(reserve_memory))
        .routes(routes!(build_incoming_vm))
        .routes(routes!(open_probes))
        .routes(routes!(connect))
        .routes(routes!(watch_again))
        .routes(routes!(bandwidth_share))
        .routes(routes!(close_disks))
        .routes(routes!(complete))
        .routes(routes!(take_tracked))
        .routes(routes!(received))
        .routes(routes!(run))
        .routes(routes!(connect_again))
        .routes(routes!(end_part))
        .routes(routes!(finish))
        .routes(routes!(hand_over))
}

/// Keeps everybody but hosts from these paths, and hosts from having them passed on.
pub(in crate::http::api) async fn hosts_only(
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    caller.host()?;
    refuse_host(request.uri())?;
    Ok(next.run(request).await)
}

/// Lets only the source of a migration carry on with it.
fn check_source(incoming: &Incoming, caller: &Caller, id: &str) -> Result<(), Problem> {
    let recorded = incoming.journal.incoming_state(id)?.map(|(source, _)| source);
    let source =
        incoming.entries.source_of(id).or(recorded).ok_or_else(|| incoming::no_migration(incoming, id))?;
    authorise(caller, Operation::SendVm { source: &source })?;
    incoming.entries.heard(id, caller.host()?);
    Ok(())
}

/// The links that a source may ask for: those that this host's configuration gives to migrations.
pub(super) async fn own_links(host: &Host) -> Result<Vec<MigrationLink>, Problem> {
    Ok(host.migration_links().await?.all())
}

/// Refuses paths over links that are not for migrations, or to gateways that they do not reach, and a link
/// in two paths.
pub(in crate::http::api) fn check_paths(links: &[MigrationLink], paths: &[Path]) -> Result<(), Problem> {
    match absent_paths(links, paths)?.first() {
        None => Ok(()),
        Some(path) => Err(Problem::bad_input(format!(
            "no migration link {} of this host reaches {} from {}",
            path.link.escape_default(),
            path.peer_address,
            path.address
        ))),
    }
}

/// The paths that are over no migration link of this host, as it is now: a link that is switched off has
/// lost its IPv6 addresses. Refuses a link in two paths.
fn absent_paths(links: &[MigrationLink], paths: &[Path]) -> Result<Vec<Path>, Problem> {
    if paths.len() > PATHS_MAX {
        return Err(Problem::bad_input(format!("more than {PATHS_MAX} paths")));
    }
    let distinct: HashSet<&str> = paths.iter().map(|path| path.link.as_str()).collect();
    if distinct.len() != paths.len() {
        return Err(Problem::bad_input("each link stands in one path at most"));
    }
    let is_there = |path: &&Path| {
        let link = links.iter().find(|link| link.name == path.link);
        link.is_some_and(|link| {
            link.addresses.iter().any(|net| net.addr() == path.address && net.contains(&path.peer_address))
        })
    };
    Ok(paths.iter().filter(|path| !is_there(path)).cloned().collect())
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WaitQuery {
    /// How long the answer may be held back, in milliseconds; a minute at most.
    #[serde(default)]
    #[param(required = false, maximum = 60_000)]
    wait_ms: u64,
    /// Whether the VM is paused on its source, and goes before others here.
    #[serde(default)]
    #[param(required = false)]
    is_paused: bool,
}

/// Step 1: open ports on which the source finds out which links of its reach which of this host
#[utoipa::path(post, path = "/v1/discovery", tag = tags::BETWEEN_AGENTS, request_body = DiscoveryRequest, responses(
    (status = 200, description = "The ports, open for half a second.", body = DiscoveryPorts),
    (status = 409, description = "Too many trials are under way.", body = Problem),
))]
async fn try_links(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<DiscoveryRequest>,
) -> Answer<DiscoveryPorts> {
    let (host, slots) = (&incoming.host, &incoming.transfer.discoveries);
    let links = own_links(host).await?;
    Ok(Json(discovery::open(host, slots, caller.host()?, &links, &request).await?))
}

/// Step 2: may this VM come?
#[utoipa::path(post, path = "/v1/incoming", tag = tags::BETWEEN_AGENTS, request_body = IncomingRequest, responses(
    (status = 200, description = "It may, or has to wait.", body = IncomingPermit),
    (status = 409, description = "A VM of that name is here, or the identifier was used before.", body = Problem),
    (status = 422, description = "This host is cordoned, cannot run it, does not know the source, or does not let VMs use what it names.", body = Problem),
))]
async fn permit(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<IncomingRequest>,
) -> Answer<IncomingPermit> {
    Ok(Json(incoming::permit(&incoming, caller.host()?, request).await?))
}

/// What was decided of a VM on its way
#[utoipa::path(get, path = "/v1/incoming/{id}", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses((status = 200, description = "What was decided.", body = IncomingView)))]
async fn view(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<IncomingView> {
    // Any caller may have the answer.
    if let Ok(host) = caller.host() {
        incoming.entries.heard(&id, host);
    }
    Ok(Json(incoming::view(&incoming, &id).await?))
}

/// Do not run the VM here
///
/// Idempotent. Nothing is recorded for an identifier that is not known.
#[utoipa::path(delete, path = "/v1/incoming/{id}", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "It never ran here and never will.", body = ()),
    (status = 404, description = "There is no record of it here, which promises nothing.", body = Problem),
    (status = 409, description = "It runs here.", body = Problem),
))]
async fn discard(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::discard(&incoming, &id).await?))
}

/// Step 3: reserve the memory, and make the disks that are copied
#[utoipa::path(post, path = "/v1/incoming/{id}/memory", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "Reserved.", body = ()),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 422, description = "Too little memory, or no place for a disk.", body = Problem),
))]
async fn reserve_memory(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    incoming::reserve_memory(&incoming, &id)?;
    Ok(Json(incoming::make_disks(&incoming, &id).await?))
}

/// Step 4: build the incoming VM
#[utoipa::path(post, path = "/v1/incoming/{id}/skeleton", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "Its QEMU waits for the state.", body = ()),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here.", body = Problem),
    (status = 422, description = "This host cannot run it.", body = Problem),
))]
async fn build_incoming_vm(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::build_incoming_vm(&incoming, &id).await?))
}

/// Step 5: open ports on which the source tries each path
#[utoipa::path(post, path = "/v1/incoming/{id}/probe", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = ProbeRequest, responses(
    (status = 200, description = "The ports, open for a few seconds.", body = ProbePorts),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here, or too many are tried at once.", body = Problem),
))]
async fn open_probes(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(request): Body<ProbeRequest>,
) -> Answer<ProbePorts> {
    check_source(&incoming, &caller, &id)?;
    check_paths(&own_links(&incoming.host).await?, &request.paths)?;
    Ok(Json(incoming::open_trials(&incoming, &id, &request.paths).await?))
}

/// Step 5: prepare the paths and listen
#[utoipa::path(post, path = "/v1/incoming/{id}/connection", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = ConnectionRequest, responses(
    (status = 200, description = "It listens there.", body = Endpoint),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It has no incoming VM here, or was given up.", body = Problem),
    (status = 422, description = "This host cannot do it that way.", body = Problem),
))]
async fn connect(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(request): Body<ConnectionRequest>,
) -> Answer<Endpoint> {
    check_source(&incoming, &caller, &id)?;
    let links = own_links(&incoming.host).await?;
    check_paths(&links, &request.plan.paths)?;
    Ok(Json(incoming::connect(&incoming, &id, request).await?))
}

/// Watch the paths again
///
/// For a source that hears nothing of the target's watch any more: its agent may have been restarted.
/// Idempotent. A path whose link is down here has no port in the answer, and the source asks again.
#[utoipa::path(post, path = "/v1/incoming/{id}/watch", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = WatchRequest, responses(
    (status = 200, description = "Where this host watches the paths.", body = WatchEnd),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here, or runs here, or all its links are down.", body = Problem),
    (status = 422, description = "This host cannot do it that way.", body = Problem),
))]
async fn watch_again(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(request): Body<WatchRequest>,
) -> Answer<WatchEnd> {
    check_source(&incoming, &caller, &id)?;
    let absent = absent_paths(&own_links(&incoming.host).await?, &request.paths)?;
    Ok(Json(incoming::watch_again(&incoming, &id, &request, &absent).await?))
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WantedQuery {
    /// What the migration could use, in Mb/s; all that there is, if absent.
    wanted_mbps: Option<u64>,
    /// What it sends; its memory, if absent.
    #[serde(default)]
    #[param(inline, required = false)]
    class: TrafficClass,
    /// Whether these are writes for which the guest waits; no, if absent.
    #[serde(default)]
    guest_waits: bool,
}

/// From the copies of its disks to step 7: how much of this host's links may it take?
///
/// Asked again and again; a source that has not asked for 4 s has no share.
#[utoipa::path(get, path = "/v1/incoming/{id}/bandwidth", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid"), WantedQuery
), responses(
    (status = 200, description = "Its share.", body = BandwidthShare),
    (status = 404, description = "No such migration on its way here.", body = Problem),
))]
async fn bandwidth_share(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Query(query): Query<WantedQuery>,
) -> Answer<BandwidthShare> {
    check_source(&incoming, &caller, &id)?;
    let WantedQuery { wanted_mbps, class, guest_waits } = query;
    let sent = Sent { migration: id, class };
    Ok(Json(incoming.transfer.bandwidth.share_of_coming(&sent, wanted_mbps, guest_waits)))
}

/// Step 8: nobody writes to the disks any more that were copied
///
/// Idempotent. Before the hand-over is recorded, and again before the VM runs.
#[utoipa::path(post, path = "/v1/incoming/{id}/close-disks", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "Nobody does.", body = ()),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here.", body = Problem),
))]
async fn close_disks(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::close_disks(&incoming, &id).await?))
}

/// Step 8: the last that the source's hypervisor hands over
///
/// Where the hypervisors need more than what they send to each other. The guest does not run here by it.
#[utoipa::path(post, path = "/v1/incoming/{id}/complete", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = Parcel, responses(
    (status = 200, description = "All is here."),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It has no incoming VM here, or was given up.", body = Problem),
))]
async fn complete(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(parcel): Body<Parcel>,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::complete(&incoming, &id, parcel).await?))
}

/// Steps 7 and 8: the connections that the source's firewall tracks of the VM
///
/// This host's firewall tracks them from then on. Those of addresses that cannot be the VM's here are left out. Since
/// protocol 2.
#[utoipa::path(post, path = "/v1/incoming/{id}/tracked", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = TrackedRequest, responses(
    (status = 200, description = "How many are tracked here.", body = TrackedTaken),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here, or runs here.", body = Problem),
))]
async fn take_tracked(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(request): Body<TrackedRequest>,
) -> Answer<TrackedTaken> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::take_tracked(&incoming, &id, request).await?))
}

/// Step 8: is all state here?
#[utoipa::path(get, path = "/v1/incoming/{id}/received", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid"), WaitQuery
), responses(
    (status = 200, description = "`ready`, with post-copy `ready_in_part`, or still `waiting` when the time is over.", body = IncomingView),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It has no incoming VM here.", body = Problem),
))]
async fn received(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Query(query): Query<WaitQuery>,
) -> Answer<IncomingView> {
    check_source(&incoming, &caller, &id)?;
    let wait = super::wait(query.wait_ms, WAIT_MAX)?;
    let view = incoming::wait_received(&incoming, &id, query.is_paused, wait).await?;
    Ok(Json(view))
}

/// Step 9: let it run
///
/// The source has recorded the hand-over. Idempotent.
#[utoipa::path(post, path = "/v1/incoming/{id}/run", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "It runs here.", body = ()),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here.", body = Problem),
))]
async fn run(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::run_by_order(&incoming, &id).await?))
}

/// Post-copy: listen for the rest of the memory
///
/// For a VM that runs here, and whose connection to its source is broken or stands still.
#[utoipa::path(post, path = "/v1/incoming/{id}/reconnection", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), request_body = ConnectionRequest, responses(
    (status = 200, description = "It listens there.", body = Endpoint),
    (status = 404, description = "No such migration.", body = Problem),
    (status = 409, description = "Nothing more is to come.", body = Problem),
    (status = 422, description = "This host cannot do it that way.", body = Problem),
))]
async fn connect_again(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
    Body(request): Body<ConnectionRequest>,
) -> Answer<Endpoint> {
    check_source(&incoming, &caller, &id)?;
    check_paths(&own_links(&incoming.host).await?, &request.plan.paths)?;
    Ok(Json(incoming::connect_again(&incoming, &id, request).await?))
}

/// Post-copy: the rest of the memory is lost
///
/// Ends the VM, which waits for it. Idempotent.
#[utoipa::path(post, path = "/v1/incoming/{id}/end", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "It does not run here.", body = ()),
    (status = 404, description = "No such migration.", body = Problem),
    (status = 409, description = "Nothing more is to come.", body = Problem),
))]
async fn end_part(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<()> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::end_part(&incoming, &id).await?))
}

/// Step 10: nothing more to come
///
/// Puts the network back, and says what the migration used here.
#[utoipa::path(post, path = "/v1/incoming/{id}/finish", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses(
    (status = 200, description = "CPU used here.", body = TargetUse),
    (status = 404, description = "No such migration on its way here.", body = Problem),
    (status = 409, description = "It was given up here.", body = Problem),
))]
async fn finish(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<TargetUse> {
    check_source(&incoming, &caller, &id)?;
    Ok(Json(incoming::finish(&incoming, &id).await?))
}

/// Was this VM handed over?
///
/// What the source's journal says, for a target that has not heard from it; `pending` while the VM is recorded to be
/// handed over and its QEMU at the source does not say that it let go. Only the target may ask. `unknown`, for an
/// identifier of which there is no record here, promises nothing.
#[utoipa::path(get, path = "/v1/handovers/{id}", tag = tags::BETWEEN_AGENTS, params(
    ("id" = String, Path, format = "uuid")
), responses((status = 200, description = "What the journal says.", body = HandOverView)))]
async fn hand_over(
    State(outgoing): State<Arc<Outgoing>>,
    Extension(caller): Extension<Caller>,
    MigrationId(id): MigrationId,
) -> Answer<HandOverView> {
    let (target, view) = outgoing::hand_over_view(&outgoing, &id).await?;
    target.map_or(Ok(()), |target| authorise(&caller, Operation::AskHandOver { target: &target }))?;
    Ok(Json(view))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, address: &str) -> MigrationLink {
        let addresses = vec![address.parse().unwrap()];
        MigrationLink {
            name: name.into(),
            addresses,
            speed_mbps: None,
            mtu: 1500,
            usable: true,
            is_trusted: false,
            card: None,
            rdma: None,
        }
    }

    fn path(link: &str, address: &str, peer_address: &str) -> Path {
        Path {
            link: link.into(),
            address: address.parse().unwrap(),
            peer_link: "e0".into(),
            peer_address: peer_address.parse().unwrap(),
            speed_mbps: None,
            is_standby: false,
            mtu_bytes: None,
        }
    }

    #[test]
    fn a_path_over_a_link_without_its_address_is_absent() {
        let links =
            [link("e0", "10.0.1.2/24"), MigrationLink { addresses: vec![], ..link("e1", "10.0.2.2/24") }];
        let paths = [path("e0", "10.0.1.2", "10.0.1.1"), path("e1", "10.0.2.2", "10.0.2.1")];
        assert_eq!(absent_paths(&links, &paths).unwrap(), paths[1..]);
        assert_eq!(absent_paths(&links[..1], &paths).unwrap(), paths[1..]);
        absent_paths(&links, &[&paths[..], &paths[..1]].concat()).unwrap_err();
    }

    #[test]
    fn only_paths_over_migration_links_are_taken() {
        let links = [link("e0", "10.0.1.2/24"), link("e1", "10.0.2.2/24")];
        check_paths(&links, &[path("e0", "10.0.1.2", "10.0.1.1"), path("e1", "10.0.2.2", "10.0.2.1")])
            .unwrap();
        for hostile in [
            path("mgmt", "10.0.1.2", "10.0.1.1"),
            path("../all", "10.0.1.2", "10.0.1.1"),
            path("e0", "0.0.0.0", "10.0.1.1"),
            path("e0", "10.0.2.2", "10.0.2.1"),
            path("e0", "10.0.1.2", "10.0.9.1"),
        ] {
            check_paths(&links, std::slice::from_ref(&hostile)).expect_err(&hostile.link);
        }
        check_paths(&links, &vec![path("e0", "10.0.1.2", "10.0.1.1"); PATHS_MAX + 1]).expect_err("too many");
    }

    #[test]
    fn link_local_paths_are_taken_on_the_link_that_has_the_address() {
        let links = [link("e0", "fe80::1/64"), link("e1", "10.0.2.2/24")];
        check_paths(&links, &[path("e0", "fe80::1", "fe80::9")]).unwrap();
        for hostile in [path("e1", "fe80::1", "fe80::9"), path("e0", "fe80::1", "fd00::9")] {
            check_paths(&links, std::slice::from_ref(&hostile)).expect_err(&hostile.link);
        }
    }
}
