//! QEMU's own control socket, which belongs to libvirt as long as libvirt runs.
//!
//! QEMU accepts one client there. When libvirt has ended, another may connect, and leaves before libvirt comes back: a
//! libvirt that starts meanwhile waits for its turn (docs/decisions/0072).

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use drainpipe_engine::format::bound;
use drainpipe_hypervisor::{Hold, MigrationStatus, RunState, VmError, VmErrorKind};
use drainpipe_hypervisor_qemu::migration::announce_self;
use drainpipe_hypervisor_qemu::qmp::QmpClient;
use drainpipe_hypervisor_qemu::{Process, ProcessFile};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use tokio::time::sleep;

/// How often QEMU is asked again for what it will say in a moment.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// libvirt's name for the key that it shares with QEMU, in a file beside the socket.
const KEY: &str = "masterKey0";

/// QEMU as its one client has it. Short-lived: libvirt may come back at any time.
#[derive(Debug)]
pub(crate) struct Monitor {
    qmp: QmpClient,
    deadline: Duration,
}

/// An answer that names a state, as those to `query-status` and `query-migrate` do.
#[derive(Debug, Deserialize)]
struct Says<T> {
    status: Option<T>,
}

impl Monitor {
    /// Opens the monitor of a QEMU whose libvirt has ended.
    pub(crate) async fn open(process: &Process, deadline: Duration) -> Result<Self, VmError> {
        // As its QEMU sees it, which may be in a mount namespace with libvirt.
        let root = process.open_hidden(ProcessFile::Root).map_err(VmError::failed)?;
        let socket = socket(process.pid(), &root).map_err(VmError::failed)?;
        let qmp = QmpClient::connect(&socket, deadline).await?;
        Ok(Self { qmp, deadline })
    }

    async fn execute<T: DeserializeOwned>(&self, command: &str) -> Result<T, VmError> {
        Ok(self.qmp.execute(command, Value::Null, self.deadline).await?)
    }

    /// What the guest does.
    pub(crate) async fn run_state(&self) -> Result<RunState, VmError> {
        let says: Says<RunState> = self.execute("query-status").await?;
        says.status.ok_or_else(|| VmError::failed("QEMU does not report the state of its guest"))
    }

    async fn migration(&self) -> Result<MigrationStatus, VmError> {
        let says: Says<MigrationStatus> = self.execute("query-migrate").await?;
        Ok(says.status.unwrap_or(MigrationStatus::None))
    }

    /// Which host the VM belongs to.
    pub(crate) async fn hold(&self) -> Result<Hold, VmError> {
        match self.run_state().await? {
            RunState::Postmigrate => Ok(Hold::LetGo),
            state @ (RunState::FinishMigrate | RunState::Inmigrate) => {
                Err(VmError::failed(format!("its QEMU is still busy: {state}")))
            }
            _ => Ok(Hold::Kept),
        }
    }

    /// Stops what it sends, and waits for the end of that.
    pub(crate) async fn cancel(&self) -> Result<MigrationStatus, VmError> {
        self.execute::<IgnoredAny>("migrate_cancel").await?;
        let end = Instant::now() + self.deadline;
        loop {
            let status = self.migration().await?;
            if status.is_final() || status == MigrationStatus::None {
                return Ok(status);
            }
            self.wait(end, "cancel its migration").await?;
        }
    }

    /// Lets the guest run.
    pub(crate) async fn run(&self) -> Result<(), VmError> {
        let end = Instant::now() + self.deadline;
        loop {
            match self.run_state().await? {
                RunState::Running | RunState::Suspended => return Ok(()),
                RunState::Inmigrate => {
                    return Err(VmError::new(VmErrorKind::MemoryIncomplete, "not all of the domain is here"));
                }
                RunState::FinishMigrate => self.wait(end, "let the guest run").await?,
                _ => return self.execute::<IgnoredAny>("cont").await.map(drop),
            }
        }
    }

    /// Has QEMU tell the network where its guest is.
    pub(crate) async fn announce(&self) {
        if let Err(error) = announce_self(&self.qmp, self.deadline).await {
            tracing::warn!(%error, "could not announce to the network where a domain runs");
        }
    }

    async fn wait(&self, end: Instant, what: &str) -> Result<(), VmError> {
        if Instant::now() >= end {
            let within = bound(self.deadline);
            return Err(VmError::new(VmErrorKind::Mute, format!("QEMU did not {what} within {within}")));
        }
        sleep(ASK_EVERY).await;
        Ok(())
    }
}

/// Where one of libvirt's QEMUs listens; its root directory is open.
fn socket(pid: u32, root: &File) -> io::Result<PathBuf> {
    let command_line = fs::read(format!("/proc/{pid}/cmdline"))?;
    let directory = directory(&command_line).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, "its QEMU's command line does not name libvirt's directory")
    })?;
    let directory = directory.strip_prefix("/").unwrap_or(&directory).to_owned();
    let root = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
    Ok(root.join(directory).join("monitor.sock"))
}

/// libvirt's directory of a domain, by where its key is.
fn directory(command_line: &[u8]) -> Option<PathBuf> {
    let mut arguments = command_line.split(|byte| *byte == 0).filter_map(|bytes| str::from_utf8(bytes).ok());
    let file = arguments.find_map(key_file)?;
    file.parent().filter(|directory| directory.is_absolute()).map(Path::to_owned)
}

fn key_file(argument: &str) -> Option<PathBuf> {
    /// As libvirt writes it since 6.9.
    #[derive(Deserialize)]
    struct Secret {
        id: String,
        file: PathBuf,
    }
    if argument.starts_with('{') {
        let secret: Secret = serde_json::from_str(argument).ok()?;
        return (secret.id == KEY).then_some(secret.file);
    }
    let mut parts = argument.strip_prefix("secret,")?.split(',');
    let is_key = parts.clone().any(|part| part.strip_prefix("id=") == Some(KEY));
    parts.find_map(|part| part.strip_prefix("file=")).filter(|_| is_key).map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_directory_is_that_of_libvirts_key() {
        let expected = Some(PathBuf::from("/var/lib/libvirt/qemu/domain-1-web"));
        for key in [
            r#"{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-1-web/master-key.aes"}"#,
            "secret,id=masterKey0,format=raw,file=/var/lib/libvirt/qemu/domain-1-web/master-key.aes",
        ] {
            let command_line = ["/usr/bin/qemu-system-x86_64", "-S", "-object", key, "-m", "160"].join("\0");
            assert_eq!(directory(command_line.as_bytes()), expected);
        }
    }

    #[test]
    fn no_other_file_is_taken_for_it() {
        for other in [
            r#"{"qom-type":"secret","id":"other","file":"/tmp/x/master-key.aes"}"#,
            r#"{"driver":"file","filename":"/tmp/x/master-key.aes"}"#,
            "secret,id=other,file=/tmp/x/master-key.aes",
            "secret,id=masterKey0,file=master-key.aes",
            "{",
        ] {
            assert_eq!(directory(other.as_bytes()), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn any_command_line_is_read(bytes: Vec<u8>) {
            directory(&bytes);
        }
    }
}
