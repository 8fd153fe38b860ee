//! One running QEMU with its guest.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drainpipe_engine::format::bound;
use drainpipe_hypervisor::{End, Exit, ResolvedSpec, Role, RunState, Version, VmEvent};
use scopeguard::ScopeGuard;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio::time::timeout;

use crate::command_line::{CONSOLE_ID, command_line, role_of};
use crate::handed::Handed;
use crate::latest::Latest;
use crate::launch::{LaunchError, create_directory, io_error, launch, log_tail};
use crate::launcher::Launcher;
use crate::numbers::Numbers;
use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::process::Process;
use crate::qmp::{QmpClient, QmpError};
use crate::tap::{TapError, attach_all};

/// Most of the serial output that one reading returns.
const CONSOLE_TAIL_BYTES: u32 = 64 * 1024;

fn write_private(file: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(file)?;
    file.write_all(bytes)
}

/// Why a VM was not started. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// QEMU does not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The guest would have no network.
    #[error(transparent)]
    Tap(#[from] TapError),
    /// QEMU refuses to run the guest.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// It took too long.
    #[error("QEMU was not ready within {}; it said: {log_tail}", bound(*deadline))]
    Deadline {
        /// How long was waited.
        deadline: Duration,
        /// The end of what QEMU wrote.
        log_tail: String,
    },
}

/// Why there is no hold of a VM that an earlier agent started.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No QEMU runs there: only remains, which [`Vmm::clear`] removes.
    #[error("no QEMU runs in {directory}: {source}")]
    NotRunning {
        /// The VM's directory.
        directory: PathBuf,
        /// What connecting said.
        source: QmpError,
    },
    /// Something answers, but not as it should.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A file in the VM's directory is unreadable or wrong.
    #[error("cannot use {path}: {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}

/// Why a VM could not be ended, or its remains not removed.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// Nobody has said that it may be ended.
    #[error(
        "a QEMU runs in {directory} (process {pid}), and no record says that it may be ended: its guest may \
        run. End it by hand if you are sure that nobody needs it"
    )]
    Lives {
        /// The directory of the VM.
        directory: PathBuf,
        /// The process.
        pid: u32,
    },
    /// It survived SIGKILL, which happens while the kernel waits for storage.
    #[error("QEMU (process {pid}) did not end within {} after SIGKILL; does its storage hang?", bound(*deadline))]
    StillThere {
        /// The process.
        pid: u32,
        /// How long was waited.
        deadline: Duration,
    },
    /// The guest did not react to its power button.
    #[error("the guest did not power off within {}; it may ignore its power button", bound(*.0))]
    GuestIgnores(Duration),
    /// The guest's power button could not be pressed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The kernel refuses.
    #[error("cannot remove {path}: {source}")]
    Io {
        /// The file or process directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// A QEMU that this host runs. Dropping it leaves QEMU running; [`Vmm::attach`] finds it again.
#[derive(Debug)]
pub struct Vmm {
    spec: Latest<ResolvedSpec>,
    paths: RuntimePaths,
    process: Process,
    qmp: QmpClient,
    // Somebody has it end.
    is_ending: AtomicBool,
}

impl Vmm {
    /// Runs QEMU for `spec`: with [`Role::Fresh`] the guest boots, with [`Role::Incoming`] QEMU
    /// waits for [`crate::migration::listen`].
    ///
    /// `record` is what its agent keeps of it, at [`RuntimePaths::record_file`]: there before QEMU is. If it fails, or
    /// is dropped before it is done, nothing is left.
    pub async fn start(
        privileges: &Privileges,
        launcher: &Launcher,
        spec: ResolvedSpec,
        paths: RuntimePaths,
        record: &[u8],
        role: Role,
        deadline: Duration,
    ) -> Result<Self, StartError> {
        let log_file = paths.log_file();
        let mut start =
            pin!(Self::start_unbounded(privileges, launcher, spec, paths, record, role, deadline));
        // By reference: what is half done, the log too, goes only when `start` is dropped.
        timeout(deadline, &mut start)
            .await
            .unwrap_or_else(|_| Err(StartError::Deadline { deadline, log_tail: log_tail(&log_file) }))
    }

    async fn start_unbounded(
        privileges: &Privileges,
        launcher: &Launcher,
        spec: ResolvedSpec,
        paths: RuntimePaths,
        record: &[u8],
        role: Role,
        deadline: Duration,
    ) -> Result<Self, StartError> {
        let directory = create_directory(&paths)?;
        let spec_file = paths.spec_file();
        let json = serde_json::to_vec(&spec).map_err(|error| io_error("write", &spec_file, error.into()))?;
        for (file, content) in [(spec_file, &json[..]), (paths.record_file(), record)] {
            write_private(&file, content).map_err(|source| io_error("write", &file, source))?;
        }
        let Handed { descriptors, block_devices } = Handed::open(&spec, &paths).await?;
        let arguments = command_line(&spec, role, &block_devices);
        let qemu = launch(privileges, launcher, &arguments, descriptors, &paths, deadline)
            .await
            .map_err(|error| error.with_own_names(&Numbers::of(spec.spec()), spec.spec()))?;
        attach_all(&spec).await?;
        if role == Role::Fresh {
            qemu.qmp.execute::<IgnoredAny>("cont", Value::Null, deadline).await?;
        }
        let process = ScopeGuard::into_inner(qemu.process);
        ScopeGuard::into_inner(directory);
        let spec = Latest::new(spec);
        Ok(Self { spec, paths, process, qmp: qemu.qmp, is_ending: AtomicBool::default() })
    }

    /// Takes hold of a QEMU that an earlier agent started.
    pub async fn attach(
        privileges: &Privileges,
        paths: RuntimePaths,
        deadline: Duration,
    ) -> Result<Self, AttachError> {
        let socket = paths.qmp_socket();
        Self::attach_by(privileges, &socket, paths, deadline).await
    }

    /// Takes hold of a QEMU whose agent may still have its own hold, as a watchdog does.
    pub async fn attach_beside_agent(
        privileges: &Privileges,
        paths: RuntimePaths,
        deadline: Duration,
    ) -> Result<Self, AttachError> {
        let socket = paths.guard_socket();
        Self::attach_by(privileges, &socket, paths, deadline).await
    }

    async fn attach_by(
        privileges: &Privileges,
        socket: &Path,
        paths: RuntimePaths,
        deadline: Duration,
    ) -> Result<Self, AttachError> {
        let qmp = match QmpClient::connect(socket, deadline).await {
            Err(source @ QmpError::Connect { .. }) if !lives(&paths)? => {
                let directory = paths.directory().to_owned();
                return Err(AttachError::NotRunning { directory, source });
            }
            connected => connected?,
        };
        let pid_file = paths.pid_file();
        // It was written before QEMU began.
        let process = Process::find(privileges, &pid_file, paths.log_file())
            .map_err(|error| file_problem(&pid_file, &error))?
            .ok_or_else(|| file_problem(&pid_file, &"it does not name the QEMU that answers"))?;
        let spec = Latest::new(read_spec(&paths.spec_file())?);
        Ok(Self { spec, paths, process, qmp, is_ending: AtomicBool::default() })
    }

    /// What the QEMU in `paths` was started from, whether or not it answers.
    pub fn specification(paths: &RuntimePaths) -> Result<ResolvedSpec, AttachError> {
        read_spec(&paths.spec_file())
    }

    /// The process id of the QEMU in `paths`, if one lives there.
    pub fn living(paths: &RuntimePaths) -> Result<Option<u32>, EndError> {
        let pid_file = paths.pid_file();
        Process::living(&pid_file).map_err(|source| EndError::Io { path: pid_file, source })
    }

    /// Removes what is left of a VM in `paths` whose QEMU has ended. Leaves one that lives alone, and says so. Does
    /// nothing where there is nothing.
    pub fn clear(paths: &RuntimePaths) -> Result<(), EndError> {
        match Self::living(paths)? {
            Some(pid) => Err(lives_there(paths, pid)),
            None => remove_directory(paths),
        }
    }

    /// Ends the QEMU in `paths` that was to receive a guest which was given up, and removes what is left; kills one
    /// that does not answer. Leaves one alone whose guest runs, or that was started to boot a guest.
    pub async fn end_given_up(
        privileges: &Privileges,
        paths: &RuntimePaths,
        deadline: Duration,
    ) -> Result<(), EndError> {
        let Some(process) = find(privileges, paths)? else { return remove_directory(paths) };
        if !matches!(role(&process), Ok(Role::Incoming)) {
            return Err(lives_there(paths, process.pid()));
        }
        match Self::attach(privileges, paths.clone(), deadline / 4).await {
            Ok(vmm) if matches!(vmm.run_state(deadline / 4).await, Ok(RunState::Running)) => {
                Err(lives_there(paths, process.pid()))
            }
            Ok(vmm) => vmm.destroy(deadline / 2).await,
            Err(_) => {
                kill(&process, deadline / 2).await?;
                remove_directory(paths)
            }
        }
    }

    /// Kills the QEMU in `paths`, whatever it does, and removes what is left: because somebody who knows what is lost
    /// wants it, and it does not answer.
    pub async fn kill_found(
        privileges: &Privileges,
        paths: &RuntimePaths,
        deadline: Duration,
    ) -> Result<(), EndError> {
        if let Some(process) = find(privileges, paths)? {
            kill(&process, deadline).await?;
        }
        remove_directory(paths)
    }

    /// What this VM is.
    pub fn spec(&self) -> &ResolvedSpec {
        self.spec.get()
    }

    /// It is this from now on, also for who attaches later.
    pub(crate) fn respecify(&self, spec: ResolvedSpec) -> io::Result<()> {
        let (file, json) = (self.paths.spec_file(), serde_json::to_vec(&spec)?);
        let new = file.with_extension("new");
        write_private(&new, &json)?;
        fs::rename(&new, &file)?;
        self.spec.set(spec);
        Ok(())
    }

    /// Where its files are.
    pub fn paths(&self) -> &RuntimePaths {
        &self.paths
    }

    /// Its process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Process id, for people. Another process may have it once this QEMU has ended.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Version of the QEMU that runs this VM, which an upgrade of the package does not change.
    pub fn version(&self) -> Version {
        self.qmp.version()
    }

    /// What it was started for, whoever started it.
    pub fn role(&self) -> io::Result<Role> {
        role(&self.process)
    }

    /// The control connection.
    pub fn qmp(&self) -> &QmpClient {
        &self.qmp
    }

    /// QEMU's events from now on, as [`QmpClient::events`] describes.
    pub fn events(&self) -> broadcast::Receiver<VmEvent> {
        self.qmp.events()
    }

    /// Whether the process has not ended.
    pub fn alive(&self) -> bool {
        self.process.alive()
    }

    /// How QEMU ended, if it has and that is known by now.
    pub fn exit(&self) -> Option<Exit> {
        self.process.exit()
    }

    /// Whether QEMU got the order to end, or its guest to power off.
    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Its end is expected from now on, as after its guest has powered off.
    pub fn expect_end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
    }

    /// The end of what QEMU wrote, for people; nothing where its files are gone.
    pub fn log_tail(&self) -> String {
        log_tail(&self.paths.log_file())
    }

    /// QEMU's end, for whoever waits without a hold of it.
    pub fn end(&self) -> impl Future<Output = End> + Send + use<> {
        let (exit, log_file) = (self.process.exited(), self.paths.log_file());
        async move { End { exit: exit.await, log_tail: log_tail(&log_file) } }
    }

    /// Waits for QEMU's end; `None` if it does not come in time.
    pub async fn wait_exit(&self, deadline: Duration) -> Option<Exit> {
        self.process.wait_exit(deadline).await
    }

    /// CPU that QEMU has used so far, all its threads, user and kernel mode, in seconds.
    ///
    /// Fails once QEMU has ended: read it before.
    pub fn cpu_seconds(&self) -> io::Result<f64> {
        self.process.cpu_seconds()
    }

    /// What QEMU is doing.
    pub async fn run_state(&self, deadline: Duration) -> Result<RunState, QmpError> {
        #[derive(serde::Deserialize)]
        struct Status {
            status: RunState,
        }
        let status: Status = self.qmp.execute("query-status", Value::Null, deadline).await?;
        Ok(status.status)
    }

    /// The serial output since the last reading, at most the last 64 KiB. It stays behind when the
    /// guest moves to another host.
    pub async fn read_console(&self, deadline: Duration) -> Result<String, QmpError> {
        let arguments = json!({ "device": CONSOLE_ID, "size": CONSOLE_TAIL_BYTES, "format": "utf8" });
        self.qmp.execute("ringbuf-read", arguments, deadline).await
    }

    /// Presses the guest's power button and waits until it has powered off; then removes what is
    /// left. A guest that ignores the button runs on, and [`EndError::GuestIgnores`] says so:
    /// pulling the plug is left to whoever asked, by [`Self::destroy`].
    pub async fn stop_guest(&self, deadline: Duration) -> Result<(), EndError> {
        if self.alive() {
            self.expect_end();
            self.qmp.execute::<IgnoredAny>("system_powerdown", Value::Null, deadline).await?;
            if self.wait_exit(deadline).await.is_none() {
                self.is_ending.store(false, Ordering::Relaxed);
                return Err(EndError::GuestIgnores(deadline));
            }
        }
        remove_directory(&self.paths)
    }

    /// Ends QEMU and whatever the guest does, and removes what is left; may be repeated. Its taps
    /// go with it.
    pub async fn destroy(&self, deadline: Duration) -> Result<(), EndError> {
        let half = deadline / 2;
        // Asked to quit, QEMU flushes its disks. How it answers does not matter: it may close the
        // socket first, and if it hangs it is killed.
        if self.alive() {
            self.expect_end();
            drop(self.qmp.execute::<IgnoredAny>("quit", Value::Null, half / 2).await);
        }
        if self.wait_exit(half / 2).await.is_none() {
            kill(&self.process, half).await?;
        }
        remove_directory(&self.paths)
    }

    /// Kills QEMU at once, and removes what is left: only for one whose guest has never run here, so that it has nothing
    /// to write. Asked to quit, one that waits for memory which does not come would not answer.
    pub async fn destroy_unrun(&self, deadline: Duration) -> Result<(), EndError> {
        self.expect_end();
        kill(&self.process, deadline).await?;
        remove_directory(&self.paths)
    }
}

fn role(process: &Process) -> io::Result<Role> {
    let mut command_line = Vec::new();
    process.open("cmdline")?.read_to_end(&mut command_line)?;
    role_of(&command_line).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn find(privileges: &Privileges, paths: &RuntimePaths) -> Result<Option<Process>, EndError> {
    let pid_file = paths.pid_file();
    let found = Process::find(privileges, &pid_file, paths.log_file());
    found.map_err(|source| EndError::Io { path: pid_file, source })
}

fn lives_there(paths: &RuntimePaths, pid: u32) -> EndError {
    EndError::Lives { directory: paths.directory().to_owned(), pid }
}

async fn kill(process: &Process, deadline: Duration) -> Result<(), EndError> {
    let pid = process.pid();
    let path = PathBuf::from(format!("/proc/{pid}"));
    process.kill().map_err(|source| EndError::Io { path, source })?;
    let ended = process.wait_exit(deadline).await;
    ended.map(drop).ok_or(EndError::StillThere { pid, deadline })
}

fn remove_directory(paths: &RuntimePaths) -> Result<(), EndError> {
    match fs::remove_dir_all(paths.directory()) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(EndError::Io { path: paths.directory().to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// Whether a QEMU of these files has not ended.
fn lives(paths: &RuntimePaths) -> Result<bool, AttachError> {
    let pid_file = paths.pid_file();
    let living = Process::living(&pid_file).map_err(|error| file_problem(&pid_file, &error))?;
    Ok(living.is_some())
}

fn read_spec(path: &Path) -> Result<ResolvedSpec, AttachError> {
    let json = fs::read(path).map_err(|error| file_problem(path, &error))?;
    serde_json::from_slice(&json).map_err(|error| file_problem(path, &error))
}

fn file_problem(path: &Path, problem: &dyn std::fmt::Display) -> AttachError {
    AttachError::File { path: path.to_owned(), problem: problem.to_string() }
}
