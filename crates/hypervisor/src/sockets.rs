//! The TCP connections of a running QEMU. QEMU sets no options on them but those of its own.

use std::io;
use std::net::SocketAddr;

use socket2::SockRef;

use crate::vmm::Vmm;

impl Vmm {
    /// Lets each connection of this QEMU to `peer` hold at most about `bytes` that the kernel has not
    /// sent yet (`TCP_NOTSENT_LOWAT`). Returns the number of connections found.
    ///
    /// Needs Linux 5.6, and the right to trace QEMU (`PTRACE_MODE_ATTACH`, see ptrace(2)).
    pub fn limit_unsent(&self, peer: SocketAddr, bytes: u32) -> io::Result<usize> {
        let mut found = 0;
        for number in self.process().socket_numbers()? {
            // A connection that ends meanwhile is none of those that matter.
            let Some(socket) = self.process().duplicate(number)? else { continue };
            let socket = SockRef::from(&socket);
            if socket.peer_addr().ok().and_then(|address| address.as_socket()) == Some(peer) {
                socket.set_tcp_notsent_lowat(bytes)?;
                found += 1;
            }
        }
        Ok(found)
    }
}
