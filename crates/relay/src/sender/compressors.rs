//! The threads that pack. They take idle time only.

use std::time::{Duration, Instant};

use drainpipe_engine::codec::{Codec, Trial};
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadPriorityValue, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};
use tracing::warn;

use super::shared::{Done, Order, Shared};
use crate::error::RelayError;
use crate::figures::{PackingTime, PastCodec};
use crate::multifd::PageAt;
use crate::pack::{Packer, Trier};
use crate::page_cache::PageChange;
use crate::paged;
use crate::queue::Packed;
use crate::sieve::Sieve;

/// Packs until all is over.
pub(super) fn run(shared: &Shared) {
    stay_on(&shared.settings.cpus);
    // Who never has work holds no memory.
    let (mut packer, mut sieve) = (None, Sieve::default());
    while let Some(order) = shared.take_work() {
        // Between taking and handing over, and never else: who has no core must not hold a lock that the
        // wire's threads wait for.
        if let Err(error) = take_policy(NormalThreadSchedulePolicy::Idle) {
            // It would take of the cores what VMs want.
            shared.cannot_yield(order, &error);
            continue;
        }
        let done = pack(packer.get_or_insert_with(Packer::new), &mut sieve, order);
        let is_back = take_policy(NormalThreadSchedulePolicy::Other);
        match done {
            Ok(done) => shared.finish(done),
            Err(error) => return shared.fail(error),
        }
        if let Err(error) = is_back {
            return shared.stop_packing(&error);
        }
    }
}

/// Has the thread run on these CPUs only; where none is named, on those on which it may.
fn stay_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU) {
        set.set(*cpu);
    }
    if set.count() == 0 {
        return;
    }
    if let Err(error) = sched_setaffinity(None, &set) {
        warn!(%error, ?cpus, "a thread that packs is not kept on the CPUs that it is meant for");
    }
}

/// What the library calls nice 0, of 0 for nice 19 to 99 for nice -20.
const NICE_0: u8 = 47;

/// With `SCHED_IDLE` any other thread that wants the core gets it at once; see sched(7).
fn take_policy(policy: NormalThreadSchedulePolicy) -> Result<(), String> {
    let usual = ThreadPriorityValue::try_from(NICE_0).map(ThreadPriority::Crossplatform)?;
    let policy = ThreadSchedulePolicy::Normal(policy);
    set_thread_priority_and_policy(thread_native_id(), usual, policy).map_err(|error| format!("{error:?}"))
}

pub(super) fn pack(packer: &mut Packer, sieve: &mut Sieve, order: Order) -> Result<Done, RelayError> {
    let (began, cpu_before) = (Instant::now(), thread_cpu());
    let Order { work, codec, mut trier, taken } = order;
    let page_at = page_at(work.raw.pages(), taken.len());
    let mut paged = vec![];
    let change = (!taken.is_empty()).then(|| {
        let contents = paged::encode(&work.raw, &taken, &mut paged);
        PageChange { taken, contents, syncs: work.raw.syncs() }
    });
    let unpacked: &[u8] = if change.is_some() { &paged } else { &work.raw };
    let (mut shrunk, mut trials) = (None, None);
    if sieve.look(unpacked, page_at) {
        let rest = sieve.rest(unpacked);
        trials = trier.as_mut().map(|trier| try_all(trier, rest, unpacked.len())).transpose()?;
        if let Some(packed) = packer.pack(codec, rest)? {
            shrunk = Some(sieve.written(unpacked, packed));
        }
    }
    let unpacked_bytes = unpacked.len();
    let result = match shrunk {
        Some(bytes) => {
            let past_codec = past_codec(sieve, unpacked, change.is_some());
            let is_parted = sieve.parts();
            Some(Packed { codec: Some(codec), bytes, unpacked_bytes, is_parted, past_codec, change })
        }
        None if change.is_some() => {
            // It waits to be sent, and nothing follows in it.
            paged.shrink_to_fit();
            let changed_bytes = paged::changed_bytes(&paged);
            let past_codec = PastCodec { plain_bytes: work.raw.len() - changed_bytes, changed_bytes };
            Some(Packed { codec: None, bytes: paged, unpacked_bytes, is_parted: false, past_codec, change })
        }
        None => None,
    };
    let cpu = thread_cpu().saturating_sub(cpu_before);
    Ok(Done { work, packed: result, trier, trials, took: PackingTime { cpu, wall: began.elapsed() } })
}

/// What of a block goes past the codec, after the sieve has looked at it, or at what it is told by.
fn past_codec(sieve: &Sieve, unpacked: &[u8], is_paged: bool) -> PastCodec {
    let chunks = sieve.plain_chunks(unpacked.len());
    if is_paged {
        return paged::told_by(unpacked, chunks);
    }
    PastCodec { plain_bytes: chunks.map(|chunk| chunk.len()).sum(), changed_bytes: 0 }
}

/// Where the first page begins, or near enough: of a block of which `taken` pages are told by what has changed, as
/// long as none is.
fn page_at(pages: &[PageAt], taken: usize) -> usize {
    let before = if taken == 0 { 0 } else { paged::entries_bytes(taken) };
    before + pages.first().map_or(0, |page| page.at)
}

/// Packs what is left of a block, of `bytes`, with every codec.
fn try_all(trier: &mut Trier, rest: &[u8], bytes: usize) -> Result<[Trial; Codec::ALL.len()], RelayError> {
    trier.compare(|packer, codec| {
        let before = thread_cpu();
        let saved = packer.pack(codec, rest)?.map_or(0, |packed| rest.len() - packed.len());
        let cpu = thread_cpu().saturating_sub(before);
        Ok(Trial {
            seconds_per_byte: cpu.as_secs_f64() / bytes as f64,
            packed_share: (bytes - saved) as f64 / bytes as f64,
        })
    })
}

fn thread_cpu() -> Duration {
    let clock = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(clock.tv_sec.try_into().unwrap_or(0), clock.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_meant_to() {
        let of_this_thread = || rustix::thread::sched_getaffinity(None).unwrap();
        let before = of_this_thread();
        let one = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
        stay_on(&[]);
        assert_eq!(of_this_thread(), before);
        stay_on(&[one, CpuSet::MAX_CPU]);
        assert_eq!((of_this_thread().count(), of_this_thread().is_set(one)), (1, true));
    }

    #[test]
    fn a_thread_gives_its_core_up_and_takes_it_back() {
        let policy = || thread_priority::thread_schedule_policy().unwrap();
        for expected in [NormalThreadSchedulePolicy::Idle, NormalThreadSchedulePolicy::Other] {
            take_policy(expected).unwrap();
            assert_eq!(policy(), ThreadSchedulePolicy::Normal(expected));
            assert_eq!(getpriority_process(None).unwrap(), 0);
        }
    }
}
