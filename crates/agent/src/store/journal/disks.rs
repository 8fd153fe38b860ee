//! The journal's records of disks that move with their VMs: those made here for VMs on their way, those that leave,
//! and those that have stayed behind.

use drainpipe_engine::storage::KeptPart;
use jiff::Timestamp;
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, Params, TransactionBehavior, params};

use super::{Journal, JournalCause, JournalError, from_json, to_json};
use drainpipe_api_types::LeftDisk;

/// What tells a file from another one that comes under its path later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    /// Its file system; of a block device, its own number.
    pub(crate) device: u64,
    /// Its number there, which a later file may have, too; 0 of a block device.
    pub(crate) inode: u64,
    /// When it was made, since 1970; 0 where the file system does not say.
    pub(crate) born_ns: i64,
}

impl FileId {
    /// A block device, whatever name leads to it. No file has the number 0.
    pub(crate) fn of_device(number: u64) -> Self {
        Self { device: number, inode: 0, born_ns: 0 }
    }

    /// Whether it is a block device.
    pub(crate) fn is_device(self) -> bool {
        self.inode == 0
    }
}

impl ToSql for FileId {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let Self { device, inode, born_ns } = self;
        Ok(format!("{device}:{inode}:{born_ns}").into())
    }
}

impl FromSql for FileId {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let mut parts = value.as_str()?.splitn(3, ':');
        let mut part = || parts.next().ok_or(FromSqlError::InvalidType);
        let number = |text: &str| text.parse().map_err(FromSqlError::other);
        let (device, inode) = (number(part()?)?, number(part()?)?);
        Ok(Self { device, inode, born_ns: part()?.parse().map_err(FromSqlError::other)? })
    }
}

/// A disk that the journal knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskFile {
    /// Where it is, if it is.
    pub(crate) path: String,
    /// The file; absent if it is not known, for example because the agent ended while it made it.
    pub(crate) file: Option<FileId>,
}

/// A disk at one end of a copy: made for a VM on its way here, or of a VM on its way from here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopiedDisk {
    /// Where it is, if it is.
    pub(crate) disk: DiskFile,
    /// What a later copy to it may go on from. Of one that was made here, once the source may write to it; of one that leaves,
    /// unless the copy is of another kind.
    pub(crate) part: Option<KeptPart>,
}

/// A disk that stays here: of a VM that has left with a copy of it, or a part of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeftFile {
    /// For people.
    pub(crate) disk: LeftDisk,
    /// Which file it is.
    pub(crate) file: Option<FileId>,
    /// What a copy to it may go on from, if one may.
    pub(crate) part: Option<KeptPart>,
    /// Until when a part of an interrupted copy is kept, in seconds since 1970. All else stays until somebody removes it.
    pub(crate) until_s: Option<u64>,
}

/// A disk that was to stay here under another name, of a VM that has left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unrenamed {
    /// The migration by which the VM left.
    pub(crate) migration: String,
    /// The VM.
    pub(crate) vm: String,
    /// Where it went.
    pub(crate) target: String,
}

impl Journal {
    /// Records that a disk is about to be made for a VM on its way here.
    pub(crate) fn make_disk(&self, migration: &str, path: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO made_disks (migration, path) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
                [migration, path],
            )?;
            Ok(())
        })
    }

    /// Records which file it is. No earlier one is there any more.
    pub(crate) fn disk_made(&self, migration: &str, path: &str, file: FileId) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            transaction
                .execute("DELETE FROM made_disks WHERE path = ?2 AND migration != ?1", [migration, path])?;
            transaction.execute(
                "UPDATE made_disks SET file = ?3 WHERE migration = ?1 AND path = ?2",
                params![migration, path, file],
            )?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Records that the source may write to it from now on, and what it is to be.
    pub(crate) fn disk_opens(
        &self,
        migration: &str,
        path: &str,
        part: &KeptPart,
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "UPDATE made_disks SET part = ?3 WHERE migration = ?1 AND path = ?2",
                params![migration, path, to_json(part)?],
            )?;
            Ok(())
        })
    }

    /// The disks that were made for a VM on its way, and are not its own for good.
    pub(crate) fn made_disks(&self, migration: &str) -> Result<Vec<CopiedDisk>, JournalError> {
        self.copied_disks(
            "SELECT path, file, part FROM made_disks WHERE migration = ?1 ORDER BY path",
            migration,
        )
    }

    fn copied_disks(&self, select: &str, migration: &str) -> Result<Vec<CopiedDisk>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(select)?;
            let rows = statement.query_map([migration], |row| {
                let disk = DiskFile { path: row.get(0)?, file: row.get(1)? };
                Ok((disk, row.get::<_, Option<String>>(2)?))
            })?;
            let copied = rows.map(|row| {
                let (disk, part) = row?;
                Ok(CopiedDisk { disk, part: part.map(|part| from_json(&part)).transpose()? })
            });
            copied.collect()
        })
    }

    fn forget_disks(&self, delete: &str, which: impl Params) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(delete, which)?;
            Ok(())
        })
    }

    /// Records that one was not made after all.
    pub(crate) fn forget_made_disk(&self, migration: &str, path: &str) -> Result<(), JournalError> {
        self.forget_disks("DELETE FROM made_disks WHERE migration = ?1 AND path = ?2", [migration, path])
    }

    /// Records that the disks which were made for a VM are its own, or are gone.
    pub(crate) fn forget_made_disks(&self, migration: &str) -> Result<(), JournalError> {
        self.forget_disks("DELETE FROM made_disks WHERE migration = ?1", [migration])
    }

    /// Records that a VM takes a copy of this disk with it, if it leaves.
    pub(crate) fn disk_leaves(&self, migration: &str, leaving: &CopiedDisk) -> Result<(), JournalError> {
        let CopiedDisk { disk, part } = leaving;
        self.run(|connection| {
            connection.execute(
                "INSERT INTO leaving_disks (migration, path, file, part) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT DO NOTHING",
                params![migration, disk.path, disk.file, part.as_ref().map(to_json).transpose()?],
            )?;
            Ok(())
        })
    }

    /// The disks that a VM takes copies of with it.
    pub(crate) fn leaving_disks(&self, migration: &str) -> Result<Vec<CopiedDisk>, JournalError> {
        self.copied_disks(
            "SELECT path, file, part FROM leaving_disks WHERE migration = ?1 ORDER BY path",
            migration,
        )
    }

    /// VMs that have left, and whose disks have not all been given other names.
    pub(crate) fn unrenamed_disks(&self) -> Result<Vec<Unrenamed>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT id, vm, target FROM migrations WHERE result IS NOT NULL AND handed_over = 1 \
                 AND id IN (SELECT migration FROM leaving_disks)",
            )?;
            let rows = statement.query_map([], |row| {
                Ok(Unrenamed { migration: row.get(0)?, vm: row.get(1)?, target: row.get(2)? })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that one of them is seen to.
    pub(crate) fn forget_leaving_disk(&self, migration: &str, path: &str) -> Result<(), JournalError> {
        self.forget_disks("DELETE FROM leaving_disks WHERE migration = ?1 AND path = ?2", [migration, path])
    }

    /// Records that the VM stays, or that its disks have been seen to.
    pub(crate) fn forget_leaving_disks(&self, migration: &str) -> Result<(), JournalError> {
        self.forget_disks("DELETE FROM leaving_disks WHERE migration = ?1", [migration])
    }

    /// Records where a disk is that has stayed behind.
    pub(crate) fn disk_left(&self, left: &LeftFile) -> Result<(), JournalError> {
        self.run(|connection| insert_left(connection, left))
    }

    /// The disks that have stayed behind, the oldest first.
    pub(crate) fn left_disks(&self) -> Result<Vec<LeftFile>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT path, was, vm, target, left_at, file, part, kept_until_s FROM left_disks \
                 ORDER BY left_at, path",
            )?;
            let rows = statement.query_map([], |row| {
                let disk = LeftDisk {
                    path: row.get(0)?,
                    was: row.get(1)?,
                    vm: row.get(2)?,
                    target: row.get(3)?,
                    left_at: row.get(4)?,
                    kept_until: None,
                    is_device: row.get::<_, Option<FileId>>(5)?.is_some_and(FileId::is_device),
                };
                Ok((disk, row.get(5)?, row.get(6)?, row.get(7)?))
            })?;
            rows.map(|row| left_file(row?)).collect()
        })
    }

    /// Records that one is gone.
    pub(crate) fn forget_left_disk(&self, path: &str) -> Result<(), JournalError> {
        self.forget_disks("DELETE FROM left_disks WHERE path = ?1", [path])
    }
}

pub(super) fn insert_left(connection: &Connection, left: &LeftFile) -> Result<(), JournalCause> {
    let LeftFile { disk: LeftDisk { path, was, vm, target, left_at, .. }, file, part, until_s } = left;
    let (part, until_s) = (part.as_ref().map(to_json).transpose()?, until_s.map(u64::cast_signed));
    connection.execute(
        "INSERT OR REPLACE INTO left_disks (path, was, vm, target, left_at, file, part, kept_until_s) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        params![path, was, vm, target, left_at, file, part, until_s],
    )?;
    Ok(())
}

/// A row, as it stands.
type LeftRow = (LeftDisk, Option<FileId>, Option<String>, Option<i64>);

fn left_file((disk, file, part, until_s): LeftRow) -> Result<LeftFile, JournalCause> {
    let part = part.map(|part| from_json(&part)).transpose()?;
    let kept_until = until_s.map(Timestamp::from_second).transpose()?.map(|until| until.to_string());
    let until_s = until_s.map(i64::cast_unsigned);
    Ok(LeftFile { disk: LeftDisk { kept_until, ..disk }, file, part, until_s })
}
