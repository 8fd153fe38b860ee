//! Hosts that join and leave the fleet. One host has the authority's key, and signs the list of hosts; a host that has
//! no certificate yet shows it a token, and gets one for a key that never leaves it.

pub(crate) mod exchange;
pub(crate) mod renewal;
pub mod setup;

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

use crate::host::Host;
use crate::outgoing::Outgoing;
use crate::peers::Peers;
use crate::peers::slots::Slots;
use crate::store::fleet::{AcceptedList, Fleet};
use crate::store::fleet_files::authority_directory;
use crate::store::journal::{AGAIN_WITHIN_S, Journal, TokenUse};
use crate::store::lock::lock;
use drainpipe_api_types::fleet_list::{FleetList, Member, SignedList};
use drainpipe_api_types::{
    DepartureRequest, FleetView, JoinAnswer, JoinRequest, MemberView, RevocationRequest, RevokedView,
    TokenView,
};

/// Where a host says that it leaves.
pub(crate) const DEPARTURES: &str = "/v1/fleet/departures";

/// Longest that a token may be good.
pub(crate) const TOKEN_LIFE_S_MAX: u32 = 24 * 60 * 60;

/// A renewed certificate begins with the latest one if that began this short a time before: it needs no new list then.
const BEGIN_TOGETHER: SignedDuration = SignedDuration::from_mins(10);

/// How often a change is made again when a newer list has come from others meanwhile.
const CHANGES_MAX: usize = 3;

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
    /// Opens this host's.
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
        let secret =
            JoinSecret::random().ok_or_else(|| Problem::failed("the system provides no random bytes"))?;
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
        // Only a client with a token learns what is wrong with the request.
        let taken = self.journal.look_at_token(&hash, &user, now_s())?;
        if taken == TokenUse::Refused {
            return Err(self.refuse(from));
        }
        let list = self.held()?.list.clone();
        self.check_new(&list, request, taken == TokenUse::Again)?;
        let member = Member {
            address: reachable(request.address, from)?,
            since: Timestamp::now(),
            by: format!("a token of {}", self.host.name()),
        };
        let certify = |validity| self.certify(&request.name, &request.certificate_request, validity);
        // What cannot be certified uses no token up.
        certify(validity(&list, &request.name))?;
        let mut good = None;
        // All of it once more, while nobody else changes the list: two may want one name, or one token, at once.
        let held = self.change(|list| {
            let taken = self.journal.look_at_token(&hash, &user, now_s())?;
            self.check_new(&list, request, taken == TokenUse::Again)?;
            let validity = validity(&list, &request.name);
            good = Some(validity);
            let list = list.with(&request.name, member.clone()).map_err(Problem::refused)?;
            match self.journal.take_token(&hash, &user, now_s())? {
                TokenUse::First => self.close_soon()?,
                TokenUse::Again => {}
                TokenUse::Refused => return Err(self.refuse(from)),
            }
            Ok(list.having_made(validity.not_before))
        })?;
        let certificate = certify(good.expect("the change was made"))?;
        info!(host = request.name, address = %member.address, "has joined");
        let authority = authority::certificate_pem(&self.directory()).map_err(Problem::failed)?;
        Ok(JoinAnswer { certificate, authority, list: held.signed.clone() })
    }

    /// After the first use of a token: others, or the same for a minute, are listened to still.
    fn close_soon(&self) -> Result<(), Problem> {
        let others_end = self.journal.last_token_ends_at_s()?.unwrap_or(0);
        self.open_until_s.store(others_end.max(now_s() + AGAIN_WITHIN_S), Ordering::Relaxed);
        Ok(())
    }

    /// The same for whatever is wrong with a token.
    fn refuse(&self, from: IpAddr) -> Problem {
        let refused = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        warn!(%from, refused, "refused a host that wants to join: its token is not valid");
        Problem::refused(
            "this token is not valid: it was used, has expired, or never was a token; `drainpipe init` prints another",
        )
    }

    fn check_new(&self, list: &FleetList, request: &JoinRequest, comes_again: bool) -> Result<(), Problem> {
        check_name(&request.name).map_err(Problem::bad_input)?;
        let name = &request.name;
        let is_known = list.members.contains_key(name) || self.host.peer(name).is_ok();
        if *name == self.host.name() || is_known && !comes_again {
            return Err(Problem::conflict(format!(
                "there is a host {name} in this fleet: choose another name for this one, or, if it is to take the other's \
                 place, run `drainpipe revoke {name}` on {} first",
                self.host.name()
            )));
        }
        let by_hand = self.directory().join("hosts").join(name);
        if by_hand.exists() {
            return Err(Problem::conflict(format!(
                "host {name} has a certificate of this authority that was made by hand: choose another name for this one, \
                 or, if that host no longer exists, run `drainpipe revoke {name}` on {} and remove {}",
                self.host.name(),
                by_hand.display()
            )));
        }
        Ok(())
    }

    /// A new certificate, for a host whose own is about to end.
    pub(crate) fn renew(&self, host: &str, request_pem: &str) -> Result<String, Problem> {
        self.check_authority()?;
        // One list for all of it: whoever is revoked meanwhile gets what is revoked with it.
        let held = self.held()?;
        check_joined(&held.list, host)?;
        let validity = renewed_validity(&held.list, host);
        let certificate = self.certify(host, request_pem, validity)?;
        if held.list.latest_beginning < Some(validity.not_before) {
            self.change(|list| Ok(list.having_made(validity.not_before)))?;
        }
        let now = self.held()?;
        check_joined(&now.list, host)?;
        if now.list.earliest(host) != held.list.earliest(host) {
            return Err(Problem::refused(format!("the certificates of {host} have just been revoked")));
        }
        info!(host, "has a new certificate");
        Ok(certificate)
    }

    fn certify(&self, host: &str, request_pem: &str, validity: Validity) -> Result<String, Problem> {
        let certified =
            authority::certify(&self.directory(), request_pem, &Peer::Host(host.into()), validity);
        certified.map_err(|error| match error {
            authority::AuthorityError::Request(_) => Problem::bad_input(error),
            other => Problem::failed(other),
        })
    }

    /// Certificates of a host or an operator that were made until now are no longer valid. A host is no member from now on.
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
                "{0} has the authority's key: without it, no host could join or be revoked. Have all others \
                leave, then \
                 run `drainpipe leave` on {0}",
                self.host.name()
            )));
        }
        let held = self.change(|list| {
            if let Peer::Host(name) = holder
                && let Err(error) = self.journal.forget_tokens_of(name)
            {
                // It is revoked all the same.
                warn!(%error, name, "a token that it used within the last minute may still let it in");
            }
            Ok(list.without(holder, Timestamp::now()))
        })?;
        info!(%holder, "its certificates are revoked");
        Ok(in_view(&held.list))
    }

    /// This host leaves the fleet.
    pub(crate) async fn depart(&self, request: DepartureRequest) -> Result<(), Problem> {
        // First, lest a VM arrives between the look and the end.
        self.host.set_leaving(true);
        let left = self.try_to_depart(request.force).await;
        if left.is_err() {
            self.host.set_leaving(false);
        }
        left
    }

    async fn try_to_depart(&self, is_forced: bool) -> Result<(), Problem> {
        let own = self.host.name();
        self.check_idle(is_forced)?;
        let list = match self.held() {
            Err(_) if is_forced => return self.fleet.forget(),
            held => held?.list.clone(),
        };
        if list.authority != own {
            match self.tell_authority(&list.authority).await {
                Err(problem) if is_forced => warn!(%problem, "leaves without informing the others"),
                answered => answered?,
            }
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

    async fn tell_authority(&self, authority: &str) -> Result<(), Problem> {
        let authority = self.peers.get(authority).ok_or_else(|| {
            Problem::refused(format!(
                "{} has left already, or was revoked: with --force it forgets the fleet",
                self.host.name()
            ))
        })?;
        authority.post::<()>(DEPARTURES, &()).await
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
            "{0} has VMs: {1}. Move them away (`drainpipe drain {0}`) or remove them; with --force it \
            leaves with them, and they keep running",
            self.host.name(),
            vms.join(", ")
        )))
    }

    fn change(
        &self,
        mut make: impl FnMut(FleetList) -> Result<FleetList, Problem>,
    ) -> Result<Arc<AcceptedList>, Problem> {
        let _changing = lock(&self.changing);
        for _ in 0..CHANGES_MAX {
            let list = make(self.held()?.list.clone())?;
            let list = FleetList { version: list.version + 1, ..list };
            let is_taken = block_in_place(|| {
                let signed = SignedList::new(&list, |text| authority::sign(&self.directory(), text));
                self.fleet.take(signed.map_err(Problem::failed)?)
            })?;
            if is_taken {
                return self.held();
            }
        }
        Err(Problem::conflict("newer lists of the fleet's hosts keep coming from other hosts: try again"))
    }

    fn held(&self) -> Result<Arc<AcceptedList>, Problem> {
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

fn check_joined(list: &FleetList, host: &str) -> Result<(), Problem> {
    if list.members.contains_key(host) {
        return Ok(());
    }
    Err(Problem::refused(format!("{host} has not joined this fleet: its certificate was made by hand")))
}

fn validity(list: &FleetList, host: &str) -> Validity {
    Validity::lasting(SignedDuration::from_secs(list.certificate_s.into()), list.earliest(host))
}

fn renewed_validity(list: &FleetList, host: &str) -> Validity {
    let validity = validity(list, host);
    let is_near = |latest: &Timestamp| {
        *latest >= list.earliest(host)
            && *latest < validity.not_before
            && validity.not_before.duration_since(*latest) < BEGIN_TOGETHER
    };
    let not_before = list.latest_beginning.filter(is_near).unwrap_or(validity.not_before);
    Validity { not_before, ..validity }
}

/// The address at which an agent listens: if that is all of them, the one that it comes from. Others must reach it there.
fn reachable(listens: SocketAddr, from: IpAddr) -> Result<SocketAddr, Problem> {
    let from = from.to_canonical();
    let listened = listens.ip().to_canonical();
    let ip = if listened.is_unspecified() { from } else { listened };
    let is_for_one_link = match ip {
        IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_for_one_host = ip.is_unspecified() || ip.is_loopback() && !from.is_loopback();
    if is_for_one_link || is_for_one_host || ip.is_multicast() || listens.port() == 0 {
        return Err(Problem::bad_input(format!(
            "{listens} is not an address at which other hosts can reach this one: give one with --listen, \
            or in agent.toml"
        )));
    }
    Ok(SocketAddr::new(ip, listens.port()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_an_address_by_which_others_reach_it() {
        let reach = |listens: &str, from: &str| {
            let reached = reachable(listens.parse().unwrap(), from.parse().unwrap());
            reached.map(|address| address.to_string()).ok()
        };
        for (listens, from, address) in [
            ("192.0.2.9:7420", "192.0.2.8", "192.0.2.9:7420"),
            ("0.0.0.0:7420", "::ffff:192.0.2.8", "192.0.2.8:7420"),
            ("[::]:7420", "2001:db8::8", "[2001:db8::8]:7420"),
            ("127.0.0.1:7420", "127.0.0.1", "127.0.0.1:7420"),
        ] {
            assert_eq!(reach(listens, from).as_deref(), Some(address));
        }
        for listens in [
            "127.0.0.1:7420",
            "[::ffff:127.0.0.1]:7420",
            "[::1]:7420",
            "192.0.2.9:0",
            "224.0.0.1:7420",
            "[ff02::1]:7420",
            "169.254.1.1:7420",
            "[fe80::1]:7420",
            "255.255.255.255:7420",
        ] {
            assert_eq!(reach(listens, "192.0.2.8"), None, "{listens}");
        }
        assert_eq!(reach("[::]:7420", "fe80::8"), None);
    }

    #[test]
    fn a_renewal_seldom_needs_a_new_list_and_never_begins_before_a_revocation() {
        let now = Timestamp::now();
        let list = FleetList::first("a", "192.0.2.1:1".parse().unwrap(), 3600, now);
        let first = renewed_validity(&list, "a").not_before;
        let list = list.having_made(first);
        assert_eq!(renewed_validity(&list, "a").not_before, first);
        let revoked = list.without(&Peer::Host("b".into()), now);
        assert!(renewed_validity(&revoked, "b").not_before > now);
    }
}
