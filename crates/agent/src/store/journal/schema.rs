//! The journal's tables, and how an older Drainpipe's journal gets them.

use std::path::Path;

use rusqlite::{Connection, TransactionBehavior};

use super::JournalCause;

/// Changes of the schema, in order; `user_version` says how many have been made.
pub(super) const SCHEMA_CHANGES: &[&str] = &[
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
    // Numbers that were found before are found again: by which option they were is not known of all.
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
    "
    ALTER TABLE drains ADD COLUMN request TEXT;
",
    // Numbers that were found before are found again: for how many targets they were is not known.
    "
    DELETE FROM transfers_found;
    ALTER TABLE transfers_found ADD COLUMN targets INTEGER NOT NULL DEFAULT 1;
",
    "
    ALTER TABLE incoming ADD COLUMN post_copy INTEGER NOT NULL DEFAULT 0;
",
    // Nobody knows whether the sources of earlier records have heard, so those are kept.
    "
    ALTER TABLE incoming ADD COLUMN source_knows INTEGER NOT NULL DEFAULT 0;
",
    // The generation goes up in the transaction of each record that bears on whose a VM is.
    "
    CREATE TABLE mark (
        identity TEXT NOT NULL,
        generation INTEGER NOT NULL,
        adopted_at INTEGER NOT NULL DEFAULT 0
    );
    INSERT INTO mark (identity, generation) VALUES (lower(hex(randomblob(16))), 0);
    CREATE TABLE replaced (identity TEXT PRIMARY KEY);
    ALTER TABLE vms ADD COLUMN since INTEGER NOT NULL DEFAULT 0;
    CREATE TRIGGER vm_defined AFTER INSERT ON vms BEGIN
        UPDATE mark SET generation = generation + 1;
        UPDATE vms SET since = (SELECT generation FROM mark) WHERE name = NEW.name;
    END;
    CREATE TRIGGER vm_redefined AFTER UPDATE OF spec ON vms BEGIN
        UPDATE mark SET generation = generation + 1;
        UPDATE vms SET since = (SELECT generation FROM mark) WHERE name = NEW.name;
    END;
    CREATE TRIGGER vm_forgotten AFTER DELETE ON vms BEGIN
        UPDATE mark SET generation = generation + 1;
    END;
    CREATE TRIGGER migration_begun AFTER INSERT ON migrations BEGIN
        UPDATE mark SET generation = generation + 1;
    END;
    CREATE TRIGGER migration_decided AFTER UPDATE OF handed_over, revoked, result ON migrations BEGIN
        UPDATE mark SET generation = generation + 1;
    END;
    CREATE TRIGGER incoming_begun AFTER INSERT ON incoming BEGIN
        UPDATE mark SET generation = generation + 1;
    END;
    CREATE TRIGGER incoming_decided AFTER UPDATE OF state ON incoming BEGIN
        UPDATE mark SET generation = generation + 1;
    END;
",
    // For earlier drains, as well as the host's clock tells.
    "
    ALTER TABLE drains ADD COLUMN first_migration INTEGER NOT NULL DEFAULT 0;
    UPDATE drains SET first_migration = (
        SELECT ifnull(min(rowid), (SELECT ifnull(max(rowid), 0) + 1 FROM migrations)) FROM migrations
        WHERE result IS NULL OR ended_at_ms >= 1000 * strftime('%s', drains.started_at)
    );
",
    "
    CREATE TABLE join_tokens (
        hash TEXT PRIMARY KEY,
        ends_at_s INTEGER NOT NULL,
        used_by TEXT,
        used_at_s INTEGER
    );
",
    // Disks that this host made for VMs on their way here, that go with VMs on their way from here, and that have stayed
    // after those have left. By device and inode a file is told from another one under its path.
    "
    CREATE TABLE made_disks (
        migration TEXT NOT NULL,
        path TEXT NOT NULL,
        file TEXT,
        PRIMARY KEY (migration, path)
    );
    CREATE TABLE leaving_disks (
        migration TEXT NOT NULL,
        path TEXT NOT NULL,
        file TEXT,
        PRIMARY KEY (migration, path)
    );
    CREATE TABLE left_disks (
        path TEXT PRIMARY KEY,
        was TEXT NOT NULL,
        vm TEXT NOT NULL,
        target TEXT NOT NULL,
        left_at TEXT NOT NULL,
        file TEXT
    );
",
    // What a copy of a disk is of, once the source may write to it; and until when what is there of an interrupted one is
    // kept, in seconds since 1970.
    "
    ALTER TABLE made_disks ADD COLUMN part TEXT;
    ALTER TABLE left_disks ADD COLUMN part TEXT;
    ALTER TABLE left_disks ADD COLUMN kept_until_s INTEGER;
",
    // Migrations at whose end a hook is due.
    "
    CREATE TABLE hooks_due (
        migration TEXT PRIMARY KEY,
        vm TEXT NOT NULL,
        source TEXT NOT NULL,
        target TEXT NOT NULL
    );
",
    // Disks that move to another place on this host while their VMs run. `recorded` is whether the VM's definition names the
    // new one.
    "
    CREATE TABLE disk_moves (
        id TEXT PRIMARY KEY,
        vm TEXT NOT NULL,
        disk TEXT NOT NULL,
        old_path TEXT NOT NULL,
        old_file TEXT,
        new_path TEXT NOT NULL,
        new_file TEXT,
        recorded INTEGER NOT NULL DEFAULT 0
    );
",
    // What a disk is of that goes with its VM: a copy that comes back goes on from it.
    "
    ALTER TABLE leaving_disks ADD COLUMN part TEXT;
",
];

/// Makes the journal's directory, if it is not there.
pub(super) fn make_directory(directory: &Path) -> Result<(), JournalCause> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(JournalCause::Directory)
}

pub(super) fn open_connection(directory: &Path, path: &Path) -> Result<Connection, JournalCause> {
    make_directory(directory)?;
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
    if schema_changes_made(connection)? == SCHEMA_CHANGES.len() {
        return Ok(());
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let done = schema_changes_made(&transaction)?;
    if done > SCHEMA_CHANGES.len() {
        return Err(JournalCause::Newer(done));
    }
    for sql in &SCHEMA_CHANGES[done..] {
        transaction.execute_batch(sql)?;
    }
    let made = u32::try_from(SCHEMA_CHANGES.len()).expect("there are a handful of schema changes");
    transaction.pragma_update(None, "user_version", made)?;
    transaction.commit()?;
    Ok(())
}

fn schema_changes_made(connection: &Connection) -> Result<usize, JournalCause> {
    let made: u32 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    Ok(made as usize)
}
