//! A lab's directory, its lock and its record.
//!
//! `/run/drainpipe/lab/<lab>/` is root's alone and goes with a reboot. `lab.json` in it is
//! written last by `up` and removed first by `down`, so it exists only while the lab is complete.

use std::fs::{self, DirBuilder, File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::spec::LabSpec;

const SHARED: &str = "/run/drainpipe";
const ROOT: &str = "/run/drainpipe/lab";
const NAMESPACES: &str = "/run/netns";
const RECORD: &str = "lab.json";

/// Longer than the slowest `down`, which ends processes for up to 10 s.
const LOCK_LIMIT: Duration = Duration::from_secs(30);
const LOCK_POLL: Duration = Duration::from_millis(10);

/// What `lab.json` says.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    /// The boot in which the lab was made: `/run` outlives a reboot where it is not a tmpfs.
    boot_id: String,
    spec: LabSpec,
}

/// The exclusive right to change one lab, held until dropped.
#[derive(Debug)]
pub(crate) struct LabLock {
    file: File,
    path: PathBuf,
    directory: PathBuf,
}

/// Where the files of the lab `name` are.
pub(crate) fn directory(name: &str) -> PathBuf {
    Path::new(ROOT).join(name)
}

/// The names of all labs that have a directory, complete or not.
pub(crate) fn directory_names() -> Result<Vec<String>, Error> {
    names_in(ROOT, |kind| kind.is_dir())
}

/// The names of all network namespaces that have one, labs' or not.
pub(crate) fn namespace_names() -> Result<Vec<String>, Error> {
    names_in(NAMESPACES, |_| true)
}

/// The file that keeps a named network namespace.
pub(crate) fn namespace_file(namespace: &str) -> PathBuf {
    Path::new(NAMESPACES).join(namespace)
}

fn names_in(directory: &str, wanted: impl Fn(FileType) -> bool) -> Result<Vec<String>, Error> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", directory)(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("list", directory))?;
        if entry.file_type().is_ok_and(&wanted) {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

/// The specification of a complete lab; `None` if there is no such lab, or only its remains.
pub(crate) fn read_record(name: &str) -> Result<Option<LabSpec>, Error> {
    let path = directory(name).join(RECORD);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
    };
    let record: Record = serde_json::from_slice(&text).map_err(|source| Error::Record { path, source })?;
    Ok((record.boot_id == boot_id()?).then_some(record.spec))
}

impl LabLock {
    /// Waits, up to a limit, until no other process changes the lab `name`.
    pub(crate) fn acquire(name: &str) -> Result<Self, Error> {
        // What else is in /run/drainpipe is not for the lab to hide.
        fs::create_dir_all(SHARED).map_err(Error::io("create the directory", SHARED))?;
        create_directory(Path::new(ROOT))?;
        let path = Path::new(ROOT).join(format!("{name}.lock"));
        let deadline = Instant::now() + LOCK_LIMIT;
        while Instant::now() < deadline {
            let file = OpenOptions::new()
                .create(true)
                .write(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(Error::io("open", &path))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // Its last holder may have removed the file between our open and our lock.
                Ok(()) if is_at(&file, &path) => {
                    return Ok(Self { file, path, directory: directory(name) });
                }
                Ok(()) | Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(Error::io("lock", path)(error.into())),
            }
            thread::sleep(LOCK_POLL);
        }
        Err(Error::Busy { name: name.to_owned(), waited: LOCK_LIMIT })
    }

    /// The lab's directory.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The lock as a child's standard output, so that the child holds it too.
    pub(crate) fn as_stdout(&self) -> Result<Stdio, Error> {
        Ok(self.file.try_clone().map_err(Error::io("share", &self.path))?.into())
    }

    /// Makes the lab's directory and one for each of `nodes`.
    pub(crate) fn create_directories<'a>(
        &self,
        mut nodes: impl Iterator<Item = &'a str>,
    ) -> Result<(), Error> {
        create_directory(&self.directory)?;
        nodes.try_for_each(|node| create_directory(&self.directory.join(node)))
    }

    /// Declares the lab complete.
    pub(crate) fn write_record(&self, spec: &LabSpec) -> Result<(), Error> {
        let record = Record { boot_id: boot_id()?, spec: spec.clone() };
        let path = self.directory.join(RECORD);
        let text = serde_json::to_vec_pretty(&record)
            .map_err(|source| Error::Record { path: path.clone(), source })?;
        let new = path.with_extension("json.new");
        fs::write(&new, text).map_err(Error::io("write", &new))?;
        fs::rename(&new, &path).map_err(Error::io("write", &path))
    }

    /// Declares the lab incomplete: whatever happens next, it is remains to be cleared.
    pub(crate) fn remove_record(&self) -> Result<(), Error> {
        let path = self.directory.join(RECORD);
        ignore_absence(fs::remove_file(&path)).map_err(Error::io("remove", &path))
    }

    /// Removes the lab's directory and everything in it.
    pub(crate) fn remove_directory(&self) -> Result<(), Error> {
        ignore_absence(fs::remove_dir_all(&self.directory)).map_err(Error::io("remove", &self.directory))
    }

    /// Removes the lock's file, still holding the lock; for a lab that is gone.
    pub(crate) fn remove(self) -> Result<(), Error> {
        ignore_absence(fs::remove_file(&self.path)).map_err(Error::io("remove", &self.path))
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => ours.ino() == there.ino() && ours.dev() == there.dev(),
        _ => false,
    }
}

fn create_directory(path: &Path) -> Result<(), Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(Error::io("create the directory", path))
}

fn ignore_absence(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn boot_id() -> Result<String, Error> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path).map_err(Error::io("read", path))?.trim().to_owned())
}
