//! The journal's records of hooks that are due when a VM's migration is over.

use rusqlite::{OptionalExtension, Row, params};

use super::{Journal, JournalError};

/// A migration for which a hook is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HookDue {
    /// Its identifier.
    pub(crate) migration: String,
    /// The VM.
    pub(crate) vm: String,
    /// From where.
    pub(crate) source: String,
    /// To where.
    pub(crate) target: String,
}

impl HookDue {
    fn of(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self { migration: row.get(0)?, vm: row.get(1)?, source: row.get(2)?, target: row.get(3)? })
    }
}

impl Journal {
    /// Records that a hook is due when this migration has ended.
    pub(crate) fn hook_is_due(&self, due: &HookDue) -> Result<(), JournalError> {
        let HookDue { migration, vm, source, target } = due;
        self.run(|connection| {
            connection.execute(
                "INSERT INTO hooks_due (migration, vm, source, target) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT DO NOTHING",
                params![migration, vm, source, target],
            )?;
            Ok(())
        })
    }

    /// The migration's hook, if one is due.
    pub(crate) fn hook_due(&self, migration: &str) -> Result<Option<HookDue>, JournalError> {
        self.run(|connection| {
            let select = "SELECT migration, vm, source, target FROM hooks_due WHERE migration = ?1";
            Ok(connection.query_row(select, [migration], HookDue::of).optional()?)
        })
    }

    /// All hooks that are due.
    pub(crate) fn hooks_due(&self) -> Result<Vec<HookDue>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare("SELECT migration, vm, source, target FROM hooks_due")?;
            let rows = statement.query_map([], HookDue::of)?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that the hook has run, or need not run.
    pub(crate) fn hook_is_done(&self, migration: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("DELETE FROM hooks_due WHERE migration = ?1", [migration])?;
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_due_outlives_the_agent() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Journal::open(directory.path(), directory.path()).unwrap();
        let due = HookDue { migration: "1".into(), vm: "web".into(), source: "a".into(), target: "b".into() };
        open().hook_is_due(&due).unwrap();
        open().hook_is_due(&due).unwrap();
        assert_eq!(open().hook_due("1").unwrap(), Some(due.clone()));
        assert_eq!(open().hook_due("2").unwrap(), None);
        assert_eq!(open().hooks_due().unwrap(), [due]);
        open().hook_is_done("1").unwrap();
        assert_eq!(open().hooks_due().unwrap(), []);
    }
}
