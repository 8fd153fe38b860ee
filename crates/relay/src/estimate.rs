//! What packing would make of some memory, estimated before any of it is sent.

use drainpipe_engine::transfer::codec::Codec;
use drainpipe_engine::transfer::relayed::Compressible;

use crate::block::BLOCK_BYTES_MAX;
use crate::entropy_filter::EntropyFilter;
use crate::error::RelayError;
use crate::pack::Packer;

/// Packs memory as a sender would that has all the time: pages that follow each other, none of them zero. Takes some
/// 3 ms for each MiB that shrinks.
pub fn estimate(memory: &[u8]) -> Result<Compressible, RelayError> {
    let (mut entropy_filter, mut packer) = (EntropyFilter::new(), Packer::new());
    let (mut shrinking, mut left) = (0, 0);
    for block in memory.chunks(BLOCK_BYTES_MAX) {
        if !entropy_filter.look(block, 0) {
            continue;
        }
        let rest = entropy_filter.rest(block);
        if let Some(packed) = packer.pack(Codec::Zstd1, rest)? {
            shrinking += rest.len();
            left += packed.len();
        }
    }
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    let left = if shrinking == 0 { 1.0 } else { share(left, shrinking) };
    Ok(Compressible { share: share(shrinking, memory.len()), left })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entropy_filter::tests::noise;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_shrinks_is_told_from_what_does_not() {
        let text: Vec<u8> = noise(MIB / 8)
            .iter()
            .flat_map(|byte| format!("line {} of many, ", byte % 64).into_bytes())
            .take(MIB)
            .collect();
        let half = [&text[..], &noise(MIB)].concat();
        let found = estimate(&half).unwrap();
        assert!((found.share - 0.5).abs() < 0.02, "{found:?}");
        assert!(found.left > 0.01 && found.left < 0.4, "{found:?}");
    }

    #[test]
    fn random_memory_and_none_at_all_do_not_shrink() {
        for memory in [noise(MIB), vec![]] {
            assert_eq!(estimate(&memory).unwrap(), Compressible { share: 0.0, left: 1.0 });
        }
    }
}
