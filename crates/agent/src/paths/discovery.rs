//! Which links of two hosts reach each other by their IPv6 link-local addresses. The addresses do not show that: the
//! target opens a port on each of its links in question, the source sends a datagram to each of them from each link of
//! its own, and an answer shows it.
//!
//! Nothing is sent if every link belongs to a path already.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use drainpipe_engine::host::facts::{HostFacts, MigrationLink};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::{Reach, links_to_try};
use drainpipe_engine::problem::{Problem, ProblemKind};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::net::UdpSocket;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::host::Host;
use crate::paths::link_socket::{bind_udp, on_link};
use crate::paths::probe::ProbePort;
use crate::peers::client::ApiClient;
use crate::peers::slots::Slots;

/// Most links of either host in one trial; with them, the datagrams are bounded too.
const LINKS_MAX: usize = 16;

/// Trials that one host, and all together, may have this one take part in at once. Each is over in half a
/// second.
const TRIALS_OF_ONE_MAX: usize = 4;
const TRIALS_MAX: usize = 16;

/// How long the target keeps its ports open: for the trial, and for a source that is slow to begin it.
const OPEN_FOR: Duration = Duration::from_millis(500);

/// How long the source waits for the target to have opened its ports.
const ASK_DEADLINE: Duration = Duration::from_secs(2);

/// How often it asks when the target takes part in too many trials: each is over by the next time.
const ASK_ATTEMPTS: u8 = 8;

/// How long the source waits for answers, from the first datagram on.
const TRIAL_DEADLINE: Duration = Duration::from_millis(250);

/// Each datagram is sent again this long after it was not answered; so at most three times.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(90);

/// Once as many links as possible have answered, the wait for more of them ends after this much silence.
const QUIET: Duration = Duration::from_millis(30);

/// How often the source looks for answers.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Token, kind, number of the target's link.
const DATAGRAM_BYTES: usize = 18;
const QUESTION: u8 = 0;
const ANSWER: u8 = 1;

/// A request to open a port on each of these links.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiscoveryRequest {
    /// Names of the links, of the host that is asked.
    pub(crate) links: Vec<String>,
}

/// The ports that were opened.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub(crate) struct DiscoveryPorts {
    /// What each datagram of this trial carries.
    #[schema(value_type = String)]
    pub(crate) token: Uuid,
    /// For each link a UDP port on its first link-local address, or why there is none.
    pub(crate) ports: Vec<ProbePort>,
}

/// Nothing tried yet.
pub(crate) fn trials() -> Slots {
    Slots::new("trials of links", TRIALS_OF_ONE_MAX, TRIALS_MAX)
}

/// Opens a port on each link for a moment, and answers there. `own` are this host's migration links.
pub(crate) async fn open(
    host: &Host,
    slots: &Slots,
    source: &str,
    own: &[MigrationLink],
    request: &DiscoveryRequest,
) -> Result<DiscoveryPorts, Problem> {
    if request.links.len() > LINKS_MAX {
        return Err(Problem::bad_input(format!("more than {LINKS_MAX} links to test")));
    }
    let different: BTreeSet<&String> = request.links.iter().collect();
    if different.len() != request.links.len() {
        return Err(Problem::bad_input("each link can be tested once"));
    }
    let slot = slots.take(source)?;
    let token = Uuid::new_v4();
    let sockets = join_all(request.links.iter().map(|name| bind(host, own, name))).await;
    let ports = sockets.iter().map(port_of).collect();
    tokio::spawn(async move {
        let _slot = slot;
        let answering = sockets
            .into_iter()
            .enumerate()
            .filter_map(|(number, socket)| Some(answer(socket.ok()?, token, u8::try_from(number).ok()?)));
        // Ends by the deadline alone.
        drop(timeout(OPEN_FOR, join_all(answering)).await);
    });
    Ok(DiscoveryPorts { token, ports })
}

async fn bind(host: &Host, own: &[MigrationLink], name: &str) -> Result<UdpSocket, Problem> {
    let link = own.iter().find(|link| link.name == name && link.usable);
    let address = link.and_then(MigrationLink::link_local).ok_or_else(|| {
        Problem::bad_input(format!(
            "there is no migration link {} with a link-local address",
            name.escape_default()
        ))
    })?;
    bind_udp(host, name, IpAddr::V6(address)).await
}

fn port_of(socket: &Result<UdpSocket, Problem>) -> ProbePort {
    let bound = socket.as_ref().map_err(|problem| problem.message.clone());
    match bound.and_then(|socket| socket.local_addr().map_err(|error| error.to_string())) {
        Ok(address) => ProbePort::Open(address.port()),
        Err(why) => ProbePort::Refused(why),
    }
}

/// Answers are as long as questions, and only who knows the token gets one, so nobody is flooded by way
/// of this host.
async fn answer(socket: UdpSocket, token: Uuid, number: u8) {
    let mut datagram = [0; DATAGRAM_BYTES + 1];
    loop {
        // A link that fails answers no more.
        let Ok((length, from)) = socket.recv_from(&mut datagram).await else { return };
        if datagram[..length] == encode(token, QUESTION, number) {
            drop(socket.send_to(&encode(token, ANSWER, number), from).await);
        }
    }
}

fn encode(token: Uuid, kind: u8, number: u8) -> [u8; DATAGRAM_BYTES] {
    let mut datagram = [0; DATAGRAM_BYTES];
    datagram[..16].copy_from_slice(token.as_bytes());
    datagram[16..].copy_from_slice(&[kind, number]);
    datagram
}

/// Tries the links of source (this host) and target that stand in no path yet. What cannot be tried makes
/// no path, and the log says why.
pub(crate) async fn discover(
    host: &Host,
    peer: &ApiClient,
    [source, target]: [&HostFacts; 2],
    requested: RequestedOption,
) -> Vec<Reach> {
    let (mut links, mut peer_links) = links_to_try(source, target, requested);
    links.truncate(LINKS_MAX);
    peer_links.truncate(LINKS_MAX);
    if links.is_empty() {
        return vec![];
    }
    let trial = async {
        let request = DiscoveryRequest { links: peer_links.clone() };
        let opened = open_there(peer, &request).await?;
        if opened.ports.len() != peer_links.len() {
            return Err(Problem::refused(format!("{} has opened other ports than requested", target.name)));
        }
        let near = join_all(links.iter().map(|name| near_end(host, source, name))).await;
        let far = peer_links.iter().zip(&opened.ports).enumerate();
        let far = far.filter_map(|(number, (name, port))| far_end(target, number, name, port)).collect();
        Ok(PathProbing {
            token: opened.token,
            near: near.into_iter().flatten().collect(),
            far,
            answered: BTreeSet::new(),
        }
        .run()
        .await)
    };
    trial.await.unwrap_or_else(|problem: Problem| {
        warn!(target = target.name, %problem, "links cannot be tested by their link-local addresses");
        vec![]
    })
}

/// As other migrations of this host may be trying links too, the target may ask for patience.
async fn open_there(peer: &ApiClient, request: &DiscoveryRequest) -> Result<DiscoveryPorts, Problem> {
    let mut attempts_left = ASK_ATTEMPTS;
    loop {
        attempts_left -= 1;
        match peer.post_within("/v1/discovery", request, ASK_DEADLINE).await {
            Err(problem) if problem.kind == ProblemKind::Conflict && attempts_left > 0 => {
                sleep(OPEN_FOR).await;
            }
            answer => return answer,
        }
    }
}

/// A link of this host.
struct NearEnd {
    name: String,
    socket: UdpSocket,
}

/// A link of the other host.
struct FarEnd {
    number: u8,
    name: String,
    address: Ipv6Addr,
    port: u16,
}

async fn near_end(host: &Host, source: &HostFacts, name: &str) -> Option<NearEnd> {
    let address = source.link(name)?.link_local()?;
    let bound = bind_udp(host, name, IpAddr::V6(address)).await;
    let socket = bound.inspect_err(|problem| warn!(%problem, "a link cannot be tested")).ok()?;
    Some(NearEnd { name: name.into(), socket })
}

fn far_end(target: &HostFacts, number: usize, name: &str, port: &ProbePort) -> Option<FarEnd> {
    let address = target.link(name)?.link_local()?;
    match port {
        ProbePort::Open(port) => {
            Some(FarEnd { number: u8::try_from(number).ok()?, name: name.into(), address, port: *port })
        }
        ProbePort::Refused(why) => {
            warn!(link = name, why, "a link of the other host cannot be tested");
            None
        }
    }
}

/// The source's side under way.
struct PathProbing {
    token: Uuid,
    near: Vec<NearEnd>,
    far: Vec<FarEnd>,
    /// Indices into `near` and `far`.
    answered: BTreeSet<(usize, usize)>,
}

impl PathProbing {
    async fn run(mut self) -> Vec<Reach> {
        // Until tokio has looked once, it takes a new socket for one without room to send.
        let writable = join_all(self.near.iter().map(|near| near.socket.writable()));
        drop(timeout(ASK_AGAIN_AFTER, writable).await);
        let began = Instant::now();
        let (mut ask_at, mut heard_at) = (began, began);
        while !self.is_over(began, heard_at) {
            if Instant::now() >= ask_at {
                self.ask();
                ask_at += ASK_AGAIN_AFTER;
            }
            if self.listen() {
                heard_at = Instant::now();
            }
            sleep(LOOK_EVERY).await;
        }
        let reach = |&(near, far): &(usize, usize)| Reach {
            link: self.near[near].name.clone(),
            peer_link: self.far[far].name.clone(),
        };
        let reaches: Vec<Reach> = self.answered.iter().map(reach).collect();
        debug!(?reaches, took = ?began.elapsed(), "tested links by their link-local addresses");
        reaches
    }

    fn is_over(&self, began: Instant, heard_at: Instant) -> bool {
        let (all_near, all_far) = (self.near.len(), self.far.len());
        let near: BTreeSet<usize> = self.answered.iter().map(|(near, _)| *near).collect();
        let far: BTreeSet<usize> = self.answered.iter().map(|(_, far)| *far).collect();
        let as_many_as_possible = near.len().min(far.len()) == all_near.min(all_far);
        self.answered.len() == all_near * all_far
            || (as_many_as_possible && heard_at.elapsed() >= QUIET)
            || began.elapsed() >= TRIAL_DEADLINE
    }

    fn ask(&self) {
        for (index, near) in self.near.iter().enumerate() {
            let silent = |other: &usize| !self.answered.contains(&(index, *other));
            for far in (0..self.far.len()).filter(silent).map(|other| &self.far[other]) {
                let question = encode(self.token, QUESTION, far.number);
                // What cannot be sent is not answered, and says enough by that.
                if let Ok(address) = on_link(&near.name, IpAddr::V6(far.address), far.port) {
                    drop(near.socket.try_send_to(&question, address));
                }
            }
        }
    }

    /// Takes what has arrived; true if there were answers that are new.
    fn listen(&mut self) -> bool {
        let before = self.answered.len();
        for (index, near) in self.near.iter().enumerate() {
            let mut datagram = [0; DATAGRAM_BYTES + 1];
            // At most one answer to each question, and some from unauthenticated peers.
            for _ in 0..4 * LINKS_MAX {
                let Ok((length, from)) = near.socket.try_recv_from(&mut datagram) else { break };
                self.answered.extend(self.answers(&datagram[..length], from).map(|far| (index, far)));
            }
        }
        self.answered.len() > before
    }

    /// The link of the other host that answers by this.
    fn answers(&self, datagram: &[u8], from: SocketAddr) -> Option<usize> {
        self.far.iter().position(|far| {
            from.ip() == far.address
                && from.port() == far.port
                && datagram == encode(self.token, ANSWER, far.number)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn far(number: u8, address: &str) -> FarEnd {
        FarEnd { number, name: format!("e{number}"), address: address.parse().unwrap(), port: 7 }
    }

    fn trial() -> PathProbing {
        let far = vec![far(0, "fe80::1"), far(1, "fe80::1")];
        PathProbing { token: Uuid::max(), near: vec![], far, answered: BTreeSet::new() }
    }

    #[test]
    fn the_answer_says_which_link_it_is_where_two_have_one_address() {
        let from = "[fe80::1%3]:7".parse().unwrap();
        assert_eq!(trial().answers(&encode(Uuid::max(), ANSWER, 1), from), Some(1));
        assert_eq!(trial().answers(&encode(Uuid::max(), ANSWER, 2), from), None);
        assert_eq!(trial().answers(&encode(Uuid::max(), QUESTION, 1), from), None);
        assert_eq!(trial().answers(&encode(Uuid::nil(), ANSWER, 1), from), None);
        for unauthenticated in ["[fe80::2%3]:7", "[fe80::1%3]:8", "10.0.0.1:7"] {
            assert_eq!(
                trial().answers(&encode(Uuid::max(), ANSWER, 1), unauthenticated.parse().unwrap()),
                None
            );
        }
    }

    proptest! {
        #[test]
        fn any_datagram_is_taken_or_dropped(datagram in prop::collection::vec(any::<u8>(), 0..32)) {
            let from = "[fe80::1%3]:7".parse().unwrap();
            prop_assert_eq!(trial().answers(&datagram, from), None);
        }
    }
}
