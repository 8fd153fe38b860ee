//! A file that is there whole, or not at all.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use drainpipe_engine::problem::Problem;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, openat};
use rustix::io::Errno;
use uuid::Uuid;

use crate::end::directory_of;
use crate::error::of_path;

/// A file without its name yet. Dropped, it is gone; where the file system can, also when this program is killed.
#[derive(Debug)]
pub(crate) struct NewFile {
    pub(crate) file: File,
    path: PathBuf,
    other_name: Option<PathBuf>,
}

impl NewFile {
    /// A file that is to be at this path.
    pub(crate) fn create(path: &Path) -> Result<Self, Problem> {
        let failed = |error: io::Error| of_path("create", path, &error);
        let (file, other_name) = match without_name(path) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
                let (file, name) = with_other_name(path).map_err(failed)?;
                (file, Some(name))
            }
            file => (file.map_err(|error| failed(error.into()))?, None),
        };
        Ok(Self { file, path: path.into(), other_name })
    }

    /// Gives it its name, which another may have now only if it is to be replaced.
    pub(crate) fn publish(mut self, is_replacing: bool) -> Result<(), Problem> {
        let path = self.path.clone();
        self.give_name(is_replacing).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                Problem::conflict(format!("{} has come to be meanwhile; take another name", path.display()))
            }
            _ => of_path("create", &path, &error),
        })?;
        let directory = directory_of(&path);
        let synced = File::open(directory).and_then(|directory| directory.sync_all());
        synced.map_err(|error| of_path("write the directory", directory, &error))
    }

    fn give_name(&mut self, is_replacing: bool) -> io::Result<()> {
        if !is_replacing {
            self.link_to(&self.path)?;
            self.forget_other_name();
            return Ok(());
        }
        if self.other_name.is_none() {
            let name = other_name(&self.path);
            self.link_to(&name)?;
            self.other_name = Some(name);
        }
        let name = self.other_name.as_ref().expect("it was given one");
        fs::rename(name, &self.path)?;
        self.other_name = None;
        Ok(())
    }

    /// Never replaces.
    fn link_to(&self, path: &Path) -> io::Result<()> {
        match &self.other_name {
            Some(name) => fs::hard_link(name, path),
            None => Ok(linkat(CWD, through_proc(&self.file), CWD, path, AtFlags::SYMLINK_FOLLOW)?),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        self.forget_other_name();
    }
}

impl NewFile {
    fn forget_other_name(&mut self) {
        if let Some(name) = self.other_name.take() {
            // Nobody is left to tell; the name says whose it is.
            let _stays = fs::remove_file(name);
        }
    }
}

/// An open file, to be opened once more.
pub(crate) fn through_proc(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn without_name(path: &Path) -> Result<File, Errno> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    openat(CWD, directory_of(path), flags, owner_only()).map(File::from)
}

fn with_other_name(path: &Path) -> io::Result<(File, PathBuf)> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let name = other_name(path);
    let file = openat(CWD, &name, flags, owner_only())?;
    Ok((file.into(), name))
}

/// A disk is none of others' business.
fn owner_only() -> Mode {
    Mode::RUSR | Mode::WUSR
}

/// A name next to the file's, which nothing has: two disks that are made at once in one directory must not get the same.
fn other_name(path: &Path) -> PathBuf {
    directory_of(path).join(format!(".drainpipe-{}.partial", Uuid::new_v4().simple()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// A file as it is made where files without names are known, and where they are not.
    fn both_ways(path: &Path) -> [NewFile; 2] {
        let (file, name) = with_other_name(path).unwrap();
        let named = NewFile { file, path: path.into(), other_name: Some(name) };
        [NewFile::create(path).unwrap(), named]
    }

    #[test]
    fn a_file_appears_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        for mut new in both_ways(&path) {
            new.file.write_all(b"disk").unwrap();
            assert!(!path.exists());
            new.publish(false).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"disk");
            fs::remove_file(&path).unwrap();
        }
        assert_eq!(names(directory.path()), [""; 0]);
    }

    #[test]
    fn nothing_is_replaced_unless_it_is_to_be() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        for new in both_ways(&path) {
            fs::write(&path, b"precious").unwrap();
            assert!(new.publish(false).unwrap_err().message.contains("meanwhile"));
            assert_eq!(fs::read(&path).unwrap(), b"precious");
        }
        for new in both_ways(&path) {
            fs::write(&path, b"old").unwrap();
            new.publish(true).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"");
        }
        assert_eq!(names(directory.path()), ["a.img"]);
    }

    #[test]
    fn what_is_given_up_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        drop(both_ways(&directory.path().join("a.img")));
        assert_eq!(names(directory.path()), [""; 0]);
    }
}
