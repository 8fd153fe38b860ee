//! Traffic between two hosts over several paths, on the real kernel.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use crate::hosts::{Namespace, TwoHosts, may_make_namespaces};
use drainpipe_net::{
    Before, Change, Error, Flow, LinkCounters, Network, NextHop, Placement, RouteAttributes, RouteState,
    Undo, channel_congestion_control, multichannel_changes,
};

const CONNECTIONS: usize = 64;
const BLOCK_BYTES: usize = 16 * 1024;
const DEADLINE: Duration = Duration::from_secs(20);

/// Long enough for TCP to send again twice what was lost.
const CUT_OFF: Duration = Duration::from_secs(1);

/// The addresses of one test, from the left host's point of view.
struct Plan {
    own: IpAddr,
    peer: IpAddr,
    own_gateways: [IpAddr; 2],
    peer_gateways: [IpAddr; 2],
}

fn ipv4() -> Plan {
    Plan {
        own: address("10.77.0.1"),
        peer: address("10.77.0.2"),
        own_gateways: [address("10.9.0.1"), address("10.9.1.1")],
        peer_gateways: [address("10.9.0.2"), address("10.9.1.2")],
    }
}

fn ipv6_over_link_local() -> Plan {
    Plan {
        own: address("fd77::1"),
        peer: address("fd77::2"),
        own_gateways: [address("fe80::1"); 2],
        peer_gateways: [address("fe80::2"); 2],
    }
}

fn ipv4_over_link_local_ipv6() -> Plan {
    Plan {
        own: address("10.77.0.1"),
        peer: address("10.77.0.2"),
        own_gateways: [address("fe80::1"); 2],
        peer_gateways: [address("fe80::2"); 2],
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn congestion_control() -> Option<&'static str> {
    channel_congestion_control().unwrap()
}

impl Plan {
    fn left(&self) -> Vec<Change> {
        multichannel_changes(self.own, self.peer, &hops(self.peer_gateways), congestion_control()).unwrap()
    }

    fn right(&self) -> Vec<Change> {
        multichannel_changes(self.peer, self.own, &hops(self.own_gateways), congestion_control()).unwrap()
    }
}

fn hops(gateways: [IpAddr; 2]) -> Vec<NextHop> {
    gateways
        .into_iter()
        .enumerate()
        .map(|(link, gateway)| NextHop { link: format!("p{link}"), gateway, weight: 1 })
        .collect()
}

/// Applies the changes as an agent does, and returns what its journal then holds.
fn apply(host: &Namespace, changes: &[Change]) -> String {
    host.run(|| async {
        let network = Network::open().unwrap();
        let mut journal = Vec::new();
        for change in changes {
            journal.push((change.clone(), network.observe(change).await.unwrap()));
            network.apply(change).await.unwrap();
        }
        serde_json::to_string(&journal).unwrap()
    })
}

/// Undoes what a journal contains, as an agent does after its predecessor crashed.
fn undo(host: &Namespace, journal: &str) -> Vec<Undo> {
    let journal: Vec<(Change, Before)> = serde_json::from_str(journal).unwrap();
    host.run(|| async {
        let network = Network::open().unwrap();
        let mut outcomes = Vec::new();
        for (change, before) in journal.iter().rev() {
            outcomes.push(network.undo(change, before).await.unwrap());
        }
        outcomes
    })
}

fn routes(host: &Namespace, destination: IpAddr) -> String {
    let version = if destination.is_ipv4() { 4 } else { 6 };
    host.ip(&format!("-{version} route show {destination}"))
}

fn counters(host: &Namespace) -> Vec<LinkCounters> {
    host.run(|| async { Network::open().unwrap().counters(&["p0", "p1"]).await.unwrap() })
}

/// Connections from the left host to the right one, which returns every block that it receives.
struct Traffic {
    connections: Vec<TcpStream>,
}

impl Traffic {
    fn open(hosts: &TwoHosts, plan: &Plan) -> Self {
        let listener = hosts.right.enter(|| TcpListener::bind((plan.peer, 0)).unwrap());
        let target = listener.local_addr().unwrap();
        thread::spawn(move || {
            for _ in 0..CONNECTIONS {
                let (connection, _) = listener.accept().unwrap();
                thread::spawn(move || echo(connection));
            }
        });
        let connections = hosts.left.enter(|| (0..CONNECTIONS).map(|_| connect(target)).collect());
        Self { connections }
    }

    /// Every connection sends a block and gets it back.
    fn exchange(&mut self) {
        let sent = vec![7; BLOCK_BYTES];
        for connection in &mut self.connections {
            connection.write_all(&sent).unwrap();
        }
        for connection in &mut self.connections {
            let mut received = vec![0; BLOCK_BYTES];
            connection.read_exact(&mut received).unwrap();
            assert_eq!(received, sent);
        }
    }

    fn sources(&self) -> Vec<IpAddr> {
        self.connections.iter().map(|connection| connection.local_addr().unwrap().ip()).collect()
    }
}

fn connect(target: SocketAddr) -> TcpStream {
    let connection = TcpStream::connect_timeout(&target, DEADLINE).unwrap();
    connection.set_read_timeout(Some(DEADLINE)).unwrap();
    connection.set_write_timeout(Some(DEADLINE)).unwrap();
    connection
}

fn echo(mut connection: TcpStream) {
    let mut block = vec![0; BLOCK_BYTES];
    while connection.read_exact(&mut block).is_ok() && connection.write_all(&block).is_ok() {}
}

/// The share of the bytes that left the host over each link.
fn shares(before: &[LinkCounters], after: &[LinkCounters]) -> Vec<f64> {
    let sent: Vec<u64> =
        before.iter().zip(after).map(|(before, after)| after.tx_bytes - before.tx_bytes).collect();
    let all: u64 = sent.iter().sum();
    sent.iter().map(|sent| *sent as f64 / all as f64).collect()
}

fn spreads_and_survives_a_pulled_cable(plan: &Plan) {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    for host in [&hosts.left, &hosts.right] {
        // The strictest setting: each packet must arrive over a link that leads back to its source.
        host.sysctl("net.ipv4.conf.all.rp_filter", "1");
    }
    apply(&hosts.left, &plan.left());
    apply(&hosts.right, &plan.right());

    let idle = (counters(&hosts.left), counters(&hosts.right));
    let mut traffic = Traffic::open(&hosts, plan);
    traffic.exchange();
    assert!(traffic.sources().iter().all(|source| *source == plan.own));
    for (host, idle) in [(&hosts.left, &idle.0), (&hosts.right, &idle.1)] {
        let shares = shares(idle, &counters(host));
        assert!(shares.iter().all(|share| *share > 0.15), "{shares:?}");
    }

    hosts.right.ip("link set p1 down");
    traffic.exchange();
    let target =
        hosts.left.run(|| async { Network::open().unwrap().route_to(plan.peer).await.unwrap() }).unwrap();
    assert_eq!(target.link, "p0");
    assert_eq!(target.gateway, Some(plan.peer_gateways[0]));
    assert_eq!(target.source, Some(plan.own));
}

#[test]
fn ipv4_spreads_and_survives_a_pulled_cable() {
    spreads_and_survives_a_pulled_cable(&ipv4());
}

#[test]
fn ipv6_spreads_and_survives_a_pulled_cable() {
    spreads_and_survives_a_pulled_cable(&ipv6_over_link_local());
}

#[test]
fn ipv4_needs_no_ipv4_addresses_on_the_links() {
    spreads_and_survives_a_pulled_cable(&ipv4_over_link_local_ipv6());
}

#[test]
fn a_path_that_is_down_from_the_start_is_not_used() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local()] {
        let hosts = TwoHosts::new();
        hosts.right.ip("link set p1 down");
        hosts.wait_until(|hosts| hosts.left.ip("link show p1").contains("state DOWN"));
        apply(&hosts.left, &plan.left());
        let version = if plan.peer.is_ipv4() { 4 } else { 6 };
        for port in 1000..1016 {
            let query = format!("-{version} route get {} ipproto tcp sport {port} dport 80", plan.peer);
            assert!(hosts.left.ip(&query).contains("dev p0"));
        }
    }
}

#[test]
fn undoing_from_the_journal_leaves_no_trace() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local()] {
        let hosts = TwoHosts::new();
        let untouched = hosts.left.state();
        let journal = apply(&hosts.left, &plan.left());
        let changed = hosts.left.state();
        assert_ne!(changed, untouched);

        apply(&hosts.left, &plan.left());
        assert_eq!(hosts.left.state(), changed, "applying twice is applying once");

        let outcomes = undo(&hosts.left, &journal);
        assert_eq!(hosts.left.state(), untouched);
        assert!(outcomes.iter().all(|outcome| *outcome == Undo::Undone));

        let outcomes = undo(&hosts.left, &journal);
        assert_eq!(hosts.left.state(), untouched);
        assert!(outcomes.iter().all(|outcome| *outcome == Undo::NothingToDo));
    }
}

#[test]
fn undoing_what_was_never_applied_does_nothing() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    let untouched = hosts.left.state();
    let changes = ipv4().left();
    let journal = hosts.left.run(|| async {
        let network = Network::open().unwrap();
        let mut journal = Vec::new();
        for change in &changes {
            journal.push((change, network.observe(change).await.unwrap()));
        }
        serde_json::to_string(&journal).unwrap()
    });
    let outcomes = undo(&hosts.left, &journal);
    assert!(outcomes.iter().all(|outcome| *outcome == Undo::NothingToDo));
    assert_eq!(hosts.left.state(), untouched);
}

#[test]
fn a_path_leaves_the_route_and_comes_back() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local()] {
        let hosts = TwoHosts::new();
        let journal = apply(&hosts.left, &plan.left());
        let both = hosts.left.state();
        let first = &hops(plan.peer_gateways)[..1];
        let only_first = multichannel_changes(plan.own, plan.peer, first, congestion_control());
        let shrunk = apply(&hosts.left, &only_first.unwrap());
        let shown = routes(&hosts.left, plan.peer);
        assert!(shown.contains("dev p0") && !shown.contains("dev p1"), "{shown}");
        assert_eq!(shown.contains("congctl"), congestion_control().is_some(), "{shown}");
        undo(&hosts.left, &shrunk);
        assert_eq!(hosts.left.state(), both);
        undo(&hosts.left, &journal);
        assert_eq!(routes(&hosts.left, plan.peer), "");
    }
}

/// A path over p0 alone, and default routes over p1.
#[test]
fn without_its_route_nothing_goes_another_way_and_connections_stay() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local()] {
        let hosts = TwoHosts::new();
        let changes = |own, peer, gateways| {
            multichannel_changes(own, peer, &hops(gateways)[..1], congestion_control()).unwrap()
        };
        let left = changes(plan.own, plan.peer, plan.peer_gateways);
        let journal = apply(&hosts.left, &left);
        apply(&hosts.right, &changes(plan.peer, plan.own, plan.own_gateways));
        hosts.left.ip(&format!("route add default via {} dev p1", plan.peer_gateways[1]));
        hosts.right.ip(&format!("route add default via {} dev p1", plan.own_gateways[1]));
        let mut traffic = Traffic::open(&hosts, &plan);
        traffic.exchange();

        let idle = [counters(&hosts.left), counters(&hosts.right)];
        hosts.left.ip("link set p0 down");
        assert_eq!(
            hosts.left.run(async || Network::open().unwrap().route_to(plan.peer).await.unwrap()),
            None
        );
        let exchange = thread::spawn(move || traffic.exchange());
        thread::sleep(CUT_OFF);
        assert!(!exchange.is_finished(), "{}: it was not cut off", plan.peer);
        for (idle, now) in idle.iter().zip([counters(&hosts.left), counters(&hosts.right)]) {
            let elsewhere = now[1].tx_bytes - idle[1].tx_bytes;
            assert!(elsewhere < BLOCK_BYTES as u64, "{}: {elsewhere} bytes", plan.peer);
        }

        hosts.left.ip("link set p0 up");
        // Unlike IPv4's, the kernel has removed it.
        hosts.left.ip("addr replace fe80::1/64 dev p0");
        apply(&hosts.left, &left);
        exchange.join().unwrap();
        undo(&hosts.left, &journal);
        assert_eq!(routes(&hosts.left, plan.peer), "");
    }
}

#[test]
fn what_others_changed_since_is_left_alone() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    let journal = apply(&hosts.left, &ipv4().left());
    hosts.left.sysctl("net.ipv4.fib_multipath_hash_policy", "2");
    hosts.left.ip("route delete 10.77.0.2");
    hosts.left.ip("route add 10.77.0.2 via 10.9.0.2");
    hosts.left.ip("addr delete 10.77.0.1/32 dev lo");
    hosts.left.ip("addr add 10.77.0.1/32 dev p1");

    let outcomes = undo(&hosts.left, &journal);
    let left_alone = |outcome: &&Undo| matches!(outcome, Undo::LeftAlone(_));
    assert_eq!(outcomes.iter().filter(left_alone).count(), 3, "{outcomes:?}");
    assert!(hosts.left.ip("route show 10.77.0.2").contains("10.9.0.2"));
    assert!(hosts.left.ip("addr show p1").contains("10.77.0.1"));
    let policy = hosts.left.read_sysctl("net.ipv4.fib_multipath_hash_policy");
    assert_eq!(policy, "2");
}

#[test]
fn what_is_not_ours_is_refused_without_effect() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.ip("route add 10.77.0.2 via 10.9.0.2");
    hosts.left.ip("addr add 10.77.0.1/32 dev p1");
    let untouched = hosts.left.state();
    let plan = ipv4();
    let refusal = |change: Change| {
        hosts.left.run(|| async move {
            let network = Network::open().unwrap();
            let applied = network.apply(&change).await.unwrap_err();
            let observed = network.observe(&change).await.unwrap_err();
            assert_eq!(applied.to_string(), observed.to_string());
            applied
        })
    };
    let changes = plan.left();
    let [.., address, route] = changes.as_slice() else {
        panic!("an address and a route come last");
    };
    assert!(matches!(refusal(address.clone()), Error::AddressInUse { link, .. } if link == "p1"));
    assert!(matches!(refusal(route.clone()), Error::RouteTaken { .. }));

    let elsewhere = |link: &str| Change::Route {
        destination: "10.78.0.2/32".parse().unwrap(),
        way: RouteAttributes {
            source: None,
            next_hops: vec![NextHop {
                link: link.to_owned(),
                gateway: "10.9.0.2".parse().unwrap(),
                weight: 1,
            }],
            congestion_control: None,
        },
    };
    for unknown in ["p9", "", "a-name-that-is-too-long-for-a-link"] {
        assert!(matches!(refusal(elsewhere(unknown)), Error::UnknownLink(name) if name == unknown));
    }
    assert!(matches!(
        refusal(Change::Sysctl { key: "net.ipv4.no_such_setting".to_owned(), value: "1".to_owned() }),
        Error::SysctlMissing { .. }
    ));
    hosts.left.run(|| async {
        let error = Network::open().unwrap().apply(&elsewhere("p1")).await;
        assert!(matches!(error, Err(Error::GatewayUnreachable { .. })), "{error:?}");
    });
    let foreign_source = Change::Route {
        destination: "10.78.0.2/32".parse().unwrap(),
        way: RouteAttributes {
            source: Some("10.78.0.1".parse().unwrap()),
            next_hops: hops(plan.peer_gateways),
            congestion_control: None,
        },
    };
    hosts.left.run(|| async {
        let error = Network::open().unwrap().apply(&foreign_source).await;
        assert!(matches!(error, Err(Error::InvalidRoute { .. })), "{error:?}");
    });
    assert_eq!(hosts.left.state(), untouched);

    hosts.left.ip("link set p0 down");
    assert!(matches!(refusal(elsewhere("p0")), Error::LinkDown { link } if link == "p0"));
}

/// The path of each connection, by the link that the kernel names.
fn reported_paths(hosts: &TwoHosts, peer: IpAddr) -> Vec<usize> {
    let links = hosts.left.run(|| async {
        let network = Network::open().unwrap();
        let flows = network.flows_to(peer).await.unwrap();
        network.links_of_flows(&flows).await.unwrap()
    });
    links.iter().map(|link| usize::from(link.as_deref() == Some("p1"))).collect()
}

/// The state of the left host's route, to be compared.
fn route_state(hosts: &TwoHosts, peer: IpAddr) -> RouteState {
    hosts.left.run(|| async { Network::open().unwrap().route_state(peer).await.unwrap() })
}

/// Makes the left host's route again with these weights.
fn weigh(hosts: &TwoHosts, plan: &Plan, weights: &[u16]) {
    let mut hops = hops(plan.peer_gateways);
    for (hop, weight) in hops.iter_mut().zip(weights) {
        hop.weight = *weight;
    }
    apply(&hosts.left, &multichannel_changes(plan.own, plan.peer, &hops, congestion_control()).unwrap());
}

#[test]
fn what_the_kernel_says_of_a_connection_is_what_it_does() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local(), ipv4_over_link_local_ipv6()] {
        let hosts = TwoHosts::new();
        apply(&hosts.left, &plan.left());
        apply(&hosts.right, &plan.right());
        let mut traffic = Traffic::open(&hosts, &plan);
        // Until the route changes, a connection follows the route that was found before it had a port.
        let made = route_state(&hosts, plan.peer);
        weigh(&hosts, &plan, &[2, 2]);
        traffic.exchange();
        let weighted = route_state(&hosts, plan.peer);
        assert_ne!(weighted, made);
        let idle = counters(&hosts.left);
        for _ in 0..20 {
            traffic.exchange();
        }
        let by_counters = shares(&idle, &counters(&hosts.left))[1];
        let marked_paths = reported_paths(&hosts, plan.peer);
        assert_eq!(route_state(&hosts, plan.peer), weighted, "as long as nobody changes it");
        assert_eq!(marked_paths.len(), CONNECTIONS);
        let by_word = marked_paths.iter().sum::<usize>() as f64 / CONNECTIONS as f64;
        assert!((by_counters - by_word).abs() < 0.01, "{}: carried {by_counters}, told {by_word}", plan.peer);

        let acknowledged = hosts.left.run(|| async {
            let network = Network::open().unwrap();
            let flow = network.flows_to(plan.peer).await.unwrap()[0];
            let counters = network.flow_counters(flow).await.unwrap().unwrap();
            let gone = Flow { source: SocketAddr::new(plan.own, 1), ..flow };
            assert_eq!(network.flow_counters(gone).await.unwrap(), None);
            counters.acknowledged_bytes
        });
        let sent = 21 * BLOCK_BYTES as u64;
        assert!((sent..=sent + 1).contains(&acknowledged), "{acknowledged} of {sent}");

        hosts.right.ip("link set p1 down");
        let end = Instant::now() + DEADLINE;
        while route_state(&hosts, plan.peer) == weighted {
            assert!(Instant::now() < end, "{}: a lost carrier does not show", plan.peer);
        }
    }
}

#[test]
fn connections_are_placed_as_wanted() {
    if !may_make_namespaces() {
        return;
    }
    for plan in [ipv4(), ipv6_over_link_local()] {
        let hosts = TwoHosts::new();
        apply(&hosts.left, &plan.left());
        apply(&hosts.right, &plan.right());
        let _traffic = Traffic::open(&hosts, &plan);
        let mut placement = Placement::new(CONNECTIONS);
        let mut on_slow_path = 0;
        for _ in 0..8 {
            let weights = placement.weights(&[Some(15_000), Some(1_000)]);
            weigh(&hosts, &plan, &weights);
            let marked_paths = reported_paths(&hosts, plan.peer);
            on_slow_path = marked_paths.iter().sum::<usize>();
            assert!(placement.observe(&weights, &marked_paths), "the kernel's intervals are not as we think");
        }
        // Weights cannot part two connections whose numbers are too close.
        assert!((3..=5).contains(&on_slow_path), "{on_slow_path} of {CONNECTIONS}");
    }
}
