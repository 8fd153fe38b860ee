//! The journal: what this host's agent must know after a crash, and the history of migrations. `SQLite`,
//! each record durable before the call returns.

mod changes;
mod disk_moves;
mod disks;
mod drains;
mod hooks;
mod incoming;
mod migrations;
mod schema;
mod settings;
mod standing;
mod tokens;
mod witness;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use drainpipe_engine::format::bytes;
use drainpipe_engine::journal::Doubt;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::VmSpec;
use rusqlite::{Connection, ErrorCode, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::watch;

pub(crate) use self::changes::HostChange;
pub(crate) use self::disk_moves::DiskMoveRecord;
pub(crate) use self::disks::{CopiedDisk, DiskFile, FileId, LeftFile, Unrenamed};
pub(crate) use self::drains::DrainRecord;
pub(crate) use self::hooks::HookDue;
pub(crate) use self::incoming::{IncomingRecord, UnfinishedIncoming};
pub(crate) use self::migrations::OpenMigration;
use self::schema::open_connection;
pub(crate) use self::standing::{Adopted, file_of, look, set_aside};
pub(crate) use self::tokens::{AGAIN_WITHIN_S, TokenUse};
pub(crate) use self::witness::{RuntimeWitness, Witnessed};
use crate::store::lock::lock;

/// How many ended migrations the history keeps.
const HISTORY_LENGTH: u32 = 10_000;

/// How many bytes must be free on its disk for a VM to come here. A record takes some pages of 4 KiB in `SQLite`'s
/// log.
const ROOM_MIN_BYTES: u64 = 128 << 10;

/// The journal of one host.
#[derive(Debug)]
pub(crate) struct Journal {
    connection: Mutex<Connection>,
    path: PathBuf,
    witness: RuntimeWitness,
    // What the witness last heard.
    witnessed: Mutex<Witnessed>,
    // Turns up with each record that the others are to hear of.
    generation: watch::Sender<u64>,
    // Why it is not believed any more.
    doubts: watch::Sender<Vec<Doubt>>,
}

/// A journal that cannot be read or written.
#[derive(Debug, Error)]
#[error("the journal {path} cannot be used: {source}", path = path.display())]
pub(crate) struct JournalError {
    path: PathBuf,
    source: JournalCause,
}

#[derive(Debug, Error)]
enum JournalCause {
    #[error("{0}; is its disk full or read-only?")]
    Database(rusqlite::Error),
    #[error("it is not a journal, or is damaged ({0})")]
    Malformed(rusqlite::Error),
    #[error("it is not believed: {0}; `drainpipe journal show` says what was found")]
    Doubted(String),
    #[error("it is no longer there")]
    Gone,
    #[error("a record does not make sense: {0}")]
    Record(#[from] serde_json::Error),
    #[error("the time in a record does not make sense: {0}")]
    Time(#[from] jiff::Error),
    #[error("cannot create its directory: {0}")]
    Directory(std::io::Error),
    #[error("its disk is full: {} are left; make room there", bytes(*.0 as f64))]
    NoRoom(u64),
    #[error("its disk cannot be examined: {0}")]
    Disk(rustix::io::Errno),
    #[error("it was written by a newer Drainpipe (schema {0}); install that version again")]
    Newer(usize),
}

impl From<rusqlite::Error> for JournalCause {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Self::Malformed(error),
            _ => Self::Database(error),
        }
    }
}

impl From<JournalError> for Problem {
    fn from(error: JournalError) -> Self {
        match error.source {
            JournalCause::Doubted(_) => Self::refused(error),
            _ => Self::failed(error),
        }
    }
}

impl Journal {
    /// Opens the journal in a directory, which is believed; makes both if they are not there. What it records from now
    /// on, the runtime directory witnesses.
    pub(crate) fn open(directory: &Path, runtime_directory: &Path) -> Result<Self, JournalError> {
        let path = file_of(directory);
        let opened = open_connection(directory, &path)
            .and_then(|connection| Self::witnessed_in(runtime_directory, connection, path.clone()));
        opened.map_err(|source| JournalError { path, source })
    }

    /// As [`Self::open`], of one that is there and that the runtime directory knows: for a guard, beside its agent.
    pub(crate) fn open_beside_agent(
        directory: &Path,
        runtime_directory: &Path,
    ) -> Result<Self, JournalError> {
        let path = file_of(directory);
        let gone = || JournalError { path: path.clone(), source: JournalCause::Gone };
        if std::fs::metadata(&path).is_ok_and(|file| file.len() == 0) || !path.exists() {
            return Err(gone());
        }
        let journal = Self::open(directory, runtime_directory)?;
        // In this order: the agent goes on writing, the journal first and then what witnesses it.
        let witnessed = journal.witness.read();
        let standing = journal.standing()?;
        match witnessed {
            Ok(Some(witnessed)) if !standing.follows(&witnessed.mark) => Err(gone()),
            _ => Ok(journal),
        }
    }

    fn witnessed_in(
        runtime_directory: &Path,
        connection: Connection,
        path: PathBuf,
    ) -> Result<Self, JournalCause> {
        let witness = RuntimeWitness::in_directory(runtime_directory);
        let standing = standing::read_standing(&connection)?;
        let before = witness.read().map_err(JournalCause::Directory)?;
        let before = before.filter(|before| before.mark.identity == standing.mark.identity);
        let witnessed = before.unwrap_or_else(|| Witnessed::at_boot(standing.mark.clone()));
        let journal = Self {
            connection: Mutex::new(connection),
            path,
            witness,
            generation: watch::Sender::new(standing.mark.generation),
            witnessed: Mutex::new(witnessed),
            doubts: watch::Sender::new(vec![]),
        };
        Ok(journal)
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
        let done = tokio::task::block_in_place(|| {
            self.check_believed()?;
            let mut connection = self.lock();
            let changes_before = connection.total_changes();
            let done = work(&mut connection);
            if connection.total_changes() != changes_before {
                self.bear_witness(&connection);
            }
            done
        });
        done.map_err(|source| JournalError { path: self.path.clone(), source })
    }

    fn check_believed(&self) -> Result<(), JournalCause> {
        let doubts = self.doubts.borrow();
        if doubts.is_empty() { Ok(()) } else { Err(JournalCause::Doubted(in_words(&doubts))) }
    }

    /// Whether there is room on its disk for what must be recorded soon. A look, which writes nothing.
    pub(crate) fn check_room(&self) -> Result<(), JournalError> {
        let disk = rustix::fs::statvfs(&self.path).map_err(JournalCause::Disk);
        let checked = disk.and_then(|disk| match disk.f_bfree.saturating_mul(disk.f_frsize) {
            // Some file systems do not say how large they are.
            _ if disk.f_blocks == 0 => Ok(()),
            ROOM_MIN_BYTES.. => Ok(()),
            free_bytes => Err(JournalCause::NoRoom(free_bytes)),
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
            incoming::finish_incoming_of(&transaction, name)?;
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

/// Makes the directory in which the journal lies, if it is not there.
pub(crate) fn make_directory(directory: &Path) -> Result<(), JournalError> {
    schema::make_directory(directory).map_err(|source| JournalError { path: file_of(directory), source })
}

/// All that is doubted, in one sentence.
pub(crate) fn in_words(doubts: &[Doubt]) -> String {
    let words: Vec<String> = doubts.iter().map(Doubt::to_string).collect();
    words.join("; ")
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

#[cfg(test)]
impl Journal {
    /// An empty one, as long as its directory is kept.
    pub(crate) fn temporary() -> (tempfile::TempDir, Self) {
        let directory = tempfile::tempdir().expect("there is room for a journal");
        let journal = Self::open(directory.path(), directory.path()).expect("it is empty");
        (directory, journal)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn one_that_is_damaged_is_no_full_disk() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        std::fs::write(file_of(path), [b'x'; 8192]).unwrap();
        let message = Journal::open(path, path).unwrap_err().to_string();
        assert!(message.contains("it is not a journal, or is damaged"), "{message}");
        assert!(!message.contains("full"), "{message}");
    }

    #[test]
    fn a_guard_opens_it_while_the_agent_writes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let agents = Journal::open(path, path).unwrap();
        let spec = "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n";
        let spec = VmSpec::from_toml(spec, Path::new("web.toml")).unwrap();
        agents.define_vm(&spec).unwrap();
        thread::scope(|scope| {
            let guards = scope.spawn(|| {
                for _ in 0..50 {
                    Journal::open_beside_agent(path, path).unwrap();
                }
            });
            while !guards.is_finished() {
                agents.forget_vm("web").unwrap();
                agents.define_vm(&spec).unwrap();
            }
        });
    }
}
