//! Where a host wants the disks that come to it, if not under the paths that they had.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::host::vm_resources::{AllowedPath, VmResources};

/// For directories of other hosts, the directories of this one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct DiskPlaces(BTreeMap<PathBuf, PathBuf>);

impl DiskPlaces {
    /// Where a disk of this path goes, by the innermost directory that is named; none if it keeps its path.
    pub fn of(&self, path: &Path) -> Option<PathBuf> {
        let is_below = |(from, _): &(&PathBuf, &PathBuf)| path.starts_with(from) && path != from.as_path();
        let (from, to) = self.0.iter().filter(is_below).max_by_key(|(from, _)| from.components().count())?;
        Some(to.join(path.strip_prefix(from).ok()?))
    }

    /// What cannot be meant. A device is overwritten only by somebody who names it, so none of the places may be one.
    pub fn contradiction(&self, resources: &VmResources) -> Option<String> {
        let (from, to) =
            self.0.iter().find(|(from, to)| !from.is_absolute() || !takes_files(resources, to))?;
        if !from.is_absolute() {
            return Some(format!("[disks.places]: `{}` is not an absolute path", from.display()));
        }
        let to = to.display();
        Some(format!(
            "[disks.places]: `{to}` is not in a directory that VMs may use: add it to `directories` of [vms]"
        ))
    }
}

fn takes_files(resources: &VmResources, directory: &Path) -> bool {
    matches!(resources.allowed_path(&directory.join("disk")), Ok(AllowedPath::Below { .. }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(of: &[(&str, &str)]) -> DiskPlaces {
        DiskPlaces(of.iter().map(|(from, to)| (PathBuf::from(from), PathBuf::from(to))).collect())
    }

    #[test]
    fn the_innermost_directory_decides() {
        let places = places(&[("/srv", "/big"), ("/srv/vms", "/fast"), ("/dev/vg0", "/srv/volumes")]);
        for (path, expected) in [
            ("/srv/web.img", Some("/big/web.img")),
            ("/srv/vms/a/web.img", Some("/fast/a/web.img")),
            ("/srv/vmsx/web.img", Some("/big/vmsx/web.img")),
            ("/dev/vg0/web", Some("/srv/volumes/web")),
            ("/srv", None),
            ("/other/web.img", None),
        ] {
            assert_eq!(places.of(Path::new(path)), expected.map(PathBuf::from), "{path}");
        }
    }

    #[test]
    fn what_vms_may_not_have_is_no_place() {
        let resources = VmResources {
            directories: vec!["/srv".into()],
            devices: vec!["/dev/vg0".into(), "/srv/devices".into()],
            ..VmResources::default()
        };
        let wrong = |from, to| places(&[(from, to)]).contradiction(&resources);
        assert_eq!(wrong("/images", "/srv/vms"), None);
        assert_eq!(wrong("/images", "/srv"), None);
        for (from, to, what) in [
            ("images", "/srv", "`images` is not an absolute path"),
            ("/images", "srv", "`srv` is not in a directory"),
            ("/images", "/srv/../etc", "not in a directory"),
            ("/images", "/etc", "`/etc` is not in a directory"),
            ("/images", "/dev/vg0", "not in a directory"),
            ("/images", "/srv/devices", "not in a directory"),
        ] {
            let said = wrong(from, to).unwrap();
            assert!(said.contains(what), "{said}");
        }
    }
}
