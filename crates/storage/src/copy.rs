//! Copies a disk.

use std::fs::{File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Instant;

use drainpipe_engine::problem::Problem;

use crate::attempt::Attempt;
use crate::copy_range::copy_range;
use crate::end::{Disk, DiskDestination, destination, source};
use crate::error::{DiskError, of_path};
use crate::extended_copy::extended_copy;
use crate::in_use;
use crate::measured::{MeasuredBy, Traffic};
use crate::method::{self, End, FileSystem, Method};
use crate::new_file::NewFile;
use crate::outcome::{DiskResult, Done, HostTraffic, Unable, blame, changed, none_can};
use crate::pieces::{Pieces, data_bytes};
use crate::reflink::reflink;
use crate::refusals;
use crate::task::{Stage, Task};
use crate::threads::{self, Fault, Ground};
use crate::traffic::{Meter, Source, nfs_mount_of};
use crate::zeroes;

/// What is to be copied, and where to.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// An image or a block device.
    pub source: PathBuf,
    /// A file that is made, or a block device.
    pub target: PathBuf,
    /// Replace what is there.
    pub is_forced: bool,
    /// This method alone, and not the best that can be had.
    pub method: Option<Method>,
}

/// Copies a disk by the best method that its storage is able to. The target has all of it at the end, or, if it is a
/// file, was never there.
pub fn copy(request: &CopyRequest, task: &Task) -> Result<DiskResult, DiskError> {
    let from = source(&request.source)?;
    let to = destination(&request.target)?;
    refuse(&from, &to, request)?;
    let data_bytes = bytes_to_move(&from)?;
    let copying = Copying { from: &from, to: to.end(), target: &request.target, data_bytes, task };
    let methods =
        request.method.map_or_else(|| method::to_copy(&from.end, &copying.to), |method| vec![method]);
    let done = match &to {
        DiskDestination::Device(device) => copying.to_device(&methods, device)?,
        DiskDestination::File { replaced, .. } => copying.to_file(&methods, replaced.is_some())?,
    };
    Ok(DiskResult::of(done, Some(&from), &request.target, (from.size_bytes, data_bytes)))
}

fn bytes_to_move(disk: &Disk) -> Result<u64, Problem> {
    if disk.is_device() {
        return Ok(disk.size_bytes);
    }
    data_bytes(&disk.file, disk.size_bytes).map_err(|error| of_path("read", &disk.path, &error))
}

fn refuse(from: &Disk, to: &DiskDestination, request: &CopyRequest) -> Result<(), Problem> {
    refusals::the_same(from, to)?;
    refusals::unless_forced(to, request.is_forced)?;
    refusals::too_small(to, from.size_bytes)?;
    refusals::torn_image(from, &request.target)?;
    in_use::hold_still(from)?;
    to.there().map_or(Ok(()), in_use::refuse_to_lose)
}

/// Where the bytes go.
struct Onto<'disk> {
    file: &'disk File,
    device: Option<&'disk Disk>,
}

struct Copying<'all> {
    from: &'all Disk,
    to: End,
    target: &'all Path,
    data_bytes: u64,
    task: &'all Task,
}

impl Copying<'_> {
    fn to_device(&self, methods: &[Method], device: &Disk) -> Result<Done, DiskError> {
        self.by_first_able(methods, &Onto { file: &device.file, device: Some(device) })
    }

    fn to_file(&self, methods: &[Method], is_replacing: bool) -> Result<Done, DiskError> {
        let new = NewFile::create(self.target)?;
        self.give_rights(&new.file)?;
        let done = self.by_first_able(methods, &Onto { file: &new.file, device: None })?;
        self.refuse_if_changed()?;
        // From here on it is too late.
        self.task.go_on()?;
        new.publish(is_replacing)?;
        Ok(done)
    }

    /// Users who may read the one may read the other, and nobody else.
    fn give_rights(&self, new: &File) -> Result<(), Problem> {
        if self.from.is_device() {
            return Ok(());
        }
        let metadata = &self.from.metadata;
        // Root may. What others copy is their own, and their group is not the one that the disk was for.
        let is_given = fchown(new, Some(metadata.uid()), Some(metadata.gid())).is_ok();
        let mode = metadata.mode() & if is_given { 0o777 } else { 0o707 };
        new.set_permissions(Permissions::from_mode(mode))
            .map_err(|error| of_path("set the permissions of", self.target, &error))
    }

    fn by_first_able(&self, methods: &[Method], onto: &Onto<'_>) -> Result<Done, DiskError> {
        let begun = Instant::now();
        let mut unable = vec![];
        for &method in methods {
            let (meter, measured_by) = self.meter(method, onto);
            self.task.go_on()?;
            self.refuse_without_room(method, onto)?;
            self.task.begin(method, self.data_bytes);
            match self.attempt(method, onto)? {
                Attempt::Unable(why) => unable.push(Unable { method, why }),
                Attempt::Done => {
                    self.flush(onto.file)?;
                    let host = self.traffic(&meter, measured_by);
                    return Ok(Done { method, unable, time: begun.elapsed(), host });
                }
            }
        }
        Err(none_can(&unable).into())
    }

    fn attempt(&self, method: Method, onto: &Onto<'_>) -> Result<Attempt, DiskError> {
        let tried = match method {
            Method::Reflink => reflink(&self.from.file, onto.file).map_err(Fault::Writing),
            Method::ExtendedCopy => self.by_device(onto),
            Method::CopyRange => self.by_range(onto),
            _ => self.by_threads(onto),
        };
        tried.map_err(|fault| blame(fault, &self.from.path, self.target))
    }

    fn by_device(&self, onto: &Onto<'_>) -> Result<Attempt, Fault> {
        match onto.device.filter(|_| self.from.is_device()) {
            Some(device) => extended_copy(self.from, device, self.task),
            None => Ok(Attempt::Unable("they are not both SCSI devices".into())),
        }
    }

    fn by_range(&self, onto: &Onto<'_>) -> Result<Attempt, Fault> {
        if self.from.is_device() || onto.device.is_some() {
            return Ok(Attempt::Unable("they are not both files".into()));
        }
        self.set_size(onto)?;
        copy_range(&self.from.file, onto.file, self.pieces(), self.task)
    }

    fn by_threads(&self, onto: &Onto<'_>) -> Result<Attempt, Fault> {
        self.set_size(onto)?;
        let ground = self.ground(onto)?;
        let pieces = match ground {
            Ground::Blank => self.pieces(),
            Ground::Unknown => Pieces::of_all(&self.from.file, self.from.size_bytes),
        };
        threads::copy(&self.from.file, onto.file, pieces, ground, self.task)?;
        Ok(Attempt::Done)
    }

    fn pieces(&self) -> Pieces<'_> {
        let (disk, size_bytes) = (&self.from.file, self.from.size_bytes);
        if self.from.is_device() {
            Pieces::of_all(disk, size_bytes)
        } else {
            Pieces::of_data(disk, size_bytes)
        }
    }

    /// A new file that shares no blocks needs room for its own.
    fn refuse_without_room(&self, method: Method, onto: &Onto<'_>) -> Result<(), Problem> {
        if method == Method::Reflink || onto.device.is_some() {
            return Ok(());
        }
        refusals::without_room(self.target, self.data_bytes)
    }

    /// Sets the size of a new file.
    fn set_size(&self, onto: &Onto<'_>) -> Result<(), Fault> {
        if onto.device.is_some() {
            return Ok(());
        }
        onto.file.set_len(self.from.size_bytes).map_err(Fault::Writing)
    }

    /// A new file is all zeroes, and so is what a device has freed, if it promises that.
    fn ground(&self, onto: &Onto<'_>) -> Result<Ground, Fault> {
        if onto.device.is_none() {
            return Ok(Ground::Blank);
        }
        let freed = zeroes::unmap(onto.file, self.from.size_bytes, &Task::default())?;
        Ok(if freed == Attempt::Done { Ground::Blank } else { Ground::Unknown })
    }

    fn flush(&self, file: &File) -> Result<(), DiskError> {
        self.task.enter(Stage::Flushing);
        file.sync_all().map_err(|error| of_path("write", self.target, &error))?;
        Ok(())
    }

    fn refuse_if_changed(&self) -> Result<(), Problem> {
        let (before, after) = (&self.from.metadata, self.from.file.metadata());
        let after = after.map_err(|error| of_path("look at", &self.from.path, &error))?;
        let is_same = before.len() == after.len() && before.modified().ok() == after.modified().ok();
        if is_same || self.from.is_device() { Ok(()) } else { Err(changed(&self.from.path)) }
    }

    /// The counter that shows how much goes through this host, by this method.
    fn meter(&self, method: Method, onto: &Onto<'_>) -> (Meter, MeasuredBy) {
        let devices = || {
            let both = [self.from.sysfs(), onto.device.and_then(Disk::sysfs)];
            Source::Devices(both.into_iter().flatten().collect())
        };
        let (source, measured_by) = match (method, &self.to) {
            (Method::Threads, _) => (Source::Process, MeasuredBy::OwnCount),
            (Method::ExtendedCopy, _) => (devices(), MeasuredBy::Devices),
            (Method::CopyRange, End::File(FileSystem::Memory)) => (Source::Process, MeasuredBy::Nothing),
            _ => match nfs_mount_of(&self.from.path) {
                Some(mount) => (Source::NfsMount(mount), MeasuredBy::NfsMount),
                None => (Source::Process, MeasuredBy::ProcessIo),
            },
        };
        (Meter::begin(source), measured_by)
    }

    /// Where nothing counts, it is not taken for nothing.
    fn traffic(&self, meter: &Meter, measured_by: MeasuredBy) -> HostTraffic {
        let all = Traffic { read_bytes: self.data_bytes, written_bytes: self.data_bytes };
        if measured_by == MeasuredBy::OwnCount {
            let (read_bytes, written_bytes) = self.task.own_bytes();
            return HostTraffic::new(Traffic { read_bytes, written_bytes }, measured_by);
        }
        match meter.end().filter(|_| measured_by != MeasuredBy::Nothing) {
            Some(traffic) => HostTraffic::new(traffic, measured_by),
            None => HostTraffic::new(all, MeasuredBy::Nothing),
        }
    }
}
