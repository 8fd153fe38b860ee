//! The journal: what this host's agent must know after a crash, and the history of migrations. `SQLite`,
//! each record durable before the call returns.

mod drains;
mod settings;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::result::MigrationResult;
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_net::{Before, Change};
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

pub(crate) use self::drains::DrainRecord;
use crate::api::types::MigrateRequest;
use crate::lock::lock;

/// Changes of the schema, in order; `user_version` says how many have been made.
const MIGRATIONS: &[&str] = &[
    "
    CREATE TABLE vms (name TEXT PRIMARY KEY, spec TEXT NOT NULL);
    CREATE TABLE migrations (
        id TEXT PRIMARY KEY,
        vm TEXT NOT NULL,
        target TEXT NOT NULL,
        handed_over INTEGER NOT NULL DEFAULT 0,
        revoked INTEGER NOT NULL DEFAULT 0,
        result TEXT
    );
    CREATE TABLE incoming (
        id TEXT PRIMARY KEY,
        vm TEXT NOT NULL,
        source TEXT NOT NULL,
        spec TEXT NOT NULL,
        state TEXT NOT NULL
    );
    CREATE TABLE host_changes (
        sequence INTEGER PRIMARY KEY AUTOINCREMENT,
        owner TEXT NOT NULL,
        change TEXT NOT NULL,
        before TEXT NOT NULL
    );
",
    "
    ALTER TABLE migrations ADD COLUMN requested_option TEXT NOT NULL DEFAULT '\"auto\"';
    ALTER TABLE migrations ADD COLUMN started_at TEXT NOT NULL DEFAULT '1970-01-01T00:00:00Z';
",
    "
    CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
",
    "
    CREATE TABLE drains (
        id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        cordons INTEGER NOT NULL,
        started_at TEXT NOT NULL,
        ended_at TEXT,
        transfers INTEGER,
        status TEXT NOT NULL
    );
    CREATE TABLE drain_moves (
        drain TEXT NOT NULL,
        vm TEXT NOT NULL,
        place INTEGER NOT NULL,
        move TEXT NOT NULL,
        PRIMARY KEY (drain, vm)
    );
",
    "
    ALTER TABLE drains ADD COLUMN swap_with TEXT;
    ALTER TABLE drains ADD COLUMN last_incoming INTEGER NOT NULL DEFAULT 0;
",
    // Numbers that were found before are found anew: by which option they were is not known of all.
    "
    CREATE TABLE transfers_found (
        target TEXT NOT NULL,
        requested_option TEXT NOT NULL,
        transfers INTEGER NOT NULL,
        PRIMARY KEY (target, requested_option)
    );
    ALTER TABLE drains DROP COLUMN transfers;
",
    "
    ALTER TABLE migrations ADD COLUMN ended_at_ms INTEGER;
    CREATE INDEX migrations_of_vms ON migrations (vm);
",
];

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

/// A migration from this host that has no result yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenMigration {
    /// Its identifier.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// Where it was to go.
    pub(crate) target: String,
    /// By which option.
    pub(crate) requested_option: RequestedOption,
    /// When it began.
    pub(crate) started_at: Timestamp,
    /// Whether the hand-over stands.
    pub(crate) handed_over: bool,
}

/// A VM on its way to this host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IncomingRecord {
    /// Identifier of the migration, given by the source.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// The host it comes from.
    pub(crate) source: String,
    /// What it is built from.
    pub(crate) spec: VmSpec,
    /// What was decided about it.
    pub(crate) state: IncomingState,
}

/// A VM that came here and may not have been let run yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// Identifier of the migration.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// Where it came from.
    pub(crate) source: String,
}

/// What the target has decided about a VM on its way. All but the first are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncomingState {
    /// Neither may run nor was given up.
    Waiting,
    /// The source has handed it over: it runs here, or will as soon as this agent can make it.
    Running,
    /// It runs here, and the source knows.
    Finished,
    /// Given up; it never ran here and never will under this identifier.
    Discarded,
}

impl IncomingState {
    fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Discarded => "discarded",
        }
    }

    fn from_word(word: &str) -> Self {
        match word {
            "running" => Self::Running,
            "finished" => Self::Finished,
            "discarded" => Self::Discarded,
            _ => Self::Waiting,
        }
    }
}

/// A change of the host that has not been undone.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct HostChange {
    /// Order in which it was made.
    pub(crate) sequence: i64,
    /// The migration for which it was made.
    pub(crate) owner: String,
    /// What was changed.
    pub(crate) change: Change,
    /// What was there before.
    pub(crate) before: Before,
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
            finish_arrivals_of(&transaction, name)?;
            transaction.execute("DELETE FROM vms WHERE name = ?1", [name])?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// A VM is this host's, whatever the host says that it came from: somebody boots it here.
    pub(crate) fn finish_arrivals_of(&self, name: &str) -> Result<(), JournalError> {
        self.run(|connection| finish_arrivals_of(connection, name))
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

    /// Records that a migration from here begins.
    pub(crate) fn begin_migration(
        &self,
        id: &str,
        request: &MigrateRequest,
        started_at: Timestamp,
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO migrations (id, vm, target, requested_option, started_at) \
                 VALUES (?1, ?2, ?3, ?4, ?5)",
                params![id, request.vm, request.target, to_json(&request.option)?, started_at.to_string()],
            )?;
            Ok(())
        })
    }

    /// The commit point: from here on the VM belongs to the target. `false` when the migration was
    /// ended meanwhile (by the guard of a stopped agent), and the hand-over must not happen.
    pub(crate) fn hand_over(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let rows = connection.execute(
                "UPDATE migrations SET handed_over = 1 WHERE id = ?1 AND revoked = 0 AND result IS NULL",
                [id],
            )?;
            Ok(rows == 1)
        })
    }

    /// Takes the hand-over back, or forbids it for good. `false` when it was ended with a result.
    pub(crate) fn revoke_hand_over(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let rows = connection.execute(
                "UPDATE migrations SET handed_over = 0, revoked = 1 WHERE id = ?1 AND result IS NULL",
                [id],
            )?;
            Ok(rows == 1)
        })
    }

    /// Forbids the hand-over of a migration unless it has happened. Whether it is forbidden now.
    pub(crate) fn forbid_hand_over(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let rows = connection.execute(
                "UPDATE migrations SET revoked = 1 WHERE id = ?1 AND handed_over = 0 AND result IS NULL",
                [id],
            )?;
            Ok(rows == 1)
        })
    }

    /// Records how a migration ended; if the VM is gone from here, forgets it in the same breath.
    pub(crate) fn end_migration(
        &self,
        result: &MigrationResult,
        vm_left: bool,
        now: Timestamp,
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            transaction.execute(
                "UPDATE migrations SET result = ?2, ended_at_ms = ?3 WHERE id = ?1",
                params![result.id, to_json(result)?, now.as_millisecond()],
            )?;
            if vm_left {
                transaction.execute("DELETE FROM vms WHERE name = ?1", [&result.vm])?;
            }
            transaction.execute(
                "DELETE FROM migrations WHERE result IS NOT NULL AND rowid <= \
                 (SELECT max(rowid) FROM migrations) - ?1",
                [HISTORY_LENGTH],
            )?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Whether the hand-over of a migration is forbidden, or was taken back.
    pub(crate) fn is_hand_over_forbidden(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let revoked =
                connection.query_row("SELECT revoked FROM migrations WHERE id = ?1", [id], |row| row.get(0));
            Ok(revoked.optional()?.unwrap_or(false))
        })
    }

    /// Migrations from here that have no result: under way, or cut short by a crash.
    pub(crate) fn open_migrations(&self) -> Result<Vec<OpenMigration>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT id, vm, target, handed_over, requested_option, started_at FROM migrations \
                 WHERE result IS NULL",
            )?;
            let mut rows = statement.query([])?;
            let mut open = vec![];
            while let Some(row) = rows.next()? {
                let (option, started_at): (String, String) = (row.get(4)?, row.get(5)?);
                open.push(OpenMigration {
                    id: row.get(0)?,
                    vm: row.get(1)?,
                    target: row.get(2)?,
                    handed_over: row.get(3)?,
                    requested_option: from_json(&option)?,
                    // Only for people.
                    started_at: started_at.parse().unwrap_or_default(),
                });
            }
            Ok(open)
        })
    }

    /// One migration without a result.
    pub(crate) fn open_migration(&self, id: &str) -> Result<Option<OpenMigration>, JournalError> {
        Ok(self.open_migrations()?.into_iter().find(|migration| migration.id == id))
    }

    /// The result of one migration, once it has ended.
    pub(crate) fn result(&self, id: &str) -> Result<Option<MigrationResult>, JournalError> {
        self.run(|connection| {
            let text: Option<Option<String>> = connection
                .query_row("SELECT result FROM migrations WHERE id = ?1", [id], |row| row.get(0))
                .optional()?;
            text.flatten().map(|text| from_json(&text)).transpose()
        })
    }

    /// The last migration of a VM from here that was completed, if that was recorded at this time or later.
    pub(crate) fn completed_since(
        &self,
        vm: &str,
        since: Timestamp,
    ) -> Result<Option<MigrationResult>, JournalError> {
        self.run(|connection| {
            let text: Option<String> = connection
                .query_row(
                    "SELECT result FROM migrations WHERE vm = ?1 AND ended_at_ms >= ?2 \
                     AND json_extract(result, '$.outcome') = 'completed' ORDER BY rowid DESC LIMIT 1",
                    params![vm, since.as_millisecond()],
                    |row| row.get(0),
                )
                .optional()?;
            text.map(|text| from_json(&text)).transpose()
        })
    }

    /// The last migrations that ended, newest first.
    pub(crate) fn history(&self, limit: u32) -> Result<Vec<MigrationResult>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT result FROM migrations WHERE result IS NOT NULL ORDER BY rowid DESC LIMIT ?1",
            )?;
            let texts = statement
                .query_map([limit], |row| row.get::<_, String>(0))?
                .collect::<Result<Vec<_>, _>>()?;
            texts.iter().map(|text| from_json(text)).collect()
        })
    }

    /// The last migrations to `target` by this option that were completed, newest first.
    pub(crate) fn completed_to(
        &self,
        target: &str,
        option: RequestedOption,
        limit: u32,
    ) -> Result<Vec<MigrationResult>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT result FROM migrations WHERE target = ?1 AND requested_option = ?2 \
                 AND result IS NOT NULL AND json_extract(result, '$.outcome') = 'completed' \
                 ORDER BY rowid DESC LIMIT ?3",
            )?;
            let texts = statement
                .query_map(params![target, to_json(&option)?, limit], |row| row.get::<_, String>(0))?
                .collect::<Result<Vec<_>, _>>()?;
            texts.iter().map(|text| from_json(text)).collect()
        })
    }

    /// Records a VM on its way here. `false` when that identifier is known already.
    pub(crate) fn begin_incoming(&self, id: &str, source: &str, spec: &VmSpec) -> Result<bool, JournalError> {
        self.run(|connection| {
            let rows = connection.execute(
                "INSERT INTO incoming (id, vm, source, spec, state) VALUES (?1, ?2, ?3, ?4, 'waiting') \
                 ON CONFLICT (id) DO NOTHING",
                params![id, spec.name.as_str(), source, to_json(spec)?],
            )?;
            connection.execute(
                "DELETE FROM incoming WHERE state != 'waiting' AND rowid <= \
                 (SELECT max(rowid) FROM incoming) - ?1",
                [HISTORY_LENGTH],
            )?;
            Ok(rows == 1)
        })
    }

    /// Records, before the VM runs, that it runs here. `false` when it was discarded before.
    pub(crate) fn run_incoming(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let Some(record) = incoming(&transaction, id)? else { return Ok(false) };
            match record.state {
                IncomingState::Waiting => {}
                IncomingState::Running | IncomingState::Finished => return Ok(true),
                IncomingState::Discarded => return Ok(false),
            }
            transaction.execute("UPDATE incoming SET state = 'running' WHERE id = ?1", [id])?;
            insert_vm(&transaction, &record.spec)?;
            transaction.commit()?;
            Ok(true)
        })
    }

    /// Records that the VM does not run here after all and never did: the hypervisor refused. What
    /// [`Self::run_incoming`] recorded is taken back. `false` when it was not recorded, or is finished.
    pub(crate) fn take_back_run(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let rows = transaction.execute(
                "UPDATE incoming SET state = 'discarded' WHERE id = ?1 AND state = 'running'",
                [id],
            )?;
            if rows == 1 {
                transaction
                    .execute("DELETE FROM vms WHERE name = (SELECT vm FROM incoming WHERE id = ?1)", [id])?;
            }
            transaction.commit()?;
            Ok(rows == 1)
        })
    }

    /// Records that a VM that came here runs, and that its source knows.
    pub(crate) fn finish_incoming(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "UPDATE incoming SET state = 'finished' WHERE id = ?1 AND state = 'running'",
                [id],
            )?;
            Ok(())
        })
    }

    /// VMs that are recorded to run here, of which nobody has said yet that they do.
    pub(crate) fn unfinished_arrivals(&self) -> Result<Vec<Arrival>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT id, vm, source FROM incoming WHERE state = 'running'")?;
            let rows = statement
                .query_map([], |row| Ok(Arrival { id: row.get(0)?, vm: row.get(1)?, source: row.get(2)? }))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that the VM never ran here and never will. `false` when it runs.
    ///
    /// An identifier that is not known is recorded too, so that an order to run that arrives late
    /// finds the refusal.
    pub(crate) fn discard_incoming(&self, id: &str, source: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            transaction.execute(
                "INSERT INTO incoming (id, vm, source, spec, state) VALUES (?1, '', ?2, '', 'discarded') \
                 ON CONFLICT (id) DO UPDATE SET state = 'discarded' WHERE state = 'waiting'",
                params![id, source],
            )?;
            let word: String =
                transaction.query_row("SELECT state FROM incoming WHERE id = ?1", [id], |row| row.get(0))?;
            transaction.commit()?;
            Ok(IncomingState::from_word(&word) == IncomingState::Discarded)
        })
    }

    /// VMs that were discarded, but of whose skeletons nobody has said yet that they are gone.
    pub(crate) fn discarded_skeletons(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_in(IncomingState::Discarded)
    }

    /// Records that nothing is left of a VM that was discarded.
    pub(crate) fn forget_skeleton(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection
                .execute("UPDATE incoming SET spec = '' WHERE id = ?1 AND state = 'discarded'", [id])?;
            Ok(())
        })
    }

    /// What was decided about a VM on its way, and by whom it was sent.
    pub(crate) fn incoming_state(&self, id: &str) -> Result<Option<(String, IncomingState)>, JournalError> {
        self.run(|connection| {
            Ok(connection
                .query_row("SELECT source, state FROM incoming WHERE id = ?1", [id], |row| {
                    Ok((row.get(0)?, IncomingState::from_word(&row.get::<_, String>(1)?)))
                })
                .optional()?)
        })
    }

    /// VMs on their way here about which nothing final was decided.
    pub(crate) fn waiting_incoming(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_in(IncomingState::Waiting)
    }

    fn incoming_in(&self, state: IncomingState) -> Result<Vec<IncomingRecord>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT id FROM incoming WHERE state = ?1 AND spec != ''")?;
            let ids = statement
                .query_map([state.word()], |row| row.get::<_, String>(0))?
                .collect::<Result<Vec<_>, _>>()?;
            ids.iter().filter_map(|id| incoming(connection, id).transpose()).collect()
        })
    }

    /// Records a change of the host, before it is made.
    pub(crate) fn record_change(
        &self,
        owner: &str,
        change: &Change,
        before: &Before,
    ) -> Result<i64, JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO host_changes (owner, change, before) VALUES (?1, ?2, ?3)",
                params![owner, to_json(change)?, to_json(before)?],
            )?;
            Ok(connection.last_insert_rowid())
        })
    }

    /// Changes that have not been undone, the newest first.
    pub(crate) fn changes(&self) -> Result<Vec<HostChange>, JournalError> {
        self.run(|connection| {
            let mut statement = connection
                .prepare("SELECT sequence, owner, change, before FROM host_changes ORDER BY sequence DESC")?;
            let rows = statement.query_map([], raw_change)?.collect::<Result<Vec<_>, _>>()?;
            rows.into_iter()
                .map(|(sequence, owner, change, before)| {
                    Ok(HostChange {
                        sequence,
                        owner,
                        change: from_json(&change)?,
                        before: from_json(&before)?,
                    })
                })
                .collect()
        })
    }

    /// Records that a change has been undone.
    pub(crate) fn forget_change(&self, sequence: i64) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("DELETE FROM host_changes WHERE sequence = ?1", [sequence])?;
            Ok(())
        })
    }
}

fn open_connection(directory: &Path, path: &Path) -> Result<Connection, JournalCause> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(JournalCause::Directory)?;
    let mut connection = Connection::open(path)?;
    connection.busy_timeout(std::time::Duration::from_secs(5))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // In WAL mode only FULL makes each commit durable before it returns.
    connection.pragma_update(None, "synchronous", "FULL")?;
    upgrade(&mut connection)?;
    Ok(connection)
}

fn upgrade(connection: &mut Connection) -> Result<(), JournalCause> {
    // Nothing is written where nothing is to be done: a guard opens the journal on a full disk too.
    if schema_changes_made(connection)? == MIGRATIONS.len() {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let done = schema_changes_made(&transaction)?;
    if done > MIGRATIONS.len() {
        return Err(JournalCause::Newer(done));
    }
    for sql in &MIGRATIONS[done..] {
        transaction.execute_batch(sql)?;
    }
    let made = u32::try_from(MIGRATIONS.len()).expect("there are a handful of schema changes");
    transaction.pragma_update(None, "user_version", made)?;
    transaction.commit()?;
    Ok(())
}

fn schema_changes_made(connection: &Connection) -> Result<usize, JournalCause> {
    let made: u32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    Ok(made as usize)
}

fn finish_arrivals_of(connection: &Connection, vm: &str) -> Result<(), JournalCause> {
    connection.execute("UPDATE incoming SET state = 'finished' WHERE vm = ?1 AND state = 'running'", [vm])?;
    Ok(())
}

fn insert_vm(connection: &Connection, spec: &VmSpec) -> Result<(), JournalCause> {
    connection.execute(
        "INSERT INTO vms (name, spec) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET spec = excluded.spec",
        params![spec.name.as_str(), to_json(spec)?],
    )?;
    Ok(())
}

fn incoming(connection: &Connection, id: &str) -> Result<Option<IncomingRecord>, JournalCause> {
    let row = connection
        .query_row("SELECT vm, source, spec, state FROM incoming WHERE id = ?1", [id], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get::<_, String>(2)?, row.get::<_, String>(3)?))
        })
        .optional()?;
    let Some((vm, source, spec, state)) = row else { return Ok(None) };
    // A refusal for an identifier that was never known has no specification, nor has one of which
    // nothing is left.
    if spec.is_empty() {
        return Ok(None);
    }
    let state = IncomingState::from_word(&state);
    Ok(Some(IncomingRecord { id: id.into(), vm, source, spec: from_json(&spec)?, state }))
}

fn raw_change(row: &Row<'_>) -> rusqlite::Result<(i64, String, String, String)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
}

fn to_json<T: Serialize>(value: &T) -> Result<String, JournalCause> {
    Ok(serde_json::to_string(value)?)
}

fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, JournalCause> {
    Ok(serde_json::from_str(text)?)
}
