//! Passes requests with `?host=NAME` on to that host's agent.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::Uri;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::Peer;

use super::authorization::Caller;
use super::{ApiError, BODY_BYTES_MAX};
use crate::agent::Agent;

pub(super) async fn forward(
    State(agent): State<Arc<Agent>>,
    Extension(caller): Extension<Caller>,
    request: Request,
    next: Next,
) -> Response {
    let (host, path) = match split_host(request.uri()) {
        Some((host, path)) if host != agent.name() => (host, path),
        _ => return next.run(request).await,
    };
    pass_on(&agent, &caller, &host, &path, request)
        .await
        .map_or_else(IntoResponse::into_response, IntoResponse::into_response)
}

async fn pass_on(
    agent: &Agent,
    caller: &Caller,
    host: &str,
    path: &str,
    request: Request,
) -> Result<Json<serde_json::Value>, ApiError> {
    // Otherwise two agents could pass a request back and forth, and a host could act as another.
    if let Caller::Peer(Peer::Host(name)) = caller {
        let message = format!("the agent of host {name} must ask {host} itself");
        return Err(Problem::new(ProblemKind::Forbidden, message).into());
    }
    let peer = agent.peer(host).ok_or_else(|| {
        Problem::not_found(format!("{} knows no host {host}; `drainpipe hosts` lists them", agent.name()))
    })?;
    let method = request.method().clone();
    let body = read_body(request.into_body()).await?;
    Ok(Json(peer.pass_on(method, path, body).await?))
}

async fn read_body(body: Body) -> Result<Vec<u8>, Problem> {
    let bytes = axum::body::to_bytes(body, BODY_BYTES_MAX)
        .await
        .map_err(|error| Problem::bad_input(format!("the request's body cannot be read: {error}")))?;
    Ok(bytes.to_vec())
}

/// The host that a request is for, and its path without that word.
fn split_host(uri: &Uri) -> Option<(String, String)> {
    let query = uri.query()?;
    let host = query.split('&').find_map(|pair| pair.strip_prefix("host="))?;
    let rest: Vec<&str> = query.split('&').filter(|pair| !pair.starts_with("host=")).collect();
    let path = if rest.is_empty() { uri.path().into() } else { format!("{}?{}", uri.path(), rest.join("&")) };
    Some((host.into(), path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_taken_out_of_the_query() {
        let uri: Uri = "/v1/vms?scope=all&host=b".parse().unwrap();
        assert_eq!(split_host(&uri), Some(("b".into(), "/v1/vms?scope=all".into())));
        let uri: Uri = "/v1/vms?host=b".parse().unwrap();
        assert_eq!(split_host(&uri), Some(("b".into(), "/v1/vms".into())));
        assert_eq!(split_host(&"/v1/vms?ghost=b".parse().unwrap()), None);
    }
}
