//! What an agent answers while it starts, and when its journal is not believed: what is wrong, and how to fix it. It
//! answers for no VM, begins nothing, and ends nothing.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use drainpipe_engine::journal::Doubt;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Hypervisor;
use drainpipe_identity::Identity;
use tokio::sync::watch;
use tower::ServiceExt;

use super::authorization::{Caller, Operation, authorise};
use super::error::ApiError;
use super::extract::Body;
use crate::peers::proof::{self, Heard, Judged};
use crate::store::config::Config;
use crate::store::journal::{file_of, in_words};
use drainpipe_api_types::{HeardMark, Hearing, JournalView};

/// What answers now; none while the agent starts.
pub(crate) type Answering = watch::Sender<Option<Router>>;

/// Hands each request to what answers then. Of what other hosts have told before, an agent that is just starting says at
/// once what it knows: two may start at the same time, and ask each other.
pub(crate) fn starting(heard: Arc<Heard>, answering: watch::Receiver<Option<Router>>) -> Router {
    let waiting = Router::new().route("/v1/journal/marks", post(marks)).with_state(heard);
    Router::new().fallback(hand_on).with_state((waiting, answering))
}

async fn hand_on(
    State((waiting, mut answering)): State<(Router, watch::Receiver<Option<Router>>)>,
    request: Request,
) -> Response {
    let now = answering.borrow().clone();
    let router = match now {
        Some(router) => router,
        None if request.uri().path() == "/v1/journal/marks" => waiting,
        None => match answering.wait_for(Option::is_some).await.map(|router| router.clone()) {
            Ok(Some(router)) => router,
            _ => return ApiError::from(Problem::conflict("the agent ends")).into_response(),
        },
    };
    router.oneshot(request).await.unwrap_or_else(|never| match never {})
}

async fn marks(
    State(heard): State<Arc<Heard>>,
    Extension(caller): Extension<Caller>,
    Body(hearing): Body<Hearing>,
) -> Result<Json<HeardMark>, ApiError> {
    Ok(Json(HeardMark { heard: heard.note(caller.host()?, hearing.standing.as_ref()) }))
}

struct Unbelieved {
    config: Config,
    hypervisor: Arc<dyn Hypervisor>,
    identity: Identity,
    problem: Problem,
    adopted: watch::Sender<bool>,
}

/// What answers while the journal is not believed; says when an operator has adopted it.
pub(crate) fn unbelieved(
    config: &Config,
    hypervisor: Arc<dyn Hypervisor>,
    identity: &Identity,
    heard: Arc<Heard>,
    judged: &Judged,
) -> (Router, watch::Receiver<bool>) {
    let (adopted, is_adopted) = watch::channel(false);
    let problem = what_is_wrong(config, &judged.doubts);
    let (config, identity) = (config.clone(), identity.clone());
    let shared = Arc::new(Unbelieved { config, hypervisor, identity, problem, adopted });
    let router = Router::new()
        .route("/v1/journal", get(show))
        .route("/v1/journal/adoption", post(adopt))
        .fallback(refuse)
        .with_state(shared)
        .merge(Router::new().route("/v1/journal/marks", post(marks)).with_state(heard));
    (router, is_adopted)
}

fn what_is_wrong(config: &Config, doubts: &[Doubt]) -> Problem {
    Problem::refused(format!(
        "{} answers for no VM and begins nothing, because its journal {} is not believed: {}. VMs that run \
        here keep running. `drainpipe journal show` on this host says what was found; put the right journal \
        back and restart the agent, or continue with what is there by `drainpipe journal adopt`",
        config.name,
        file_of(&config.state_directory).display(),
        in_words(doubts),
    ))
}

async fn refuse(State(unbelieved): State<Arc<Unbelieved>>) -> ApiError {
    unbelieved.problem.clone().into()
}

async fn show(State(unbelieved): State<Arc<Unbelieved>>) -> Result<Json<JournalView>, ApiError> {
    let Unbelieved { config, hypervisor, identity, .. } = &*unbelieved;
    Ok(Json(proof::view(config, &**hypervisor, identity).await?))
}

async fn adopt(
    State(unbelieved): State<Arc<Unbelieved>>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<JournalView>, ApiError> {
    authorise(&caller, Operation::ChangeHost)?;
    let Unbelieved { config, hypervisor, identity, .. } = &*unbelieved;
    let adopted = proof::adopt(config, &**hypervisor, identity).await?;
    unbelieved.adopted.send_replace(true);
    Ok(Json(adopted))
}
