//! Paths: which link of one host reaches which link of the other.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::facts::MigrationLink;

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
        }
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

/// All paths between two hosts: usable links with addresses in the same subnet. Each link stands in
/// at most one path, so that a path's speed is its own.
///
/// The order is that of the source's configuration.
pub fn find_paths(source: &[MigrationLink], target: &[MigrationLink]) -> Vec<Path> {
    let mut taken = vec![false; target.len()];
    let mut paths = Vec::new();
    for link in source.iter().filter(|link| link.usable) {
        let found = target.iter().enumerate().find_map(|(index, peer)| {
            if taken[index] || !peer.usable {
                return None;
            }
            let (address, peer_address) = shared_subnet(link, peer)?;
            Some((index, address, peer_address))
        });
        if let Some((index, address, peer_address)) = found {
            taken[index] = true;
            paths.push(Path {
                link: link.name.clone(),
                address,
                peer_link: target[index].name.clone(),
                peer_address,
                speed_mbps: slower(link.speed_mbps, target[index].speed_mbps),
            });
        }
    }
    paths
}

/// Link-local addresses say nothing: every link of every host is in their subnet.
fn shared_subnet(link: &MigrationLink, peer: &MigrationLink) -> Option<(IpAddr, IpAddr)> {
    let reaches_further = |own: &&IpNet| match own.addr() {
        IpAddr::V4(address) => !address.is_link_local(),
        IpAddr::V6(address) => !address.is_unicast_link_local(),
    };
    link.addresses.iter().filter(reaches_further).find_map(|own| {
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

    fn link(name: &str, address: &str, speed_mbps: Option<u64>) -> MigrationLink {
        MigrationLink {
            name: name.into(),
            addresses: vec![address.parse().unwrap()],
            speed_mbps,
            mtu: 1500,
            usable: true,
        }
    }

    #[test]
    fn links_of_one_subnet_are_a_path_at_the_slower_speed() {
        let source = [link("e0", "10.0.1.1/24", Some(1000)), link("e1", "10.0.2.1/24", None)];
        let target = [link("p1", "10.0.2.2/24", Some(5000)), link("p0", "10.0.1.2/24", Some(100))];
        let paths = find_paths(&source, &target);
        assert_eq!(paths.len(), 2);
        assert_eq!((paths[0].link.as_str(), paths[0].peer_link.as_str()), ("e0", "p0"));
        assert_eq!(paths[0].speed_mbps, Some(100));
        assert_eq!(paths[1].speed_mbps, Some(5000));
        assert_eq!(paths[0].reversed().reversed(), paths[0]);
    }

    #[test]
    fn a_link_that_is_down_or_elsewhere_is_no_path() {
        let mut down = link("e0", "10.0.1.1/24", None);
        down.usable = false;
        assert!(find_paths(&[down], &[link("e0", "10.0.1.2/24", None)]).is_empty());
        let elsewhere = [link("e0", "10.0.3.1/24", None)];
        assert!(find_paths(&elsewhere, &[link("e0", "10.0.1.2/24", None)]).is_empty());
        let local = |address| [link("e0", address, None)];
        assert!(find_paths(&local("fe80::1/64"), &local("fe80::2/64")).is_empty());
        assert!(find_paths(&local("169.254.0.1/16"), &local("169.254.0.2/16")).is_empty());
    }

    #[test]
    fn no_link_stands_in_two_paths() {
        let source = [link("e0", "10.0.1.1/24", None), link("e1", "10.0.1.3/24", None)];
        let paths = find_paths(&source, &[link("e0", "10.0.1.2/24", None)]);
        assert_eq!(paths.len(), 1);
    }
}
