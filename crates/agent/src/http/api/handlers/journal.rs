//! The host's journal, and what hosts tell each other of theirs and of their VMs.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, State};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use crate::host::Host;
use crate::http::api::authorization::{Caller, Operation, authorise};
use crate::http::api::extract::{Body, Segment};
use crate::http::api::{Routes, tags};
use crate::incoming::{self, Incoming};
use crate::peers::proof::{Heard, nothing_to_adopt};
use crate::store::journal::{Journal, file_of};
use drainpipe_api_types::{HeardMark, Hearing, JournalView, VmHolding};

pub(in crate::http::api) fn routes() -> Routes {
    OpenApiRouter::new().routes(routes!(journal)).routes(routes!(adopt))
}

pub(in crate::http::api) fn routes_for_agents() -> Routes {
    OpenApiRouter::new().routes(routes!(marks)).routes(routes!(held))
}

/// The journal
///
/// Whether it is believed. While it is not, the agent answers this, `/v1/journal/adoption` and `/v1/journal/marks`;
/// all else it refuses with the reason.
#[utoipa::path(get, path = "/v1/journal", tag = tags::HOSTS, responses(
    (status = 200, description = "The journal, and what was found beside it.", body = JournalView),
))]
async fn journal(State(host): State<Arc<Host>>, State(journal): State<Arc<Journal>>) -> Answer<JournalView> {
    Ok(Json(JournalView {
        host: host.name().into(),
        file: file_of(&host.config.state_directory).display().to_string(),
        mark: Some(journal.standing().map_err(Problem::from)?.mark),
        doubts: vec![],
        live: vec![],
        coming: vec![],
        silent: vec![],
    }))
}

/// Go on with what is there
///
/// Continues without a believed journal: VMs that run on the host are recorded again, from the files beside their
/// QEMUs, and what other hosts know about the old journal then applies to this one.
#[utoipa::path(post, path = "/v1/journal/adoption", tag = tags::HOSTS, responses(
    (status = 200, description = "The agent goes on; what has become of the VMs.", body = JournalView),
    (status = 409, description = "The journal is believed.", body = Problem),
))]
async fn adopt(State(host): State<Arc<Host>>, Extension(caller): Extension<Caller>) -> Answer<JournalView> {
    authorise(&caller, Operation::ChangeHost)?;
    Err(nothing_to_adopt(&host.config).into())
}

/// Asks how far the journal has got, and what the caller has said about its own before.
///
/// The answer is what the caller has said before, which the caller's journal must not lack.
#[utoipa::path(post, path = "/v1/journal/marks", tag = tags::BETWEEN_AGENTS, request_body = Hearing, responses(
    (status = 200, description = "What it has told before.", body = HeardMark),
))]
async fn marks(
    State(heard): State<Arc<Heard>>,
    Extension(caller): Extension<Caller>,
    Body(hearing): Body<Hearing>,
) -> Answer<HeardMark> {
    Ok(Json(HeardMark { heard: heard.note(caller.host()?, hearing.standing.as_ref()) }))
}

/// Has this host a VM?
///
/// For a host that is to start it.
#[utoipa::path(get, path = "/v1/holdings/{name}", tag = tags::BETWEEN_AGENTS, params(("name" = VmName, Path)), responses(
    (status = 200, description = "Whether it has, and how.", body = VmHolding),
))]
async fn held(
    State(incoming): State<Arc<Incoming>>,
    Extension(caller): Extension<Caller>,
    Segment(name): Segment<VmName>,
) -> Answer<VmHolding> {
    Ok(Json(incoming::holding(&incoming, name.as_str(), caller.host()?)?))
}
