//! A thread that packs.

use std::time::Instant;

use drainpipe_engine::transfer::codec::Codec;
use thread_priority::NormalThreadSchedulePolicy;
use tracing::warn;

use super::Pool;
use super::bundle::{Item, PackedBlock, blocks};
use crate::entropy_filter::EntropyFilter;
use crate::error::RelayError;
use crate::figures::PackingTime;
use crate::idle_time::{stay_on, take_policy, thread_cpu};
use crate::pack::Packer;

/// While nobody waits for it: of most disks it leaves least for its time.
const STRONGER: Codec = Codec::Zstd1;

/// While somebody does.
const CHEAPER: Codec = Codec::Lz4;

/// Packs until all is over.
pub(super) fn run(pool: &Pool) {
    stay_on(&pool.settings.cpus);
    // A worker that never has work holds no memory.
    let mut tools = None;
    while let Some(item) = pool.take_work() {
        let packed = pack_all(pool, &item, tools.get_or_insert_with(Tools::new));
        item.is_over();
        pool.has_worked();
        if let Err(error) = packed {
            warn!(%error, "a part of a disk is sent uncompressed");
        }
    }
}

struct Tools {
    packer: Packer,
    entropy_filter: EntropyFilter,
}

impl Tools {
    fn new() -> Self {
        Self { packer: Packer::new(), entropy_filter: EntropyFilter::new() }
    }

    /// Takes nothing from the allocator, and gives nothing back.
    fn pack(&mut self, codec: Codec, block: &[u8]) -> Result<Option<usize>, RelayError> {
        if !self.entropy_filter.look(block, 0) {
            return Ok(None);
        }
        let packed = self.packer.pack(codec, self.entropy_filter.rest(block))?;
        Ok(packed.map(<[u8]>::len))
    }

    fn packed(&self, codec: Codec, block: &[u8], bytes: usize) -> PackedBlock {
        PackedBlock {
            packing: codec.into(),
            is_parted: self.entropy_filter.parts(),
            bytes: self.entropy_filter.written(block, self.packer.packed(bytes)),
        }
    }
}

fn pack_all(pool: &Pool, item: &Item, tools: &mut Tools) -> Result<(), RelayError> {
    let Some(raw) = item.begin() else { return Ok(()) };
    let raw = (*raw).as_ref();
    for block in blocks(0..raw.len()) {
        let block = &raw[block];
        let codec = if item.is_wanted() { CHEAPER } else { STRONGER };
        let packed = in_idle_time(pool, tools, codec, block)?;
        if !item.add(block, packed) || pool.is_too_many() {
            return Ok(());
        }
    }
    Ok(())
}

/// None where it does not shrink.
fn in_idle_time(
    pool: &Pool,
    tools: &mut Tools,
    codec: Codec,
    block: &[u8],
) -> Result<Option<PackedBlock>, RelayError> {
    let (began, cpu_before) = (Instant::now(), thread_cpu());
    tools.packer.set_up(codec)?;
    // For the packing alone: who has no core must not hold a lock that others wait for, nor one of the allocator's.
    if let Err(error) = take_policy(NormalThreadSchedulePolicy::Idle) {
        pool.stop_packing(&error);
        return Err(RelayError::Pack(error));
    }
    let packed = tools.pack(codec, block);
    let is_back = take_policy(NormalThreadSchedulePolicy::Other);
    pool.has_packed(PackingTime { cpu: thread_cpu().saturating_sub(cpu_before), wall: began.elapsed() });
    if let Err(error) = is_back {
        pool.stop_packing(&error);
        return Err(RelayError::Pack(error));
    }
    Ok(packed?.map(|bytes| tools.packed(codec, block, bytes)))
}
