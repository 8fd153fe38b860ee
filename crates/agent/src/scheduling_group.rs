//! Among which threads the kernel weighs priorities: `nice` and `SCHED_IDLE` say nothing to threads of another group.
//!
//! The kernel divides the cores among groups first, whatever runs in them, and then within each. A group is a cgroup
//! whose `cpu` controller is on. Threads in none are grouped by session where `sched_autogroup_enabled` says so, which
//! is usual; see "The autogroup feature" in sched(7). An agent and the QEMUs that it has started are one session, the
//! QEMUs that an agent before it started are another: of a host with one core, a thread of `SCHED_IDLE` took half from
//! them (`docs/decisions.md`, 34).

use std::fs;
use std::io;
use std::path::Path;

/// One such group, by its name in this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SchedulingGroup(String);

impl SchedulingGroup {
    /// That of a process. An error where the kernel does not tell, or the process has ended.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        Self::read(Path::new("/proc"), Path::new("/sys/fs/cgroup"), pid)
    }

    fn read(proc: &Path, cgroups: &Path, pid: u32) -> io::Result<Self> {
        let process = proc.join(pid.to_string());
        let memberships = fs::read_to_string(process.join("cgroup"))?;
        if let Some(cgroup) = cpu_cgroup(&memberships, cgroups) {
            return Ok(Self(format!("cgroup {cgroup}")));
        }
        let setting = fs::read_to_string(proc.join("sys/kernel/sched_autogroup_enabled"));
        if setting.is_ok_and(|setting| setting.trim() == "1") {
            // As `/autogroup-77 nice 0`.
            let autogroup = fs::read_to_string(process.join("autogroup"))?;
            return Ok(Self(autogroup.split_whitespace().next().unwrap_or_default().to_owned()));
        }
        Ok(Self("none".into()))
    }
}

/// The innermost cgroup of a process among which cores are divided, if that is not all of the host; see cgroups(7).
fn cpu_cgroup<'a>(memberships: &'a str, cgroups: &Path) -> Option<&'a str> {
    memberships.lines().find_map(|line| {
        let (_, line) = line.split_once(':')?;
        let (controllers, cgroup) = line.split_once(':')?;
        if controllers.is_empty() {
            // Version 2, where the controller is on down to some level.
            let mut levels = Path::new(cgroup).ancestors().filter_map(Path::to_str);
            return levels.find(|level| *level != "/" && has_cpu(cgroups, level));
        }
        (controllers.split(',').any(|controller| controller == "cpu") && cgroup != "/").then_some(cgroup)
    })
}

fn has_cpu(cgroups: &Path, cgroup: &str) -> bool {
    let controllers = cgroups.join(cgroup.trim_start_matches('/')).join("cgroup.controllers");
    let controllers = fs::read_to_string(controllers).unwrap_or_default();
    controllers.split_whitespace().any(|controller| controller == "cpu")
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// What a kernel shows of processes, by their cgroups.
    struct Shown {
        proc: TempDir,
        cgroups: TempDir,
    }

    impl Shown {
        fn new(autogroups: &str, with_cpu: &[&str]) -> Self {
            let shown = Self { proc: tempfile::tempdir().unwrap(), cgroups: tempfile::tempdir().unwrap() };
            let kernel = shown.proc.path().join("sys/kernel");
            fs::create_dir_all(&kernel).unwrap();
            fs::write(kernel.join("sched_autogroup_enabled"), autogroups).unwrap();
            for cgroup in with_cpu {
                let directory = shown.cgroups.path().join(cgroup);
                fs::create_dir_all(&directory).unwrap();
                fs::write(directory.join("cgroup.controllers"), "cpuset cpu io memory\n").unwrap();
            }
            shown
        }

        /// The group of a process with this session and these cgroups.
        fn group(&self, session: u32, memberships: &str) -> SchedulingGroup {
            let process = self.proc.path().join("7");
            fs::create_dir_all(&process).unwrap();
            fs::write(process.join("cgroup"), memberships).unwrap();
            fs::write(process.join("autogroup"), format!("/autogroup-{session} nice 0\n")).unwrap();
            SchedulingGroup::read(self.proc.path(), self.cgroups.path(), 7).unwrap()
        }
    }

    const SERVICE: &str = "0::/system.slice/drainpipe.service\n";
    const LIBVIRT: &str = "0::/machine.slice/machine-qemu\\x2d1\\x2dweb.scope/libvirt/emulator\n";

    #[test]
    fn sessions_divide_cores_only_where_no_cgroup_does() {
        let shown = Shown::new("1\n", &[]);
        assert_ne!(shown.group(1, SERVICE), shown.group(2, SERVICE));
        assert_eq!(shown.group(1, SERVICE), shown.group(1, SERVICE));
        let shown = Shown::new("0\n", &[]);
        assert_eq!(shown.group(1, SERVICE), shown.group(2, LIBVIRT));
        // On down to the slices, and to all of the service.
        for with_cpu in [&["system.slice"][..], &["system.slice", "system.slice/drainpipe.service"]] {
            let shown = Shown::new("1\n", with_cpu);
            assert_eq!(shown.group(1, SERVICE), shown.group(2, SERVICE));
            assert_ne!(shown.group(1, SERVICE), shown.group(1, LIBVIRT));
        }
    }

    #[test]
    fn the_first_version_of_cgroups_is_understood() {
        let shown = Shown::new("1\n", &[]);
        let of = |path: &str| format!("5:memory:/other\n3:cpuacct,cpu:{path}\n2:cpuset:/set\n0::/\n");
        assert_eq!(shown.group(1, &of("/vms")), shown.group(2, &of("/vms")));
        assert_ne!(shown.group(1, &of("/vms")), shown.group(1, &of("/agents")));
        assert_ne!(shown.group(1, &of("/")), shown.group(2, &of("/")), "by session");
    }

    #[test]
    fn a_process_that_has_ended_is_in_none() {
        let shown = Shown::new("1\n", &[]);
        assert!(SchedulingGroup::read(shown.proc.path(), shown.cgroups.path(), 8).is_err());
        assert!(SchedulingGroup::of(std::process::id()).is_ok());
    }
}
