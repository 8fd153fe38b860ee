//! What is asked of a disk.

use crate::digest::DIGEST_BYTES;

/// What is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Read,
    Write,
    /// Between the ends of a stream only: whether what is there is what would be written, by its digest.
    Compare,
    WriteZeroes,
    Trim,
    Flush,
}

/// One request, without its data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Command {
    pub(crate) operation: Operation,
    /// What it changes is durable before it is answered (NBD's FUA).
    pub(crate) is_durable: bool,
    /// Zeroes must not become a hole (NBD's `NO_HOLE`).
    pub(crate) keeps_allocation: bool,
    pub(crate) offset: u64,
    pub(crate) length: u32,
}

impl Command {
    /// Flushes the whole disk.
    pub(crate) const FLUSH: Self = Self {
        operation: Operation::Flush,
        is_durable: false,
        keeps_allocation: false,
        offset: 0,
        length: 0,
    };

    /// Whether the disk may be another afterwards.
    pub(crate) fn modifies(&self) -> bool {
        matches!(self.operation, Operation::Write | Operation::WriteZeroes | Operation::Trim)
    }

    /// Whether the order of the two matters.
    pub(crate) fn conflicts_with(&self, other: &Self) -> bool {
        (self.modifies() || other.modifies()) && self.offset < other.end() && other.offset < self.end()
    }

    /// The first byte behind it. Saturates, so that one that was not checked is no hazard.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(u64::from(self.length))
    }

    /// What follows it on the wire.
    pub(crate) fn sent_bytes(&self) -> u32 {
        match self.operation {
            Operation::Write => self.length,
            Operation::Compare => u32::try_from(DIGEST_BYTES).expect("it is short"),
            Operation::Read | Operation::WriteZeroes | Operation::Trim | Operation::Flush => 0,
        }
    }

    /// Data that somebody holds until it is answered.
    pub(crate) fn held_bytes(&self) -> usize {
        match self.operation {
            Operation::Read | Operation::Write | Operation::Compare => self.length as usize,
            Operation::WriteZeroes | Operation::Trim | Operation::Flush => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(operation: Operation, offset: u64, length: u32) -> Command {
        Command { operation, offset, length, ..Command::FLUSH }
    }

    #[test]
    fn what_shares_a_byte_conflicts_unless_both_only_read() {
        let write = command(Operation::Write, 4096, 4096);
        assert!(write.conflicts_with(&command(Operation::Read, 8191, 1)));
        assert!(!write.conflicts_with(&command(Operation::Write, 8192, 1)));
        assert!(!write.conflicts_with(&command(Operation::Trim, 0, 4096)));
        assert!(!write.conflicts_with(&Command::FLUSH));
        let read = command(Operation::Read, 0, 8192);
        assert!(!read.conflicts_with(&read) && read.conflicts_with(&write));
    }
}
