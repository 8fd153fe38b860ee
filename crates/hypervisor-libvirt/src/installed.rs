//! Which libvirt a host has, without running it: the name of its library's file says so.

use std::fs;
use std::path::Path;

/// Where distributions put libraries: Debian's, Fedora's, others'.
const DIRECTORIES: [&str; 3] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"];

/// Its version, such as `9.0.0`; none where it is not installed.
pub fn installed_version() -> Option<String> {
    DIRECTORIES.iter().find_map(|directory| version_in(Path::new(directory)))
}

fn version_in(directory: &Path) -> Option<String> {
    let mut entries = fs::read_dir(directory).ok()?.flatten();
    entries.find_map(|entry| entry.file_name().to_str().and_then(version_of))
}

/// `libvirt.so.0.9000.1` is 9.0.1: thousands, then the last number (`so_version` in libvirt's
/// `meson.build`).
fn version_of(library: &str) -> Option<String> {
    let (release, micro) = library.strip_prefix("libvirt.so.0.")?.split_once('.')?;
    let (release, micro): (u32, u32) = (release.parse().ok()?, micro.parse().ok()?);
    Some(format!("{}.{}.{micro}", release / 1_000, release % 1_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_librarys_name_tells_the_version() {
        assert_eq!(version_of("libvirt.so.0.9000.0").as_deref(), Some("9.0.0"));
        assert_eq!(version_of("libvirt.so.0.10005.2").as_deref(), Some("10.5.2"));
        for other in ["libvirt.so.0", "libvirt.so", "libvirt-lxc.so.0.9000.0", "libvirt.so.0.x.0"] {
            assert_eq!(version_of(other), None, "{other}");
        }
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(version_in(directory.path()), None);
        fs::write(directory.path().join("libvirt.so.0.7000.0"), "").unwrap();
        assert_eq!(version_in(directory.path()).as_deref(), Some("7.0.0"));
    }
}
