//! Among which threads the kernel compares priorities: `nice` and `SCHED_IDLE` mean nothing to threads of another
//! group.
//!
//! The kernel divides the cores among groups first, whatever runs in them, and then within each. A group is a cgroup
//! whose `cpu` controller is on. Threads in none are grouped by session where `sched_autogroup_enabled` says so, which
//! is usual; see "The autogroup feature" in sched(7). An agent and the QEMUs that it has started are one session, the
//! QEMUs that an agent before it started are another: of a host with one core, a thread of `SCHED_IDLE` took half from
//! them (`docs/decisions/0034`). Where it cannot be seen whether a cgroup's controller is on, cgroup and session
//! count together: who has both in common is of one group in any case.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use rustix::io::Errno;
use tracing::debug;

/// Whether these processes are of one group, those left out that have ended. Not known is no.
pub(crate) fn is_one(pids: impl Iterator<Item = u32>) -> bool {
    let groups = pids.map(SchedulingGroup::of).filter(|group| !group.as_ref().is_err_and(has_ended));
    match groups.collect::<io::Result<BTreeSet<_>>>() {
        Ok(groups) => groups.len() == 1,
        Err(error) => {
            debug!(%error, "it is not known whether priorities count between processes");
            false
        }
    }
}

/// Whether the process that was asked for its group has ended.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
}

/// One such group, by its name in this host.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct SchedulingGroup(String);

impl SchedulingGroup {
    /// The group of a process. An error if the kernel does not report it, or the process has ended.
    fn of(pid: u32) -> io::Result<Self> {
        Self::read(Path::new("/proc"), Path::new("/sys/fs/cgroup"), pid)
    }

    fn read(proc: &Path, cgroups: &Path, pid: u32) -> io::Result<Self> {
        let process = proc.join(pid.to_string());
        let memberships = fs::read_to_string(process.join("cgroup"))?;
        let session = || -> io::Result<String> {
            let setting = fs::read_to_string(proc.join("sys/kernel/sched_autogroup_enabled"));
            if setting.is_ok_and(|setting| setting.trim() == "1") {
                // As `/autogroup-77 nice 0`.
                let autogroup = fs::read_to_string(process.join("autogroup"))?;
                return Ok(autogroup.split_whitespace().next().unwrap_or_default().to_owned());
            }
            Ok("all".into())
        };
        Ok(Self(match CpuCgroup::of(&memberships, cgroups) {
            CpuCgroup::Of(cgroup) => format!("cgroup {cgroup}"),
            CpuCgroup::None => session()?,
            CpuCgroup::Unknown(cgroup) => format!("cgroup {cgroup}, {}", session()?),
        }))
    }
}

/// The innermost cgroup of a process among which cores are divided, if that is not all of the host; see cgroups(7).
enum CpuCgroup<'a> {
    None,
    Of(&'a str),
    /// This one, or one around it, or none.
    Unknown(&'a str),
}

impl<'a> CpuCgroup<'a> {
    fn of(memberships: &'a str, cgroups: &Path) -> Self {
        let hierarchies = || memberships.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        // A controller that version 1 has is none of version 2.
        let first = hierarchies().find(|(controllers, _)| controllers.split(',').any(|name| name == "cpu"));
        if let Some((_, cgroup)) = first {
            return if cgroup == "/" { Self::None } else { Self::Of(cgroup) };
        }
        let Some((_, cgroup)) = hierarchies().find(|(controllers, _)| controllers.is_empty()) else {
            return Self::None;
        };
        // On down to some level.
        for level in Path::new(cgroup).ancestors().filter_map(Path::to_str).filter(|level| *level != "/") {
            match has_cpu(cgroups, level) {
                Ok(true) => return Self::Of(level),
                Ok(false) => {}
                Err(_) => return Self::Unknown(cgroup),
            }
        }
        Self::None
    }
}

fn has_cpu(cgroups: &Path, cgroup: &str) -> io::Result<bool> {
    let controllers = cgroups.join(cgroup.trim_start_matches('/')).join("cgroup.controllers");
    Ok(fs::read_to_string(controllers)?.split_whitespace().any(|controller| controller == "cpu"))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// Processes as a kernel shows them, by their cgroups.
    struct Shown {
        proc: TempDir,
        cgroups: TempDir,
    }

    impl Shown {
        /// Shows these cgroups of version 2, and their controllers.
        fn new(autogroups: &str, with: &[(&str, &str)]) -> Self {
            let shown = Self { proc: tempfile::tempdir().unwrap(), cgroups: tempfile::tempdir().unwrap() };
            let kernel = shown.proc.path().join("sys/kernel");
            fs::create_dir_all(&kernel).unwrap();
            fs::write(kernel.join("sched_autogroup_enabled"), autogroups).unwrap();
            for (cgroup, controllers) in with {
                let directory = shown.cgroups.path().join(cgroup);
                fs::create_dir_all(&directory).unwrap();
                fs::write(directory.join("cgroup.controllers"), controllers).unwrap();
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
    const BY_HAND: &str = "0::/user.slice/by-hand\n";

    #[test]
    fn sessions_divide_cores_only_where_no_cgroup_does() {
        let with = |of_slices: &'static str, of_services: &'static str| {
            let slices = [("system.slice", of_slices), ("user.slice", of_slices)];
            let services =
                [("system.slice/drainpipe.service", of_services), ("user.slice/by-hand", of_services)];
            [slices, services].concat()
        };
        let in_none = Shown::new("1\n", &with("memory\n", "memory\n"));
        assert_ne!(in_none.group(1, SERVICE), in_none.group(2, SERVICE));
        assert_eq!(in_none.group(1, SERVICE), in_none.group(1, BY_HAND));
        let of_all = Shown::new("0\n", &with("memory\n", "memory\n"));
        assert_eq!(of_all.group(1, SERVICE), of_all.group(2, BY_HAND));
        // On down to the slices, and to all of the service.
        for of_services in ["memory\n", "cpuset cpu memory\n"] {
            let on = Shown::new("1\n", &with("cpuset cpu memory\n", of_services));
            assert_eq!(on.group(1, SERVICE), on.group(2, SERVICE));
            assert_ne!(on.group(1, SERVICE), on.group(1, BY_HAND));
        }
        // The lab hides them like this.
        let hidden = Shown::new("1\n", &[]);
        assert_eq!(hidden.group(1, SERVICE), hidden.group(1, SERVICE));
        assert_ne!(hidden.group(1, SERVICE), hidden.group(2, SERVICE));
        assert_ne!(hidden.group(1, SERVICE), hidden.group(1, BY_HAND));
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
