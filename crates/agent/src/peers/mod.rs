//! The other hosts, those of the configuration and those that have joined: how to reach their agents, and this host's
//! identity to them.

pub mod client;
pub(crate) mod proof;
pub(crate) mod release;
pub(crate) mod slots;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_identity::Identity;
use jiff::Timestamp;
use tracing::warn;

use crate::host::Host;
use crate::peers::client::ApiClient;
use crate::store::config::Peer;
use crate::store::lock::lock;

/// How long the other agents may take to say what there is on their hosts: somebody waits for the list, and
/// those that answer at all do so at once.
pub(crate) const LIST_DEADLINE: Duration = Duration::from_secs(2);

/// The other hosts.
#[derive(Debug)]
pub(crate) struct Peers {
    /// This host's own identity.
    pub(crate) identity: Identity,
    host: Arc<Host>,
    // Made when they are needed: hosts come and go.
    clients: Mutex<BTreeMap<String, (MadeFor, ApiClient)>>,
}

/// To what a way leads: an address, and certificates that were made after this revocation. Over a connection that stands,
/// nobody shows a certificate again.
type MadeFor = (SocketAddr, Option<Timestamp>);

impl Peers {
    /// Those that this host knows.
    pub(crate) fn open(host: &Arc<Host>, identity: &Identity) -> Result<Self, Problem> {
        let peers = Self { identity: identity.clone(), host: Arc::clone(host), clients: Mutex::default() };
        host.peers().iter().try_for_each(|peer| peers.client(peer).map(drop))?;
        Ok(peers)
    }

    /// The name of this host.
    pub(crate) fn own_name(&self) -> &str {
        self.host.name()
    }

    /// A way to another host's agent.
    pub(crate) fn get(&self, name: &str) -> Option<ApiClient> {
        let peers = self.host.peers();
        self.usable(peers.iter().find(|peer| peer.name == name)?)
    }

    /// The ways to all other hosts' agents.
    pub(crate) fn all(&self) -> Vec<(String, ApiClient)> {
        let peers = self.host.peers();
        lock(&self.clients).retain(|name, _| peers.iter().any(|peer| peer.name == *name));
        let clients = peers.into_iter().filter_map(|peer| Some((self.usable(&peer)?, peer.name)));
        clients.map(|(client, name)| (name, client)).collect()
    }

    /// The way to the agent of a host to which a VM of this one is to go.
    pub(crate) fn target(&self, name: &str) -> Result<ApiClient, Problem> {
        let own = self.own_name();
        if name == own {
            return Err(Problem::conflict(format!("the VM is on {name} already")));
        }
        self.get(name).ok_or_else(|| {
            let known: Vec<String> = self.host.peers().into_iter().map(|peer| peer.name).collect();
            let known = if known.is_empty() {
                "none (let it join by `drainpipe init`, or add a [[peer]] to agent.toml)".into()
            } else {
                known.join(", ")
            };
            Problem::not_found(format!("{own} knows no host {name}; it knows: {known}"))
        })
    }

    fn usable(&self, peer: &Peer) -> Option<ApiClient> {
        let made = self.client(peer);
        made.inspect_err(|problem| warn!(peer = peer.name, %problem, "there is no way to reach it")).ok()
    }

    fn client(&self, peer: &Peer) -> Result<ApiClient, Problem> {
        let wanted = (peer.address, self.host.fleet.revoked_at(&peer.name));
        let mut clients = lock(&self.clients);
        if let Some((made_for, client)) = clients.get(&peer.name)
            && *made_for == wanted
        {
            return Ok(client.clone());
        }
        let client = ApiClient::over_tls(&peer.name, peer.address, &self.identity)?;
        clients.insert(peer.name.clone(), (wanted, client.clone()));
        Ok(client)
    }
}
