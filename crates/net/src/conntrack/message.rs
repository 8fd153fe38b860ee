//! The messages of `ctnetlink`: `linux/netfilter/nfnetlink_conntrack.h`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use drainpipe_engine::tracked::{TcpEnd, TcpState, TrackedConnection, Transport};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR};
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6};
use rustix::io::Errno;

use super::attribute::{Attributes, aligned, nest, put};

/// The size of `nlmsghdr`.
const HEADER_BYTES: usize = 16;
/// The size of `nfgenmsg`, which follows it.
const FAMILY_BYTES: usize = 4;

/// `NFNL_SUBSYS_CTNETLINK`, with what is asked for.
const NEW: u16 = 1 << 8;
const GET: u16 = (1 << 8) | 1;
const DELETE: u16 = (1 << 8) | 2;

/// For a new entry: it must not exist, and is created.
const EXCLUSIVE_CREATE: u16 = NLM_F_CREATE | NLM_F_EXCL;

const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const PROTOINFO: u16 = 4;
const TIMEOUT: u16 = 7;
const MARK: u16 = 8;
const ZONE: u16 = 18;
const FILTER: u16 = 25;

const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const TUPLE_ZONE: u16 = 3;
const IP_V4: [u16; 2] = [1, 2];
const IP_V6: [u16; 2] = [3, 4];
const PROTO_NUM: u16 = 1;
const PROTO_PORTS: [u16; 2] = [2, 3];

const PROTOINFO_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
const TCP_SCALES: [u16; 2] = [2, 3];
const TCP_FLAGS: [u16; 2] = [4, 5];

const FILTER_ORIG_FLAGS: u16 = 1;

const TCP: u8 = 6;
const UDP: u8 = 17;

const SEEN_REPLY: u32 = 1 << 1;
const ASSURED: u32 = 1 << 2;
const CONFIRMED: u32 = 1 << 3;
/// `IPS_NAT_MASK`.
const TRANSLATED: u32 = 0b11 << 4;
/// To a table of flows, while packets come: then the kernel tells no more of it than that.
const OFFLOADED: u32 = 0b11 << 14;

/// Without it, what the kernel has not seen of a connection's windows, here and in the pause, would make packets invalid.
const LIBERAL: u8 = 1 << 3;

/// State of an offloaded connection, which stands and was used a moment ago.
const ESTABLISHED: u8 = 3;
const OFFLOADED_TIMEOUT_S: u32 = 300;

/// What the kernel says in one message.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Said {
    /// There is this connection.
    Listed(Listed),
    /// The list is complete, or ends as it failed.
    Done(Result<(), Errno>),
    /// It did not do what was asked for by the request of this number.
    Refused(u32, Errno),
    /// It did.
    Acknowledged,
}

/// A connection in the kernel's list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Listed {
    /// One that another host could track.
    Plain(TrackedConnection),
    /// The host translates an address of it. Its ends, before that.
    Translated(IpAddr, IpAddr),
    /// Anything else. Its ends.
    Other(IpAddr, IpAddr),
}

impl Listed {
    /// The side that began it, and the other side.
    pub(super) fn ends(&self) -> (IpAddr, IpAddr) {
        match self {
            Self::Plain(connection) => (connection.source.ip(), connection.destination.ip()),
            Self::Translated(source, destination) | Self::Other(source, destination) => {
                (*source, *destination)
            }
        }
    }
}

/// Asks for those with this address on one side; kernels before 5.8 list all of its family.
pub(super) fn list_request(address: IpAddr, is_source: bool) -> Vec<u8> {
    let side = usize::from(!is_source);
    let mut bytes = vec![];
    let header = Header { kind: GET, flags: NLM_F_REQUEST | NLM_F_DUMP, number: 0 };
    message(&mut bytes, header, address, |bytes| {
        // The kernel (seen with 6.18) leaves out just those IPv6 addresses that are asked for: all of them are listed.
        if address.is_ipv6() {
            return;
        }
        nest(bytes, TUPLE_ORIG, |bytes| nest(bytes, TUPLE_IP, |bytes| put_address(bytes, side, address)));
        nest(bytes, FILTER, |bytes| put(bytes, FILTER_ORIG_FLAGS, &(1_u32 << side).to_ne_bytes()));
    });
    bytes
}

/// Appends a request to track it, unless it is tracked.
pub(super) fn put_new(bytes: &mut Vec<u8>, number: u32, connection: &TrackedConnection) {
    let header = Header { kind: NEW, flags: NLM_F_REQUEST | EXCLUSIVE_CREATE, number };
    message(bytes, header, connection.source.ip(), |bytes| {
        put_tuple(bytes, TUPLE_ORIG, connection, [connection.source, connection.destination]);
        put_tuple(bytes, TUPLE_REPLY, connection, [connection.destination, connection.source]);
        put(bytes, STATUS, &status(connection).to_be_bytes());
        put(bytes, TIMEOUT, &connection.timeout_s.to_be_bytes());
        if let Transport::Tcp(state) = connection.transport {
            nest(bytes, PROTOINFO, |bytes| nest(bytes, PROTOINFO_TCP, |bytes| put_tcp(bytes, state)));
        }
        if connection.mark != 0 {
            put(bytes, MARK, &connection.mark.to_be_bytes());
        }
        put_zone(bytes, connection);
    });
}

/// Appends a request to forget it.
pub(super) fn put_delete(bytes: &mut Vec<u8>, number: u32, connection: &TrackedConnection) {
    let header = Header { kind: DELETE, flags: NLM_F_REQUEST, number };
    message(bytes, header, connection.source.ip(), |bytes| {
        put_tuple(bytes, TUPLE_ORIG, connection, [connection.source, connection.destination]);
        put_zone(bytes, connection);
    });
}

/// What the kernel says in a datagram; what is not understood of it is left out.
pub(super) fn read(mut datagram: &[u8]) -> Vec<Said> {
    let mut said = vec![];
    while let Some((header, body, rest)) = split(datagram) {
        said.extend(read_one(header, body));
        datagram = rest;
    }
    said
}

/// What is in front of a message, but for its length.
#[derive(Debug, Clone, Copy)]
struct Header {
    kind: u16,
    flags: u16,
    /// Answers have it too.
    number: u32,
}

fn message(bytes: &mut Vec<u8>, header: Header, family_of: IpAddr, body: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&header.kind.to_ne_bytes());
    bytes.extend_from_slice(&header.flags.to_ne_bytes());
    bytes.extend_from_slice(&header.number.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let family = if family_of.is_ipv4() { AF_INET } else { AF_INET6 };
    bytes.extend_from_slice(&[family, 0, 0, 0]);
    body(bytes);
    let length = u32::try_from(bytes.len() - start).expect("what is written here are numbers and addresses");
    bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
}

fn put_address(bytes: &mut Vec<u8>, side: usize, address: IpAddr) {
    match address {
        IpAddr::V4(address) => put(bytes, IP_V4[side], &address.octets()),
        IpAddr::V6(address) => put(bytes, IP_V6[side], &address.octets()),
    }
}

fn put_tuple(bytes: &mut Vec<u8>, kind: u16, connection: &TrackedConnection, ends: [SocketAddr; 2]) {
    let protocol = match connection.transport {
        Transport::Udp => UDP,
        Transport::Tcp(_) => TCP,
    };
    nest(bytes, kind, |bytes| {
        nest(bytes, TUPLE_IP, |bytes| {
            for (side, end) in ends.iter().enumerate() {
                put_address(bytes, side, end.ip());
            }
        });
        nest(bytes, TUPLE_PROTO, |bytes| {
            put(bytes, PROTO_NUM, &[protocol]);
            for (kind, end) in PROTO_PORTS.into_iter().zip(ends) {
                put(bytes, kind, &end.port().to_be_bytes());
            }
        });
    });
}

fn put_tcp(bytes: &mut Vec<u8>, state: TcpState) {
    put(bytes, TCP_STATE, &[state.state]);
    let ends = [state.source, state.destination];
    for (kind, end) in TCP_SCALES.into_iter().zip(ends) {
        put(bytes, kind, &[end.window_scale]);
    }
    for (kind, end) in TCP_FLAGS.into_iter().zip(ends) {
        let flags = end.flags | LIBERAL;
        // And which of them are meant.
        put(bytes, kind, &[flags, flags]);
    }
}

fn put_zone(bytes: &mut Vec<u8>, connection: &TrackedConnection) {
    if connection.zone != 0 {
        put(bytes, ZONE, &connection.zone.to_be_bytes());
    }
}

fn status(connection: &TrackedConnection) -> u32 {
    let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    CONFIRMED | bit(connection.is_answered, SEEN_REPLY) | bit(connection.is_assured, ASSURED)
}

/// The header of the first message, its body, and what follows it.
fn split(datagram: &[u8]) -> Option<(Header, &[u8], &[u8])> {
    let (length, rest) = datagram.split_first_chunk()?;
    let (kind, rest) = rest.split_first_chunk()?;
    let (flags, rest) = rest.split_first_chunk()?;
    let (number, _) = rest.split_first_chunk()?;
    let header = Header {
        kind: u16::from_ne_bytes(*kind),
        flags: u16::from_ne_bytes(*flags),
        number: u32::from_ne_bytes(*number),
    };
    let length = usize::try_from(u32::from_ne_bytes(*length)).ok()?;
    let body = datagram.get(HEADER_BYTES..length)?;
    Some((header, body, datagram.get(aligned(length)..).unwrap_or_default()))
}

fn read_one(header: Header, body: &[u8]) -> Option<Said> {
    match header.kind {
        NEW => read_connection(Attributes(body.get(FAMILY_BYTES..)?)).map(Said::Listed),
        NLMSG_DONE => Some(Said::Done(errno(body).map_or(Ok(()), Err))),
        NLMSG_ERROR => {
            Some(errno(body).map_or(Said::Acknowledged, |error| Said::Refused(header.number, error)))
        }
        _ => None,
    }
}

/// The number in an error or at the end of a list; none in other messages.
fn errno(body: &[u8]) -> Option<Errno> {
    let number = i32::from_ne_bytes(*body.first_chunk()?).checked_neg()?;
    (1..4096).contains(&number).then(|| Errno::from_raw_os_error(number))
}

fn read_connection(attributes: Attributes<'_>) -> Option<Listed> {
    let tuple = attributes.within(TUPLE_ORIG)?;
    let (source, destination) = read_addresses(tuple)?;
    let other = Listed::Other(source, destination);
    let status = u32::from_be_bytes(attributes.array(STATUS)?);
    // Its zone is that of one direction alone.
    if tuple.value(TUPLE_ZONE).is_some() {
        return Some(other);
    }
    let Some((protocol, ends)) = read_ends(tuple) else { return Some(other) };
    let back = attributes.within(TUPLE_REPLY).and_then(read_ends);
    if status & TRANSLATED != 0 || back != Some((protocol, [ends[1], ends[0]])) {
        return Some(Listed::Translated(source, destination));
    }
    let transport = match protocol {
        UDP => Some(Transport::Udp),
        TCP => read_tcp(attributes, status).map(Transport::Tcp),
        _ => None,
    };
    let Some(transport) = transport else { return Some(other) };
    let number = |kind| attributes.array(kind).map(u32::from_be_bytes);
    Some(Listed::Plain(TrackedConnection {
        source: ends[0],
        destination: ends[1],
        transport,
        is_answered: status & SEEN_REPLY != 0,
        is_assured: status & ASSURED != 0,
        timeout_s: number(TIMEOUT).unwrap_or(OFFLOADED_TIMEOUT_S),
        mark: number(MARK).unwrap_or(0),
        zone: attributes.array(ZONE).map_or(0, u16::from_be_bytes),
    }))
}

fn read_addresses(tuple: Attributes<'_>) -> Option<(IpAddr, IpAddr)> {
    let ip = tuple.within(TUPLE_IP)?;
    let v4 = |kind| ip.array(kind).map(|octets| IpAddr::V4(Ipv4Addr::from_octets(octets)));
    let v6 = |kind| ip.array(kind).map(|octets| IpAddr::V6(Ipv6Addr::from_octets(octets)));
    v4(IP_V4[0]).zip(v4(IP_V4[1])).or_else(|| v6(IP_V6[0]).zip(v6(IP_V6[1])))
}

/// Its protocol and, of one with ports, its ends.
fn read_ends(tuple: Attributes<'_>) -> Option<(u8, [SocketAddr; 2])> {
    let (source, destination) = read_addresses(tuple)?;
    let protocol = tuple.within(TUPLE_PROTO)?;
    let [number] = protocol.array(PROTO_NUM)?;
    let port = |kind| protocol.array(kind).map(u16::from_be_bytes);
    let ports = (port(PROTO_PORTS[0])?, port(PROTO_PORTS[1])?);
    Some((number, [SocketAddr::new(source, ports.0), SocketAddr::new(destination, ports.1)]))
}

fn read_tcp(attributes: Attributes<'_>, status: u32) -> Option<TcpState> {
    let Some(tcp) = attributes.within(PROTOINFO).and_then(|info| info.within(PROTOINFO_TCP)) else {
        let stands =
            TcpState { state: ESTABLISHED, source: TcpEnd::default(), destination: TcpEnd::default() };
        return (status & OFFLOADED != 0).then_some(stands);
    };
    let [state] = tcp.array(TCP_STATE)?;
    let end = |side: usize| {
        let [window_scale] = tcp.array(TCP_SCALES[side]).unwrap_or_default();
        let [flags, _] = tcp.array(TCP_FLAGS[side]).unwrap_or_default();
        TcpEnd { window_scale, flags }
    };
    Some(TcpState { state, source: end(0), destination: end(1) })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn any_end() -> impl Strategy<Value = TcpEnd> {
        (0..=14_u8, 0..=0b1111_u8).prop_map(|(window_scale, flags)| TcpEnd { window_scale, flags })
    }

    fn any_transport() -> impl Strategy<Value = Transport> {
        let tcp = (1..=9_u8, any_end(), any_end())
            .prop_map(|(state, source, destination)| Transport::Tcp(TcpState { state, source, destination }));
        prop_oneof![Just(Transport::Udp), tcp]
    }

    fn any_ends() -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
        let pair = |ends: (IpAddr, IpAddr), ports: (u16, u16)| {
            (SocketAddr::new(ends.0, ports.0), SocketAddr::new(ends.1, ports.1))
        };
        let v4 = any::<([u8; 4], [u8; 4])>().prop_map(|(a, b)| (IpAddr::from(a), IpAddr::from(b)));
        let v6 = any::<([u8; 16], [u8; 16])>().prop_map(|(a, b)| (IpAddr::from(a), IpAddr::from(b)));
        (prop_oneof![v4, v6], any::<(u16, u16)>()).prop_map(move |(ends, ports)| pair(ends, ports))
    }

    prop_compose! {
        /// A connection that a kernel may have.
        fn any_connection()(
            (source, destination) in any_ends(),
            transport in any_transport(),
            (is_answered, is_assured) in any::<(bool, bool)>(),
            timeout_s in 1..=432_000_u32,
            (mark, zone) in any::<(u32, u16)>(),
        ) -> TrackedConnection {
            TrackedConnection { source, destination, transport, is_answered, is_assured, timeout_s, mark, zone }
        }
    }

    fn written(connection: &TrackedConnection) -> Vec<u8> {
        let mut bytes = vec![];
        put_new(&mut bytes, 1, connection);
        bytes
    }

    /// In the form that the kernel expects: it judges all of them liberally.
    fn liberal(mut connection: TrackedConnection) -> TrackedConnection {
        if let Transport::Tcp(state) = &mut connection.transport {
            state.source.flags |= LIBERAL;
            state.destination.flags |= LIBERAL;
        }
        connection
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(connections in vec(any_connection(), 1..5)) {
            let bytes: Vec<u8> = connections.iter().flat_map(written).collect();
            let expected: Vec<Said> =
                connections.into_iter().map(|connection| Said::Listed(Listed::Plain(liberal(connection)))).collect();
            prop_assert_eq!(read(&bytes), expected);
        }

        #[test]
        fn whatever_the_bytes_reading_ends(bytes in vec(any::<u8>(), 0..400)) {
            prop_assert!(read(&bytes).len() <= bytes.len() / HEADER_BYTES);
        }

        #[test]
        fn a_damaged_message_is_read_or_left_out(
            connection in any_connection(),
            at in 0..200_usize,
            with: u8,
            cut in 0..200_usize,
        ) {
            let mut bytes = written(&connection);
            let length = bytes.len();
            bytes[at % length] = with;
            read(&bytes);
            read(&bytes[..cut % length]);
        }
    }

    #[test]
    fn the_kernels_refusals_are_read() {
        let said = |kind: u16, number: i32| {
            let mut bytes = vec![];
            let header = Header { kind, flags: 0, number: 9 };
            message(&mut bytes, header, Ipv4Addr::LOCALHOST.into(), |_| {});
            bytes[HEADER_BYTES..].copy_from_slice(&number.to_ne_bytes());
            read(&bytes)
        };
        assert_eq!(said(NLMSG_ERROR, -17), [Said::Refused(9, Errno::EXIST)]);
        assert_eq!(said(NLMSG_ERROR, 0), [Said::Acknowledged]);
        assert_eq!(said(NLMSG_DONE, 0), [Said::Done(Ok(()))]);
        assert_eq!(said(NLMSG_DONE, -12), [Said::Done(Err(Errno::NOMEM))]);
        assert_eq!(said(NLMSG_ERROR, i32::MIN), [Said::Acknowledged]);
        assert_eq!(said(99, -17), []);
    }
}
