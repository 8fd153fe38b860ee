//! The journal: what this host's agent must know after a crash, and the history of migrations. `SQLite`,
//! each record durable before the call returns.

mod arrivals;
mod changes;
mod drains;
mod migrations;
mod schema;
mod settings;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;
use rusqlite::{Connection, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

pub(crate) use self::arrivals::{Arrival, IncomingRecord, IncomingState};
pub(crate) use self::changes::HostChange;
pub(crate) use self::drains::DrainRecord;
pub(crate) use self::migrations::OpenMigration;
use self::schema::open_connection;
use crate::lock::lock;

/// How many ended migrations the history keeps.
const HISTORY_LENGTH: u32 = 10_000;

/// What must be free on its disk, in bytes, for a VM to come here. A record takes some pages of 4 KiB in `SQLite`'s log.
const ROOM_MIN_BYTES: u64 = 128 << 10;

/// The journal of one host.
#[derive(Debug)]
pub(crate) struct Journal {
    connection: Mutex<Connection>,
    path: PathBuf,
}

/// A journal that cannot be read or written.
#[derive(Debug, Error)]
#[error("the journal {path} cannot be used: {source}; is its disk full or read-only?", path = path.display())]
pub(crate) struct JournalError {
    path: PathBuf,
    source: JournalCause,
}

#[derive(Debug, Error)]
enum JournalCause {
    #[error(transparent)]
    Database(#[from] rusqlite::Error),
    #[error("a record does not make sense: {0}")]
    Record(#[from] serde_json::Error),
    #[error("the time in a record does not make sense: {0}")]
    Time(#[from] jiff::Error),
    #[error("cannot create its directory: {0}")]
    Directory(std::io::Error),
    #[error("{0} KiB are left on its disk")]
    NoRoom(u64),
    #[error("its disk cannot be looked at: {0}")]
    Disk(rustix::io::Errno),
    #[error("it was written by a newer Drainpipe (schema {0}); install that version again")]
    Newer(usize),
}

impl From<JournalError> for Problem {
    fn from(error: JournalError) -> Self {
        Self::failed(error)
    }
}

impl Journal {
    /// Opens the journal in a directory; makes both if they are not there.
    pub(crate) fn open(directory: &Path) -> Result<Self, JournalError> {
        let path = directory.join("journal.sqlite");
        open_connection(directory, &path)
            .map(|connection| Self { connection: Mutex::new(connection), path: path.clone() })
            .map_err(|source| JournalError { path, source })
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic while the lock was held leaves at worst a transaction that SQLite rolls back.
        lock(&self.connection)
    }

    fn run<T>(
        &self,
        work: impl FnOnce(&mut Connection) -> Result<T, JournalCause>,
    ) -> Result<T, JournalError> {
        // A slow disk must not keep the thread's other tasks waiting, guards' signs of life among them.
        let done = tokio::task::block_in_place(|| work(&mut self.lock()));
        done.map_err(|source| JournalError { path: self.path.clone(), source })
    }

    /// Whether there is room on its disk for what must be recorded soon. A look, which writes nothing.
    pub(crate) fn check_room(&self) -> Result<(), JournalError> {
        let disk = rustix::fs::statvfs(&self.path).map_err(JournalCause::Disk);
        let checked = disk.and_then(|disk| match disk.f_bfree.saturating_mul(disk.f_frsize) {
            // Some file systems do not say how large they are.
            _ if disk.f_blocks == 0 => Ok(()),
            ROOM_MIN_BYTES.. => Ok(()),
            free_bytes => Err(JournalCause::NoRoom(free_bytes >> 10)),
        });
        checked.map_err(|source| JournalError { path: self.path.clone(), source })
    }

    /// Records a VM that is defined here.
    pub(crate) fn define_vm(&self, spec: &VmSpec) -> Result<(), JournalError> {
        self.run(|connection| {
            insert_vm(connection, spec)?;
            Ok(())
        })
    }

    /// Forgets a VM.
    pub(crate) fn forget_vm(&self, name: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            arrivals::finish_arrivals_of(&transaction, name)?;
            transaction.execute("DELETE FROM vms WHERE name = ?1", [name])?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// The VMs that are defined here, by name.
    pub(crate) fn vms(&self) -> Result<Vec<VmSpec>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare("SELECT spec FROM vms ORDER BY name")?;
            let texts =
                statement.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()?;
            texts.iter().map(|text| from_json(text)).collect()
        })
    }
}

fn insert_vm(connection: &Connection, spec: &VmSpec) -> Result<(), JournalCause> {
    connection.execute(
        "INSERT INTO vms (name, spec) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET spec = excluded.spec",
        params![spec.name.as_str(), to_json(spec)?],
    )?;
    Ok(())
}

fn to_json<T: Serialize>(value: &T) -> Result<String, JournalCause> {
    Ok(serde_json::to_string(value)?)
}

fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, JournalCause> {
    Ok(serde_json::from_str(text)?)
}
