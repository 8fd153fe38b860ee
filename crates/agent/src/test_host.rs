//! A host in a temporary directory, for tests: its parts as [`app`] makes them, over a fake hypervisor and a journal
//! of its own. Its peers `source` and `target` answer what a test chooses, or nothing.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use axum::Router;
use drainpipe_engine::host::encryption_policy::EncryptionPolicy;
use drainpipe_engine::option::RequestedOption;
use drainpipe_hypervisor::fake::{FakeHypervisor, FakeVm};
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_hypervisor::{Hypervisor, Role};
use drainpipe_identity::authority::{InitOptions, IssueOptions, init, issue_host, issue_operator};
use drainpipe_identity::{Identity, Validity};
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::app;
use crate::http::api::Parts;
use crate::http::server;
use crate::store::config::{Config, Link};
use drainpipe_api_types::MigrateRequest;

/// Where nothing listens.
pub(crate) const NOBODY: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1));

/// Nothing that a test waits for takes so long, unless it never comes.
const DEADLINE: Duration = Duration::from_secs(30);

/// The holders of certificates here: hosts, and one operator.
const HOSTS: [&str; 4] = ["here", "source", "target", "other"];
const OPERATOR: &str = "ann";

/// The host `here`. It outlives its agents, and so do its VMs.
pub(crate) struct TestHost {
    pub(crate) hypervisor: Arc<FakeHypervisor>,
    directory: tempfile::TempDir,
    peers: [SocketAddr; 2],
    // On which the peers answer.
    network: Runtime,
    stop_peers: watch::Sender<bool>,
}

/// One run of the host's agent. It ends with its drop, as one that is killed does: in the middle of what it was doing.
pub(crate) struct Life {
    pub(crate) parts: Parts,
    runtime: Runtime,
    // An agent that nobody can tell to stop takes it that it is to.
    _stop: watch::Sender<bool>,
}

impl TestHost {
    /// Beside peers that do not answer.
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        make_certificates(directory.path());
        let hypervisor = FakeHypervisor::new(directory.path().join("run"));
        std::fs::create_dir(directory.path().join("run")).unwrap();
        let (network, stop_peers) = (runtime(), watch::Sender::new(false));
        Self { hypervisor, directory, peers: [NOBODY; 2], network, stop_peers }
    }

    /// Has `source` answer so, to the agents that are started from now on.
    pub(crate) fn source_answers(&mut self, router: Router) {
        self.peers[0] = self.serve("source", router);
    }

    /// Has `target` answer so, to the agents that are started from now on.
    pub(crate) fn target_answers(&mut self, router: Router) {
        self.peers[1] = self.serve("target", router);
    }

    fn serve(&self, name: &str, router: Router) -> SocketAddr {
        self.network.block_on(serve_peer(self.directory.path(), name, router, self.stop_peers.subscribe()))
    }

    /// Starts its agent, which takes up what the one before has left.
    pub(crate) fn start(&self) -> Life {
        let (runtime, stop) = (runtime(), watch::Sender::new(false));
        let config = self.config();
        let parts = runtime.block_on(async {
            let identity = app::load_identity(&config).unwrap();
            let heard = Arc::new(app::open_heard(&config).unwrap());
            let hypervisor = Arc::clone(&self.hypervisor);
            let parts = app::open(config, hypervisor, &identity, heard, stop.subscribe()).await.unwrap();
            app::recover(&parts).await.unwrap();
            parts
        });
        Life { parts, runtime, _stop: stop }
    }

    /// Settings of its agent. It gives up early on a silent target.
    pub(crate) fn config(&self) -> Config {
        let mut config = configuration(self.directory.path(), own_address(), self.peers);
        config.links = vec![Link { name: "lo".into(), speed_mbps: None }];
        config.encryption = EncryptionPolicy::Allowed;
        config.limits.decision_s = 1;
        config
    }

    /// Where a disk of its VMs is, or may be made.
    pub(crate) fn disk_path(&self, name: &str) -> PathBuf {
        let directory = self.directory.path().join("disks");
        std::fs::create_dir_all(&directory).unwrap();
        directory.join(name)
    }

    /// Runs a VM that no agent knows of, as another manager of VMs does, or an agent that has lost its journal.
    pub(crate) fn runs_by_others(&self, definition: &VmSpec) -> Arc<FakeVm> {
        self.block_on(started(&self.hypervisor, definition))
    }

    /// Waits for what no agent does.
    pub(crate) fn block_on<T>(&self, what: impl Future<Output = T>) -> T {
        self.network.block_on(async { timeout(DEADLINE, what).await.expect("it ends in time") })
    }

    /// The VM of this name, as the hypervisor has it.
    pub(crate) fn vm(&self, name: &str) -> Arc<FakeVm> {
        self.hypervisor.vm(name).expect("it was started")
    }
}

impl Life {
    /// Waits for what its parts do.
    pub(crate) fn block_on<T>(&self, what: impl Future<Output = T>) -> T {
        self.runtime.block_on(async { timeout(DEADLINE, what).await.expect("it ends in time") })
    }
}

/// A VM that runs there, and that no agent knows of.
pub(crate) async fn started(hypervisor: &FakeHypervisor, definition: &VmSpec) -> Arc<FakeVm> {
    let spec = definition.resolve(&hypervisor.probe(DEADLINE).await.unwrap()).unwrap();
    hypervisor.start(spec, b"{}", Role::Fresh, DEADLINE).await.unwrap();
    hypervisor.vm(definition.name.as_str()).expect("it was started")
}

/// A VM as its owner writes it.
pub(crate) fn definition(name: &str) -> VmSpec {
    let spec = json!({ "name": name, "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-10.0" });
    serde_json::from_value(spec).unwrap()
}

/// A domain of libvirt's, as Drainpipe describes it.
pub(crate) fn domain(name: &str) -> VmSpec {
    VmSpec { manager: serde_json::from_value(json!("libvirt")).unwrap(), ..definition(name) }
}

/// A request to move a VM to the host `target`.
pub(crate) fn migrate(vm: &str) -> MigrateRequest {
    MigrateRequest::plain(vm, "target", RequestedOption::Auto)
}

/// With threads enough for a part that blocks one.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Lets a peer answer until it is stopped; returns where.
pub(crate) async fn serve_peer(
    directory: &Path,
    name: &str,
    router: Router,
    stop: watch::Receiver<bool>,
) -> SocketAddr {
    let [certificate, key, authority] = certificate_files(directory, name);
    let identity = Identity::load(&certificate, &key, &authority).unwrap();
    let address = own_address();
    let listener = server::bind_tls(address).await.unwrap();
    tokio::spawn(server::serve_tls(listener, identity, router, server::Welcome::usual(), stop));
    address
}

/// A loopback address that no other running test has: its last three bytes are a number of this process and a count, which
/// goes on in the port.
pub(crate) fn own_address() -> SocketAddr {
    // One for the whole process, which runs its tests side by side.
    static COUNT: AtomicU16 = AtomicU16::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let [further, count] = COUNT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    let port = crate::store::config::DEFAULT_PORT + u16::from(further);
    (Ipv4Addr::new(127, high, low, count), port).into()
}

/// Certificate, key and authority of somebody, as [`make_certificates`] names them.
pub(crate) fn certificate_files(directory: &Path, name: &str) -> [PathBuf; 3] {
    ["pem", "key", "ca"].map(|kind| directory.join(format!("{name}.{kind}")))
}

/// Makes certificates of all hosts and of an operator.
pub(crate) fn make_certificates(directory: &Path) {
    let authority = directory.join("authority");
    let validity = Validity::days(std::num::NonZeroU32::MIN);
    init(&authority, &InitOptions { validity, overwrite: false }).unwrap();
    let options = IssueOptions { validity, out: None, overwrite: false };
    let operator = issue_operator(&authority, OPERATOR, &options).unwrap();
    let hosts = HOSTS.map(|name| issue_host(&authority, name, &options).unwrap());
    for issued in hosts.iter().chain([&operator]) {
        let files = [&issued.certificate, &issued.key, &issued.authority];
        for (from, to) in files.into_iter().zip(certificate_files(directory, issued.peer.name())) {
            std::fs::rename(from, &to).or_else(|_| std::fs::copy(from, &to).map(drop)).unwrap();
        }
    }
}

/// The configuration of the host `here`, whose peers `source` and `target` are reached there.
pub(crate) fn configuration(
    directory: &Path,
    address: SocketAddr,
    [source, target]: [SocketAddr; 2],
) -> Config {
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
        address = "{source}"
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
