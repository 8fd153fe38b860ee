//! Runs a program in a machine, from outside.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use thiserror::Error;

use crate::frames::{Decoder, FRAME_BYTES_MAX};
use crate::layout::{PORTS, port_name};
use crate::protocol::{CHUNK_BYTES, Message, Request, Session};

/// How long all ports may be busy.
const PORT_LIMIT: Duration = Duration::from_mins(1);
const PORT_POLL: Duration = Duration::from_millis(20);

/// How long a machine may be silent.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until it has started the program.
    pub start: Duration,
    /// From then on, at a stretch; `None` where the program may be silent for as long as it likes.
    pub silence: Option<Duration>,
}

impl Limits {
    /// For a machine that has booted, even if it is busy and has no KVM, and a program that may take its time.
    pub const OF_ANY_PROGRAM: Self = Self { start: Duration::from_mins(1), silence: None };
}

/// Why a program was not run, or how it was lost.
#[derive(Debug, Error)]
pub enum ExecError {
    /// More programs run in the machine than it has ports.
    #[error("{PORTS} programs run in it already, and none has ended within {} s", PORT_LIMIT.as_secs())]
    Busy,
    /// The machine's QEMU does not run, or has not made its ports.
    #[error("cannot reach it at {}: {source}", .socket.display())]
    Unreachable {
        /// The port's socket.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The machine does not answer.
    #[error("it has not started the program within {} s", .0.as_secs())]
    NotStarted(Duration),
    /// The program says nothing, and does not end.
    #[error("the program has neither printed anything nor ended for {} s", .0.as_secs())]
    Silent(Duration),
    /// Its QEMU has ended, or the machine's first process.
    #[error("it went down")]
    Down,
    /// The machine refused.
    #[error("{0}")]
    Refused(String),
    /// The program's name and arguments are more than a frame holds.
    #[error("the program's arguments are longer than {FRAME_BYTES_MAX} bytes")]
    TooLong,
    /// A port's lock, or what was to be read or written here.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// The input and output of a program.
pub struct Streams<'a> {
    /// Becomes the program's input, to its end.
    pub input: Box<dyn Read + Send>,
    /// Gets what the program prints.
    pub output: &'a mut dyn Write,
    /// Gets what it prints to its standard error.
    pub errors: &'a mut dyn Write,
}

/// A port that nobody else uses, until this is dropped.
struct Port {
    socket: UnixStream,
    _lock: File,
}

/// Runs a program in the machine whose ports' sockets are in `directory`, to its end: its exit code, or 128 and the
/// number of the signal that ended it.
///
/// If the caller ends first, so does the program.
pub fn run(
    directory: &Path,
    request: Request,
    streams: Streams<'_>,
    limits: Limits,
) -> Result<i32, ExecError> {
    let session = new_session();
    let frame = Message::Open(request).encode(session);
    if frame.len() > FRAME_BYTES_MAX {
        return Err(ExecError::TooLong);
    }
    let mut port = free_port(directory)?;
    port.socket.set_read_timeout(Some(limits.start)).map_err(io("set a limit"))?;
    port.socket.write_all(&frame).map_err(|_| ExecError::Down)?;
    follow(&mut port.socket, session, streams, limits)
}

/// One that the port's last user, whose answers may still come, has not had.
fn new_session() -> Session {
    let since_boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let nanoseconds = Session::try_from(since_boot.tv_nsec).unwrap_or_default();
    nanoseconds ^ process::id().rotate_left(16)
}

fn free_port(directory: &Path) -> Result<Port, ExecError> {
    let end = Instant::now() + PORT_LIMIT;
    loop {
        for port in 0..PORTS {
            if let Some(lock) = lock(&directory.join(port_name(port)).with_extension("lock"))? {
                let path = directory.join(port_name(port)).with_extension("sock");
                let socket = UnixStream::connect(&path)
                    .map_err(|source| ExecError::Unreachable { socket: path, source })?;
                return Ok(Port { socket, _lock: lock });
            }
        }
        if Instant::now() >= end {
            return Err(ExecError::Busy);
        }
        thread::sleep(PORT_POLL);
    }
}

fn lock(path: &Path) -> Result<Option<File>, ExecError> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = file.map_err(io("open the lock of a port"))?;
    Ok(flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file))
}

fn follow(
    socket: &mut UnixStream,
    session: Session,
    streams: Streams<'_>,
    limits: Limits,
) -> Result<i32, ExecError> {
    let Streams { input, output, errors } = streams;
    let (taken, may_go_on) = sync_channel(1);
    let mut waiting = Some((input, may_go_on));
    let mut decoder = Decoder::default();
    let mut bytes = vec![0; FRAME_BYTES_MAX];
    loop {
        let read = match socket.read(&mut bytes) {
            Ok(read @ 1..) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(silent(&limits, waiting.is_none()));
            }
            Ok(0) | Err(_) => return Err(ExecError::Down),
        };
        for frame in decoder.push(&bytes[..read]) {
            match Message::decode(&frame) {
                Some((of, _)) if of != session => {}
                Some((_, Message::Started)) => {
                    socket.set_read_timeout(limits.silence).map_err(io("change a limit"))?;
                    if let Some((input, may_go_on)) = waiting.take() {
                        let socket = socket.try_clone().map_err(io("share a port"))?;
                        thread::spawn(move || send_input(input, &socket, session, &may_go_on));
                    }
                }
                Some((_, Message::InputTaken)) => drop(taken.try_send(())),
                Some((_, Message::Output(bytes))) => write(output, &bytes)?,
                Some((_, Message::Errors(bytes))) => write(errors, &bytes)?,
                Some((_, Message::Ended(code))) => return Ok(code),
                Some((_, Message::Refused(reason))) => return Err(ExecError::Refused(reason)),
                Some((_, Message::Open(_) | Message::Input(_) | Message::InputEnd)) | None => {}
            }
        }
    }
}

fn silent(limits: &Limits, has_started: bool) -> ExecError {
    match limits.silence.filter(|_| has_started) {
        Some(silence) => ExecError::Silent(silence),
        None => ExecError::NotStarted(limits.start),
    }
}

/// Chunk by chunk: the next one once the last is taken. Ends with its input, or with the run.
fn send_input(
    mut input: Box<dyn Read + Send>,
    mut socket: &UnixStream,
    session: Session,
    taken: &Receiver<()>,
) {
    let mut bytes = vec![0; CHUNK_BYTES];
    // Input that cannot be read is at its end.
    while let Ok(read @ 1..) = input.read(&mut bytes) {
        let message = Message::Input(bytes[..read].to_vec());
        if socket.write_all(&message.encode(session)).is_err() || taken.recv().is_err() {
            return;
        }
    }
    // A program that has ended needs no end of its input.
    let _ = socket.write_all(&Message::InputEnd.encode(session));
}

fn write(to: &mut dyn Write, bytes: &[u8]) -> Result<(), ExecError> {
    to.write_all(bytes).and_then(|()| to.flush()).map_err(io("write what it printed"))
}

fn io(action: &'static str) -> impl FnOnce(io::Error) -> ExecError {
    move |source| ExecError::Io { action, source }
}
