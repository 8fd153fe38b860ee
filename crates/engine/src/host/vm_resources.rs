//! Which files, block devices and bridges of a host VMs may use: `[vms]` of its configuration. A specification names
//! them, and it may come from another host.

use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Longest name of a file that is quoted to another host, in bytes.
pub const QUOTED_BYTES_MAX: usize = 256;

/// What VMs may use of a host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmResources {
    /// Directories whose files, at any depth, may be disks, kernels and initial RAM file systems.
    pub directories: Vec<PathBuf>,
    /// Block devices that may be disks, or directories of such.
    pub devices: Vec<PathBuf>,
    /// Bridges that NICs may join; absent for each bridge of the host.
    pub bridges: Option<Vec<String>>,
    /// Whether the connections that firewalls track of VMs go along with these, from here and to here.
    pub conntrack: bool,
}

impl Default for VmResources {
    fn default() -> Self {
        Self {
            directories: ["/srv", "/var/lib/libvirt/images", "/var/lib/libvirt/boot"]
                .map(PathBuf::from)
                .to_vec(),
            devices: vec![],
            bridges: None,
            conntrack: true,
        }
    }
}

/// Where a path is that VMs may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedPath<'a> {
    /// A file in a directory that is allowed.
    Below {
        /// The directory.
        directory: &'a Path,
        /// The way from there.
        rest: PathBuf,
    },
    /// A block device.
    Device,
}

/// Why no VM may use a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NotAllowed {
    /// It is in none of the directories, and is none of the devices. It was not looked at.
    Outside,
    /// It is among the files of the agent itself.
    OfAgent,
    /// A symbolic link on the way leads out of the directory.
    LeadsOut,
    /// There is neither a file nor, where devices are allowed, a block device.
    NoFile,
    /// It is a qcow2 image that QEMU would open another file for, which is not allowed.
    Names {
        /// That file, as the image has it.
        file: String,
    },
    /// It is a qcow2 image that does not show what QEMU would open for it.
    Unclear {
        /// What is wrong with it.
        why: String,
    },
}

impl VmResources {
    /// What cannot be meant: the key, and what is wrong with it.
    pub fn contradiction(&self) -> Option<(&'static str, String)> {
        let paths = self.directories.iter().map(|path| ("directories", path));
        let wrong = |(_, path): &(&str, &PathBuf)| components(path).is_none();
        let (key, path) = paths.chain(self.devices.iter().map(|path| ("devices", path))).find(wrong)?;
        Some((key, format!("[vms]: `{}` in `{key}` is not an absolute path without `..`", path.display())))
    }

    /// Where a path is, if VMs may use what is there. Nothing is looked at.
    pub fn allowed_path(&self, path: &Path) -> Result<AllowedPath<'_>, NotAllowed> {
        let components = components(path).ok_or(NotAllowed::Outside)?;
        let plain: PathBuf = components.iter().collect();
        let holds = |allowed: &&PathBuf| plain.starts_with(allowed) && plain != **allowed;
        let innermost =
            self.directories.iter().filter(holds).max_by_key(|directory| directory.as_os_str().len());
        // A configuration that allows a directory and devices somewhere in it means devices there.
        let is_within = |allowed: &&PathBuf| {
            innermost.is_none_or(|directory| allowed.starts_with(directory) && *allowed != directory)
        };
        if self.devices.iter().filter(is_within).any(|allowed| plain.starts_with(allowed)) {
            return Ok(AllowedPath::Device);
        }
        let directory = innermost.ok_or(NotAllowed::Outside)?;
        let rest = plain.strip_prefix(directory).map_err(|_| NotAllowed::Outside)?;
        Ok(AllowedPath::Below { directory, rest: rest.to_owned() })
    }

    /// Whether NICs of VMs may join a bridge of this name.
    pub fn allows_bridge(&self, name: &str) -> bool {
        self.bridges.as_ref().is_none_or(|bridges| bridges.iter().any(|allowed| allowed == name))
    }
}

/// Those of an absolute path that goes nowhere back. `.` and doubled slashes are none.
fn components(path: &Path) -> Option<Vec<Component<'_>>> {
    let components: Vec<Component<'_>> = path.components().collect();
    let goes_down = components.iter().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    (path.is_absolute() && goes_down).then_some(components)
}

impl NotAllowed {
    /// That an image names this file.
    pub fn names(file: &str) -> Self {
        Self::Names { file: quoted(file) }
    }

    /// That an image is not understood.
    pub fn unclear(why: impl std::fmt::Display) -> Self {
        Self::Unclear { why: quoted(&why.to_string()) }
    }

    /// What is wrong, after the path; of that host.
    pub fn what(&self, host: &str) -> String {
        match self {
            Self::Outside => {
                format!(
                    "is not in a directory that VMs may use on {host}, and not a device that they may use"
                )
            }
            Self::OfAgent => format!("is among the agent's own files on {host}, which no VM may use"),
            Self::LeadsOut => {
                format!(
                    "is behind a symbolic link that leads out of the directory that VMs may use on {host}"
                )
            }
            Self::NoFile => format!("is neither a file, nor a device in `devices` of [vms], on {host}"),
            Self::Names { file } => {
                format!("is an image that makes QEMU open `{file}`, which VMs may not use on {host}")
            }
            Self::Unclear { why } => format!("is not a qcow2 image that {host} can open: {why}"),
        }
    }

    /// What can be done about it.
    pub fn cure(&self, host: &str) -> String {
        match self {
            Self::Outside => format!(
                "move it to one of them, or add its directory to `directories`, or a block device to `devices`, of [vms] \
                 in agent.toml of {host} and restart the agent there"
            ),
            Self::OfAgent => "keep disks in a directory of their own".into(),
            Self::LeadsOut => "give the path that the link leads to, and allow that".into(),
            Self::NoFile => {
                format!("add a block device's own path in /dev to `devices` of [vms] in agent.toml of {host}")
            }
            Self::Names { .. } => format!(
                "allow its directory in [vms] in agent.toml of {host}, or copy everything into one image: \
                qemu-img convert -O qcow2"
            ),
            Self::Unclear { .. } => "look at it with qemu-img info".into(),
        }
    }

    /// Whether another host may have said it: it is shown to people.
    pub fn is_plausible(&self) -> bool {
        let text = match self {
            Self::Names { file: text } | Self::Unclear { why: text } => text,
            Self::Outside | Self::OfAgent | Self::LeadsOut | Self::NoFile => return true,
        };
        text.len() <= QUOTED_BYTES_MAX
            && text.chars().all(|letter| letter == ' ' || letter.is_ascii_graphic())
    }
}

fn quoted(text: &str) -> String {
    let plain: String = text.escape_default().to_string();
    plain.chars().take(QUOTED_BYTES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn resources(directories: &[&str], devices: &[&str]) -> VmResources {
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect();
        VmResources {
            directories: paths(directories),
            devices: paths(devices),
            bridges: None,
            conntrack: true,
        }
    }

    #[test]
    fn a_path_is_compared_component_by_component() {
        let allowed = resources(&["/srv/vms", "/srv/vms/fast/"], &["/dev/vg0", "/dev/sdb"]);
        let below = |path: &str| match allowed.allowed_path(Path::new(path)) {
            Ok(AllowedPath::Below { directory, rest }) => Some((directory.to_owned(), rest)),
            _ => None,
        };
        let expected = |directory: &str, rest: &str| Some((directory.into(), rest.into()));
        assert_eq!(below("/srv/vms/web"), expected("/srv/vms", "web"));
        assert_eq!(below("//srv/./vms//a/web"), expected("/srv/vms", "a/web"));
        assert_eq!(below("/srv/vms/fast/web"), expected("/srv/vms/fast/", "web"));
        for device in ["/dev/vg0/web", "/dev/sdb"] {
            assert_eq!(allowed.allowed_path(Path::new(device)), Ok(AllowedPath::Device));
        }
        for outside in [
            "/srv/vms",
            "/srv/vmsx/web",
            "/srv/vms/../x",
            "/srv/vms/a/../web",
            "srv/vms/web",
            "/etc/shadow",
            "/dev/sdb1",
            "/dev/vg0/../sda",
            "/",
            "",
        ] {
            assert_eq!(allowed.allowed_path(Path::new(outside)), Err(NotAllowed::Outside), "{outside}");
        }
    }

    #[test]
    fn the_innermost_says_whether_files_or_devices_are_meant() {
        let allowed = resources(&["/", "/dev/shm"], &["/dev"]);
        assert_eq!(allowed.allowed_path(Path::new("/dev/vg0/web")), Ok(AllowedPath::Device));
        for file in ["/srv/web", "/dev/shm/web"] {
            assert!(matches!(allowed.allowed_path(Path::new(file)), Ok(AllowedPath::Below { .. })), "{file}");
        }
    }

    #[test]
    fn bridges_are_free_unless_some_are_named() {
        assert!(VmResources::default().allows_bridge("br0"));
        let named = VmResources { bridges: Some(vec!["br0".into()]), ..VmResources::default() };
        assert_eq!([named.allows_bridge("br0"), named.allows_bridge("br1")], [true, false]);
    }

    #[test]
    fn what_cannot_be_meant_is_said() {
        assert_eq!(VmResources::default().contradiction(), None);
        let said = |resources: VmResources| resources.contradiction().unwrap();
        assert!(said(resources(&["srv"], &[])).1.contains("`srv` in `directories`"));
        assert_eq!(said(resources(&[], &["/dev/../x"])).0, "devices");
    }

    fn path() -> impl Strategy<Value = String> {
        proptest::collection::vec(prop_oneof!["a", "b", "\\.", "\\.\\.", "", "ab"], 0..6)
            .prop_map(|parts| format!("/{}", parts.join("/")))
    }

    /// Where a path leads, without symbolic links.
    fn walked(path: &str) -> Vec<&str> {
        let mut at = vec![];
        for part in path.split('/').filter(|part| !part.is_empty() && *part != ".") {
            if part == ".." {
                at.pop();
            } else {
                at.push(part);
            }
        }
        at
    }

    proptest! {
        #[test]
        fn what_is_allowed_is_below_a_directory(directories in proptest::collection::vec(path(), 0..3), path in path()) {
            let allowed = resources(&directories.iter().map(String::as_str).collect::<Vec<_>>(), &[]);
            prop_assume!(allowed.contradiction().is_none());
            let is_below = directories.iter().any(|directory| {
                let (directory, path) = (walked(directory), walked(&path));
                path.starts_with(&directory) && path.len() > directory.len()
            });
            match allowed.allowed_path(Path::new(&path)) {
                Ok(AllowedPath::Below { directory, rest }) => {
                    prop_assert!(is_below);
                    let joined = directory.join(&rest);
                    prop_assert_eq!(walked(joined.to_str().unwrap()), walked(&path));
                    prop_assert!(!rest.as_os_str().is_empty() && rest.is_relative());
                    prop_assert!(rest.components().all(|part| matches!(part, Component::Normal(_))));
                }
                // A path that goes back is refused wherever it leads.
                refused => prop_assert!(refused == Err(NotAllowed::Outside) && (!is_below || path.contains(".."))),
            }
        }

        #[test]
        fn what_is_said_of_an_image_may_be_shown(text in "\\PC*|.{0,400}") {
            prop_assert!(NotAllowed::names(&text).is_plausible());
            prop_assert!(NotAllowed::unclear(&text).is_plausible());
        }
    }
}
