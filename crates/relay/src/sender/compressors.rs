//! The threads that pack. They take idle time only.

use std::time::{Duration, Instant};

use drainpipe_engine::codec::{Codec, Trial};
use rustix::time::{ClockId, clock_gettime};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
    thread_native_id,
};
use tracing::warn;

use super::shared::{NextCodec, PackingTime, Shared};
use crate::error::RelayError;
use crate::pack::Packer;
use crate::queue::{Packed, Work};

/// Packs until all is over.
pub(super) fn run(shared: &Shared) {
    yield_to_everybody();
    let mut packer = Packer::new();
    while let Some(work) = shared.take_work() {
        if let Err(error) = pack(shared, &mut packer, &work) {
            return shared.fail(error);
        }
    }
}

/// Any other thread that wants the core gets it at once (`SCHED_IDLE`, see sched(7)).
fn yield_to_everybody() {
    let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    if let Err(error) = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle) {
        warn!(?error, "compression takes CPU from others: its threads cannot be given the idle priority");
    }
}

fn pack(shared: &Shared, packer: &mut Packer, work: &Work) -> Result<(), RelayError> {
    let (began, cpu_before) = (Instant::now(), thread_cpu());
    let result = pack_block(shared, packer, &work.raw)?;
    let cpu = thread_cpu().saturating_sub(cpu_before);
    shared.finish(work, result, PackingTime { cpu, wall: began.elapsed() });
    Ok(())
}

fn pack_block(shared: &Shared, packer: &mut Packer, raw: &[u8]) -> Result<Option<Packed>, RelayError> {
    if !packer.may_shrink(raw) {
        return Ok(None);
    }
    let codec = match shared.next_codec() {
        NextCodec::Chosen(codec) => codec,
        NextCodec::Trial(codec) => {
            shared.record(try_all(packer, raw)?);
            codec
        }
    };
    let bytes = packer.pack(codec, raw)?;
    Ok(bytes.map(|bytes| Packed { codec, bytes }))
}

fn try_all(packer: &mut Packer, raw: &[u8]) -> Result<[Trial; Codec::ALL.len()], RelayError> {
    let mut trials = [Trial::default(); Codec::ALL.len()];
    for (trial, codec) in trials.iter_mut().zip(Codec::ALL) {
        let before = thread_cpu();
        let packed_bytes = packer.pack(codec, raw)?.map_or(raw.len(), |bytes| bytes.len());
        let cpu = thread_cpu().saturating_sub(before);
        trial.seconds_per_byte = cpu.as_secs_f64() / raw.len() as f64;
        trial.packed_share = packed_bytes as f64 / raw.len() as f64;
    }
    Ok(trials)
}

fn thread_cpu() -> Duration {
    let clock = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(clock.tv_sec.try_into().unwrap_or(0), clock.tv_nsec.try_into().unwrap_or(0))
}
