//! The load of the host's cores, as the kernel counts it; see proc(5) and the kernel's `accounting/psi.rst`.

use std::fs;
use std::time::{Duration, Instant};

use drainpipe_engine::host::idle_cores::CoresSample;
use tracing::debug;

use crate::figures::PackingTime;

const STAT: &str = "/proc/stat";
const PRESSURE: &str = "/proc/pressure/cpu";

/// Looks at some of the host's cores.
#[derive(Debug)]
pub struct HostCpu {
    // All that the host has, if empty.
    cpus: Vec<usize>,
    last: Option<Counted>,
}

/// How busy cores were, in cores: CPU seconds per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Busyness {
    /// Used by nobody, what a hypervisor below gave to others left out.
    pub idle: f64,
    /// Threads of the machine that were running or waited for a core at the end, for each of its cores; without the one
    /// that looks. Absent where the kernel does not tell.
    pub threads_per_core: Option<f64>,
}

/// What the kernel has counted since the host was booted.
#[derive(Debug, Clone, Copy)]
struct Counted {
    at: Instant,
    ticks: Ticks,
    threads_per_core: Option<f64>,
    // Time in which some thread waited for a core. Absent where the kernel does not count it.
    awaited: Option<Duration>,
}

/// Some cores and their time, in ticks of [`rustix::param::clock_ticks_per_second`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Ticks {
    cores: u32,
    idle: u64,
    stolen: u64,
}

impl HostCpu {
    /// Looks at these; at all that the host has if none is named.
    pub fn new(cpus: Vec<usize>) -> Self {
        Self { cpus, last: None }
    }

    /// How busy they were since this was asked last. None the first time, and where the kernel does not tell.
    pub fn busyness(&mut self) -> Option<Busyness> {
        let sample = self.sample(PackingTime::default())?;
        let threads_per_core = self.last.as_ref().and_then(|last| last.threads_per_core);
        Some(Busyness { idle: (sample.idle - sample.stolen).max(0.0), threads_per_core })
    }

    /// What the cores did since this was asked last, when packing took so much of them. None the first time, and
    /// where the kernel does not tell.
    pub(crate) fn sample(&mut self, packing: PackingTime) -> Option<CoresSample> {
        let now = self.read();
        let before = std::mem::replace(&mut self.last, now)?;
        let now = now?;
        let seconds = now.at.duration_since(before.at).as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let cores = |now: u64, before: u64| {
            now.saturating_sub(before) as f64 / rustix::param::clock_ticks_per_second() as f64 / seconds
        };
        let awaited = now.awaited.zip(before.awaited).map(|(now, before)| now.saturating_sub(before));
        // Those that pack wait too, and are counted with all others: what is left is what others waited for
        // while none of these did, at the least.
        let awaited = awaited.unwrap_or_default().saturating_sub(packing.wall.saturating_sub(packing.cpu));
        Some(CoresSample {
            cores: f64::from(now.ticks.cores),
            idle: cores(now.ticks.idle, before.ticks.idle),
            packing: packing.cpu.as_secs_f64() / seconds,
            stolen: cores(now.ticks.stolen, before.ticks.stolen),
            awaited: (awaited.as_secs_f64() / seconds).min(1.0),
        })
    }

    fn read(&self) -> Option<Counted> {
        let stat = fs::read_to_string(STAT);
        let ticks = stat.as_ref().ok().and_then(|stat| ticks_of(stat, &self.cpus));
        if ticks.is_none() {
            debug!(?stat, "the kernel does not say how busy the host is");
        }
        let awaited = fs::read_to_string(PRESSURE).ok().and_then(|pressure| awaited_of(&pressure));
        let threads_per_core = stat.as_ref().ok().and_then(|stat| threads_per_core_of(stat));
        Some(Counted { at: Instant::now(), ticks: ticks?, threads_per_core, awaited })
    }
}

/// The ticks of these cores together; of all cores if none is named.
fn ticks_of(stat: &str, cpus: &[usize]) -> Option<Ticks> {
    let mut sum = None;
    for line in stat.lines() {
        let Some((name, times)) = line.strip_prefix("cpu").and_then(|line| line.split_once(' ')) else {
            continue;
        };
        let Ok(cpu) = name.parse::<usize>() else { continue };
        if !cpus.is_empty() && !cpus.contains(&cpu) {
            continue;
        }
        let mut times = times.split_ascii_whitespace().map(str::parse::<u64>);
        let (idle, waits_for_disk) = (times.nth(3)?.ok()?, times.next()?.ok()?);
        let stolen = times.nth(2)?.ok()?;
        let before: Ticks = sum.unwrap_or_default();
        sum = Some(Ticks {
            cores: before.cores + 1,
            idle: before.idle + idle + waits_for_disk,
            stolen: before.stolen + stolen,
        });
    }
    sum
}

/// The figure for the whole machine, without the thread that reads it.
fn threads_per_core_of(stat: &str) -> Option<f64> {
    let cores = ticks_of(stat, &[])?.cores;
    let running = stat.lines().find_map(|line| line.strip_prefix("procs_running "))?;
    let others = running.trim().parse::<u32>().ok()?.saturating_sub(1);
    Some(f64::from(others) / f64::from(cores))
}

fn awaited_of(pressure: &str) -> Option<Duration> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split(' ').find_map(|field| field.strip_prefix("total="))?;
    Some(Duration::from_micros(total.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "cpu  60 0 0 600 3 0 0 9 0 0\n\
                        cpu0 10 0 0 100 1 0 0 2 0 0\n\
                        cpu1 20 0 0 200 0 0 0 3 0 0\n\
                        cpu10 30 0 0 300 2 0 0 4 0 0\n\
                        intr 12 0\nctxt 5\n";

    #[test]
    fn the_cores_that_count_are_counted() {
        assert_eq!(ticks_of(TEXT, &[]), Some(Ticks { cores: 3, idle: 603, stolen: 9 }));
        assert_eq!(ticks_of(TEXT, &[1, 10]), Some(Ticks { cores: 2, idle: 502, stolen: 7 }));
        assert_eq!(ticks_of(TEXT, &[7]), None);
        assert_eq!(ticks_of("cpu0 1 2\n", &[]), None);
        assert_eq!(ticks_of("", &[]), None);
    }

    #[test]
    fn threads_that_want_a_core_are_counted_but_for_the_one_that_looks() {
        let of =
            |running: &str| threads_per_core_of(&format!("{TEXT}procs_running {running}\nprocs_blocked 3\n"));
        assert_eq!(of("7"), Some(2.0));
        assert_eq!((of("1"), of("0")), (Some(0.0), Some(0.0)));
        assert_eq!((of("many"), threads_per_core_of(TEXT), threads_per_core_of("")), (None, None, None));
    }

    #[test]
    fn pressure_is_read_where_there_is_any() {
        let text = "some avg10=0.68 avg60=5.71 avg300=10.08 total=1500000\nfull avg10=0.00 total=7\n";
        assert_eq!(awaited_of(text), Some(Duration::from_millis(1500)));
        assert_eq!(awaited_of("full total=7\n"), None);
    }

    #[test]
    fn this_host_says_what_its_cores_do() {
        let mut host = HostCpu::new(vec![]);
        assert_eq!(host.sample(PackingTime::default()), None);
        std::thread::sleep(Duration::from_millis(30));
        let sample = host.sample(PackingTime::default()).unwrap();
        let cores = std::thread::available_parallelism().unwrap().get();
        assert!(sample.idle >= 0.0 && sample.idle <= cores as f64 * 2.0 + 2.0, "{sample:?}");
        assert!((0.0..=1.0).contains(&sample.awaited), "{sample:?}");
    }
}
