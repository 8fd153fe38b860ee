//! The methods to try, and their order, by what both ends are. Pure.

use std::fmt;

use serde::Serialize;

/// A way to get the bytes of a disk to their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The file system has both files share their blocks (`FICLONE`).
    Reflink,
    /// The kernel, or the file server, copies (`copy_file_range`).
    CopyRange,
    /// One SCSI device copies to the other (EXTENDED COPY).
    ExtendedCopy,
    /// This program reads and writes, by several threads.
    Threads,
    /// The file has its size, and no block yet.
    Sparse,
    /// The storage writes zeroes (`FALLOC_FL_WRITE_ZEROES`, Linux 6.17).
    WriteZeroes,
    /// The file system sets blocks aside that read as zeroes (`fallocate`).
    Allocate,
    /// The device frees its blocks, which read as zeroes then (UNMAP and the like).
    Unmap,
    /// The device writes zeroes (WRITE SAME and the like).
    DeviceZeroes,
    /// This program writes zeroes, by several threads.
    ZeroesByThreads,
}

impl Method {
    /// Those that copy, the best first.
    pub const COPYING: [Self; 4] = [Self::Reflink, Self::ExtendedCopy, Self::CopyRange, Self::Threads];

    /// As it is written on the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reflink => "reflink",
            Self::CopyRange => "copy_range",
            Self::ExtendedCopy => "extended_copy",
            Self::Threads => "threads",
            Self::Sparse => "sparse",
            Self::WriteZeroes => "write_zeroes",
            Self::Allocate => "allocate",
            Self::Unmap => "unmap",
            Self::DeviceZeroes => "device_zeroes",
            Self::ZeroesByThreads => "zeroes_by_threads",
        }
    }

    /// Whether this program itself moves every byte.
    pub fn is_by_this_program(self) -> bool {
        matches!(self, Self::Threads | Self::ZeroesByThreads)
    }

    /// Its description, for people: "copied by …".
    pub fn words(self) -> &'static str {
        match self {
            Self::Reflink => "reflink: both share their blocks",
            Self::CopyRange => "copy_file_range",
            Self::ExtendedCopy => "SCSI EXTENDED COPY",
            Self::Threads => "reading and writing",
            Self::Sparse => "a sparse file: blocks come as they are written",
            Self::WriteZeroes => "the storage, which wrote the zeroes",
            Self::Allocate => "fallocate: blocks are set aside, and read as zeroes",
            Self::Unmap => "unmapping: the device's blocks read as zeroes",
            Self::DeviceZeroes => "the device, which wrote the zeroes",
            Self::ZeroesByThreads => "writing zeroes",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl std::str::FromStr for Method {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::COPYING.into_iter().find(|method| method.name() == name);
        found.ok_or_else(|| format!("`{name}` is none of {}", Self::COPYING.map(Self::name).join(", ")))
    }
}

/// File systems, as far as they differ in what they can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileSystem {
    /// Files may share blocks: XFS, Btrfs, `OCFS2`, `Bcachefs`.
    Sharing,
    /// A server keeps the files, and may copy them: NFS, CIFS, Ceph.
    Remote,
    /// Files are in memory: the kernel counts nothing that is read or written.
    Memory,
    /// Any other: ext4 for one.
    Plain,
}

/// What a disk is, or is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// A file on such a file system.
    File(FileSystem),
    /// A block device, and the SCSI target that it is a unit of.
    Device {
        /// Host, channel and target, as sysfs has them.
        scsi_target: Option<String>,
    },
}

/// How to copy between these: each method is tried once the one before is found to be unable. The last never is.
pub fn to_copy(source: &End, target: &End) -> Vec<Method> {
    Method::COPYING.into_iter().filter(|method| may_copy(*method, source, target)).collect()
}

fn may_copy(method: Method, source: &End, target: &End) -> bool {
    match (method, source, target) {
        (Method::Threads, ..) => true,
        // For any other, the kernel alone knows whether it can; asking costs nothing.
        (Method::Reflink, End::File(from), End::File(to)) => from == to && *from != FileSystem::Memory,
        // Elsewhere it is a copy by the kernel, one thread of it: no offload.
        (Method::CopyRange, End::File(from), End::File(to)) => from == to && *from == FileSystem::Remote,
        (Method::ExtendedCopy, End::Device { scsi_target: Some(from) }, End::Device { scsi_target: to }) => {
            Some(from) == to.as_ref()
        }
        _ => false,
    }
}

/// How to make a disk of zeroes, likewise.
pub fn to_create(target: &End, is_preallocated: bool) -> &'static [Method] {
    match (target, is_preallocated) {
        (End::File(_), false) => &[Method::Sparse],
        (End::File(_), true) => &[Method::WriteZeroes, Method::Allocate, Method::ZeroesByThreads],
        (End::Device { .. }, false) => {
            &[Method::Unmap, Method::WriteZeroes, Method::DeviceZeroes, Method::ZeroesByThreads]
        }
        (End::Device { .. }, true) => &[Method::WriteZeroes, Method::DeviceZeroes, Method::ZeroesByThreads],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARING: End = End::File(FileSystem::Sharing);
    const REMOTE: End = End::File(FileSystem::Remote);
    const MEMORY: End = End::File(FileSystem::Memory);
    const PLAIN: End = End::File(FileSystem::Plain);

    fn unit(target: Option<&str>) -> End {
        End::Device { scsi_target: target.map(Into::into) }
    }

    #[test]
    fn what_is_tried_follows_from_both_ends() {
        use Method::{CopyRange, ExtendedCopy, Reflink, Threads};
        let cases: [(End, End, &[Method]); 10] = [
            (SHARING, SHARING, &[Reflink, Threads]),
            (REMOTE, REMOTE, &[Reflink, CopyRange, Threads]),
            (PLAIN, PLAIN, &[Reflink, Threads]),
            (MEMORY, MEMORY, &[Threads]),
            (SHARING, PLAIN, &[Threads]),
            (SHARING, unit(None), &[Threads]),
            (unit(Some("2:0:0")), SHARING, &[Threads]),
            (unit(None), unit(None), &[Threads]),
            (unit(Some("2:0:0")), unit(Some("2:0:0")), &[ExtendedCopy, Threads]),
            (unit(Some("2:0:0")), unit(Some("2:0:1")), &[Threads]),
        ];
        for (source, target, methods) in cases {
            assert_eq!(to_copy(&source, &target), methods, "{source:?} to {target:?}");
        }
    }

    #[test]
    fn there_is_always_a_last_resort_that_writes_every_byte() {
        let ends = [SHARING, REMOTE, MEMORY, PLAIN, unit(None), unit(Some("2:0:0"))];
        for end in &ends {
            for other in &ends {
                assert_eq!(to_copy(end, other).last(), Some(&Method::Threads));
            }
            assert_eq!(to_create(end, true).last(), Some(&Method::ZeroesByThreads));
        }
        assert_eq!(to_create(&unit(None), false).last(), Some(&Method::ZeroesByThreads));
    }

    #[test]
    fn a_method_is_read_as_it_is_written() {
        for method in Method::COPYING {
            assert_eq!(method.name().parse(), Ok(method));
        }
        assert!("dd".parse::<Method>().is_err());
    }
}
