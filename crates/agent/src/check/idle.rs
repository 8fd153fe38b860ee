//! The paths to each peer, tested now and then while no migration runs, so that a dead one is known before it is
//! needed: first the links in question by link-local addresses, then one TCP connection for each path.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::{Path, find_paths};
use drainpipe_engine::paths::path_record::TrialOutcome;
use drainpipe_engine::paths::path_record::{PathRecord, after_trial, turned};
use drainpipe_engine::problem::Problem;
use jiff::Timestamp;
use tokio::time::sleep;
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::run::{begin_session, end_session};
use super::{Checks, facts};
use crate::paths::discovery::discover;
use crate::paths::probe::{self, Connected, Load};
use crate::peers::client::{ApiClient, in_plain_words};
use crate::store::lock::lock;
use drainpipe_api_types::PathsView;

/// Before the first peer is looked at, and between two of them in the first round.
const SETTLE: Duration = Duration::from_secs(2);

/// A path that has turned bad is tried again after that, lest a busy host is taken for a dead path.
const AGAIN_AFTER: Duration = Duration::from_secs(3);

/// What is known of the paths to each peer.
#[derive(Debug, Default)]
pub(crate) struct KnownPaths(Mutex<BTreeMap<String, PathsView>>);

impl KnownPaths {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PathsView>> {
        // One insertion leaves it whole.
        lock(&self.0)
    }

    /// The paths to all peers that have been tested.
    pub(crate) fn all(&self) -> Vec<PathsView> {
        self.lock().values().cloned().collect()
    }

    fn of(&self, peer: &str) -> Vec<PathRecord> {
        self.lock().get(peer).map(|view| view.paths.clone()).unwrap_or_default()
    }
}

/// How soon the first host that joins is found.
const LOOK_FOR_HOSTS_EVERY: Duration = Duration::from_secs(10);

/// Looks at one peer after the other, each of them once within `probe_every_s`. Does not end by itself.
pub(crate) async fn keep_trying(checks: Arc<Checks>, is_migrating: impl Fn() -> bool) {
    let every = Duration::from_secs(checks.host.config.probe_every_s.into());
    let mut is_first_round = true;
    while !every.is_zero() {
        let peers: Vec<String> = checks.host.peers().into_iter().map(|peer| peer.name).collect();
        let count = u32::try_from(peers.len()).unwrap_or(u32::MAX);
        let Some(pause) = every.checked_div(count) else {
            sleep(LOOK_FOR_HOSTS_EVERY).await;
            continue;
        };
        for peer in &peers {
            sleep(if is_first_round { SETTLE.min(pause) } else { jittered(pause) }).await;
            // Its own paths are watched then, and its links are not to be disturbed.
            if is_migrating() {
                continue;
            }
            if let Err(problem) = checks.look_at_links().await {
                warn!(%problem, "the links' counters cannot be read");
            }
            if let Err(problem) = look(&checks, peer).await {
                debug!(peer, %problem, "the paths to this host are unknown at the moment");
            }
        }
        is_first_round = false;
    }
}

/// From three quarters to five quarters of it, so that the hosts of a fleet do not keep in step.
fn jittered(pause: Duration) -> Duration {
    let [chance, ..] = Uuid::new_v4().into_bytes();
    pause.mul_f64(0.75 + 0.5 * f64::from(chance) / f64::from(u8::MAX))
}

async fn look(checks: &Checks, peer: &str) -> Result<(), Problem> {
    let known = checks.known_paths.of(peer);
    let mut paths = records(checks, peer, &known).await?;
    if turned(&known, &paths).iter().any(|path| path.fault.is_some()) {
        sleep(AGAIN_AFTER).await;
        paths = records(checks, peer, &known).await?;
    }
    for path in turned(&known, &paths) {
        if let Some(why) = &path.fault {
            warn!(peer, why, "path {path} does not work; `drainpipe check` says more");
        } else {
            info!(peer, "path {path} works again");
        }
    }
    let view = PathsView { peer: peer.into(), tried_at: Timestamp::now().to_string(), paths };
    checks.known_paths.lock().insert(peer.into(), view);
    Ok(())
}

async fn records(checks: &Checks, peer: &str, known: &[PathRecord]) -> Result<Vec<PathRecord>, Problem> {
    let client = checks.peers.get(peer).ok_or_else(|| Problem::not_found(format!("no peer {peer}")))?;
    let (theirs, _) = facts::ask(checks, &client, peer).await?;
    let own = checks.incoming.facts().await?;
    let tried = try_all(checks, &client, [&own, &theirs.host]).await?;
    Ok(after_trial(known, [&own, &theirs.host], &tried, &Timestamp::now().to_string()))
}

async fn try_all(
    checks: &Checks,
    client: &ApiClient,
    [own, theirs]: [&HostFacts; 2],
) -> Result<Vec<(Path, TrialOutcome)>, Problem> {
    let option = RequestedOption::Auto;
    let reaches = discover(&checks.host, client, [own, theirs], option).await;
    let paths = find_paths(own, theirs, option, &reaches);
    if paths.is_empty() {
        return Ok(vec![]);
    }
    let token = Uuid::new_v4();
    // Datagrams are left to a check that somebody asks for.
    let view = begin_session(client, &theirs.name, token, &paths, vec![0; paths.len()]).await?;
    let trials = probe::try_paths(&checks.host.network, &paths, &view.connections, Load::Large).await;
    end_session(client, token).await;
    let plain = |trial: Connected| trial.map(drop).map_err(|why| in_plain_words(&why));
    Ok(paths.into_iter().zip(trials.into_iter().map(plain)).collect())
}
