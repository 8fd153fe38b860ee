//! What a running VM's memory is to a migration: zeros, what shrinks, what gets dirty.

use drainpipe_engine::drain::view::MemorySample;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::relayed::Compressible;
use drainpipe_hypervisor::{self as hypervisor, Contents, Vmm};
use drainpipe_relay::prospect;
use tracing::warn;

/// Memory that gets dirty more slowly goes once, but for little.
const RESTS_BELOW_BYTES_PER_S: u64 = 4 << 20;

/// All of it. Nothing where it cannot be told: then a plan reckons without it, and says so.
pub(crate) async fn sample(vmm: &Vmm) -> Option<MemorySample> {
    let sampled = vmm.sample_memory().await.inspect_err(|error| not_looked_at(vmm, error)).ok()?;
    let hypervisor::MemorySample { zero_share, dirty_bytes_per_s, dirty_set_bytes, contents } = sampled;
    let compressible = compressible_in(contents).await;
    Some(MemorySample { zero_share, dirty_bytes_per_s, dirty_set_bytes, compressible })
}

/// What of it shrinks. Where compression was asked for, nothing is said of memory that does not, but gets dirty: it
/// may go as what has changed of it, which only sending it shows.
pub(crate) async fn compressible(vmm: &Vmm, option: RequestedOption) -> Option<Compressible> {
    let contents = vmm.sample_contents().await.inspect_err(|error| not_looked_at(vmm, error)).ok()?;
    let compressible = compressible_in(contents).await?;
    if compressible.shrinks() || option == RequestedOption::Auto {
        return Some(compressible);
    }
    let sampled = vmm.sample_memory().await.inspect_err(|error| not_looked_at(vmm, error)).ok()?;
    (sampled.dirty_bytes_per_s < RESTS_BELOW_BYTES_PER_S).then_some(compressible)
}

async fn compressible_in(contents: Contents) -> Option<Compressible> {
    let packed = tokio::task::spawn_blocking(move || prospect(contents.bytes())).await;
    let failed = |error: &dyn std::fmt::Display| warn!(%error, "what of a VM's memory shrinks is not known");
    packed.inspect_err(|error| failed(error)).ok()?.inspect_err(|error| failed(error)).ok()
}

fn not_looked_at(vmm: &Vmm, error: &hypervisor::SampleError) {
    warn!(vm = %vmm.spec().spec().name, %error, "its memory could not be looked at");
}
