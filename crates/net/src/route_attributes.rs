//! What a route of Drainpipe's says.

use std::fmt;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// The route protocol number that marks Drainpipe's routes: `ip route` shows `proto 215`.
///
/// Not assigned in linux/rtnetlink.h nor in iproute2's `rt_protos`. With a line `215 drainpipe` in
/// a file of `/etc/iproute2/rt_protos.d`, `ip route` shows `proto drainpipe`.
pub const ROUTE_PROTOCOL: u8 = 215;

/// The kernel keeps the weight of a next hop, less one, in a byte.
pub(crate) const WEIGHT_MAX: u16 = 256;

/// How a route leads to its destination.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteAttributes {
    /// The address that the host's packets carry, if they were not given another.
    pub source: Option<IpAddr>,
    /// At least one.
    pub next_hops: Vec<NextHop>,
    /// What TCP connections that go this way use in place of the host's default, by a name of
    /// `net.ipv4.tcp_available_congestion_control`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub congestion_control: Option<String>,
}

impl RouteAttributes {
    /// In the form in which routes are read.
    pub(crate) fn sorted(&self) -> Self {
        let mut sorted = self.clone();
        // A route with one next hop has no weights.
        if let [only] = sorted.next_hops.as_mut_slice() {
            only.weight = 1;
        }
        sorted.next_hops.sort();
        sorted
    }
}

/// One way over one link.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NextHop {
    /// Name of the link.
    pub link: String,
    /// The neighbour on that link who takes the packets. May be IPv6 (also link-local) where the
    /// destination is IPv4, but not the reverse.
    pub gateway: IpAddr,
    /// Share of the traffic, against the sum of all weights: 1 to 256.
    pub weight: u16,
}

impl fmt::Display for RouteAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for hop in &self.next_hops {
            write!(f, " via {} link {} weight {}", hop.gateway, hop.link, hop.weight)?;
        }
        match &self.congestion_control {
            Some(name) => write!(f, " congctl {name}"),
            None => Ok(()),
        }
    }
}
