//! The content of the disks that are measured.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use drainpipe_guest::page::{Content, PAGE_BYTES, PAGE_WORDS};

/// The size of a piece; pieces of each kind take turns.
const PIECE_BYTES: u64 = 64 << 20;

/// How much is read or written at once.
const CHUNK_BYTES: usize = 1 << 20;

/// Writes random data, text, and holes. Returns how many bytes are stored.
pub(super) fn write_mixed(disk: &Path, size_bytes: u64) -> u64 {
    write(disk, size_bytes, |piece| match piece % 3 {
        0 => Some(random),
        1 => Some(text),
        _ => None,
    })
}

/// Returns how many bytes are stored: all.
pub(super) fn write_random(disk: &Path, size_bytes: u64) -> u64 {
    write(disk, size_bytes, |_| Some(random))
}

/// The mebibyte with this number.
type Filled = fn(u64) -> Vec<u8>;

fn write(disk: &Path, size_bytes: u64, of: impl Fn(u64) -> Option<Filled>) -> u64 {
    let file = File::create(disk).unwrap();
    file.set_len(size_bytes).unwrap();
    let mut stored_bytes = 0;
    for at in (0..size_bytes).step_by(CHUNK_BYTES) {
        if let Some(filled) = of(at / PIECE_BYTES) {
            file.write_all_at(&filled(at), at).unwrap();
            stored_bytes += CHUNK_BYTES as u64;
        }
    }
    file.sync_all().unwrap();
    stored_bytes
}

fn random(number: u64) -> Vec<u8> {
    pages(number, |key| Content::Random { key })
}

fn text(number: u64) -> Vec<u8> {
    pages(number, |key| Content::Text { key })
}

fn pages(number: u64, of: fn(u64) -> Content) -> Vec<u8> {
    let page = |key| {
        let mut words = [0; PAGE_WORDS];
        of(key).write(&mut words);
        words.into_iter().flat_map(u64::to_le_bytes)
    };
    (number..number + (CHUNK_BYTES / PAGE_BYTES) as u64).flat_map(page).collect()
}

/// Compares byte by byte.
#[track_caller]
pub(super) fn assert_same(one: &Path, other: &Path) {
    let [one_file, other_file] = [one, other].map(|path| File::open(path).unwrap());
    let size_bytes = one_file.metadata().unwrap().len();
    assert_eq!(size_bytes, other_file.metadata().unwrap().len());
    let [mut of_one, mut of_other] = [0, 1].map(|_| vec![0; CHUNK_BYTES]);
    for at in (0..size_bytes).step_by(CHUNK_BYTES) {
        one_file.read_exact_at(&mut of_one, at).unwrap();
        other_file.read_exact_at(&mut of_other, at).unwrap();
        assert!(of_one == of_other, "{} and {} differ at {at}", one.display(), other.display());
    }
}
