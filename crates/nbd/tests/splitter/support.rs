//! A target disk behind qemu-nbd, a splitter in front of it, and streams between that can be cut.

use std::fs::{self, File};
use std::future::Future;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_nbd::{
    DiskServer, Export, Pace, ServerAddress, Session, SourceSplitter, SourceWatch, SplitterError,
    TargetSplitter, There,
};
use drainpipe_relay::{ConcurrentSenders, Packers, PackersSettings};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional, duplex};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{sleep, timeout};

use crate::noise::noise;

/// Long enough for what takes a moment on a quiet machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(2);

const NAME: &str = "disk";

/// How much a stream holds on its way, in each direction.
const ON_ITS_WAY_BYTES: usize = 256 << 10;

/// Any stream between hosts.
pub(crate) trait BothWays: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> BothWays for S {}

type Stream = Box<dyn BothWays>;

/// Whether QEMU's programs are here; prints loudly if not.
pub(crate) fn has_qemu() -> bool {
    let is_there = |program: &str| {
        let mut command = std::process::Command::new(program);
        command.arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success())
    };
    let missing: Vec<_> =
        ["qemu-nbd", "qemu-img", "qemu-io"].into_iter().filter(|name| !is_there(name)).collect();
    if !missing.is_empty() {
        eprintln!("SKIPPED: no {}; install qemu-utils", missing.join(", "));
    }
    missing.is_empty()
}

/// An image with noise, written zeroes and holes in turn, 1 MiB each.
pub(crate) fn image(path: &Path, mebibytes: u64) {
    let file = File::create(path).unwrap();
    file.set_len(mebibytes << 20).unwrap();
    for at in 0..mebibytes {
        match at % 3 {
            0 => file.write_all_at(&noise(1 << 20, at + 1), at << 20).unwrap(),
            1 => file.write_all_at(&vec![0; 1 << 20], at << 20).unwrap(),
            _ => {}
        }
    }
}

/// An image of text-like data.
pub(crate) fn text(path: &Path, mebibytes: u64) {
    let file = File::create(path).unwrap();
    for at in 0..mebibytes {
        let words = noise(1 << 18, at + 1).into_iter().map(|byte| WORDS[usize::from(byte) % WORDS.len()]);
        let text: Vec<u8> = words.flat_map(str::bytes).take(1 << 20).collect();
        file.write_all_at(&text, at << 20).unwrap();
    }
}

const WORDS: [&str; 16] = [
    "drain ",
    "a host ",
    "the pipe ",
    "its disks ",
    "memory ",
    "while ",
    "it runs ",
    "and ",
    "moves ",
    "to ",
    "another ",
    "over all ",
    "of them ",
    "nobody ",
    "waits ",
    "here\n",
];

/// Packers that run in idle time.
fn packers() -> Packers {
    let concurrent = ConcurrentSenders::default();
    let settings = PackersSettings { cores: 2, cpus: vec![], gives_way: true, concurrent };
    Packers::start(settings).unwrap()
}

pub(crate) fn blank(path: &Path, mebibytes: u64) {
    File::create(path).unwrap().set_len(mebibytes << 20).unwrap();
}

pub(crate) fn assert_same(one: &Path, other: &Path) {
    // Not by assert_eq, which would print both.
    assert!(fs::read(one).unwrap() == fs::read(other).unwrap(), "the disks differ");
}

pub(crate) fn allocated_bytes(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Waits until this is so.
pub(crate) async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let waiting = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

pub(crate) async fn in_time<T>(what: impl Future<Output = T>) -> T {
    timeout(PATIENCE, what).await.expect("it takes too long")
}

/// The connection between the ends of a stream.
pub(crate) struct Wire {
    task: AbortHandle,
    mute: oneshot::Sender<()>,
}

impl Wire {
    /// Both ends see the cut. What was under way may or may not be lost.
    pub(crate) fn cut(self) {
        self.task.abort();
    }

    /// Nothing arrives any more, and neither end is told.
    pub(crate) fn mute(self) {
        self.mute.send(()).unwrap();
    }
}

/// A disk, copied or about to be.
pub(crate) struct Bench {
    pub(crate) directory: TempDir,
    server: Child,
    pub(crate) target: TargetSplitter,
    pub(crate) watch: SourceWatch,
    /// The limit within which the source sends.
    pub(crate) pace: Pace,
    pub(crate) server_address: ServerAddress,
    address: String,
    streams: mpsc::Sender<Stream>,
    cancel: Option<oneshot::Sender<()>>,
    run: JoinHandle<Result<(), SplitterError>>,
    /// How the target's ends of the streams ended.
    pub(crate) served: Arc<Mutex<Vec<Result<(), SplitterError>>>>,
}

/// The settings that differ between tests.
pub(crate) struct Settings {
    pub(crate) mebibytes: u64,
    pub(crate) is_thin: bool,
    pub(crate) finds_zeroes: bool,
    pub(crate) there: There,
    /// Whether idle cores pack data.
    pub(crate) packs: bool,
    /// The directory of the disks and the server's socket.
    pub(crate) directory: PathBuf,
    pub(crate) server: Server,
}

/// How the target's server is reached.
pub(crate) enum Server {
    Unix,
    Tcp,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mebibytes: 24,
            is_thin: true,
            finds_zeroes: true,
            there: There::Zeroes,
            packs: false,
            directory: std::env::temp_dir(),
            server: Server::Unix,
        }
    }
}

impl Bench {
    /// Serves a blank target.
    pub(crate) async fn new(settings: Settings) -> Self {
        Self::with_session(settings, Session::new_random()).await
    }

    /// The same, for a session that a test must know.
    pub(crate) async fn with_session(settings: Settings, session: Session) -> Self {
        let directory = tempfile::tempdir_in(&settings.directory).unwrap();
        let disk = directory.path().join("target");
        blank(&disk, settings.mebibytes);
        let (server, server_address) = match settings.server {
            Server::Unix => serve_by_unix(&disk, &directory.path().join("nbd")).await,
            Server::Tcp => serve_by_tcp(&disk).await,
        };
        let size_bytes = settings.mebibytes << 20;
        let target = TargetSplitter::new(DiskServer {
            session,
            address: server_address.clone(),
            export_name: NAME.into(),
            size_bytes,
        });
        let Settings { is_thin, finds_zeroes, there, .. } = settings;
        let pace = Pace::default();
        let packers = settings.packs.then(packers);
        let export =
            Export { session, size_bytes, finds_zeroes, there, is_thin, pace: pace.clone(), packers };
        let source = SourceSplitter::listen(export).await.unwrap();
        let (watch, address) =
            (source.watch(), format!("nbd://{}/{}", source.address(), source.export_name()));
        let (streams, to_carry) = mpsc::channel(8);
        let (cancel, cancelled) = oneshot::channel::<()>();
        let run = tokio::spawn(source.run(to_carry, async {
            // The test may end before.
            if cancelled.await.is_err() {
                std::future::pending::<()>().await;
            }
        }));
        let cancel = Some(cancel);
        Self {
            directory,
            server,
            target,
            watch,
            pace,
            server_address,
            address,
            streams,
            cancel,
            run,
            served: Arc::default(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The address to which a client connects.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Adds a stream, which lives until it is cut.
    pub(crate) async fn connect(&self) -> Wire {
        let (source, mut near) = duplex(ON_ITS_WAY_BYTES);
        let (mut far, target) = duplex(ON_ITS_WAY_BYTES);
        let (mute, muted) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                // Both ends stay open.
                Ok(()) = muted => std::future::pending().await,
            }
        });
        self.serve(target);
        self.bring(source).await;
        Wire { task: task.abort_handle(), mute }
    }

    pub(crate) async fn connect_many(&self, count: usize) -> Vec<Wire> {
        let mut wires = vec![];
        for _ in 0..count {
            wires.push(self.connect().await);
        }
        wires
    }

    /// Adds a stream with this connection.
    pub(crate) async fn bring(&self, stream: impl BothWays + 'static) {
        self.streams.send(Box::new(stream)).await.ok();
    }

    /// Adds a stream over a TCP connection of the kernel, with nothing between its ends.
    pub(crate) async fn connect_by_tcp(&self) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let source = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (target, _) = listener.accept().await.unwrap();
        source.set_nodelay(true).unwrap();
        target.set_nodelay(true).unwrap();
        self.serve(target);
        self.bring(source).await;
    }

    fn serve(&self, stream: impl BothWays + 'static) {
        let (splitter, served) = (self.target.clone(), Arc::clone(&self.served));
        tokio::spawn(async move {
            let ended = splitter.serve(stream).await;
            served.lock().unwrap().push(ended);
        });
    }

    /// Starts to copy an image through the splitter.
    pub(crate) fn copy(&self, source: &Path) -> Child {
        let mut command = Command::new("qemu-img");
        command.args(["convert", "-n", "-f", "raw", "-O", "raw", "-t", "none", "-m", "16", "-W"]);
        command.arg(source).arg(&self.address);
        command.kill_on_drop(true).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Fails the test unless an image is copied completely, and the splitter ends without an error.
    pub(crate) async fn copy_whole(&mut self, source: &Path) {
        self.assert_whole(source, said(self.copy(source)).await).await;
    }

    /// The same for a copy that has ended with this output.
    pub(crate) async fn assert_whole(&mut self, source: &Path, (is_well, said): (bool, String)) {
        assert!(is_well, "{said}");
        self.ended().await.unwrap();
        assert_same(source, &self.path("target"));
    }

    /// Runs qemu-io with these commands.
    pub(crate) fn qemu_io(&self, commands: &[&str]) -> Child {
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw", "-t", "none", "-d", "unmap"]).arg(&self.address);
        for todo in commands {
            command.args(["-c", todo]);
        }
        command.kill_on_drop(true).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub(crate) fn cancel(&mut self) {
        self.cancel.take().unwrap().send(()).unwrap();
    }

    /// How the source's end ended.
    pub(crate) async fn ended(&mut self) -> Result<(), SplitterError> {
        in_time(&mut self.run).await.unwrap()
    }

    pub(crate) async fn kill_server(&mut self) {
        self.server.kill().await.unwrap();
    }
}

fn server(disk: &Path) -> Command {
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "--shared=0", "--format=raw", "--discard=unmap", "--export-name", NAME]);
    command.arg(disk).kill_on_drop(true);
    command
}

async fn serve_by_unix(disk: &Path, socket: &Path) -> (Child, ServerAddress) {
    let server = server(disk).arg("--socket").arg(socket).spawn().unwrap();
    // Its socket exists a moment before it listens.
    eventually("qemu-nbd listens", || UnixStream::connect(socket).is_ok()).await;
    (server, ServerAddress::Unix(socket.into()))
}

async fn serve_by_tcp(disk: &Path) -> (Child, ServerAddress) {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let (address, port) = (free.ip().to_string(), free.port().to_string());
    let server = server(disk).args(["--bind", &address, "--port", &port]).spawn().unwrap();
    eventually("qemu-nbd listens", || std::net::TcpStream::connect(free).is_ok()).await;
    (server, ServerAddress::Tcp(free))
}

/// How a client ended, and its output.
pub(crate) async fn said(child: Child) -> (bool, String) {
    let output = in_time(child.wait_with_output()).await.unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}
