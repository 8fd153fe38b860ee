//! What the guest takes from its kernel, and gives it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use drainpipe_guest::image::{DISK_MODULE, MODULES_FOLDER};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};
use rustix::system::finit_module;

const NO_MODULE_PARAMETERS: &CStr = c"";

#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    #[error("cannot mount /proc: {0}")]
    Proc(Errno),
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("/proc/meminfo has no MemAvailable; the kernel is too old")]
    Meminfo,
    #[error(
        "the kernel refuses module {path}: {source}; build the image from the modules of this \
         very kernel",
        path = path.display()
    )]
    Module { path: PathBuf, source: Errno },
}

pub(crate) fn mount_proc() -> Result<(), BootError> {
    mount(c"proc", c"/proc", c"proc", MountFlags::empty(), None).map_err(BootError::Proc)
}

pub(crate) fn command_line() -> Result<String, BootError> {
    read(Path::new("/proc/cmdline"))
}

/// Memory that can be used without the kernel running short, in MiB.
pub(crate) fn available_mib() -> Result<u64, BootError> {
    let meminfo = read(Path::new("/proc/meminfo"))?;
    let available_kib = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|value| value.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse::<u64>().ok())
        .ok_or(BootError::Meminfo)?;
    Ok(available_kib / 1024)
}

/// Loads the image's modules, whose names sort in the order in which they need each other; the disks' only where it is
/// wanted.
pub(crate) fn load_modules(has_disks: bool) -> Result<(), BootError> {
    let folder = Path::new("/").join(MODULES_FOLDER);
    let entries = fs::read_dir(&folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|source| BootError::Read { path: folder, source })?;
    let mut modules: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    modules.sort();
    let is_of_disks = |path: &Path| path.to_string_lossy().contains(DISK_MODULE);
    modules.into_iter().filter(|path| has_disks || !is_of_disks(path)).try_for_each(load_module)
}

fn load_module(path: PathBuf) -> Result<(), BootError> {
    let module = File::open(&path).map_err(|source| BootError::Read { path: path.clone(), source })?;
    match finit_module(&module, NO_MODULE_PARAMETERS, 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(source) => Err(BootError::Module { path, source }),
    }
}

fn read(path: &Path) -> Result<String, BootError> {
    fs::read_to_string(path).map_err(|source| BootError::Read { path: path.to_owned(), source })
}
