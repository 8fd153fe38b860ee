//! The threads that pack. They take idle time only.

use std::sync::Arc;
use std::time::{Duration, Instant};

use drainpipe_engine::transfer::codec::{Codec, CodecTrial};
use thread_priority::NormalThreadSchedulePolicy;

use super::shared::{Done, Order, Shared};
use crate::entropy_filter::EntropyFilter;
use crate::error::RelayError;
use crate::figures::{PackingTime, PastCodec};
use crate::frame::UNPACKED_BYTES_MAX;
use crate::idle_time::{stay_on, take_policy, thread_cpu};
use crate::multifd::PageAt;
use crate::pack::{Packer, Trier};
use crate::page_cache::PageChange;
use crate::paged;
use crate::queue::Packed;

/// Packs until all is over.
pub(super) fn run(shared: &Shared) {
    stay_on(&shared.settings.cpus);
    if let Err(error) = pack_all(shared) {
        shared.fail(error);
    }
}

fn pack_all(shared: &Shared) -> Result<(), RelayError> {
    // A thread that never has work holds no memory.
    let mut tools = None;
    while let Some(order) = shared.take_work() {
        let mut packing = BlockInWork::begin(tools.get_or_insert_with(Tools::new), order)?;
        // For the packing alone: who has no core must not hold a lock that the wire's threads wait for, nor one of the
        // allocator's.
        if let Err(error) = take_policy(NormalThreadSchedulePolicy::Idle) {
            // It would take of the cores what VMs want.
            shared.cannot_yield(packing.order, &error);
            continue;
        }
        let is_packed = packing.pack();
        let is_back = take_policy(NormalThreadSchedulePolicy::Other);
        is_packed?;
        shared.finish(packing.end());
        if let Err(error) = is_back {
            shared.stop_packing(&error);
            break;
        }
    }
    Ok(())
}

/// What a thread packs with, one block after the other, with room for any.
pub(super) struct Tools {
    packer: Packer,
    entropy_filter: EntropyFilter,
    paged: Vec<u8>,
}

impl Tools {
    pub(super) fn new() -> Self {
        let paged = Vec::with_capacity(UNPACKED_BYTES_MAX);
        Self { packer: Packer::new(), entropy_filter: EntropyFilter::new(), paged }
    }
}

/// A block on its way through a thread that packs.
///
/// What it takes from the allocator, it takes before the packing and after. glibc gives what is longer than 1032 bytes
/// from arenas, which threads share where there are many, and to which whoever frees it gives it back: a writer frees
/// copies of pages with the sender's lock in its hand.
pub(super) struct BlockInWork<'a> {
    tools: &'a mut Tools,
    order: Order,
    // What the slots hold then.
    contents: Vec<Arc<[u8]>>,
    packed_bytes: Option<usize>,
    trials: Option<[CodecTrial; Codec::ALL.len()]>,
    began: Instant,
    cpu_before: Duration,
}

impl<'a> BlockInWork<'a> {
    pub(super) fn begin(tools: &'a mut Tools, mut order: Order) -> Result<Self, RelayError> {
        let (began, cpu_before) = (Instant::now(), thread_cpu());
        tools.packer.set_up(order.codec)?;
        order.trier.as_mut().map(Trier::set_up).transpose()?;
        let contents = paged::contents(&order.work.raw, &order.taken);
        Ok(Self { tools, order, contents, packed_bytes: None, trials: None, began, cpu_before })
    }

    /// Takes nothing from the allocator, and gives nothing back.
    pub(super) fn pack(&mut self) -> Result<(), RelayError> {
        let Tools { packer, entropy_filter, paged } = &mut *self.tools;
        let Order { work, codec, trier, taken } = &mut self.order;
        if !taken.is_empty() {
            paged.clear();
            paged::encode(&work.raw, taken, paged);
        }
        let unpacked: &[u8] = if taken.is_empty() { &work.raw } else { paged };
        if entropy_filter.look(unpacked, page_at(work.raw.pages(), taken.len())) {
            let rest = entropy_filter.rest(unpacked);
            self.trials = trier.as_mut().map(|trier| try_all(trier, rest, unpacked.len())).transpose()?;
            self.packed_bytes = packer.pack(*codec, rest)?.map(<[u8]>::len);
        }
        Ok(())
    }

    /// What waits to be sent has no more room than it needs.
    pub(super) fn end(self) -> Done {
        let Tools { packer, entropy_filter, paged } = self.tools;
        let Order { work, codec, trier, taken } = self.order;
        let unpacked: &[u8] = if taken.is_empty() { &work.raw } else { paged };
        let syncs = work.raw.syncs();
        let change = (!taken.is_empty()).then_some(PageChange { taken, contents: self.contents, syncs });
        let packed = match self.packed_bytes {
            Some(bytes) => Some(Packed {
                codec: Some(codec),
                bytes: entropy_filter.written(unpacked, packer.packed(bytes)),
                unpacked_bytes: unpacked.len(),
                is_parted: entropy_filter.parts(),
                past_codec: past_codec(entropy_filter, unpacked, change.is_some()),
                change,
            }),
            None => change.map(|change| packed_by_changes(work.raw.len(), unpacked, change)),
        };
        let took =
            PackingTime { cpu: thread_cpu().saturating_sub(self.cpu_before), wall: self.began.elapsed() };
        Done { work, packed, trier, trials: self.trials, took }
    }
}

/// The whole way of a block.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn pack(tools: &mut Tools, order: Order) -> Result<Done, RelayError> {
    let mut packing = BlockInWork::begin(tools, order)?;
    packing.pack()?;
    Ok(packing.end())
}

/// A block of `raw_bytes` that no codec makes shorter.
fn packed_by_changes(raw_bytes: usize, paged: &[u8], change: PageChange) -> Packed {
    let changed_bytes = paged::changed_bytes(paged);
    Packed {
        codec: None,
        bytes: paged.to_vec(),
        unpacked_bytes: paged.len(),
        is_parted: false,
        past_codec: PastCodec { plain_bytes: raw_bytes - changed_bytes, changed_bytes },
        change: Some(change),
    }
}

/// The part of a block that bypasses the codec, after the entropy filter has looked at it, or at its changes.
fn past_codec(entropy_filter: &EntropyFilter, unpacked: &[u8], is_paged: bool) -> PastCodec {
    let chunks = entropy_filter.plain_chunks(unpacked.len());
    if is_paged {
        return paged::past_codec(unpacked, chunks);
    }
    PastCodec { plain_bytes: chunks.map(|chunk| chunk.len()).sum(), changed_bytes: 0 }
}

/// Where the first page begins, or near enough: in a block that sends only the changes of `taken` pages, or
/// of none.
fn page_at(pages: &[PageAt], taken: usize) -> usize {
    let before = if taken == 0 { 0 } else { paged::entries_bytes(taken) };
    before + pages.first().map_or(0, |page| page.at)
}

/// Packs what is left of a block, of `bytes`, with every codec.
fn try_all(
    trier: &mut Trier,
    rest: &[u8],
    bytes: usize,
) -> Result<[CodecTrial; Codec::ALL.len()], RelayError> {
    trier.compare(|packer, codec| {
        let before = thread_cpu();
        let saved = packer.pack(codec, rest)?.map_or(0, |packed| rest.len() - packed.len());
        let cpu = thread_cpu().saturating_sub(before);
        Ok(CodecTrial {
            seconds_per_byte: cpu.as_secs_f64() / bytes as f64,
            packed_share: (bytes - saved) as f64 / bytes as f64,
        })
    })
}
