//! Connections that have not said yet what they are.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use socket2::{SockRef, Socket};

use crate::CONNECTIONS_MAX;
use crate::sockets::lock;

/// How many may be there at once: unauthenticated peers cannot use up the memory of a host. For one more, the oldest is
/// closed: nor can silent ones keep the sender out.
const UNAUTHENTICATED_MAX: usize = CONNECTIONS_MAX;

/// How many closed ones may be left until their threads have noticed.
const CLOSED_MAX: usize = CONNECTIONS_MAX;

/// Connections that have not said yet what they are.
#[derive(Debug, Default)]
pub(crate) struct UnauthenticatedPeers {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    // In the order in which they came.
    open: VecDeque<(u64, Socket)>,
    next: u64,
    // Open or closed, and not dropped.
    count: usize,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct UnauthenticatedPeer {
    unauthenticated: Arc<UnauthenticatedPeers>,
    number: u64,
}

impl UnauthenticatedPeers {
    /// Takes one in, and closes the oldest if there are too many. None if that is not possible either.
    pub(crate) fn take_in(self: &Arc<Self>, wire: &TcpStream) -> Option<UnauthenticatedPeer> {
        let socket = SockRef::from(wire).try_clone().ok()?;
        let mut inner = lock(&self.inner);
        if inner.count >= UNAUTHENTICATED_MAX + CLOSED_MAX {
            return None;
        }
        if inner.open.len() >= UNAUTHENTICATED_MAX
            && let Some((_, oldest)) = inner.open.pop_front()
        {
            // There is nothing to wait for on one that the peer has closed already.
            drop(oldest.shutdown(Shutdown::Both));
        }
        let number = inner.next;
        inner.next += 1;
        inner.count += 1;
        inner.open.push_back((number, socket));
        Some(UnauthenticatedPeer { unauthenticated: Arc::clone(self), number })
    }
}

impl UnauthenticatedPeer {
    /// It has said what it is, and is not closed for another one any more. False if it has been.
    pub(crate) fn make_known(&self) -> bool {
        let mut inner = lock(&self.unauthenticated.inner);
        let before = inner.open.len();
        inner.open.retain(|(number, _)| *number != self.number);
        inner.open.len() < before
    }
}

impl Drop for UnauthenticatedPeer {
    fn drop(&mut self) {
        let mut inner = lock(&self.unauthenticated.inner);
        inner.count -= 1;
        inner.open.retain(|(number, _)| *number != self.number);
    }
}
