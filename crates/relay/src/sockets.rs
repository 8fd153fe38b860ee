//! Sockets that block, and one switch that wakes whoever waits on them.

use std::io::{self, IoSlice, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};

/// What a thread of a relay keeps on its stack is small.
const STACK_BYTES: usize = 512 << 10;

/// Plain values, whole after each assignment.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A thread of the relay's own: the copying must not hold up those who serve the agent's API.
pub(crate) fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name).stack_size(STACK_BYTES).spawn(work).map(drop)
}

/// All sockets of a relay, to be shut down at once. That wakes every thread that waits on one of them.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    sockets: Mutex<Option<Vec<Socket>>>,
}

impl Breaker {
    pub(crate) fn new() -> Self {
        Self { sockets: Mutex::new(Some(vec![])) }
    }

    /// Takes a socket in. Refuses once all are shut down.
    pub(crate) fn add(&self, socket: impl AsFd) -> io::Result<()> {
        let duplicate = SockRef::from(&socket.as_fd()).try_clone()?;
        match lock(&self.sockets).as_mut() {
            Some(sockets) => {
                sockets.push(duplicate);
                Ok(())
            }
            None => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }

    /// Shuts all of them down.
    pub(crate) fn break_all(&self) {
        for socket in lock(&self.sockets).take().unwrap_or_default() {
            // There is nothing to wait for on one that the peer has closed already.
            drop(socket.shutdown(Shutdown::Both));
        }
    }
}

/// Waits for an event, also for the end of the connection. False when `timeout` has passed before.
pub(crate) fn wait_for(socket: impl AsFd, events: PollFlags, timeout: Option<&Timespec>) -> io::Result<bool> {
    loop {
        match poll(&mut [PollFd::new(&socket, events)], timeout) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads a block from a program: what comes within the socket's read timeout, as far as there is room in `block`. False
/// at the end of the stream.
pub(crate) fn read_block(program: &UnixStream, block: &mut Vec<u8>) -> io::Result<bool> {
    block.clear();
    loop {
        // The program may be silent for as long as it likes; breaking wakes it.
        wait_for(program, PollFlags::IN, None)?;
        match recv(program, spare_capacity(block), RecvFlags::WAITALL) {
            Ok((count, _)) => return Ok(count > 0),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes all parts, in one call if the kernel takes them at once.
pub(crate) fn write_all(mut socket: impl Write, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    // Empty ones at the beginning would look like a socket that takes nothing.
    IoSlice::advance_slices(&mut parts, 0);
    while !parts.is_empty() {
        match socket.write_vectored(parts) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut parts, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Connects to a program that listens at a Unix socket; fails where it does not take the connection in time.
///
/// A link at the end of the path is not followed: the program may be hostile, and link to another one's socket.
pub(crate) fn connect_program(path: &Path, deadline: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // connect(2) keeps to it.
    socket.set_write_timeout(Some(deadline))?;
    let itself = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    socket.connect(&SockAddr::unix(format!("/proc/self/fd/{}", itself.as_raw_fd()))?)?;
    socket.set_write_timeout(None)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_program_is_reached_by_its_own_socket_only() {
        let directory = tempfile::tempdir().unwrap();
        let [socket, link] = ["socket", "link"].map(|name| directory.path().join(name));
        let listener = UnixListener::bind(&socket).unwrap();
        connect_program(&socket, Duration::from_secs(20)).unwrap();
        listener.accept().unwrap();
        std::os::unix::fs::symlink(&socket, &link).unwrap();
        connect_program(&link, Duration::from_secs(20)).unwrap_err();
    }

    #[test]
    fn a_block_is_filled_with_what_comes_in_time() {
        let (mut there, here) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        let mut block = Vec::with_capacity(6);
        let writing = thread::spawn(move || {
            for part in [b"one", b"two", b"end"] {
                there.write_all(part).unwrap();
                thread::sleep(Duration::from_millis(5));
            }
        });
        assert!(read_block(&here, &mut block).unwrap());
        assert_eq!(block, b"onetwo");
        writing.join().unwrap();
    }
}
