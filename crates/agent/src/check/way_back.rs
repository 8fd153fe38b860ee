//! Whether the other host's agent reaches this one's too. It must, for migrations in the other direction, and to ask
//! which host a VM belongs to.

use std::time::Duration;

use drainpipe_engine::check::{NotReached, no_way_back};
use drainpipe_engine::finding::Finding;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use tracing::debug;
use utoipa::ToSchema;

use super::Checks;
use crate::peers::client::{ApiClient, in_plain_words};

/// How long the other host tries; an agent that is there answers within milliseconds.
const TRY_DEADLINE: Duration = Duration::from_secs(3);

/// How long its word is waited for.
const ASK_DEADLINE: Duration = Duration::from_secs(5);

/// What came of trying to reach the host that asks.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub(crate) struct WayBack {
    /// Why its agent was not reached; absent when it was.
    pub(crate) obstacle: Option<String>,
    /// Whether the two do not accept each other's certificates.
    #[serde(default)]
    pub(crate) is_for_certificates: bool,
}

/// Tries to reach the agent of the host that asks.
pub(crate) async fn try_back(checks: &Checks, caller: &str) -> WayBack {
    // Where that is no peer of this host, the facts say so.
    let Some(peer) = checks.peers.get(caller) else { return WayBack::default() };
    let answer = peer.get_within::<IgnoredAny>("/v1/host", TRY_DEADLINE).await;
    answer.err().map_or_else(WayBack::default, |problem| WayBack {
        obstacle: Some(problem.message),
        is_for_certificates: problem.is_for_certificates,
    })
}

/// Has the other host try, and says what is wrong.
pub(super) async fn ask(checks: &Checks, peer: &ApiClient, target: &str) -> Option<Finding> {
    match peer.get_within::<WayBack>("/v1/check/way-back", ASK_DEADLINE).await {
        Ok(WayBack { obstacle, is_for_certificates }) => {
            let reason = NotReached { why: in_plain_words(&obstacle?), is_for_certificates };
            Some(no_way_back(checks.host.name(), target, checks.host.config.listen.port(), &reason))
        }
        Err(problem) => {
            debug!(%problem, "{target} does not say whether it reaches this agent");
            None
        }
    }
}
