//! What a running VM's memory means to a migration: zeros, what shrinks, what gets dirty.

use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::transfer::memory_sample::MemorySample;
use drainpipe_engine::transfer::relayed::Compressible;
use drainpipe_hypervisor::{self as hypervisor, Contents, Machine, VmError};
use drainpipe_relay::estimate;
use tracing::warn;

/// Memory that gets dirty more slowly goes once, but for little.
const RESTS_BELOW_BYTES_PER_S: u64 = 4 << 20;

/// Where more of a page than this changes at a time, it goes whole and not as what has changed of it, which may be
/// half as long as a page.
const PARTS_BELOW: f64 = 0.5;

/// Samples all of it. None if that is not possible: then a plan does without it, and says so.
pub(crate) async fn sample(vmm: &dyn Machine) -> Option<MemorySample> {
    let sampled = vmm.sample_memory().await.inspect_err(|error| not_looked_at(vmm, error)).ok()?;
    let hypervisor::MemorySample { zero_share, dirty_bytes_per_s, dirty_set_bytes, contents, .. } = sampled;
    let compressible = compressible_in(contents).await;
    Some(MemorySample { zero_share, dirty_bytes_per_s, dirty_set_bytes, compressible })
}

/// The share of it that is zero.
pub(crate) async fn zero_share(vmm: &dyn Machine) -> Option<f64> {
    let sampled = vmm.sample_contents().await.inspect_err(|error| not_looked_at(vmm, error));
    sampled.ok().map(|(zero_share, _)| zero_share)
}

/// The share of it that is zero, and what of the rest shrinks. Where compression was asked for, nothing is said of memory
/// that does not, but gets dirty in parts of its pages: these go as what has changed of them, and how much that brings
/// only sending them shows.
pub(crate) async fn contents(
    vmm: &dyn Machine,
    option: RequestedOption,
) -> (Option<f64>, Option<Compressible>) {
    let sampled = vmm.sample_contents().await.inspect_err(|error| not_looked_at(vmm, error));
    let Ok((zero_share, contents)) = sampled else { return (None, None) };
    let compressible = match compressible_in(contents).await {
        Some(compressible) if !compressible.shrinks() && option != RequestedOption::Auto => {
            unless_it_goes_as_changes(vmm, compressible).await
        }
        compressible => compressible,
    };
    (Some(zero_share), compressible)
}

async fn unless_it_goes_as_changes(vmm: &dyn Machine, compressible: Compressible) -> Option<Compressible> {
    let sampled = vmm.sample_memory().await.inspect_err(|error| not_looked_at(vmm, error)).ok()?;
    let goes_as_changes = goes_as_changes(sampled.dirty_bytes_per_s, sampled.dirty_share_of_pages);
    (!goes_as_changes).then_some(compressible)
}

/// Whether enough of the pages is sent again, and of these little enough has changed.
fn goes_as_changes(dirty_bytes_per_s: u64, dirty_share_of_pages: f64) -> bool {
    dirty_bytes_per_s >= RESTS_BELOW_BYTES_PER_S && dirty_share_of_pages <= PARTS_BELOW
}

async fn compressible_in(contents: Contents) -> Option<Compressible> {
    let packed = tokio::task::spawn_blocking(move || estimate(contents.bytes())).await;
    let failed =
        |error: &dyn std::fmt::Display| warn!(%error, "it is not known how much of a VM's memory shrinks");
    packed.inspect_err(|error| failed(error)).ok()?.inspect_err(|error| failed(error)).ok()
}

fn not_looked_at(vmm: &dyn Machine, error: &VmError) {
    warn!(vm = %vmm.spec().spec().name, %error, "its memory could not be sampled");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_rewritten_in_parts_is_left_to_be_seen() {
        const MIB: u64 = 1 << 20;
        assert!(goes_as_changes(150 * MIB, 0.07));
        assert!(!goes_as_changes(150 * MIB, 1.0), "whole pages that do not shrink");
        assert!(!goes_as_changes(MIB, 0.07), "it rests");
    }
}
