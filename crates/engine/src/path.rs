//! Paths: which link of one host reaches which link of the other.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::facts::{HostFacts, MigrationLink};
use crate::option::RequestedOption;
use crate::pairing::pair_up;

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
    pub is_spare: bool,
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
            is_spare: self.is_spare,
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

/// All paths between two hosts. Each link stands in at most one, so that a path's speed is its own.
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
    let open = |ends: &[End<'_>]| -> Vec<String> {
        let to_try =
            |end: &&End<'_>| end.is_free() && end.rank == Rank::First && end.link.link_local().is_some();
        ends.iter().filter(to_try).map(|end| end.link.name.clone()).collect()
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
    taken: bool,
}

impl End<'_> {
    fn is_free(&self) -> bool {
        !self.taken && self.link.usable
    }
}

struct Search<'a> {
    source: Vec<End<'a>>,
    target: Vec<End<'a>>,
    subnets_of: &'static [Version],
    found: Vec<(usize, Path)>,
}

impl<'a> Search<'a> {
    fn new(source: &'a HostFacts, target: &'a HostFacts, requested: RequestedOption) -> Self {
        let ends = |host: &'a HostFacts| {
            let first = host.links.iter().map(|link| (link, Rank::First));
            let management = host.management_links.iter().map(|link| (link, Rank::Management));
            first.chain(management).map(|(link, rank)| End { link, rank, taken: false }).collect()
        };
        let is_ipv6 = |host: &HostFacts| host.migration_address.is_some_and(|address| address.is_ipv6());
        let routed_by_ipv6 = requested != RequestedOption::Tcp && is_ipv6(source) && is_ipv6(target);
        Self {
            source: ends(source),
            target: ends(target),
            subnets_of: if routed_by_ipv6 { &[Version::V6] } else { Version::BOTH },
            found: vec![],
        }
    }

    fn by_subnets(&mut self) {
        let versions = self.subnets_of;
        self.pair(Rank::First, |link, peer| shared_subnet(link, peer, versions));
    }

    /// Makes paths of free links up to a rank; `addresses` says by which addresses two of them would be
    /// one, if at all.
    fn pair(
        &mut self,
        rank: Rank,
        addresses: impl Fn(&MigrationLink, &MigrationLink) -> Option<(IpAddr, IpAddr)>,
    ) {
        if rank > Rank::First && !self.found.is_empty() {
            return;
        }
        let may = |end: &End<'_>| end.is_free() && end.rank <= rank;
        let partners = pair_up(&speeds(&self.source), &speeds(&self.target), |link, peer| {
            let (link, peer) = (&self.source[link], &self.target[peer]);
            may(link) && may(peer) && addresses(link.link, peer.link).is_some()
        });
        for (index, partner) in partners.into_iter().enumerate() {
            let Some(partner) = partner else { continue };
            let (link, peer) = (self.source[index].link, self.target[partner].link);
            let Some((address, peer_address)) = addresses(link, peer) else { continue };
            self.source[index].taken = true;
            self.target[partner].taken = true;
            let path = Path {
                link: link.name.clone(),
                address,
                peer_link: peer.name.clone(),
                peer_address,
                speed_mbps: slower(link.speed_mbps, peer.speed_mbps),
                is_spare: false,
            };
            self.found.push((index, path));
        }
    }

    fn finish(mut self) -> Vec<Path> {
        self.found.sort_by_key(|(index, _)| *index);
        self.found.into_iter().map(|(_, path)| path).collect()
    }
}

fn speeds(ends: &[End<'_>]) -> Vec<Option<u64>> {
    ends.iter().map(|end| end.link.speed_mbps).collect()
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
    use crate::encryption::EncryptionPolicy;
    use crate::facts::HypervisorVersion;

    fn link(name: &str, addresses: &[&str], speed_mbps: Option<u64>) -> MigrationLink {
        MigrationLink {
            name: name.into(),
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
            speed_mbps,
            mtu: 1500,
            usable: true,
            is_trusted: false,
        }
    }

    fn host(links: Vec<MigrationLink>, migration_address: &str) -> HostFacts {
        HostFacts {
            name: "a".into(),
            cores: 2,
            idle_cores: None,
            vm_cores: 0.0,
            packing_cores: None,
            no_packing: None,
            memory_available_bytes: 0,
            huge_pages_available: vec![],
            links,
            management_links: vec![],
            encryption: EncryptionPolicy::Required,
            migration_address: Some(migration_address.parse().unwrap()),
            bandwidth_limit_mbps: None,
            no_migration_address: None,
            rdma_devices: vec![],
            hypervisor: HypervisorVersion { name: "QEMU".into(), version: "7.2.22".into(), rdma: false },
        }
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
        // One connection needs no route.
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
