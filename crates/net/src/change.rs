//! One change of the host's network: observed, applied, undone.
//!
//! The caller writes the [`Change`] and what was there [`Before`] to its journal, and only then applies the change. So
//! after a crash, a reader of the journal can undo it, whether or not it was applied. Several changes are undone in
//! the reverse order of their application.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::network::Network;
use crate::route_attributes::RouteAttributes;
use crate::sysctl;
use crate::undo::{Before, Undo};

/// One change of the host's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "change")]
pub enum Change {
    /// `link` has `address`, usable at once: duplicates of it elsewhere are not looked for.
    Address {
        /// Name of the link.
        link: String,
        /// Address with its prefix length.
        address: IpNet,
    },
    /// Packets to `destination` go over `next_hops`, in proportion to their weights.
    ///
    /// Applying it to a destination that has a route of Drainpipe's already changes that route's
    /// next hops; no packet in between finds no route.
    Route {
        /// Where the route leads.
        destination: IpNet,
        /// How it leads there.
        #[serde(flatten)]
        way: RouteAttributes,
    },
    /// Packets to `destination` go nowhere where it has no other route.
    Unreachable {
        /// Where the route leads that may be lost.
        destination: IpNet,
    },
    /// Nobody but `sources` is answered on a TCP port, and programs on this host.
    OnlyFrom {
        /// The host's address.
        address: IpAddr,
        /// Port on it.
        port: u16,
        /// The sources that are answered.
        sources: Vec<IpAddr>,
    },
    /// A kernel setting below `net.` has `value`.
    Sysctl {
        /// As `sysctl` writes it: `net.ipv4.conf.eth0.forwarding`; dots within a link's name are
        /// slashes: `net.ipv4.conf.eth0/100.forwarding`.
        key: String,
        /// As `sysctl` prints it.
        value: String,
    },
}

impl Network {
    /// What is there now of that which `change` would change.
    ///
    /// Refuses whatever [`Network::apply`] would refuse, so that nothing is journaled in vain.
    pub async fn observe(&self, change: &Change) -> Result<Before, Error> {
        match change {
            Change::Address { link, address } => self.observe_address(link, *address).await,
            Change::Route { destination, way } => self.observe_route(*destination, way).await,
            Change::Unreachable { destination } => self.observe_unreachable(*destination).await,
            // Rules that are there already are an earlier run's.
            Change::OnlyFrom { .. } => Ok(Before::Absent),
            Change::Sysctl { key, .. } => sysctl::observe(key),
        }
    }

    /// Whether `change` is applied, whoever has done so.
    pub async fn is_applied(&self, change: &Change) -> Result<bool, Error> {
        if let Change::OnlyFrom { address, port, .. } = change {
            return self.is_only_from(*address, *port).await;
        }
        let now = self.observe(change).await?;
        Ok(match (change, now) {
            (Change::Address { .. }, now) => now == Before::Address,
            (Change::Route { way, .. }, Before::Route(now)) => now == way.sorted(),
            (Change::Unreachable { .. }, now) => now == Before::Unreachable,
            (Change::Sysctl { value, .. }, Before::Sysctl { value: now }) => now == *value,
            (Change::Route { .. } | Change::Sysctl { .. } | Change::OnlyFrom { .. }, _) => false,
        })
    }

    /// Applies `change`; does nothing if it is applied already.
    pub async fn apply(&self, change: &Change) -> Result<(), Error> {
        match change {
            Change::Address { link, address } => self.apply_address(link, *address).await,
            Change::Route { destination, way } => self.apply_route(*destination, way).await,
            Change::Unreachable { destination } => self.apply_unreachable(*destination).await,
            Change::OnlyFrom { address, port, sources } => {
                self.apply_only_from(*address, *port, sources).await
            }
            Change::Sysctl { key, value } => sysctl::apply(key, value),
        }
    }

    /// Brings back what was there `before`, unless someone else has changed it since.
    ///
    /// Safe to repeat, and safe if `change` was never applied.
    pub async fn undo(&self, change: &Change, before: &Before) -> Result<Undo, Error> {
        match (change, before) {
            (Change::Address { .. }, Before::Address) | (Change::Unreachable { .. }, Before::Unreachable) => {
                Ok(Undo::NothingToDo)
            }
            (Change::Address { link, address }, Before::Absent) => self.remove_address(link, *address).await,
            (Change::Route { destination, .. }, Before::Absent) => self.remove_route(*destination).await,
            (Change::Route { destination, .. }, Before::Route(way)) => {
                self.restore_route(*destination, way).await
            }
            (Change::Unreachable { destination }, Before::Absent) => {
                self.remove_unreachable(*destination).await
            }
            (Change::OnlyFrom { address, port, sources }, Before::Absent) => {
                self.remove_only_from(*address, *port, sources).await
            }
            (Change::Sysctl { key, value }, Before::Sysctl { value: before }) => {
                sysctl::restore(key, value, before)
            }
            _ => Err(Error::RecordMismatch { change: change.to_string(), before: format!("{before:?}") }),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { link, address } => write!(f, "address {address} on link {link}"),
            Self::Route { destination, way } => write!(f, "route to {destination}{way}"),
            Self::Unreachable { destination } => write!(f, "{destination} unreachable without its route"),
            Self::OnlyFrom { address, port, .. } => write!(f, "port {port} of {address} for its peer alone"),
            Self::Sysctl { key, value } => write!(f, "{key} = {value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NextHop, ROUTE_PROTOCOL, ignore_linkdown, packet_size};

    const PAGE: &str = include_str!("../../../docs/reference/kept.md");

    /// What docs/reference/kept.md says about a change.
    fn said_of(change: &Change) -> String {
        match change {
            Change::Address { .. } => "| the migration address on `lo` |".into(),
            Change::Route { .. } => {
                format!("| a route to the other host's migration address, marked `proto {ROUTE_PROTOCOL}`")
            }
            Change::Unreachable { .. } => {
                format!("| an `unreachable` route to the same address, `proto {ROUTE_PROTOCOL}`")
            }
            Change::OnlyFrom { .. } => {
                format!("| `ip rule` entries of priority 1 to 3, protocol {ROUTE_PROTOCOL}")
            }
            Change::Sysctl { key, value } if key.contains(".conf.") => {
                format!("| `{}` = {value}", key.rsplit('.').next().unwrap_or(key))
            }
            Change::Sysctl { key, value } => format!("| `{key}` = {value}"),
        }
    }

    #[test]
    fn the_page_of_what_is_kept_has_every_change_and_how_it_is_put_back() {
        let own: IpAddr = "10.255.0.1".parse().unwrap();
        let hop = NextHop { link: "eth0".into(), gateway: own, weight: 1 };
        let cubic = Some(crate::multichannel::CUBIC);
        let changes = crate::multichannel_changes(own, "10.255.0.2".parse().unwrap(), &[hop], cubic).unwrap();
        let others = [
            ignore_linkdown(own, "eth0"),
            Change::Sysctl { key: packet_size::KEY.into(), value: packet_size::BY_PACE.into() },
            Change::OnlyFrom { address: own, port: 49152, sources: vec![] },
        ];
        for change in changes.iter().chain(&others) {
            let said = said_of(change);
            assert!(PAGE.lines().any(|line| line.starts_with(&said)), "kept.md needs a row of {said}");
        }
        let rows =
            PAGE.split("\n## ").find(|section| section.starts_with("Changes to the host's network")).unwrap();
        let rows = rows.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| change"));
        for row in rows {
            let is_made = changes.iter().chain(&others).any(|change| row.starts_with(&said_of(change)));
            assert!(is_made, "kept.md has a change that nothing makes: {row}");
        }
    }
}
