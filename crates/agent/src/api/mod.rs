//! The API: HTTP and JSON, over TLS and over the Unix socket alike.
//!
//! A request with `?host=NAME` is for another host; the agent passes it on under its own certificate,
//! so it can do there what a host may do, not what an operator may. What agents say among themselves
//! is never passed on: under its agent's certificate, an operator would speak as a host.
//!
//! ```text
//! authorization  who may do what
//! forward        ?host=NAME
//! handlers       one function a path, with what the document says of it
//! openapi        the document, made from the handlers
//! extract, error how requests are read and refused; by_name: no list passes for an object
//! types          what travels; drain_types: about emptying a host
//! ```

pub mod authorization;
mod by_name;
mod drain_types;
pub(crate) mod error;
pub(crate) mod extract;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod handlers;
mod openapi;
#[cfg(test)]
mod tests;
pub mod types;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::{from_fn, from_fn_with_state};
use utoipa_axum::router::OpenApiRouter;

use self::handlers::{bandwidth, between_agents, checks, drain, fixes, hosts, journal, migrations, vms};
use crate::agent::Agent;

type Routes = OpenApiRouter<Arc<Agent>>;

/// All paths of the API.
pub fn router(agent: Arc<Agent>) -> Router {
    let for_all = routes_for_all().route_layer(from_fn_with_state(Arc::clone(&agent), forward::forward));
    let for_agents = routes_for_agents().route_layer(from_fn(between_agents::hosts_only));
    Router::from(for_all.merge(for_agents))
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::no_such_method)
        .layer(DefaultBodyLimit::max(extract::BODY_BYTES_MAX))
        .with_state(agent)
}

fn routes_for_all() -> Routes {
    hosts::routes()
        .merge(checks::routes())
        .merge(fixes::routes())
        .merge(vms::routes())
        .merge(migrations::routes())
        .merge(drain::routes())
        .merge(bandwidth::routes())
        .merge(journal::routes())
}

fn routes_for_agents() -> Routes {
    between_agents::routes().merge(checks::routes_for_agents()).merge(journal::routes_for_agents())
}
