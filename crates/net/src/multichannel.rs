//! What one host needs so that its traffic to a peer is spread over several paths.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::Error;
use crate::change::Change;
use crate::route_attributes::{NextHop, RouteAttributes, WEIGHT_MAX};

/// The default, "0", hashes addresses only, and so puts all connections between two hosts on one
/// path; this hashes the ports as well.
const HASH_ADDRESSES_AND_PORTS: &str = "1";

pub(crate) const CUBIC: &str = "cubic";

/// Why no changes can be said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what it means")]
pub enum MultichannelError {
    #[error("there is no path to {peer}: name at least one link that both hosts have")]
    NoPath { peer: IpAddr },

    #[error("the migration addresses {own} and {peer} must be two different ones of the same IP version")]
    Addresses { own: IpAddr, peer: IpAddr },

    #[error(
        "{0} cannot be a migration address: use a private IPv4 address or a unique-local IPv6 address (fd00::/8)"
    )]
    Unusable(IpAddr),

    #[error("the path over {link} has weight {weight}; a weight is from 1 to 256")]
    Weight { link: String, weight: u16 },

    #[error(
        "the path over {link} has gateway {gateway}, but the migration addresses are IPv6: its gateway must be so too"
    )]
    Gateway { link: String, gateway: IpAddr },
}

/// Everything that one host needs so that its traffic from `own` to `peer` is spread over all
/// `paths`, in the order in which it is to be applied.
///
/// Both hosts need it, each from its own point of view. `own` becomes an address of `lo`, so it
/// belongs to no link and outlives each of them.
pub fn multichannel_changes(
    own: IpAddr,
    peer: IpAddr,
    paths: &[NextHop],
    congestion_control: Option<&str>,
) -> Result<Vec<Change>, MultichannelError> {
    check(own, peer, paths)?;
    let mut changes = vec![hash_policy(own)];
    let links: BTreeSet<&str> = paths.iter().map(|path| path.link.as_str()).collect();
    changes.extend(links.into_iter().map(|link| ignore_linkdown(own, link)));
    // Before the route, and so gone after it, also when it is put back: in no moment does what waits in the
    // connections follow another route of the host.
    changes.push(Change::Unreachable { destination: IpNet::from(peer) });
    changes.push(Change::Address { link: "lo".to_owned(), address: IpNet::from(own) });
    let way = RouteAttributes {
        source: Some(own),
        next_hops: paths.to_vec(),
        congestion_control: congestion_control.map(str::to_owned),
    };
    changes.push(Change::Route { destination: IpNet::from(peer), way });
    Ok(changes)
}

/// The congestion control that multichannel's connections are given, where this kernel has it.
///
/// Many connections over one link have to share its queue. Under BBR, the default of some hosts,
/// they did not: the links stood idle for 0.1 s time and again. 16 channels over 2 links of 1 Gb/s
/// carried 0.89 of them under BBR, 0.94 under CUBIC, 0.78 to 0.95 under Reno (docs/decisions/0020).
pub fn channel_congestion_control() -> Result<Option<&'static str>, Error> {
    let available = crate::sysctl::read("net.ipv4.tcp_available_congestion_control")?;
    Ok(available.split_whitespace().any(|name| name == CUBIC).then_some(CUBIC))
}

fn check(own: IpAddr, peer: IpAddr, paths: &[NextHop]) -> Result<(), MultichannelError> {
    if own == peer || own.is_ipv6() != peer.is_ipv6() {
        return Err(MultichannelError::Addresses { own, peer });
    }
    if let Some(unusable) = [own, peer].into_iter().find(|address| !is_usable(*address)) {
        return Err(MultichannelError::Unusable(unusable));
    }
    if paths.is_empty() {
        return Err(MultichannelError::NoPath { peer });
    }
    for NextHop { link, gateway, weight } in paths {
        if !(1..=WEIGHT_MAX).contains(weight) {
            return Err(MultichannelError::Weight { link: link.clone(), weight: *weight });
        }
        if own.is_ipv6() && gateway.is_ipv4() {
            return Err(MultichannelError::Gateway { link: link.clone(), gateway: *gateway });
        }
    }
    Ok(())
}

fn is_usable(address: IpAddr) -> bool {
    let of_one_link = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !(of_one_link || address.is_unspecified() || address.is_loopback() || address.is_multicast())
}

fn version(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ipv4" } else { "ipv6" }
}

fn hash_policy(own: IpAddr) -> Change {
    Change::Sysctl {
        key: format!("net.{}.fib_multipath_hash_policy", version(own)),
        value: HASH_ADDRESSES_AND_PORTS.to_owned(),
    }
}

/// What a link of [`multichannel_changes`] needs: without it the kernel goes on sending to one whose cable is out.
///
/// Set link by link: a link's own setting suffices. `all` would change other links too, and of
/// IPv6 in a way that cannot be undone, since the kernel copies it over the setting of every
/// link and over `default`. It must be there before the route: IPv4 considers it when a route is made
/// and when a link changes, not when a packet is sent (all measured with Linux 6.18).
pub fn ignore_linkdown(own: IpAddr, link: &str) -> Change {
    Change::Sysctl {
        key: format!("net.{}.conf.{}.ignore_routes_with_linkdown", version(own), link.replace('.', "/")),
        value: "1".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(link: &str, gateway: &str, weight: u16) -> NextHop {
        NextHop { link: link.to_owned(), gateway: gateway.parse().unwrap(), weight }
    }

    fn changes(own: &str, peer: &str, paths: &[NextHop]) -> Result<Vec<String>, MultichannelError> {
        multichannel_changes(own.parse().unwrap(), peer.parse().unwrap(), paths, Some(CUBIC))
            .map(|changes| changes.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn two_paths_of_ipv4() {
        let paths = [path("eth0", "10.1.0.2", 5), path("eth1.100", "10.2.0.2", 1)];
        assert_eq!(
            changes("10.255.0.1", "10.255.0.2", &paths).unwrap(),
            [
                "net.ipv4.fib_multipath_hash_policy = 1",
                "net.ipv4.conf.eth0.ignore_routes_with_linkdown = 1",
                "net.ipv4.conf.eth1/100.ignore_routes_with_linkdown = 1",
                "10.255.0.2/32 unreachable without its route",
                "address 10.255.0.1/32 on link lo",
                "route to 10.255.0.2/32 via 10.1.0.2 link eth0 weight 5 \
                 via 10.2.0.2 link eth1.100 weight 1 congctl cubic",
            ]
        );
    }

    #[test]
    fn ipv6_with_two_neighbours_on_one_link() {
        let paths = [path("eth0", "fe80::2", 1), path("eth0", "fe80::3", 1)];
        assert_eq!(
            changes("fd00::1", "fd00::2", &paths).unwrap(),
            [
                "net.ipv6.fib_multipath_hash_policy = 1",
                "net.ipv6.conf.eth0.ignore_routes_with_linkdown = 1",
                "fd00::2/128 unreachable without its route",
                "address fd00::1/128 on link lo",
                "route to fd00::2/128 via fe80::2 link eth0 weight 1 \
                 via fe80::3 link eth0 weight 1 congctl cubic",
            ]
        );
    }

    #[test]
    fn what_cannot_work_is_refused() {
        let good = [path("eth0", "10.1.0.2", 1)];
        for (own, peer) in [("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "fd00::2")] {
            assert!(matches!(changes(own, peer, &good), Err(MultichannelError::Addresses { .. })));
        }
        for (own, peer) in
            [("127.0.0.1", "10.0.0.2"), ("10.0.0.1", "224.0.0.1"), ("fe80::1", "fd00::2"), ("fd00::1", "::")]
        {
            assert!(matches!(changes(own, peer, &good), Err(MultichannelError::Unusable(_))));
        }
        assert!(matches!(changes("10.0.0.1", "10.0.0.2", &[]), Err(MultichannelError::NoPath { .. })));
        for weight in [0, 257] {
            let paths = [path("eth0", "10.1.0.2", weight)];
            assert!(matches!(changes("10.0.0.1", "10.0.0.2", &paths), Err(MultichannelError::Weight { .. })));
        }
        assert!(matches!(changes("fd00::1", "fd00::2", &good), Err(MultichannelError::Gateway { .. })));
    }
}
