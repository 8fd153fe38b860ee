//! A program beside the agent that starts QEMU and reaches into it, so that the agent needs no capabilities for that.
//!
//! Without it, the agent does both itself, by the same code: [`Launch::run`](crate::launcher::Launch::run) and
//! [`Reach::perform`]. [`Privileges`](crate::privileges::Privileges) says which.

mod serve;
mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::Pid;

use self::wire::{Reply, Request};
use crate::launcher::Launch;
use crate::reach::{Reach, Reached};

pub use serve::{KeeperError, serve};

/// The first answer of one that systemd has yet to start takes longest.
const ANSWER_WITHIN: Duration = Duration::from_secs(15);

/// A keeper, as whoever asks it has it.
#[derive(Debug)]
pub(crate) struct Keeper {
    socket: PathBuf,
    // It ends with its connection. None before the first request, and after one that went wrong.
    connection: Mutex<Option<OwnedFd>>,
}

/// A process that the keeper has started. It ends as QEMU or before that, and then the keeper writes how.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) pid: Pid,
    pub(crate) pidfd: OwnedFd,
    pub(crate) exit: OwnedFd,
}

impl Keeper {
    /// The one that listens at `socket`, which is asked nothing yet.
    pub(crate) fn at(socket: PathBuf) -> Self {
        Self { socket, connection: Mutex::default() }
    }

    /// Has a process become QEMU.
    pub(crate) fn launch(&self, launch: Launch, descriptors: &[OwnedFd]) -> io::Result<Kept> {
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let Reached { numbers, descriptors } = self.ask(&Request::Launch(launch), &descriptors)?;
        let pid = numbers.first().and_then(|number| Pid::from_raw(*number));
        let [pidfd, exit] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Kept { pid: pid.ok_or(io::ErrorKind::InvalidData)?, pidfd, exit })
    }

    /// Has it done to a process.
    pub(crate) fn reach(&self, reach: Reach, pidfd: BorrowedFd<'_>) -> io::Result<Reached> {
        self.ask(&Request::Reach(reach), &[pidfd])
    }

    fn ask(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<Reached> {
        let bytes = serde_json::to_vec(request)?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        // Kept only after a whole answer, so that none is taken for another request's.
        let kept = connection.take();
        let is_old = kept.is_some();
        let mut current = kept.map_or_else(|| self.connect(), Ok)?;
        let mut sent = wire::send(current.as_fd(), &bytes, descriptors);
        if is_old && sent.is_err() {
            // It has ended since, and has seen nothing of this.
            current = self.connect()?;
            sent = wire::send(current.as_fd(), &bytes, descriptors);
        }
        sent.map_err(|error| self.failed("send a request to", &error))?;
        let answer = wire::receive(current.as_fd()).map_err(|error| self.failed("hear from", &error))?;
        let (bytes, descriptors) = answer.ok_or_else(|| self.failed("hear from", &"it has ended"))?;
        *connection = Some(current);
        drop(connection);
        match serde_json::from_slice(&bytes)? {
            Reply::Done { numbers } => Ok(Reached { numbers, descriptors }),
            Reply::Failed { number: Some(number), .. } => Err(io::Error::from_raw_os_error(number)),
            Reply::Failed { words, .. } => Err(io::Error::other(words)),
        }
    }

    fn connect(&self) -> io::Result<OwnedFd> {
        let connected = || -> io::Result<OwnedFd> {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
            for timeout in [Timeout::Send, Timeout::Recv] {
                set_socket_timeout(&socket, timeout, Some(ANSWER_WITHIN))?;
            }
            connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
            Ok(socket)
        };
        connected().map_err(|error| self.failed("reach", &error))
    }

    fn failed(&self, action: &str, problem: &dyn std::fmt::Display) -> io::Error {
        io::Error::other(format!(
            "cannot {action} the keeper, which starts QEMU, by {}: {problem}; `systemctl start \
            drainpipe-keeper.socket` starts it, and `journalctl --unit 'drainpipe-keeper@*'` shows its log",
            self.socket.display()
        ))
    }
}
