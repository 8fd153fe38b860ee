//! Slots for connections: bounded in number, shared out among those who connect.

use std::sync::{Arc, Mutex};

use drainpipe_engine::connections::{OpenConnection, Priority, Room, room};
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::sync::oneshot;
use tracing::debug;

use crate::store::lock::lock;

/// Connections without a certificate that are in their handshake: for more, the oldest of the greediest address is closed.
const UNAUTHENTICATED_MAX: usize = 512;

/// Connections of hosts and operators.
const KNOWN_MAX: usize = 256;

/// Connections on which the end has been announced, and that have not ended yet.
const CLOSING_MAX: usize = 128;

/// Descriptors that the agent wants to be allowed: connections of relays, probes and watches come on top.
const DESCRIPTORS_WANTED: u64 = 16_384;

/// How many connections there may be of each kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) unauthenticated: usize,
    pub(crate) known: usize,
    pub(crate) closing: usize,
}

impl Bounds {
    /// At most half of the descriptors that this process may have.
    pub(crate) fn of_this_process() -> Self {
        Self::within(raise_descriptors())
    }

    fn within(descriptors: u64) -> Self {
        let descriptors = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self {
            unauthenticated: (descriptors / 4).clamp(1, UNAUTHENTICATED_MAX),
            known: (descriptors / 8).clamp(1, KNOWN_MAX),
            closing: (descriptors / 8).clamp(1, CLOSING_MAX),
        }
    }

    /// All descriptors that connections take at once.
    pub(crate) fn all(self) -> usize {
        self.unauthenticated + self.known + self.closing
    }
}

/// The soft limit is often 1024, for the sake of programs that call `select`; the hard one says what is allowed.
fn raise_descriptors() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    // None is no limit.
    let hard = limit.maximum.unwrap_or(u64::MAX);
    let soft = limit.current.unwrap_or(u64::MAX);
    let wanted = soft.max(DESCRIPTORS_WANTED.min(hard));
    limit.current = Some(wanted);
    match setrlimit(Resource::Nofile, limit) {
        Ok(()) => wanted,
        Err(error) => {
            debug!(%error, "cannot raise the limit of descriptors");
            soft
        }
    }
}

/// Slots for connections, each held by somebody.
#[derive(Debug)]
pub(crate) struct ConnectionSlots<H> {
    count: usize,
    inner: Mutex<Inner<H>>,
}

#[derive(Debug)]
struct Inner<H> {
    // The same position in both.
    open: Vec<OpenConnection<H>>,
    closers: Vec<Closer>,
    next: u64,
}

#[derive(Debug)]
struct Closer {
    number: u64,
    _close: oneshot::Sender<()>,
}

/// The slot of one connection, until it is dropped or another one gets it.
#[derive(Debug)]
pub(crate) struct ConnectionSlot<H> {
    number: u64,
    slots: Arc<ConnectionSlots<H>>,
}

/// Comes when the slot of a connection has been given to another one.
pub(crate) type Closing = oneshot::Receiver<()>;

impl<H: Ord + Clone> ConnectionSlots<H> {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let inner = Mutex::new(Inner { open: vec![], closers: vec![], next: 0 });
        Arc::new(Self { count, inner })
    }

    /// A slot for a connection of `holder`, which is idle; perhaps that of another one, which is to close. None if there
    /// is no slot that it may have.
    pub(crate) fn take(
        self: &Arc<Self>,
        holder: &H,
        priority: impl Fn(&H) -> Priority,
    ) -> Option<(ConnectionSlot<H>, Closing)> {
        let mut inner = lock(&self.inner);
        if inner.open.len() >= self.count {
            for one in &mut inner.open {
                one.priority = priority(&one.holder);
            }
        }
        let own = priority(holder);
        match room(&inner.open, self.count, holder, own) {
            Room::Free => {}
            Room::InPlaceOf(position) => inner.remove(position),
            Room::None => return None,
        }
        let number = inner.next();
        let (close, closing) = oneshot::channel();
        inner.open.push(OpenConnection {
            holder: holder.clone(),
            priority: own,
            is_idle: true,
            since: number,
        });
        inner.closers.push(Closer { number, _close: close });
        Some((ConnectionSlot { number, slots: Arc::clone(self) }, closing))
    }
}

impl<H> Inner<H> {
    fn next(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn position(&self, number: u64) -> Option<usize> {
        self.closers.iter().position(|closer| closer.number == number)
    }

    fn remove(&mut self, position: usize) {
        self.open.swap_remove(position);
        self.closers.swap_remove(position);
    }
}

impl<H> ConnectionSlot<H> {
    /// Whether somebody waits for an answer on this connection.
    pub(crate) fn set_idle(&self, is_idle: bool) {
        let mut inner = lock(&self.slots.inner);
        let since = inner.next();
        if let Some(position) = inner.position(self.number) {
            let open = &mut inner.open[position];
            (open.is_idle, open.since) = (is_idle, since);
        }
    }
}

impl<H> Drop for ConnectionSlot<H> {
    fn drop(&mut self) {
        let mut inner = lock(&self.slots.inner);
        if let Some(position) = inner.position(self.number) {
            inner.remove(position);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    fn usual(_: &&str) -> Priority {
        Priority::Usual
    }

    #[test]
    fn who_has_most_gives_way_and_is_told() {
        let slots = ConnectionSlots::new(3);
        let mut taken: Vec<_> = (0..3).map(|_| slots.take(&"a", usual).unwrap()).collect();
        taken[0].0.set_idle(false);
        let _b = slots.take(&"b", usual).unwrap();
        assert_eq!(taken[0].1.try_recv(), Err(TryRecvError::Empty), "somebody waits for it");
        assert_eq!(taken[1].1.try_recv(), Err(TryRecvError::Closed));
        assert_eq!(taken[2].1.try_recv(), Err(TryRecvError::Empty));
    }

    #[test]
    fn priority_is_that_of_now() {
        let slots = ConnectionSlots::new(2);
        let mut of_a = slots.take(&"a", usual).unwrap();
        let mut of_b = slots.take(&"b", usual).unwrap();
        let first = |holder: &&str| if *holder == "b" { Priority::Usual } else { Priority::First };
        let _c = slots.take(&"c", first).unwrap();
        assert_eq!(of_a.1.try_recv(), Err(TryRecvError::Empty), "it is in a migration by now");
        assert_eq!(of_b.1.try_recv(), Err(TryRecvError::Closed));
    }

    #[test]
    fn nothing_is_kept_of_connections_that_are_over() {
        let slots = ConnectionSlots::new(2);
        for _ in 0..100 {
            let first = slots.take(&"a", usual).unwrap();
            let second = slots.take(&"a", usual).unwrap();
            let third = slots.take(&"b", usual).unwrap();
            drop((third, first, second));
        }
        assert!(lock(&slots.inner).open.is_empty() && lock(&slots.inner).closers.is_empty());
    }

    #[test]
    fn connections_take_at_most_half_of_the_descriptors() {
        assert_eq!(Bounds::within(1 << 20).all(), UNAUTHENTICATED_MAX + KNOWN_MAX + CLOSING_MAX);
        for descriptors in [64, 1024, 4096] {
            assert!(Bounds::within(descriptors).all() <= usize::try_from(descriptors).unwrap() / 2);
        }
    }
}
