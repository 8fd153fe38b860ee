//! Paths: which link of one host reaches which link of the other.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::facts::{HostFacts, MigrationLink};
use crate::option::RequestedOption;
use crate::paths::pairing::pair_up;

/// Two links that reach each other, seen from the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Path {
    /// Link of the source.
    pub link: String,
    /// Address of the source on it.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Link of the target.
    pub peer_link: String,
    /// Address of the target on it.
    #[schema(value_type = String)]
    pub peer_address: IpAddr,
    /// The slower of both ends, where known.
    pub speed_mbps: Option<u64>,
    /// Whether it carries only when no other path does.
    #[serde(default)]
    // Its name in 0.1.0.
    #[serde(rename = "is_spare")]
    pub is_standby: bool,
    /// Largest packet that both ends take, in bytes, where known: TCP's are no larger.
    #[serde(default)]
    pub mtu_bytes: Option<u32>,
}

impl Path {
    /// The same path, seen from the other end.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            link: self.peer_link.clone(),
            address: self.peer_address,
            peer_link: self.link.clone(),
            peer_address: self.address,
            speed_mbps: self.speed_mbps,
            is_standby: self.is_standby,
            mtu_bytes: self.mtu_bytes,
        }
    }

    /// Whether it was found by trying link-local addresses, not by a subnet that both ends share.
    pub fn is_link_local(&self) -> bool {
        matches!(self.address, IpAddr::V6(address) if address.is_unicast_link_local())
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.link, &self.peer_link)
    }
}

/// What people know a path by. Results find its turns by it.
pub(crate) fn write_name(f: &mut fmt::Formatter<'_>, link: &str, peer_link: &str) -> fmt::Result {
    write!(f, "{link}–{peer_link}")
}

/// That a link of the source and one of the target reach each other by their IPv6 link-local addresses,
/// as was tried.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reach {
    /// Link of the source.
    pub link: String,
    /// Link of the target.
    pub peer_link: String,
}

/// All paths between two hosts. Each card stands in at most one, so that a path's speed is its own.
///
/// Links with addresses in one subnet make a path; of the rest, those that reach each other by their
/// link-local addresses. A multichannel route between IPv6 migration addresses needs IPv6 next hops, so
/// for that only IPv6 subnets count, and IPv4's only where nothing else makes a path of a link.
/// Management links stand back until there is no path without them.
///
/// The order is that of the source's links.
pub fn find_paths(
    source: &HostFacts,
    target: &HostFacts,
    requested: RequestedOption,
    reaches: &[Reach],
) -> Vec<Path> {
    let mut search = Search::new(source, target, requested);
    search.by_subnets();
    let reach_each_other = |link: &MigrationLink, peer: &MigrationLink| {
        let ends = (link.name.as_str(), peer.name.as_str());
        let answered = reaches.iter().any(|reach| (reach.link.as_str(), reach.peer_link.as_str()) == ends);
        let own = link.link_local().filter(|_| answered)?;
        Some((IpAddr::V6(own), IpAddr::V6(peer.link_local()?)))
    };
    search.pair(Rank::First, reach_each_other);
    search.pair(Rank::First, |link, peer| shared_subnet(link, peer, &[Version::V4]));
    search.pair(Rank::Management, |link, peer| shared_subnet(link, peer, Version::BOTH));
    search.finish()
}

/// Links for which it is not known yet whether they reach one of the other host: names of the source's,
/// and of the target's. Nothing is to be tried where one is empty.
pub fn links_to_try(
    source: &HostFacts,
    target: &HostFacts,
    requested: RequestedOption,
) -> (Vec<String>, Vec<String>) {
    let mut search = Search::new(source, target, requested);
    search.by_subnets();
    let open = |cards: &[Card<'_>]| -> Vec<String> {
        let ends = cards.iter().flat_map(|card| card.free(Rank::First));
        let mut to_try: Vec<&End<'_>> = ends.filter(|end| end.link.link_local().is_some()).collect();
        to_try.sort_by_key(|end| end.place);
        to_try.into_iter().map(|end| end.link.name.clone()).collect()
    };
    match (open(&search.source), open(&search.target)) {
        (source, target) if source.is_empty() || target.is_empty() => (vec![], vec![]),
        both => both,
    }
}

/// Whether connections between the hosts' migration addresses can be routed over this path.
pub(crate) fn carries_route(path: &Path, migration_address: IpAddr) -> bool {
    // Linux takes an IPv6 next hop for an IPv4 route, not the reverse.
    migration_address.is_ipv4() || path.address.is_ipv6()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    V4,
    V6,
}

impl Version {
    const BOTH: &[Self] = &[Self::V4, Self::V6];
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Rank {
    First,
    Management,
}

/// A link in search of a partner.
struct End<'a> {
    link: &'a MigrationLink,
    rank: Rank,
    // In the order of its host.
    place: usize,
}

/// A card with the VLANs on it: together they carry what the card does.
struct Card<'a> {
    // In the order of the host, which prefers the first of them that finds a partner.
    ends: Vec<End<'a>>,
    taken: bool,
}

impl<'a> Card<'a> {
    fn all_of(host: &'a HostFacts) -> Vec<Self> {
        let first = host.links.iter().map(|link| (link, Rank::First));
        let management = host.management_links.iter().map(|link| (link, Rank::Management));
        let mut cards: Vec<Self> = vec![];
        for (place, (link, rank)) in first.chain(management).enumerate() {
            let end = End { link, rank, place };
            match cards.iter_mut().find(|card| card.ends[0].link.card() == link.card()) {
                Some(card) => card.ends.push(end),
                None => cards.push(Self { ends: vec![end], taken: false }),
            }
        }
        cards
    }

    fn speed_mbps(&self) -> Option<u64> {
        self.ends.iter().filter_map(|end| end.link.speed_mbps).max()
    }

    /// Its links up to a rank that may make a path, unless one of them has.
    fn free(&self, rank: Rank) -> impl Iterator<Item = &End<'a>> {
        self.ends.iter().filter(move |end| !self.taken && end.link.usable && end.rank <= rank)
    }
}

struct Search<'a> {
    source: Vec<Card<'a>>,
    target: Vec<Card<'a>>,
    subnets_of: &'static [Version],
    found: Vec<(usize, Path)>,
}

impl<'a> Search<'a> {
    fn new(source: &'a HostFacts, target: &'a HostFacts, requested: RequestedOption) -> Self {
        let is_ipv6 = |host: &HostFacts| host.migration_address.is_some_and(|address| address.is_ipv6());
        let routed_by_ipv6 = requested != RequestedOption::Tcp && is_ipv6(source) && is_ipv6(target);
        Self {
            source: Card::all_of(source),
            target: Card::all_of(target),
            subnets_of: if routed_by_ipv6 { &[Version::V6] } else { Version::BOTH },
            found: vec![],
        }
    }

    fn by_subnets(&mut self) {
        let versions = self.subnets_of;
        self.pair(Rank::First, |link, peer| shared_subnet(link, peer, versions));
    }

    /// Makes paths of free cards by their links up to a rank; `addresses` says by which addresses two links would be
    /// one, if at all.
    fn pair(
        &mut self,
        rank: Rank,
        addresses: impl Fn(&MigrationLink, &MigrationLink) -> Option<(IpAddr, IpAddr)>,
    ) {
        if rank > Rank::First && !self.found.is_empty() {
            return;
        }
        let path = |card: &Card<'_>, peer: &Card<'_>| {
            card.free(rank).find_map(|end| {
                peer.free(rank).find_map(|other| {
                    let path = path_of(end.link, other.link, addresses(end.link, other.link)?);
                    Some((end.place, path))
                })
            })
        };
        let partners = pair_up(&speeds(&self.source), &speeds(&self.target), |card, peer| {
            path(&self.source[card], &self.target[peer]).is_some()
        });
        for (card, partner) in partners.into_iter().enumerate() {
            let Some(partner) = partner else { continue };
            let Some(found) = path(&self.source[card], &self.target[partner]) else { continue };
            self.source[card].taken = true;
            self.target[partner].taken = true;
            self.found.push(found);
        }
    }

    fn finish(mut self) -> Vec<Path> {
        self.found.sort_by_key(|(place, _)| *place);
        self.found.into_iter().map(|(_, path)| path).collect()
    }
}

fn path_of(link: &MigrationLink, peer: &MigrationLink, (address, peer_address): (IpAddr, IpAddr)) -> Path {
    Path {
        link: link.name.clone(),
        address,
        peer_link: peer.name.clone(),
        peer_address,
        speed_mbps: slower(link.speed_mbps, peer.speed_mbps),
        is_standby: false,
        // A link that is missing has none.
        mtu_bytes: Some(link.mtu.min(peer.mtu)).filter(|mtu_bytes| *mtu_bytes > 0),
    }
}

fn speeds(cards: &[Card<'_>]) -> Vec<Option<u64>> {
    cards.iter().map(Card::speed_mbps).collect()
}

/// Link-local addresses say nothing here: every link of every host is in their subnet.
fn shared_subnet(
    link: &MigrationLink,
    peer: &MigrationLink,
    versions: &[Version],
) -> Option<(IpAddr, IpAddr)> {
    let fits = |own: &&IpNet| match own.addr() {
        IpAddr::V4(address) => versions.contains(&Version::V4) && !address.is_link_local(),
        IpAddr::V6(address) => versions.contains(&Version::V6) && !address.is_unicast_link_local(),
    };
    link.addresses.iter().filter(fits).find_map(|own| {
        peer.addresses
            .iter()
            .find(|other| own.trunc() == other.trunc() && own.addr() != other.addr())
            .map(|other| (own.addr(), other.addr()))
    })
}

fn slower(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (known, None) | (None, known) => known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn link(name: &str, addresses: &[&str], speed_mbps: Option<u64>) -> MigrationLink {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        MigrationLink { addresses, speed_mbps, ..fixtures::link(name) }
    }

    fn host(links: Vec<MigrationLink>, migration_address: &str) -> HostFacts {
        let migration_address = Some(migration_address.parse().unwrap());
        HostFacts { links, migration_address, ..fixtures::host("a") }
    }

    const ROUTED: RequestedOption = RequestedOption::Multichannel;

    fn paths(source: &[MigrationLink], target: &[MigrationLink]) -> Vec<Path> {
        let (source, target) = (host(source.to_vec(), "10.9.0.1"), host(target.to_vec(), "10.9.0.2"));
        find_paths(&source, &target, ROUTED, &[])
    }

    fn names(paths: &[Path]) -> Vec<String> {
        paths.iter().map(ToString::to_string).collect()
    }

    fn reach(link: &str, peer_link: &str) -> Reach {
        Reach { link: link.into(), peer_link: peer_link.into() }
    }

    #[test]
    fn links_of_one_subnet_are_a_path_at_the_slower_speed() {
        let source = [link("e0", &["10.0.1.1/24"], Some(1000)), link("e1", &["10.0.2.1/24"], None)];
        let target = [link("p1", &["10.0.2.2/24"], Some(5000)), link("p0", &["10.0.1.2/24"], Some(100))];
        let paths = paths(&source, &target);
        assert_eq!(names(&paths), ["e0–p0", "e1–p1"]);
        assert_eq!(paths[0].speed_mbps, Some(100));
        assert_eq!(paths[1].speed_mbps, Some(5000));
        assert_eq!(paths[0].reversed().reversed(), paths[0]);
        assert!(!paths[0].is_link_local());
    }

    #[test]
    fn a_link_that_is_down_or_elsewhere_is_no_path() {
        let one = |address| [link("e0", &[address], None)];
        let mut down = one("10.0.1.1/24");
        down[0].usable = false;
        assert!(paths(&down, &one("10.0.1.2/24")).is_empty());
        assert!(paths(&one("10.0.3.1/24"), &one("10.0.1.2/24")).is_empty());
        assert!(paths(&one("fe80::1/64"), &one("fe80::2/64")).is_empty());
        assert!(paths(&one("169.254.0.1/16"), &one("169.254.0.2/16")).is_empty());
    }

    #[test]
    fn no_link_stands_in_two_paths() {
        let source = [link("e0", &["10.0.1.1/24"], None), link("e1", &["10.0.1.3/24"], None)];
        assert_eq!(paths(&source, &[link("e0", &["10.0.1.2/24"], None)]).len(), 1);
    }

    fn vlan(card: &str, id: u8, addresses: &[&str]) -> MigrationLink {
        MigrationLink { card: Some(card.into()), ..link(&format!("{card}.{id}"), addresses, Some(1000)) }
    }

    #[test]
    fn a_card_and_its_vlans_are_one_path_by_the_first_of_them_that_finds_a_partner() {
        let card = |last: u8| link("e0", &[&format!("10.0.0.{last}/24")], Some(1000));
        let of = |id: u8, last: u8| vlan("e0", id, &[&format!("10.0.{id}.{last}/24")]);
        let whole = |last| [of(1, last), of(2, last), card(last)];
        let found = paths(&whole(1), &whole(2));
        assert_eq!(names(&found), ["e0.1–e0.1"]);
        assert_eq!(found[0].speed_mbps, Some(1000));
        // The other host has fewer of them, or others.
        assert_eq!(names(&paths(&whole(1), &[of(2, 2), card(2)])), ["e0.2–e0.2"]);
        assert_eq!(names(&paths(&whole(1), &[of(3, 2), card(2)])), ["e0–e0"]);
        // Its VLANs lead to two cards of the other host, but make one path all the same.
        let two = [link("p0", &["10.0.1.2/24"], None), link("p1", &["10.0.2.2/24"], None)];
        assert_eq!(names(&paths(&whole(1), &two)), ["e0.1–p0"]);
        assert_eq!(names(&paths(&two, &whole(1))), ["p0–e0.1"]);
        // Another card is another path; what somebody has configured stands for itself.
        let other = |last: u8| vlan("e1", 9, &[&format!("10.0.9.{last}/24")]);
        let with_other = |last| [of(1, last), card(last), other(last)];
        assert_eq!(names(&paths(&with_other(1), &with_other(2))), ["e0.1–e0.1", "e1.9–e1.9"]);
        let configured = |last| whole(last).map(|link| MigrationLink { card: None, ..link });
        assert_eq!(paths(&configured(1), &configured(2)).len(), 3);
    }

    #[test]
    fn a_card_of_which_a_vlan_makes_a_path_is_not_tried_by_link_local_addresses() {
        let of = |last: u8| {
            let tried = vlan("e1", 8, &[&format!("fe80::{last}/64")]);
            let links = vec![
                vlan("e0", 7, &[&format!("10.0.7.{last}/24"), &format!("fe80::{last}/64")]),
                link("e0", &[&format!("fe80::{last}/64")], Some(1000)),
                tried,
                link("e1", &[&format!("fe80::{last}/64")], Some(1000)),
            ];
            host(links, "10.9.0.1")
        };
        let (source, target) = (of(1), of(2));
        let both = vec!["e1.8".to_owned(), "e1".to_owned()];
        assert_eq!(links_to_try(&source, &target, ROUTED), (both.clone(), both));
        let reaches = [reach("e1", "e1"), reach("e1.8", "e1.8"), reach("e0", "e0")];
        assert_eq!(names(&find_paths(&source, &target, ROUTED, &reaches)), ["e0.7–e0.7", "e1.8–e1.8"]);
        assert_eq!(names(&find_paths(&source, &target, ROUTED, &reaches[..1])), ["e0.7–e0.7", "e1–e1"]);
    }

    #[test]
    fn links_that_stand_in_no_path_are_tried_by_link_local_addresses() {
        let source = [link("e0", &["10.0.1.1/24", "fe80::1/64"], None), link("e1", &["fe80::1/64"], None)];
        let target = [link("e0", &["fe80::2/64"], None), link("e1", &["10.0.1.2/24", "fe80::2/64"], None)];
        let (source, target) = (host(source.to_vec(), "10.9.0.1"), host(target.to_vec(), "10.9.0.2"));
        let to_try = links_to_try(&source, &target, ROUTED);
        assert_eq!(to_try, (vec!["e1".to_owned()], vec!["e0".to_owned()]));
        let found = find_paths(&source, &target, ROUTED, &[reach("e1", "e0")]);
        assert_eq!(names(&found), ["e0–e1", "e1–e0"]);
        assert_eq!(found[1].peer_address.to_string(), "fe80::2");
        assert!(found[1].is_link_local());
        let unasked = find_paths(&source, &target, ROUTED, &[reach("e9", "e0"), reach("e0", "e0")]);
        assert_eq!(names(&unasked), ["e0–e1"]);
    }

    #[test]
    fn ipv6_migration_addresses_need_ipv6_next_hops() {
        let links = |last| {
            vec![
                link("e0", &[&format!("10.0.1.{last}/24"), &format!("fe80::{last}/64")], None),
                link("e1", &[&format!("10.0.2.{last}/24")], None),
                link("e2", &[&format!("fd00:2::{last}/64"), &format!("fe80::{last}/64")], None),
            ]
        };
        let (source, target) = (host(links(1), "fd00::1"), host(links(2), "fd00::2"));
        let to_try = links_to_try(&source, &target, ROUTED);
        assert_eq!(to_try, (vec!["e0".to_owned()], vec!["e0".to_owned()]));
        let found = find_paths(&source, &target, ROUTED, &[reach("e0", "e0")]);
        let addresses: Vec<String> = found.iter().map(|path| path.address.to_string()).collect();
        assert_eq!(addresses, ["fe80::1", "10.0.2.1", "fd00:2::1"]);
        let own = source.migration_address.unwrap();
        let carrying: Vec<bool> = found.iter().map(|path| carries_route(path, own)).collect();
        assert_eq!(carrying, [true, false, true]);
        // A single connection needs no route.
        assert_eq!(links_to_try(&source, &target, RequestedOption::Tcp), (vec![], vec![]));
        let found = find_paths(&source, &target, RequestedOption::Tcp, &[]);
        assert_eq!(found[0].address.to_string(), "10.0.1.1");
    }

    #[test]
    fn management_links_are_the_last_resort() {
        let with_management = |last| {
            let mut host = host(vec![link("e0", &[&format!("fe80::{last}/64")], None)], "10.9.0.1");
            host.management_links = vec![link("eth0", &[&format!("192.0.2.{last}/24")], None)];
            host
        };
        let (source, target) = (with_management(1), with_management(2));
        assert_eq!(names(&find_paths(&source, &target, ROUTED, &[reach("e0", "e0")])), ["e0–e0"]);
        assert_eq!(names(&find_paths(&source, &target, ROUTED, &[])), ["eth0–eth0"]);
    }
}
