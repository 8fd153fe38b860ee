//! The sending end: takes the program's connections, and packs what the wire leaves time for.

mod compressors;
mod lane;
mod shared;
mod steering;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use self::shared::Shared;
use crate::CONNECTIONS_MAX;
use crate::error::RelayError;
use crate::figures::Figures;
use crate::preamble::Token;
use crate::sockets::spawn;

/// What a sender is to do.
#[derive(Debug, Clone)]
pub struct SenderSettings {
    /// Unix socket at which the program connects. Made anew, and removed with the sender. Who may use it is
    /// for its directory to say.
    pub path: PathBuf,
    /// Where the receiver listens.
    pub destination: SocketAddr,
    /// Connections that the program makes, 1 to [`CONNECTIONS_MAX`]. The first one reaches the other program
    /// first.
    pub connections: usize,
    /// What the receiver knows the sender by.
    pub token: Token,
    /// Threads that pack at most, in idle time only: fewer, down to none, while others want the cores.
    pub cores: usize,
    /// The CPUs on which they pack; empty for all on which this process may run.
    pub cpus: Vec<usize>,
}

/// The sending end of a relay. After an error the program's connections stay open, and take nothing more, until
/// it is dropped.
#[derive(Debug)]
pub struct Sender {
    shared: Arc<Shared>,
    path: PathBuf,
}

impl Sender {
    /// Listens at the Unix socket.
    ///
    /// `hold` is given the listening socket, and each connection before its first byte is read: for somebody who
    /// keeps them open should this process end, if the program may not bear to lose all of them at once.
    pub fn start(
        settings: SenderSettings,
        mut hold: impl FnMut(BorrowedFd<'_>) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, RelayError> {
        if !(1..=CONNECTIONS_MAX).contains(&settings.connections) {
            return Err(RelayError::Connections(settings.connections));
        }
        let path = settings.path.clone();
        let begin = |source: io::Error| RelayError::Begin { path: path.clone(), source: Arc::new(source) };
        let listener = listen(&path).map_err(begin)?;
        // From here on the socket is removed whatever happens.
        let cores = settings.cores.max(1);
        let sender = Self { shared: Arc::new(Shared::new(settings)), path: path.clone() };
        sender.shared.program.add(&listener).map_err(begin)?;
        hold(listener.as_fd()).map_err(begin)?;
        for number in 0..cores {
            let shared = Arc::clone(&sender.shared);
            spawn(format!("relay-pack-{number}"), move || compressors::run(&shared)).map_err(begin)?;
        }
        let shared = Arc::clone(&sender.shared);
        spawn("relay-steer".into(), move || steering::run(&shared)).map_err(begin)?;
        let shared = Arc::clone(&sender.shared);
        spawn("relay-accept".into(), move || accept(&shared, &listener, hold)).map_err(begin)?;
        Ok(sender)
    }

    /// What was done so far.
    pub fn figures(&self) -> Figures {
        self.shared.counters.read()
    }

    /// Why it ended before the streams had; none as long as it goes on, or when it ended as it should.
    pub fn error(&self) -> Option<RelayError> {
        self.shared.error()
    }

    /// What sets a limit to it.
    pub fn limiter(&self) -> Limiter {
        Limiter(Arc::clone(&self.shared))
    }

    /// The end is near: from now on as little as possible waits here and in the sockets, so that the program
    /// is not kept waiting for it.
    pub fn shorten(&self) {
        self.shared.shorten();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.shared.close();
        // It may be gone with its directory.
        drop(fs::remove_file(&self.path));
    }
}

/// Limits what a sender gives to the network. Outlives it, to no effect.
#[derive(Debug, Clone)]
pub struct Limiter(Arc<Shared>);

impl Limiter {
    /// From now on so many bytes per second, packed, over all connections together; `None` for no limit.
    pub fn set(&self, bytes_per_second: Option<u64>) {
        self.0.set_limit(bytes_per_second);
    }
}

fn listen(path: &PathBuf) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(path),
    }
}

fn accept(
    shared: &Arc<Shared>,
    listener: &UnixListener,
    mut hold: impl FnMut(BorrowedFd<'_>) -> io::Result<()>,
) {
    for lane in 0..shared.settings.connections {
        let accepted = listener.accept().and_then(|(program, _)| hold(program.as_fd()).map(|()| program));
        let begun = accepted.and_then(|program| lane::begin(shared, lane, program));
        if let Err(error) = begun {
            return shared.fail(RelayError::Local(Arc::new(error)));
        }
    }
}
