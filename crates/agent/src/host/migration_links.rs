//! Which links carry migrations: those that the configuration names, or else those that look fit for it.

use std::cmp::Reverse;
use std::net::IpAddr;

use drainpipe_engine::host::facts::MigrationLink;
use drainpipe_net::{Link, LinkKind};
use ipnet::IpNet;

use crate::store::config::{self, LinkChoice};

/// Whether a link's network is among those that are trusted: by its name, or because all of its addresses are in
/// trusted subnets. Link-local ones, which are the same everywhere, say nothing.
pub(crate) fn is_trusted(link: &MigrationLink, trusted: &[LinkChoice]) -> bool {
    if trusted.iter().any(|choice| choice.is(&link.name)) {
        return true;
    }
    let mut addresses =
        link.addresses.iter().map(IpNet::addr).filter(|addr| reaches_further(*addr)).peekable();
    addresses.peek().is_some()
        && addresses.all(|address| trusted.iter().any(|choice| choice.contains(address)))
}

/// The links that the configuration names, in its order; one that is missing is shown as down, so that
/// errors name it.
pub(crate) fn configured(links: &[Link], wanted: &[config::Link]) -> Vec<MigrationLink> {
    wanted
        .iter()
        .map(|wanted| match links.iter().find(|link| link.name == wanted.name) {
            Some(link) => {
                let speed_mbps = wanted.speed_mbps.or(link.speed_mbps);
                MigrationLink { speed_mbps, ..migration_link(link) }
            }
            None => MigrationLink {
                name: wanted.name.clone(),
                addresses: vec![],
                speed_mbps: wanted.speed_mbps,
                mtu: 0,
                usable: false,
                is_trusted: false,
                card: None,
                rdma: None,
            },
        })
        .collect()
}

/// The links of a host that may carry migrations.
#[derive(Debug)]
pub(crate) struct MigrationLinks {
    /// In order of preference.
    pub(crate) first: Vec<MigrationLink>,
    /// Those of the management network, for hosts between which nothing else makes a path.
    pub(crate) management: Vec<MigrationLink>,
}

impl MigrationLinks {
    /// All of them.
    pub(crate) fn all(self) -> Vec<MigrationLink> {
        [self.first, self.management].concat()
    }
}

/// The links that look fit, the fastest first and those that are down last: network cards, bonds and VLANs
/// that belong to no bridge or bond, have an address other than IPv4's link-local ones, and are not
/// excluded.
///
/// A card and its VLANs share its speed, so the engine takes one of them: the first that finds a partner. So those with
/// an address that somebody gave them stand before the others, then VLANs before the card, then the lowest VLAN, which
/// is the same on both hosts. A card that only carries VLANs is no network of its own, though the kernel gives it an
/// address.
///
/// Those of the management network, by which the agents reach each other, stand apart as long as there
/// is another one: a host with one network card uses it for everything.
pub(crate) fn found(links: &[Link], exclude: &[LinkChoice], management: &[IpAddr]) -> MigrationLinks {
    let mut fit: Vec<&Link> = links
        .iter()
        .filter(|link| is_fit(link) && !exclude.iter().any(|exclusion| exclusion.covers(link)))
        .filter(|link| !only_carries_vlans(link, links))
        .collect();
    fit.sort_by_key(|link| {
        let speed = (is_usable(link), !looks_like_a_guests(link), link.speed_mbps);
        (Reverse((speed, has_own_address(link), link.vlan.is_some())), link.vlan.as_ref().map(|vlan| vlan.id))
    });
    let is_management = |link: &&Link| link.addresses.iter().any(|net| management.contains(&net.addr()));
    let (management, first): (Vec<&Link>, Vec<&Link>) = fit.iter().copied().partition(is_management);
    let found = |link: &Link| MigrationLink { card: card_of(link, links), ..migration_link(link) };
    let links = |links: Vec<&Link>| links.into_iter().map(found).collect();
    if first.iter().any(|link| is_usable(link)) {
        return MigrationLinks { first: links(first), management: links(management) };
    }
    MigrationLinks { first: links(fit), management: vec![] }
}

/// Some container networks give a container's host one end of a veth pair without a bridge, and no
/// address but the kernel's own.
fn looks_like_a_guests(link: &Link) -> bool {
    link.kind == LinkKind::Veth && !has_own_address(link)
}

/// One that somebody gave it.
fn has_own_address(link: &Link) -> bool {
    link.addresses.iter().any(|net| reaches_further(net.addr()))
}

/// The card by which a VLAN's packets leave in the end: a VLAN may be one of a VLAN.
fn card_of(link: &Link, links: &[Link]) -> Option<String> {
    let mut card = link.vlan.as_ref()?.link.as_str();
    // Each step leads one further down.
    for _ in 0..links.len() {
        let lower = links.iter().find(|lower| lower.name == card).and_then(|lower| lower.vlan.as_ref());
        let Some(lower) = lower else { break };
        card = &lower.link;
    }
    Some(card.into())
}

fn only_carries_vlans(card: &Link, links: &[Link]) -> bool {
    let is_on_it = |link: &&Link| card_of(link, links).is_some_and(|lower| lower == card.name);
    !has_own_address(card) && links.iter().filter(is_on_it).any(|vlan| is_fit(vlan) && has_own_address(vlan))
}

fn reaches_further(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    }
}

fn is_fit(link: &Link) -> bool {
    let is_kind = match &link.kind {
        LinkKind::Physical | LinkKind::Bond | LinkKind::Vlan | LinkKind::Veth => true,
        LinkKind::Bridge | LinkKind::Tap | LinkKind::Loopback | LinkKind::Other(_) => false,
    };
    // An IPv6 link-local one will do: the peer may answer there.
    let can_make_a_path = |net: &IpNet| net.addr().is_ipv6() || reaches_further(net.addr());
    is_kind && link.master.is_none() && link.addresses.iter().any(can_make_a_path)
}

fn is_usable(link: &Link) -> bool {
    link.up && link.carrier && link.kind != LinkKind::Loopback
}

fn migration_link(link: &Link) -> MigrationLink {
    MigrationLink {
        name: link.name.clone(),
        addresses: link.addresses.clone(),
        speed_mbps: link.speed_mbps,
        mtu: link.mtu,
        usable: is_usable(link),
        is_trusted: false,
        card: None,
        rdma: None,
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_net::{LinkCounters, Vlan};

    use super::*;

    fn link(name: &str, kind: LinkKind, address: &str) -> Link {
        Link {
            index: 1,
            name: name.into(),
            kind,
            mtu: 1500,
            up: true,
            carrier: true,
            speed_mbps: Some(1000),
            card_speed_mbps: None,
            addresses: vec![address.parse().unwrap()],
            master: None,
            vlan: None,
            counters: LinkCounters {
                name: name.into(),
                rx_bytes: 0,
                tx_bytes: 0,
                rx_packets: 0,
                tx_packets: 0,
                rx_errors: 0,
                tx_errors: 0,
                rx_dropped: 0,
                tx_dropped: 0,
            },
        }
    }

    fn host() -> Vec<Link> {
        let down = Link { carrier: false, ..link("eth3", LinkKind::Physical, "10.0.3.1/24") };
        let member = Link { master: Some("br0".into()), ..link("eth4", LinkKind::Physical, "10.0.4.1/24") };
        let fast = Link { speed_mbps: Some(25_000), ..link("eth2", LinkKind::Physical, "10.0.2.1/24") };
        vec![
            link("lo", LinkKind::Loopback, "127.0.0.1/8"),
            link("eth0", LinkKind::Physical, "192.0.2.1/24"),
            link("eth1", LinkKind::Physical, "10.0.1.1/24"),
            fast,
            down,
            member,
            link("eth5", LinkKind::Physical, "169.254.7.1/16"),
            Link { speed_mbps: Some(10_000), ..link("veth0", LinkKind::Veth, "fe80::7/64") },
            link("eth6", LinkKind::Physical, "fe80::6/64"),
            link("br0", LinkKind::Bridge, "192.168.0.1/24"),
            link("virbr0", LinkKind::Bridge, "192.168.122.1/24"),
            link("tap0", LinkKind::Tap, "10.9.0.1/24"),
            link("wg0", LinkKind::Other("wireguard".into()), "10.8.0.1/24"),
        ]
    }

    fn names(links: &[MigrationLink]) -> Vec<&str> {
        links.iter().map(|link| link.name.as_str()).collect()
    }

    #[test]
    fn cards_that_are_not_of_the_management_network_are_found() {
        let management = ["192.0.2.1".parse().unwrap()];
        let links = found(&host(), &[], &management);
        assert_eq!(names(&links.first), ["eth2", "eth1", "eth6", "veth0", "eth3"]);
        assert_eq!(names(&links.management), ["eth0"]);
        let links = found(&host(), &[], &[]);
        assert_eq!(names(&links.first), ["eth2", "eth0", "eth1", "eth6", "veth0", "eth3"]);
        assert!(links.management.is_empty());
    }

    fn vlan(card: &str, id: u16, address: &str) -> Link {
        let vlan = Some(Vlan { link: card.into(), id });
        Link { vlan, ..link(&format!("{card}.{id}"), LinkKind::Vlan, address) }
    }

    #[test]
    fn of_a_card_and_its_vlans_the_one_that_was_meant_for_it_stands_first() {
        let card = |address| link("eth0", LinkKind::Physical, address);
        let (lowest, highest) = (vlan("eth0", 20, "10.0.20.1/24"), vlan("eth0", 100, "10.1.0.1/24"));
        let of_vlan = vlan("eth0.20", 5, "10.2.0.1/24");
        let local = vlan("eth0", 3, "fe80::1/64");
        let other = link("eth1", LinkKind::Physical, "10.0.1.1/24");
        let with = |card: Link| found(&[card, highest, local, of_vlan, other, lowest], &[], &[]).first;
        let links = with(card("10.0.0.1/24"));
        assert_eq!(names(&links), ["eth0.20.5", "eth0.20", "eth0.100", "eth0", "eth1", "eth0.3"]);
        let cards = |links: &[MigrationLink]| -> Vec<String> {
            links.iter().map(|link| link.card().to_owned()).collect()
        };
        assert_eq!(cards(&links), ["eth0", "eth0", "eth0", "eth0", "eth1", "eth0"]);
    }

    #[test]
    fn a_card_that_only_carries_vlans_is_none_of_them() {
        let card = || link("eth0", LinkKind::Physical, "fe80::1/64");
        let links = [card(), vlan("eth0", 5, "192.0.2.1/24"), vlan("eth0", 7, "10.0.7.1/24")];
        let management = ["192.0.2.1".parse().unwrap()];
        let of = found(&links, &[], &management);
        assert_eq!((names(&of.first), names(&of.management)), (vec!["eth0.7"], vec!["eth0.5"]));
        let exclude = ["eth0.7".to_owned()].map(|name| LinkChoice::try_from(name).unwrap());
        assert_eq!(names(&found(&links, &exclude, &management).first), ["eth0.5"]);
        // The guests' VLANs are in their bridges, and say nothing about the card.
        let guests = Link { master: Some("br7".into()), ..vlan("eth0", 7, "fe80::7/64") };
        assert_eq!(names(&found(&[card(), guests], &[], &[]).first), ["eth0"]);
        // A link that is configured by hand is one like any other.
        let wanted = ["eth0", "eth0.7"].map(|name| config::Link { name: name.into(), speed_mbps: None });
        let by_hand = configured(&links, &wanted);
        assert_eq!(names(&by_hand), ["eth0", "eth0.7"]);
        assert!(by_hand.iter().all(|link| link.card.is_none()));
    }

    #[test]
    fn what_is_excluded_by_name_or_subnet_is_not() {
        let exclude = ["eth1", "10.0.2.0/24"].map(|text| LinkChoice::try_from(text.to_owned()).unwrap());
        assert_eq!(names(&found(&host(), &exclude, &[]).first), ["eth0", "eth6", "veth0", "eth3"]);
        for bad in ["", "10.0.0.0/40", "a/b"] {
            assert!(LinkChoice::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_link_is_trusted_by_its_name_or_by_all_its_addresses() {
        let trusted = ["eth1", "10.0.2.0/24"].map(|text| LinkChoice::try_from(text.to_owned()).unwrap());
        let trusts = |name: &str, addresses: &[&str]| {
            let addresses = addresses.iter().map(|net| net.parse().unwrap()).collect();
            let link = Link { addresses, ..link(name, LinkKind::Physical, "10.0.0.1/24") };
            is_trusted(&migration_link(&link), &trusted)
        };
        assert!(trusts("eth1", &[]) && trusts("eth2", &["10.0.2.1/24", "fe80::1/64"]));
        assert!(!trusts("eth2", &["10.0.2.1/24", "192.0.2.1/24"]), "it is in another network too");
        assert!(!trusts("eth2", &["fe80::1/64"]) && !trusts("eth2", &[]));
        assert!(!trusts("eth2", &["10.0.3.1/24"]));
    }

    #[test]
    fn the_only_card_is_used_for_everything() {
        let only = [link("eth0", LinkKind::Physical, "192.0.2.1/24")];
        let management = ["192.0.2.1".parse().unwrap()];
        assert_eq!(names(&found(&only, &[], &management).first), ["eth0"]);
        let down = Link { carrier: false, ..link("eth1", LinkKind::Physical, "fe80::1/64") };
        assert_eq!(names(&found(&[down, only[0].clone()], &[], &management).all()), ["eth0", "eth1"]);
    }

    #[test]
    fn what_is_configured_keeps_its_order_and_speed() {
        let wanted = [("eth9", None), ("eth1", Some(500))]
            .map(|(name, speed_mbps)| config::Link { name: name.into(), speed_mbps });
        let links = configured(&host(), &wanted);
        assert_eq!(names(&links), ["eth9", "eth1"]);
        assert_eq!((links[0].usable, links[1].usable, links[1].speed_mbps), (false, true, Some(500)));
    }
}
