//! The list of the fleet's hosts, as its authority signs it. Any host may hand a newer one on: nobody can change
//! it, and an older one is not taken.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use drainpipe_identity::{Peer, authority, check_name};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

/// Most hosts of a fleet.
pub const MEMBERS_MAX: usize = 1024;

/// Longest text of a list. With its signature it fits into a request.
pub const LIST_BYTES_MAX: usize = 512 << 10;

/// Which hosts there are, and whose certificates are no longer valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetList {
    /// Goes up with each change.
    pub version: u64,
    /// The host that has the authority's key.
    pub authority: String,
    /// For how long certificates are made.
    pub certificate_s: u32,
    /// The hosts, by name.
    pub members: BTreeMap<String, Member>,
    /// When the certificates of these hosts were revoked.
    #[serde(default)]
    pub revoked_hosts: BTreeMap<String, Timestamp>,
    /// When those of these operators were.
    #[serde(default)]
    pub revoked_operators: BTreeMap<String, Timestamp>,
    /// The latest beginning of a certificate that was made for a host: none is revoked to before that, whatever the clock
    /// says.
    #[serde(default)]
    pub latest_beginning: Option<Timestamp>,
}

/// One host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Where its agent listens.
    pub address: SocketAddr,
    /// Since when it is one.
    pub since: Timestamp,
    /// The host that let it in.
    pub by: String,
}

/// A list with its signature.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignedList {
    /// The list, as JSON: byte for byte what was signed.
    list: String,
    /// The authority's signature: ECDSA over P-256, in ASN.1.
    signature: Vec<u8>,
}

/// Why a list is not taken.
#[derive(Debug, Error)]
pub enum ListError {
    /// No fleet needs as much.
    #[error("it is longer than {LIST_BYTES_MAX} bytes")]
    TooLong,
    /// By its key.
    #[error("the authority did not sign it")]
    NotSigned,
    /// Though it is signed.
    #[error("it does not make sense: {0}")]
    Malformed(#[from] serde_json::Error),
    /// Members.
    #[error("it has more than {MEMBERS_MAX} hosts")]
    TooMany,
    /// One whose name no host may have.
    #[error("it has a host named {0:?}")]
    Name(String),
}

impl FleetList {
    /// The list of a fleet that consists of the host with the authority.
    pub fn first(host: &str, address: SocketAddr, certificate_s: u32, now: Timestamp) -> Self {
        let member = Member { address, since: now, by: "drainpipe init".into() };
        Self {
            version: 1,
            authority: host.into(),
            certificate_s,
            members: BTreeMap::from([(host.into(), member)]),
            revoked_hosts: BTreeMap::new(),
            revoked_operators: BTreeMap::new(),
            latest_beginning: None,
        }
    }

    /// After a certificate was made that begins then.
    #[must_use]
    pub fn having_made(mut self, not_before: Timestamp) -> Self {
        self.latest_beginning = self.latest_beginning.max(Some(not_before));
        self
    }

    /// With a host that was not in it.
    pub fn with(mut self, name: &str, member: Member) -> Result<Self, ListError> {
        if self.members.len() >= MEMBERS_MAX {
            return Err(ListError::TooMany);
        }
        self.members.insert(name.into(), member);
        Ok(self)
    }

    /// Without this holder, whose certificates from before are no longer valid. The clock may have been set back since they
    /// were made, or since they were revoked for the first time.
    #[must_use]
    pub fn without(mut self, holder: &Peer, now: Timestamp) -> Self {
        let at = self.latest_beginning.map_or(now, |latest| latest.max(now));
        let (revoked, name) = match holder {
            Peer::Host(name) => {
                self.members.remove(name);
                (&mut self.revoked_hosts, name)
            }
            Peer::Operator(name) => (&mut self.revoked_operators, name),
        };
        let known = revoked.entry(name.clone()).or_insert(at);
        *known = at.max(*known);
        self
    }

    /// When each holder's certificates were revoked.
    pub fn revoked(&self) -> BTreeMap<Peer, Timestamp> {
        let hosts = self.revoked_hosts.iter().map(|(name, at)| (Peer::Host(name.clone()), *at));
        let operators = self.revoked_operators.iter().map(|(name, at)| (Peer::Operator(name.clone()), *at));
        hosts.chain(operators).collect()
    }

    /// The earliest beginning of a certificate for this host that is not taken for a revoked one.
    pub fn earliest(&self, host: &str) -> Timestamp {
        let revoked = self.revoked_hosts.get(host);
        // Certificates know whole seconds.
        revoked
            .map_or(Timestamp::MIN, |at| Timestamp::from_second(at.as_second() + 1).unwrap_or(Timestamp::MAX))
    }

    fn check(&self) -> Result<(), ListError> {
        if self.members.len() > MEMBERS_MAX {
            return Err(ListError::TooMany);
        }
        let names: BTreeSet<&String> =
            self.members.keys().chain(self.revoked_hosts.keys()).chain([&self.authority]).collect();
        let bad = names.into_iter().find(|name| check_name(name).is_err());
        bad.map_or(Ok(()), |name| Err(ListError::Name(name.chars().take(64).collect())))
    }
}

impl SignedList {
    /// Signed by whoever has the authority's key.
    pub fn new<E>(list: &FleetList, sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, E>) -> Result<Self, E> {
        let list = serde_json::to_string(list).expect("a list has names and times only");
        let signature = sign(list.as_bytes())?;
        Ok(Self { list, signature })
    }

    /// The list, if the authority with this public key signed it.
    pub fn verified(&self, authority_key: &[u8]) -> Result<FleetList, ListError> {
        if self.list.len() > LIST_BYTES_MAX {
            return Err(ListError::TooLong);
        }
        if !authority::has_signed(authority_key, self.list.as_bytes(), &self.signature) {
            return Err(ListError::NotSigned);
        }
        let list: FleetList = serde_json::from_str(&self.list)?;
        list.check()?;
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> FleetList {
        FleetList::first("a", "192.0.2.11:7420".parse().unwrap(), 3600, Timestamp::UNIX_EPOCH)
    }

    fn member() -> Member {
        Member {
            address: "192.0.2.12:7420".parse().unwrap(),
            since: Timestamp::UNIX_EPOCH,
            by: "root".into(),
        }
    }

    #[test]
    fn who_is_revoked_is_no_member_and_may_come_again() {
        let at = Timestamp::from_second(1000).unwrap();
        let without = list().with("b", member()).unwrap().without(&Peer::Host("b".into()), at);
        assert!(!without.members.contains_key("b"));
        assert_eq!(without.revoked(), BTreeMap::from([(Peer::Host("b".into()), at)]));
        assert_eq!(without.earliest("b"), Timestamp::from_second(1001).unwrap());
        let again = without.with("b", member()).unwrap();
        assert!(again.members.contains_key("b") && again.revoked_hosts.contains_key("b"));
    }

    #[test]
    fn a_clock_that_was_set_back_revokes_all_the_same() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let b = Peer::Host("b".into());
        let list = list().with("b", member()).unwrap().having_made(at(2000)).having_made(at(1500));
        let revoked = list.without(&b, at(1000));
        assert_eq!(revoked.earliest("b"), at(2001));
        let once_more = revoked.clone().without(&b, at(3000)).without(&b, at(1000));
        assert_eq!(once_more.earliest("b"), at(3001));
    }

    #[test]
    fn a_list_is_taken_only_as_the_authority_signed_it() {
        let directory = tempfile::tempdir().unwrap();
        let authority = directory.path().join("authority");
        let options = authority::InitOptions::default();
        authority::init(&authority, &options).unwrap();
        let other = directory.path().join("other");
        authority::init(&other, &options).unwrap();
        let key = |directory| authority::public_key(directory).unwrap();
        let signed = SignedList::new(&list(), |text| authority::sign(&authority, text)).unwrap();
        assert_eq!(signed.verified(&key(&authority)).unwrap(), list());
        assert!(matches!(signed.verified(&key(&other)), Err(ListError::NotSigned)));
        let changed = SignedList { list: signed.list.replace("192.0.2.11", "192.0.2.66"), ..signed };
        assert!(matches!(changed.verified(&key(&authority)), Err(ListError::NotSigned)));
    }

    #[test]
    fn a_fleet_has_an_end() {
        let mut full = list();
        for number in 1..MEMBERS_MAX {
            full = full.with(&format!("h{number}"), member()).unwrap();
        }
        assert!(serde_json::to_string(&full).unwrap().len() < LIST_BYTES_MAX);
        assert!(matches!(full.with("z", member()), Err(ListError::TooMany)));
    }
}
