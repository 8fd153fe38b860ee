//! Whether a route between the hosts' migration addresses can go over the paths.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::host::facts::{HostFacts, NoMigrationAddress};
use crate::paths::path::{Path, carries_route};

/// Why nothing can be routed between the hosts' migration addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoRoute {
    /// These hosts have none.
    NoAddress(Vec<WithoutAddress>),
    /// Both have this one.
    SameAddress {
        /// Names of the hosts.
        hosts: [String; 2],
        /// The address.
        address: IpAddr,
    },
    /// They are of different IP versions.
    DifferentVersions {
        /// Names of the hosts, each with its address.
        hosts: [(String, IpAddr); 2],
    },
    /// A route to one would take away what is meant for a subnet.
    WithinSubnet {
        /// The address.
        address: IpAddr,
        /// The subnet.
        subnet: IpNet,
        /// Name of the other host, which is in that subnet.
        host: String,
    },
    /// No path has IPv6, which this address needs.
    NoIpv6 {
        /// The address.
        address: IpAddr,
    },
}

/// A host without a migration address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WithoutAddress {
    host: String,
    why: Option<NoMigrationAddress>,
}

/// Why nothing can be routed between the hosts' migration addresses over these paths; nothing where it can.
pub(crate) fn no_route(source: &HostFacts, target: &HostFacts, paths: &[Path]) -> Option<NoRoute> {
    let hosts = [source, target];
    let (Some(own), Some(peer)) = (source.migration_address, target.migration_address) else {
        let without = hosts.into_iter().filter(|host| host.migration_address.is_none());
        return Some(NoRoute::NoAddress(without.map(WithoutAddress::of).collect()));
    };
    if own == peer {
        return Some(NoRoute::SameAddress { hosts: hosts.map(|host| host.name.clone()), address: own });
    }
    if own.is_ipv4() != peer.is_ipv4() {
        let hosts = [(source.name.clone(), own), (target.name.clone(), peer)];
        return Some(NoRoute::DifferentVersions { hosts });
    }
    let no_ipv6 = || {
        let is_routable = paths.iter().any(|path| carries_route(path, own));
        (!is_routable).then_some(NoRoute::NoIpv6 { address: own })
    };
    within_subnet(own, target).or_else(|| within_subnet(peer, source)).or_else(no_ipv6)
}

fn within_subnet(address: IpAddr, host: &HostFacts) -> Option<NoRoute> {
    let subnets = host.links.iter().chain(&host.management_links).flat_map(|link| &link.addresses);
    let subnet = subnets.filter(|subnet| subnet.contains(&address)).map(IpNet::trunc).min()?;
    Some(NoRoute::WithinSubnet { address, subnet, host: host.name.clone() })
}

impl WithoutAddress {
    fn of(host: &HostFacts) -> Self {
        Self { host: host.name.clone(), why: host.no_migration_address.clone() }
    }
}

impl fmt::Display for NoRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAddress(hosts) => {
                let words: Vec<String> = hosts.iter().map(ToString::to_string).collect();
                f.write_str(&words.join(", "))
            }
            Self::SameAddress { hosts: [one, other], address } => write!(
                f,
                "{one} and {other} have the same migration address {address}; set another migration_address \
                on one of them"
            ),
            Self::DifferentVersions { hosts: [(source, own), (target, peer)] } => write!(
                f,
                "the migration addresses of {source} ({own}) and {target} ({peer}) are of different IP versions; set \
                 migration_address to the same version on both, or on neither"
            ),
            Self::WithinSubnet { address, subnet, host } => write!(
                f,
                "the migration address {address} is within {subnet} of {host}; set migration_address to a \
                free private address"
            ),
            Self::NoIpv6 { address } => write!(
                f,
                "no path has IPv6, which the migration address {address} needs; give both hosts a private \
                IPv4 address as \
                 migration_address"
            ),
        }
    }
}

impl fmt::Display for WithoutAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, why } = self;
        match why {
            Some(why) => write!(f, "on {host} {why}; set it to a free private address in its agent.toml"),
            None => write!(f, "no migration_address is configured on {host}"),
        }
    }
}
