//! What the agent keeps about a domain while it handles it: `<runtime directory>/libvirt/vms/<name>`.

use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{PathTooLong, ResolvedSpec, Role, VmDirectory, VmError};
use serde::{Deserialize, Serialize};

/// What is known of a domain that is on its way here, until it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is known by itself, and written down when it is")]
pub(crate) struct ComingHere {
    /// Whether this host had its definition before: that stays if it does not come.
    pub(crate) was_defined: bool,
    /// Whether libvirt has made ready for it: until then what libvirt has of its UUID is another's.
    #[serde(default)]
    pub(crate) is_prepared: bool,
    /// Whether libvirt was told to take the last of it: from then on others may let it run.
    #[serde(default)]
    pub(crate) is_taken: bool,
    /// Whether all of it is here, and waits for the order to run.
    #[serde(default)]
    pub(crate) is_complete: bool,
    /// Whether it is to be started when this host has booted, once it runs here.
    #[serde(default)]
    pub(crate) autostart: bool,
}

pub(crate) fn directory(runtime_directory: &Path, vm: &VmName) -> Result<VmDirectory, PathTooLong> {
    VmDirectory::new(&runtime_directory.join("libvirt"), vm)
}

fn spec_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("spec.json")
}

fn coming_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("coming.json")
}

fn let_run_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("let-run")
}

fn autostart_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("autostart")
}

fn suspended_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("suspended")
}

fn peer_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("peer.json")
}

fn to_end_file(directory: &VmDirectory) -> PathBuf {
    directory.path().join("to-end")
}

/// Makes the directory, and says what the domain is.
pub(crate) fn write_spec(directory: &VmDirectory, spec: &ResolvedSpec) -> Result<(), VmError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory.path());
    made.map_err(|error| at("make", directory.path(), &error))?;
    write(&spec_file(directory), spec)
}

pub(crate) fn read_spec(directory: &VmDirectory) -> Result<ResolvedSpec, VmError> {
    read(&spec_file(directory))
}

pub(crate) fn write_coming(directory: &VmDirectory, coming: ComingHere) -> Result<(), VmError> {
    write(&coming_file(directory), &coming)
}

/// None of one that is not on its way here.
pub(crate) fn read_coming(directory: &VmDirectory) -> Result<Option<ComingHere>, VmError> {
    if !coming_file(directory).exists() {
        return Ok(None);
    }
    read(&coming_file(directory)).map(Some)
}

/// Others have let it run; nothing is written of one that they could not let run before its order.
pub(crate) fn write_let_run(directory: &VmDirectory) -> Result<(), VmError> {
    if is_taken(directory)? { write_bytes(&let_run_file(directory), &[]) } else { Ok(()) }
}

/// Whether others have let one run that is on its way here.
pub(crate) fn was_let_run(directory: &VmDirectory) -> Result<bool, VmError> {
    Ok(let_run_file(directory).exists() && is_taken(directory)?)
}

/// Whether it is on its way here, and others can let it run.
pub(crate) fn is_taken(directory: &VmDirectory) -> Result<bool, VmError> {
    Ok(read_coming(directory)?.is_some_and(|coming| coming.is_taken))
}

/// Whether it is on its way here.
pub(crate) fn role(directory: &VmDirectory) -> Result<Role, VmError> {
    Ok(if read_coming(directory)?.is_some() { Role::Incoming } else { Role::Fresh })
}

/// It is started no more when this host has booted, and is to be again if it stays.
pub(crate) fn write_autostart(directory: &VmDirectory) -> Result<(), VmError> {
    write_bytes(&autostart_file(directory), &[])
}

pub(crate) fn is_to_autostart(directory: &VmDirectory) -> bool {
    autostart_file(directory).exists()
}

/// It is started again when this host has booted.
pub(crate) fn has_autostart(directory: &VmDirectory) -> Result<(), VmError> {
    remove_file(&autostart_file(directory))
}

/// Its owner has suspended it while it was on its way.
pub(crate) fn write_suspended(directory: &VmDirectory) -> Result<(), VmError> {
    write_bytes(&suspended_file(directory), &[])
}

pub(crate) fn is_suspended(directory: &VmDirectory) -> bool {
    suspended_file(directory).exists()
}

/// Where its QEMU sends to, if that is no relay: for an agent that ends what the one before began.
pub(crate) fn write_peer(directory: &VmDirectory, peer: Option<SocketAddr>) -> Result<(), VmError> {
    write(&peer_file(directory), &peer)
}

pub(crate) fn read_peer(directory: &VmDirectory) -> Option<SocketAddr> {
    // Where there is none, nothing was sent.
    read(&peer_file(directory)).ok().flatten()
}

/// It runs, and whether it is suspended after this is still to be seen.
pub(crate) fn is_not_suspended(directory: &VmDirectory) -> Result<(), VmError> {
    remove_file(&suspended_file(directory))
}

/// It is another host's, or was given up: what libvirt has of it is to be ended, also if libvirt has ended before.
pub(crate) fn write_to_end(directory: &VmDirectory) -> Result<(), VmError> {
    match write_bytes(&to_end_file(directory), &[]) {
        // Nothing is known of it, so there is nothing to be looked for later.
        Err(_) if !directory.path().exists() => Ok(()),
        written => written,
    }
}

pub(crate) fn is_to_end(directory: &VmDirectory) -> bool {
    to_end_file(directory).exists()
}

/// It runs here.
pub(crate) fn has_come(directory: &VmDirectory) -> Result<(), VmError> {
    remove_file(&coming_file(directory))?;
    remove_file(&let_run_file(directory))
}

fn remove_file(file: &Path) -> Result<(), VmError> {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("remove", file, &error)),
        _ => Ok(()),
    }
}

/// What its agent keeps beside it.
pub(crate) fn write_record(directory: &VmDirectory, record: &[u8]) -> Result<(), VmError> {
    write_bytes(&directory.record_file(), record)
}

pub(crate) fn remove(directory: &VmDirectory) -> Result<(), VmError> {
    match fs::remove_dir_all(directory.path()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at("remove", directory.path(), &error)),
        _ => Ok(()),
    }
}

fn write<T: Serialize>(file: &Path, value: &T) -> Result<(), VmError> {
    let json = serde_json::to_vec(value).map_err(VmError::failed)?;
    write_bytes(file, &json)
}

/// Whole or not at all.
fn write_bytes(file: &Path, bytes: &[u8]) -> Result<(), VmError> {
    let new = file.with_extension("new");
    let written = || -> io::Result<()> {
        let mut options = fs::OpenOptions::new();
        options.create(true).truncate(true).write(true).mode(0o600).open(&new)?.write_all(bytes)?;
        fs::rename(&new, file)
    };
    written().map_err(|error| at("write", file, &error))
}

fn read<T: for<'a> Deserialize<'a>>(file: &Path) -> Result<T, VmError> {
    let bytes = fs::read(file).map_err(|error| at("read", file, &error))?;
    serde_json::from_slice(&bytes).map_err(|error| at("read", file, &io::Error::other(error)))
}

fn at(verb: &str, path: &Path, error: &io::Error) -> VmError {
    VmError::failed(format!("cannot {verb} {}: {error}", path.display()))
}
