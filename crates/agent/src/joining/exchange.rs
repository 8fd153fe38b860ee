//! Agents tell each other which list of hosts they have, and pass the newer one on. A host that was away learns
//! everything from the first one that it reaches.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use futures_util::future::join_all;
use tokio::task::block_in_place;
use tokio::time::timeout;
use tracing::debug;

use super::Joining;
use crate::peers::client::ApiClient;
use drainpipe_api_types::FleetNews;

/// Longest that another host may take to answer. It has it in mind.
const ANSWER_DEADLINE: Duration = Duration::from_secs(3);

/// They are asked again after this time, also if there is no news.
const EXCHANGE_EVERY: Duration = Duration::from_secs(20);

const PATH: &str = "/v1/fleet/list";

/// Tells all hosts of each newer list, and asks them from time to time. Does not end by itself.
pub(crate) async fn keep_exchanging(joining: Arc<Joining>) {
    let mut versions = joining.fleet.versions();
    loop {
        versions.mark_unchanged();
        let exchanges = joining.peers.all().into_iter().map(|(name, peer)| {
            let joining = &joining;
            async move {
                if let Err(problem) = joining.exchange(&peer).await {
                    debug!(peer = name, %problem, "it does not say which list of hosts it has");
                }
            }
        });
        join_all(exchanges).await;
        let _news = timeout(EXCHANGE_EVERY, versions.changed()).await;
    }
}

impl Joining {
    async fn exchange(&self, peer: &ApiClient) -> Result<(), Problem> {
        let said: FleetNews = peer.post_within(PATH, &self.news(false), ANSWER_DEADLINE).await?;
        if said.version < self.version() {
            peer.post_within::<FleetNews>(PATH, &self.news(true), ANSWER_DEADLINE).await?;
        }
        self.take(said)
    }

    /// What another host says; and what it has not heard of yet.
    pub(crate) fn hear(&self, news: FleetNews) -> Result<FleetNews, Problem> {
        let theirs = news.version;
        self.take(news)?;
        Ok(self.news(theirs < self.version()))
    }

    fn take(&self, news: FleetNews) -> Result<(), Problem> {
        let Some(list) = news.list.filter(|_| news.version > self.version()) else { return Ok(()) };
        block_in_place(|| self.fleet.take(list)).map(drop)
    }

    fn version(&self) -> u64 {
        self.fleet.held().map_or(0, |held| held.list.version)
    }

    fn news(&self, is_whole: bool) -> FleetNews {
        let held = self.fleet.held();
        FleetNews {
            version: held.as_ref().map_or(0, |held| held.list.version),
            list: held.filter(|_| is_whole).map(|held| held.signed.clone()),
        }
    }
}
