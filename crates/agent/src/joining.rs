//! Who comes to the fleet, and who leaves it. One host has the authority's key, and signs the list of hosts; a host that
//! has no certificate yet shows it a token, and gets one for a key that never leaves it.

pub(crate) mod exchange;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use drainpipe_engine::problem::Problem;
use drainpipe_identity::{
    Fingerprint, Identity, JoinSecret, JoinToken, Peer, Validity, authority, check_name,
};
use jiff::{SignedDuration, Timestamp};
use ring::digest::{SHA256, digest};
use tokio::task::block_in_place;
use tracing::{info, warn};

use crate::api_types::{
    DepartureRequest, FleetView, JoinAnswer, JoinRequest, MemberView, RevocationRequest, RevokedView,
    TokenView,
};
use crate::fleet::{Fleet, Held};
use crate::fleet_files::authority_directory;
use crate::fleet_list::{FleetList, Member, SignedList};
use crate::host::Host;
use crate::journal::{Journal, Taken};
use crate::lock::lock;
use crate::outgoing::Outgoing;
use crate::peers::Peers;
use crate::slots::Slots;

/// Longest that a token may be good.
pub(crate) const TOKEN_LIFE_S_MAX: u32 = 24 * 60 * 60;

/// How long who has used a token up may ask again: the answer may have been lost.
const AGAIN_WITHIN_S: i64 = 60;

/// Joins that are looked at at a time, of one address and together.
const JOINS_OF_ONE_MAX: usize = 2;
const JOINS_MAX: usize = 8;

/// Joins, departures and revocations.
#[derive(Debug)]
pub(crate) struct Joining {
    host: Arc<Host>,
    fleet: Arc<Fleet>,
    journal: Arc<Journal>,
    peers: Arc<Peers>,
    outgoing: Arc<Outgoing>,
    identity: Identity,
    // One change of the list at a time.
    changing: Mutex<()>,
    open_until_s: AtomicI64,
    refused: AtomicU64,
    joins: Slots,
}

impl Joining {
    /// Of this host.
    pub(crate) fn open(outgoing: &Arc<Outgoing>) -> Result<Self, Problem> {
        let Outgoing { host, journal, peers, .. } = &**outgoing;
        Ok(Self {
            fleet: Arc::clone(&host.fleet),
            host: Arc::clone(host),
            open_until_s: AtomicI64::new(journal.last_token_ends_at_s()?.unwrap_or(0)),
            journal: Arc::clone(journal),
            identity: peers.identity.clone(),
            peers: Arc::clone(peers),
            outgoing: Arc::clone(outgoing),
            changing: Mutex::default(),
            refused: AtomicU64::new(0),
            joins: Slots::new("joins", JOINS_OF_ONE_MAX, JOINS_MAX),
        })
    }

    /// Whether there is a token that is good: nobody without a certificate is listened to otherwise.
    pub(crate) fn is_open(&self) -> bool {
        now_s() < self.open_until_s.load(Ordering::Relaxed)
    }

    /// The fleet, for people.
    pub(crate) fn view(&self) -> Result<FleetView, Problem> {
        Ok(in_view(&self.held()?.list))
    }

    /// Lets one host join, within this time.
    pub(crate) fn open_token(&self, life_s: u32) -> Result<TokenView, Problem> {
        self.check_authority()?;
        if !(1..=TOKEN_LIFE_S_MAX).contains(&life_s) {
            return Err(Problem::bad_input(format!("life_s may be 1 to {TOKEN_LIFE_S_MAX}")));
        }
        let secret = JoinSecret::random().ok_or_else(|| Problem::failed("the system has no random bytes"))?;
        let (now, end) = (now_s(), now_s() + i64::from(life_s));
        self.journal.add_token(&secret.hash(), now, end)?;
        self.open_until_s.fetch_max(end, Ordering::Relaxed);
        let authority = Fingerprint::of(self.identity.authority());
        let token = JoinToken { host: self.host.name().into(), authority, secret };
        Ok(TokenView {
            token: token.to_string(),
            address: self.host.config.listen.to_string(),
            ends_at: Timestamp::from_second(end).map_err(Problem::failed)?.to_string(),
        })
    }

    /// Lets a host in that shows a token, and comes from this address.
    pub(crate) fn join(&self, request: &JoinRequest, from: IpAddr) -> Result<JoinAnswer, Problem> {
        let _slot = self.joins.take(&from.to_string())?;
        self.check_authority()?;
        let hash = request.secret.parse::<JoinSecret>().map(|secret| secret.hash()).unwrap_or_default();
        let key = digest(&SHA256, request.certificate_request.as_bytes());
        let user = format!("{} {key:?}", request.name);
        // What is wrong with the request, only who has a token is told.
        if self.journal.look_at_token(&hash, &user, now_s())? == Taken::Refused {
            return Err(self.refuse(from));
        }
        self.check_new(request, self.journal.has_used_token(&hash, &user)?)?;
        let certificate = self.certify(&request.name, &request.certificate_request)?;
        if self.journal.take_token(&hash, &user, now_s())? == Taken::Refused {
            return Err(self.refuse(from));
        }
        let others_end = self.journal.last_token_ends_at_s()?.unwrap_or(0);
        self.open_until_s.store(others_end.max(now_s() + AGAIN_WITHIN_S), Ordering::Relaxed);
        let member = Member {
            address: reachable(request.address, from),
            since: Timestamp::now(),
            by: format!("a token of {}", self.host.name()),
        };
        let held = self.change(|list| list.with(&request.name, member).map_err(Problem::refused))?;
        info!(host = request.name, address = %request.address, "has joined");
        let authority = authority::certificate_pem(&self.directory()).map_err(Problem::failed)?;
        Ok(JoinAnswer { certificate, authority, list: held.signed.clone() })
    }

    /// The same for whatever is wrong with a token.
    fn refuse(&self, from: IpAddr) -> Problem {
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        warn!(%from, refused, "refused a host that wants to join: its token is not good");
        Problem::refused(
            "this token is not good: it was used, or has ended, or never was one; `drainpipe init` prints another",
        )
    }

    fn check_new(&self, request: &JoinRequest, comes_again: bool) -> Result<(), Problem> {
        check_name(&request.name).map_err(Problem::bad_input)?;
        let name = &request.name;
        let is_known = self.held()?.list.members.contains_key(name) || self.host.peer(name).is_ok();
        if *name == self.host.name() || is_known && !comes_again {
            return Err(Problem::conflict(format!(
                "there is a host {name} in this fleet: choose another name for this one, or, if it is to take the other's \
                 place, run `drainpipe revoke {name}` on {} first",
                self.host.name()
            )));
        }
        Ok(())
    }

    /// A new certificate, for a host whose own is about to end.
    pub(crate) fn renew(&self, host: &str, request_pem: &str) -> Result<String, Problem> {
        self.check_authority()?;
        if !self.held()?.list.members.contains_key(host) {
            return Err(Problem::refused(format!(
                "{host} has not joined this fleet: its certificate is made by hand"
            )));
        }
        let certificate = self.certify(host, request_pem)?;
        info!(host, "has a new certificate");
        Ok(certificate)
    }

    fn certify(&self, host: &str, request_pem: &str) -> Result<String, Problem> {
        let held = self.held()?;
        let length = SignedDuration::from_secs(held.list.certificate_s.into());
        let validity = Validity::lasting(length, held.list.earliest(host));
        let certified =
            authority::certify(&self.directory(), request_pem, &Peer::Host(host.into()), validity);
        certified.map_err(|error| match error {
            authority::AuthorityError::Request(_) => Problem::bad_input(error),
            other => Problem::failed(other),
        })
    }

    /// Certificates of a host or an operator that were made until now are good no more. A host is no member from now on.
    pub(crate) fn revoke(&self, request: &RevocationRequest) -> Result<FleetView, Problem> {
        check_name(&request.name).map_err(Problem::bad_input)?;
        let name = request.name.clone();
        let holder = if request.is_operator { Peer::Operator(name) } else { Peer::Host(name) };
        self.remove(&holder)
    }

    /// A host leaves, of its own accord.
    pub(crate) fn remove_host(&self, host: &str) -> Result<FleetView, Problem> {
        self.remove(&Peer::Host(host.into()))
    }

    fn remove(&self, holder: &Peer) -> Result<FleetView, Problem> {
        self.check_authority()?;
        if *holder == Peer::Host(self.host.name().into()) {
            return Err(Problem::refused(format!(
                "{0} has the authority's key: without it nobody could be let in or revoked. Have all others leave, then \
                 run `drainpipe leave` on {0}",
                self.host.name()
            )));
        }
        let held = self.change(|list| Ok(list.without(holder, Timestamp::now())))?;
        info!(%holder, "its certificates are revoked");
        Ok(in_view(&held.list))
    }

    /// This host leaves the fleet.
    pub(crate) async fn depart(&self, request: DepartureRequest) -> Result<(), Problem> {
        let list = self.held()?.list.clone();
        let own = self.host.name();
        self.check_idle(request.force)?;
        if list.authority != own {
            let authority = self.peers.get(&list.authority).ok_or_else(|| {
                Problem::refused(format!("{own} has left already, or was revoked: remove its certificate"))
            })?;
            authority.post::<()>("/v1/fleet/departures", &()).await?;
        } else if list.members.len() > 1 {
            let others: Vec<&str> =
                list.members.keys().map(String::as_str).filter(|name| *name != own).collect();
            return Err(Problem::refused(format!(
                "{own} has the authority's key, and there are other hosts: have them leave first: {}",
                others.join(", ")
            )));
        }
        self.fleet.forget()
    }

    fn check_idle(&self, is_forced: bool) -> Result<(), Problem> {
        if self.outgoing.is_migrating() {
            return Err(Problem::conflict(format!(
                "VMs are on their way from {0} or to it: wait for them, or cancel them (`drainpipe history`)",
                self.host.name()
            )));
        }
        let vms: Vec<String> = self.outgoing.vms.names().iter().map(ToString::to_string).collect();
        if vms.is_empty() || is_forced {
            return Ok(());
        }
        Err(Problem::refused(format!(
            "{0} has VMs: {1}. Move them away (`drainpipe drain {0}`) or remove them; with --force it leaves with them, and \
             they run on",
            self.host.name(),
            vms.join(", ")
        )))
    }

    fn change(
        &self,
        make: impl FnOnce(FleetList) -> Result<FleetList, Problem>,
    ) -> Result<Arc<Held>, Problem> {
        let _changing = lock(&self.changing);
        let list = make(self.held()?.list.clone())?;
        let list = FleetList { version: list.version + 1, ..list };
        block_in_place(|| {
            let signed = SignedList::new(&list, |text| authority::sign(&self.directory(), text));
            self.fleet.take(signed.map_err(Problem::failed)?)
        })?;
        self.held()
    }

    fn held(&self) -> Result<Arc<Held>, Problem> {
        self.fleet.held().ok_or_else(|| {
            Problem::refused(format!(
                "{} has joined no fleet: its certificate was made by hand (`drainpipe pki`)",
                self.host.name()
            ))
        })
    }

    fn check_authority(&self) -> Result<(), Problem> {
        let authority = &self.held()?.list.authority;
        if authority == self.host.name() {
            return Ok(());
        }
        Err(Problem::refused(format!(
            "{} does not have the authority's key; {authority} has: run this there",
            self.host.name()
        )))
    }

    fn directory(&self) -> PathBuf {
        authority_directory(&self.host.config.state_directory)
    }
}

/// Of an agent that listens at all addresses, the one that it comes from.
fn reachable(listens: SocketAddr, from: IpAddr) -> SocketAddr {
    if listens.ip().is_unspecified() { SocketAddr::new(from.to_canonical(), listens.port()) } else { listens }
}

fn in_view(list: &FleetList) -> FleetView {
    let members = list.members.iter().map(|(name, member)| MemberView {
        name: name.clone(),
        address: member.address.to_string(),
        since: member.since.to_string(),
        by: member.by.clone(),
    });
    let revoked = list
        .revoked()
        .into_iter()
        .map(|(holder, at)| RevokedView { holder: holder.to_string(), at: at.to_string() });
    FleetView {
        authority: list.authority.clone(),
        version: list.version,
        members: members.collect(),
        revoked: revoked.collect(),
    }
}

fn now_s() -> i64 {
    Timestamp::now().as_second()
}
