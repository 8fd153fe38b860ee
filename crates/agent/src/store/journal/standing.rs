//! What the journal says about itself, and how an operator puts another in its place: docs/decisions/0051.

use std::fs;
use std::path::{Path, PathBuf};

use drainpipe_engine::journal::{Doubt, JournalFile, JournalMark, JournalStanding};
use drainpipe_hypervisor::spec::VmSpec;
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use tokio::sync::watch;
use tracing::warn;

use super::witness::Witnessed;
use super::{Journal, JournalCause, JournalError, insert_vm, to_json};
use crate::store::journal::schema::open_connection;
use crate::store::lock::lock;

/// Endings of the files that `SQLite` keeps of one journal.
const FILES: [&str; 3] = ["", "-wal", "-shm"];

/// A live QEMU as the journal is to know it from now on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Adopted {
    /// It is a VM of this host, whatever its guest does.
    Here(VmSpec),
    /// It came here by this migration and has not run.
    Waiting { id: String, source: String, spec: VmSpec },
    /// It came here by this migration, and runs, or has run.
    Arrived { id: String, source: String, spec: VmSpec },
    /// It is on its way to another host, which may have it.
    Leaving { id: String, target: String, spec: VmSpec },
    /// It was to go to another host, and runs here.
    Stays { id: String, target: String, spec: VmSpec },
}

/// Where the journal lies in the state directory.
pub(crate) fn file_of(directory: &Path) -> PathBuf {
    directory.join("journal.sqlite")
}

/// The journal as it is on disk. Makes none; fails if it cannot be determined what it is.
pub(crate) fn look(directory: &Path) -> Result<JournalFile, JournalError> {
    let path = file_of(directory);
    let failed = |source| JournalError { path: path.clone(), source };
    match fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(JournalFile::Missing),
        Err(error) => return Err(failed(JournalCause::Directory(error))),
        Ok(file) if file.len() == 0 => return Ok(JournalFile::Empty),
        Ok(_) => {}
    }
    let read = open_connection(directory, &path).and_then(|connection| {
        check_whole(&connection)?;
        read_standing(&connection)
    });
    match read {
        Ok(standing) => Ok(JournalFile::Sound(standing)),
        Err(JournalCause::Malformed(error)) => Ok(JournalFile::Malformed(error.to_string())),
        Err(source) => Err(failed(source)),
    }
}

/// Damage that reading a few records would not meet.
fn check_whole(connection: &Connection) -> Result<(), JournalCause> {
    let said: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if said == "ok" {
        return Ok(());
    }
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
    Err(rusqlite::Error::SqliteFailure(code, Some(said)).into())
}

/// Keeps a journal that is not to be used any more; says where.
pub(crate) fn set_aside(directory: &Path, now: Timestamp) -> Result<PathBuf, JournalError> {
    let path = file_of(directory);
    let aside = directory.join(format!("journal.sqlite.set-aside-{}", now.as_second()));
    let moved = FILES.iter().try_for_each(|ending| {
        let with_ending = |path: &Path| PathBuf::from(format!("{}{ending}", path.display()));
        match fs::rename(with_ending(&path), with_ending(&aside)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            moved => moved,
        }
    });
    moved.map(|()| aside).map_err(|error| JournalError { path, source: JournalCause::Directory(error) })
}

pub(super) fn read_standing(connection: &Connection) -> Result<JournalStanding, JournalCause> {
    let mut statement = connection.prepare("SELECT identity FROM replaced ORDER BY identity")?;
    let replaces = statement.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
    Ok(JournalStanding { mark: read_mark(connection)?, replaces })
}

/// `SQLite` has no unsigned numbers.
fn generation(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(i64::unsigned_abs)
}

fn read_mark(connection: &Connection) -> Result<JournalMark, JournalCause> {
    let mark = connection.query_row("SELECT identity, generation FROM mark", [], |row| {
        Ok(JournalMark { identity: row.get(0)?, generation: generation(row, 1)? })
    });
    Ok(mark?)
}

impl Journal {
    /// What it says of itself.
    pub(crate) fn standing(&self) -> Result<JournalStanding, JournalError> {
        self.run(|connection| read_standing(connection))
    }

    /// Its generation, now and from now on, as far as this process has a hand in it.
    pub(crate) fn generations(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Why it is not believed any more, once somebody has said so.
    pub(crate) fn doubts(&self) -> watch::Receiver<Vec<Doubt>> {
        self.doubts.subscribe()
    }

    /// It is not believed any more, because another host has heard this: nothing is read from it or written to it, and
    /// the agent's next start knows why.
    pub(crate) fn doubt(&self, doubts: Vec<Doubt>, heard: JournalMark) {
        let mut witnessed = lock(&self.witnessed);
        witnessed.mark = heard;
        self.tell(&witnessed);
        self.doubts.send_replace(doubts);
    }

    /// Never ahead of the journal: what it says is committed.
    pub(super) fn bear_witness(&self, connection: &Connection) {
        let mut witnessed = lock(&self.witnessed);
        let marked = read_mark(connection).map(|mark| {
            let is_news = mark != witnessed.mark;
            witnessed.mark = mark;
            is_news
        });
        match marked {
            Ok(true) => {
                self.tell(&witnessed);
                self.generation.send_replace(witnessed.mark.generation);
            }
            Ok(false) => {}
            Err(error) => warn!(%error, "cannot read how far the journal has got"),
        }
    }

    fn tell(&self, witnessed: &Witnessed) {
        if let Err(error) = self.witness.write(witnessed) {
            warn!(%error, "the runtime directory cannot record how far the journal has got");
        }
    }

    /// The agent has begun to use it.
    pub(crate) fn begin_witness(&self) -> Result<(), JournalError> {
        let mark = self.standing()?.mark;
        let mut witnessed = lock(&self.witnessed);
        witnessed.mark = mark;
        self.tell(&witnessed);
        Ok(())
    }

    /// Another host has heard of nothing that is missing here: what the journal says is complete, as far back as an
    /// operator has not put it in another's place.
    pub(crate) fn prove(&self) -> Result<(), JournalError> {
        let adopted_at = self.adopted_at()?;
        let mut witnessed = lock(&self.witnessed);
        if witnessed.proven_from > adopted_at {
            witnessed.proven_from = adopted_at;
            self.tell(&witnessed);
        }
        Ok(())
    }

    /// The generation since which it is what an operator has put in another's place.
    fn adopted_at(&self) -> Result<u64, JournalError> {
        const ADOPTED_AT: &str = "SELECT adopted_at FROM mark";
        self.run(|connection| Ok(connection.query_row(ADOPTED_AT, [], |row| generation(row, 0))?))
    }

    /// Whether what it says of a VM that it has is known to be complete: so the VM has not left since.
    pub(crate) fn is_proven(&self, vm: &str) -> Result<bool, JournalError> {
        const SINCE: &str = "SELECT since FROM vms WHERE name = ?1";
        let since: Option<u64> = self.run(|connection| {
            Ok(connection.query_row(SINCE, [vm], |row| generation(row, 0)).optional()?)
        })?;
        let proven_from = lock(&self.witnessed).proven_from.max(self.adopted_at()?);
        Ok(since.is_some_and(|since| since >= proven_from))
    }

    /// All other hosts have said that they do not have a VM.
    pub(crate) fn prove_vm(&self, vm: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("UPDATE vms SET spec = spec WHERE name = ?1", [vm])?;
            Ok(())
        })
    }

    /// The hosts to which a VM may have gone, or from which it may have come and been taken back, by what is recorded:
    /// of migrations whose outcome nobody knows.
    pub(crate) fn tied_to(&self, vm: &str) -> Result<Vec<String>, JournalError> {
        const TIES: &str = "SELECT target FROM migrations WHERE vm = ?1 AND result IS NULL \
             UNION SELECT source FROM incoming WHERE vm = ?1 AND state IN ('waiting', 'running')";
        self.run(|connection| {
            let mut statement = connection.prepare(TIES)?;
            let hosts = statement.query_map([vm], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(hosts)
        })
    }

    /// The host from which a VM came last, if it was told to run here.
    pub(crate) fn came_from(&self, vm: &str) -> Result<Option<String>, JournalError> {
        const FROM: &str = "SELECT source FROM incoming WHERE vm = ?1 AND state IN ('running', 'finished') \
             AND EXISTS (SELECT 1 FROM vms WHERE name = ?1) ORDER BY rowid DESC LIMIT 1";
        self.run(|connection| Ok(connection.query_row(FROM, [vm], |row| row.get(0)).optional()?))
    }

    /// VMs that have a record here which accounts for a QEMU.
    pub(crate) fn recorded_vms(&self) -> Result<Vec<String>, JournalError> {
        const RECORDED: &str = "SELECT name FROM vms UNION SELECT vm FROM incoming \
             WHERE spec != '' AND state IN ('waiting', 'running', 'discarded')";
        self.run(|connection| {
            let mut statement = connection.prepare(RECORDED)?;
            let names = statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(names)
        })
    }

    /// Takes the place of what was doubted. What it has of migrations that are not over is not believed to be their last
    /// word: `lives` are the VMs whose QEMUs live here.
    pub(crate) fn adopt(
        &self,
        standing: &JournalStanding,
        adopted: &[Adopted],
        lives: &[String],
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            forget_promises(&transaction, lives)?;
            for one in adopted {
                record(&transaction, one)?;
            }
            for identity in &standing.replaces {
                transaction.execute("INSERT OR IGNORE INTO replaced (identity) VALUES (?1)", [identity])?;
            }
            let JournalMark { identity, generation } = &standing.mark;
            let generation = i64::try_from(*generation).unwrap_or(i64::MAX / 2);
            transaction.execute("UPDATE vms SET since = 0", [])?;
            transaction.execute(
                "UPDATE mark SET identity = ?1, generation = max(generation, ?2) + 1, \
                 adopted_at = max(generation, ?2) + 1",
                params![identity, generation],
            )?;
            transaction.commit()?;
            Ok(())
        })?;
        let mark = self.standing()?.mark;
        let proven_from = mark.generation;
        let witnessed = Witnessed { mark, proven_from };
        self.tell(&witnessed);
        *lock(&self.witnessed) = witnessed;
        Ok(())
    }
}

/// A VM that was to come and is not here may have run here and left since, which is no promise that it did not. A
/// migration from here that is not known to be over may have handed its VM over since, unless that was forbidden.
fn forget_promises(connection: &Connection, lives: &[String]) -> Result<(), JournalCause> {
    let mut statement = connection.prepare("SELECT id, vm FROM incoming WHERE state = 'waiting'")?;
    let waiting = statement
        .query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?
        .collect::<Result<Vec<_>, _>>()?;
    for (id, _) in waiting.iter().filter(|(_, vm)| !lives.contains(vm)) {
        connection.execute("DELETE FROM incoming WHERE id = ?1", [id])?;
    }
    connection.execute("UPDATE migrations SET handed_over = 1 WHERE result IS NULL AND revoked = 0", [])?;
    Ok(())
}

fn record(connection: &Connection, adopted: &Adopted) -> Result<(), JournalCause> {
    match adopted {
        Adopted::Here(spec) => insert_vm(connection, spec),
        Adopted::Waiting { id, source, spec } => insert_incoming(connection, id, source, spec, "waiting"),
        Adopted::Arrived { id, source, spec } => {
            insert_incoming(connection, id, source, spec, "finished")?;
            insert_vm(connection, spec)
        }
        Adopted::Leaving { id, target, spec } => {
            insert_migration(connection, id, target, spec, true)?;
            insert_vm(connection, spec)
        }
        Adopted::Stays { id, target, spec } => {
            insert_migration(connection, id, target, spec, false)?;
            insert_vm(connection, spec)
        }
    }
}

fn insert_incoming(
    connection: &Connection,
    id: &str,
    source: &str,
    spec: &VmSpec,
    state: &str,
) -> Result<(), JournalCause> {
    // That it is to run is final.
    connection.execute(
        "INSERT INTO incoming (id, vm, source, spec, state) VALUES (?1, ?2, ?3, ?4, ?5) \
         ON CONFLICT (id) DO UPDATE SET state = excluded.state, spec = excluded.spec, vm = excluded.vm \
         WHERE excluded.state = 'finished'",
        params![id, spec.name.as_str(), source, to_json(spec)?, state],
    )?;
    Ok(())
}

fn insert_migration(
    connection: &Connection,
    id: &str,
    target: &str,
    spec: &VmSpec,
    is_handed_over: bool,
) -> Result<(), JournalCause> {
    connection.execute(
        "INSERT INTO migrations (id, vm, target, handed_over, revoked) VALUES (?1, ?2, ?3, ?4, ?5) \
         ON CONFLICT (id) DO UPDATE SET handed_over = excluded.handed_over, revoked = excluded.revoked \
         WHERE result IS NULL AND revoked = 0",
        params![id, spec.name.as_str(), target, is_handed_over, !is_handed_over],
    )?;
    Ok(())
}
