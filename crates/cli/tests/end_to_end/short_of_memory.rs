//! A target whose kernel kills the VM's QEMU for lack of memory, although there was enough before.

use std::fs;
use std::path::PathBuf;

use rustix::process::Pid;

use crate::scene::{Scene, assert_failed};
use crate::support::{TestLab, unique_name};

/// The limit for a QEMU from mid-flight on: less than what is still to come of the guest's memory.
const LIMIT_MIB: u64 = 32;

/// A control group whose processes get no more memory than that. It is removed when this is dropped.
struct Memory {
    group: PathBuf,
    version: Version,
}

/// The version of the kernel's control groups.
#[derive(Clone, Copy)]
enum Version {
    One,
    Two,
}

/// Where memory can be limited on this machine, if it can.
fn hierarchy() -> Option<(PathBuf, Version)> {
    let [one, two] = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup"].map(PathBuf::from);
    if one.join("memory.limit_in_bytes").exists() {
        return Some((one, Version::One));
    }
    let enabled = fs::read_to_string(two.join("cgroup.subtree_control")).ok()?;
    enabled.split_whitespace().any(|controller| controller == "memory").then_some((two, Version::Two))
}

/// What this machine lacks for the test.
pub(crate) fn missing() -> Option<String> {
    let Some((parent, _)) = hierarchy() else {
        return Some("there are no control groups that limit memory".into());
    };
    let group = parent.join(unique_name());
    let made = fs::create_dir(&group).and_then(|()| fs::remove_dir(&group));
    made.err().map(|error| format!("no control group can be made in {}: {error}", parent.display()))
}

impl Memory {
    fn limited_to(mib: u64) -> Self {
        let (parent, version) = hierarchy().expect("the test runs only where there is one");
        let memory = Self { group: parent.join(unique_name()), version };
        fs::create_dir(&memory.group).unwrap();
        let limit = (mib << 20).to_string();
        match version {
            Version::One => {
                memory.set("memory.limit_in_bytes", &limit);
                memory.set("memory.swappiness", "0");
            }
            Version::Two => {
                memory.set("memory.max", &limit);
                memory.set("memory.swap.max", "0");
            }
        }
        memory
    }

    fn set(&self, name: &str, value: &str) {
        let file = self.group.join(name);
        fs::write(&file, value).unwrap_or_else(|error| panic!("{} to {value}: {error}", file.display()));
    }

    fn take(&self, process: Pid) {
        self.set("cgroup.procs", &process.to_string());
    }

    /// Whether the kernel has killed a process to keep the limit.
    fn has_killed(&self) -> bool {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        let counts = fs::read_to_string(self.group.join(file)).unwrap();
        counts.lines().any(|line| line.strip_prefix("oom_kill ").is_some_and(|count| count != "0"))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.group) {
            eprintln!("{} is not removed: {error}", self.group.display());
        }
    }
}

pub(crate) fn the_kernel_kills_the_targets_qemu() {
    // Dropped last, when it has no processes any more.
    let memory = Memory::limited_to(LIMIT_MIB);
    // Slow enough that most of the memory is still to come, however late the machine is.
    let scene = Scene::in_lab(TestLab::slow());
    let migrating = scene.migrate(&[]);
    memory.take(scene.lab.qemu_pid("b", "web").unwrap());
    let said = "its QEMU on b has ended by signal 9; if the kernel sent it for lack of memory";
    assert_failed(&migrating.wait(), said);
    assert!(memory.has_killed(), "it was not for want of memory");
    scene.assert_settled("a");
    scene.set_rates("unlimited");
    scene.assert_moves("b");
}
