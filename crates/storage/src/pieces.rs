//! What is to be copied of a disk, piece by piece, without its holes.

use std::fs::File;
use std::io;
use std::ops::Range;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

/// What is copied at once.
pub(crate) const PIECE_BYTES: usize = 4 << 20;

/// To what direct I/O is aligned: no device has larger blocks.
pub(crate) const ALIGNED_BYTES: usize = 4096;

const PIECE: u64 = PIECE_BYTES as u64;
const ALIGNED: u64 = ALIGNED_BYTES as u64;

/// The pieces of a disk that hold data, in order. Reads nothing.
#[derive(Debug)]
pub(crate) struct Pieces<'disk> {
    disk: &'disk File,
    size_bytes: u64,
    /// Up to here all is handed out.
    at: u64,
    /// Up to here there is data.
    data_end: u64,
}

impl<'disk> Pieces<'disk> {
    /// Without the holes of a file that knows them.
    pub(crate) fn of_data(disk: &'disk File, size_bytes: u64) -> Self {
        Self { disk, size_bytes, at: 0, data_end: 0 }
    }

    /// All of a disk.
    pub(crate) fn of_all(disk: &'disk File, size_bytes: u64) -> Self {
        Self { disk, size_bytes, at: 0, data_end: size_bytes }
    }

    /// The next piece.
    pub(crate) fn next_piece(&mut self) -> io::Result<Option<Range<u64>>> {
        if self.at >= self.data_end && !self.find_data()? {
            return Ok(None);
        }
        let piece = piece_from(self.at, self.data_end);
        self.at = piece.end;
        Ok(Some(piece))
    }

    /// Goes on to the next data; a file system that knows no holes has data only.
    fn find_data(&mut self) -> io::Result<bool> {
        if self.at >= self.size_bytes {
            return Ok(false);
        }
        match seek(self.disk, SeekFrom::Data(self.at)) {
            Ok(begin) => {
                let end = seek(self.disk, SeekFrom::Hole(begin))?;
                let data = aligned(begin..end, self.size_bytes);
                (self.at, self.data_end) = (self.at.max(data.start), data.end);
            }
            Err(Errno::NXIO) => self.at = self.size_bytes,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.data_end = self.size_bytes,
            Err(error) => return Err(error.into()),
        }
        Ok(self.at < self.data_end)
    }
}

/// How many bytes of a file hold data.
pub(crate) fn data_bytes(disk: &File, size_bytes: u64) -> io::Result<u64> {
    let mut pieces = Pieces::of_data(disk, size_bytes);
    let mut bytes = 0;
    while let Some(piece) = pieces.next_piece()? {
        bytes += piece.end - piece.start;
    }
    Ok(bytes)
}

/// A range that direct I/O can take, but for the end of the disk.
fn aligned(data: Range<u64>, size_bytes: u64) -> Range<u64> {
    let begin = data.start - data.start % ALIGNED;
    let end = data.end.checked_next_multiple_of(ALIGNED).unwrap_or(u64::MAX);
    begin..end.min(size_bytes)
}

/// Pieces end at multiples of their size.
fn piece_from(at: u64, data_end: u64) -> Range<u64> {
    let next = (at / PIECE + 1).saturating_mul(PIECE);
    at..next.min(data_end)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    fn all(mut pieces: Pieces<'_>) -> Vec<Range<u64>> {
        std::iter::from_fn(|| pieces.next_piece().unwrap()).collect()
    }

    #[test]
    fn holes_are_left_out() {
        let file = tempfile::tempfile().unwrap();
        let size = 64 << 20;
        file.set_len(size + 5).unwrap();
        file.write_all_at(&[1; 10], 9 << 20).unwrap();
        file.write_all_at(&[1; 5], size).unwrap();
        let pieces = all(Pieces::of_data(&file, size + 5));
        assert!(pieces.iter().any(|piece| piece.contains(&(9 << 20))), "{pieces:?}");
        assert_eq!(pieces.last().unwrap().end, size + 5);
        assert!(data_bytes(&file, size + 5).unwrap() < 1 << 20);
    }

    #[test]
    fn an_empty_disk_has_no_pieces() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(all(Pieces::of_data(&file, 0)), []);
        assert_eq!(all(Pieces::of_all(&file, 0)), []);
    }

    proptest! {
        #[test]
        fn all_of_a_disk_is_handed_out_once(size in 0_u64..20 << 20) {
            let file = tempfile::tempfile().unwrap();
            let mut at = 0;
            for piece in all(Pieces::of_all(&file, size)) {
                prop_assert!(piece.start == at && piece.end > at && piece.end - at <= PIECE);
                at = piece.end;
            }
            prop_assert_eq!(at, size);
        }

        #[test]
        fn what_is_aligned_holds_the_data(begin in 0_u64..1 << 40, bytes in 1_u64..1 << 30, more in 0_u64..1 << 30) {
            let (data, size) = (begin..begin + bytes, begin + bytes + more);
            let aligned = aligned(data.clone(), size);
            prop_assert!(aligned.start <= data.start && aligned.end >= data.end && aligned.end <= size);
            prop_assert!(aligned.start.is_multiple_of(ALIGNED));
            prop_assert!(aligned.end.is_multiple_of(ALIGNED) || aligned.end == size);
        }
    }
}
