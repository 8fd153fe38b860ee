//! The threads that run a guest, and the CPU time that they have used.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::qmp::QmpError;
use crate::vmm::Vmm;

/// The CPU that a guest's vCPUs have used, which the kernel tells also while QEMU answers nothing.
#[derive(Debug)]
pub struct VcpuTime {
    schedstats: Vec<PathBuf>,
}

impl VcpuTime {
    /// The vCPUs of a VM whose QEMU answers now.
    pub async fn of(vmm: &Vmm, deadline: Duration) -> Result<Self, QmpError> {
        Ok(Self::of_threads(vmm.pid(), &vcpu_threads(vmm, deadline).await?))
    }

    /// Counts these threads of a process.
    pub fn of_threads(pid: u32, threads: &BTreeSet<u32>) -> Self {
        let tasks = PathBuf::from(format!("/proc/{pid}/task"));
        let schedstat = |thread: &u32| tasks.join(thread.to_string()).join("schedstat");
        Self { schedstats: threads.iter().map(schedstat).collect() }
    }

    /// The time that all of them together have used so far. Fails once QEMU has ended.
    pub fn used(&self) -> io::Result<Duration> {
        let used = self.schedstats.iter().map(|schedstat| {
            let text = fs::read_to_string(schedstat)?;
            on_cpu(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
        });
        used.sum()
    }
}

/// The first number is the time on a CPU, in ns (`proc_pid_schedstat` in the kernel).
fn on_cpu(schedstat: &str) -> Option<Duration> {
    schedstat.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

/// One where QEMU runs all vCPUs in one thread, as it may without KVM.
pub(crate) async fn vcpu_threads(vmm: &Vmm, deadline: Duration) -> Result<BTreeSet<u32>, QmpError> {
    #[derive(serde::Deserialize)]
    struct Vcpu {
        #[serde(rename = "thread-id")]
        thread: u32,
    }
    let vcpus: Vec<Vcpu> = vmm.qmp().execute("query-cpus-fast", Value::Null, deadline).await?;
    Ok(vcpus.iter().map(|vcpu| vcpu.thread).collect())
}

/// The same by the names that QEMU gives its threads where it is told to (`debug-threads=on`, as libvirt starts it):
/// `CPU 0/KVM`, `CPU 1/TCG`, or `ALL CPUs/TCG`.
pub fn vcpu_threads_by_name(pid: u32) -> io::Result<BTreeSet<u32>> {
    let mut threads = BTreeSet::new();
    for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
        let entry = entry?;
        // One that has ended since runs no guest.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        if name.starts_with("CPU ") || name.starts_with("ALL CPUs") {
            threads.extend(entry.file_name().to_str().and_then(|number| number.parse::<u32>().ok()));
        }
    }
    Ok(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_counts_this_thread() {
        // The time that it has used since it runs is counted when it stops.
        std::thread::sleep(Duration::from_millis(1));
        let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        assert!(on_cpu(&text).unwrap() > Duration::ZERO, "{text}");
        assert_eq!(on_cpu("250000000 31 7"), Some(Duration::from_millis(250)));
        assert_eq!(on_cpu(""), None);
        assert_eq!(on_cpu("-1 0 0"), None);
    }
}
