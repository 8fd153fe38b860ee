//! The TCP connections of a running QEMU. QEMU sets only its own options on them.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use drainpipe_hypervisor::{ConnectionUse, Connections, Paces};
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{getsockopt, setsockopt};
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
use socket2::{SockAddr, SockFilter, SockRef};

use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::process::Process;

/// Drops what has TCP's flag RST, and takes all else. A TCP socket's filter sees segments from their
/// header on; flags are byte 13 (RFC 9293, 3.1), RST is 4. The operations are those of bpf(4):
/// `BPF_LD|BPF_B|BPF_ABS`, `BPF_JMP|BPF_JSET|BPF_K` and two times `BPF_RET|BPF_K`.
const WITHOUT_RESETS: [SockFilter; 4] = [
    SockFilter::new(0x30, 0, 0, 13),
    SockFilter::new(0x45, 0, 1, 4),
    SockFilter::new(0x06, 0, 0, 0),
    SockFilter::new(0x06, 0, 0, u32::MAX),
];

/// A connection over which something went so lately is in use, though nothing waits in it at the moment.
const IN_USE_FOR_MS: u32 = 20;

/// The headers of each segment: Ethernet's, and TCP's with a time stamp. IP's is between them.
const HEADER_BYTES: u64 = 14 + 32;
const IPV4_HEADER_BYTES: u64 = 20;
const IPV6_HEADER_BYTES: u64 = 40;

sockopt_impl!(MaxPacingRate, SetOnly, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, u64);
sockopt_impl!(TcpInfo, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, libc::tcp_info);

/// Each needs Linux 5.6, and the right to trace QEMU (`PTRACE_MODE_ATTACH`, see ptrace(2)).
impl Connections for Process {
    /// By `TCP_NOTSENT_LOWAT`; 0 is `net.ipv4.tcp_notsent_lowat`.
    fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        each_connection(self, peer, |socket| socket.set_tcp_notsent_lowat(bytes))
    }

    fn has(&self, own: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
        let is_it = |socket: &SockRef<'_>| has(socket.local_addr(), own) && has(socket.peer_addr(), peer);
        Ok(for_each_socket(self, is_it, |_| Ok(()))? > 0)
    }

    /// The kernel does the pacing, so it goes on when nobody looks.
    fn pace(&self, peer: SocketAddr, paces: Paces<'_>) -> io::Result<usize> {
        let mut connections = Vec::new();
        for_each_connection(self, peer, |socket| {
            connections.push(socket);
            Ok(())
        })?;
        let uses: io::Result<Vec<ConnectionUse>> =
            connections.iter().map(|socket| use_of(socket, peer)).collect();
        let mut of_each: Vec<_> = connections.iter().zip(paces(&uses?)).collect();
        // Those that get less come first, so that all together never have more.
        of_each.sort_by_key(|(_, pace)| pace.bytes_per_s);
        for (socket, pace) in of_each {
            setsockopt(socket, MaxPacingRate, &pace.bytes_per_s)?;
            SockRef::from(socket).set_tcp_notsent_lowat(pace.unsent_bytes)?;
        }
        Ok(connections.len())
    }

    /// By `SO_RCVBUF` of the socket that listens, which accepted sockets inherit. The kernel does not let them grow then.
    fn limit_received(&self, own: SocketAddr, bytes: u32) -> io::Result<usize> {
        let listens =
            |socket: &SockRef<'_>| has(socket.local_addr(), own) && socket.is_listener().unwrap_or(false);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Beyond `net.core.rmem_max`, which is 208 KiB by default.
        for_each_socket(self, listens, |socket| Ok(setsockopt(&socket, RcvBufForce, &bytes)?))
    }

    /// The first of multifd's connections that fails ends the threads of the others. QEMU (7.2, 10.0)
    /// waits without end for one that ends so while it has something to do: that VM is not migrated any
    /// more, whatever one does. A target killed at full speed did so in one of 18 migrations. In silence
    /// all threads wait in the kernel, so all of them fail when the connections are cut.
    fn ignore_resets(&self, peer: SocketAddr) -> io::Result<usize> {
        each_connection(self, peer, |socket| socket.attach_filter(&WITHOUT_RESETS))
    }

    /// By `SO_LINGER`. Otherwise the kernel goes on trying for minutes.
    fn discard_unsent(&self, peer: SocketAddr) -> io::Result<usize> {
        each_connection(self, peer, |socket| socket.set_linger(Some(Duration::ZERO)))
    }

    /// As [`cut_connections`].
    fn cut(&self, peer: SocketAddr) -> io::Result<usize> {
        if self.is_stopped()? {
            return Err(io::Error::other("somebody has stopped it"));
        }
        each_connection(self, peer, shut_down)
    }
}

/// Cuts each connection of the QEMU in `paths` to `peer` without asking QEMU, and returns their number. While the VM is
/// paused for its last bytes, QEMU's migration thread holds the lock that every command needs, and in silence waits in
/// `send` with it: neither `migrate_cancel` nor `yank` would be answered, and the VM would stand still for as long.
///
/// A QEMU that somebody has [stopped](Process::is_stopped) is left alone, as an error.
///
/// Needs Linux 5.6, and the right to trace QEMU.
pub fn cut_connections(privileges: &Privileges, paths: &RuntimePaths, peer: SocketAddr) -> io::Result<usize> {
    match Process::find(privileges, &paths.pid_file(), paths.log_file())? {
        Some(process) => process.cut(peer),
        None => Ok(0),
    }
}

/// As [`Process::is_stopped`], of the QEMU in `paths`.
pub fn is_stopped(paths: &RuntimePaths) -> bool {
    Process::is_named_stopped(&paths.pid_file()).unwrap_or(false)
}

fn shut_down(socket: &SockRef<'_>) -> io::Result<()> {
    match socket.shutdown(Shutdown::Both) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        cut => cut,
    }
}

fn use_of(socket: &OwnedFd, peer: SocketAddr) -> io::Result<ConnectionUse> {
    let info = getsockopt(socket, TcpInfo)?;
    let has_unsent = info.tcpi_notsent_bytes > 0;
    let is_in_use = has_unsent || info.tcpi_last_data_sent < IN_USE_FOR_MS;
    let segments = u64::from(info.tcpi_data_segs_out);
    let header_bytes = HEADER_BYTES + if peer.is_ipv4() { IPV4_HEADER_BYTES } else { IPV6_HEADER_BYTES };
    Ok(ConnectionUse { is_in_use, has_unsent, link_bytes: info.tcpi_bytes_sent + segments * header_bytes })
}

fn each_connection(
    process: &Process,
    peer: SocketAddr,
    act: impl Fn(&SockRef<'_>) -> io::Result<()>,
) -> io::Result<usize> {
    for_each_connection(process, peer, |socket| act(&SockRef::from(&socket)))
}

fn for_each_connection(
    process: &Process,
    peer: SocketAddr,
    act: impl FnMut(OwnedFd) -> io::Result<()>,
) -> io::Result<usize> {
    let is_to_peer = |socket: &SockRef<'_>| has(socket.peer_addr(), peer);
    for_each_socket(process, is_to_peer, act)
}

fn has(address: io::Result<SockAddr>, wanted: SocketAddr) -> bool {
    address.ok().and_then(|address| address.as_socket()) == Some(wanted)
}

fn for_each_socket(
    process: &Process,
    is_wanted: impl Fn(&SockRef<'_>) -> bool,
    mut act: impl FnMut(OwnedFd) -> io::Result<()>,
) -> io::Result<usize> {
    let mut found = 0;
    for number in process.socket_numbers()? {
        // A connection that ends meanwhile does not matter.
        let Some(socket) = process.duplicate(number)? else { continue };
        if is_wanted(&SockRef::from(&socket)) {
            act(socket)?;
            found += 1;
        }
    }
    Ok(found)
}
