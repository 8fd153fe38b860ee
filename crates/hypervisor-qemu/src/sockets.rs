//! The TCP connections of a running QEMU. QEMU sets no options on them but those of its own.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use drainpipe_hypervisor::{ConnectionUse, Pace};
use nix::sys::socket::sockopt::RcvBufForce;
use nix::sys::socket::{getsockopt, setsockopt};
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
use socket2::{SockAddr, SockFilter, SockRef};

use crate::paths::RuntimePaths;
use crate::process::Process;
use crate::vmm::Vmm;

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

/// Of each segment: Ethernet's header, and TCP's with a time stamp. IP's is between them.
const HEADER_BYTES: u64 = 14 + 32;
const IPV4_HEADER_BYTES: u64 = 20;
const IPV6_HEADER_BYTES: u64 = 40;

sockopt_impl!(MaxPacingRate, SetOnly, libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE, u64);
sockopt_impl!(TcpInfo, GetOnly, libc::IPPROTO_TCP, libc::TCP_INFO, libc::tcp_info);

/// Each needs Linux 5.6, and the right to trace QEMU (`PTRACE_MODE_ATTACH`, see ptrace(2)), and returns
/// the number of connections found.
impl Vmm {
    /// Lets each connection of this QEMU to `peer` hold at most about `bytes` that the kernel has not
    /// sent yet (`TCP_NOTSENT_LOWAT`); with 0, `net.ipv4.tcp_notsent_lowat`, as before.
    pub fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        each_connection(self.process(), peer, |socket| socket.set_tcp_notsent_lowat(bytes))
    }

    /// Paces each connection of this QEMU to `peer`, by what `paces` makes of the use of them all. The kernel does the pacing, so it goes on when nobody looks.
    pub fn pace(
        &self,
        peer: SocketAddr,
        paces: impl FnOnce(&[ConnectionUse]) -> Vec<Pace>,
    ) -> io::Result<usize> {
        let mut connections = Vec::new();
        for_each_connection(self.process(), peer, |socket| {
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

    /// Lets each connection that this QEMU will take at `own`, where it listens, hold at most about `bytes` that QEMU has not
    /// read (`SO_RCVBUF`, which accepted sockets inherit). The kernel does not let them grow then.
    pub fn limit_received(&self, own: SocketAddr, bytes: u32) -> io::Result<usize> {
        let listens =
            |socket: &SockRef<'_>| has(socket.local_addr(), own) && socket.is_listener().unwrap_or(false);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // Beyond `net.core.rmem_max`, which is 208 KiB by default.
        for_each_socket(self.process(), listens, |socket| Ok(setsockopt(&socket, RcvBufForce, &bytes)?))
    }

    /// Makes the end of `peer`'s QEMU a silence on each connection of this QEMU to it, which
    /// [`crate::migration::cancel`] ends.
    ///
    /// The first of multifd's connections that fails ends the threads of the others. QEMU (7.2, 10.0)
    /// waits without end for one that ends so while it has something to do: that VM is not migrated any
    /// more, whatever one does. A target killed at full speed did so in one of 18 migrations. In silence
    /// all threads wait in the kernel, so all of them fail when the connections are cut.
    pub fn ignore_resets(&self, peer: SocketAddr) -> io::Result<usize> {
        each_connection(self.process(), peer, |socket| socket.attach_filter(&WITHOUT_RESETS))
    }

    /// Has the kernel throw away what it has not sent on each connection of this QEMU to `peer`, when QEMU
    /// closes it (`SO_LINGER`). Otherwise it goes on trying for minutes.
    pub fn discard_unsent(&self, peer: SocketAddr) -> io::Result<usize> {
        each_connection(self.process(), peer, |socket| socket.set_linger(Some(Duration::ZERO)))
    }

    /// Whether somebody has stopped QEMU, as by `SIGSTOP`. Its threads may be anywhere then: where its connections are cut
    /// meanwhile, some of them end before they have seen it, and QEMU (7.2, 10.0) may wait for those without end, with the
    /// lock that all else needs.
    pub fn is_stopped(&self) -> bool {
        self.process().is_stopped().unwrap_or(false)
    }

    /// Cuts each connection of this QEMU to `peer`, as [`cut_connections`].
    pub fn cut(&self, peer: SocketAddr) -> io::Result<usize> {
        cut(self.process(), peer)
    }
}

/// Cuts each connection of the QEMU in `paths` to `peer` without asking QEMU, and returns their number. While the VM is
/// paused for its last bytes, QEMU's migration thread holds the lock that every command needs, and in silence waits in
/// `send` with it: neither `migrate_cancel` nor `yank` would be answered, and the VM would stand still for as long.
///
/// A QEMU that somebody has [stopped](Vmm::is_stopped) is left alone, as an error.
///
/// Needs Linux 5.6, and the right to trace QEMU.
pub fn cut_connections(paths: &RuntimePaths, peer: SocketAddr) -> io::Result<usize> {
    match Process::find(&paths.pid_file(), paths.log_file())? {
        Some(process) => cut(&process, peer),
        None => Ok(0),
    }
}

fn cut(process: &Process, peer: SocketAddr) -> io::Result<usize> {
    if process.is_stopped()? {
        return Err(io::Error::other("somebody has stopped it"));
    }
    each_connection(process, peer, shut_down)
}

/// As [`Vmm::is_stopped`], of the QEMU in `paths`.
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
        // A connection that ends meanwhile is none of those that matter.
        let Some(socket) = process.duplicate(number)? else { continue };
        if is_wanted(&SockRef::from(&socket)) {
            act(socket)?;
            found += 1;
        }
    }
    Ok(found)
}
