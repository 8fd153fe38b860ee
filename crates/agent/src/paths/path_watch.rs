//! Watches the paths to each peer while migrations use them, and keeps this host's route to those that
//! are good.
//!
//! All migrations with one peer, in either direction, share its paths, its route and so its watch. The
//! first one begins the watch, the last one ends it. Each agent has one end of it, known by a token of its
//! own choice:
//!
//! ```text
//! join   a migration needs these paths: sockets, journal, route; what the other agent must know of this end
//! meet   what is known of the other end; each request of a migration tells it and hears it again
//! leave  a migration needs nothing more: what nobody else needs is put back
//! ```
//!
//! So it does not matter which agent is first, or whether both are: each tells the other one which end it has. A token
//! other than the known one means that the other agent has restarted. When nothing is received any more on any path,
//! or a path has no other end yet, the source of each migration tells and asks again.
//!
//! Each host sends a datagram on each path every 50 ms, and ten times as many for a moment on one that
//! may lose packets, from a port of the migration range to one of the other host's;
//! [`drainpipe_engine::paths::watch`] judges. Only the route changes: no connection is reset, and the kernel
//! sends what was lost by the new way.

pub(crate) mod hello;
mod peer;
mod placing;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use drainpipe_engine::finding::Finding;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::watch::PathNews;
use drainpipe_engine::problem::Problem;
use tokio::sync::{Mutex, mpsc};

pub(crate) use self::hello::bind;
use self::peer::PeerWatch;
use crate::host::Host;
use crate::peers::Peers;
use drainpipe_api_types::WatchEnd;

/// Events for the source of a migration.
#[derive(Debug)]
pub(crate) enum News {
    /// What happened to a path, and its name.
    Path(String, PathNews),
    /// What is wrong, and not with one path.
    Found(Box<Finding>),
}

/// A migration that needs paths to a peer.
#[derive(Debug)]
pub(crate) struct Joining<'a> {
    /// Identifier of the migration.
    pub(crate) migration: &'a str,
    /// Name of the other host.
    pub(crate) peer: &'a str,
    /// The other host's migration address.
    pub(crate) address: IpAddr,
    /// The paths, seen from here.
    pub(crate) paths: &'a [Path],
    /// Those of them for which this host has no address now. They are watched only if they were before.
    pub(crate) absent: &'a [Path],
    /// Takes news of the paths for the source of the migration, as long as there is room. A target needs none.
    pub(crate) news: Option<mpsc::Sender<News>>,
}

/// A migration that is about to connect.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Beginning<'a> {
    /// Identifier of the migration.
    pub(crate) migration: &'a str,
    /// The port of the peer that its memory goes to.
    pub(crate) port: u16,
    /// How many connections there will be, if the first that is made must be the first that comes.
    pub(crate) in_order: Option<usize>,
}

/// The watches of this host.
#[derive(Debug)]
pub(crate) struct PathWatches {
    host: Arc<Host>,
    others: Arc<Peers>,
    // Held while a migration joins or leaves: one of them may begin a watch that another one ends.
    peers: Mutex<BTreeMap<String, Arc<Mutex<PeerWatch>>>>,
}

impl PathWatches {
    /// None yet, of paths from `host` to `others`.
    pub(crate) fn new(host: &Arc<Host>, others: &Arc<Peers>) -> Self {
        Self { host: Arc::clone(host), others: Arc::clone(others), peers: Mutex::default() }
    }

    /// A migration begins to use these paths. The host's network is prepared for it, journaled under its
    /// identifier; [`Self::leave`] is owed in any case. Returns what the other agent must know.
    pub(crate) async fn join(self: &Arc<Self>, joining: Joining<'_>) -> Result<WatchEnd, Problem> {
        let mut peers = self.peers.lock().await;
        for (name, watch) in peers.iter() {
            let address = watch.lock().await.address();
            if (name == joining.peer) != (address == joining.address) {
                return Err(Problem::refused(format!(
                    "{} is {name}'s migration address in a running migration, and {} would become {}'s: correct \
                     `migration_address` of one of them, or try again when no migration with {name} is running",
                    address, joining.address, joining.peer
                )));
            }
        }
        if let Some(watch) = peers.get(joining.peer) {
            let mut watch = watch.lock().await;
            // A watch that nobody needed for a moment has ended.
            if watch.is_used() {
                return watch.join(joining).await;
            }
        }
        let peer = joining.peer.to_owned();
        let mut watch = PeerWatch::new(self, &peer, joining.address);
        let end = watch.join(joining).await?;
        let watch = Arc::new(Mutex::new(watch));
        tokio::spawn(peer::run(Arc::clone(&watch)));
        peers.insert(peer, watch);
        Ok(end)
    }

    /// What the other agent has said of its end of these paths.
    pub(crate) async fn meet(&self, peer: &str, paths: &[Path], other: &WatchEnd) -> Result<(), Problem> {
        let watch = self.peers.lock().await.get(peer).cloned();
        let watch = watch.ok_or_else(|| Problem::conflict(format!("no migration with {peer} is running")))?;
        watch.lock().await.meet(paths, other)
    }

    /// A migration that has joined is about to connect to the peer.
    pub(crate) async fn begin_transfer(&self, peer: &str, beginning: Beginning<'_>) {
        let watch = self.peers.lock().await.get(peer).cloned();
        if let Some(watch) = watch {
            watch.lock().await.begin_transfer(beginning).await;
        }
    }

    /// TCP has had to send much again on these paths.
    pub(crate) async fn suspect(&self, peer: &str, paths: &[Path]) {
        let watch = self.peers.lock().await.get(peer).cloned();
        if let Some(watch) = watch {
            watch.lock().await.suspect(paths);
        }
    }

    /// The other agent does not answer the question whether it still watches.
    async fn lose_sight(&self, peer: &str) {
        let watch = self.peers.lock().await.get(peer).cloned();
        if let Some(watch) = watch {
            watch.lock().await.lose_sight();
        }
    }

    /// A migration is over: what was changed for it on this host is put back, unless another needs it.
    pub(crate) async fn leave(&self, migration: &str) -> Result<(), Problem> {
        let mut peers = self.peers.lock().await;
        let mut unused = vec![];
        for (name, watch) in peers.iter() {
            if !watch.lock().await.leave(migration).await {
                unused.push(name.clone());
            }
        }
        peers.retain(|name, _| !unused.contains(name));
        self.host.network.put_back(migration).await
    }
}
