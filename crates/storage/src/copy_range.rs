//! The kernel copies, or has the file server copy.

use std::fs::File;
use std::ops::Range;

use rustix::fs::copy_file_range;

use crate::attempt::{Attempt, unable};
use crate::error::DiskError;
use crate::pieces::Pieces;
use crate::task::Task;
use crate::threads::Fault;

/// Copies what is data, piece by piece.
pub(crate) fn copy_range(
    source: &File,
    target: &File,
    mut pieces: Pieces<'_>,
    task: &Task,
) -> Result<Attempt, Fault> {
    while let Some(piece) = pieces.next_piece().map_err(Fault::Reading)? {
        if let Attempt::Unable(why) = copy_piece(source, target, piece, task)? {
            return Ok(Attempt::Unable(why));
        }
    }
    Ok(Attempt::Done)
}

fn copy_piece(source: &File, target: &File, piece: Range<u64>, task: &Task) -> Result<Attempt, Fault> {
    let (mut from, mut to) = (piece.start, piece.start);
    while from < piece.end {
        task.go_on().map_err(|_: DiskError| Fault::Cancelled)?;
        let wanted = usize::try_from(piece.end - from).expect("a piece fits into memory");
        match copy_file_range(source, Some(&mut from), target, Some(&mut to), wanted) {
            Ok(0) => return Err(Fault::Reading(std::io::ErrorKind::UnexpectedEof.into())),
            Ok(copied) => task.is_done(copied as u64),
            Err(error) => return unable(error.into()).map_err(Fault::Writing),
        }
    }
    Ok(Attempt::Done)
}
