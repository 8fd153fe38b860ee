//! The hellos of one path, as datagrams.

use std::io;
use std::net::{IpAddr, SocketAddr};

use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::watch::{Hearing, Hello, Pace};
use drainpipe_engine::problem::Problem;
use socket2::SockRef;
use tokio::net::UdpSocket;
use uuid::Uuid;

use crate::host::Host;
use crate::paths::link_socket::{bind_to_link, bind_udp, headers_bytes, keep_whole_like_tcp};

/// Most datagrams read from one path between two hellos; a flood of them costs no more. More than a socket
/// holds by default, so that nothing old is left after the agent stood still.
const READ_MAX: usize = 1024;

/// Token, sequence, hearing and pace, losses. A large hello has zeros behind them.
const DATAGRAM_BYTES: usize = 26;

/// In the byte that says what is heard: a hello of a close look.
const CLOSE: u8 = 0x80;

/// There too: a large hello. One of before there were any takes no datagram of its size.
const LARGE: u8 = 0x40;

/// The same bits, shifted left by this: whether large hellos are heard. They are zero where none has come, so a host
/// that sends none learns nothing new.
const HEARING_LARGE_SHIFT: u32 = 2;

/// Differentiated services code point CS6 in its place in the header (RFC 2474, RFC 4594): network control, which
/// switches that look at it let pass first.
const NETWORK_CONTROL: u32 = 48 << 2;

/// `TC_PRIO_INTERACTIVE`, the highest that needs no privilege: the first band of `pfifo_fast`.
const PRIORITY: u32 = 6;

/// A socket on a path's own link, with a port of the migration range. Where this host's queue knows priorities, what
/// it sends goes before the memory that waits there: behind 0.4 s of it, it would be a silence.
pub(crate) async fn bind(host: &Host, path: &Path) -> Result<UdpSocket, Problem> {
    let cannot = |problem: Problem| problem.context(format!("path {path} cannot be watched"));
    let socket = bind_udp(host, &path.link, path.address).await.map_err(cannot)?;
    go_first(&socket, path.address).map_err(|error| {
        cannot(Problem::failed(format!("the kernel does not give its datagrams priority: {error}")))
    })?;
    Ok(socket)
}

/// Another one in place of `socket`, whose port the other end knows, on the link that has been made again.
pub(super) fn bind_again(socket: &UdpSocket, path: &Path) -> io::Result<UdpSocket> {
    // The old one does not hold the port on another link than its own.
    let socket = bind_to_link(&path.link, path.address, socket.local_addr()?.port())?;
    go_first(&socket, path.address)?;
    Ok(socket)
}

fn go_first(socket: &UdpSocket, address: IpAddr) -> io::Result<()> {
    keep_whole_like_tcp(socket, address)?;
    let socket = SockRef::from(socket);
    match address {
        IpAddr::V4(_) => socket.set_tos_v4(NETWORK_CONTROL)?,
        IpAddr::V6(_) => socket.set_tclass_v6(NETWORK_CONTROL)?,
    }
    // Last: an IPv4 socket's type of service sets its priority too, for CS6 to that of all other traffic.
    socket.set_priority(PRIORITY)
}

/// The hellos that have arrived from `other` and carry `token`.
pub(super) fn read(socket: &UdpSocket, other: SocketAddr, token: Uuid) -> Vec<Hello> {
    let mut hellos = vec![];
    let mut datagram = [0; DATAGRAM_BYTES + 1];
    for _ in 0..READ_MAX {
        // A path's errors show as its silence.
        let Ok((length, from)) = socket.try_recv_from(&mut datagram) else { break };
        hellos.extend(decode(&datagram[..length], token).filter(|_| from == other));
    }
    hellos
}

/// Says hello; what the link refuses does not arrive, which says enough.
pub(super) fn say(socket: &UdpSocket, other: SocketAddr, token: Uuid, hello: Hello) {
    let _refused = socket.try_send_to(&encode(hello, token), other);
}

/// Says it in an IP packet of that size.
pub(super) fn say_large(
    socket: &UdpSocket,
    other: SocketAddr,
    token: Uuid,
    hello: Hello,
    packet_bytes: u16,
) -> io::Result<()> {
    let payload_bytes = usize::from(packet_bytes.saturating_sub(headers_bytes(other)));
    let mut datagram = encode(hello, token).to_vec();
    datagram.resize(payload_bytes.max(DATAGRAM_BYTES + 1), 0);
    socket.try_send_to(&datagram, other).map(drop)
}

pub(crate) fn encode(hello: Hello, token: Uuid) -> [u8; DATAGRAM_BYTES] {
    let mut datagram = [0; DATAGRAM_BYTES];
    datagram[..16].copy_from_slice(token.as_bytes());
    datagram[16..24].copy_from_slice(&hello.sequence.to_be_bytes());
    let pace = match hello.pace {
        Pace::Steady => 0,
        Pace::Close => CLOSE,
        Pace::Large => LARGE,
    };
    datagram[24] = pace | bits_of(hello.hearing_large) << HEARING_LARGE_SHIFT | bits_of(hello.hearing);
    datagram[25] = hello.losses;
    datagram
}

pub(crate) fn decode(datagram: &[u8], token: Uuid) -> Option<Hello> {
    let (datagram, filling) = datagram.split_first_chunk::<DATAGRAM_BYTES>()?;
    let (said, rest) = datagram.split_first_chunk::<16>()?;
    let (sequence, rest) = rest.split_first_chunk::<8>()?;
    let [bits, losses] = *rest else { return None };
    let pace = match (bits & (CLOSE | LARGE), filling.is_empty()) {
        (0, true) => Pace::Steady,
        (CLOSE, true) => Pace::Close,
        (LARGE, false) => Pace::Large,
        _ => return None,
    };
    let bits = bits & !(CLOSE | LARGE);
    let hello = Hello {
        sequence: u64::from_be_bytes(*sequence),
        pace,
        hearing: hearing_of(bits & 0b11)?,
        hearing_large: hearing_of(bits >> HEARING_LARGE_SHIFT)?,
        losses,
    };
    (said == token.as_bytes()).then_some(hello)
}

fn bits_of(hearing: Hearing) -> u8 {
    match hearing {
        Hearing::Never => 0,
        Hearing::Now => 1,
        Hearing::NoMore => 2,
    }
}

fn hearing_of(bits: u8) -> Option<Hearing> {
    match bits {
        0 => Some(Hearing::Never),
        1 => Some(Hearing::Now),
        2 => Some(Hearing::NoMore),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[tokio::test]
    async fn hellos_go_before_all_else_over_either_protocol() {
        for address in ["127.0.0.1", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let socket = UdpSocket::bind((address, 0)).await.unwrap();
            go_first(&socket, address).unwrap();
            let socket = SockRef::from(&socket);
            let class = if address.is_ipv4() { socket.tos_v4() } else { socket.tclass_v6() };
            assert_eq!((class.unwrap(), socket.priority().unwrap()), (0xc0, 6));
        }
    }

    proptest! {
        #[test]
        fn a_hello_arrives_as_it_was_said(
            sequence: u64,
            hearing in prop_oneof![Just(Hearing::Never), Just(Hearing::Now), Just(Hearing::NoMore)],
            hearing_large in prop_oneof![Just(Hearing::Never), Just(Hearing::Now), Just(Hearing::NoMore)],
            pace in prop_oneof![Just(Pace::Steady), Just(Pace::Close), Just(Pace::Large)],
            losses: u8,
        ) {
            let (hello, token) = (Hello { sequence, pace, hearing, hearing_large, losses }, Uuid::new_v4());
            let mut datagram = encode(hello, token).to_vec();
            let filled = [&datagram[..], &[0]].concat();
            datagram.extend((pace == Pace::Large).then_some(0));
            prop_assert_eq!(decode(&datagram, token), Some(hello));
            prop_assert_eq!(decode(&filled, token).is_some(), pace == Pace::Large);
            prop_assert_eq!(decode(&datagram, Uuid::new_v4()), None);
            prop_assert_eq!(decode(&datagram[1..], token), None);
        }

        #[test]
        fn any_datagram_is_taken_or_dropped(datagram in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode(&datagram, Uuid::nil());
        }
    }
}
