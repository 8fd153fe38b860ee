//! Tracked connections of the real kernel.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use drainpipe_engine::tracked::{TcpEnd, TcpState, TrackedConnection, Transport};
use drainpipe_net::{
    Neighbour, Network, Tracked, forget_tracked, track, tracked_connections, tracked_count, tracked_room,
};

use crate::hosts::{Namespace, TwoHosts, may_make_namespaces};

/// Whether this process may make namespaces, and the kernel tracks connections there; prints loudly if not.
fn may_track() -> bool {
    if !may_make_namespaces() {
        return false;
    }
    let tracks = Namespace::new().enter(|| tracked_count().unwrap()).is_some();
    if !tracks {
        eprintln!("SKIPPED: this kernel does not track connections (nf_conntrack)");
    }
    tracks
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn tracked(host: &Namespace, addresses: &[&str]) -> Tracked {
    let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    host.run(|| async move { tracked_connections(&addresses, soon()).await.unwrap() })
}

fn connection(source: &str, destination: &str, transport: Transport) -> TrackedConnection {
    TrackedConnection {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        transport,
        is_answered: true,
        is_assured: true,
        timeout_s: 3_000,
        mark: 0x1234_5678,
        zone: 0,
    }
}

fn tcp() -> Transport {
    let end = |window_scale| TcpEnd { window_scale, flags: 0b1011 };
    Transport::Tcp(TcpState { state: 3, source: end(7), destination: end(9) })
}

/// The connections without their time left, which passes.
fn timeless(tracked: &Tracked) -> Vec<TrackedConnection> {
    let timeless = |connection: &TrackedConnection| {
        assert!((2_900..=3_000).contains(&connection.timeout_s), "{connection:?}");
        TrackedConnection { timeout_s: 3_000, ..*connection }
    };
    tracked.connections.iter().map(timeless).collect()
}

#[test]
fn what_one_host_tracks_another_can() {
    if !may_track() {
        return;
    }
    let (left, right) = (Namespace::new(), Namespace::new());
    let own = [
        connection("10.0.0.5:40000", "10.0.9.9:443", tcp()),
        connection("10.0.9.9:40001", "10.0.0.5:22", tcp()),
        connection("10.0.0.5:5000", "10.0.0.6:53", Transport::Udp),
        connection("[2001:db8::5]:40000", "[2001:db8:9::9]:443", tcp()),
        TrackedConnection { zone: 7, mark: 0, ..connection("10.0.0.5:40000", "10.0.9.9:443", tcp()) },
    ];
    let foreign = connection("10.0.0.6:40000", "10.0.9.9:443", tcp());
    let all = [&own[..], &[foreign]].concat();
    let loaded = left.run(|| async { track(all.clone(), soon()).await.unwrap() });
    assert_eq!((loaded.loaded, loaded.were_there), (all.clone(), vec![]));

    let listed = tracked(&left, &["10.0.0.5", "2001:db8::5", "10.0.0.6"]);
    assert_eq!((listed.connections.len(), listed.is_whole), (6, true), "each once: {listed:#?}");
    let listed = tracked(&left, &["10.0.0.5", "2001:db8::5"]);
    assert_eq!((listed.translated, listed.others, listed.is_whole), (0, 0, true));
    let mut timeless_listed = timeless(&listed);
    timeless_listed.sort_by_key(|connection| own.iter().position(|other| other == connection));
    assert_eq!(timeless_listed, own);

    let there = right.run(|| async { track(listed.connections.clone(), soon()).await.unwrap() });
    assert_eq!(there.loaded.len(), own.len());
    let again = right.run(|| async { track(all.clone(), soon()).await.unwrap() });
    assert_eq!((again.loaded, again.were_there), (vec![foreign], own.to_vec()));

    let gone = left.run(|| async { forget_tracked(all.clone(), soon()).await.unwrap() });
    assert_eq!(gone, all.len());
    let gone = left.run(|| async { forget_tracked(all.clone(), soon()).await.unwrap() });
    assert_eq!(gone, 0);
    assert_eq!(left.enter(|| tracked_count().unwrap()), Some(0));
    assert_eq!(right.enter(|| tracked_count().unwrap()), Some(6));
}

#[test]
fn many_go_at_once_and_none_without_time() {
    if !may_track() {
        return;
    }
    let host = Namespace::new();
    let many: Vec<_> =
        (1..=5_000).map(|port: u16| connection(&format!("10.0.0.5:{port}"), "10.0.9.9:443", tcp())).collect();
    let room = host.enter(|| tracked_room().unwrap()).unwrap();
    let loaded = host.run(|| async { track(many.clone(), Instant::now()).await.unwrap() });
    assert_eq!((loaded.loaded.len(), loaded.were_there.len()), (0, 0));
    let loaded = host.run(|| async { track(many.clone(), soon()).await.unwrap() });
    assert_eq!((loaded.loaded.len(), loaded.were_there.len()), (many.len(), 0));
    assert_eq!(tracked(&host, &["10.0.0.5"]).connections.len(), many.len());
    assert!(host.enter(|| tracked_room().unwrap()).unwrap() <= room - 5_000);
    let nobodys = host
        .run(|| async { tracked_connections(&["10.0.0.5".parse().unwrap()], Instant::now()).await.unwrap() });
    assert_eq!(nobodys, Tracked { is_whole: false, ..Tracked::default() });
}

#[test]
fn what_the_host_translates_or_has_no_ports_is_counted() {
    if !may_track() {
        return;
    }
    let hosts = TwoHosts::new();
    if !hosts.left.may_nft(
        "add table ip t; add chain ip t post { type nat hook postrouting priority 100; }; \
         add rule ip t post udp dport 53 snat to 10.9.0.1:2000",
    ) {
        return eprintln!("SKIPPED: nft cannot translate here");
    }
    hosts.left.run(|| async {
        // Only one socket: a program that another test starts just then has a copy until it runs.
        let socket = std::net::UdpSocket::bind("10.9.0.1:1000").unwrap();
        let send = |to: &str| socket.send_to(b"hello", to).unwrap();
        send("10.9.0.2:53");
        send("10.9.0.2:54");
    });
    hosts.left.ping("10.9.0.2");
    let listed = tracked(&hosts.left, &["10.9.0.2"]);
    assert_eq!((listed.translated, listed.others), (1, 1), "{listed:#?}");
    assert_eq!(listed.connections.len(), 1, "{listed:#?}");
    assert!(!listed.connections[0].is_answered && listed.connections[0].transport == Transport::Udp);
}

#[test]
fn a_machine_that_was_heard_of_is_a_neighbour() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.right.ip("link set p0 address 52:54:00:00:00:07");
    let neighbours = || hosts.left.run(|| async { Network::open().unwrap().neighbours().await.unwrap() });
    let found =
        Neighbour { address: "10.9.0.2".parse().unwrap(), link_address: vec![0x52, 0x54, 0, 0, 0, 7] };
    assert!(!neighbours().contains(&found));
    hosts.left.ping("10.9.0.2");
    assert!(neighbours().contains(&found), "{:?}", neighbours());
}
