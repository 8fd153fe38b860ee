//! Both ends of a relay, and the programs beyond them.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_relay::{
    ClientTls, ConcurrentSenders, Receiver, ReceiverSettings, Sender, SenderSettings, ServerTls, TOKEN_BYTES,
    Token, Treatment,
};
use tempfile::TempDir;

pub(crate) const TOKEN: Token = Token([42; TOKEN_BYTES]);
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

const PAGE_CACHE_BYTES: usize = 4 << 20;

/// A program that receives, and the end of the relay before it.
pub(crate) struct Target {
    pub(crate) receiver: Receiver,
    pub(crate) program: UnixListener,
    pub(crate) address: SocketAddr,
    pub(crate) directory: TempDir,
}

impl Target {
    pub(crate) fn new(treatment: Treatment<ServerTls>, connections: usize) -> Self {
        Self::of_sender(None, treatment, connections)
    }

    /// A target that knows where its sender is.
    pub(crate) fn of_sender(
        sender: Option<IpAddr>,
        treatment: Treatment<ServerTls>,
        connections: usize,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("in.sock");
        let program = UnixListener::bind(&path).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let settings = ReceiverSettings {
            path,
            connections,
            token: TOKEN,
            sender,
            treatment,
            page_cache_bytes: PAGE_CACHE_BYTES,
        };
        Self { receiver: Receiver::start(listener, settings).unwrap(), program, address, directory }
    }

    /// The settings of a sender to this target.
    pub(crate) fn settings(&self, treatment: Treatment<ClientTls>, connections: usize) -> SenderSettings {
        SenderSettings {
            path: self.directory.path().join("out.sock"),
            users: vec![],
            destination: self.address,
            connections,
            token: TOKEN,
            treatment,
            cores: 2,
            cpus: vec![],
            gives_way: true,
            concurrent: ConcurrentSenders::default(),
            page_cache_bytes: PAGE_CACHE_BYTES,
        }
    }
}

/// A sender, and where its program connects.
pub(crate) fn start(settings: SenderSettings) -> (Sender, PathBuf) {
    let path = settings.path.clone();
    (Sender::start(settings, |_| Ok(())).unwrap(), path)
}

/// Fails the test unless a program that a full wire holds up can hand over everything once its sender is to stop.
pub(crate) fn assert_waits_for_no_wire(sender: Sender, path: PathBuf, target: &Target) {
    let mut program = UnixStream::connect(path).unwrap();
    program.set_write_timeout(Some(Duration::from_millis(700))).unwrap();
    let _reads_nothing = target.program.accept().unwrap();
    let content: Vec<u8> =
        (0..1_u32 << 18).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    while program.write_all(&content).is_ok() {}
    sender.stop_sending();
    (0..64).for_each(|_| program.write_all(&content).expect("it is taken"));
    assert!(sender.error().is_none());
    drop(sender);
    assert!(program.write_all(&content).is_err(), "it is told");
}

pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(5));
    }
}
