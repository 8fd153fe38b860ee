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
use crate::numbers::Numbers;
use crate::paths::RuntimePaths;
use drainpipe_hypervisor::spec::{Disk, ResolvedSpec, VmSpec};

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
