//! The rules that must hold whatever happens.

use std::collections::BTreeMap;

use super::super::Done;
use super::disk::{BLOCKS, Disk, Version};
use super::target::Data;
use crate::command::{Command, Operation};

/// A request of the client's, as the client knows it.
#[derive(Debug)]
struct Asked {
    command: Command,
    /// The newest write to each block before it.
    before: [Version; BLOCKS],
}

/// The client, and what it may rely on.
#[derive(Debug, Default)]
pub(super) struct Rules {
    newest: [Version; BLOCKS],
    acknowledged: [Version; BLOCKS],
    // The requests without an answer, by number.
    asked: BTreeMap<Version, Asked>,
}

fn blocks(command: &Command) -> std::ops::Range<usize> {
    let block = |at: u64| usize::try_from(at).expect("the disk is small");
    block(command.offset)..block(command.end())
}

impl Rules {
    pub(super) fn asked(&mut self, version: Version, command: Command) {
        self.asked.insert(version, Asked { command, before: self.newest });
        if command.modifies() {
            self.newest[blocks(&command)].fill(version);
        }
    }

    pub(super) fn unanswered(&self) -> usize {
        self.asked.len()
    }

    pub(super) fn answered(&mut self, done: &Done<Data>, disk: &Disk) -> Result<(), String> {
        let version = done.cookie;
        let Asked { command, before } =
            self.asked.remove(&version).ok_or(format!("{version} is answered twice"))?;
        match command.operation {
            Operation::Read => self.read(version, &command, &before, done.data.as_deref()),
            Operation::Flush => Self::flushed(version, &before, disk),
            Operation::Write | Operation::Compare | Operation::WriteZeroes | Operation::Trim => {
                self.wrote(version, &command, disk)
            }
        }
    }

    fn read(
        &self,
        version: Version,
        command: &Command,
        before: &[Version; BLOCKS],
        data: Option<&[Version]>,
    ) -> Result<(), String> {
        if data != Some(&before[blocks(command)]) {
            return Err(format!("{version} is read out of order: {data:?}, not {before:?}; {self:?}"));
        }
        Ok(())
    }

    fn flushed(version: Version, before: &[Version; BLOCKS], disk: &Disk) -> Result<(), String> {
        match (0..BLOCKS).find(|block| disk.durable[*block] < before[*block]) {
            Some(block) => {
                Err(format!("flush is answered, but {} is not durable; flush {version}", before[block]))
            }
            None => Ok(()),
        }
    }

    fn wrote(&mut self, version: Version, command: &Command, disk: &Disk) -> Result<(), String> {
        for block in blocks(command) {
            if disk.seen[block] < version {
                return Err(format!("acknowledged write is not at the disk: {version}, block {block}"));
            }
            if command.is_durable && disk.durable[block] < version {
                return Err(format!("durable write is answered, but it is not: {version}, block {block}"));
            }
            self.acknowledged[block] = self.acknowledged[block].max(version);
        }
        let mut earlier = self.asked.range(..version).filter(|(_, asked)| asked.command.modifies());
        match earlier.next() {
            Some((other, _)) if command.is_durable => {
                Err(format!("durable write {version} is answered before a write before it: {other}"))
            }
            _ => Ok(()),
        }
    }

    /// Checks the rules after every step.
    pub(super) fn hold(&self, disk: &Disk) -> Result<(), String> {
        match (0..BLOCKS).find(|block| disk.seen[*block] < self.acknowledged[*block]) {
            Some(block) => {
                let (seen, newer) = (disk.seen[block], self.acknowledged[block]);
                Err(format!("an older write came after a newer one: {seen} after {newer}, block {block}"))
            }
            None => Ok(()),
        }
    }

    /// Checks the rules when everything is answered.
    pub(super) fn hold_at_end(&self, disk: &Disk) -> Result<(), String> {
        if disk.seen == self.newest { Ok(()) } else { Err(format!("order is lost: {disk:?}, {self:?}")) }
    }
}
