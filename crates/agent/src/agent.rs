//! The agent of one host: what its parts share, how it starts and stops.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use drainpipe_engine::connections::Priority;
use drainpipe_engine::facts::{HostFacts, HypervisorVersion, NoMigrationAddress};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Release;
use drainpipe_hypervisor::facts::HypervisorFacts;
use drainpipe_hypervisor::{Launcher, QemuUser};
use drainpipe_identity::{Identity, Peer, check_unchangeable};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use crate::api;
use crate::api::types::{HostStatus, HostView, PeerView, Scope, VmList, VmState};
use crate::bandwidth::{self, Bandwidth};
use crate::check::{self, Checks, KnownPaths};
use crate::chosen_address;
use crate::client::ApiClient;
use crate::config::Config;
use crate::cpu_list::CpuList;
use crate::cpu_priority::{self, FirstSessions};
use crate::discovery;
use crate::drain::{self, Drains};
use crate::fixes::{self, Fixes};
use crate::host::HostHardware;
use crate::idle_cores::{self, IdleCores};
use crate::incoming::{self, IncomingVms};
use crate::journal::{self, Journal};
use crate::network::HostNetwork;
use crate::outgoing::{self, Outgoing};
use crate::path_watch::PathWatches;
use crate::ports::MigrationPorts;
use crate::proof::{self, Answering, Heard, Proof};
use crate::relay::{LostCpus, Packing, check_packing_cpus, own_cpus};
use crate::release::look_at_host;
use crate::server::{self, PriorityOf};
use crate::slots::Slots;
use crate::throttles;
use crate::unresponsive;
use crate::vm_files::VmFiles;
use crate::vms::{QEMU_DEADLINE, Vms, describe};
use crate::watchdog;

/// How long the other agents may take to say what there is on their hosts: somebody waits for the list, and
/// those that answer at all do so at once.
const PEER_DEADLINE: Duration = Duration::from_secs(2);

/// One host's agent.
#[derive(Debug)]
pub struct Agent {
    /// What it was told.
    pub(crate) config: Config,
    /// What it must not forget.
    pub(crate) journal: Arc<Journal>,
    /// What other hosts have told of theirs.
    pub(crate) heard: Arc<Heard>,
    /// Whether others have shown that nothing is missing in it.
    pub(crate) proof: Proof,
    /// The host's network.
    pub(crate) network: HostNetwork,
    /// The VMs here.
    pub(crate) vms: Arc<Vms>,
    /// Migrations from here.
    pub(crate) outgoing: Outgoing,
    /// Migrations to here.
    pub(crate) incoming: IncomingVms,
    /// The drain of this host.
    pub(crate) drains: Drains,
    /// Checks under way.
    pub(crate) checks: Checks,
    /// The files that VMs name.
    pub(crate) vm_files: VmFiles,
    /// What the paths to each peer were like when no migration used them.
    pub(crate) known_paths: KnownPaths,
    /// Sessions that go before others, for a VM that is silent.
    pub(crate) first_sessions: FirstSessions,
    /// Cores that nobody used when no migration was under way.
    pub(crate) idle_cores: IdleCores,
    /// CPUs that were to pack, and on which the agent may not run any more.
    pub(crate) lost_cpus: LostCpus,
    /// What checks have mended here.
    pub(crate) fixes: Fixes,
    /// The paths that migrations use, in either direction.
    pub(crate) watches: PathWatches,
    /// Limits of what migrations take of the links.
    pub(crate) bandwidth: Bandwidth,
    /// Ports for migrations.
    pub(crate) ports: MigrationPorts,
    /// Who this host is to others.
    pub(crate) identity: Identity,
    /// Trials of links under way that others have asked for.
    pub(crate) discoveries: Slots,
    chosen_address: Ipv6Addr,
    hardware: HostHardware,
    peers: BTreeMap<String, ApiClient>,
    stop: watch::Receiver<bool>,
}

/// Runs an agent until it is told to stop.
///
/// Stopping leaves the VMs running. Migrations from here are cancelled where that is still possible,
/// and waited for; meanwhile the agent answers, and begins nothing new. Those to here fail at their
/// sources. What is cut short all the same, by a crash, is left to the guards and to the next start.
pub async fn run(config: Config, mut stop: watch::Receiver<bool>) -> Result<Ended, Problem> {
    let identity = load_identity(&config)?;
    // Told before anything is begun, if they cannot be used.
    let own_cpus = own_cpus()?;
    check_packing_cpus(&config.compression, &own_cpus)?;
    // Both first: nothing is touched while another agent serves this host.
    let socket = server::bind_socket(&config.socket).await?;
    let tcp = server::bind_tls(config.listen).await?;
    let path = config.socket.clone();
    let heard = Arc::new(open_heard(&config)?);
    let answering = Answering::new(None);
    let router = proof::starting(Arc::clone(&heard), answering.subscribe());
    let (close, closed) = watch::channel(false);
    let serving = Arc::new(OnceLock::new());
    let priority = priority_by(Arc::clone(&serving));
    let tls = server::serve_tls(tcp, identity.clone(), router.clone(), priority, closed.clone());
    let living = async {
        let ended = live(config, &identity, heard, (&answering, &serving), own_cpus, &mut stop).await;
        close.send_replace(true);
        ended
    };
    let ((), (), ended) = tokio::join!(tls, server::serve_socket(socket, router, closed), living);
    if let Err(error) = std::fs::remove_file(&path) {
        warn!(%error, socket = %path.display(), "cannot remove the socket");
    }
    ended
}

/// How an agent ends that has served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to stop.
    Stopped,
    /// Its journal is not believed any more. Its next start says so, and does nothing by it.
    Doubted,
}

fn open_heard(config: &Config) -> Result<Heard, Problem> {
    journal::make_directory(&config.state_directory)?;
    Heard::open(&config.state_directory)
}

/// By what the agent knows of its peers, once it serves; until then an operator goes first.
fn priority_by(serving: Arc<OnceLock<Arc<Agent>>>) -> PriorityOf {
    Arc::new(move |peer| match (serving.get(), peer) {
        (Some(agent), peer) => agent.priority_of(peer),
        (None, Peer::Operator(_)) => Priority::First,
        (None, Peer::Host(_)) => Priority::Usual,
    })
}

/// From the first look at the journal to the end.
async fn live(
    config: Config,
    identity: &Identity,
    heard: Arc<Heard>,
    (answering, serving): (&Answering, &OnceLock<Arc<Agent>>),
    own_cpus: CpuList,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Problem> {
    let runtime = &config.runtime_directory;
    std::fs::create_dir_all(runtime)
        .map_err(|error| Problem::failed(format!("cannot create {}: {error}", runtime.display())))?;
    check_journal_is_own(&config.state_directory)?;
    // They end with their drop.
    let mut looking = JoinSet::new();
    looking.spawn(watchdog::keep_alive(config.socket.clone()));
    if !wait_until_believed(&config, identity, &heard, answering, stop).await? {
        return Ok(Ended::Stopped);
    }
    let agent = Agent::open(config, identity, heard, stop.clone()).await?;
    agent.recover().await?;
    serving.get_or_init(|| Arc::clone(&agent));
    let socket = agent.config.socket.display();
    info!(host = agent.name(), listen = %agent.config.listen, %socket, "serving");
    tell_service_manager();
    answering.send_replace(Some(api::router(Arc::clone(&agent))));
    looking.spawn(check::keep_trying(Arc::clone(&agent)));
    looking.spawn(idle_cores::keep_counting(Arc::clone(&agent), own_cpus));
    looking.spawn(proof::keep_telling(Arc::clone(&agent)));
    let mut doubts = agent.journal.doubts();
    tokio::select! {
        // Who could have said so may be gone: that stops it too.
        _ = stop.wait_for(|stop| *stop) => {}
        Ok(_) = doubts.wait_for(|doubts| !doubts.is_empty()) => return Ok(Ended::Doubted),
    }
    drain::shut_down(&agent).await;
    outgoing::shut_down(&agent).await;
    Ok(Ended::Stopped)
}

/// Says what is wrong with the journal until an operator has mended it; whether it is believed, or the agent is to stop.
async fn wait_until_believed(
    config: &Config,
    identity: &Identity,
    heard: &Arc<Heard>,
    answering: &Answering,
    stop: &mut watch::Receiver<bool>,
) -> Result<bool, Problem> {
    loop {
        let judged = proof::judge(config, identity, false).await?;
        if judged.doubts.is_empty() {
            answering.send_replace(None);
            return Ok(true);
        }
        error!(doubts = journal::in_words(&judged.doubts), "the journal is not believed: nothing is served");
        let (router, mut adopted) = proof::unbelieved(config, identity, Arc::clone(heard), &judged);
        answering.send_replace(Some(router));
        tell_service_manager();
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(false),
            _ = adopted.wait_for(|adopted| *adopted) => {}
        }
    }
}

/// The sockets are bound: whoever asks from now on waits for an answer and is not refused. Does
/// nothing where no service manager asked for it.
fn tell_service_manager() {
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        warn!(%error, "cannot tell the service manager that the agent is ready");
    }
}

/// Whoever writes to the journal says which VMs run here.
fn check_journal_is_own(directory: &Path) -> Result<(), Problem> {
    check_unchangeable(directory, "state directory").map_err(Problem::refused)?;
    for name in ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"] {
        check_unchangeable(&directory.join(name), "journal").map_err(Problem::refused)?;
    }
    Ok(())
}

fn load_identity(config: &Config) -> Result<Identity, Problem> {
    let tls = &config.tls;
    let identity = Identity::load(&tls.certificate, &tls.key, &tls.authority).map_err(Problem::refused)?;
    if *identity.holder() == Peer::Host(config.name.clone()) {
        return Ok(identity);
    }
    Err(Problem::refused(format!(
        "{} is the certificate of {}, but this host is configured as {}: correct `name`, or make the \
         right certificate with `drainpipe pki host {}`",
        tls.certificate.display(),
        identity.holder(),
        config.name,
        config.name
    )))
}

/// Who is not root runs QEMU as himself.
fn launcher(config: &Config) -> Result<Launcher, Problem> {
    let own = QemuUser::own();
    let user = if own.is_root() { QemuUser::find(&config.qemu.user).map_err(Problem::refused)? } else { own };
    if user.is_root() {
        warn!(
            "[qemu] user: QEMU runs as root; whoever breaks out of a VM may do to root's files what he likes"
        );
    }
    let (program, arguments) = config.qemu.launcher.split_first().expect("a program, by default");
    Ok(Launcher { program: program.into(), arguments: arguments.to_vec(), user })
}

impl Agent {
    async fn open(
        config: Config,
        identity: &Identity,
        heard: Arc<Heard>,
        stop: watch::Receiver<bool>,
    ) -> Result<Arc<Self>, Problem> {
        let runtime = &config.runtime_directory;
        let journal = Arc::new(Journal::open(&config.state_directory, runtime)?);
        journal.begin_witness()?;
        let proof = Proof::at_start(journal.standing()?);
        let network = HostNetwork::open(Arc::clone(&journal))?;
        let launcher = launcher(&config)?;
        let hypervisor = HypervisorFacts::probe(&launcher, &config.qemu.binary, runtime, QEMU_DEADLINE)
            .await
            .map_err(Problem::refused)?;
        let vms =
            Vms::open(&config.name, runtime.clone(), hypervisor, launcher, Arc::clone(&journal)).await?;
        let mut peers = BTreeMap::new();
        for peer in &config.peers {
            peers.insert(peer.name.clone(), ApiClient::over_tls(&peer.name, peer.address, identity)?);
        }
        Ok(Arc::new(Self {
            hardware: HostHardware::read()?,
            outgoing: Outgoing::default(),
            incoming: IncomingVms::default(),
            drains: Drains::default(),
            checks: Checks::open()?,
            vm_files: VmFiles::new(&config),
            known_paths: KnownPaths::default(),
            first_sessions: FirstSessions::default(),
            idle_cores: IdleCores::default(),
            lost_cpus: LostCpus::default(),
            fixes: Fixes::default(),
            watches: PathWatches::default(),
            bandwidth: Bandwidth::open(&journal)?,
            ports: MigrationPorts::default(),
            identity: identity.clone(),
            discoveries: discovery::trials(),
            chosen_address: chosen_address::choose(identity.authority_key(), &config.name),
            config,
            journal,
            heard,
            proof,
            network,
            vms,
            peers,
            stop,
        }))
    }

    /// Takes up what an earlier life of this agent left.
    async fn recover(self: &Arc<Self>) -> Result<(), Problem> {
        self.checks.look_at_links().await?;
        cpu_priority::end_all(self);
        throttles::lift_all(self);
        let waiting = self.journal.waiting_incoming()?;
        let migrations = waiting.iter().map(|record| record.id.clone());
        let still_needed: Vec<String> = migrations.chain([fixes::OWNER.into()]).collect();
        self.network.put_back_all_but(&still_needed).await?;
        incoming::clear_discarded(self).await?;
        incoming::recover(self, waiting).await?;
        let unresponsive = self.vms.unresponsive();
        incoming::resume_recorded(self, |vm| !unresponsive.iter().any(|name| name == vm)).await?;
        incoming::take_up_parts(self).await?;
        drain::recover(self)?;
        outgoing::recover(self)?;
        unresponsive::keep_trying(self);
        Ok(())
    }

    /// This host's name.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Refuses to begin anything once the agent has been told to stop.
    pub(crate) fn check_not_stopping(&self) -> Result<(), Problem> {
        if *self.stop.borrow() {
            return Err(Problem::conflict(format!(
                "the agent of {} is being stopped and begins nothing new: try again when it has been started",
                self.name()
            )));
        }
        Ok(())
    }

    /// Whether a VM's memory is on its way from here or to here, or will be. Where it has arrived, and it is not known
    /// yet whose the VM is, that may take days.
    pub(crate) fn is_migrating(&self) -> bool {
        !self.outgoing.under_way().is_empty() || self.incoming.are_receiving()
    }

    /// Whose connections are kept when there are too many: somebody who gives orders, and hosts whose VMs are on their
    /// way.
    fn priority_of(&self, peer: &Peer) -> Priority {
        let goes_first = match peer {
            Peer::Operator(_) => true,
            Peer::Host(host) => self.incoming.are_from(host) || self.outgoing.are_to(host),
        };
        if goes_first { Priority::First } else { Priority::Usual }
    }

    /// A way to another host's agent.
    pub fn peer(&self, name: &str) -> Option<&ApiClient> {
        self.peers.get(name)
    }

    /// The ways to all other hosts' agents.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (&str, &ApiClient)> {
        self.peers.iter().map(|(name, peer)| (name.as_str(), peer))
    }

    /// The address that this host has for routed multichannel, if it can have it.
    pub(crate) fn intended_address(&self) -> IpAddr {
        self.config.migration_address.unwrap_or(IpAddr::V6(self.chosen_address))
    }

    /// This host's address for routed multichannel: the configured one, or else one of the agent's
    /// choice that is nobody's on this host.
    pub(crate) async fn migration_address(&self) -> Result<Result<IpAddr, NoMigrationAddress>, Problem> {
        let address = self.intended_address();
        if self.config.migration_address.is_some() {
            return Ok(Ok(address));
        }
        if !drainpipe_net::has_ipv6().map_err(Problem::failed)? {
            return Ok(Err(NoMigrationAddress::Ipv6Off));
        }
        let taken = self.network.subnet_of(address).await?;
        Ok(taken.map_or(Ok(address), |by| Err(NoMigrationAddress::Taken { address, by })))
    }

    /// What migrations need to know of this host, as it is now.
    pub async fn facts(&self) -> Result<HostFacts, Problem> {
        let links = self.network.migration_links(&self.config).await?;
        let migration_address = self.migration_address().await?;
        let hypervisor = self.vms.hypervisor();
        let devices = drainpipe_net::rdma_devices().map_err(Problem::failed)?;
        let packing = Packing::of(self)?;
        Ok(HostFacts {
            name: self.name().into(),
            cores: self.hardware.cores,
            idle_cores: self.idle_cores.known(),
            vm_cores: self.vms.cores_taken(),
            packing_cores: packing.cores.try_into().ok(),
            no_packing: packing.obstacle,
            memory_available_bytes: incoming::memory_free_bytes(self)?,
            huge_pages_available: incoming::huge_pages_free(self),
            links: links.first,
            management_links: links.management,
            bandwidth_limit_mbps: bandwidth::limit_mbps(self),
            encryption: self.config.encryption,
            no_migration_address: migration_address.as_ref().err().cloned(),
            migration_address: migration_address.ok(),
            rdma_devices: devices.into_iter().map(|device| device.name).collect(),
            hypervisor: HypervisorVersion {
                name: "QEMU".into(),
                version: hypervisor.version.to_string(),
                rdma: hypervisor.rdma,
            },
        })
    }

    /// This host, for people and peers.
    pub async fn view(&self) -> Result<HostView, Problem> {
        let kvm = self.vms.hypervisor().kvm_missing.is_none();
        let cordon = self.journal.cordon()?;
        let release = Release::own();
        Ok(HostView {
            facts: self.facts().await?,
            agent_version: release.version,
            protocols: release.protocols,
            kernel: self.hardware.kernel.clone(),
            cpu_model: self.hardware.cpu_model.clone(),
            memory_bytes: self.hardware.memory_bytes,
            accelerator: if kvm { "kvm" } else { "tcg" }.into(),
            cordoned: cordon.is_some(),
            swap_with: cordon.and_then(|cordon| cordon.swap_with),
            peers: self
                .config
                .peers
                .iter()
                .map(|peer| PeerView { name: peer.name.clone(), address: peer.address.to_string() })
                .collect(),
            paths: self.known_paths.all(),
        })
    }

    /// All hosts that this one knows, itself first.
    pub async fn all_hosts(&self) -> Result<Vec<HostStatus>, Problem> {
        let own = HostStatus {
            name: self.name().into(),
            address: self.config.listen.to_string(),
            host: Some(self.view().await?),
            error: None,
        };
        let others = self.config.peers.iter().map(|peer| async move {
            let asked = match self.peer(&peer.name) {
                Some(client) => look_at_host(self, client, &peer.name, PEER_DEADLINE).await,
                None => Err(Problem::failed("no client")),
            };
            let (host, error) = match asked {
                Ok(view) => (Some(view), None),
                Err(problem) => (None, Some(problem.message)),
            };
            HostStatus { name: peer.name.clone(), address: peer.address.to_string(), host, error }
        });
        let mut all = vec![own];
        all.extend(futures_util::future::join_all(others).await);
        Ok(all)
    }

    /// The VMs here, or of all hosts that this one knows.
    pub async fn list_vms(&self, scope: Scope) -> VmList {
        let mut list = VmList { vms: self.vms.list().await, ..VmList::default() };
        let coming = self.incoming.definitions();
        let coming = coming.iter().filter(|definition| !self.vms.contains(definition.name.as_str()));
        list.vms.extend(coming.map(|definition| {
            let is_told = self.incoming.is_told(definition.name.as_str());
            describe(self.name(), definition, if is_told { VmState::Unknown } else { VmState::Incoming })
        }));
        if scope == Scope::All {
            let asked = self.peers.values().map(|peer| peer.get_within::<VmList>("/v1/vms", PEER_DEADLINE));
            let answers = futures_util::future::join_all(asked).await;
            for (name, answer) in self.peers.keys().zip(answers) {
                match answer {
                    Ok(more) => list.vms.extend(more.vms),
                    Err(problem) => {
                        list.hosts_not_asked.push(name.clone());
                        list.errors.push(problem.message);
                    }
                }
            }
        }
        list.vms.sort_by(|one, other| (&one.name, &one.host).cmp(&(&other.name, &other.host)));
        list
    }
}
