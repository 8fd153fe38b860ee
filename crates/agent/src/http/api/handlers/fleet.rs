//! Hosts that come to the fleet and leave it.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::Body;
use crate::http::api::{Routes, tags};
use crate::joining::Joining;
use drainpipe_api_types::{
    DepartureRequest, FleetNews, FleetView, JoinAnswer, JoinRequest, RenewalAnswer, RenewalRequest,
    RevocationRequest, TokenRequest, TokenView,
};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new()
        .routes(routes!(fleet))
        .routes(routes!(open_token))
        .routes(routes!(revoke))
        .routes(routes!(depart))
}

pub(in crate::http::api) fn routes_for_agents() -> Routes {
    OpenApiRouter::new().routes(routes!(exchange)).routes(routes!(certificate)).routes(routes!(departure))
}

/// All that somebody may ask who has no certificate.
pub(in crate::http::api) fn routes_to_join() -> OpenApiRouter<Arc<Joining>> {
    OpenApiRouter::new().routes(routes!(join))
}

/// Where somebody comes from who has no certificate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComesFrom(pub(crate) IpAddr);

/// The fleet
///
/// The hosts that have joined, and whose certificates were revoked. Hosts of the configuration's `[[peer]]` are not in it.
#[utoipa::path(get, path = "/v1/fleet", tag = tags::FLEET, responses(
    (status = 200, description = "The fleet.", body = FleetView),
    (status = 422, description = "This host has joined none.", body = Problem),
))]
async fn fleet(State(joining): State<Arc<Joining>>) -> Answer<FleetView> {
    Ok(Json(joining.view()?))
}

/// Let a host join
///
/// A token for one host, at the host that has the authority's key.
#[utoipa::path(post, path = "/v1/fleet/tokens", tag = tags::FLEET, request_body = TokenRequest, responses(
    (status = 200, description = "The token. It is shown only once.", body = TokenView),
    (status = 422, description = "Another host has the authority's key.", body = Problem),
))]
async fn open_token(
    State(joining): State<Arc<Joining>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<TokenRequest>,
) -> Answer<TokenView> {
    authorise(&caller, Operation::ChangeFleet)?;
    Ok(Json(joining.open_token(request.life_s)?))
}

/// Revoke certificates
///
/// Those of a host or an operator that were made until now: all hosts refuse them as soon as they hear of it. A host
/// leaves the fleet by it.
#[utoipa::path(post, path = "/v1/fleet/revocations", tag = tags::FLEET, request_body = RevocationRequest, responses(
    (status = 200, description = "The fleet now.", body = FleetView),
    (status = 422, description = "Another host has the authority's key, or this one would be revoked.", body = Problem),
))]
async fn revoke(
    State(joining): State<Arc<Joining>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<RevocationRequest>,
) -> Answer<FleetView> {
    authorise(&caller, Operation::ChangeFleet)?;
    Ok(Json(joining.revoke(&request)?))
}

/// Leave the fleet
///
/// This host does. Its certificate is revoked; VMs that it has run on.
#[utoipa::path(post, path = "/v1/fleet/departure", tag = tags::FLEET, request_body = DepartureRequest, responses(
    (status = 200, description = "It has left.", body = ()),
    (status = 409, description = "VMs are on their way from here or to here.", body = Problem),
    (status = 422, description = "It has VMs, or the authority's key.", body = Problem),
    (status = 502, description = "The host that has the authority's key does not answer.", body = Problem),
))]
async fn depart(
    State(joining): State<Arc<Joining>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<DepartureRequest>,
) -> Answer<()> {
    authorise(&caller, Operation::ChangeFleet)?;
    Ok(Json(joining.depart(request).await?))
}

/// Which list of hosts have you?
///
/// The caller tells its version, and the list itself to who has an older one. Only what the authority signed is taken.
#[utoipa::path(post, path = "/v1/fleet/list", tag = tags::BETWEEN_AGENTS, request_body = FleetNews, responses(
    (status = 200, description = "The version here, and the list if it is newer than the caller's.", body = FleetNews),
))]
async fn exchange(State(joining): State<Arc<Joining>>, Body(news): Body<FleetNews>) -> Answer<FleetNews> {
    Ok(Json(joining.hear(news)?))
}

/// A new certificate, for the host that asks
///
/// At the host that has the authority's key.
#[utoipa::path(post, path = "/v1/fleet/certificate", tag = tags::BETWEEN_AGENTS, request_body = RenewalRequest, responses(
    (status = 200, description = "The certificate.", body = RenewalAnswer),
    (status = 422, description = "Another host has the authority's key, or the caller has not joined.", body = Problem),
))]
async fn certificate(
    State(joining): State<Arc<Joining>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<RenewalRequest>,
) -> Answer<RenewalAnswer> {
    let certificate = joining.renew(caller.host()?, &request.certificate_request)?;
    Ok(Json(RenewalAnswer { certificate }))
}

/// The host that asks leaves the fleet
///
/// At the host that has the authority's key.
#[utoipa::path(post, path = "/v1/fleet/departures", tag = tags::BETWEEN_AGENTS, responses(
    (status = 200, description = "It has left, and its certificates are revoked.", body = ()),
    (status = 422, description = "Another host has the authority's key.", body = Problem),
))]
async fn departure(State(joining): State<Arc<Joining>>, Extension(caller): Extension<Caller>) -> Answer<()> {
    joining.remove_host(caller.host()?)?;
    Ok(Json(()))
}

/// Join the fleet
///
/// By a token, at the host that has the authority's key, and without a certificate: on a TLS connection of the protocol
/// `drainpipe-join/1` (ALPN), on which nothing else is answered, and which is accepted while a token is open only.
#[utoipa::path(post, path = "/v1/join", tag = tags::FLEET, request_body = JoinRequest, security(()), responses(
    (status = 200, description = "The host's certificate, and the fleet.", body = JoinAnswer),
    (status = 404, description = "On every other connection, and while no token is open.", body = Problem),
    (status = 409, description = "There is a host of this name, or too many want to join at once.", body = Problem),
    (status = 422, description = "The token is not good.", body = Problem),
))]
async fn join(
    State(joining): State<Arc<Joining>>,
    Extension(ComesFrom(from)): Extension<ComesFrom>,
    Body(request): Body<JoinRequest>,
) -> Answer<JoinAnswer> {
    Ok(Json(joining.join(&request, from)?))
}
