//! Gives eth0 its address, and takes it down at the end, over rtnetlink.
//!
//! Three messages, written by hand: a netlink library would be most of the guest's program.

use std::thread;
use std::time::{Duration, Instant};

use ipnet::Ipv4Net;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

const INTERFACE: &str = "eth0";

/// The driver finds its device while its module is loaded; this is for a slow machine.
const INTERFACE_PATIENCE: Duration = Duration::from_secs(5);
const INTERFACE_POLL: Duration = Duration::from_millis(10);

/// Protocol 0, which rustix writes as none.
const NETLINK_ROUTE: Option<Protocol> = None;

// linux/netlink.h, linux/rtnetlink.h, linux/if.h, linux/if_addr.h
const NLMSG_ERROR: u16 = 2;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_CREATE: u16 = 0x400;
const AF_UNSPEC: u8 = 0;
const AF_INET: u8 = 2;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const HEADER_BYTES: usize = 16;

#[derive(Debug, thiserror::Error)]
pub(crate) enum NetworkError {
    #[error(
        "there is no {INTERFACE} after {} s; give the VM a virtio-net-pci device",
        INTERFACE_PATIENCE.as_secs()
    )]
    NoInterface,
    #[error("cannot talk to the kernel's rtnetlink: {0}")]
    Netlink(#[from] Errno),
    #[error("the kernel's rtnetlink gave a malformed answer")]
    Malformed,
    #[error("the kernel refuses to {what}: {source}")]
    Refused { what: &'static str, source: Errno },
}

/// Sets the address and brings eth0 up.
pub(crate) fn configure(address: Ipv4Net) -> Result<(), NetworkError> {
    let socket = rtnetlink()?;
    let interface = wait_for_interface(&socket)?;
    request(&socket, "set the address of eth0", &add_address(interface, address))?;
    request(&socket, "bring eth0 up", &set_link(interface, IFF_UP))
}

/// Takes eth0 down, before the guest powers off. The kernel (Debian's 6.1) resets the device of one that is up, and a
/// worker that meanwhile tells it of a multicast group waits for its answer without end, on the only CPU: seen in 6 of
/// 31 guests that powered off beside four busy loops.
pub(crate) fn take_down() -> Result<(), NetworkError> {
    let socket = rtnetlink()?;
    let Ok(interface) = name_to_index(&socket, INTERFACE) else { return Ok(()) };
    request(&socket, "take eth0 down", &set_link(interface, 0))
}

fn rtnetlink() -> Result<OwnedFd, NetworkError> {
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, NETLINK_ROUTE)?)
}

fn wait_for_interface(socket: &OwnedFd) -> Result<u32, NetworkError> {
    let deadline = Instant::now() + INTERFACE_PATIENCE;
    loop {
        match name_to_index(socket, INTERFACE) {
            Ok(index) => return Ok(index),
            Err(_) if Instant::now() < deadline => thread::sleep(INTERFACE_POLL),
            Err(_) => return Err(NetworkError::NoInterface),
        }
    }
}

/// `struct ifaddrmsg` and its attributes.
fn add_address(interface: u32, address: Ipv4Net) -> Vec<u8> {
    let mut body = vec![AF_INET, address.prefix_len(), 0, 0];
    body.extend(interface.to_ne_bytes());
    for attribute in [IFA_LOCAL, IFA_ADDRESS] {
        let length: u16 = 8;
        body.extend(length.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(address.addr().octets());
    }
    message(RTM_NEWADDR, NLM_F_CREATE, &body)
}

/// `struct ifinfomsg`.
fn set_link(interface: u32, up: u32) -> Vec<u8> {
    let mut body = vec![AF_UNSPEC, 0, 0, 0];
    body.extend(interface.to_ne_bytes());
    body.extend(up.to_ne_bytes());
    body.extend(IFF_UP.to_ne_bytes());
    message(RTM_NEWLINK, 0, &body)
}

/// `struct nlmsghdr` and a body.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_BYTES + body.len()).expect("a message is short");
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | NLM_F_ACK | flags).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn request(socket: &OwnedFd, what: &'static str, message: &[u8]) -> Result<(), NetworkError> {
    sendto(socket, message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0; 256];
    let (length, _) = recv(socket, &mut answer[..], RecvFlags::empty())?;
    match acknowledged(&answer[..length.min(answer.len())]) {
        Some(Ok(())) => Ok(()),
        Some(Err(source)) => Err(NetworkError::Refused { what, source }),
        None => Err(NetworkError::Malformed),
    }
}

/// Reads `struct nlmsgerr`, whose error is a negative errno or 0.
fn acknowledged(answer: &[u8]) -> Option<Result<(), Errno>> {
    let kind = u16::from_ne_bytes(*answer.get(4..)?.first_chunk()?);
    let error = i32::from_ne_bytes(*answer.get(HEADER_BYTES..)?.first_chunk()?);
    match (kind, error) {
        (NLMSG_ERROR, 0) => Some(Ok(())),
        (NLMSG_ERROR, error) => Some(Err(Errno::from_raw_os_error(error.checked_neg()?))),
        _ => None,
    }
}
