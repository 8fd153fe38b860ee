//! The fleet that this host has joined: its hosts, and whose certificates are revoked.
//!
//! The list is beside the host's certificate and not in the journal: an agent that has lost its journal must know whom
//! to ask about it. Both are removed together.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use drainpipe_engine::problem::Problem;
use drainpipe_identity::{Identity, JoinedFiles};
use jiff::Timestamp;
use tokio::sync::watch;
use tracing::info;

use crate::store::config::{Config, Peer, Tls};
use crate::store::fleet_files::files;
use crate::store::lock::lock;
use drainpipe_api_types::fleet_list::{FleetList, SignedList};

/// A list that is held.
#[derive(Debug)]
pub(crate) struct AcceptedList {
    pub(crate) list: FleetList,
    pub(crate) signed: SignedList,
}

/// The fleet, as this host knows it.
#[derive(Debug)]
pub(crate) struct Fleet {
    own_name: String,
    configured: Vec<Peer>,
    files: JoinedFiles,
    identity: Identity,
    held: RwLock<Option<Arc<AcceptedList>>>,
    // Held while a list is written, which may take long: who asks for the hosts does not wait for that.
    taking: Mutex<()>,
    version: watch::Sender<u64>,
}

impl Fleet {
    /// As it was when the agent ended.
    pub(crate) fn open(config: &Config, identity: &Identity) -> Result<Self, Problem> {
        let files = files(&config.state_directory);
        let held = read(&files, identity)?.map(Arc::new);
        Ok(Self {
            own_name: config.name.clone(),
            configured: config.peers.clone(),
            files,
            identity: identity.clone(),
            version: watch::Sender::new(held.as_ref().map_or(0, |held| held.list.version)),
            held: RwLock::new(held),
            taking: Mutex::default(),
        })
    }

    /// The list; none where no host has joined.
    pub(crate) fn held(&self) -> Option<Arc<AcceptedList>> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Turns up with each newer list.
    pub(crate) fn versions(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The other hosts: those of the configuration, and those that have joined.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        merged(&self.own_name, &self.configured, self.held().as_ref().map(|held| &held.list))
    }

    fn set(&self, held: Option<Arc<AcceptedList>>) {
        // One assignment leaves it whole.
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = held;
    }

    /// The hosts whose certificates were revoked; some may have joined again.
    pub(crate) fn revoked_hosts(&self) -> Vec<String> {
        self.held().map_or_else(Vec::new, |held| held.list.revoked_hosts.keys().cloned().collect())
    }

    /// When the certificates of a host were revoked, if they were.
    pub(crate) fn revoked_at(&self, host: &str) -> Option<Timestamp> {
        self.held()?.list.revoked_hosts.get(host).copied()
    }

    /// This host has left: it has no key on its disk any more, and knows nobody by the list.
    pub(crate) fn forget(&self) -> Result<(), Problem> {
        let _taking = lock(&self.taking);
        self.files.remove().map_err(Problem::failed)?;
        self.set(None);
        Ok(())
    }

    /// Takes a list that is newer than what is held: whether it was.
    pub(crate) fn take(&self, signed: SignedList) -> Result<bool, Problem> {
        let refused = |error| Problem::refused(format!("this list of hosts is not accepted: {error}"));
        let list = signed.verified(self.identity.authority_key()).map_err(refused)?;
        let _taking = lock(&self.taking);
        if self.held().is_some_and(|held| held.list.version >= list.version) {
            return Ok(false);
        }
        // A full disk does not keep a revoked certificate good.
        self.identity.revocations().set(list.revoked());
        write(&self.files, &signed)?;
        let (version, hosts) = (list.version, list.members.len());
        self.set(Some(Arc::new(AcceptedList { list, signed })));
        info!(version, hosts, "the list of the fleet's hosts is updated");
        self.version.send_replace(version);
        Ok(true)
    }
}

/// Refuses revoked certificates from now on, before anything else is known. Without the list, a host that has joined does
/// not know whose they are.
pub(crate) fn refuse_revoked(config: &Config, identity: &Identity) -> Result<(), Problem> {
    let files = files(&config.state_directory);
    match read(&files, identity)? {
        Some(held) => identity.revocations().set(held.list.revoked()),
        None if config.tls == Tls::of_joined(&files) => {
            return Err(Problem::refused(format!(
                "{} is missing, which says whose certificates are revoked: copy it from another host of the fleet, where it \
                 has the same name; on the host that has the authority's key, `drainpipe init` begins a new one",
                files.list.display()
            )));
        }
        None => {}
    }
    Ok(())
}

/// The other hosts, before anything else is known: for who asks them about a journal.
pub(crate) fn known_peers(config: &Config, identity: &Identity) -> Result<Vec<Peer>, Problem> {
    let held = read(&files(&config.state_directory), identity)?;
    Ok(merged(&config.name, &config.peers, held.as_ref().map(|held| &held.list)))
}

/// If both name a host, the configuration is right. A host that is no member any more has no peers from the list.
fn merged(own_name: &str, configured: &[Peer], list: Option<&FleetList>) -> Vec<Peer> {
    let members = list.map(|list| &list.members).filter(|members| members.contains_key(own_name));
    let joined = members
        .into_iter()
        .flatten()
        .filter(|(name, _)| *name != own_name && !configured.iter().any(|peer| peer.name == **name));
    let joined = joined.map(|(name, member)| Peer { name: name.clone(), address: member.address });
    configured.iter().cloned().chain(joined).collect()
}

fn read(files: &JoinedFiles, identity: &Identity) -> Result<Option<AcceptedList>, Problem> {
    let path = files.list.display();
    let unusable = |why: &dyn std::fmt::Display| {
        Problem::refused(format!(
            "{path} is not a list of the fleet's hosts: {why}; copy it from another host of the fleet, or \
            put back what was there"
        ))
    };
    let Some(text) = files.list().map_err(Problem::refused)? else { return Ok(None) };
    let signed: SignedList = serde_json::from_str(&text).map_err(|error| unusable(&error))?;
    let list = signed.verified(identity.authority_key()).map_err(|error| unusable(&error))?;
    Ok(Some(AcceptedList { list, signed }))
}

/// Keeps a list where the agent finds it.
pub(crate) fn write(files: &JoinedFiles, signed: &SignedList) -> Result<(), Problem> {
    let text = serde_json::to_string(signed).map_err(Problem::failed)?;
    files.keep_list(&text).map_err(Problem::failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use drainpipe_api_types::fleet_list::Member;

    fn peer(name: &str, address: &str) -> Peer {
        Peer { name: name.into(), address: address.parse().unwrap() }
    }

    #[test]
    fn the_configuration_wins_and_who_has_left_has_no_others() {
        let member = |address: &str| Member {
            address: address.parse().unwrap(),
            since: Timestamp::UNIX_EPOCH,
            by: String::new(),
        };
        let list = FleetList::first("a", "192.0.2.1:1".parse().unwrap(), 1, Timestamp::UNIX_EPOCH);
        let list = list.with("b", member("192.0.2.2:1")).unwrap().with("c", member("192.0.2.3:1")).unwrap();
        let configured = [peer("b", "198.51.100.2:1")];
        let peers = |own: &str| -> Vec<String> {
            merged(own, &configured, Some(&list)).iter().map(|peer| peer.address.to_string()).collect()
        };
        assert_eq!(peers("a"), ["198.51.100.2:1", "192.0.2.3:1"]);
        assert_eq!(peers("gone"), ["198.51.100.2:1"]);
    }
}
