//! Threads that pack data which other code sends, in any order: as much as idle cores can pack before it is wanted.
//!
//! ```text
//! offer ─► waits ─► in work, block by block ─► taken: frames of blocks, packed as far as it came
//! ```
//!
//! The sender takes what is packed at that moment, so that nothing waits longer than it wants to. The idle cores
//! decide how many threads pack, as with a [`Sender`](crate::Sender)'s threads, and these count among those.

mod bundle;
mod controller;
mod unpacker;
mod worker;

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use drainpipe_engine::host::idle_cores::Allowance;
use tracing::warn;

pub use self::bundle::Bundle;
use self::bundle::Item;
pub use self::unpacker::BundleUnpacker;
use crate::PACKING_THREADS_MAX;
use crate::entropy_filter::is_worth_packing;
use crate::figures::PackingTime;
use crate::sender::ConcurrentSenders;
use crate::sockets::{lock, spawn};

/// Data that may wait to be packed. Others go as they are.
const QUEUE_MAX: usize = 64;

/// Bytes that somebody else holds, too.
pub(crate) type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Which threads pack.
#[derive(Debug, Clone)]
pub struct PackersSettings {
    /// At most, in idle time only. More than [`PACKING_THREADS_MAX`] are as many.
    pub cores: usize,
    /// The CPUs on which they pack; empty for all on which this process may run.
    pub cpus: Vec<usize>,
    /// Whether the kernel lets `SCHED_IDLE` count between these threads and the VMs that run here.
    pub gives_way: bool,
    /// What else packs on this host, and looks at the same idle cores.
    pub concurrent: ConcurrentSenders,
}

/// The threads, until all clones are dropped.
#[derive(Debug, Clone)]
pub struct Packers(Arc<Owner>);

#[derive(Debug)]
struct Owner(Arc<Pool>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Packers {
    /// Starts them.
    pub fn start(settings: PackersSettings) -> io::Result<Self> {
        let settings = PackersSettings { cores: settings.cores.min(PACKING_THREADS_MAX), ..settings };
        let packers = Self(Arc::new(Owner(Arc::new(Pool::new(settings)))));
        let pool = &packers.0.0;
        for number in 0..pool.settings.cores {
            let pool = Arc::clone(pool);
            spawn(format!("disk-pack-{number}"), move || worker::run(&pool))?;
        }
        let pool = Arc::clone(pool);
        spawn("disk-control".into(), move || controller::run(&pool))?;
        Ok(packers)
    }

    /// Whether it may bring anything to pack these: they do not look random, and some core is idle.
    pub fn would_pack(&self, raw: &[u8]) -> bool {
        self.0.0.may_pack() && is_worth_packing(raw)
    }

    /// Has data packed until they are taken. None where too much waits for that already, or nothing is packed any more.
    pub fn offer(&self, raw: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Option<Bundle> {
        let pool = &self.0.0;
        let item = Arc::new(Item::new(raw));
        pool.push(Arc::clone(&item)).then(|| Bundle::new(item, Arc::clone(pool)))
    }

    /// Packs nothing more.
    pub fn close(&self) {
        self.0.0.close();
    }

    /// CPU that packing took so far.
    pub fn cpu(&self) -> Duration {
        lock(&self.0.0.inner).cpu
    }
}

#[derive(Debug)]
struct Pool {
    settings: PackersSettings,
    inner: Mutex<Inner>,
    work: Condvar,
    steer: Condvar,
    // Whether any thread may pack.
    packs: AtomicBool,
    // Somebody has waited in vain for a thread to begin.
    is_starved: AtomicBool,
}

#[derive(Debug)]
struct Inner {
    queue: VecDeque<Arc<Item>>,
    allowed: usize,
    // None where what they took would be missed by others.
    allowed_max: usize,
    packing_now: usize,
    is_closed: bool,
    // Since the last look of those that steer, and ever.
    packing: PackingTime,
    cpu: Duration,
}

impl Pool {
    fn new(settings: PackersSettings) -> Self {
        let allowed = Allowance::new(settings.cores, settings.gives_way).allowed();
        let inner = Inner {
            queue: VecDeque::new(),
            allowed,
            allowed_max: settings.cores,
            packing_now: 0,
            is_closed: false,
            packing: PackingTime::default(),
            cpu: Duration::ZERO,
        };
        Self {
            settings,
            inner: Mutex::new(inner),
            work: Condvar::new(),
            steer: Condvar::new(),
            packs: AtomicBool::new(allowed > 0),
            is_starved: AtomicBool::new(false),
        }
    }

    fn may_pack(&self) -> bool {
        self.packs.load(Ordering::Relaxed)
    }

    /// Whether it took its place.
    fn push(&self, item: Arc<Item>) -> bool {
        let mut inner = lock(&self.inner);
        if inner.queue.len() >= QUEUE_MAX {
            inner.queue.retain(|item| item.waits());
        }
        if inner.is_closed || inner.queue.len() >= QUEUE_MAX {
            return false;
        }
        inner.queue.push_back(item);
        let find_work = inner.packing_now < inner.allowed;
        drop(inner);
        if find_work {
            self.work.notify_one();
        }
        true
    }

    /// Waits for data to pack; none once all is over.
    fn take_work(&self) -> Option<Arc<Item>> {
        let mut inner = lock(&self.inner);
        loop {
            if inner.is_closed {
                return None;
            }
            if inner.packing_now < inner.allowed
                && let Some(item) = next(&mut inner.queue)
            {
                inner.packing_now += 1;
                return Some(item);
            }
            // Whoever brings work, lets more pack or ends it all wakes it.
            inner = self.work.wait(inner).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    /// A block took so much.
    fn has_packed(&self, took: PackingTime) {
        let mut inner = lock(&self.inner);
        inner.packing.cpu += took.cpu;
        inner.packing.wall += took.wall;
        inner.cpu += took.cpu;
        drop(inner);
        self.is_starved.store(false, Ordering::Relaxed);
    }

    /// Nothing more is done with what was [taken](Self::take_work).
    fn has_worked(&self) {
        lock(&self.inner).packing_now -= 1;
    }

    /// Whether there are more threads at work than may be.
    fn is_too_many(&self) -> bool {
        let inner = lock(&self.inner);
        inner.is_closed || inner.packing_now > inner.allowed
    }

    fn allow(&self, threads: usize) {
        let mut inner = lock(&self.inner);
        inner.allowed = threads.min(inner.allowed_max);
        self.tell_whether_it_packs(&inner);
        drop(inner);
        self.work.notify_all();
    }

    fn tell_whether_it_packs(&self, inner: &MutexGuard<'_, Inner>) {
        self.packs.store(inner.allowed > 0 && !inner.is_closed, Ordering::Relaxed);
    }

    /// The kernel does not let threads take idle time only, or not take more again.
    fn stop_packing(&self, error: &str) {
        let mut inner = lock(&self.inner);
        let was_allowed = std::mem::take(&mut inner.allowed_max) > 0;
        inner.allowed = 0;
        self.tell_whether_it_packs(&inner);
        drop(inner);
        if was_allowed {
            warn!(%error, "disks are not compressed: see `nothing more is compressed` in docs/compression.md");
        }
    }

    fn close(&self) {
        let mut inner = lock(&self.inner);
        inner.is_closed = true;
        self.tell_whether_it_packs(&inner);
        for item in inner.queue.drain(..) {
            item.is_over();
        }
        drop(inner);
        self.work.notify_all();
        self.steer.notify_all();
    }
}

/// What somebody waits for, else the oldest.
fn next(queue: &mut VecDeque<Arc<Item>>) -> Option<Arc<Item>> {
    queue.retain(|item| item.waits());
    let at = queue.iter().position(|item| item.is_wanted()).unwrap_or_default();
    queue.remove(at)
}

#[cfg(test)]
mod tests;
