//! Sockets on one link: its own addresses, including link-local ones, which mean nothing without the link.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use drainpipe_engine::problem::Problem;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use rustix::net::{AddressFamily, SocketType, netdevice, socket};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::UdpSocket;

use crate::host::Host;
use crate::host::ports;

/// IP's header and UDP's.
const HEADERS_V4_BYTES: u16 = 20 + 8;
pub(crate) const HEADERS_V6_BYTES: u16 = 40 + 8;

/// How much of a UDP packet to or from this address is headers.
pub(crate) fn headers_bytes(address: SocketAddr) -> u16 {
    if address.is_ipv4() { HEADERS_V4_BYTES } else { HEADERS_V6_BYTES }
}

/// Not even the path's MTU that the kernel has learned may cut a packet of this socket, whose addresses are like this
/// one.
pub(crate) fn keep_whole(socket: &UdpSocket, address: IpAddr) -> io::Result<()> {
    match address {
        IpAddr::V4(_) => set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE)?,
        IpAddr::V6(_) => set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::PROBE)?,
    }
    Ok(())
}

/// Has the kernel send no packet in parts and refuse one that is larger than what it knows to pass the path, as for TCP.
/// What a router on the way has said of that counts, what a switch drops without a word does not.
pub(crate) fn keep_whole_like_tcp(socket: &UdpSocket, address: IpAddr) -> io::Result<()> {
    match address {
        IpAddr::V4(_) => set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::DO)?,
        IpAddr::V6(_) => set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::DO)?,
    }
    Ok(())
}

/// Port `port` of an address on this host's `link`, or of one that is reached over it.
pub(crate) fn on_link(link: &str, address: IpAddr, port: u16) -> io::Result<SocketAddr> {
    match address {
        IpAddr::V6(address) if address.is_unicast_link_local() => {
            Ok(SocketAddrV6::new(address, port, 0, index_of(link)?).into())
        }
        address => Ok(SocketAddr::new(address, port)),
    }
}

fn index_of(link: &str) -> io::Result<u32> {
    // Any socket will do: it says in which network namespace the link is.
    let any = socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
    Ok(netdevice::name_to_index(&any, link)?)
}

/// A UDP socket that sends and receives over `link` alone, from `address` there and a port of the
/// migration range.
pub(crate) async fn bind_udp(host: &Host, link: &str, address: IpAddr) -> Result<UdpSocket, Problem> {
    let bind = |port| {
        let bound = ports::unless_in_use(bind_to_link(link, address, port));
        std::future::ready(bound.map_err(|error| {
            Problem::failed(format!("cannot open a port on link {link} at {address}: {error}"))
        }))
    };
    host.ports.take(bind).await
}

/// Whether a socket of [`bind_udp`] is on `link` still. The kernel binds it to the link's number, and gives another to
/// one that is made again.
pub(crate) fn is_on(socket: &UdpSocket, link: &str) -> bool {
    let bound_to = SockRef::from(socket).device();
    bound_to.is_ok_and(|name| name.as_deref() == Some(link.as_bytes()))
}

/// To the link, lest a route over another link makes a dead path look good.
pub(crate) fn bind_to_link(link: &str, address: IpAddr, port: u16) -> io::Result<UdpSocket> {
    let address = on_link(link, address, port)?;
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind_device(Some(link.as_bytes()))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_link_local_addresses_are_given_a_link() {
        let on_loopback = |address: &str| on_link("lo", address.parse().unwrap(), 7).unwrap().to_string();
        assert_eq!(on_loopback("fe80::1"), "[fe80::1%1]:7");
        assert_eq!(on_loopback("fd00::1"), "[fd00::1]:7");
        assert_eq!(on_loopback("10.0.0.1"), "10.0.0.1:7");
        on_link("no-such-link", "fe80::1".parse().unwrap(), 7).unwrap_err();
    }
}
