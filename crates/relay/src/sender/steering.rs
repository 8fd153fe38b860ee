//! Looks some ten times a second at what limits the sender and at what else wants the host's cores, and sets
//! the codec, how much may wait, and how many threads pack.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use drainpipe_engine::codec::Reading;
use drainpipe_engine::idle_cores::{Allowance, SAMPLE_EVERY_MS};

use super::shared::Shared;
use super::unsent::unsent_bytes;
use crate::figures::{Figures, PackingTime};
use crate::frame::BLOCK_BYTES_MAX;
use crate::host_cpu::HostCpu;

const STEER_EVERY: Duration = Duration::from_millis(SAMPLE_EVERY_MS);

/// What may wait in the sender's lanes, by the time that the wire needs for it. The program counts it as sent.
const LANES_MS: u64 = 40;

/// How long a lane waits for a block to be packed: half of the time that its part of the wire needs for one as
/// it is, within these bounds. Packing takes less than a millisecond, but who packs may have to wait for a core.
/// The sockets hold more than the wire takes meanwhile.
const PATIENCE_US_MIN: u64 = 1_000;
const PATIENCE_US_MAX: u64 = 8_000;

/// Less packing than this says nothing about the cores.
const PACKING_MIN: Duration = Duration::from_millis(5);

/// Steers until all is over.
pub(super) fn run(shared: &Shared) {
    let (mut at, mut figures, mut waits) = (Instant::now(), shared.counters.read(), 0);
    let mut host = HostCpu::new(shared.settings.cpus.clone());
    let mut allowance = Allowance::new(shared.settings.cores);
    let mut cores = shared.settings.cores as f64;
    while let Some(packing) = shared.wait_to_steer(STEER_EVERY) {
        let (at_before, before) = (at, figures);
        (at, figures) = (Instant::now(), shared.counters.read());
        cores = cores_of(packing, allowance.allowed()).unwrap_or(cores);
        if let Some(sample) = host.sample(packing) {
            shared.allow(allowance.follow(sample));
        }
        let waits_now = shared.waits_for_wire.load(Ordering::Relaxed);
        if waits_now > waits {
            steer(shared, &before, &figures, at.duration_since(at_before), cores);
        }
        waits = waits_now;
    }
}

/// The wire was the limit: it took what lies between the figures.
fn steer(shared: &Shared, before: &Figures, now: &Figures, time: Duration, cores: f64) {
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX).max(1);
    let lanes = shared.settings.connections as u64;
    let wire_bytes = now.wire_bytes - before.wire_bytes;
    let block_bytes = BLOCK_BYTES_MAX as u64;
    let depth = (now.raw_bytes - before.raw_bytes) * LANES_MS / ms / lanes / block_bytes;
    let reading = Reading { wire_bytes_per_second: wire_bytes as f64 / time.as_secs_f64(), cores };
    shared.steer(reading, usize::try_from(depth).unwrap_or(usize::MAX));
    let block_us = block_bytes * lanes * ms * 1_000 / wire_bytes.max(1);
    let patience_us = (block_us / 2).clamp(PATIENCE_US_MIN, PATIENCE_US_MAX);
    shared.patience_us.store(patience_us, Ordering::Relaxed);
    shared.unsent_bytes.store(unsent_bytes(wire_bytes, time, lanes), Ordering::Relaxed);
}

/// The cores that all threads together would have got had they packed all the time.
fn cores_of(packing: PackingTime, threads: usize) -> Option<f64> {
    let got = packing.cpu.as_secs_f64() / packing.wall.as_secs_f64();
    (packing.wall >= PACKING_MIN).then_some(got * threads as f64)
}
