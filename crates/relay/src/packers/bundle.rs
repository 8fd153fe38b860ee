//! Data that is being packed until somebody takes it.

use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use super::{Pool, SharedBytes};
use crate::block::BLOCK_BYTES_MAX;
use crate::frame::{Frame, Packing};
use crate::pack::is_worth_unpacking;
use crate::sockets::lock;

/// Some data, and what became of them so far.
#[derive(Debug, Clone)]
pub struct Bundle {
    item: Arc<Item>,
    pool: Arc<Pool>,
}

impl Bundle {
    pub(super) fn new(item: Arc<Item>, pool: Arc<Pool>) -> Self {
        Self { item, pool }
    }

    /// Waits until nothing more will become of them, which whoever asks has to bound. At once where no thread has begun
    /// with them, and none is about to.
    pub async fn done(&self) {
        self.item.is_wanted.store(true, Ordering::Relaxed);
        poll_fn(|context| self.poll(context)).await;
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut state = lock(&self.item.state);
        let begins = self.pool.may_pack() && !self.pool.is_starved.load(Ordering::Relaxed);
        if state.stage == Stage::Over || (state.stage == Stage::Waits && !begins) {
            return Poll::Ready(());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// As frames of blocks, packed as far as it came; none if that is hardly shorter. The same whenever it is asked.
    pub fn take(&self) -> Option<Arc<Vec<u8>>> {
        let mut state = lock(&self.item.state);
        if state.stage == Stage::Waits && self.item.is_wanted() {
            self.pool.is_starved.store(true, Ordering::Relaxed);
        }
        state.end();
        state.packed.clone()
    }
}

/// The same, among others.
pub(super) struct Item {
    is_wanted: AtomicBool,
    state: Mutex<BundleState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waits,
    InWork,
    Over,
}

struct BundleState {
    stage: Stage,
    // Until it is taken.
    raw: Option<SharedBytes>,
    raw_bytes: usize,
    // Frames that hold this many bytes from its start.
    frames: Vec<u8>,
    framed_bytes: usize,
    has_shrunk: bool,
    packed: Option<Arc<Vec<u8>>>,
    waker: Option<Waker>,
}

impl BundleState {
    /// Nothing more becomes of it.
    fn is_over(&mut self) -> Option<Waker> {
        self.stage = Stage::Over;
        self.waker.take()
    }

    fn end(&mut self) {
        self.is_over();
        let Some(raw) = self.raw.take() else { return };
        let mut frames = std::mem::take(&mut self.frames);
        if !self.has_shrunk {
            return;
        }
        for block in blocks(self.framed_bytes..self.raw_bytes) {
            frame_raw(&(*raw).as_ref()[block], &mut frames);
        }
        if is_worth_unpacking(frames.len(), self.raw_bytes) {
            self.packed = Some(Arc::new(frames));
        }
    }
}

impl Item {
    pub(super) fn new(raw: SharedBytes) -> Self {
        let state = BundleState {
            stage: Stage::Waits,
            raw_bytes: (*raw).as_ref().len(),
            raw: Some(raw),
            frames: vec![],
            framed_bytes: 0,
            has_shrunk: false,
            packed: None,
            waker: None,
        };
        Self { is_wanted: AtomicBool::new(false), state: Mutex::new(state) }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted.load(Ordering::Relaxed)
    }

    /// Whether nobody has begun with it, or taken it.
    pub(super) fn waits(&self) -> bool {
        lock(&self.state).stage == Stage::Waits
    }

    /// What is to be packed, unless it was taken.
    pub(super) fn begin(&self) -> Option<SharedBytes> {
        let mut state = lock(&self.state);
        let raw = state.raw.clone()?;
        state.stage = Stage::InWork;
        Some(raw)
    }

    /// The next block as it goes out. Whether there is any use in another one.
    pub(super) fn add(&self, block: &[u8], packed: Option<PackedBlock>) -> bool {
        let mut state = lock(&self.state);
        if state.raw.is_none() {
            return false;
        }
        state.framed_bytes += block.len();
        match packed {
            Some(packed) => {
                state.has_shrunk = true;
                packed.write(block.len(), &mut state.frames);
            }
            None => frame_raw(block, &mut state.frames),
        }
        true
    }

    /// Nothing more becomes of it; those who wait for it learn that.
    pub(super) fn is_over(&self) {
        let waker = lock(&self.state).is_over();
        waker.into_iter().for_each(Waker::wake);
    }
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Item").field("is_wanted", &self.is_wanted).finish_non_exhaustive()
    }
}

/// A block that shrank.
pub(super) struct PackedBlock {
    pub(super) packing: Packing,
    pub(super) is_parted: bool,
    pub(super) bytes: Vec<u8>,
}

impl PackedBlock {
    fn write(&self, raw_bytes: usize, to: &mut Vec<u8>) {
        let Self { packing, is_parted, bytes } = self;
        let (packing, is_parted, wire_bytes) = (*packing, *is_parted, bytes.len());
        let frame = Frame::Block { packing, is_paged: false, is_parted, raw_bytes, wire_bytes };
        to.extend_from_slice(&frame.encode());
        to.extend_from_slice(bytes);
    }
}

fn frame_raw(block: &[u8], to: &mut Vec<u8>) {
    let bytes = block.len();
    let frame = Frame::Block {
        packing: Packing::Raw,
        is_paged: false,
        is_parted: false,
        raw_bytes: bytes,
        wire_bytes: bytes,
    };
    to.extend_from_slice(&frame.encode());
    to.extend_from_slice(block);
}

/// Cut as the other end takes them.
pub(super) fn blocks(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(BLOCK_BYTES_MAX).map(move |begin| begin..end.min(begin + BLOCK_BYTES_MAX))
}
