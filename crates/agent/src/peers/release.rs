//! What another host says about itself, once it is known that both speak the same protocol.

use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::{Protocol, Protocols, Release, Speaker, TooFarApart, agree};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::peers::client::{ANSWER_DEADLINE, ApiClient};
use drainpipe_api_types::HostView;

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
/// by which the host `own`, which is this one, understands it.
pub(crate) async fn ask_host<T: DeserializeOwned>(
    own: &str,
    peer: &ApiClient,
    name: &str,
    path: &str,
) -> Result<(T, Protocol), NoAnswer> {
    let answer = peer.get_unread(path, ANSWER_DEADLINE).await?;
    let protocol = greeted(own, peer, name, &answer)?;
    Ok((peer.read(&answer)?, protocol))
}

/// Asks the host `name` for what people want to know of it: also of one that is too far apart, if that is understood.
pub(crate) async fn look_at_host(
    own: &str,
    peer: &ApiClient,
    name: &str,
    deadline: Duration,
) -> Result<HostView, Problem> {
    let answer = peer.get_unread("/v1/host", deadline).await?;
    match peer.read(&answer) {
        Ok(view) => Ok(view),
        Err(senseless) => Err(greeted(own, peer, name, &answer).map_or_else(Into::into, |_| senseless)),
    }
}

fn greeted(own: &str, peer: &ApiClient, name: &str, answer: &[u8]) -> Result<Protocol, NoAnswer> {
    let Greeting { agent_version, protocols } = peer.read(answer)?;
    Ok(agree_with(own, name, &Release { version: agent_version, protocols })?)
}

/// The protocol that this host, `own`, speaks with another.
pub(crate) fn agree_with(own: &str, name: &str, release: &Release) -> Result<Protocol, TooFarApart> {
    agree(Speaker { host: own, release: &Release::own() }, Speaker { host: name, release })
}
