//! This program reads and writes: by several threads, past the page cache where it can, and leaves holes where there is
//! nothing but zeroes.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::thread;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::error::DiskError;
use crate::new_file::through_proc;
use crate::pieces::{ALIGNED_BYTES, PIECE_BYTES, Pieces};
use crate::task::Task;
use crate::zero_runs::data_in;

/// Requests under way at once; each takes a piece of memory.
const THREADS: usize = 4;

/// What ends a copy.
#[derive(Debug)]
pub(crate) enum Fault {
    /// It is wanted no more.
    Cancelled,
    /// The disk that is read failed.
    Reading(io::Error),
    /// The disk that is written failed.
    Writing(io::Error),
}

/// Whether what is written to was all zeroes before, so that zeroes need not be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ground {
    Blank,
    Unknown,
}

/// Copies these pieces.
pub(crate) fn copy(
    source: &File,
    target: &File,
    pieces: Pieces<'_>,
    ground: Ground,
    task: &Task,
) -> Result<(), Fault> {
    let (from, to) = (BothWays::open(source, OFlags::RDONLY), BothWays::open(target, OFlags::WRONLY));
    by_threads(pieces, task, |piece, buffer| {
        let bytes = &mut buffer[..length(piece)];
        from.read(bytes, piece.start).map_err(Fault::Reading)?;
        task.has_read(bytes.len() as u64);
        let written = match ground {
            Ground::Blank => data_in(bytes),
            Ground::Unknown => std::iter::once(0..bytes.len()).collect(),
        };
        for range in written {
            to.write(&bytes[range.clone()], piece.start + range.start as u64).map_err(Fault::Writing)?;
            task.has_written(range.len() as u64);
        }
        Ok(())
    })
}

/// Writes zeroes.
pub(crate) fn write_zeroes(target: &File, pieces: Pieces<'_>, task: &Task) -> Result<(), Fault> {
    let to = BothWays::open(target, OFlags::WRONLY);
    by_threads(pieces, task, |piece, buffer| {
        to.write(&buffer[..length(piece)], piece.start).map_err(Fault::Writing)?;
        task.has_written(piece.end - piece.start);
        Ok(())
    })
}

fn length(piece: &Range<u64>) -> usize {
    usize::try_from(piece.end - piece.start).expect("a piece fits into memory")
}

/// Has several threads take piece after piece, until all are done or one fails.
fn by_threads(
    pieces: Pieces<'_>,
    task: &Task,
    work: impl Fn(&Range<u64>, &mut [u8]) -> Result<(), Fault> + Sync,
) -> Result<(), Fault> {
    let queue = Mutex::new(Some(pieces));
    let next = || -> Result<Option<Range<u64>>, Fault> {
        let mut queue = queue.lock().expect("no thread panics with it");
        queue.as_mut().map_or(Ok(None), Pieces::next_piece).map_err(Fault::Reading)
    };
    let run = || -> Result<(), Fault> {
        let mut memory = vec![0; PIECE_BYTES + ALIGNED_BYTES];
        let begin = memory.as_ptr().align_offset(ALIGNED_BYTES);
        while let Some(piece) = next()? {
            task.go_on().map_err(|_: DiskError| Fault::Cancelled)?;
            work(&piece, &mut memory[begin..begin + PIECE_BYTES])?;
            task.is_done(piece.end - piece.start);
        }
        Ok(())
    };
    let run_and_stop_others =
        || run().inspect_err(|_| *queue.lock().expect("no thread panics with it") = None);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(run_and_stop_others)).collect();
        let ends = threads.into_iter().map(|thread| thread.join().expect("no thread panics"));
        // Not before all have ended.
        ends.collect::<Vec<_>>().into_iter().collect()
    })
}

/// A disk, opened past the page cache too if it can be.
struct BothWays<'disk> {
    cached: &'disk File,
    direct: Option<File>,
}

impl<'disk> BothWays<'disk> {
    fn open(cached: &'disk File, access: OFlags) -> Self {
        let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
        let direct = openat(CWD, through_proc(cached), flags, Mode::empty()).ok().map(File::from);
        Self { cached, direct }
    }

    /// The part of a range that the direct way takes: all but the last bytes of a disk of odd size.
    fn direct_part(&self, length: usize, at: u64) -> Option<(&File, usize)> {
        let direct = self.direct.as_ref().filter(|_| at.is_multiple_of(ALIGNED_BYTES as u64))?;
        Some((direct, length - length % ALIGNED_BYTES)).filter(|(_, part)| *part > 0)
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        if let Some((direct, part)) = self.direct_part(bytes.len(), at)
            && is_taken(direct.read_exact_at(&mut bytes[..part], at))?
        {
            done = part;
        }
        self.cached.read_exact_at(&mut bytes[done..], at + done as u64)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        if let Some((direct, part)) = self.direct_part(bytes.len(), at)
            && is_taken(direct.write_all_at(&bytes[..part], at))?
        {
            done = part;
        }
        self.cached.write_all_at(&bytes[done..], at + done as u64)
    }
}

/// Storage with larger blocks than any that is known refuses the direct way, and not the other.
fn is_taken(done: io::Result<()>) -> io::Result<bool> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok(false),
        done => done.map(|()| true),
    }
}
