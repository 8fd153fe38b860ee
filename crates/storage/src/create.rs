//! Makes a disk of zeroes.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use drainpipe_engine::problem::Problem;

use crate::attempt::Attempt;
use crate::end::{Disk, DiskDestination, destination};
use crate::error::{DiskError, of_path};
use crate::in_use;
use crate::measured::{MeasuredBy, Traffic};
use crate::method::{self, End, FileSystem, Method};
use crate::new_file::NewFile;
use crate::outcome::{DiskResult, Done, HostTraffic, Unable, blame, none_can};
use crate::pieces::Pieces;
use crate::refusals;
use crate::task::{Stage, Task};
use crate::threads::{self, Fault};
use crate::traffic::{Meter, Source};
use crate::zeroes;

/// Disks have whole sectors.
const SECTOR_BYTES: u64 = 512;

/// What is to be made.
#[derive(Debug, Clone)]
pub struct CreateRequest {
    /// A file that is made, or a block device.
    pub target: PathBuf,
    /// The size of the disk; all of a block device if absent.
    pub size_bytes: Option<u64>,
    /// Have its blocks set aside now.
    pub is_preallocated: bool,
    /// Replace what is there.
    pub is_forced: bool,
}

/// Makes a disk of zeroes by the fastest method that its storage is able to.
pub fn create(request: &CreateRequest, task: &Task) -> Result<DiskResult, DiskError> {
    let destination = destination(&request.target)?;
    let size_bytes = size(request, &destination)?;
    refuse(request, &destination, size_bytes)?;
    let creating = Creating { target: &request.target, end: destination.end(), size_bytes, task };
    let methods = method::to_create(&creating.end, request.is_preallocated);
    let done = match &destination {
        DiskDestination::Device(device) => creating.by_first_able(methods, &device.file, Some(device))?,
        DiskDestination::File { replaced, .. } => creating.to_file(methods, replaced.is_some())?,
    };
    let data_bytes = if done.method == Method::Sparse { 0 } else { size_bytes };
    Ok(DiskResult::of(done, None, &request.target, (size_bytes, data_bytes)))
}

fn size(request: &CreateRequest, destination: &DiskDestination) -> Result<u64, Problem> {
    let size_bytes = match (request.size_bytes, destination) {
        (Some(bytes), _) => bytes,
        (None, DiskDestination::Device(device)) => device.size_bytes,
        (None, DiskDestination::File { .. }) => {
            return Err(Problem::bad_input("how large? say --size, as in --size 100G"));
        }
    };
    if size_bytes == 0 || !size_bytes.is_multiple_of(SECTOR_BYTES) {
        let advice = "is not the size of a disk: that is a multiple of 512 bytes";
        return Err(Problem::bad_input(format!("{size_bytes} bytes {advice}")));
    }
    Ok(size_bytes)
}

fn refuse(request: &CreateRequest, destination: &DiskDestination, size_bytes: u64) -> Result<(), Problem> {
    refusals::unless_forced(destination, request.is_forced)?;
    refusals::too_small(destination, size_bytes)?;
    if request.is_preallocated && matches!(destination, DiskDestination::File { .. }) {
        refusals::without_room(&request.target, size_bytes)?;
    }
    destination.there().map_or(Ok(()), in_use::refuse_to_lose)
}

struct Creating<'all> {
    target: &'all Path,
    end: End,
    size_bytes: u64,
    task: &'all Task,
}

impl Creating<'_> {
    fn to_file(&self, methods: &[Method], is_replacing: bool) -> Result<Done, DiskError> {
        let new = NewFile::create(self.target)?;
        let done = self.by_first_able(methods, &new.file, None)?;
        // From here on it is too late.
        self.task.go_on()?;
        new.publish(is_replacing)?;
        Ok(done)
    }

    fn by_first_able(
        &self,
        methods: &[Method],
        file: &File,
        device: Option<&Disk>,
    ) -> Result<Done, DiskError> {
        let begun = Instant::now();
        let mut unable = vec![];
        for &method in methods {
            let meter = Meter::begin(Source::Host);
            self.task.go_on()?;
            self.task.begin(method, self.size_bytes);
            let tried = self.attempt(method, file, device);
            match tried.map_err(|fault| blame(fault, self.target, self.target))? {
                Attempt::Unable(why) => unable.push(Unable { method, why }),
                Attempt::Done => {
                    self.task.enter(Stage::Flushing);
                    file.sync_all().map_err(|error| of_path("write", self.target, &error))?;
                    let host = self.traffic(method, &meter);
                    return Ok(Done { method, unable, time: begun.elapsed(), host });
                }
            }
        }
        Err(none_can(&unable).into())
    }

    fn attempt(&self, method: Method, file: &File, device: Option<&Disk>) -> Result<Attempt, Fault> {
        match method {
            Method::Sparse => {
                file.set_len(self.size_bytes).map_err(Fault::Writing)?;
                Ok(Attempt::Done)
            }
            Method::WriteZeroes => zeroes::write_zeroes(file, self.size_bytes, self.task),
            Method::Allocate => zeroes::allocate(file, self.size_bytes, self.task),
            Method::Unmap => zeroes::unmap(file, self.size_bytes, self.task),
            Method::DeviceZeroes => {
                let sysfs = device.and_then(Disk::sysfs).unwrap_or_default();
                zeroes::device_zeroes(file, &sysfs, self.size_bytes, self.task)
            }
            _ => {
                threads::write_zeroes(file, Pieces::of_all(file, self.size_bytes), self.task)?;
                Ok(Attempt::Done)
            }
        }
    }

    /// What the kernel writes in this program's stead is not counted for this program, and so not looked for there.
    fn traffic(&self, method: Method, meter: &Meter) -> HostTraffic {
        let written = |written_bytes| Traffic { read_bytes: 0, written_bytes };
        if method == Method::Sparse || method.is_by_this_program() {
            return HostTraffic::new(written(self.task.own_bytes().1), MeasuredBy::OwnCount);
        }
        let host = meter.end().filter(|_| self.end != End::File(FileSystem::Memory));
        match host {
            Some(host) => {
                HostTraffic::new(written(host.written_bytes.min(self.size_bytes)), MeasuredBy::WholeHost)
            }
            None => HostTraffic::new(written(self.size_bytes), MeasuredBy::Nothing),
        }
    }
}
