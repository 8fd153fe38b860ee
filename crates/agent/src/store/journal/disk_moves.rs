//! Disks that move to another place on this host while their VMs run. The VM's definition says which of the two it
//! has.

use drainpipe_engine::storage::DiskName;
use drainpipe_hypervisor::spec::VmSpec;
use rusqlite::types::Type;
use rusqlite::{Connection, Error, Row, TransactionBehavior, params};

use super::disks::insert_left;
use super::{DiskFile, FileId, Journal, JournalCause, JournalError, LeftFile, to_json};

/// A disk that moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskMoveRecord {
    /// The move.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// Which of its disks.
    pub(crate) disk: DiskName,
    /// Where it was.
    pub(crate) old: DiskFile,
    /// Where it goes. Which file that is, is absent where it was not made, or the agent ended as it made it.
    pub(crate) new: DiskFile,
    /// Whether the VM's definition names the new one.
    pub(crate) is_recorded: bool,
}

impl Journal {
    /// Records that a disk is about to be moved: before anything is made.
    pub(crate) fn begin_disk_move(&self, of: &DiskMoveRecord) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO disk_moves (id, vm, disk, old_path, old_file, new_path) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                params![of.id, of.vm, of.disk.to_string(), of.old.path, of.old.file, of.new.path],
            )?;
            Ok(())
        })
    }

    /// Records which file the new disk is.
    pub(crate) fn disk_move_made(&self, id: &str, file: FileId) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("UPDATE disk_moves SET new_file = ?2 WHERE id = ?1", params![id, file])?;
            Ok(())
        })
    }

    /// Records that the VM has the new disk, as this definition says. It decides, whatever ends next.
    pub(crate) fn record_disk_move(&self, id: &str, definition: &VmSpec) -> Result<(), JournalError> {
        self.run(|connection| redefine(connection, id, definition, true))
    }

    /// Records that it has the old one after all.
    pub(crate) fn revoke_disk_move(&self, id: &str, definition: &VmSpec) -> Result<(), JournalError> {
        self.run(|connection| redefine(connection, id, definition, false))
    }

    /// Records that a move is over, and what it has left.
    pub(crate) fn end_disk_move(&self, id: &str, left: Option<&LeftFile>) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            if let Some(left) = left {
                insert_left(&transaction, left)?;
            }
            transaction.execute("DELETE FROM disk_moves WHERE id = ?1", [id])?;
            Ok(transaction.commit()?)
        })
    }

    /// The moves that are not over.
    pub(crate) fn disk_moves(&self) -> Result<Vec<DiskMoveRecord>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT id, vm, disk, old_path, old_file, new_path, new_file, recorded FROM disk_moves ORDER BY id",
            )?;
            let rows = statement.query_map([], disk_move)?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }
}

fn redefine(
    connection: &mut Connection,
    id: &str,
    definition: &VmSpec,
    is_recorded: bool,
) -> Result<(), JournalCause> {
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let spec = to_json(definition)?;
    transaction
        .execute("UPDATE vms SET spec = ?2 WHERE name = ?1", params![definition.name.as_str(), spec])?;
    transaction.execute("UPDATE disk_moves SET recorded = ?2 WHERE id = ?1", params![id, is_recorded])?;
    Ok(transaction.commit()?)
}

fn disk_move(row: &Row<'_>) -> Result<DiskMoveRecord, Error> {
    let disk: String = row.get(2)?;
    let disk =
        disk.parse().map_err(|error| Error::FromSqlConversionFailure(2, Type::Text, Box::new(error)))?;
    Ok(DiskMoveRecord {
        id: row.get(0)?,
        vm: row.get(1)?,
        disk,
        old: DiskFile { path: row.get(3)?, file: row.get(4)? },
        new: DiskFile { path: row.get(5)?, file: row.get(6)? },
        is_recorded: row.get(7)?,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn definition(path: &str) -> VmSpec {
        let text = format!(
            "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-8.2\"\n[[disk]]\npath = \"{path}\"\n\
             format = \"raw\"\n"
        );
        VmSpec::from_toml(&text, Path::new("web.toml")).unwrap()
    }

    #[test]
    fn one_record_says_which_disk_a_vm_has() {
        let (_directory, journal) = Journal::temporary();
        journal.define_vm(&definition("/old")).unwrap();
        let file = |device| Some(FileId { device, inode: 7, born_ns: 0 });
        let mut of = DiskMoveRecord {
            id: "one".into(),
            vm: "web".into(),
            disk: DiskName::at(0).unwrap(),
            old: DiskFile { path: "/old".into(), file: file(1) },
            new: DiskFile { path: "/new".into(), file: None },
            is_recorded: false,
        };
        journal.begin_disk_move(&of).unwrap();
        assert_eq!(journal.disk_moves().unwrap(), [of.clone()]);
        of.new.file = file(2);
        journal.disk_move_made("one", of.new.file.unwrap()).unwrap();
        journal.record_disk_move("one", &definition("/new")).unwrap();
        of.is_recorded = true;
        assert_eq!(journal.disk_moves().unwrap(), [of]);
        assert_eq!(journal.vms().unwrap(), [definition("/new")]);
        journal.revoke_disk_move("one", &definition("/old")).unwrap();
        assert_eq!(journal.vms().unwrap(), [definition("/old")]);
        assert!(!journal.disk_moves().unwrap()[0].is_recorded);
        journal.end_disk_move("one", None).unwrap();
        assert_eq!(journal.disk_moves().unwrap(), []);
    }
}
