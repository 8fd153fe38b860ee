//! The files that VMs name: whether VMs may use them on this host, and what is there.
//!
//! ```text
//! opening   from a path to a descriptor, through nothing but what is allowed
//! images    the files that an image has QEMU open
//! making    disks that this host makes itself
//! devices   block devices that it overwrites
//! identity  what tells one disk from another
//! ```
//!
//! The storage may be gone, and then a look at it does not return. So each look has its own thread, with a deadline,
//! and only one at a time hangs on each path.

mod devices;
mod identity;
mod images;
mod making;
mod opening;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::check::vm::FileIdentity;
use drainpipe_engine::host::vm_resources::{AllowedPath, NotAllowed, VmResources};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskCopy, DiskImage, FileRoom};
use drainpipe_hypervisor::spec::{DiskFormat, VmSpec};
use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tracing::warn;

pub(crate) use self::devices::device_at;
use self::making::CannotMake;
pub(crate) use self::making::Room;
use self::opening::Unusable;
use crate::store::config::Config;
use crate::store::journal::{DiskFile, FileId};
use crate::store::lock::lock;

/// How long storage may take to say what is at a path; a migration waits for it.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

/// How long storage may take to make, rename or remove a file.
const MAKE_DEADLINE: Duration = Duration::from_secs(10);

/// Looks at once, those included that never return. Each is a thread; tokio has 512.
const LOOKS_MAX: usize = 128;

/// What is at a path that a VM names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileAtPath {
    /// Something that VMs may use.
    Present(FileIdentity),
    /// Nothing, or nothing that can be looked at.
    Missing,
    /// The storage has not answered in time.
    Silent,
    /// VMs may not use it.
    NotAllowed(NotAllowed),
}

/// What VMs may use, and never: the agent's own files.
#[derive(Debug)]
struct Rules {
    resources: VmResources,
    // Closing some of these would also take away the locks that SQLite has on its journal.
    own: Vec<PathBuf>,
}

/// Why a disk is not made.
#[derive(Debug)]
pub(crate) struct NotMade {
    pub(crate) problem: Problem,
    /// Whether it may be there, or come yet: the storage or the journal has not done what it should.
    pub(crate) may_come: bool,
}

impl From<Problem> for NotMade {
    fn from(problem: Problem) -> Self {
        Self { problem, may_come: true }
    }
}

/// Looks at files that VMs name.
#[derive(Debug)]
pub(crate) struct VmFiles {
    host: String,
    rules: Arc<Rules>,
    looks: Arc<Semaphore>,
    since: Arc<Mutex<HashMap<PathBuf, Instant>>>,
}

impl VmFiles {
    /// Those of the host that is configured so.
    pub(crate) fn new(config: &Config) -> Self {
        let own = [&config.state_directory, &config.runtime_directory, &config.tls.key];
        let own = own.into_iter().cloned().collect();
        let rules = Arc::new(Rules { resources: config.vms.clone(), own });
        let looks = Arc::new(Semaphore::new(LOOKS_MAX));
        Self { host: config.name.clone(), rules, looks, since: Arc::default() }
    }

    /// What is at a path; for an image, also whether VMs may use what it names.
    pub(crate) async fn look(&self, path: &Path, format: Option<DiskFormat>) -> FileAtPath {
        // No thread for what is decided without a look.
        if let Err(why) = self.rules.resources.allowed_path(path) {
            return FileAtPath::NotAllowed(why);
        }
        let hangs = lock(&self.since).get(path).is_some_and(|since| since.elapsed() > LOOK_DEADLINE);
        if hangs {
            return FileAtPath::Silent;
        }
        timeout(LOOK_DEADLINE, self.look_unbounded(path, format)).await.unwrap_or(FileAtPath::Silent)
    }

    async fn look_unbounded(&self, path: &Path, format: Option<DiskFormat>) -> FileAtPath {
        let permit = Arc::clone(&self.looks).acquire_owned().await;
        let (path, rules, since) = (path.to_owned(), Arc::clone(&self.rules), Arc::clone(&self.since));
        let look = spawn_blocking(move || {
            lock(&since).insert(path.clone(), Instant::now());
            let found = examine(&rules, &path, format);
            lock(&since).remove(&path);
            drop(permit);
            found
        });
        look.await.unwrap_or(FileAtPath::Missing)
    }

    /// Refuses a VM that names what VMs may not use here. Its files may be missing.
    pub(crate) async fn check_allowed(&self, spec: &VmSpec) -> Result<(), Problem> {
        self.check_bridges(spec)?;
        self.looked_at(spec, |_| false).await.map(drop)
    }

    /// Refuses a VM that names what VMs may not use here, or that is not here, but for the disks that will be copied.
    pub(crate) async fn check_usable(&self, spec: &VmSpec, copied: &[DiskCopy]) -> Result<(), Problem> {
        self.check_bridges(spec)?;
        let comes = |path: &Path| copied.iter().any(|disk| Path::new(&disk.to) == path);
        let is_missing =
            |(path, look): &(&Path, FileAtPath)| matches!(look, FileAtPath::Missing) && !comes(path);
        match self.looked_at(spec, comes).await?.into_iter().find(is_missing) {
            None => Ok(()),
            Some((path, _)) => Err(Problem::refused(format!(
                "VM {} cannot run on {host}: there is no {path}, or the agent cannot look there. All hosts must have it \
                 under the same path",
                spec.name,
                path = path.display(),
                host = self.host
            ))),
        }
    }

    /// Refuses a disk for which there is no place. Of it, `there_bytes` are there already under another name; of a file
    /// system, `promised_bytes` are somebody else's already.
    pub(crate) async fn check_room(
        &self,
        disk: &DiskCopy,
        there_bytes: u64,
        promised_bytes: impl FnOnce(u64) -> u64 + Send + 'static,
    ) -> Result<(), Problem> {
        let (path, bytes) = (PathBuf::from(&disk.to), disk.room_bytes().saturating_sub(there_bytes));
        let look = move |rules: &Rules| making::check_room(rules, &path, bytes, promised_bytes);
        self.act("take a copy as", &disk.to, look).await
    }

    /// What is free where a disk would be made, once `promised_bytes` of its device are taken off; nothing where that is
    /// not known.
    pub(crate) async fn room(
        &self,
        path: &Path,
        promised_bytes: impl FnOnce(u64) -> u64 + Send + 'static,
    ) -> Option<Room> {
        let (at, name) = (path.to_owned(), path.to_string_lossy());
        let look = self.try_act(&name, move |rules| making::room(rules, &at, promised_bytes));
        timeout(LOOK_DEADLINE, look).await.ok()?.ok()?.ok()
    }

    /// Whether VMs may have block devices there, and no files.
    pub(crate) fn is_device_place(&self, path: &str) -> bool {
        self.rules.resources.allowed_path(Path::new(path)) == Ok(AllowedPath::Device)
    }

    /// Refuses a block device that a copy must not overwrite. `named` are the disks of VMs.
    pub(crate) async fn check_device(&self, disk: &DiskCopy, named: Vec<PathBuf>) -> Result<(), Problem> {
        let copy = disk.clone();
        self.act("overwrite", &disk.to, move |rules| devices::take(rules, &copy, &named).map(drop)).await
    }

    /// Makes a block device an empty disk.
    pub(crate) async fn overwrite(&self, disk: &DiskCopy, named: Vec<PathBuf>) -> Result<FileId, NotMade> {
        let (copy, path) = (disk.clone(), &disk.to);
        let made = self.try_act(path, move |rules| devices::overwrite(rules, &copy, &named)).await;
        self.is_made("overwrite", path, made)
    }

    /// Makes an empty disk where nothing is, for the migration or move of this id. It has its name when it is recorded which
    /// file it is: until then it has one that only [`Self::remove`] looks for.
    pub(crate) async fn make(
        &self,
        path: &str,
        id: &str,
        (image, bytes): (DiskImage, u64),
        record: impl FnOnce(FileId) -> Result<(), Problem>,
    ) -> Result<(), NotMade> {
        let (at, unplaced) = (PathBuf::from(path), making::unplaced_path(Path::new(path), id));
        let name = at.file_name().unwrap_or_default().to_owned();
        let making = unplaced.clone();
        let make = move |rules: &Rules| {
            making::check_free(rules, &at)?;
            making::make(rules, &making, image, bytes)
        };
        let file = self.is_made("make", path, self.try_act(path, make).await)?;
        record(file)?;
        let place = move |rules: &Rules| making::place(rules, &unplaced, &name, file);
        self.is_made("make", path, self.try_act(path, place).await)
    }

    fn is_made<T>(
        &self,
        what: &str,
        path: &str,
        made: Result<Result<T, CannotMake>, Problem>,
    ) -> Result<T, NotMade> {
        made?.map_err(|error| NotMade { problem: self.cannot(what, path, error), may_come: false })
    }

    /// Removes one that was made here, by the migration or move of this id, unless another file is in its place, or a VM names
    /// it. What is on a block device is left, and told.
    pub(crate) async fn remove(&self, disk: &DiskFile, id: &str, named: Vec<PathBuf>) -> Result<(), Problem> {
        if self.is_device_place(&disk.path) {
            warn!(
                path = disk.path,
                "the VM for this block device did not come: what was copied stays there, and is useless"
            );
            return Ok(());
        }
        let (at, file) = (PathBuf::from(&disk.path), disk.file);
        let unplaced = making::unplaced_path(&at, id);
        let remove = move |rules: &Rules| {
            let was_unplaced = making::remove_unplaced(rules, &unplaced, &named)?;
            Ok(file.map_or(Ok(false), |file| making::remove(rules, &at, file, &named))? || was_unplaced)
        };
        match self.try_act(&disk.path, remove).await? {
            Ok(_) => Ok(()),
            Err(CannotMake::InUse(by)) => {
                let by = by.display();
                warn!(path = disk.path, %by, "a disk that was made for a VM which did not come belongs to \
                    another one now: it stays");
                Ok(())
            }
            Err(error) => Err(self.cannot("remove", &disk.path, error)),
        }
    }

    /// Which file is there, if it is one.
    pub(crate) async fn identify(&self, path: &str) -> Result<DiskFile, Problem> {
        let at = PathBuf::from(path);
        let identify = if self.is_device_place(path) { devices::identify } else { making::identify };
        let file = self.act("look at", path, move |rules| identify(rules, &at)).await?;
        Ok(DiskFile { path: path.into(), file })
    }

    /// What a file takes, and what is free beside it; none if it is not there.
    pub(crate) async fn file_room(&self, path: &str, file: FileId) -> Result<Option<FileRoom>, Problem> {
        let at = PathBuf::from(path);
        let room = if file.is_device() { devices::room } else { making::file_room };
        self.act("look at", path, move |rules| room(rules, &at, file)).await
    }

    /// Makes all of a file durable, so that the storage has what is read of it from now on. Whether it was there.
    pub(crate) async fn settle(&self, path: &str, file: FileId) -> Result<bool, Problem> {
        let at = PathBuf::from(path);
        let settle = if file.is_device() { devices::settle } else { making::settle };
        self.act("flush", path, move |rules| settle(rules, &at, file)).await
    }

    /// Where the part of a copy is kept that was interrupted in this migration.
    pub(crate) fn kept_path(path: &str, migration: &str) -> String {
        making::kept_path(Path::new(path), migration).to_string_lossy().into_owned()
    }

    /// Where a disk is that has stayed behind by this migration.
    pub(crate) fn left_path(path: &str, migration: &str) -> String {
        making::left_path(Path::new(path), migration).to_string_lossy().into_owned()
    }

    /// The place of a disk that its VM has left for another one, by this move.
    pub(crate) fn moved_path(path: &str, id: &str) -> String {
        making::moved_path(Path::new(path), id).to_string_lossy().into_owned()
    }

    /// Gives a disk the name of one that has stayed behind, unless a VM names it. Whether it has that name now. A block device
    /// keeps its own.
    pub(crate) async fn rename_left(
        &self,
        disk: &DiskFile,
        to: &str,
        named: Vec<PathBuf>,
    ) -> Result<bool, Problem> {
        let Some(file) = disk.file else { return Ok(false) };
        if file.is_device() {
            return Ok(self.identify(&disk.path).await?.file == Some(file));
        }
        let at = PathBuf::from(&disk.path);
        let name = Path::new(to).file_name().unwrap_or_default().to_owned();
        self.act("rename", &disk.path, move |rules| making::rename(rules, &at, &name, file, &named)).await
    }

    /// Removes a disk that has stayed behind, unless another file is in its place. Refused where a VM names it. Whether it
    /// was there.
    pub(crate) async fn remove_left(
        &self,
        path: &str,
        file: FileId,
        named: Vec<PathBuf>,
    ) -> Result<bool, Problem> {
        let at = PathBuf::from(path);
        self.act("remove", path, move |rules| making::remove(rules, &at, file, &named)).await
    }

    async fn act<T: Send + 'static>(
        &self,
        what: &str,
        path: &str,
        act: impl FnOnce(&Rules) -> Result<T, CannotMake> + Send + 'static,
    ) -> Result<T, Problem> {
        self.try_act(path, act).await?.map_err(|error| self.cannot(what, path, error))
    }

    /// Storage that hangs holds up its own thread alone. What it was to do may be done later.
    async fn try_act<T: Send + 'static>(
        &self,
        path: &str,
        act: impl FnOnce(&Rules) -> Result<T, CannotMake> + Send + 'static,
    ) -> Result<Result<T, CannotMake>, Problem> {
        let host = &self.host;
        let rules = Arc::clone(&self.rules);
        let acted = timeout(MAKE_DEADLINE, spawn_blocking(move || act(&rules))).await;
        let acted = acted
            .map_err(|_| Problem::refused(format!("the storage with {path} does not answer on {host}")))?;
        acted.map_err(Problem::failed)
    }

    fn cannot(&self, what: &str, path: &str, error: CannotMake) -> Problem {
        let host = &self.host;
        match error {
            CannotMake::NotAllowed(why) => {
                Problem::refused(format!("{path} {}: {}", why.what(host), why.cure(host)))
            }
            CannotMake::Taken => Problem::refused(format!(
                "{host} cannot {what} {path}: it exists already; remove it if nobody needs it, or choose \
                another path with --disk"
            )),
            error => Problem::refused(format!("{host} cannot {what} {path}: {error}")),
        }
    }

    fn check_bridges(&self, spec: &VmSpec) -> Result<(), Problem> {
        match self.bridges_not_allowed(spec).first() {
            None => Ok(()),
            Some(bridge) => Err(Problem::refused(format!(
                "VM {} may not join the bridge {bridge} on {host}: add it to `bridges` of [vms] in agent.toml of {host} and \
                 restart the agent there, if VMs may join it",
                spec.name,
                host = self.host
            ))),
        }
    }

    /// Those that NICs of a VM join, and may not.
    pub(crate) fn bridges_not_allowed(&self, spec: &VmSpec) -> Vec<String> {
        let bridges = spec.nics.iter().map(|nic| &nic.bridge);
        bridges.filter(|bridge| !self.rules.resources.allows_bridge(bridge)).cloned().collect()
    }

    /// The content of disks that come does not matter: it will be overwritten.
    async fn looked_at<'a>(
        &self,
        spec: &'a VmSpec,
        comes: impl Fn(&Path) -> bool,
    ) -> Result<Vec<(&'a Path, FileAtPath)>, Problem> {
        let (name, host) = (&spec.name, &self.host);
        let files = files(spec).map(|(path, format)| (path, format.filter(|_| !comes(path))));
        let looks = files.map(async |(path, format)| (path, self.look(path, format).await));
        let looks = join_all(looks).await;
        for (path, look) in &looks {
            let path = path.display();
            match look {
                FileAtPath::Present(_) | FileAtPath::Missing => {}
                FileAtPath::NotAllowed(why) => {
                    let (what, cure) = (why.what(host), why.cure(host));
                    return Err(Problem::refused(format!("{path} of VM {name} {what}: {cure}")));
                }
                FileAtPath::Silent => {
                    return Err(Problem::refused(format!(
                        "the storage with {path} of VM {name} does not answer on {host}: look at its server and network"
                    )));
                }
            }
        }
        Ok(looks)
    }
}

/// The files that QEMU opens for a VM, and the formats of its disks.
fn files(spec: &VmSpec) -> impl Iterator<Item = (&Path, Option<DiskFormat>)> {
    let boot = spec.kernel.iter().chain(&spec.initramfs).map(|path| (path.as_path(), None));
    boot.chain(spec.disks.iter().map(|disk| (disk.path.as_path(), Some(disk.format))))
}

fn examine(rules: &Rules, path: &Path, format: Option<DiskFormat>) -> FileAtPath {
    let found = opening::find(rules, path).and_then(|file| {
        if format == Some(DiskFormat::Qcow2) {
            images::check(rules, path, &file)?;
        }
        Ok(file)
    });
    match found {
        Ok(file) => FileAtPath::Present(identity::identify(&file)),
        Err(Unusable::Missing) => FileAtPath::Missing,
        Err(Unusable::NotAllowed(why)) => FileAtPath::NotAllowed(why),
    }
}

#[cfg(test)]
mod tests;
