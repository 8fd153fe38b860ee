//! The journal's records of migrations from here: which host the VM belongs to, and how they ended.

use drainpipe_engine::migration::guard::HandOverRecord;
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::option::RequestedOption;
use jiff::Timestamp;
use rusqlite::{OptionalExtension, params};

use super::incoming::finish_incoming_of;
use super::{HISTORY_LENGTH, Journal, JournalError, from_json, to_json};
use drainpipe_api_types::MigrateRequest;

/// A result is recorded a moment before its VM is gone from here, so that a drain that begins in between has seen it.
const GONE_WITHIN_S: u32 = 10;

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

impl Journal {
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
        self.change(
            id,
            "UPDATE migrations SET handed_over = 1 WHERE id = ?1 AND revoked = 0 AND result IS NULL",
        )
    }

    /// Takes the hand-over back, or forbids it for good. `false` when it was ended with a result.
    pub(crate) fn revoke_hand_over(&self, id: &str) -> Result<bool, JournalError> {
        self.change(id, "UPDATE migrations SET handed_over = 0, revoked = 1 WHERE id = ?1 AND result IS NULL")
    }

    /// Forbids the hand-over of a migration unless it has happened; whose the VM is then.
    pub(crate) fn forbid_hand_over(&self, id: &str) -> Result<HandOverRecord, JournalError> {
        let is_forbidden = self.change(
            id,
            "UPDATE migrations SET revoked = 1 WHERE id = ?1 AND handed_over = 0 AND result IS NULL",
        )?;
        if is_forbidden {
            return Ok(HandOverRecord::Forbidden);
        }
        let is_open = self.open_migration(id)?.is_some();
        Ok(if is_open { HandOverRecord::Recorded } else { HandOverRecord::Over })
    }

    /// Whether this changed the row of a migration.
    fn change(&self, id: &str, update: &str) -> Result<bool, JournalError> {
        self.run(|connection| Ok(connection.execute(update, [id])? == 1))
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
                // The host that sent it here may not have heard yet that it ran. It never runs here by that migration again.
                finish_incoming_of(&transaction, &result.vm)?;
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

    /// Identifiers of migrations from here that begin so; some of them, if there are many.
    pub(crate) fn migrations_beginning(&self, beginning: &str) -> Result<Vec<String>, JournalError> {
        self.run(|connection| {
            let mut statement = connection
                .prepare("SELECT id FROM migrations WHERE substr(id, 1, length(?1)) = ?1 LIMIT 8")?;
            let ids = statement.query_map([beginning], |row| row.get(0))?.collect::<Result<_, _>>()?;
            Ok(ids)
        })
    }

    /// The last migration of a VM by which it has left, if it had not ended when this drain began, or just then.
    /// By the order of records: the host's clock may have been set meanwhile.
    pub(crate) fn left_since_drain(
        &self,
        vm: &str,
        drain: &str,
    ) -> Result<Option<MigrationResult>, JournalError> {
        self.run(|connection| {
            let text: Option<String> = connection
                .query_row(
                    "SELECT result FROM migrations JOIN drains ON drains.id = ?2 WHERE migrations.vm = ?1 \
                     AND (json_extract(result, '$.outcome') = 'completed' \
                          OR json_extract(result, '$.outcome') = 'lost' \
                             AND json_extract(result, '$.source_vm') IS NULL) \
                     AND (migrations.rowid >= drains.first_migration OR ended_at_ms / 1000 \
                          BETWEEN strftime('%s', drains.started_at) - ?3 AND strftime('%s', drains.started_at) + 0) \
                     ORDER BY migrations.rowid DESC LIMIT 1",
                    params![vm, drain, GONE_WITHIN_S],
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
}
