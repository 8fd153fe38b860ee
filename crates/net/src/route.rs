//! Routes: Drainpipe's own, and the way the kernel would take.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteProtocol,
    RouteType, RouteVia,
};
use rtnetlink::{RouteMessageBuilder, RouteNextHopBuilder};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::address::LOOPBACK;
use crate::error::Error;
use crate::network::Network;
use crate::request::{collect, execute};
use crate::route_attributes::{NextHop, ROUTE_PROTOCOL, RouteAttributes, WEIGHT_MAX};
use crate::undo::{Before, Undo};

/// The way that the kernel takes to an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteInfo {
    /// Name of the link.
    pub link: String,
    /// The neighbour who takes the packets; none if the address is on the link itself.
    pub gateway: Option<IpAddr>,
    /// The address that the host's packets carry.
    pub source: Option<IpAddr>,
}

/// A route in the main table.
struct Route {
    protocol: u8,
    /// Its next hops are sorted; without those that have no gateway, which Drainpipe never makes.
    way: RouteAttributes,
}

impl Route {
    fn is_ours(&self) -> bool {
        self.protocol == ROUTE_PROTOCOL
    }
}

impl Network {
    /// The way that the kernel would take to `address` now; none if there is none.
    ///
    /// On a multipath route, this is the way of one flow; other flows may take another.
    pub async fn route_to(&self, address: IpAddr) -> Result<Option<RouteInfo>, Error> {
        let operation = format!("find the route to {address}");
        let request = route_message(IpNet::from(address), &operation)?;
        let answers = collect(&operation, || self.netlink.route().get(request.clone()).execute()).await;
        let message = match answers {
            Ok(messages) => messages.into_iter().next(),
            Err(error) if matches!(error.errno(), Some(Errno::NETUNREACH | Errno::HOSTUNREACH)) => None,
            Err(error) => return Err(error),
        };
        let Some(message) = message else {
            return Ok(None);
        };
        let names = self.link_names().await?;
        Ok(link_of(&message.attributes, &names).map(|link| RouteInfo {
            link,
            gateway: gateway_of(&message.attributes),
            source: source_of(&message.attributes),
        }))
    }

    /// The most specific destination of the main table that `address` belongs to; default routes,
    /// Drainpipe's own, and what the kernel makes of an address on `lo` do not count.
    pub(crate) async fn routed_subnet_of(&self, address: IpAddr) -> Result<Option<IpNet>, Error> {
        let loopback = self.link_message(LOOPBACK).await?.header.index;
        let messages = self.main_routes(IpNet::from(address)).await?;
        let covering = messages.iter().filter_map(|message| {
            let destination = destination_of(message).filter(|net| net.contains(&address))?;
            let is_ours = u8::from(message.header.protocol) == ROUTE_PROTOCOL;
            let of_loopback = message.attributes.contains(&RouteAttribute::Oif(loopback))
                && message.header.protocol == RouteProtocol::Kernel;
            (!is_ours && !of_loopback && destination.prefix_len() > 0).then_some(destination)
        });
        Ok(covering.max_by_key(IpNet::prefix_len))
    }

    /// Addresses to which the main table has a route of their own that is not Drainpipe's, and the numbers of these routes'
    /// protocols.
    pub async fn foreign_host_routes(&self) -> Result<Vec<(IpAddr, u8)>, Error> {
        let mut found = Vec::new();
        for of_any in [IpNet::from(IpAddr::from([0; 4])), IpNet::from(IpAddr::from([0; 16]))] {
            for message in self.main_routes(of_any).await? {
                let protocol = u8::from(message.header.protocol);
                let destination =
                    destination_of(&message).filter(|net| net.prefix_len() == net.max_prefix_len());
                let is_foreign = protocol != ROUTE_PROTOCOL && !is_unreachable(&message);
                found.extend(destination.filter(|_| is_foreign).map(|net| (net.addr(), protocol)));
            }
        }
        Ok(found)
    }

    pub(crate) async fn observe_route(
        &self,
        destination: IpNet,
        way: &RouteAttributes,
    ) -> Result<Before, Error> {
        check(destination, way)?;
        for hop in &way.next_hops {
            self.index_of_up_link(&hop.link).await?;
        }
        let mut before = Before::Absent;
        for route in self.routes(destination).await? {
            if !route.is_ours() {
                return Err(Error::RouteTaken { destination, protocol: route.protocol });
            }
            before = Before::Route(route.way);
        }
        Ok(before)
    }

    pub(crate) async fn apply_route(&self, destination: IpNet, way: &RouteAttributes) -> Result<(), Error> {
        let before = self.observe_route(destination, way).await?;
        if before == Before::Route(way.sorted()) {
            return Ok(());
        }
        self.set_route(destination, way, before != Before::Absent).await
    }

    pub(crate) async fn remove_route(&self, destination: IpNet) -> Result<Undo, Error> {
        let routes = self.routes(destination).await?;
        if !routes.iter().any(Route::is_ours) {
            return Ok(routes.first().map_or(Undo::NothingToDo, left_alone));
        }
        let operation = format!("remove the route to {destination}");
        let mut message = route_message(destination, &operation)?;
        message.header.protocol = ROUTE_PROTOCOL.into();
        match execute(&operation, self.netlink.route().del(message).execute()).await {
            Ok(()) => Ok(Undo::Undone),
            Err(error) if error.errno() == Some(Errno::SRCH) => Ok(Undo::NothingToDo),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn restore_route(
        &self,
        destination: IpNet,
        way: &RouteAttributes,
    ) -> Result<Undo, Error> {
        let routes = self.routes(destination).await?;
        let Some(ours) = routes.iter().find(|route| route.is_ours()) else {
            return Ok(routes
                .first()
                .map_or_else(|| Undo::LeftAlone("the route has been removed".to_owned()), left_alone));
        };
        if ours.way == way.sorted() {
            return Ok(Undo::NothingToDo);
        }
        self.set_route(destination, way, true).await?;
        Ok(Undo::Undone)
    }

    async fn set_route(&self, destination: IpNet, way: &RouteAttributes, replace: bool) -> Result<(), Error> {
        let operation = format!("set the route to {destination}");
        let mut message = route_message(destination, &operation)?;
        message.header.protocol = ROUTE_PROTOCOL.into();
        if let Some(source) = way.source {
            message.attributes.push(RouteAttribute::PrefSource(source.into()));
        }
        if let Some(name) = &way.congestion_control {
            message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::CcAlgo(name.clone())]));
        }
        message.attributes.extend(self.next_hop_attributes(destination, &way.next_hops).await?);
        let request = self.netlink.route().add(message);
        let request = if replace { request.replace() } else { request };
        match execute(&operation, request.execute()).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.explain(destination, way.source, error).await?),
        }
    }

    /// Says what the kernel's errors mean for a route.
    ///
    /// A source that is not the host's own is EINVAL. Of next hops IPv4 says ENETUNREACH, IPv6
    /// EHOSTUNREACH or EINVAL.
    async fn explain(
        &self,
        destination: IpNet,
        source: Option<IpAddr>,
        error: Error,
    ) -> Result<Error, Error> {
        let errno = error.errno();
        if let (Some(Errno::INVAL), Some(source)) = (errno, source)
            && self.holder_of(IpNet::from(source)).await?.is_none()
        {
            return Ok(Error::InvalidRoute {
                destination,
                reason: "its source is not an address of this host",
            });
        }
        let about_next_hops = matches!(errno, Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::INVAL));
        Ok(match error {
            Error::Kernel { source, .. } if about_next_hops => {
                Error::GatewayUnreachable { destination, source }
            }
            error => error,
        })
    }

    /// One next hop makes an ordinary route: IPv6 would make one of it anyway, and then it would
    /// not read back as it was written.
    async fn next_hop_attributes(
        &self,
        destination: IpNet,
        next_hops: &[NextHop],
    ) -> Result<Vec<RouteAttribute>, Error> {
        let mut hops = Vec::with_capacity(next_hops.len());
        for hop in next_hops {
            hops.push(self.next_hop(destination, hop).await?);
        }
        match <[RouteNextHop; 1]>::try_from(hops) {
            Ok([mut hop]) => {
                hop.attributes.push(RouteAttribute::Oif(hop.interface_index));
                Ok(hop.attributes)
            }
            Err(hops) => Ok(vec![RouteAttribute::MultiPath(hops)]),
        }
    }

    async fn next_hop(&self, destination: IpNet, hop: &NextHop) -> Result<RouteNextHop, Error> {
        let invalid = |reason| Error::InvalidRoute { destination, reason };
        let weight_less_one = u8::try_from(hop.weight.wrapping_sub(1)).map_err(|_| invalid(WEIGHT_REASON))?;
        let builder = match destination {
            IpNet::V4(_) => RouteNextHopBuilder::new_ipv4(),
            IpNet::V6(_) => RouteNextHopBuilder::new_ipv6(),
        };
        Ok(builder
            .interface(self.index_of_up_link(&hop.link).await?)
            .weight(weight_less_one)
            .via(hop.gateway)
            .map_err(|_| invalid(GATEWAY_REASON))?
            .build())
    }

    /// The routes of the main table, of the destination's IP version.
    async fn main_routes(&self, destination: IpNet) -> Result<Vec<RouteMessage>, Error> {
        let request = match destination {
            IpNet::V4(_) => RouteMessageBuilder::<Ipv4Addr>::new().build(),
            IpNet::V6(_) => RouteMessageBuilder::<Ipv6Addr>::new().build(),
        };
        let mut messages =
            collect("list the routes", || self.netlink.route().get(request.clone()).execute()).await?;
        messages.retain(|message| message.header.table == RouteHeader::RT_TABLE_MAIN);
        Ok(messages)
    }

    /// Those of them that are to exactly this destination.
    pub(crate) async fn messages_to(&self, destination: IpNet) -> Result<Vec<RouteMessage>, Error> {
        let mut messages = self.main_routes(destination).await?;
        messages.retain(|message| destination_of(message) == Some(destination));
        Ok(messages)
    }

    /// Those of them that lead there, and those of others.
    async fn routes(&self, destination: IpNet) -> Result<Vec<Route>, Error> {
        let mut messages = self.messages_to(destination).await?;
        messages.retain(|message| !is_unreachable(message));
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let names = self.link_names().await?;
        Ok(messages.iter().map(|message| route_from(message, &names)).collect())
    }
}

const WEIGHT_REASON: &str = "a weight is from 1 to 256";
const GATEWAY_REASON: &str = "an IPv6 destination needs IPv6 gateways";

fn check(destination: IpNet, way: &RouteAttributes) -> Result<(), Error> {
    let RouteAttributes { source, next_hops, .. } = way;
    let is_ipv6 = destination.addr().is_ipv6();
    let reason = if destination != destination.trunc() {
        "its destination has bits set beyond the prefix length"
    } else if next_hops.is_empty() {
        "it needs at least one next hop"
    } else if source.is_some_and(|source| source.is_ipv6() != is_ipv6) {
        "source and destination are of different IP versions"
    } else if next_hops.iter().any(|hop| !(1..=WEIGHT_MAX).contains(&hop.weight)) {
        WEIGHT_REASON
    } else if is_ipv6 && next_hops.iter().any(|hop| hop.gateway.is_ipv4()) {
        GATEWAY_REASON
    } else {
        return Ok(());
    };
    Err(Error::InvalidRoute { destination, reason })
}

fn left_alone(foreign: &Route) -> Undo {
    Undo::LeftAlone(format!(
        "the route to that destination is not Drainpipe's (protocol {})",
        foreign.protocol
    ))
}

/// Whether it is an unreachable route that Drainpipe has made.
pub(crate) fn is_unreachable(message: &RouteMessage) -> bool {
    u8::from(message.header.protocol) == ROUTE_PROTOCOL && message.header.kind == RouteType::Unreachable
}

pub(crate) fn route_message(destination: IpNet, operation: &str) -> Result<RouteMessage, Error> {
    RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(destination.addr(), destination.prefix_len())
        .map(RouteMessageBuilder::build)
        .map_err(|error| Error::Protocol { operation: operation.to_owned(), detail: error.to_string() })
}

fn route_from(message: &RouteMessage, names: &HashMap<u32, String>) -> Route {
    let multipath = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::MultiPath(hops) => Some(hops),
        _ => None,
    });
    let next_hops: Vec<NextHop> = match multipath {
        Some(hops) => hops
            .iter()
            .filter_map(|hop| {
                Some(NextHop {
                    link: names.get(&hop.interface_index)?.clone(),
                    gateway: gateway_of(&hop.attributes)?,
                    weight: u16::from(hop.hops) + 1,
                })
            })
            .collect(),
        None => link_of(&message.attributes, names)
            .zip(gateway_of(&message.attributes))
            .map(|(link, gateway)| NextHop { link, gateway, weight: 1 })
            .into_iter()
            .collect(),
    };
    let way = RouteAttributes {
        source: source_of(&message.attributes),
        next_hops,
        congestion_control: congestion_control_of(&message.attributes),
    };
    Route { protocol: message.header.protocol.into(), way: way.sorted() }
}

fn destination_of(message: &RouteMessage) -> Option<IpNet> {
    let address = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(address) => ip(address),
        _ => None,
    })?;
    IpNet::new(address, message.header.destination_prefix_length).ok()
}

pub(crate) fn link_of(attributes: &[RouteAttribute], names: &HashMap<u32, String>) -> Option<String> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => names.get(index).cloned(),
        _ => None,
    })
}

fn gateway_of(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(address) => ip(address),
        RouteAttribute::Via(RouteVia::Inet(address)) => Some(IpAddr::V4(*address)),
        RouteAttribute::Via(RouteVia::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}

fn source_of(attributes: &[RouteAttribute]) -> Option<IpAddr> {
    attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::PrefSource(address) => ip(address),
        _ => None,
    })
}

fn congestion_control_of(attributes: &[RouteAttribute]) -> Option<String> {
    let metrics = attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Metrics(metrics) => Some(metrics),
        _ => None,
    })?;
    metrics.iter().find_map(|metric| match metric {
        RouteMetric::CcAlgo(name) => Some(name.clone()),
        _ => None,
    })
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some(IpAddr::V4(*address)),
        RouteAddress::Inet6(address) => Some(IpAddr::V6(*address)),
        _ => None,
    }
}
