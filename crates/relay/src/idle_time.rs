//! Threads that take idle time only.

use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadPriorityValue, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};
use tracing::warn;

/// Has the thread run on these CPUs only; where none is named, on those on which it may.
pub(crate) fn stay_on(cpus: &[usize]) {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU) {
        set.set(*cpu);
    }
    if set.count() == 0 {
        return;
    }
    if let Err(error) = sched_setaffinity(None, &set) {
        warn!(%error, ?cpus, "a compressing thread cannot be kept on its CPUs");
    }
}

/// The library's value for nice 0, from 0 for nice 19 to 99 for nice -20.
const NICE_0: u8 = 47;

/// With `SCHED_IDLE` any other thread that wants the core gets it at once; see sched(7).
pub(crate) fn take_policy(policy: NormalThreadSchedulePolicy) -> Result<(), String> {
    let usual = ThreadPriorityValue::try_from(NICE_0).map(ThreadPriority::Crossplatform)?;
    let policy = ThreadSchedulePolicy::Normal(policy);
    set_thread_priority_and_policy(thread_native_id(), usual, policy).map_err(|error| format!("{error:?}"))
}

/// What this thread has taken of cores, ever.
pub(crate) fn thread_cpu() -> Duration {
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
