//! Senders of one host that pack. They look at the same idle cores.

use std::sync::{Arc, Mutex};

use crate::sockets::lock;

/// Those of a host, for all of its senders to share.
#[derive(Debug, Clone, Default)]
pub struct ConcurrentSenders(Arc<Mutex<Begun>>);

#[derive(Debug, Default)]
struct Begun {
    next: u64,
    /// By the order in which they began, and what packing takes of the cores for each.
    packing: Vec<(u64, f64)>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct ConcurrentSender {
    number: u64,
    all: ConcurrentSenders,
}

/// How one stands among all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Standing {
    /// From 0.
    pub(super) rank: usize,
    pub(super) all: usize,
    /// Cores that packing takes for all.
    pub(super) packing: f64,
}

impl ConcurrentSenders {
    pub(crate) fn begin(&self) -> ConcurrentSender {
        let mut begun = lock(&self.0);
        let number = begun.next;
        begun.next += 1;
        begun.packing.push((number, 0.0));
        ConcurrentSender { number, all: self.clone() }
    }
}

impl ConcurrentSender {
    /// Tells the others what packing takes for this one now.
    pub(super) fn takes(&self, packing: f64) -> Standing {
        let senders = &mut lock(&self.all.0).packing;
        let rank = senders.iter().position(|(number, _)| *number == self.number).unwrap_or_default();
        if let Some((_, own)) = senders.get_mut(rank) {
            *own = packing;
        }
        Standing { rank, all: senders.len(), packing: senders.iter().map(|(_, packing)| packing).sum() }
    }
}

impl Drop for ConcurrentSender {
    fn drop(&mut self) {
        lock(&self.all.0).packing.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_knows_how_many_pack_beside_it_and_what_that_takes() {
        let host = ConcurrentSenders::default();
        let [first, second] = [(); 2].map(|()| host.begin());
        assert_eq!(first.takes(1.5), Standing { rank: 0, all: 2, packing: 1.5 });
        assert_eq!(second.takes(0.5), Standing { rank: 1, all: 2, packing: 2.0 });
        assert_eq!(
            ConcurrentSenders::default().begin().takes(1.0),
            Standing { rank: 0, all: 1, packing: 1.0 }
        );
        drop(first);
        assert_eq!(second.takes(0.5), Standing { rank: 0, all: 1, packing: 0.5 });
    }
}
