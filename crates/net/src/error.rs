//! What can go wrong with a host's network, and what to do about it.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use drainpipe_engine::format::bound;
use ipnet::IpNet;
use rustix::io::Errno;

use crate::route_attributes::ROUTE_PROTOCOL;

/// Why the host's network could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the message of each variant says what it means")]
pub enum Error {
    #[error("cannot open a netlink socket: {0}")]
    Open(#[source] io::Error),

    #[error("the kernel did not answer within {} when asked to {operation}", bound(*.after))]
    Timeout { operation: String, after: Duration },

    #[error("not permitted to {operation}: run as root, or with CAP_NET_ADMIN and /proc/sys writable")]
    NotPermitted { operation: String },

    #[error("the kernel refused to {operation}: {source}")]
    Kernel { operation: String, source: io::Error },

    #[error("cannot {operation}: the netlink answer was not understood: {detail}")]
    Protocol { operation: String, detail: String },

    #[error("there is no link named {0:?} on this host; `ip link` lists the links")]
    UnknownLink(String),

    #[error("link {link} is down; bring it up with `ip link set {link} up`")]
    LinkDown { link: String },

    #[error(
        "address {address} is already in use on this host, as {existing} on link {link}; \
         choose another migration address or remove it there"
    )]
    AddressInUse { address: IpNet, existing: IpNet, link: String },

    #[error(
        "there is already a route to {destination} that is not Drainpipe's (route protocol \
         {protocol}, Drainpipe's is {ROUTE_PROTOCOL}); remove it or choose another migration address"
    )]
    RouteTaken { destination: IpNet, protocol: u8 },

    #[error("the route to {destination} is invalid: {reason}")]
    InvalidRoute { destination: IpNet, reason: &'static str },

    #[error(
        "the kernel cannot use the next hops of the route to {destination} ({source}): each \
         gateway must be a neighbour on its link, so give the link an address in the gateway's network"
    )]
    GatewayUnreachable { destination: IpNet, source: io::Error },

    #[error(
        "{gateway} did not answer on link {link} within {waited_ms} ms: check cable, switch and the peer's address"
    )]
    NeighbourUnreachable { gateway: IpAddr, link: String, waited_ms: u128 },

    #[error("{0:?} is not the name of a network setting; expected something like net.ipv4.ip_forward")]
    InvalidSysctl(String),

    #[error("the kernel has no setting {key}: it was built without it, or the link it names is gone")]
    SysctlMissing { key: String },

    #[error("cannot {operation}: {source}")]
    Sysctl { operation: String, source: io::Error },

    #[error(
        "the record of what was there before {change} is of another kind: {before}; the journal is damaged"
    )]
    RecordMismatch { change: String, before: String },

    #[error(
        "cannot make or use a tap to announce a guest by: {0}; has the agent CAP_NET_ADMIN, and does the host have \
         /dev/net/tun?"
    )]
    Tap(#[source] io::Error),

    #[error("cannot read the RDMA devices at {path}: {source}")]
    Rdma { path: String, source: io::Error },
}

impl Error {
    /// The error for a netlink request that was to do `operation`.
    pub(crate) fn netlink(operation: &str, error: rtnetlink::Error) -> Self {
        let operation = operation.to_owned();
        match error {
            rtnetlink::Error::NetlinkError(message) => {
                let source = message.to_io();
                if source.kind() == io::ErrorKind::PermissionDenied {
                    Self::NotPermitted { operation }
                } else {
                    Self::Kernel { operation, source }
                }
            }
            other => Self::Protocol { operation, detail: other.to_string() },
        }
    }

    /// What the kernel said, if this is a refusal of the kernel.
    pub(crate) fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel { source, .. } => Errno::from_io_error(source),
            _ => None,
        }
    }
}
