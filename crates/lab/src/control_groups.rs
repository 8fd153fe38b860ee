//! The machine's control groups for a node: `ip netns exec` mounts another `/sys`, in which there are none.

use std::fs;

/// Mounts what its first two arguments name, if it can be, and becomes the others.
const MOUNT: &str = r#"mount -t "$1" -o "$2" none /sys/fs/cgroup 2>/dev/null || :; shift 2; exec "$@""#;

/// Words before a program that is to see them; none where this machine has none that divide up its cores.
pub(crate) fn mounting() -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let Some((kind, options)) = mounted(&mounts) else { return vec![] };
    ["sh", "-c", MOUNT, "sh", kind, &options].map(str::to_owned).into()
}

/// Where cores are divided up, as mount(8) takes it; see `proc_pid_mountinfo(5)`. With the same options as it is mounted
/// already: with others a controller would change its hierarchy.
fn mounted(mounts: &str) -> Option<(&'static str, String)> {
    let file_systems = || {
        mounts.lines().filter_map(|line| {
            let mut words = line.split_once(" - ")?.1.split(' ');
            Some((words.next()?, words.nth(1)?))
        })
    };
    let controllers = |options: &str| {
        let others = ["rw", "ro", "xattr", "clone_children"];
        let kept: Vec<&str> = options.split(',').filter(|option| !others.contains(option)).collect();
        kept.join(",")
    };
    let is_first = |(kind, options): &(&str, &str)| {
        *kind == "cgroup" && options.split(',').any(|option| option == "cpu")
    };
    if let Some((_, options)) = file_systems().find(is_first) {
        return Some(("cgroup", controllers(options)));
    }
    file_systems().any(|(kind, _)| kind == "cgroup2").then(|| ("cgroup2", "rw".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = "30 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_hierarchy_that_divides_up_cores_is_mounted_as_it_is() {
        let first = "29 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                     31 24 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
        assert_eq!(mounted(&format!("{TWO}{first}")), Some(("cgroup", "cpu,cpuacct".into())));
        assert_eq!(mounted(TWO), Some(("cgroup2", "rw".into())));
        assert_eq!(mounted("22 1 0:20 / /sys rw - sysfs sysfs rw\n"), None);
    }
}
