//! What the guest says of the disks that it writes.

use std::fmt;
use std::str::FromStr;

use super::{Answer, AnswerError};

/// Generations in one answer, which is a line.
pub const GENERATIONS_MAX: usize = 64;

/// What was written to the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DiskStatus {
    /// Blocks of all disks.
    pub blocks: u64,
    /// Writes that were flushed too.
    pub acknowledged_writes: u64,
    /// Writes that ended in an error.
    pub failed_writes: u64,
    /// The longest that one took, with its flush, in ms of the guest's clock, which stands still while the VM is paused.
    pub longest_write_ms: u64,
}

/// What a check of all blocks found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct DiskVerification {
    /// Blocks checked: all.
    pub blocks: u64,
    /// Blocks that hold neither what was acknowledged nor what was in flight after that.
    pub wrong: u64,
    /// Writes that ended in an error.
    pub failed_writes: u64,
    /// What the first of the wrong ones held.
    pub first_wrong: Option<BadBlock>,
}

/// What a wrong block held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BadBlock {
    /// Number of the disk.
    pub disk: usize,
    /// Number of the block.
    pub block: usize,
    /// The last generation that was acknowledged.
    pub acknowledged: u32,
    /// The last generation whose write began.
    pub tried: u32,
    /// Whether it is all zeroes.
    pub is_zero: bool,
    /// Disk, block and generation that it says it is, if it is one.
    pub found: Option<(usize, usize, u32)>,
}

/// The acknowledged generations of some blocks, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generations(pub Vec<u32>);

impl fmt::Display for DiskStatus {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, acknowledged_writes, failed_writes, longest_write_ms } = self;
        write!(
            formatter,
            "blocks={blocks} acknowledged_writes={acknowledged_writes} failed_writes={failed_writes} \
             longest_write_ms={longest_write_ms}"
        )
    }
}

impl FromStr for DiskStatus {
    type Err = AnswerError;

    fn from_str(line: &str) -> Result<Self, AnswerError> {
        let answer = Answer::parse(line)?;
        Ok(Self {
            blocks: answer.value("blocks")?,
            acknowledged_writes: answer.value("acknowledged_writes")?,
            failed_writes: answer.value("failed_writes")?,
            longest_write_ms: answer.value("longest_write_ms")?,
        })
    }
}

impl fmt::Display for DiskVerification {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { blocks, wrong, failed_writes, first_wrong } = self;
        write!(formatter, "blocks={blocks} wrong={wrong} failed_writes={failed_writes}")?;
        let Some(BadBlock { disk, block, acknowledged, tried, is_zero, found }) = first_wrong else {
            return Ok(());
        };
        write!(
            formatter,
            " wrong_disk={disk} wrong_block={block} acknowledged={acknowledged} tried={tried} is_zero={is_zero}"
        )?;
        let Some((disk, block, generation)) = found else { return Ok(()) };
        write!(formatter, " found_disk={disk} found_block={block} found_generation={generation}")
    }
}

impl FromStr for DiskVerification {
    type Err = AnswerError;

    fn from_str(line: &str) -> Result<Self, AnswerError> {
        let answer = Answer::parse(line)?;
        Ok(Self {
            blocks: answer.value("blocks")?,
            wrong: answer.value("wrong")?,
            failed_writes: answer.value("failed_writes")?,
            first_wrong: answer.bad_block()?,
        })
    }
}

impl Answer<'_> {
    fn bad_block(&self) -> Result<Option<BadBlock>, AnswerError> {
        let Some(disk) = self.optional("wrong_disk")? else { return Ok(None) };
        let found = match self.optional("found_disk")? {
            Some(disk) => Some((disk, self.value("found_block")?, self.value("found_generation")?)),
            None => None,
        };
        Ok(Some(BadBlock {
            disk,
            block: self.value("wrong_block")?,
            acknowledged: self.value("acknowledged")?,
            tried: self.value("tried")?,
            is_zero: self.value("is_zero")?,
            found,
        }))
    }
}

impl fmt::Display for Generations {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        write!(formatter, "generations={}", numbers.join(","))
    }
}

impl FromStr for Generations {
    type Err = AnswerError;

    fn from_str(line: &str) -> Result<Self, AnswerError> {
        let numbers: String = Answer::parse(line)?.value("generations")?;
        let numbers = numbers.split(',').filter(|number| !number.is_empty()).map(str::parse);
        numbers.collect::<Result<_, _>>().map(Self).map_err(|_| AnswerError::Field("generations"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_disks_is_read_back() {
        let status = DiskStatus { blocks: 9, acknowledged_writes: 8, failed_writes: 7, longest_write_ms: 6 };
        assert_eq!(status.to_string().parse(), Ok(status));
        for found in [None, Some((1, 2, 3))] {
            let bad = BadBlock { disk: 0, block: 4, acknowledged: 5, tried: 6, is_zero: false, found };
            let verification =
                DiskVerification { blocks: 9, wrong: 1, failed_writes: 0, first_wrong: Some(bad) };
            assert_eq!(verification.to_string().parse(), Ok(verification));
        }
        for generations in [Generations(vec![]), Generations(vec![u32::MAX; GENERATIONS_MAX])] {
            let line = generations.to_string();
            assert!(line.len() < super::super::LINE_BYTES_MAX);
            assert_eq!(line.parse(), Ok(generations));
        }
        assert_eq!("generations=1,x".parse::<Generations>(), Err(AnswerError::Field("generations")));
    }
}
