//! Control groups of the kernel's `cpu` controller, in both versions: which one a thread is in, and one more below it
//! with a quota of its own. See cgroups(7).

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a thread cannot have a quota.
#[derive(Debug, thiserror::Error)]
pub enum QuotaError {
    /// There is no such thing on this host.
    #[error("no control groups with the kernel's `cpu` controller are mounted on this host")]
    NotMounted,
    /// It is not for this group to divide up.
    #[error(
        "the kernel's `cpu` controller is not on for the control group {0}: `Delegate=cpu` in the agent's systemd unit \
         turns it on"
    )]
    NotOn(PathBuf),
    /// The kernel refuses.
    #[error("cannot use {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// The tree of groups that divide up the cores.
#[derive(Debug, Clone)]
pub(crate) struct Hierarchy {
    version: Version,
    mount_point: PathBuf,
    /// The group that is seen at the mount point.
    root: PathBuf,
    proc: PathBuf,
}

/// A group that has been made for a thread, or will be, below the one it was in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThreadGroup {
    parent: PathBuf,
    name: String,
    thread: u32,
}

impl Hierarchy {
    /// The hierarchy of this host.
    pub(crate) fn find() -> Result<Self, QuotaError> {
        Self::find_in(Path::new("/proc"))
    }

    fn find_in(proc: &Path) -> Result<Self, QuotaError> {
        let file = proc.join("self/mountinfo");
        let mounts = fs::read_to_string(&file).map_err(used(&file))?;
        let found = |version| mounts.lines().find_map(|line| mounted(line, version));
        // A controller that version 1 has is none of version 2.
        let (version, (root, mount_point)) = found(Version::One)
            .map(|at| (Version::One, at))
            .or_else(|| Some((Version::Two, found(Version::Two)?)))
            .ok_or(QuotaError::NotMounted)?;
        Ok(Self { version, mount_point, root, proc: proc.into() })
    }

    /// The group of this name for a thread, made or not.
    pub(crate) fn group_for(
        &self,
        process: u32,
        thread: u32,
        name: String,
    ) -> Result<ThreadGroup, QuotaError> {
        let group = self.group_of(process, thread)?;
        let parent = match group.parent() {
            Some(parent) if group.ends_with(&name) => parent.to_owned(),
            _ => group,
        };
        Ok(ThreadGroup { parent, name, thread })
    }

    /// The directory of the group that a thread is in.
    fn group_of(&self, process: u32, thread: u32) -> Result<PathBuf, QuotaError> {
        let file = self.proc.join(format!("{process}/task/{thread}/cgroup"));
        let memberships = fs::read_to_string(&file).map_err(used(&file))?;
        let group = memberships.lines().find_map(|line| {
            let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
            let is_it = match self.version {
                Version::One => controllers.split(',').any(|controller| controller == "cpu"),
                Version::Two => controllers.is_empty(),
            };
            is_it.then_some(group)
        });
        let group = Path::new(group.ok_or(QuotaError::NotMounted)?);
        let below = group.strip_prefix(&self.root).map_err(|_| QuotaError::NotOn(group.into()))?;
        Ok(self.mount_point.join(below))
    }

    /// Lets the thread run for so long in each period at most. Makes the group if it is not there, and does nothing where
    /// all is so already.
    pub(crate) fn limit(&self, process: u32, group: &ThreadGroup, quota: Quota) -> Result<(), QuotaError> {
        let directory = group.directory();
        if !directory.exists() {
            self.make(group)?;
        }
        self.set_quota(&directory, quota)?;
        if self.group_of(process, group.thread)? != directory {
            write(&directory.join(self.threads()), group.thread)?;
        }
        Ok(())
    }

    fn make(&self, group: &ThreadGroup) -> Result<(), QuotaError> {
        let directory = group.directory();
        let is_on = |file: &str| -> Result<bool, QuotaError> {
            let file = group.parent.join(file);
            let controllers = fs::read_to_string(&file).map_err(used(&file))?;
            Ok(controllers.split_whitespace().any(|controller| controller == "cpu"))
        };
        if self.version == Version::Two && !is_on(CONTROLLERS)? {
            return Err(QuotaError::NotOn(group.parent.clone()));
        }
        fs::create_dir(&directory).map_err(used(&directory))?;
        if self.version == Version::Two {
            // In this order: a group with processes has controllers for groups of threads alone.
            write(&directory.join("cgroup.type"), "threaded")?;
            if !is_on(SUBTREE_CONTROL)? {
                write(&group.parent.join(SUBTREE_CONTROL), "+cpu")?;
            }
        }
        Ok(())
    }

    fn set_quota(&self, directory: &Path, quota: Quota) -> Result<(), QuotaError> {
        let Quota { runs, period } = quota;
        let files = match self.version {
            Version::One => vec![
                ("cpu.cfs_period_us", period.as_micros().to_string()),
                ("cpu.cfs_quota_us", runs.as_micros().to_string()),
            ],
            Version::Two => vec![("cpu.max", format!("{} {}", runs.as_micros(), period.as_micros()))],
        };
        for (file, value) in files {
            let file = directory.join(file);
            // The kernel begins a period again whenever it is written.
            if fs::read_to_string(&file).map_err(used(&file))?.trim() != value {
                write(&file, value)?;
            }
        }
        Ok(())
    }

    /// Takes the thread, if it still lives, and the group back. May be repeated.
    pub(crate) fn remove(&self, group: &ThreadGroup) -> Result<(), QuotaError> {
        let directory = group.directory();
        if !directory.exists() {
            return Ok(());
        }
        match write(&group.parent.join(self.threads()), group.thread) {
            Err(QuotaError::Io { source, .. }) if has_ended(&source) => {}
            moved => moved?,
        }
        self.remove_empty(&directory)
    }

    fn remove_empty(&self, directory: &Path) -> Result<(), QuotaError> {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(used(directory))?,
        }
        // Without groups below, the controller is on for nobody. Where somebody else has some, it is theirs.
        let parent = directory.parent().unwrap_or(directory);
        if self.version == Version::Two && parent != self.mount_point && !has_groups(parent) {
            write(&parent.join(SUBTREE_CONTROL), "-cpu")?;
        }
        Ok(())
    }

    /// The groups with such names that threads of a process are in.
    pub(crate) fn groups_with(
        &self,
        process: u32,
        name: impl Fn(u32) -> String,
    ) -> Result<Vec<ThreadGroup>, QuotaError> {
        let threads = self.proc.join(format!("{process}/task"));
        let mut found = vec![];
        for entry in fs::read_dir(&threads).map_err(used(&threads))? {
            let name_of = entry.map_err(used(&threads))?.file_name();
            let Some(thread) = name_of.to_str().and_then(|id| id.parse().ok()) else { continue };
            match self.group_for(process, thread, name(thread)) {
                Ok(group) if group.directory().exists() => found.push(group),
                Ok(_) => {}
                Err(QuotaError::Io { source, .. }) if has_ended(&source) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Removes the groups below this process's own that nobody is in, and whose names begin so.
    pub(crate) fn sweep(&self, prefix: &str) -> Result<(), QuotaError> {
        let own = std::process::id();
        let parent = self.group_of(own, own)?;
        for entry in fs::read_dir(&parent).map_err(used(&parent))? {
            let entry = entry.map_err(used(&parent))?;
            if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)) {
                match self.remove_empty(&entry.path()) {
                    Err(QuotaError::Io { source, .. }) if source.kind() == io::ErrorKind::ResourceBusy => {}
                    removed => removed?,
                }
            }
        }
        Ok(())
    }

    fn threads(&self) -> &'static str {
        match self.version {
            Version::One => "tasks",
            Version::Two => "cgroup.threads",
        }
    }
}

const CONTROLLERS: &str = "cgroup.controllers";
const SUBTREE_CONTROL: &str = "cgroup.subtree_control";

impl ThreadGroup {
    fn directory(&self) -> PathBuf {
        self.parent.join(&self.name)
    }
}

/// For how long a thread may run in each period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) runs: Duration,
    pub(crate) period: Duration,
}

/// Which group is seen where, by a line of mountinfo; see `proc_pid_mountinfo(5)`.
fn mounted(line: &str, version: Version) -> Option<(PathBuf, PathBuf)> {
    mounted_with(line, if version == Version::One { "cpu" } else { "" })
}

/// Where these controllers are, as a process's memberships name them: none for version 2.
fn mounted_with(line: &str, controllers: &str) -> Option<(PathBuf, PathBuf)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let (root, mount_point) = (place.next()?, place.next()?);
    let mut kind = kind.split(' ');
    let (file_system, options) = (kind.next()?, kind.nth(1)?);
    let has = |controller| options.split(',').any(|option| option == controller);
    let is_it = match controllers {
        "" => file_system == "cgroup2",
        _ => file_system == "cgroup" && controllers.split(',').all(has),
    };
    is_it.then(|| (root.into(), mount_point.into()))
}

/// The control groups that this process is in, in every hierarchy that it sees, open for another process to join. One that
/// this process may not write to is left out: no other would get there by it.
pub(crate) fn open_own() -> io::Result<Vec<OwnedFd>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let memberships = fs::read_to_string("/proc/self/cgroup")?;
    let groups = memberships.lines().filter_map(|membership| own_group(membership, &mounts));
    let opened = groups.map(|group| OpenOptions::new().write(true).open(group.join("cgroup.procs")));
    Ok(opened.flatten().map(OwnedFd::from).collect())
}

/// The directory of a group, by a line of `/proc/PID/cgroup`; see cgroups(7).
fn own_group(membership: &str, mounts: &str) -> Option<PathBuf> {
    let (controllers, group) = membership.split_once(':')?.1.split_once(':')?;
    let (root, mount_point) = mounts.lines().find_map(|line| mounted_with(line, controllers))?;
    Some(mount_point.join(Path::new(group).strip_prefix(root).ok()?))
}

fn has_groups(group: &Path) -> bool {
    let mut entries = fs::read_dir(group).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
}

fn has_ended(error: &io::Error) -> bool {
    let no_such_process = rustix::io::Errno::SRCH.raw_os_error();
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(no_such_process)
}

fn write(file: &Path, value: impl fmt::Display) -> Result<(), QuotaError> {
    fs::write(file, value.to_string()).map_err(used(file))
}

fn used(path: &Path) -> impl Fn(io::Error) -> QuotaError {
    move |source| QuotaError::Io { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// The files that a kernel shows, as far as plain files can stand for them.
    struct Shown(TempDir);

    const HALF: Quota = Quota { runs: Duration::from_millis(5), period: Duration::from_millis(10) };

    impl Shown {
        fn new(mounts: &str, membership: &str, files: &[(&str, &str)]) -> Self {
            let shown = Self(tempfile::tempdir().unwrap());
            shown.write("proc/self/mountinfo", &mounts.replace("AT", shown.0.path().to_str().unwrap()));
            shown.write("proc/7/task/8/cgroup", membership);
            for (file, text) in files {
                shown.write(file, text);
            }
            shown
        }

        fn write(&self, file: &str, text: &str) {
            let file = self.0.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        fn read(&self, file: &str) -> String {
            fs::read_to_string(self.0.path().join(file)).unwrap()
        }

        fn hierarchy(&self) -> Result<Hierarchy, QuotaError> {
            Hierarchy::find_in(&self.0.path().join("proc"))
        }
    }

    const TWO: &str = "30 24 0:27 / AT/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "29 24 0:26 / AT/memory rw - cgroup cgroup rw,memory\n\
                          31 24 0:28 / AT/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";

    #[test]
    fn in_the_second_version_a_thread_gets_a_threaded_group_below_its_own() {
        let service = "cgroup/system.slice/drainpipe.service";
        let shown = Shown::new(TWO, "0::/system.slice/drainpipe.service\n", &[]);
        shown.write(&format!("{service}/{CONTROLLERS}"), "cpu memory pids\n");
        shown.write(&format!("{service}/{SUBTREE_CONTROL}"), "\n");
        let hierarchy = shown.hierarchy().unwrap();
        let group = hierarchy.group_for(7, 8, "vcpu-8".into()).unwrap();
        hierarchy.make(&group).unwrap();
        let made = format!("{service}/vcpu-8");
        assert_eq!(shown.read(&format!("{made}/cgroup.type")), "threaded");
        assert_eq!(shown.read(&format!("{service}/{SUBTREE_CONTROL}")), "+cpu");
        shown.write(&format!("{made}/cpu.max"), "max 100000\n");
        hierarchy.limit(7, &group, HALF).unwrap();
        assert_eq!(shown.read(&format!("{made}/cpu.max")), "5000 10000");
        assert_eq!(shown.read(&format!("{made}/cgroup.threads")), "8");
        // The kernel shows this once the thread is there.
        shown.write("proc/7/task/8/cgroup", "0::/system.slice/drainpipe.service/vcpu-8\n");
        assert_eq!(hierarchy.group_for(7, 8, "vcpu-8".into()).unwrap(), group);
        assert_eq!(hierarchy.groups_with(7, |thread| format!("vcpu-{thread}")).unwrap(), [group]);
    }

    #[test]
    fn in_the_first_version_beside_a_controller_that_is_mounted_with_it() {
        let shown = Shown::new(&format!("{TWO}{HYBRID}"), "4:cpu,cpuacct:/vms\n0::/other\n", &[]);
        shown.write("cpu,cpuacct/vms/vcpu-8/cpu.cfs_period_us", "100000\n");
        shown.write("cpu,cpuacct/vms/vcpu-8/cpu.cfs_quota_us", "-1\n");
        let hierarchy = shown.hierarchy().unwrap();
        let group = hierarchy.group_for(7, 8, "vcpu-8".into()).unwrap();
        hierarchy.limit(7, &group, HALF).unwrap();
        let read = |file: &str| shown.read(&format!("cpu,cpuacct/vms/vcpu-8/{file}"));
        assert_eq!([read("cpu.cfs_period_us"), read("cpu.cfs_quota_us")], ["10000", "5000"]);
        assert_eq!(read("tasks"), "8");
    }

    #[test]
    fn the_groups_of_a_process_are_found_in_every_hierarchy() {
        let mounts = "28 24 0:25 / /c/unified rw - cgroup2 cgroup2 rw\n\
                      29 24 0:26 / /c/memory rw - cgroup cgroup rw,memory\n\
                      30 24 0:27 /vm /c/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
                      31 24 0:28 / /c/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
        for (membership, group) in [
            ("0::/system.slice/a", Some("/c/unified/system.slice/a")),
            ("9:memory:/", Some("/c/memory/")),
            ("4:cpu,cpuacct:/a", Some("/c/cpu,cpuacct/a")),
            ("1:name=systemd:/vm/a", Some("/c/systemd/a")),
            ("1:name=systemd:/elsewhere", None),
            ("5:pids:/a", None),
            ("", None),
        ] {
            assert_eq!(own_group(membership, mounts), group.map(PathBuf::from), "{membership}");
        }
    }

    #[test]
    fn what_is_missing_is_told() {
        let none = Shown::new("", "0::/vms\n", &[]).hierarchy().unwrap_err();
        assert!(none.to_string().contains("no control groups"), "{none}");
        let shown = Shown::new(TWO, "0::/vms\n", &[]);
        shown.write(&format!("cgroup/vms/{CONTROLLERS}"), "memory pids\n");
        let hierarchy = shown.hierarchy().unwrap();
        let group = hierarchy.group_for(7, 8, "vcpu-8".into()).unwrap();
        let off = hierarchy.limit(7, &group, HALF).unwrap_err();
        assert!(off.to_string().contains("Delegate=cpu"), "{off}");
        assert!(!group.directory().exists());
    }
}
