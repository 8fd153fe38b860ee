//! What another host says of itself, once it is known that both speak the same protocol.

use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::{Protocol, Protocols, Release, Speaker, TooFarApart, agree};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use thiserror::Error;

use crate::agent::Agent;
use crate::client::ApiClient;

/// Why there is no answer to go by.
#[derive(Debug, Error)]
pub(crate) enum NoAnswer {
    /// The two hosts share no protocol.
    #[error(transparent)]
    TooFarApart(#[from] TooFarApart),
    /// Anything else.
    #[error(transparent)]
    Problem(#[from] Problem),
}

impl From<NoAnswer> for Problem {
    fn from(why: NoAnswer) -> Self {
        match why {
            NoAnswer::TooFarApart(apart) => apart.into(),
            NoAnswer::Problem(problem) => problem,
        }
    }
}

/// What stays as it is in every release, of all that a host says of itself: so hosts of any two releases can say that they
/// are too far apart.
#[derive(Debug, Deserialize)]
struct Greeting {
    agent_version: String,
    #[serde(default)]
    protocols: Protocols,
}

/// Asks the host `name` for what it says of itself at `path`. The rest of an answer is looked at once there is a protocol
/// by which to understand it.
pub(crate) async fn ask_host<T: DeserializeOwned>(
    agent: &Agent,
    peer: &ApiClient,
    name: &str,
    path: &str,
) -> Result<(T, Protocol), NoAnswer> {
    let answer: Value = peer.get(path).await?;
    let Greeting { agent_version, protocols } =
        Greeting::deserialize(&answer).map_err(|error| peer.senseless(&error.to_string()))?;
    let protocol = agree_with(agent, name, &Release { version: agent_version, protocols })?;
    let view = T::deserialize(answer).map_err(|error| peer.senseless(&error.to_string()))?;
    Ok((view, protocol))
}

/// The protocol that this host speaks with another.
pub(crate) fn agree_with(agent: &Agent, name: &str, release: &Release) -> Result<Protocol, TooFarApart> {
    agree(Speaker { host: agent.name(), release: &Release::own() }, Speaker { host: name, release })
}
