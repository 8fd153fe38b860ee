//! From the initramfs to a root that looks like the lab's own machine, and can be written.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use drainpipe_machine::layout::{
    ADDITIONS_TAG, HOSTNAME_PARAMETER, ROOT_TAG, SHARED_PARAMETER, SHARED_TAG, parameter,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move};
use rustix::process::{chdir, chroot};
use rustix::system::{finit_module, sethostname};

/// Where `drainpipe-guest-image` puts modules, with names that sort in the order in which they need each other.
const MODULES: &str = "/modules";

/// As much as a virtio 9p transport takes at once (`net/9p/trans_virtio.c`: 128 pages, less headers). Nothing changes
/// below a lab's root while it runs that its machines rely on, so they may keep what they have read.
const READ_ONLY_9P: &CStr = c"trans=virtio,version=9p2000.L,msize=507904,cache=loose";
/// What is written outside is to be seen inside at once.
const SHARED_9P: &CStr = c"trans=virtio,version=9p2000.L,msize=507904,cache=none";

const OVERLAY: &CStr = c"lowerdir=/additions:/lower,upperdir=/written/upper,workdir=/written/work";

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[derive(Debug, thiserror::Error)]
pub(crate) enum BootError {
    #[error("cannot mount {what} at {}: {source}", at.display())]
    Mount { what: &'static str, at: PathBuf, source: Errno },
    #[error("cannot make {}: {source}", path.display())]
    Make { path: PathBuf, source: io::Error },
    #[error("cannot read {path}: {source}")]
    Read { path: &'static str, source: io::Error },
    #[error("the kernel refuses the module {}: {source}", path.display())]
    Module { path: PathBuf, source: io::Error },
    #[error("the kernel's command line does not say {0}")]
    Parameter(&'static str),
    #[error("cannot enter the root: {0}")]
    Root(Errno),
    #[error("cannot take the name {name}: {source}")]
    Name { name: String, source: Errno },
    #[error("cannot start the server of its ports: {0}")]
    Server(io::Error),
}

/// Everything up to the server of the ports.
pub(crate) fn machine() -> Result<(), BootError> {
    mount_at("proc", "/proc", MountFlags::empty(), None)?;
    let command_line = read("/proc/cmdline")?;
    load_modules()?;
    make_root()?;
    enter_root()?;
    mount_kernels_file_systems()?;
    let named = |name| parameter(&command_line, name).ok_or(BootError::Parameter(name));
    mount_shared(Path::new(named(SHARED_PARAMETER)?))?;
    set_name(named(HOSTNAME_PARAMETER)?)
}

/// The variables that programs start with.
pub(crate) fn environment() -> [(&'static str, &'static str); 3] {
    [("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")]
}

fn load_modules() -> Result<(), BootError> {
    let entries = fs::read_dir(MODULES).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let entries = entries.map_err(|source| BootError::Read { path: MODULES, source })?;
    let mut modules: Vec<_> = entries.into_iter().map(|entry| entry.path()).collect();
    modules.sort();
    modules.into_iter().try_for_each(load_module)
}

fn load_module(path: PathBuf) -> Result<(), BootError> {
    let loaded = File::open(&path).and_then(|module| match finit_module(&module, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    });
    loaded.map_err(|source| BootError::Module { path, source })
}

fn make_root() -> Result<(), BootError> {
    mount_9p(ROOT_TAG, Path::new("/lower"), MountFlags::RDONLY, READ_ONLY_9P)?;
    mount_9p(ADDITIONS_TAG, Path::new("/additions"), MountFlags::RDONLY, READ_ONLY_9P)?;
    mount_at("tmpfs", "/written", MountFlags::empty(), None)?;
    make_directory(Path::new("/written/upper"))?;
    make_directory(Path::new("/written/work"))?;
    mount_at("overlay", "/root", MountFlags::empty(), Some(OVERLAY))
}

/// As `switch_root(8)` does it, but for what it removes: the initramfs is small.
fn enter_root() -> Result<(), BootError> {
    chdir("/root").map_err(BootError::Root)?;
    mount_move(".", "/").map_err(BootError::Root)?;
    chroot(".").and_then(|()| chdir("/")).map_err(BootError::Root)
}

fn mount_kernels_file_systems() -> Result<(), BootError> {
    let guarded = MountFlags::NOSUID | MountFlags::NODEV;
    mount_at("proc", "/proc", guarded, None)?;
    mount_at("sysfs", "/sys", guarded, None)?;
    mount_at("devtmpfs", "/dev", MountFlags::NOSUID, None)?;
    mount_at("devpts", "/dev/pts", MountFlags::NOSUID, Some(c"mode=620,ptmxmode=666"))?;
    mount_at("tmpfs", "/dev/shm", guarded, None)?;
    mount_at("tmpfs", "/run", guarded, Some(c"mode=755"))?;
    mount_at("tmpfs", "/tmp", guarded, None)?;
    mount_at("cgroup2", "/sys/fs/cgroup", guarded, None)
}

fn mount_shared(path: &Path) -> Result<(), BootError> {
    mount_9p(SHARED_TAG, path, MountFlags::empty(), SHARED_9P)
}

fn set_name(name: &str) -> Result<(), BootError> {
    sethostname(name.as_bytes()).map_err(|source| BootError::Name { name: name.to_owned(), source })
}

fn mount_at(
    kind: &'static str,
    at: &str,
    flags: MountFlags,
    options: Option<&CStr>,
) -> Result<(), BootError> {
    let at = Path::new(at);
    make_directory(at)?;
    let mounted = mount(kind, at, kind, flags, options);
    mounted.map_err(|source| BootError::Mount { what: kind, at: at.to_owned(), source })
}

fn mount_9p(tag: &'static str, at: &Path, flags: MountFlags, options: &CStr) -> Result<(), BootError> {
    make_directory(at)?;
    let mounted = mount(tag, at, "9p", flags, options);
    mounted.map_err(|source| BootError::Mount { what: tag, at: at.to_owned(), source })
}

fn make_directory(path: &Path) -> Result<(), BootError> {
    fs::create_dir_all(path).map_err(|source| BootError::Make { path: path.to_owned(), source })
}

fn read(path: &'static str) -> Result<String, BootError> {
    fs::read_to_string(path).map_err(|source| BootError::Read { path, source })
}
