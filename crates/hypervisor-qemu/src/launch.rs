//! Starts a QEMU process and connects to it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_hypervisor::{Exit, PathTooLong, VmSpec};
use rustix::event::Timespec;
use scopeguard::{ScopeGuard, guard};
use tokio::net::UnixStream;

use crate::control_groups;
use crate::keeper::{Keeper, Kept};
use crate::launcher::{CANNOT_BECOME, CANNOT_RUN, Launch, Launcher};
use crate::numbers::Numbers;
use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::process::Process;
use crate::qmp::{QmpClient, QmpError};

/// What is quoted from QEMU's log in an error.
const LOG_TAIL_BYTES: u64 = 2048;
const EXIT_AFTER_KILL: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// QEMU closes its sockets a moment before its process has ended.
const EXIT_AFTER_CLOSE: Duration = Duration::from_secs(1);

/// Why a QEMU did not start. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A VM of this name runs, or has left files behind.
    #[error(
        "{directory} exists already: a VM of this name runs on this host, or its remains have not been cleared"
    )]
    Exists {
        /// The directory of the VM.
        directory: PathBuf,
    },
    /// A file or socket cannot be made.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The sockets' paths are too long.
    #[error(transparent)]
    PathTooLong(#[from] PathTooLong),
    /// The program does not run.
    #[error(
        "cannot run {binary}: {source}; install QEMU (Debian: qemu-system-x86), or name its path in the configuration"
    )]
    Spawn {
        /// The program.
        binary: PathBuf,
        /// Why, as the kernel says.
        source: io::Error,
    },
    /// A NIC of the VM has no tap.
    #[error(
        "cannot make the tap {name}: {source}; has the agent CAP_NET_ADMIN, and does the host have /dev/net/tun?"
    )]
    MakeTap {
        /// Its name.
        name: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Its process cannot become what QEMU is to be.
    #[error("{binary} was not started: {problem}; starting it needs CAP_SETUID, CAP_SETGID and CAP_SETPCAP")]
    NotBecome {
        /// The program.
        binary: PathBuf,
        /// What the process said.
        problem: String,
    },
    /// The program ended at once.
    #[error("{binary} ended at its start ({exit}): {log_tail}")]
    Exited {
        /// The program.
        binary: PathBuf,
        /// How it ended.
        exit: Exit,
        /// The end of what it wrote.
        log_tail: String,
    },
    /// The program runs, but is no use.
    #[error("{binary} started but cannot be controlled: {source} {log_tail}")]
    NotReady {
        /// The program.
        binary: PathBuf,
        /// What went wrong.
        source: QmpError,
        /// The end of what it wrote.
        log_tail: String,
    },
}

impl LaunchError {
    /// As QEMU says it, but with the names of the files that it has open by numbers.
    pub(crate) fn with_own_names(mut self, numbers: &Numbers, spec: &VmSpec) -> Self {
        if let Self::Exited { log_tail, .. } | Self::NotReady { log_tail, .. } = &mut self {
            *log_tail = numbers.with_own_names(spec, log_tail);
        }
        self
    }
}

/// Something half done: undone when dropped, unless [`ScopeGuard::into_inner`] takes it. So a start
/// that fails, or whose caller gives up, leaves nothing.
pub(crate) type Unfinished<T> = ScopeGuard<T, fn(T)>;

/// A QEMU that answers.
pub(crate) struct Launched {
    pub(crate) qmp: QmpClient,
    pub(crate) process: Unfinished<Process>,
}

/// Makes a VM's directory, which must be new: so only one of two starts at a time succeeds.
pub(crate) fn create_directory(paths: &RuntimePaths) -> Result<Unfinished<RuntimePaths>, LaunchError> {
    let directory = paths.directory();
    let failed = |source| io_error("create", directory, source);
    // A process that reaches the control sockets controls the guest.
    let mut builder = DirBuilder::new();
    builder.mode(0o700);
    if let Some(parent) = directory.parent() {
        builder.recursive(true).create(parent).map_err(failed)?;
    }
    match builder.recursive(false).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(LaunchError::Exists { directory: directory.to_owned() });
        }
        created => created.map_err(failed)?,
    }
    Ok(guard(paths.clone(), |paths| drop(fs::remove_dir_all(paths.directory()))))
}

/// Makes QEMU's working directory, and in it the one that anybody may write to, but nobody reach: only QEMU, which begins
/// there, and root, which needs no capability for it.
fn create_qemu_directory(paths: &RuntimePaths) -> Result<OwnedFd, LaunchError> {
    for (directory, mode) in [(paths.qemu_directory(), 0o755), (paths.qemus_own_directory(), 0o777)] {
        let failed = |source| io_error("create", &directory, source);
        fs::create_dir(&directory).map_err(failed)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).map_err(failed)?;
    }
    let directory = paths.qemu_directory();
    Ok(File::open(&directory).map_err(|source| io_error("open", &directory, source))?.into())
}

/// Runs QEMU with a control connection as its standard input and the listening control socket as
/// its standard output, and waits until it answers.
///
/// The first connection is never one that QEMU has to accept: its main thread and its monitor's
/// thread may both take up one that comes while it starts, and then the socket is mute for good or
/// QEMU crashes. On two busy cores 25 of 13,000 starts of 7.2 and 10.0 had that, and none of 13,000
/// that were spoken to like this. Once QEMU has answered, its listening sockets are safe.
pub(crate) async fn launch(
    privileges: &Privileges,
    launcher: &Launcher,
    arguments: &[OsString],
    descriptors: BTreeMap<RawFd, OwnedFd>,
    paths: &RuntimePaths,
    deadline: Duration,
) -> Result<Launched, LaunchError> {
    let binary = &launcher.binary;
    let failed = |source| io_error("make a connection for", binary, source);
    let (ours, qemus) = UnixStream::pair().map_err(failed)?;
    let qemus = qemus.into_std().map_err(failed)?;
    // As a program expects its standard input.
    qemus.set_nonblocking(false).map_err(failed)?;
    let process = spawn(privileges, launcher, arguments, descriptors, paths, qemus.into())?;
    match QmpClient::over(ours, deadline).await {
        Ok(qmp) => Ok(Launched { qmp, process }),
        Err(source) => Err(why_not_ready(binary, &process, paths, source).await),
    }
}

/// What the loader of a program exits with that lacks a library.
const LACKS_LIBRARY: u8 = 127;

fn spawn(
    privileges: &Privileges,
    launcher: &Launcher,
    arguments: &[OsString],
    descriptors: BTreeMap<RawFd, OwnedFd>,
    paths: &RuntimePaths,
    connection: OwnedFd,
) -> Result<Unfinished<Process>, LaunchError> {
    let log_file = paths.log_file();
    let log = create(OpenOptions::new().append(true), &log_file)?;
    let qmp = listen(&paths.qmp_socket())?;
    let mut handed = vec![connection, qmp, log];
    handed.extend(descriptors.into_values());
    handed.push(create_qemu_directory(paths)?);
    handed.push(create(OpenOptions::new().write(true), &paths.pid_file())?);
    let arguments = arguments.to_vec();
    let started = match privileges.keeper() {
        None => Launch { arguments, control_groups: 0 }
            .run(handed, launcher)
            .and_then(|child| Process::of_child(privileges, &child, log_file)),
        Some(keeper) => keep(keeper, arguments, handed)
            .inspect_err(|_| end_unheard(privileges, paths))
            .and_then(|kept| Process::of_kept(privileges, kept, log_file)),
    };
    let process = started.map_err(|source| io_error("start", &launcher.binary, source))?;
    Ok(guard(process, |process| end_now(&process)))
}

/// By the keeper, which is in other control groups than the agent. QEMU is to be in the agent's: between groups, packing
/// takes half of a core from a VM (docs/decisions/0034).
fn keep(keeper: &Keeper, arguments: Vec<OsString>, mut handed: Vec<OwnedFd>) -> io::Result<Kept> {
    let groups = control_groups::open_own()?;
    let control_groups = u8::try_from(groups.len()).map_err(io::Error::other)?;
    handed.extend(groups);
    keeper.launch(Launch { arguments, control_groups }, &handed)
}

/// Where the keeper ends before it answers, its QEMU may be there.
fn end_unheard(privileges: &Privileges, paths: &RuntimePaths) {
    if let Ok(Some(process)) = Process::find(privileges, &paths.pid_file(), paths.log_file()) {
        end_now(&process);
    }
}

fn create(options: &mut OpenOptions, file: &Path) -> Result<OwnedFd, LaunchError> {
    let created = options.create(true).mode(0o600).open(file);
    Ok(created.map_err(|source| io_error("create", file, source))?.into())
}

/// A drop cannot await, but whoever learns of a failed start may try again at once, and then the
/// taps and the locks on the disks must be free. A QEMU without a guest ends within a few ms.
fn end_now(process: &Process) {
    let ended = process.kill().and_then(|()| process.wait_exit_blocking(&EXIT_AFTER_KILL));
    if let Err(error) = ended {
        tracing::warn!(pid = process.pid(), %error, "cannot end a QEMU that did not start");
    }
}

fn listen(path: &Path) -> Result<OwnedFd, LaunchError> {
    let listener = UnixListener::bind(path).map_err(|source| io_error("listen on", path, source))?;
    Ok(listener.into())
}

async fn why_not_ready(
    binary: &Path,
    process: &Process,
    paths: &RuntimePaths,
    source: QmpError,
) -> LaunchError {
    let closed = !matches!(source, QmpError::Deadline { .. });
    let patience = if closed { EXIT_AFTER_CLOSE } else { Duration::ZERO };
    let exit = process.wait_exit(patience).await;
    let log_tail = log_tail(&paths.log_file());
    let binary = binary.to_owned();
    match exit {
        Some(Exit::Code(code)) if [CANNOT_RUN, LACKS_LIBRARY].map(i32::from).contains(&code) => {
            LaunchError::Spawn { binary, source: io::Error::other(log_tail) }
        }
        Some(Exit::Code(code)) if code == i32::from(CANNOT_BECOME) => {
            LaunchError::NotBecome { binary, problem: log_tail }
        }
        Some(exit) => LaunchError::Exited { binary, exit, log_tail },
        None => LaunchError::NotReady { binary, source, log_tail },
    }
}

/// The end of QEMU's log, or nothing: it only enriches errors.
pub(crate) fn log_tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
        let mut tail = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut tail)?;
        Ok(tail)
    };
    let tail = read().unwrap_or_default();
    String::from_utf8_lossy(&tail).trim().to_owned()
}

pub(crate) fn io_error(action: &'static str, path: &Path, source: io::Error) -> LaunchError {
    LaunchError::Io { action, path: path.to_owned(), source }
}
