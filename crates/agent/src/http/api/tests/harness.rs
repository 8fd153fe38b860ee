//! An agent on loopback, and callers who can say anything to it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use drainpipe_engine::problem::Problem;
use drainpipe_identity::{Fingerprint, Identity};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::app;
use crate::joining::setup;
use crate::store::config::{Config, Link, Tls};
use crate::store::fleet_files::files;
use crate::store::journal::Journal;
use crate::test_host::{
    NOBODY, certificate_files, configuration, make_certificates, own_address, serve_peer,
};

const DEADLINE: Duration = Duration::from_secs(30);

/// The caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Root,
    Operator,
    /// The host that sends VMs to the agent's host.
    Source,
    /// The host to which the agent's host sends VMs.
    Target,
    /// A host that is neither.
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

/// An agent's answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: String,
}

impl Answer {
    /// The problem in the answer to a failed request.
    pub(super) fn problem(&self) -> Problem {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("no problem, {error}: {self:?}"))
    }
}

/// A running agent of the host `here`. Its peers are `source` and `target`; neither answers by default.
pub(super) struct TestAgent {
    directory: tempfile::TempDir,
    address: SocketAddr,
    stop: watch::Sender<bool>,
    running: JoinHandle<Result<app::Ended, Problem>>,
}

impl TestAgent {
    /// Starts an agent; without QEMU, prints that and returns `None`.
    pub(super) async fn start() -> Option<Self> {
        Self::start_beside(None).await
    }

    /// The same with a `target` that answers like this.
    pub(super) async fn start_beside(target: Option<Router>) -> Option<Self> {
        Self::start_with(target, |_| {}).await
    }

    /// The same on a host where `lo` is a link for migrations.
    pub(super) async fn start_over_loopback() -> Option<Self> {
        let links = vec![Link { name: "lo".into(), speed_mbps: None }];
        Self::start_with(None, |config| config.links = links).await
    }

    /// The same on a host that has the authority of its own fleet.
    pub(super) async fn start_founded() -> Option<Self> {
        Self::start_with(None, |config| {
            setup::found(config, 3600).unwrap();
            config.tls = Tls::of_joined(&files(&config.state_directory));
        })
        .await
    }

    async fn start_with(target: Option<Router>, prepare: impl FnOnce(&mut Config)) -> Option<Self> {
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
            Some(router) => serve_peer(directory.path(), Who::Target.name(), router, stopped.clone()).await,
            None => NOBODY,
        };
        let mut config = configuration(directory.path(), address, [NOBODY, target]);
        config.qemu.launcher = vec![launcher.into()];
        prepare(&mut config);
        let running = tokio::spawn(app::run(config, stopped));
        let agent = Self { directory, address, stop, running };
        agent.wait_until_it_serves().await;
        Some(agent)
    }

    async fn wait_until_it_serves(&self) {
        let began = Instant::now();
        while !self.running.is_finished() && began.elapsed() < DEADLINE {
            // The agent listens long before it answers, since it first asks QEMU for its capabilities.
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

    /// The address on which it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The authority of a founded fleet.
    pub(super) fn authority(&self) -> Fingerprint {
        let pem = std::fs::read_to_string(self.directory.path().join("state/fleet/ca.pem")).unwrap();
        Fingerprint::of_pem(&pem).unwrap()
    }

    /// The directory of files that VMs may use.
    pub(super) fn disks(&self) -> PathBuf {
        let disks = self.directory.path().join("disks");
        std::fs::create_dir_all(&disks).unwrap();
        disks
    }

    /// Opens the agent's journal a second time.
    pub(super) fn journal(&self) -> Journal {
        Journal::open(&self.directory.path().join("state"), &self.directory.path().join("run")).unwrap()
    }

    /// The journal's file, to write what no agent would.
    pub(super) fn database(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(self.directory.path().join("state/journal.sqlite")).unwrap()
    }

    /// Sends a request with a JSON body, or without one.
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

async fn exchange_over(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> Answer {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    parse(&String::from_utf8(answer).unwrap())
}

pub(super) fn parse(answer: &str) -> Answer {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Answer { status, head: head.to_lowercase(), body: body.into() }
}

/// The program that becomes QEMU where no test is the whole program: cargo builds it beside the tests.
fn launcher() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).expect("in a directory of the target's").join("drainpipe-launch")
}
