//! The counters of TCP connections when they ended.

use std::collections::HashMap;

use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;

use crate::Error;
use crate::flow::{Flow, FlowCounters, tcp_info};

/// Multicast groups of `sock_diag(7)`: a TCP socket is gone (`SKNLGRP_INET_TCP_DESTROY`,
/// `SKNLGRP_INET6_TCP_DESTROY`).
const GROUPS: [u32; 2] = [1, 3];

/// Most that is read in one go: ten times what the socket's buffer holds by default.
const READ_MAX: usize = 4_096;

/// Listens for the end of TCP connections of this network namespace, since Linux 4.4.
///
/// The kernel tells the counters once more when it forgets a connection, which is the only way to know them
/// of one that its owner has closed. Each connection of the host is told, so listen briefly. What is not read
/// in time is lost.
#[derive(Debug)]
pub struct EndedFlows(Socket);

impl EndedFlows {
    /// Begins to listen.
    pub fn listen() -> Result<Self, Error> {
        let mut socket = Socket::new(NETLINK_SOCK_DIAG).map_err(Error::Open)?;
        socket.bind(&SocketAddr::new(0, 0)).map_err(Error::Open)?;
        for group in GROUPS {
            socket.add_membership(group).map_err(Error::Open)?;
        }
        socket.set_non_blocking(true).map_err(Error::Open)?;
        Ok(Self(socket))
    }

    /// Those to this port that have ended since it was asked last.
    pub fn read(&self, destination_port: u16) -> HashMap<Flow, FlowCounters> {
        let mut ended = HashMap::new();
        for _ in 0..READ_MAX {
            match self.0.recv_from_full() {
                Ok((message, _)) => ended.extend(parse(&message)),
                // Some were lost; others may wait.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NOBUFS) => {}
                Err(_) => break,
            }
        }
        ended.retain(|flow, _| flow.destination.port() == destination_port);
        ended
    }
}

fn parse(message: &[u8]) -> Option<(Flow, FlowCounters)> {
    match NetlinkMessage::<SockDiagMessage>::deserialize(message).ok()?.payload {
        NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
            Some((Flow::of(&response.header.socket_id), FlowCounters::from(tcp_info(&response)?)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::*;

    const SENT: usize = 300_000;

    #[test]
    fn the_counters_of_a_closed_connection_are_told() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let destination = listener.local_addr().unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = vec![];
            listener.accept().unwrap().0.read_to_end(&mut all).unwrap();
            all.len()
        });
        let ended = match EndedFlows::listen() {
            Ok(ended) => ended,
            Err(error) => return eprintln!("SKIPPED: {error}"),
        };
        let mut connection = TcpStream::connect(destination).unwrap();
        let flow = Flow { source: connection.local_addr().unwrap(), destination };
        connection.write_all(&vec![7; SENT]).unwrap();
        assert_eq!(ended.read(destination.port()), HashMap::new());
        drop(connection);
        assert_eq!(reader.join().unwrap(), SENT);
        let deadline = Instant::now() + Duration::from_secs(10);
        let ended_counters = loop {
            let ended_counters = ended.read(destination.port());
            if let Some(counters) = ended_counters.get(&flow) {
                break *counters;
            }
            assert!(Instant::now() < deadline, "the end of {flow:?} is not told");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(
            ended_counters.sent_bytes >= SENT as u64 && ended_counters.acknowledged_bytes >= SENT as u64,
            "{ended_counters:?}"
        );
    }

    #[test]
    fn what_is_no_message_is_nothing() {
        for bytes in [&[][..], &[1, 2, 3], &[0; 40], &[0xff; 400]] {
            assert_eq!(parse(bytes), None);
        }
    }
}
