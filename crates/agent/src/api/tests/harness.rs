//! An agent on loopback, and callers who can say anything to it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use drainpipe_engine::connections::Priority;
use drainpipe_engine::problem::Problem;
use drainpipe_identity::authority::{InitOptions, IssueOptions, init, issue_host, issue_operator};
use drainpipe_identity::{Identity, Validity};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::app;
use crate::config::{Config, Link};
use crate::journal::Journal;
use crate::server;

const DEADLINE: Duration = Duration::from_secs(30);

/// Where nothing listens.
const NOBODY: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 1);

/// Who calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Root,
    Operator,
    /// The host that sends VMs to the agent's.
    Source,
    /// The host to which the agent's sends VMs.
    Target,
    /// A host that has to do with neither.
    Other,
}

impl Who {
    pub(super) const ALL: [Self; 5] = [Self::Root, Self::Operator, Self::Source, Self::Target, Self::Other];

    /// Name in the certificate.
    fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Operator => "ann",
            Self::Source => "source",
            Self::Target => "target",
            Self::Other => "other",
        }
    }
}

/// What an agent answers.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl Answer {
    /// The problem that a failed request is answered with.
    pub(super) fn problem(&self) -> Problem {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("no problem, {error}: {self:?}"))
    }
}

/// A running agent of the host `here`; its peers are `source`, and `target`. Neither answers, unless told otherwise.
pub(super) struct TestAgent {
    directory: tempfile::TempDir,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    running: JoinHandle<Result<app::Ended, Problem>>,
}

impl TestAgent {
    /// Starts one; `None`, and says so, where there is no QEMU.
    pub(super) async fn start() -> Option<Self> {
        Self::start_beside(None).await
    }

    /// The same, with a `target` that answers so.
    pub(super) async fn start_beside(target: Option<Router>) -> Option<Self> {
        Self::start_with(target, vec![]).await
    }

    /// The same, of a host on which `lo` is a link for migrations.
    pub(super) async fn start_over_loopback() -> Option<Self> {
        Self::start_with(None, vec![Link { name: "lo".into(), speed_mbps: None }]).await
    }

    async fn start_with(target: Option<Router>, links: Vec<Link>) -> Option<Self> {
        if let Err(error) = std::process::Command::new("qemu-system-x86_64").arg("--version").output() {
            eprintln!("SKIPPED: an agent needs qemu-system-x86_64: {error}");
            return None;
        }
        let launcher = launcher();
        if !launcher.exists() {
            eprintln!("SKIPPED: an agent needs {}: `cargo build --workspace`", launcher.display());
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let address = own_address();
        make_certificates(directory.path());
        let (stop, stopped) = watch::channel(false);
        let target = match target {
            Some(router) => serve_target(directory.path(), router, stopped.clone()).await,
            None => NOBODY.into(),
        };
        let mut config = configuration(directory.path(), address, target);
        (config.qemu.launcher, config.links) = (vec![launcher.into()], links);
        let running = tokio::spawn(app::run(config, stopped));
        let agent = Self { directory, address, stop, running };
        agent.wait_until_it_serves().await;
        Some(agent)
    }

    async fn wait_until_it_serves(&self) {
        let began = Instant::now();
        while !self.running.is_finished() && began.elapsed() < DEADLINE {
            // It listens long before it answers: first it asks QEMU what it can do.
            if self.say(Who::Root, "GET", "/v1/openapi.json", "").await.status == 200 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the agent does not serve; has it ended: {}", self.running.is_finished());
    }

    pub(super) async fn stop(self) {
        self.stop.send(true).unwrap();
        timeout(DEADLINE, self.running).await.unwrap().unwrap().unwrap();
    }

    /// The directory of files that VMs may use.
    pub(super) fn disks(&self) -> PathBuf {
        let disks = self.directory.path().join("disks");
        std::fs::create_dir_all(&disks).unwrap();
        disks
    }

    /// A second hand on the agent's journal.
    pub(super) fn journal(&self) -> Journal {
        Journal::open(&self.directory.path().join("state"), &self.directory.path().join("run")).unwrap()
    }

    /// The journal's file, for what no agent writes.
    pub(super) fn database(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.directory.path().join("state/journal.sqlite")).unwrap()
    }

    /// Sends a request with a body of JSON, or none.
    pub(super) async fn say(&self, who: Who, method: &str, path: &str, body: &str) -> Answer {
        let content = if body.is_empty() { "" } else { "content-type: application/json\r\n" };
        self.say_with(who, method, path, content, body).await
    }

    /// Sends a request with these headers, byte for byte.
    pub(super) async fn say_with(
        &self,
        who: Who,
        method: &str,
        path: &str,
        headers: &str,
        body: &str,
    ) -> Answer {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\ncontent-length: {length}\r\n{headers}\r\n{body}"
        );
        timeout(DEADLINE, self.exchange(who, &request)).await.expect("an answer in time")
    }

    async fn exchange(&self, who: Who, request: &str) -> Answer {
        if who == Who::Root {
            let Ok(stream) = UnixStream::connect(self.directory.path().join("agent.sock")).await else {
                return parse("");
            };
            return exchange_over(stream, request).await;
        }
        let stream = TcpStream::connect(self.address).await.unwrap();
        let tls = TlsConnector::from(Arc::new(self.identity(who.name()).client_config()));
        let here = ServerName::try_from("here").unwrap();
        exchange_over(tls.connect(here, stream).await.unwrap(), request).await
    }

    fn identity(&self, name: &str) -> Identity {
        let [certificate, key, authority] = certificate_files(self.directory.path(), name);
        Identity::load(&certificate, &key, &authority).unwrap()
    }
}

/// Until told to stop.
async fn serve_target(directory: &Path, router: Router, stop: watch::Receiver<bool>) -> SocketAddr {
    let [certificate, key, authority] = certificate_files(directory, Who::Target.name());
    let identity = Identity::load(&certificate, &key, &authority).unwrap();
    let address = own_address();
    let listener = server::bind_tls(address).await.unwrap();
    tokio::spawn(server::serve_tls(listener, identity, router, Arc::new(|_| Priority::Usual), stop));
    address
}

async fn exchange_over(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> Answer {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    parse(&String::from_utf8(answer).unwrap())
}

fn parse(answer: &str) -> Answer {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Answer { status, head: head.to_lowercase(), body: body.into() }
}

/// A loopback address that no other running test has: its last three bytes are a number of this
/// process and a count.
fn own_address() -> SocketAddr {
    static COUNT: AtomicU16 = AtomicU16::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let count = u8::try_from(COUNT.fetch_add(1, Ordering::Relaxed)).expect("a handful of tests");
    (Ipv4Addr::new(127, high, low, count), crate::config::DEFAULT_PORT).into()
}

/// What becomes QEMU where no test is the whole program: cargo builds it beside the tests.
fn launcher() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).expect("in a directory of the target's").join("drainpipe-launch")
}

fn certificate_files(directory: &Path, name: &str) -> [PathBuf; 3] {
    ["pem", "key", "ca"].map(|kind| directory.join(format!("{name}.{kind}")))
}

fn make_certificates(directory: &Path) {
    let authority = directory.join("authority");
    let validity = Validity::days(std::num::NonZeroU32::MIN);
    init(&authority, &InitOptions { validity, overwrite: false }).unwrap();
    let options = IssueOptions { validity, out: None, overwrite: false };
    let operator = issue_operator(&authority, Who::Operator.name(), &options).unwrap();
    let hosts =
        ["here", "source", "target", "other"].map(|name| issue_host(&authority, name, &options).unwrap());
    for issued in hosts.iter().chain([&operator]) {
        let files = [&issued.certificate, &issued.key, &issued.authority];
        for (from, to) in files.into_iter().zip(certificate_files(directory, issued.peer.name())) {
            std::fs::rename(from, &to).or_else(|_| std::fs::copy(from, &to).map(drop)).unwrap();
        }
    }
}

fn configuration(directory: &Path, address: SocketAddr, target: SocketAddr) -> Config {
    let [certificate, key, authority] = certificate_files(directory, "here");
    let text = format!(
        r#"
        name = "here"
        listen = "{address}"
        socket = "{directory}/agent.sock"
        state_directory = "{directory}/state"
        runtime_directory = "{directory}/run"
        [vms]
        directories = ["{directory}/disks"]
        bridges = ["br0"]
        [tls]
        certificate = "{}"
        key = "{}"
        authority = "{}"
        [qemu]
        user = "60999"
        [[peer]]
        name = "source"
        address = "127.0.0.1:1"
        [[peer]]
        name = "target"
        address = "{target}"
        "#,
        certificate.display(),
        key.display(),
        authority.display(),
        directory = directory.display(),
    );
    Config::parse(&text, Path::new("agent.toml")).unwrap()
}
