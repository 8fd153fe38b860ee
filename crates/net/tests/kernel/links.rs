//! Reading a host's links and neighbours from the real kernel.

use std::time::Duration;

use crate::hosts::{Namespace, TwoHosts, may_make_namespaces};
use drainpipe_net::{Error, Link, LinkKind, Network, Vlan};

fn links(host: &Namespace) -> Vec<Link> {
    host.run(|| async { Network::open().unwrap().links().await.unwrap() })
}

fn link<'a>(links: &'a [Link], name: &str) -> &'a Link {
    links.iter().find(|link| link.name == name).unwrap()
}

#[test]
fn many_may_ask_at_once() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    let speeds = hosts.left.run(|| async {
        let network = Network::open().unwrap();
        let asked = (0..20).map(|_| async { network.links().await.unwrap() });
        let answers = futures_util::future::join_all(asked).await;
        answers.iter().map(|links| link(links, "p0").speed_mbps).collect::<Vec<_>>()
    });
    assert_eq!(speeds, vec![Some(10_000); 20]);
}

#[test]
fn a_link_that_does_not_spread_has_no_queues_in_use() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.run(|| async {
        let network = Network::open().unwrap();
        assert_eq!(network.receive_queues_in_use("p0").await, None);
        assert_eq!(network.receive_queues_in_use("gone").await, None);
        // The connection still answers.
        assert_eq!(link(&network.links().await.unwrap(), "p0").speed_mbps, Some(10_000));
    });
}

#[test]
fn links_are_those_of_the_namespace() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.ip("link add br0 mtu 9000 type bridge");
    hosts.left.ip("tuntap add tap0 mode tap");
    hosts.left.ip("tuntap add tun0 mode tun");
    hosts.left.ip("link set tap0 master br0");
    hosts.left.ip("link set p1 mtu 9000");
    hosts.right.ip("link set p1 down");

    let links = links(&hosts.left);
    let kinds: Vec<_> = links.iter().map(|link| (link.name.as_str(), &link.kind)).collect();
    assert!(kinds.contains(&("lo", &LinkKind::Loopback)), "{kinds:?}");
    assert!(kinds.contains(&("p0", &LinkKind::Veth)), "{kinds:?}");
    assert!(kinds.contains(&("br0", &LinkKind::Bridge)), "{kinds:?}");
    assert!(kinds.contains(&("tap0", &LinkKind::Tap)), "{kinds:?}");
    assert!(kinds.contains(&("tun0", &LinkKind::Other("tun".to_owned()))), "{kinds:?}");

    let p0 = link(&links, "p0");
    assert!(p0.up && p0.carrier);
    assert_eq!(p0.speed_mbps, Some(10_000));
    assert_eq!(p0.addresses, ["10.9.0.1/24".parse().unwrap(), "fe80::1/64".parse().unwrap()]);
    let p1 = link(&links, "p1");
    assert!(p1.up && !p1.carrier);
    assert_eq!(p1.mtu, 9000);
    assert_eq!(link(&links, "tap0").master.as_deref(), Some("br0"));
    assert_eq!(link(&links, "lo").speed_mbps, None);

    let json = serde_json::to_string(&links).unwrap();
    assert_eq!(serde_json::from_str::<Vec<Link>>(&json).unwrap(), links);
}

#[test]
fn a_vlan_tells_of_which_link_it_is() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    if !hosts.left.may_ip("link add link p1 name storage type vlan id 7") {
        eprintln!("SKIPPED: this kernel makes no VLANs (CONFIG_VLAN_8021Q)");
        return;
    }
    hosts.left.ip("link add link storage name storage.9 type vlan id 9 protocol 802.1ad");
    hosts.left.ip("link add link p0 name away type vlan id 7");
    hosts.left.ip(&format!("link set away netns {}", hosts.right.name()));
    let vlan = |link: &str, id| Some(Vlan { link: link.into(), id });
    let found = links(&hosts.left);
    assert_eq!(link(&found, "storage").kind, LinkKind::Vlan);
    assert_eq!(link(&found, "storage").vlan, vlan("p1", 7));
    assert_eq!(link(&found, "storage.9").vlan, vlan("storage", 9));
    assert_eq!(link(&found, "p1").vlan, None, "the other end of a virtual cable is no lower link");
    let found = links(&hosts.right);
    assert_eq!(link(&found, "away").kind, LinkKind::Vlan);
    assert_eq!(link(&found, "away").vlan, None, "its card is not here");
}

#[test]
fn counters_are_of_the_links_that_are_there() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    let counters = hosts
        .left
        .run(|| async { Network::open().unwrap().counters(&["p1", "p7", "", "p0"]).await.unwrap() });
    let names: Vec<_> = counters.iter().map(|counters| counters.name.as_str()).collect();
    assert_eq!(names, ["p1", "p0"]);
}

#[test]
fn a_neighbour_is_found_and_a_missing_one_is_not() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.run(|| async {
        let network = Network::open().unwrap();
        let second = Duration::from_secs(1);
        for there in ["10.9.0.2", "fe80::2"] {
            let there = there.parse().unwrap();
            network.wait_neighbour("p0", there, second).await.unwrap();
            network.wait_neighbour("p0", there, second).await.unwrap();
        }
        for missing in ["10.9.0.77", "fe80::77"] {
            let error =
                network.wait_neighbour("p0", missing.parse().unwrap(), Duration::from_millis(50)).await;
            assert!(matches!(error, Err(Error::NeighbourUnreachable { .. })));
        }
    });
}

#[test]
fn there_is_no_route_to_nowhere() {
    if !may_make_namespaces() {
        return;
    }
    let host = Namespace::new();
    host.run(|| async {
        let network = Network::open().unwrap();
        for nowhere in ["192.0.2.1", "2001:db8::1"] {
            let route = network.route_to(nowhere.parse().unwrap()).await.unwrap();
            assert_eq!(route, None);
        }
    });
}

#[test]
fn addresses_that_are_not_the_hosts_own_yet_are_left_out() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.sysctl("net.ipv6.conf.p0.accept_dad", "1");
    hosts.left.sysctl("net.ipv6.conf.p0.dad_transmits", "50");
    hosts.left.ip("addr add fd00:7::1/64 dev p0");
    assert!(hosts.left.ip("-6 addr show dev p0 tentative").contains("fd00:7::1"));
    let links = links(&hosts.left);
    let addresses = &link(&links, "p0").addresses;
    assert_eq!(*addresses, ["10.9.0.1/24".parse().unwrap(), "fe80::1/64".parse().unwrap()]);
}

#[test]
fn an_address_that_belongs_to_a_link_or_a_route_is_not_free() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    hosts.left.ip("addr add fd01::1/64 dev p0 nodad");
    hosts.left.ip("addr add fd02::1/128 dev lo");
    hosts.left.ip("-6 route add default via fe80::2 dev p0");
    hosts.left.ip("-6 route add fd03::/16 via fe80::2 dev p0");
    hosts.left.ip("-6 route add unreachable fd04::/48");
    hosts.left.ip("-6 route add fd05::2/128 via fe80::2 dev p0 proto 215");
    let subnet_of = |address: &str| {
        let address = address.parse().unwrap();
        let subnet = hosts.left.run(|| async { Network::open().unwrap().subnet_of(address).await.unwrap() });
        subnet.map(|subnet| subnet.to_string())
    };
    assert_eq!(subnet_of("fd01::9").as_deref(), Some("fd01::/64"));
    assert_eq!(subnet_of("fd03:0:1::9").as_deref(), Some("fd03::/16"));
    assert_eq!(subnet_of("fd04::9").as_deref(), Some("fd04::/48"));
    assert_eq!(subnet_of("10.9.1.9").as_deref(), Some("10.9.1.0/24"));
    for free in ["fd02::1", "fd05::2", "fd99::1", "10.8.0.1"] {
        assert_eq!(subnet_of(free), None, "{free}");
    }
}

#[test]
fn ipv6_is_on_or_off() {
    if !may_make_namespaces() {
        return;
    }
    let host = Namespace::new();
    assert!(host.enter(|| drainpipe_net::has_ipv6().unwrap()));
    host.sysctl("net.ipv6.conf.all.disable_ipv6", "1");
    assert!(!host.enter(|| drainpipe_net::has_ipv6().unwrap()));
}
