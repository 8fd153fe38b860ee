//! Passes requests with `?host=NAME` on to that host's agent.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::uri::PathAndQuery;
use axum::http::{StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::{Peer, check_name};

use super::authorization::Caller;
use super::error::ApiError;
use super::extract::{BODY_BYTES_MAX, read_in_time};
use crate::peers::Peers;

/// What precedes the host's name in a query.
const KEY: &str = "host=";

pub(super) async fn forward(
    State(peers): State<Arc<Peers>>,
    Extension(caller): Extension<Caller>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let Some((host, rest)) = split_host(request.uri())? else {
        return Ok(next.run(request).await);
    };
    if host == peers.own_name() {
        *request.uri_mut() = Uri::from(rest);
        return Ok(next.run(request).await);
    }
    pass_on(&peers, &caller, &host, &rest, request).await
}

async fn pass_on(
    peers: &Peers,
    caller: &Caller,
    host: &str,
    rest: &PathAndQuery,
    request: Request,
) -> Result<Response, ApiError> {
    // Otherwise two agents could pass a request back and forth, and a host could act as another.
    if let Caller::Peer(Peer::Host(name)) = caller {
        let message = format!("the agent of host {name} must ask {host} itself");
        return Err(Problem::new(ProblemKind::Forbidden, message).into());
    }
    let peer = peers.get(host).ok_or_else(|| {
        Problem::not_found(format!("{} knows no host {host}; `drainpipe hosts` lists them", peers.own_name()))
    })?;
    check_path(rest.path())?;
    let method = request.method().clone();
    let body = read_in_time(read_body(request.into_body())).await?;
    Ok(Json(peer.pass_on(method, rest.as_str(), body).await?).into_response())
}

async fn read_body(body: Body) -> Result<Vec<u8>, ApiError> {
    let bytes = axum::body::to_bytes(body, BODY_BYTES_MAX).await.map_err(|error| {
        let message = format!("the body cannot be read, or is longer than {BODY_BYTES_MAX} bytes: {error}");
        ApiError::bad_input(StatusCode::PAYLOAD_TOO_LARGE, message)
    })?;
    Ok(bytes.to_vec())
}

/// Refuses paths that are not the same path everywhere. URL libraries take `..`, `%2e%2e` and `\` for
/// directions, so that a request could arrive at the other host on a path that was not checked here.
fn check_path(path: &str) -> Result<(), Problem> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.".contains(&byte);
    if path.bytes().all(plain) && !path.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Ok(());
    }
    Err(Problem::bad_input(format!(
        "`{path}` is not forwarded: names and identifiers cannot contain such characters"
    )))
}

/// Refuses `?host=NAME` where it may not be.
pub(super) fn refuse_host(uri: &Uri) -> Result<(), Problem> {
    match split_host(uri)? {
        None => Ok(()),
        Some(_) => Err(Problem::bad_input("agents ask each other themselves: leave `host` out")),
    }
}

/// The host that a request is for, and its path and query without that word.
fn split_host(uri: &Uri) -> Result<Option<(String, PathAndQuery)>, Problem> {
    let pairs = || uri.query().unwrap_or_default().split('&');
    let mut hosts = pairs().filter_map(|pair| pair.strip_prefix(KEY));
    let Some(host) = hosts.next() else { return Ok(None) };
    if hosts.next().is_some() {
        return Err(Problem::bad_input("a request goes to one host: give `host` once"));
    }
    check_name(host).map_err(|error| Problem::bad_input(format!("host: {error}")))?;
    let rest: Vec<&str> = pairs().filter(|pair| !pair.starts_with(KEY)).collect();
    let path = uri.path();
    let rest = if rest.is_empty() { path.to_owned() } else { format!("{path}?{}", rest.join("&")) };
    let rest = rest.parse().map_err(|error| Problem::bad_input(format!("`{rest}`: {error}")))?;
    Ok(Some((host.into(), rest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(uri: &str) -> Result<Option<(String, String)>, Problem> {
        let parts = split_host(&uri.parse().unwrap())?;
        Ok(parts.map(|(host, rest)| (host, rest.as_str().to_owned())))
    }

    #[test]
    fn the_host_is_taken_out_of_the_query() {
        let parts = |host: &str, rest: &str| Ok(Some((host.to_owned(), rest.to_owned())));
        assert_eq!(split("/v1/vms?scope=all&host=b"), parts("b", "/v1/vms?scope=all"));
        assert_eq!(split("/v1/vms?host=b"), parts("b", "/v1/vms"));
        assert_eq!(split("/v1/vms?ghost=b"), Ok(None));
        assert_eq!(split("/v1/vms"), Ok(None));
    }

    #[test]
    fn a_host_that_is_no_name_or_given_twice_is_refused() {
        for query in ["host=b&host=c", "host=", "host=b%2fx", "host=B", "host=../b", "host=127.0.0.1"] {
            let refused = split(&format!("/v1/vms?{query}")).expect_err(query);
            assert_eq!(refused.kind, ProblemKind::BadInput, "{query}: {refused}");
        }
    }

    #[test]
    fn no_path_is_passed_on_that_could_become_another() {
        check_path("/v1/vms/web-1.example/start").unwrap();
        for path in ["/v1/vms/../incoming/x", "/v1/vms/..\\incoming", "/v1/vms/%2e%2e/incoming", "/v1/./x"] {
            check_path(path).expect_err(path);
        }
    }
}
