//! From a path to a descriptor, through nothing but what is allowed. What may be at the path a moment later does not
//! matter to the holder of the descriptor.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use drainpipe_engine::host::vm_resources::{AllowedPath, NotAllowed};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, open, openat2};
use rustix::io::Errno;

use super::Rules;

/// Opens nothing that is there: no pipe is connected, no tape is wound back.
const LOOK: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Why no VM can use a file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not there, or cannot be looked at.
    Missing,
    /// It may not.
    NotAllowed(NotAllowed),
}

impl From<NotAllowed> for Unusable {
    fn from(why: NotAllowed) -> Self {
        Self::NotAllowed(why)
    }
}

/// A file or block device that VMs may use. Nothing has been opened yet.
#[derive(Debug)]
pub(super) struct FoundFile {
    handle: OwnedFd,
    pub(super) stat: Stat,
}

impl FoundFile {
    /// Opens what was found.
    pub(super) fn open(&self, flags: OFlags) -> io::Result<OwnedFd> {
        Ok(open(self.link(), flags | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())?)
    }

    /// Its descriptor, which is good for looks only.
    pub(super) fn handle(&self) -> &OwnedFd {
        &self.handle
    }

    pub(super) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    fn link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.handle.as_raw_fd()).into()
    }
}

/// What is at a path, if VMs may use it.
pub(super) fn find(rules: &Rules, path: &Path) -> Result<FoundFile, Unusable> {
    let allowed_path = rules.resources.allowed_path(path)?;
    let (opened, wanted) = match &allowed_path {
        AllowedPath::Below { directory, rest } => {
            let directory = open(*directory, LOOK | OFlags::DIRECTORY, Mode::empty());
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
            let opened =
                directory.and_then(|directory| openat2(directory, rest, LOOK, Mode::empty(), resolve));
            (opened, FileType::RegularFile)
        }
        // Names in /dev are links that the host's own udev has made.
        AllowedPath::Device => {
            (openat2(CWD, path, LOOK, Mode::empty(), ResolveFlags::NO_MAGICLINKS), FileType::BlockDevice)
        }
    };
    let handle = opened.map_err(|error| match error {
        Errno::XDEV | Errno::LOOP => Unusable::NotAllowed(NotAllowed::LeadsOut),
        _ => Unusable::Missing,
    })?;
    let stat = fstat(&handle).map_err(|_| Unusable::Missing)?;
    let found = FoundFile { handle, stat };
    if is_own(rules, &found) {
        return Err(NotAllowed::OfAgent.into());
    }
    if found.kind() != wanted {
        return Err(NotAllowed::NoFile.into());
    }
    Ok(found)
}

fn is_own(rules: &Rules, found: &FoundFile) -> bool {
    // Without links, as the kernel has it.
    let Ok(path) = fs::read_link(found.link()) else { return true };
    rules.own.iter().filter_map(|own| fs::canonicalize(own).ok()).any(|own| path.starts_with(own))
}
