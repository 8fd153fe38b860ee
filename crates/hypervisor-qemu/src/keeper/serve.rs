//! The keeper's side: believes root alone, and does two things for it.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::thread;

use rustix::net::sockopt::socket_peercred;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::wire::{self, Reply, Request};
use crate::launcher::{Launch, Launcher};
use crate::reach::{Reached, must_live, parse_pid, proc_path};
use crate::user::QemuUser;

/// Why nobody is served.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// Somebody else asks.
    #[error("the user {0} asks for a QEMU, and only root may")]
    NotRoot(u32),
    /// The connection is no use.
    #[error(
        "cannot use the connection of whoever asks: {0}; drainpipe-keeper.socket starts this program with a \
         connection as its standard input"
    )]
    Connection(#[source] io::Error),
}

/// Does what root asks for over `connection`, until that ends: starts `binary` as the launcher's user, and reaches into
/// QEMUs.
pub fn serve(connection: BorrowedFd<'_>, launcher: &Launcher, binary: &Path) -> Result<(), KeeperError> {
    let who = socket_peercred(connection).map_err(|error| KeeperError::Connection(error.into()))?;
    if who.uid.as_raw() != 0 {
        return Err(KeeperError::NotRoot(who.uid.as_raw()));
    }
    while let Some((bytes, descriptors)) = wire::receive(connection).map_err(KeeperError::Connection)? {
        let done = serde_json::from_slice(&bytes)
            .map_err(io::Error::from)
            .and_then(|request| perform(request, descriptors, launcher, binary));
        let (reply, descriptors) = match done {
            Ok(Reached { numbers, descriptors }) => (Reply::Done { numbers }, descriptors),
            Err(error) => {
                (Reply::Failed { number: error.raw_os_error(), words: error.to_string() }, Vec::new())
            }
        };
        let bytes = serde_json::to_vec(&reply).map_err(|error| KeeperError::Connection(error.into()))?;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        wire::send(connection, &bytes, &descriptors).map_err(KeeperError::Connection)?;
    }
    Ok(())
}

fn perform(
    request: Request,
    descriptors: Vec<OwnedFd>,
    launcher: &Launcher,
    binary: &Path,
) -> io::Result<Reached> {
    match request {
        Request::Launch(launch) => start(launch, descriptors, launcher, binary),
        Request::Reach(reach) => {
            let [pidfd] = <[OwnedFd; 1]>::try_from(descriptors)
                .map_err(|_| io::Error::other("this needs one pidfd"))?;
            let pid = pid_of(&pidfd)?;
            must_be_qemu(pid, launcher.user)?;
            must_live(pidfd.as_fd())?;
            reach.perform(pid, pidfd.as_fd())
        }
    }
}

fn start(
    launch: Launch,
    descriptors: Vec<OwnedFd>,
    launcher: &Launcher,
    binary: &Path,
) -> io::Result<Reached> {
    let (exit, told) = pipe_with(PipeFlags::CLOEXEC)?;
    let child = launch.run(descriptors, launcher, binary)?;
    let pid = Pid::from_child(&child);
    // It is ours to wait for, so that its number is its own until then.
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    thread::Builder::new().name("waits".into()).spawn(move || tell_exit(child, told))?;
    Ok(Reached { numbers: vec![pid.as_raw_nonzero().get()], descriptors: vec![pidfd, exit] })
}

/// To whoever still wants to know.
fn tell_exit(mut child: Child, told: OwnedFd) {
    if let Ok(status) = child.wait() {
        let _ = fs::File::from(told).write_all(&status.into_raw().to_ne_bytes());
    }
}

/// See "pidfd" in proc_pid_fdinfo(5).
fn pid_of(pidfd: &OwnedFd) -> io::Result<Pid> {
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = information.lines().find_map(|line| line.strip_prefix("Pid:")).and_then(parse_pid);
    pid.ok_or_else(|| io::Error::other("this is no pidfd of a process that lives"))
}

/// libvirt's QEMUs have users of their own. Whoever has taken over an agent reaches into nothing else.
fn must_be_qemu(pid: Pid, user: QemuUser) -> io::Result<()> {
    let is_qemus = fs::metadata(proc_path(pid, ""))?.uid() == user.uid && !user.is_root();
    if is_qemus || is_qemu(&fs::read_link(proc_path(pid, "exe"))?) {
        return Ok(());
    }
    Err(io::Error::other(format!("process {} is no QEMU", pid.as_raw_nonzero())))
}

fn is_qemu(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b"qemu")
}
