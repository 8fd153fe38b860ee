//! The kernel's socket statistics, `sock_diag(7)`.

use std::io;

use futures_util::StreamExt;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use netlink_proto::ConnectionHandle;
use netlink_proto::sys::protocols::NETLINK_SOCK_DIAG;

use crate::Error;
use crate::request::within_deadline;

/// A connection to them.
#[derive(Debug, Clone)]
pub(crate) struct SocketStatistics(ConnectionHandle<SockDiagMessage>);

impl SocketStatistics {
    pub(crate) fn open() -> io::Result<Self> {
        let (connection, handle, _) = netlink_proto::new_connection(NETLINK_SOCK_DIAG)?;
        tokio::spawn(connection);
        Ok(Self(handle))
    }

    pub(crate) async fn ask(
        &self,
        operation: &str,
        flags: u16,
        id: SocketId,
    ) -> Result<Vec<InetResponse>, Error> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        let request = InetRequest {
            family: if id.destination_address.is_ipv4() { AF_INET } else { AF_INET6 },
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::INFO,
            states: StateFlags::ESTABLISHED,
            socket_id: id,
        };
        let message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
        let protocol = |detail: String| Error::Protocol { operation: operation.to_owned(), detail };
        let mut answers = self
            .0
            .request(message, netlink_proto::sys::SocketAddr::new(0, 0))
            .map_err(|error| protocol(error.to_string()))?;
        let mut responses = vec![];
        while let Some(answer) = within_deadline(operation, answers.next()).await? {
            match answer.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                    responses.push(*response);
                }
                NetlinkPayload::Error(error) => {
                    return Err(Error::netlink(operation, rtnetlink::Error::NetlinkError(error)));
                }
                _ => {}
            }
        }
        Ok(responses)
    }
}
