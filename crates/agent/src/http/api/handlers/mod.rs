//! One function for each path: it reads the request, checks the caller, and calls the part that does the work. What
//! the OpenAPI document says about a path is at its function, and only there.

pub(super) mod bandwidth;
pub(super) mod between_agents;
pub(super) mod checks;
pub(super) mod disk_moves;
pub(super) mod disks;
pub(super) mod drain;
pub(super) mod fixes;
pub(crate) mod fleet;
pub(super) mod hosts;
pub(super) mod journal;
pub(super) mod migrations;
pub(super) mod vms;

use std::time::Duration;

use axum::Json;
use drainpipe_engine::problem::Problem;
use serde::Deserialize;
use utoipa::IntoParams;

use super::error::ApiError;

type Answer<T> = Result<Json<T>, ApiError>;

/// How long an answer may be held back that says how something stands.
const OVER_WAIT_MAX: Duration = Duration::from_secs(5);

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FollowQuery {
    /// How long the answer may wait until it is over, in milliseconds; 5 s at most.
    #[serde(default)]
    #[param(required = false, maximum = 5_000)]
    wait_ms: u64,
}

impl FollowQuery {
    fn wait(&self) -> Result<Duration, Problem> {
        wait(self.wait_ms, OVER_WAIT_MAX)
    }
}

/// For how long an answer may be held back.
fn wait(wait_ms: u64, wait_max: Duration) -> Result<Duration, Problem> {
    let wait = Duration::from_millis(wait_ms);
    if wait > wait_max {
        return Err(Problem::bad_input(format!("wait_ms: at most {}", wait_max.as_millis())));
    }
    Ok(wait)
}
