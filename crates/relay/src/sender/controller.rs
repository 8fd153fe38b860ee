//! Looks some ten times a second at what limits the sender and at what else wants the host's cores, and sets
//! the codecs, how much may wait, and how many threads pack.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drainpipe_engine::bandwidth::wire_rate::WireRate;
use drainpipe_engine::host::idle_cores::{Allowance, CoresSample, SAMPLE_EVERY_MS, share_of};
use drainpipe_engine::transfer::codec::Reading;

use super::concurrent_senders::ConcurrentSender;
use super::shared::{Past, Shared};
use super::unsent::unsent_bytes;
use crate::block::BLOCK_BYTES_MAX;
use crate::figures::PackingTime;
use crate::host_cpu::HostCpu;

pub(crate) const STEER_EVERY: Duration = Duration::from_millis(SAMPLE_EVERY_MS);

/// How much may wait in the sender's streams, by the time that the wire needs for it. The program counts it as sent.
const STREAMS: Duration = Duration::from_millis(40);

/// How long a stream waits for a block to be packed: half of the time that its part of the wire needs for one as
/// it is, within these bounds. Packing takes less than a millisecond, but who packs may have to wait for a core.
/// The sockets hold more than the wire takes meanwhile.
const PATIENCE_MIN: Duration = Duration::from_millis(1);
const PATIENCE_MAX: Duration = Duration::from_millis(8);

/// Less packing than this says nothing about the cores.
const PACKING_MIN: Duration = Duration::from_millis(5);

/// Steers until all is over.
pub(super) fn run(shared: &Shared) {
    let this = shared.settings.concurrent.begin();
    let (mut at, mut figures) = (Instant::now(), shared.counters.read());
    let mut host = HostCpu::new(shared.settings.cpus.clone());
    let mut allowance = shared.settings.allowance();
    let mut threads = allowance.allowed();
    let mut cores = shared.settings.cores as f64;
    let mut wire_rate = WireRate::default();
    while let Some(Past { packing, wire_full }) = shared.wait_to_steer(STEER_EVERY) {
        let (at_before, before) = (at, figures);
        (at, figures) = (Instant::now(), shared.counters.read());
        let sample = host.sample(packing);
        cores = cores_of(packing, sample, threads).unwrap_or(cores);
        if let Some(sample) = sample {
            threads = may_pack(&mut allowance, sample, &this, shared.settings.gives_way);
            shared.allow(threads);
        }
        let time = at.duration_since(at_before).as_secs_f64();
        let raw_bytes_per_second = (figures.raw_bytes - before.raw_bytes) as f64 / time;
        let wire_bytes_per_second = (figures.wire_bytes - before.wire_bytes) as f64 / time;
        if let Some(takes) = wire_rate.follow(wire_bytes_per_second, wire_full.as_secs_f64() / time) {
            steer(shared, Reading { wire_bytes_per_second: takes, cores }, raw_bytes_per_second);
        }
    }
}

/// Those that do not give way share what is idle: if each took it for its own, all would rise at once, and all fall.
pub(crate) fn may_pack(
    allowance: &mut Allowance,
    sample: CoresSample,
    this: &ConcurrentSender,
    gives_way: bool,
) -> usize {
    let among = this.takes(sample.packing);
    if gives_way {
        return allowance.follow(sample);
    }
    let threads = allowance.follow(CoresSample { packing: among.packing, ..sample });
    share_of(threads, among.rank, among.all)
}

/// For a wire that does not take all that comes.
fn steer(shared: &Shared, reading: Reading, raw_bytes_per_second: f64) {
    let connections = shared.settings.connections as f64;
    let depth = raw_bytes_per_second / connections * STREAMS.as_secs_f64() / BLOCK_BYTES_MAX as f64;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it saturates, and is positive"
    )]
    shared.steer(reading, depth as usize);
    let block_seconds = BLOCK_BYTES_MAX as f64 * connections / reading.wire_bytes_per_second.max(1.0);
    let patience = Duration::from_secs_f64(block_seconds / 2.0).clamp(PATIENCE_MIN, PATIENCE_MAX);
    shared.patience_us.store(u64::try_from(patience.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    let unsent_bytes = unsent_bytes(reading.wire_bytes_per_second, connections);
    shared.unsent_bytes.store(unsent_bytes, Ordering::Relaxed);
}

/// The cores that all threads together would have got had they packed all the time: as many as they got while they
/// packed, or what stood idle besides if that is more. With a codec that the wire cannot follow they pack in the moments
/// in which the migration's other threads are at work, and get less of a core then than there is.
fn cores_of(packing: PackingTime, sample: Option<CoresSample>, threads: usize) -> Option<f64> {
    if packing.wall < PACKING_MIN {
        return None;
    }
    let got = packing.cpu.as_secs_f64() / packing.wall.as_secs_f64() * threads as f64;
    let unused = sample.map_or(0.0, |sample| sample.idle + sample.packing).min(threads as f64);
    Some(got.max(unused))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(cores: Option<f64>, expected: f64) -> bool {
        cores.is_some_and(|cores| (cores - expected).abs() < 1e-9)
    }

    #[test]
    fn cores_are_what_packing_got_and_what_was_idle_beside_it() {
        let packing = PackingTime { cpu: Duration::from_millis(36), wall: Duration::from_millis(90) };
        let busy = CoresSample { packing: 0.4, ..CoresSample::default() };
        assert!(about(cores_of(packing, None, 2), 0.8));
        assert!(about(cores_of(packing, Some(busy), 1), 0.4));
        // It had 0.4 of a core while it packed, and as much stood idle while it did not.
        assert!(about(cores_of(packing, Some(CoresSample { idle: 0.3, ..busy }), 1), 0.7));
        assert!(about(cores_of(packing, Some(CoresSample { idle: 9.0, ..busy }), 1), 1.0), "one thread");
        let hardly = PackingTime { cpu: Duration::ZERO, wall: Duration::from_millis(1) };
        assert_eq!(cores_of(hardly, Some(busy), 1), None);
    }
}
