//! The connections of an incoming VM: this host's firewall tracks them before it runs here.
//!
//! They come from another host, so they are accepted only if their addresses may be the VM's: no address of this host,
//! and none that another machine here has answered for.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::migration::target::steps::OrderNeed;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::tracked::{ConnectionKey, TrackedConnection};
use drainpipe_hypervisor::spec::MacAddress;
use drainpipe_net::{Neighbour, forget_tracked, track, tracked_room};
use tracing::warn;

use super::vm::IncomingVm;
use super::{Incoming, may_go_on, not_on_its_way};
use crate::paths::tracking::{ADDRESSES_MAX, is_of};
use drainpipe_api_types::{TrackedRequest, TrackedTaken};

/// How long the kernel may take for one request's. The VM runs meanwhile; what comes later than its source waits is of use
/// all the same.
const LOAD_WITHIN: Duration = Duration::from_secs(1);

/// How long it may take to forget them again.
const FORGET_WITHIN: Duration = Duration::from_secs(5);

/// Others may need one part in this many of what the kernel could track without this VM's connections.
const ROOM_LEFT: u64 = 2;

/// What this host knows that tells which addresses may be the VM's.
#[derive(Debug)]
struct KnownAddresses {
    macs: Vec<MacAddress>,
    own: Vec<IpAddr>,
    neighbours: Vec<Neighbour>,
}

/// Steps 7 and 8: has this host's kernel track the VM's connections. A source that hangs up changes nothing of it.
pub(crate) async fn take_tracked(
    incoming: &Arc<Incoming>,
    id: &str,
    request: TrackedRequest,
) -> Result<TrackedTaken, Problem> {
    let (incoming, entry) = (Arc::clone(incoming), incoming.entries.get(id)?);
    let taking = tokio::spawn(async move { take(&incoming, &entry, &request).await });
    taking.await.map_err(Problem::failed)?
}

async fn take(
    incoming: &Arc<Incoming>,
    entry: &Arc<IncomingVm>,
    request: &TrackedRequest,
) -> Result<TrackedTaken, Problem> {
    if request.addresses.len() > ADDRESSES_MAX {
        return Err(Problem::bad_input(format!("more than {ADDRESSES_MAX} addresses of one VM")));
    }
    let mut loaded_before = entry.tracked.lock().await;
    // It may have been given up meanwhile; from here on that waits for this.
    if !incoming.entries.is_there(entry) {
        return Err(not_on_its_way(&entry.id));
    }
    may_go_on(incoming, entry, OrderNeed::Prepare)?;
    let own = incoming.host.name();
    if !incoming.host.config.vms.conntrack {
        return Ok(none_taken(request, format!("{own} accepts none (`conntrack` in its [vms])")));
    }
    let Some(room) = tracked_room().map_err(Problem::failed)? else {
        return Ok(none_taken(request, format!("the kernel of {own} does not track connections")));
    };
    forget_ended(&mut loaded_before, &request.ended).await?;
    let mut admitted = known_addresses(incoming, entry).await?.admit(request);
    let refused = request.connections.len() - admitted.len();
    admitted.truncate(most_more(room, loaded_before.len()));
    let loaded = track(admitted, Instant::now() + LOAD_WITHIN).await.map_err(Problem::failed)?;
    let taken = loaded.loaded.iter().chain(&loaded.were_there).map(TrackedConnection::key);
    let taken: HashSet<ConnectionKey> = taken.collect();
    loaded_before.extend(loaded.loaded);
    let is_taken = |connection: &TrackedConnection| taken.contains(&connection.key());
    let left_out: Vec<TrackedConnection> =
        request.connections.iter().copied().filter(|connection| !is_taken(connection)).collect();
    let why = why_left(own, refused, left_out.len().saturating_sub(refused));
    Ok(TrackedTaken { taken: taken.len() as u64, left_out, why })
}

/// How many more connections may be loaded for a VM that has so many: others need as much room as it may take.
fn most_more(room: u64, loaded: usize) -> usize {
    let most = (room + loaded as u64) / ROOM_LEFT;
    usize::try_from(most).unwrap_or(usize::MAX).saturating_sub(loaded)
}

/// Deletes those of the loaded connections that have ended. What was there before stays.
async fn forget_ended(
    loaded: &mut Vec<TrackedConnection>,
    ended: &[TrackedConnection],
) -> Result<(), Problem> {
    // Its source may not know as what it was loaded, where an answer was lost.
    let ended: HashSet<ConnectionKey> = ended.iter().map(TrackedConnection::key).collect();
    let has_ended = |connection: &TrackedConnection| ended.contains(&connection.key());
    let to_forget: Vec<TrackedConnection> = loaded.iter().copied().filter(has_ended).collect();
    if to_forget.is_empty() {
        return Ok(());
    }
    forget_tracked(to_forget, Instant::now() + LOAD_WITHIN).await.map_err(Problem::failed)?;
    loaded.retain(|connection| !has_ended(connection));
    Ok(())
}

/// It will not run here: what was loaded for it goes. What was there before stays.
pub(super) async fn forget_loaded(entry: &IncomingVm) {
    let loaded = std::mem::take(&mut *entry.tracked.lock().await);
    if loaded.is_empty() {
        return;
    }
    if let Err(error) = forget_tracked(loaded, Instant::now() + FORGET_WITHIN).await {
        warn!(vm = %entry.definition.name, %error, "the firewall here keeps tracking its connections until \
            they time out");
    }
}

async fn known_addresses(incoming: &Incoming, entry: &IncomingVm) -> Result<KnownAddresses, Problem> {
    let network = &incoming.host.network;
    let macs = entry.spec.as_ref().map(|spec| spec.macs().to_vec()).unwrap_or_default();
    Ok(KnownAddresses { macs, own: network.addresses().await?, neighbours: network.neighbours().await? })
}

fn none_taken(request: &TrackedRequest, why: String) -> TrackedTaken {
    let left_out = request.connections.clone();
    TrackedTaken { taken: 0, why: (!left_out.is_empty()).then_some(why), left_out }
}

fn why_left(own: &str, refused: usize, failed: usize) -> Option<String> {
    let refused = (refused > 0).then(|| format!("{own} refused {refused}, whose addresses are not the VM's"));
    let failed = (failed > 0).then(|| format!("the kernel of {own} did not accept {failed}"));
    let both: Vec<String> = refused.into_iter().chain(failed).collect();
    (!both.is_empty()).then(|| both.join("; "))
}

impl KnownAddresses {
    /// Those connections that may be the VM's.
    fn admit(&self, request: &TrackedRequest) -> Vec<TrackedConnection> {
        let addresses: Vec<IpAddr> =
            request.addresses.iter().copied().filter(|address| self.may_be_vms(*address)).collect();
        let believable = request.connections.iter().filter_map(|connection| connection.believable());
        believable.filter(|connection| self.is_of_vm(connection, &addresses)).collect()
    }

    fn may_be_vms(&self, address: IpAddr) -> bool {
        let mut others = self.neighbours.iter().filter(|neighbour| !is_of(neighbour, &self.macs));
        !self.own.contains(&address) && others.all(|other| other.address != address)
    }

    /// What the VM has with this host itself, this host tracks already, if that was let in.
    fn is_of_vm(&self, connection: &TrackedConnection, addresses: &[IpAddr]) -> bool {
        let ends = [connection.source, connection.destination].map(|end: SocketAddr| end.ip());
        ends.iter().any(|end| addresses.contains(end)) && !ends.iter().any(|end| self.own.contains(end))
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::tracked::Transport;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const VM: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];

    fn neighbour(address: &str, link_address: [u8; 6]) -> Neighbour {
        Neighbour { address: address.parse().unwrap(), link_address: link_address.to_vec() }
    }

    fn known_addresses() -> KnownAddresses {
        KnownAddresses {
            macs: vec!["52:54:00:00:00:01".parse().unwrap()],
            own: vec!["10.0.0.1".parse().unwrap(), "127.0.0.1".parse().unwrap()],
            neighbours: vec![neighbour("10.0.0.5", VM), neighbour("10.0.0.6", [2, 0, 0, 0, 0, 6])],
        }
    }

    fn udp(source: &str, destination: &str) -> TrackedConnection {
        TrackedConnection {
            source: format!("{source}:1000").parse().unwrap(),
            destination: format!("{destination}:53").parse().unwrap(),
            transport: Transport::Udp,
            is_answered: true,
            is_assured: false,
            timeout_s: 30,
            mark: 0,
            zone: 0,
        }
    }

    fn admitted(addresses: &[&str], connection: TrackedConnection) -> bool {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let request = TrackedRequest { addresses, ended: vec![], connections: vec![connection] };
        known_addresses().admit(&request) == [connection]
    }

    #[test]
    fn only_what_may_be_the_vms_is_taken() {
        assert!(admitted(&["10.0.0.5"], udp("10.0.0.5", "10.0.9.9")), "known here by its MAC address");
        assert!(admitted(&["10.0.0.7"], udp("10.0.9.9", "10.0.0.7")), "not known here");
        assert!(admitted(&["10.0.0.5"], udp("10.0.0.5", "10.0.0.6")), "with another machine here");
        assert!(!admitted(&["10.0.0.5"], udp("10.0.0.7", "10.0.9.9")), "of nobody");
        assert!(!admitted(&["10.0.0.6"], udp("10.0.0.6", "10.0.9.9")), "of another machine");
        assert!(!admitted(&["10.0.0.1"], udp("10.0.0.1", "10.0.9.9")), "of this host");
        assert!(!admitted(&["10.0.0.5"], udp("10.0.0.5", "10.0.0.1")), "with this host");
        assert!(!admitted(&["127.0.0.1"], udp("127.0.0.1", "10.0.9.9")), "of no machine");
        assert!(!admitted(&[], udp("10.0.0.5", "10.0.9.9")), "of a VM without addresses");
    }

    proptest! {
        #[test]
        fn whatever_a_source_says_no_address_of_others_is_opened(
            addresses in vec(any::<u8>(), 0..4),
            ends in vec(any::<(u8, u8)>(), 0..20),
        ) {
            let text = |last: &u8| format!("10.0.0.{last}");
            let request = TrackedRequest {
                addresses: addresses.iter().map(|last| text(last).parse().unwrap()).collect(),
                ended: vec![],
                connections: ends.iter().map(|(from, to)| udp(&text(from), &text(to))).collect(),
            };
            for connection in known_addresses().admit(&request) {
                let named = |end: SocketAddr| request.addresses.contains(&end.ip());
                let is_others = |end: SocketAddr| end.ip().to_string() == "10.0.0.6";
                let of_vm = |end: SocketAddr| named(end) && !is_others(end);
                prop_assert!(of_vm(connection.source) || of_vm(connection.destination));
                let ends = [connection.source, connection.destination];
                prop_assert!(ends.iter().all(|end| end.ip().to_string() != "10.0.0.1"));
            }
        }
    }

    #[test]
    fn what_is_left_is_told_with_the_reason() {
        assert_eq!(why_left("b", 0, 0), None);
        let said = why_left("b", 2, 3).unwrap();
        assert!(said.contains("refused 2") && said.contains("did not accept 3"), "{said}");
        let nothing = TrackedRequest { addresses: vec![], ended: vec![], connections: vec![] };
        assert_eq!(none_taken(&nothing, "of no use".into()).why, None);
    }

    #[test]
    fn requests_by_and_by_leave_others_as_much_room_as_one() {
        assert_eq!((most_more(100, 0), most_more(60, 40), most_more(50, 50)), (50, 10, 0));
        assert_eq!(most_more(10, 90), 0, "others have come meanwhile");
    }
}
