//! The TCP connections of a running QEMU. QEMU sets no options on them but those of its own.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

use socket2::{SockFilter, SockRef};

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

/// Each needs Linux 5.6, and the right to trace QEMU (`PTRACE_MODE_ATTACH`, see ptrace(2)), and returns
/// the number of connections found.
impl Vmm {
    /// Lets each connection of this QEMU to `peer` hold at most about `bytes` that the kernel has not
    /// sent yet (`TCP_NOTSENT_LOWAT`); with 0, `net.ipv4.tcp_notsent_lowat`, as before.
    pub fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        each_connection(self.process(), peer, |socket| socket.set_tcp_notsent_lowat(bytes))
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

    /// Cuts each connection of this QEMU to `peer`, as [`cut_connections`].
    pub fn cut(&self, peer: SocketAddr) -> io::Result<usize> {
        each_connection(self.process(), peer, shut_down)
    }
}

/// Cuts each connection of the QEMU in `paths` to `peer` without asking QEMU, and returns their number. While the VM is
/// paused for its last bytes, QEMU's migration thread holds the lock that every command needs, and in silence waits in
/// `send` with it: neither `migrate_cancel` nor `yank` would be answered, and the VM would stand still for as long.
///
/// Needs Linux 5.6, and the right to trace QEMU.
pub fn cut_connections(paths: &RuntimePaths, peer: SocketAddr) -> io::Result<usize> {
    match Process::find(&paths.pid_file(), paths.log_file())? {
        Some(process) => each_connection(&process, peer, shut_down),
        None => Ok(0),
    }
}

fn shut_down(socket: &SockRef<'_>) -> io::Result<()> {
    match socket.shutdown(Shutdown::Both) {
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
        cut => cut,
    }
}

fn each_connection(
    process: &Process,
    peer: SocketAddr,
    act: impl Fn(&SockRef<'_>) -> io::Result<()>,
) -> io::Result<usize> {
    let mut found = 0;
    for number in process.socket_numbers()? {
        // A connection that ends meanwhile is none of those that matter.
        let Some(socket) = process.duplicate(number)? else { continue };
        let socket = SockRef::from(&socket);
        if socket.peer_addr().ok().and_then(|address| address.as_socket()) == Some(peer) {
            act(&socket)?;
            found += 1;
        }
    }
    Ok(found)
}
