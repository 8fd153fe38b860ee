//! The numbers under which QEMU has files and taps open. Pure: a specification alone decides them.

use std::os::fd::RawFd;
use std::path::PathBuf;

use drainpipe_hypervisor::spec::VmSpec;

/// The first number after those of standard input, output and errors.
pub(crate) const FIRST: RawFd = 3;

/// The numbers of QEMU's descriptors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) guard: RawFd,
    pub(crate) kernel: Option<RawFd>,
    pub(crate) initramfs: Option<RawFd>,
    pub(crate) disks: Vec<RawFd>,
    pub(crate) nics: Vec<RawFd>,
}

impl Numbers {
    pub(crate) fn of(spec: &VmSpec) -> Self {
        let mut numbers = FIRST..;
        let mut next = || numbers.next().expect("a VM has few devices");
        Self {
            guard: next(),
            kernel: spec.kernel.as_ref().map(|_| next()),
            initramfs: spec.initramfs.as_ref().map(|_| next()),
            disks: spec.disks.iter().map(|_| next()).collect(),
            nics: spec.nics.iter().map(|_| next()).collect(),
        }
    }

    /// How QEMU names a disk that it has open.
    pub(crate) fn disk_path(number: RawFd) -> String {
        format!("/dev/fdset/{number}")
    }

    /// How QEMU opens a file anew that it has open, whatever directory that is in.
    pub(crate) fn file_path(number: RawFd) -> String {
        format!("/proc/self/fd/{number}")
    }

    /// What QEMU says, with the files' own names.
    pub(crate) fn with_own_names(&self, spec: &VmSpec, text: &str) -> String {
        let files = self.kernel.iter().zip(&spec.kernel).chain(self.initramfs.iter().zip(&spec.initramfs));
        let files = files.map(|(number, path)| (Self::file_path(*number), path));
        let disks = self.disks.iter().zip(&spec.disks);
        let disks = disks.map(|(number, disk)| (Self::disk_path(*number), &disk.path));
        let mut names: Vec<(String, &PathBuf)> = files.chain(disks).collect();
        // The longer numbers first, as the shorter ones begin them.
        names.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        names.iter().fold(text.to_owned(), |text, (name, path)| text.replace(name, &path.to_string_lossy()))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_qemu_says_of_numbers_is_told_of_files() {
        let disk = |path: &str| format!("[[disk]]\npath = \"{path}\"\nformat = \"raw\"\n");
        let disks: String = (0..8).map(|number| disk(&format!("/disks/{number}"))).collect();
        let text = format!(
            "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-8.2\"\nkernel = \"/boot/k\"\n{disks}"
        );
        let spec = VmSpec::from_toml(&text, Path::new("web.toml")).unwrap();
        let numbers = Numbers::of(&spec);
        assert_eq!((numbers.guard, numbers.kernel, numbers.initramfs), (3, Some(4), None));
        assert_eq!(numbers.disks, (5..13).collect::<Vec<_>>());
        let said = "cannot open /proc/self/fd/4, /dev/fdset/5 and /dev/fdset/12";
        assert_eq!(numbers.with_own_names(&spec, said), "cannot open /boot/k, /disks/0 and /disks/7");
    }
}
