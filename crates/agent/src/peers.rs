//! The other hosts that this one's configuration names: the ways to their agents, and who this host is to them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_identity::Identity;

use crate::client::ApiClient;
use crate::host::Host;

/// How long the other agents may take to say what there is on their hosts: somebody waits for the list, and
/// those that answer at all do so at once.
pub(crate) const LIST_DEADLINE: Duration = Duration::from_secs(2);

/// The other hosts.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Who this host is to others.
    pub(crate) identity: Identity,
    host: Arc<Host>,
    clients: BTreeMap<String, ApiClient>,
}

impl Peers {
    /// Those of the configuration.
    pub(crate) fn open(host: &Arc<Host>, identity: &Identity) -> Result<Self, Problem> {
        let mut clients = BTreeMap::new();
        for peer in &host.config.peers {
            clients.insert(peer.name.clone(), ApiClient::over_tls(&peer.name, peer.address, identity)?);
        }
        Ok(Self { identity: identity.clone(), host: Arc::clone(host), clients })
    }

    /// The name of this host.
    pub(crate) fn own_name(&self) -> &str {
        self.host.name()
    }

    /// A way to another host's agent.
    pub(crate) fn get(&self, name: &str) -> Option<&ApiClient> {
        self.clients.get(name)
    }

    /// The ways to all other hosts' agents.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &ApiClient)> {
        self.clients.iter().map(|(name, peer)| (name.as_str(), peer))
    }

    /// The way to the agent of a host to which a VM of this one is to go.
    pub(crate) fn target(&self, name: &str) -> Result<&ApiClient, Problem> {
        let own = self.own_name();
        if name == own {
            return Err(Problem::conflict(format!("the VM is on {name} already")));
        }
        self.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.host.config.peers.iter().map(|peer| peer.name.as_str()).collect();
            let known = if known.is_empty() { "none (add a [[peer]])".into() } else { known.join(", ") };
            Problem::not_found(format!("{own} knows no host {name}; its agent.toml names: {known}"))
        })
    }
}
