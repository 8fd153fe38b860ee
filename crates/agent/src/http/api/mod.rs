//! The API: HTTP and JSON, over TLS and over the Unix socket alike.
//!
//! A request with `?host=NAME` is for another host; the agent forwards it under its own certificate, so it can do
//! there what a host may do, not what an operator may. What agents say to each other is never forwarded: under the
//! agent's certificate, an operator would speak as a host.
//!
//! ```text
//! authorization  who may do what
//! forward        ?host=NAME
//! handlers       one function a path, with what the document says of it
//! openapi        the document, made from the handlers
//! extract, error how requests are read and refused; by_name: no list passes for an object
//! unbelieved     what is answered until the journal is believed
//! ```

pub(crate) mod authorization;
mod by_name;
pub(crate) mod error;
pub(crate) mod extract;
mod forward;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
pub(crate) mod handlers;
mod openapi;
mod tags;
#[cfg(test)]
mod tests;
pub(crate) mod unbelieved;

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, FromRef};
use axum::middleware::{from_fn, from_fn_with_state};
use utoipa_axum::router::OpenApiRouter;

use self::handlers::{
    bandwidth, between_agents, checks, disk_moves, disks, drain, fixes, fleet, hosts, journal, migrations,
    vms,
};
use crate::check::Checks;
use crate::check::fixes::Fixes;
use crate::disk_moves::DiskMoves;
use crate::drain::Drains;
use crate::host::Host;
use crate::incoming::Incoming;
use crate::joining::Joining;
use crate::outgoing::Outgoing;
use crate::peers::Peers;
use crate::peers::proof::{Heard, Proof};
use crate::store::journal::Journal;
use crate::transfer::Transfers;
use crate::vms::Vms;

/// The parts of an agent that somebody can ask. Each path takes those that it needs.
#[derive(Debug, Clone, FromRef)]
pub(crate) struct Parts {
    /// The host itself.
    pub(crate) host: Arc<Host>,
    /// The other hosts.
    pub(crate) peers: Arc<Peers>,
    /// What must survive a crash.
    pub(crate) journal: Arc<Journal>,
    /// What other hosts have said about their journals.
    pub(crate) heard: Arc<Heard>,
    /// Whether others have shown that nothing is missing in this host's.
    pub(crate) proof: Arc<Proof>,
    /// The VMs here.
    pub(crate) vms: Arc<Vms>,
    /// What migrations in either direction share.
    pub(crate) transfer: Arc<Transfers>,
    /// Migrations to here.
    pub(crate) incoming: Arc<Incoming>,
    /// Checks of what is between this host and others.
    pub(crate) checks: Arc<Checks>,
    /// Migrations from here.
    pub(crate) outgoing: Arc<Outgoing>,
    /// Disks that move on this host.
    pub(crate) disk_moves: Arc<DiskMoves>,
    /// The drain of this host.
    pub(crate) drains: Arc<Drains>,
    /// Hosts that join and leave the fleet.
    pub(crate) joining: Arc<Joining>,
    /// What checks have mended here.
    pub(crate) fixes: Arc<Fixes>,
}

type Routes = OpenApiRouter<Parts>;

/// All paths of the API.
pub(crate) fn router(parts: Parts) -> Router {
    let for_all =
        routes_for_all().route_layer(from_fn_with_state(Arc::clone(&parts.peers), forward::forward));
    let for_agents = routes_for_agents().route_layer(from_fn(between_agents::hosts_only));
    Router::from(for_all.merge(for_agents))
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::no_such_method)
        .layer(DefaultBodyLimit::max(extract::BODY_BYTES_MAX))
        .with_state(parts)
}

/// All that is answered to who has no certificate and wants one.
pub(crate) fn router_to_join(joining: Arc<Joining>) -> Router {
    Router::from(fleet::routes_to_join())
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::no_such_method)
        .layer(DefaultBodyLimit::max(extract::JOIN_BYTES_MAX))
        .with_state(joining)
}

fn routes_for_all() -> Routes {
    hosts::routes()
        .merge(openapi::routes())
        .merge(checks::routes())
        .merge(fixes::routes())
        .merge(vms::routes())
        .merge(migrations::routes())
        .merge(disks::routes())
        .merge(disk_moves::routes())
        .merge(drain::routes())
        .merge(bandwidth::routes())
        .merge(journal::routes())
        .merge(fleet::routes())
}

fn routes_for_agents() -> Routes {
    between_agents::routes()
        .merge(checks::routes_for_agents())
        .merge(journal::routes_for_agents())
        .merge(fleet::routes_for_agents())
}
