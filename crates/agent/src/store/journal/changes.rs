//! Changes of the host that the journal knows, until they are undone.

use drainpipe_net::{Before, Change};
use rusqlite::{Row, params};

use super::{Journal, JournalError, from_json, to_json};

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

fn raw_change(row: &Row<'_>) -> rusqlite::Result<(i64, String, String, String)> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
}
