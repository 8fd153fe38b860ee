//! What the journal knows of disks that move with their VMs: those made here for VMs on their way, those that leave, and
//! those that have stayed behind.

use rusqlite::params;

use super::{Journal, JournalError};
use crate::api_types::LeftDisk;

/// What tells a file from another one that comes under its path later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    /// Its file system.
    pub(crate) device: u64,
    /// Its number there.
    pub(crate) inode: u64,
}

/// A disk that was made here for a VM on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MadeDisk {
    /// Where it is, if it is.
    pub(crate) path: String,
    /// Which file it is; absent where the agent ended as it made it.
    pub(crate) file: Option<FileId>,
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

    /// Records which file it is.
    pub(crate) fn disk_made(&self, migration: &str, path: &str, file: FileId) -> Result<(), JournalError> {
        let FileId { device, inode } = file;
        self.run(|connection| {
            connection.execute(
                "UPDATE made_disks SET device = ?3, inode = ?4 WHERE migration = ?1 AND path = ?2",
                params![migration, path, device.cast_signed(), inode.cast_signed()],
            )?;
            Ok(())
        })
    }

    /// The disks that were made for a VM on its way, and are not its own for good.
    pub(crate) fn made_disks(&self, migration: &str) -> Result<Vec<MadeDisk>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT path, device, inode FROM made_disks WHERE migration = ?1")?;
            let rows = statement.query_map([migration], |row| {
                let file: (Option<i64>, Option<i64>) = (row.get(1)?, row.get(2)?);
                let file = file.0.zip(file.1).map(|(device, inode)| FileId {
                    device: device.cast_unsigned(),
                    inode: inode.cast_unsigned(),
                });
                Ok(MadeDisk { path: row.get(0)?, file })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that one was not made after all.
    pub(crate) fn forget_made_disk(&self, migration: &str, path: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection
                .execute("DELETE FROM made_disks WHERE migration = ?1 AND path = ?2", [migration, path])?;
            Ok(())
        })
    }

    /// Records that the disks which were made for a VM are its own, or are gone.
    pub(crate) fn forget_made_disks(&self, migration: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("DELETE FROM made_disks WHERE migration = ?1", [migration])?;
            Ok(())
        })
    }

    /// Records that a VM takes a copy of this disk with it, if it leaves.
    pub(crate) fn disk_leaves(&self, migration: &str, path: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "INSERT INTO leaving_disks (migration, path) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
                [migration, path],
            )?;
            Ok(())
        })
    }

    /// The disks of which a VM takes copies with it.
    pub(crate) fn leaving_disks(&self, migration: &str) -> Result<Vec<String>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT path FROM leaving_disks WHERE migration = ?1 ORDER BY path")?;
            let rows = statement.query_map([migration], |row| row.get(0))?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that the VM stays, or that its disks have been seen to.
    pub(crate) fn forget_leaving_disks(&self, migration: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("DELETE FROM leaving_disks WHERE migration = ?1", [migration])?;
            Ok(())
        })
    }

    /// Records, before it is renamed, where a disk will be that stays behind.
    pub(crate) fn disk_left(&self, disk: &LeftDisk) -> Result<(), JournalError> {
        let LeftDisk { path, was, vm, target, left_at } = disk;
        self.run(|connection| {
            connection.execute(
                "INSERT INTO left_disks (path, was, vm, target, left_at) VALUES (?1, ?2, ?3, ?4, ?5) \
                 ON CONFLICT DO NOTHING",
                [path, was, vm, target, left_at],
            )?;
            Ok(())
        })
    }

    /// The disks that have stayed behind, the oldest first.
    pub(crate) fn left_disks(&self) -> Result<Vec<LeftDisk>, JournalError> {
        self.run(|connection| {
            let mut statement = connection
                .prepare("SELECT path, was, vm, target, left_at FROM left_disks ORDER BY left_at, path")?;
            let rows = statement.query_map([], |row| {
                Ok(LeftDisk {
                    path: row.get(0)?,
                    was: row.get(1)?,
                    vm: row.get(2)?,
                    target: row.get(3)?,
                    left_at: row.get(4)?,
                })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that one is gone.
    pub(crate) fn forget_left_disk(&self, path: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("DELETE FROM left_disks WHERE path = ?1", [path])?;
            Ok(())
        })
    }
}
