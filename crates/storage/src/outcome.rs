//! What has become of a disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use serde::Serialize;

use crate::end::Disk;
use crate::error::{DiskError, of_path};
use crate::measured::{MeasuredBy, MovedBy, Traffic};
use crate::method::Method;
use crate::threads::Fault;

/// A disk that was made or copied, by what method, and who moved its bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiskResult {
    /// What was copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<PathBuf>,
    /// The disk that is there now.
    pub target: PathBuf,
    /// How it was done.
    pub method: Method,
    /// Methods that were tried before, and why they could not.
    pub unable: Vec<Unable>,
    /// From the first method's beginning until the storage had all of it for good.
    pub seconds: f64,
    /// Size of the disk.
    pub disk_bytes: u64,
    /// The part of it that was to be moved: all but the holes.
    pub data_bytes: u64,
    /// What went through this host.
    #[serde(flatten)]
    pub host: HostTraffic,
    /// What moved the bytes, judged by that.
    pub moved_by: MovedBy,
}

/// A method that could not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unable {
    /// Which.
    pub method: Method,
    /// In words.
    pub why: String,
}

/// What went through this host's memory, and who says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct HostTraffic {
    /// From the storage.
    pub host_read_bytes: u64,
    /// To the storage.
    pub host_written_bytes: u64,
    /// Which counters said so.
    pub measured_by: MeasuredBy,
}

impl HostTraffic {
    pub(crate) fn new(traffic: Traffic, measured_by: MeasuredBy) -> Self {
        Self { host_read_bytes: traffic.read_bytes, host_written_bytes: traffic.written_bytes, measured_by }
    }

    /// What moved this many bytes by this method.
    pub(crate) fn moved_by(self, method: Method, data_bytes: u64) -> MovedBy {
        let traffic = Traffic { read_bytes: self.host_read_bytes, written_bytes: self.host_written_bytes };
        if method.is_by_this_program() { MovedBy::Host } else { MovedBy::of(traffic, data_bytes) }
    }
}

impl DiskResult {
    /// Without what is not known before it is done.
    pub(crate) fn of(done: Done, source: Option<&Disk>, target: &Path, sizes: (u64, u64)) -> Self {
        let (disk_bytes, data_bytes) = sizes;
        Self {
            source: source.map(|source| source.path.clone()),
            target: target.into(),
            method: done.method,
            unable: done.unable,
            seconds: done.time.as_secs_f64(),
            disk_bytes,
            data_bytes,
            host: done.host,
            moved_by: done.host.moved_by(done.method, data_bytes),
        }
    }
}

/// What was done, and how it went.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) method: Method,
    pub(crate) unable: Vec<Unable>,
    pub(crate) time: Duration,
    pub(crate) host: HostTraffic,
}

/// All methods were unable; there is always a last one that is not, unless a single one was asked for.
pub(crate) fn none_can(unable: &[Unable]) -> Problem {
    let whys: Vec<String> = unable.iter().map(|one| format!("{}: {}", one.method, one.why)).collect();
    Problem::refused(format!("it cannot be done as asked ({}); leave --method out", whys.join("; ")))
}

/// Which side failed.
pub(crate) fn blame(fault: Fault, source: &Path, target: &Path) -> DiskError {
    match fault {
        Fault::Cancelled => DiskError::Cancelled,
        Fault::Reading(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => changed(source).into(),
        Fault::Reading(error) => of_path("read", source, &error).into(),
        Fault::Writing(error) => of_path("write", target, &error).into(),
    }
}

/// A copy of what changed is a copy of no single moment.
pub(crate) fn changed(source: &Path) -> Problem {
    Problem::failed(format!(
        "{} changed while it was copied, so the copy was given up; stop what writes to it",
        source.display()
    ))
}
