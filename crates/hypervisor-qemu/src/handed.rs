//! The files that QEMU gets open: it may open none of them itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tun_rs::{DeviceBuilder, Layer};

use crate::command_line::tap_name;
use crate::launch::{LaunchError, io_error};
use crate::launcher::FIRST;
use crate::paths::RuntimePaths;
use drainpipe_hypervisor::spec::{Disk, ResolvedSpec, VmSpec};

/// The numbers of QEMU's descriptors. Pure: a specification alone decides them.
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

    /// How QEMU opens a file again that it has open, whatever directory that is in.
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

/// What a QEMU is to have open, under its numbers. QEMU alone has it once this is dropped: the locks of a disk stand for
/// as long as anybody has it open.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) descriptors: BTreeMap<RawFd, OwnedFd>,
    pub(crate) block_devices: BTreeSet<PathBuf>,
}

impl Handed {
    /// Opens all that a VM needs.
    pub(crate) async fn open(spec: &ResolvedSpec, paths: &RuntimePaths) -> Result<Self, LaunchError> {
        let vm = spec.spec().clone();
        // Storage that hangs must hold up nobody else. What is given up meanwhile leaves nothing.
        let opened = tokio::task::spawn_blocking(move || Self::open_files(&vm)).await;
        let mut handed = opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
        let vm = spec.spec();
        let numbers = Numbers::of(vm);
        let guard_socket = paths.guard_socket();
        let guard = UnixListener::bind(&guard_socket)
            .map_err(|source| io_error("listen on", &guard_socket, source))?;
        handed.add(numbers.guard, guard);
        for (index, number) in numbers.nics.iter().enumerate() {
            let name = tap_name(&vm.name, index);
            let tap = make_tap(&name).map_err(|source| LaunchError::MakeTap { name, source })?;
            handed.add(*number, tap);
        }
        Ok(handed)
    }

    fn open_files(vm: &VmSpec) -> Result<Self, LaunchError> {
        let numbers = Numbers::of(vm);
        let mut handed = Self { descriptors: BTreeMap::new(), block_devices: BTreeSet::new() };
        for (number, path) in [(numbers.kernel, &vm.kernel), (numbers.initramfs, &vm.initramfs)] {
            if let (Some(number), Some(path)) = (number, path) {
                let opened = File::open(path).map_err(|source| io_error("open", path, source))?;
                handed.add(number, opened);
            }
        }
        for (number, Disk { path, read_only, .. }) in numbers.disks.iter().zip(&vm.disks) {
            let disk = open_disk(path, *read_only).map_err(|source| io_error("open", path, source))?;
            let metadata = disk.metadata().map_err(|source| io_error("look at", path, source))?;
            if metadata.file_type().is_block_device() {
                handed.block_devices.insert(path.clone());
            }
            handed.add(*number, disk);
        }
        Ok(handed)
    }

    fn add(&mut self, number: RawFd, opened: impl Into<OwnedFd>) {
        self.descriptors.insert(number, opened.into());
    }
}

/// As QEMU opens it: since 9.1 it takes no descriptor with other flags.
pub(crate) fn open_disk(path: &Path, is_read_only: bool) -> io::Result<File> {
    let direct = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let opened = OpenOptions::new().read(true).write(!is_read_only).custom_flags(direct).open(path);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => {
            io::Error::new(error.kind(), "its file system cannot bypass the page cache (O_DIRECT)")
        }
        _ => error,
    })
}

/// As QEMU makes one itself: with the header by which host and guest leave checksums and segments to each other. The
/// kernel removes it when QEMU ends, however it ends.
fn make_tap(name: &str) -> io::Result<OwnedFd> {
    let tap =
        DeviceBuilder::new().name(name).layer(Layer::L2).offload(true).inherit_enable_state().build_sync()?;
    tap.as_fd().try_clone_to_owned()
}

#[cfg(test)]
mod tests {
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
