//! The sending end: takes the program's connections, and packs what the wire leaves time for, or encrypts, or
//! both.

mod compressors;
mod concurrent_senders;
pub(crate) mod controller;
#[cfg(test)]
mod memory;
mod passing;
mod rest;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod round_trip;
mod shared;
mod stream;
mod unsent;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use drainpipe_engine::host::idle_cores::Allowance;
use rustix::net::sockopt::socket_peercred;
use tracing::warn;

pub use self::concurrent_senders::ConcurrentSenders;
use self::passing::Passing;
use self::shared::Shared;
pub use self::unsent::{UNSENT_BYTES_MAX, unsent_bytes};
use crate::error::RelayError;
use crate::figures::{Counters, Figures};
use crate::preamble::Token;
use crate::sockets::{Breaker, spawn};
use crate::tls::ClientTls;
use crate::treatment::Treatment;
use crate::wire::{Outward, Wire};
use crate::{CONNECTIONS_MAX, MAIN_STREAM, PACKING_THREADS_MAX, answers};

/// What a sender is to do.
#[derive(Debug, Clone)]
pub struct SenderSettings {
    /// Unix socket at which the program connects. Made again, and removed with the sender. Its directory
    /// says who may use it.
    pub path: PathBuf,
    /// Users whose programs may connect there; empty for all. Others' are closed at once.
    pub users: Vec<u32>,
    /// Where the receiver listens.
    pub destination: SocketAddr,
    /// Connections that the program makes, 1 to [`CONNECTIONS_MAX`]. The first one reaches the other program
    /// first.
    pub connections: usize,
    /// What the receiver knows the sender by.
    pub token: Token,
    /// What becomes of the bytes.
    pub treatment: Treatment<ClientTls>,
    /// Threads that pack at most, in idle time only: fewer, down to none, while others want the cores. More than
    /// [`PACKING_THREADS_MAX`] are as many.
    pub cores: usize,
    /// Whether the kernel lets `SCHED_IDLE` count between these threads and the VMs that run here, as it does within one
    /// cgroup or session.
    pub gives_way: bool,
    /// The senders of this host, which look at the same idle cores.
    pub concurrent: ConcurrentSenders,
    /// How many bytes of pages the receiver keeps copies of at most, so that only their changes need to be sent.
    pub page_cache_bytes: usize,
    /// The CPUs on which they pack; empty for all on which this process may run.
    pub cpus: Vec<usize>,
}

impl SenderSettings {
    /// How many threads may pack, from the beginning.
    fn allowance(&self) -> Allowance {
        Allowance::new(self.cores, self.gives_way)
    }

    /// Connects to the receiver for the program's connection of this number.
    fn connect(
        &self,
        stream: usize,
        program: &UnixStream,
        breaker: &Breaker,
        counters: &Counters,
    ) -> Result<Outward, RelayError> {
        let index = u8::try_from(stream).expect("a sender has no more connections than CONNECTIONS_MAX");
        let tls = self.treatment.encryption();
        let wire = Wire::connect(self.destination, breaker, tls, &self.token, index)?;
        if let Some(cipher_suite) = wire.cipher_suite() {
            counters.encrypted(cipher_suite);
        }
        let (outward, inward) = wire.split();
        if stream == MAIN_STREAM {
            answers::give(inward, program).map_err(RelayError::local)?;
        }
        Ok(outward)
    }
}

/// The sending end of a relay. After an error the program's connections stay open, and take nothing more, until
/// it is dropped.
#[derive(Debug)]
pub struct Sender {
    mode: SenderMode,
    path: PathBuf,
}

/// What becomes of the program's connections.
#[derive(Debug, Clone)]
enum SenderMode {
    Packing(Arc<Shared>),
    Passing(Arc<Passing>),
}

impl SenderMode {
    fn begin(&self, stream: usize, program: UnixStream) -> io::Result<()> {
        match self {
            Self::Packing(shared) => stream::begin(shared, stream, program),
            Self::Passing(passing) => passing::begin(passing, stream, program),
        }
    }

    fn program(&self) -> &Breaker {
        match self {
            Self::Packing(shared) => &shared.program,
            Self::Passing(passing) => &passing.program,
        }
    }

    fn counters(&self) -> &Counters {
        match self {
            Self::Packing(shared) => &shared.counters,
            Self::Passing(passing) => &passing.counters,
        }
    }

    fn fail(&self, error: RelayError) {
        match self {
            Self::Packing(shared) => shared.fail(error),
            Self::Passing(passing) => passing.fail(error),
        }
    }
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
        let settings = SenderSettings { cores: settings.cores.min(PACKING_THREADS_MAX), ..settings };
        let (path, connections) = (settings.path.clone(), settings.connections);
        let users = settings.users.clone();
        let begin = |source: io::Error| RelayError::Begin { path: path.clone(), source: Arc::new(source) };
        let listener = listen(&path).map_err(begin)?;
        // From here on the socket is removed whatever happens.
        let sender = Self { mode: mode_of(settings), path: path.clone() };
        sender.mode.program().add(&listener).map_err(begin)?;
        hold(listener.as_fd()).map_err(begin)?;
        if let SenderMode::Packing(shared) = &sender.mode {
            begin_packing(shared).map_err(begin)?;
        }
        let mode = sender.mode.clone();
        spawn("relay-accept".into(), move || {
            let of_users = OfUsers { listener, users };
            accept(&mode, connections, &of_users, hold);
        })
        .map_err(begin)?;
        Ok(sender)
    }

    /// What was done so far.
    pub fn figures(&self) -> Figures {
        self.mode.counters().read()
    }

    /// How its connections are encrypted, by the name that IANA gives it; none in the clear, and until the first
    /// one is.
    pub fn cipher_suite(&self) -> Option<String> {
        self.mode.counters().cipher_suite()
    }

    /// Why it ended before its connections had; none as long as it goes on, or when it ended as it should.
    pub fn error(&self) -> Option<RelayError> {
        match &self.mode {
            SenderMode::Packing(shared) => shared.error(),
            SenderMode::Passing(passing) => passing.error(),
        }
    }

    /// What sets a limit to it.
    pub fn limiter(&self) -> Limiter {
        Limiter(self.mode.clone())
    }

    /// Sends nothing more. What the program still gives is thrown away: its connections stay open, and it can be told to
    /// stop without waiting for the wire.
    pub fn stop_sending(&self) {
        match &self.mode {
            SenderMode::Packing(shared) => shared.stop_sending(),
            SenderMode::Passing(passing) => passing.stop_sending(),
        }
    }

    /// Whether the end is near. While it is, as little as possible waits here, so that the program is not kept waiting
    /// for it. Where nothing is packed, that is always so.
    pub fn set_short(&self, is_short: bool) {
        if let SenderMode::Packing(shared) = &self.mode {
            shared.set_short(is_short);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // The program may not bear to lose all connections at once. The clean-up after the panic stops it first,
        // and its connections end with that.
        if thread::panicking() {
            return;
        }
        match &self.mode {
            SenderMode::Packing(shared) => shared.close(),
            SenderMode::Passing(passing) => passing.close(),
        }
        // It may be gone with its directory.
        drop(fs::remove_file(&self.path));
    }
}

/// Limits what a sender gives to the network. Outlives it, to no effect.
#[derive(Debug, Clone)]
pub struct Limiter(SenderMode);

impl Limiter {
    /// From now on so many bytes per second, packed, over all connections together; `None` for no limit.
    pub fn set(&self, bytes_per_second: Option<u64>) {
        match &self.0 {
            SenderMode::Packing(shared) => shared.set_limit(bytes_per_second),
            SenderMode::Passing(passing) => passing.set_limit(bytes_per_second),
        }
    }
}

fn mode_of(settings: SenderSettings) -> SenderMode {
    if settings.treatment.is_packed() {
        return SenderMode::Packing(Arc::new(Shared::new(settings)));
    }
    SenderMode::Passing(Arc::new(Passing::new(settings)))
}

fn begin_packing(shared: &Arc<Shared>) -> io::Result<()> {
    for number in 0..shared.settings.cores.max(1) {
        let shared = Arc::clone(shared);
        spawn(format!("relay-pack-{number}"), move || compressors::run(&shared))?;
    }
    let shared = Arc::clone(shared);
    spawn("relay-control".into(), move || controller::run(&shared))
}

fn listen(path: &PathBuf) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    let listener = UnixListener::bind(path)?;
    // The program may be another user's. The directory keeps others away.
    fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
    Ok(listener)
}

/// Where only some users' programs are let in.
struct OfUsers {
    listener: UnixListener,
    users: Vec<u32>,
}

impl OfUsers {
    fn accept(&self) -> io::Result<UnixStream> {
        loop {
            let (program, _) = self.listener.accept()?;
            let user = socket_peercred(&program)?.uid.as_raw();
            if self.users.is_empty() || self.users.contains(&user) {
                return Ok(program);
            }
            warn!(user, "closed a connection to a relay by a user who may not connect to it");
        }
    }
}

fn accept(
    mode: &SenderMode,
    connections: usize,
    listener: &OfUsers,
    mut hold: impl FnMut(BorrowedFd<'_>) -> io::Result<()>,
) {
    for stream in 0..connections {
        let accepted = listener.accept().and_then(|program| hold(program.as_fd()).map(|()| program));
        let begun = accepted.and_then(|program| mode.begin(stream, program));
        if let Err(error) = begun {
            return mode.fail(RelayError::Local(Arc::new(error)));
        }
    }
}
