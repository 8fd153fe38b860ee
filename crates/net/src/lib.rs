//! Links, addresses, routes and kernel settings of a host.
//!
//! Everything here acts in the network namespace of the calling thread, and reads it by
//! netlink: `/sys/class/net` shows the namespace in which sysfs was mounted, which may be
//! another one.
//!
//! - [`Network`] is the connection to the kernel: links, counters, routes, neighbours.
//! - [`Change`] is one thing to change on the host. It is a value, so it can be written to a
//!   journal with what was there [`Before`], and be undone by another process after a crash.
//! - [`tracked_connections`] are those that stateful firewalls go by; another host may be given them.
//! - [`Network::announce`] tells the network where a guest is that may not say so itself.
//! - [`multichannel_changes`] says which changes spread the traffic between two hosts over
//!   all their paths; [`weights`] says how much each path gets.

mod address;
mod announcement;
mod change;
mod conntrack;
mod ended_flows;
mod error;
mod flow;
mod link;
mod multichannel;
mod neighbour;
mod network;
mod only_from;
mod packet_size;
mod placement;
mod rarp;
mod rdma;
mod request;
mod route;
mod route_attributes;
mod rss;
mod socket_statistics;
mod speed;
mod sysctl;
mod undo;
mod unreachable;
mod weights;

pub use announcement::Announced;
pub use change::Change;
pub use conntrack::{
    LISTED_MAX, Loaded, Tracked, forget_tracked, track, tracked_connections, tracked_count, tracked_room,
};
pub use ended_flows::EndedFlows;
pub use error::Error;
pub use flow::{Flow, FlowCounters, RouteState};
pub use link::{Link, LinkCounters, LinkKind, Vlan};
pub use multichannel::{
    MultichannelError, channel_congestion_control, ignore_linkdown, multichannel_changes,
};
pub use neighbour::Neighbour;
pub use network::Network;
pub use packet_size::packets_by_pace;
pub use placement::Placement;
pub use rdma::{RdmaDevice, has_rdma_connections, rdma_devices};
pub use route::RouteInfo;
pub use route_attributes::{NextHop, ROUTE_PROTOCOL, RouteAttributes};
pub use sysctl::has_ipv6;
pub use undo::{Before, Undo};
pub use weights::weights;
