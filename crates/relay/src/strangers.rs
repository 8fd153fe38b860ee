//! Connections that have not said yet what they are.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use socket2::{SockRef, Socket};

use crate::CONNECTIONS_MAX;
use crate::sockets::lock;

/// So many may be there at once: a stranger cannot take the memory of a host. For another one the oldest is
/// closed: nor can a stranger keep the sender out, by being silent.
const STRANGERS_MAX: usize = CONNECTIONS_MAX;

/// So many may be left of those that were closed, until their threads have seen it.
const CLOSED_MAX: usize = CONNECTIONS_MAX;

/// Connections that have not said yet what they are.
#[derive(Debug, Default)]
pub(crate) struct Strangers {
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
pub(crate) struct Stranger {
    strangers: Arc<Strangers>,
    number: u64,
}

impl Strangers {
    /// Takes one in, and closes the oldest if there are too many. None if that is not possible either.
    pub(crate) fn take_in(self: &Arc<Self>, wire: &TcpStream) -> Option<Stranger> {
        let socket = SockRef::from(wire).try_clone().ok()?;
        let mut inner = lock(&self.inner);
        if inner.count >= STRANGERS_MAX + CLOSED_MAX {
            return None;
        }
        if inner.open.len() >= STRANGERS_MAX
            && let Some((_, oldest)) = inner.open.pop_front()
        {
            // One that the peer has closed already is none to wait on.
            drop(oldest.shutdown(Shutdown::Both));
        }
        let number = inner.next;
        inner.next += 1;
        inner.count += 1;
        inner.open.push_back((number, socket));
        Some(Stranger { strangers: Arc::clone(self), number })
    }
}

impl Stranger {
    /// It has said what it is, and is not closed for another one any more. False if it has been.
    pub(crate) fn make_known(&self) -> bool {
        let mut inner = lock(&self.strangers.inner);
        let before = inner.open.len();
        inner.open.retain(|(number, _)| *number != self.number);
        inner.open.len() < before
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut inner = lock(&self.strangers.inner);
        inner.count -= 1;
        inner.open.retain(|(number, _)| *number != self.number);
    }
}
