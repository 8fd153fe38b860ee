//! The TCP connections to a peer: which link each goes over, and what has arrived at its other end.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use netlink_packet_core::NLM_F_DUMP;
use netlink_packet_route::route::{RouteAttribute, RouteFlags};
use netlink_packet_sock_diag::constants::IPPROTO_TCP;
use netlink_packet_sock_diag::inet::nlas::{Nla, TcpInfo};
use netlink_packet_sock_diag::inet::{InetResponse, SocketId};
use rustix::io::Errno;

use crate::Error;
use crate::network::Network;
use crate::request::collect;
use crate::route::{link_of, route_message};

/// What the kernel takes for "any connection with these addresses and ports" (`INET_DIAG_NOCOOKIE`).
const ANY_COOKIE: [u8; 8] = [0xff; 8];

/// A TCP connection, from this host to another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// This end.
    pub source: SocketAddr,
    /// The other end.
    pub destination: SocketAddr,
}

/// What the kernel counts of a connection since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowCounters {
    /// Bytes sent, those that were sent again included, headers not (`tcpi_bytes_sent`). Linux before 4.19 does
    /// not count them.
    pub sent_bytes: u64,
    /// Bytes that the other end has confirmed (`tcpi_bytes_acked`).
    pub acknowledged_bytes: u64,
    /// Segments with data sent, those that were sent again included (`tcpi_data_segs_out`).
    pub sent_segments: u32,
    /// Segments sent more than once (`tcpi_total_retrans`).
    pub retransmitted_segments: u32,
    /// Segments sent that the other end has not confirmed yet (`tcpi_unacked`).
    pub unacknowledged_segments: u32,
    /// Time there and back in µs, smoothed (`tcpi_rtt`); 0 until it is known.
    pub round_trip_us: u32,
    /// The least of it in the last five minutes (`tcpi_min_rtt`); the largest number until it is known.
    pub round_trip_least_us: u32,
}

impl Flow {
    /// Link-local addresses are the same on every link, so they carry the link's index.
    pub(crate) fn of(id: &SocketId) -> Self {
        let end = |address: IpAddr, port| match address {
            IpAddr::V6(address) if address.is_unicast_link_local() => {
                SocketAddrV6::new(address, port, 0, id.interface_id).into()
            }
            _ => SocketAddr::new(address, port),
        };
        Self {
            source: end(id.source_address, id.source_port),
            destination: end(id.destination_address, id.destination_port),
        }
    }

    /// Index of the only link that it can go over; 0 where any can.
    fn link_index(self) -> u32 {
        if let SocketAddr::V6(source) = self.source { source.scope_id() } else { 0 }
    }
}

impl From<&TcpInfo> for FlowCounters {
    fn from(info: &TcpInfo) -> Self {
        Self {
            sent_bytes: info.bytes_sent,
            acknowledged_bytes: info.bytes_acked,
            sent_segments: info.data_segs_out,
            retransmitted_segments: info.total_retrans,
            unacknowledged_segments: info.unacked,
            round_trip_us: info.rtt,
            round_trip_least_us: info.min_rtt,
        }
    }
}

/// How the kernel leads packets to an address. While it stays the same, each connection there keeps its way.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteState(Vec<RouteAttribute>);

impl Network {
    /// The established connections of this host to `peer`.
    ///
    /// The kernel goes through all connections of the host for it.
    pub async fn flows_to(&self, peer: IpAddr) -> Result<Vec<Flow>, Error> {
        let operation = format!("list the connections to {peer}");
        // The kernel looks only at the version of the addresses in it.
        let any = SocketId { destination_address: peer, ..SocketId::new_v4() };
        let responses = self.sockets.ask(&operation, NLM_F_DUMP, any).await?;
        let ids = responses.into_iter().map(|response| response.header.socket_id);
        Ok(ids.filter(|id| id.destination_address == peer).map(|id| Flow::of(&id)).collect())
    }

    /// What is counted of a connection; none if there is no such connection any more.
    pub async fn flow_counters(&self, flow: Flow) -> Result<Option<FlowCounters>, Error> {
        let Flow { source, destination } = flow;
        let operation = format!("read the connection from {source} to {destination}");
        let id = SocketId {
            source_port: source.port(),
            destination_port: destination.port(),
            source_address: source.ip(),
            destination_address: destination.ip(),
            interface_id: flow.link_index(),
            cookie: ANY_COOKIE,
        };
        match self.sockets.ask(&operation, 0, id).await {
            Ok(responses) => Ok(responses.first().and_then(tcp_info).map(FlowCounters::from)),
            Err(error) if error.errno() == Some(Errno::NOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How packets to `destination` are led now, for all connections at once (since Linux 4.13).
    pub async fn route_state(&self, destination: IpAddr) -> Result<RouteState, Error> {
        let operation = format!("read the route to {destination}");
        let mut request = route_message(destination.into(), &operation)?;
        request.header.flags = RouteFlags::FibMatch;
        let leads = |attribute: &RouteAttribute| {
            use RouteAttribute::{Gateway, MultiPath, Oif, Via};
            matches!(attribute, Gateway(_) | MultiPath(_) | Oif(_) | Via(_))
        };
        match collect(&operation, || self.netlink.route().get(request.clone()).execute()).await {
            Ok(messages) => {
                let attributes = messages.into_iter().flat_map(|message| message.attributes);
                Ok(RouteState(attributes.filter(leads).collect()))
            }
            Err(error) if matches!(error.errno(), Some(Errno::NETUNREACH | Errno::HOSTUNREACH)) => {
                Ok(RouteState(vec![]))
            }
            Err(error) => Err(error),
        }
    }

    /// For each connection the link that the route leads its packets over; none if there is no route.
    ///
    /// On a multipath route, the kernel chooses the way by a hash of addresses and ports
    /// (`fib_multipath_hash_policy=1`), for this question (since Linux 4.18) just as for the packets. But
    /// a connection that was made before it had a port, as by a plain connect(2), goes another way until
    /// the route next changes (seen with Linux 6.18).
    pub async fn links_of_flows(&self, flows: &[Flow]) -> Result<Vec<Option<String>>, Error> {
        let names = self.link_names().await?;
        let mut links = Vec::with_capacity(flows.len());
        for flow in flows {
            links.push(self.link_of_flow(*flow, &names).await?);
        }
        Ok(links)
    }

    async fn link_of_flow(&self, flow: Flow, names: &HashMap<u32, String>) -> Result<Option<String>, Error> {
        if flow.link_index() != 0 {
            return Ok(names.get(&flow.link_index()).cloned());
        }
        let Flow { source, destination } = flow;
        let operation = format!("find the route from {source} to {destination}");
        let mut request = route_message(destination.ip().into(), &operation)?;
        request.header.source_prefix_length = request.header.destination_prefix_length;
        request.attributes.extend([
            RouteAttribute::Source(source.ip().into()),
            RouteAttribute::IpProto(IPPROTO_TCP),
            RouteAttribute::Sport(source.port()),
            RouteAttribute::Dport(destination.port()),
        ]);
        match collect(&operation, || self.netlink.route().get(request.clone()).execute()).await {
            Ok(messages) => Ok(messages.first().and_then(|message| link_of(&message.attributes, names))),
            Err(error) if matches!(error.errno(), Some(Errno::NETUNREACH | Errno::HOSTUNREACH)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

pub(crate) fn tcp_info(response: &InetResponse) -> Option<&TcpInfo> {
    response.nlas.iter().find_map(|nla| match nla {
        Nla::TcpInfo(info) => Some(info),
        _ => None,
    })
}
