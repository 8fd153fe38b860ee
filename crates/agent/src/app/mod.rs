//! The agent of one host: how it starts and stops.

pub(crate) mod core_count;
#[cfg(test)]
mod tests;
pub(crate) mod unresponsive;
pub(crate) mod watchdog;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use drainpipe_engine::connections::Priority;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Hypervisor;
use drainpipe_hypervisor_libvirt::{Libvirt, Sockets, installed_version};
use drainpipe_hypervisor_qemu::{Launcher, Privileges, Qemu, QemuUser, keeper};
use drainpipe_identity::{Identity, Peer, check_unchangeable};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{error, info, warn};

use crate::check::fixes::{self, Fixes};
use crate::check::{self, Checks};
use crate::disk_moves::{self, DiskMoves};
use crate::drain::{self, Drains};
use crate::host::Host;
use crate::host::network::HostNetwork;
use crate::http::api::unbelieved::{self, Answering};
use crate::http::api::{self, Parts};
use crate::http::server::{self, JoinsBy, PriorityOf, Welcome};
use crate::incoming::{self, Incoming, IncomingVms};
use crate::joining::renewal;
use crate::joining::{Joining, exchange};
use crate::outgoing::{self, Outgoing};
use crate::peers::Peers;
use crate::peers::proof::{self, Heard, Proof};
use crate::store::config::Config;
use crate::store::cpu_list::CpuList;
use crate::store::fleet::{self, Fleet};
use crate::store::journal::{self, Journal};
use crate::transfer::Transfers;
use crate::transfer::relay::{check_packing_cpus, own_cpus};
use crate::vms::cpu_priority;
use crate::vms::hypervisors::Hypervisors;
use crate::vms::throttles;
use crate::vms::vm_files::VmFiles;
use crate::vms::{QEMU_DEADLINE, Vms, keep_looking_at_managed};

/// Runs an agent until somebody stops it.
///
/// Stopping leaves the VMs running. Migrations from here are cancelled where that is still possible,
/// and waited for; meanwhile the agent answers, and begins nothing new. Those to here fail at their
/// sources. What is cut short all the same, by a crash, is left to the guards and to the next start.
pub async fn run(config: Config, mut stop: watch::Receiver<bool>) -> Result<Ended, Problem> {
    let identity = load_identity(&config)?;
    fleet::refuse_revoked(&config, &identity)?;
    // Told before anything is begun, if they cannot be used.
    let own_cpus = own_cpus()?;
    check_packing_cpus(&config.compression, &own_cpus)?;
    // Both first: nothing is touched while another agent serves this host.
    let socket = server::bind_socket(&config.socket).await?;
    let tcp = server::bind_tls(config.listen).await?;
    let path = config.socket.clone();
    let heard = Arc::new(open_heard(&config)?);
    let answering = Answering::new(None);
    let router = unbelieved::starting(Arc::clone(&heard), answering.subscribe());
    let (close, closed) = watch::channel(false);
    let serving = Arc::new(OnceLock::new());
    let welcome =
        Welcome { priority: priority_by(Arc::clone(&serving)), joins: joins_by(Arc::clone(&serving)) };
    let tls = server::serve_tls(tcp, identity.clone(), router.clone(), welcome, closed.clone());
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
    /// Somebody stops it.
    Stopped,
    /// Its journal is not believed any more. Its next start says so, and does nothing by it.
    Doubted,
}

pub(crate) fn open_heard(config: &Config) -> Result<Heard, Problem> {
    journal::make_directory(&config.state_directory)?;
    Heard::open(&config.state_directory)
}

/// What the doors ask of an agent that serves.
#[derive(Debug)]
struct Serving {
    outgoing: Arc<Outgoing>,
    joining: Arc<Joining>,
}

/// Nobody joins before the agent serves, and while no token is open.
fn joins_by(serving: Arc<OnceLock<Serving>>) -> JoinsBy {
    Arc::new(move || {
        let joining = serving.get().map(|serving| &serving.joining).filter(|joining| joining.is_open())?;
        Some(api::router_to_join(Arc::clone(joining)))
    })
}

/// By what the agent knows of its peers, once it serves; until then an operator goes first.
fn priority_by(serving: Arc<OnceLock<Serving>>) -> PriorityOf {
    Arc::new(move |peer| match (serving.get(), peer) {
        (Some(serving), peer) => priority_of(&serving.outgoing, peer),
        (None, Peer::Operator(_)) => Priority::First,
        (None, Peer::Host(_)) => Priority::Usual,
    })
}

/// From the first look at the journal to the end.
async fn live(
    config: Config,
    identity: &Identity,
    heard: Arc<Heard>,
    (answering, serving): (&Answering, &OnceLock<Serving>),
    own_cpus: CpuList,
    stop: &mut watch::Receiver<bool>,
) -> Result<Ended, Problem> {
    let runtime = &config.runtime_directory;
    std::fs::create_dir_all(runtime)
        .map_err(|error| Problem::failed(format!("cannot create {}: {error}", runtime.display())))?;
    // A user who can write there decides which processes are VMs.
    check_unchangeable(runtime, "runtime directory").map_err(Problem::refused)?;
    check_journal_is_own(&config.state_directory)?;
    // They end with their drop.
    let mut looking = JoinSet::new();
    looking.spawn(watchdog::keep_alive(config.socket.clone()));
    // One for all that reaches QEMUs here, so that they share the connection to a keeper.
    let privileges = Privileges::of_environment();
    if !wait_until_believed(&config, &privileges, identity, &heard, answering, stop).await? {
        return Ok(Ended::Stopped);
    }
    let hypervisor = with_managers(&config, &privileges, qemu(&config, &privileges)?);
    let parts = open(config, hypervisor, identity, heard, stop.clone()).await?;
    recover(&parts).await?;
    let Parts {
        host,
        peers,
        journal,
        proof,
        vms,
        checks,
        incoming,
        outgoing,
        drains,
        joining,
        disk_moves,
        ..
    } = parts.clone();
    serving.get_or_init(|| Serving { outgoing: Arc::clone(&outgoing), joining: Arc::clone(&joining) });
    let socket = host.config.socket.display();
    info!(host = host.name(), listen = %host.config.listen, %socket, "serving");
    tell_service_manager();
    answering.send_replace(Some(api::router(parts)));
    let migrations = Arc::clone(&outgoing);
    looking.spawn(check::keep_trying(checks, move || migrations.is_migrating()));
    looking.spawn(core_count::keep_counting(Arc::clone(&outgoing), own_cpus));
    looking.spawn(incoming::keep_expiring(Arc::clone(&incoming)));
    looking.spawn(proof::keep_telling(proof));
    looking.spawn(keep_looking_at_managed(vms));
    looking.spawn(exchange::keep_exchanging(Arc::clone(&joining)));
    looking.spawn(renewal::keep_renewing(joining, host, peers));
    let mut doubts = journal.doubts();
    tokio::select! {
        // The sender may be gone: that stops it too.
        _ = stop.wait_for(|stop| *stop) => {}
        Ok(_) = doubts.wait_for(|doubts| !doubts.is_empty()) => return Ok(Ended::Doubted),
    }
    drain::shut_down(&drains).await;
    outgoing::shut_down(&outgoing).await;
    let _no_more = disk_moves::shut_down(&disk_moves).await;
    Ok(Ended::Stopped)
}

/// Says what is wrong with the journal until an operator has mended it; whether it is believed, or the agent is to stop.
async fn wait_until_believed(
    config: &Config,
    privileges: &Privileges,
    identity: &Identity,
    heard: &Arc<Heard>,
    answering: &Answering,
    stop: &mut watch::Receiver<bool>,
) -> Result<bool, Problem> {
    let found = Qemu::to_find(config.runtime_directory.clone(), privileges.clone());
    let hypervisor = with_managers(config, privileges, Arc::new(found));
    loop {
        let judged = proof::judge(config, &*hypervisor, identity, false).await?;
        if judged.doubts.is_empty() {
            answering.send_replace(None);
            return Ok(true);
        }
        error!(doubts = journal::in_words(&judged.doubts), "the journal is not believed: nothing is served");
        let (found, heard) = (Arc::clone(&hypervisor), Arc::clone(heard));
        let (router, mut adopted) = unbelieved::unbelieved(config, found, identity, heard, &judged);
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
        warn!(%error, "cannot notify the service manager that the agent is ready");
    }
}

/// A user who can write to the journal decides which VMs run here.
fn check_journal_is_own(directory: &Path) -> Result<(), Problem> {
    check_unchangeable(directory, "state directory").map_err(Problem::refused)?;
    for name in ["journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"] {
        check_unchangeable(&directory.join(name), "journal").map_err(Problem::refused)?;
    }
    Ok(())
}

pub(crate) fn load_identity(config: &Config) -> Result<Identity, Problem> {
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

/// An agent that is not root runs QEMU as its own user.
fn launcher(config: &Config) -> Result<Launcher, Problem> {
    let own = QemuUser::own();
    let user = if own.is_root() { QemuUser::find(&config.qemu.user).map_err(Problem::refused)? } else { own };
    if user.is_root() {
        warn!("[qemu] user: QEMU runs as root, so whoever breaks out of a VM is root on this host");
    }
    let (program, arguments) = config.qemu.launcher.split_first().expect("a program, by default");
    let binary = config.qemu.binary.clone();
    Ok(Launcher { program: program.into(), arguments: arguments.to_vec(), user, binary })
}

/// Starts QEMU for the agent of this host, and reaches into it, as long as whoever has this connection wants that.
pub fn keep(config: &Config, connection: BorrowedFd<'_>) -> Result<(), Problem> {
    keeper::serve(connection, &launcher(config)?).map_err(Problem::refused)
}

fn qemu(config: &Config, privileges: &Privileges) -> Result<Arc<dyn Hypervisor>, Problem> {
    Ok(Arc::new(Qemu::new(config.runtime_directory.clone(), privileges.clone(), launcher(config)?)))
}

/// These VMs, and those of another manager if there is one.
fn with_managers(config: &Config, privileges: &Privileges, own: Arc<dyn Hypervisor>) -> Arc<dyn Hypervisor> {
    if !config.libvirt.enabled {
        return own;
    }
    // Looked for again until somebody answers: it may be installed while the agent runs.
    let sockets = config.libvirt.socket.clone().map_or_else(Sockets::default, Sockets::from);
    let (runtime, state) = (config.runtime_directory.clone(), config.state_directory.clone());
    let libvirt = Libvirt::new(runtime, state, sockets, privileges.clone());
    Arc::new(Hypervisors::new(own, Arc::new(libvirt)))
}

/// Makes the parts, each of those that it uses.
pub(crate) async fn open(
    config: Config,
    hypervisor: Arc<dyn Hypervisor>,
    identity: &Identity,
    heard: Arc<Heard>,
    stop: watch::Receiver<bool>,
) -> Result<Parts, Problem> {
    let journal = Arc::new(Journal::open(&config.state_directory, &config.runtime_directory)?);
    journal.begin_witness()?;
    let at_start = journal.standing()?;
    let network = HostNetwork::open(Arc::clone(&journal))?;
    let can = hypervisor.probe(QEMU_DEADLINE).await.map_err(Problem::refused)?;
    let vms = Vms::open(&config.name, hypervisor, can, Arc::clone(&journal)).await?;
    let files = Arc::new(VmFiles::new(&config));
    let fleet = Arc::new(Fleet::open(&config, identity)?);
    let host = Arc::new(Host::open(config, fleet, network, identity.authority_key(), stop)?);
    let peers = Arc::new(Peers::open(&host, identity)?);
    let transfer = Arc::new(Transfers::open(&host, &peers, &journal, &vms)?);
    let incoming = Arc::new(Incoming {
        host: Arc::clone(&host),
        peers: Arc::clone(&peers),
        journal: Arc::clone(&journal),
        vms: Arc::clone(&vms),
        files,
        transfer: Arc::clone(&transfer),
        entries: IncomingVms::default(),
    });
    let checks = Arc::new(Checks::open(&incoming, installed_version)?);
    let outgoing = Arc::new(Outgoing::new(&incoming, &checks));
    Ok(Parts {
        proof: Arc::new(Proof::new(&peers, &journal, at_start)),
        disk_moves: Arc::new(DiskMoves::new(&incoming)),
        drains: Arc::new(Drains::new(&outgoing)),
        fixes: Arc::new(Fixes::new(&host)),
        joining: Arc::new(Joining::open(&outgoing)?),
        host,
        peers,
        journal,
        heard,
        vms,
        transfer,
        incoming,
        checks,
        outgoing,
    })
}

/// Takes up what an earlier run of this agent left.
pub(crate) async fn recover(parts: &Parts) -> Result<(), Problem> {
    let Parts { host, journal, vms, incoming, checks, drains, outgoing, disk_moves, .. } = parts;
    if let Err(problem) = vms.look_at_managed().await {
        warn!(%problem, "libvirt does not answer yet");
    }
    checks.look_at_links().await?;
    cpu_priority::end_all(vms);
    throttles::lift_all(vms);
    let waiting = journal.waiting_incoming()?;
    let migrations = waiting.iter().map(|record| record.id.clone());
    let still_needed: Vec<String> = migrations.chain([fixes::OWNER.into()]).collect();
    host.network.put_back_all_but(&still_needed).await?;
    incoming::recover(incoming).await?;
    disk_moves::recover(disk_moves)?;
    drain::recover(drains)?;
    outgoing::recover(outgoing)?;
    unresponsive::keep_trying(outgoing, disk_moves);
    incoming::tell_of_left(incoming)?;
    outgoing::settle_left(outgoing)?;
    // Beside: its storage may hang.
    tokio::spawn(outgoing::keep_all_left(Arc::clone(outgoing)));
    Ok(())
}

/// When there are too many connections, those of peers that give orders, and of hosts whose VMs are on their way,
/// are kept.
fn priority_of(outgoing: &Outgoing, peer: &Peer) -> Priority {
    let goes_first = match peer {
        Peer::Operator(_) => true,
        Peer::Host(host) => outgoing.incoming.entries.are_from(host) || outgoing.migrations.are_to(host),
    };
    if goes_first { Priority::First } else { Priority::Usual }
}
