//! This host's hardware, read from `/proc`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use drainpipe_engine::host::facts::HugePages;
use drainpipe_engine::problem::Problem;

/// The host's fixed properties.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostHardware {
    /// Kernel release.
    pub(crate) kernel: String,
    /// CPU model.
    pub(crate) cpu_model: String,
    /// Cores that the agent may run on.
    pub(crate) cores: u32,
    /// All memory.
    pub(crate) memory_bytes: u64,
}

impl HostHardware {
    /// Reads them.
    pub(crate) fn read() -> Result<Self, Problem> {
        let cores =
            std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(1));
        Ok(Self {
            kernel: read_text("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpu_model: cpu_model(&read_text("/proc/cpuinfo")?),
            cores,
            memory_bytes: meminfo_bytes(&read_text("/proc/meminfo")?, "MemTotal")?,
        })
    }
}

/// Memory that can be given out without swapping, by the kernel's estimate.
pub(crate) fn memory_available_bytes() -> Result<u64, Problem> {
    meminfo_bytes(&read_text("/proc/meminfo")?, "MemAvailable")
}

/// Huge pages that nobody has taken or reserved, of each size that the kernel has.
pub(crate) fn huge_pages_free() -> Vec<HugePages> {
    huge_pages_below(Path::new("/sys/kernel/mm/hugepages"))
}

fn huge_pages_below(directory: &Path) -> Vec<HugePages> {
    let sizes = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut pages: Vec<HugePages> = sizes.filter_map(|size| huge_pages_of(&size.path())).collect();
    pages.sort_by_key(|pages| pages.size_mib);
    pages
}

fn huge_pages_of(size: &Path) -> Option<HugePages> {
    let number = |file: &str| fs::read_to_string(size.join(file)).ok()?.trim().parse::<u64>().ok();
    let kib = size.file_name()?.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?;
    let count = number("free_hugepages")?.saturating_sub(number("resv_hugepages")?);
    Some(HugePages { size_mib: kib.parse::<u64>().ok()? >> 10, count })
}

/// CPU, user and system, that this process has used.
pub(crate) fn own_cpu() -> Duration {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(clock.tv_sec.try_into().unwrap_or(0), clock.tv_nsec.try_into().unwrap_or(0))
}

/// Memory of a process that is in RAM; 0 when it is gone.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

fn read_text(path: &str) -> Result<String, Problem> {
    fs::read_to_string(path).map_err(|error| Problem::failed(format!("cannot read {path}: {error}")))
}

fn cpu_model(cpuinfo: &str) -> String {
    cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map_or_else(|| "unknown".into(), |(_, model)| model.trim().to_owned())
}

fn meminfo_bytes(meminfo: &str, key: &str) -> Result<u64, Problem> {
    meminfo
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':')?.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.trim().parse::<u64>().ok())
        .map(|kib| kib * 1024)
        .ok_or_else(|| Problem::failed(format!("/proc/meminfo has no line `{key}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_exactly() {
        let text = "MemTotal:       24114896 kB\nMemFree:  1 kB\nMemAvailable:   23000000 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable").unwrap(), 23_000_000 * 1024);
        assert!(meminfo_bytes(text, "Mem").is_err());
    }

    #[test]
    fn reserved_huge_pages_are_not_free() {
        let directory = tempfile::tempdir().unwrap();
        for (size, free, reserved) in [("1048576", "3\n", "0\n"), ("2048", "70\n", "64\n")] {
            let size = directory.path().join(format!("hugepages-{size}kB"));
            fs::create_dir(&size).unwrap();
            fs::write(size.join("free_hugepages"), free).unwrap();
            fs::write(size.join("resv_hugepages"), reserved).unwrap();
        }
        let expected = [HugePages { size_mib: 2, count: 6 }, HugePages { size_mib: 1024, count: 3 }];
        assert_eq!(huge_pages_below(directory.path()), expected);
        assert_eq!(huge_pages_below(&directory.path().join("none")), []);
    }

    #[test]
    fn this_host_can_be_read() {
        let hardware = HostHardware::read().unwrap();
        assert!(hardware.memory_bytes >= memory_available_bytes().unwrap());
        assert!(hardware.cores > 0);
    }
}
