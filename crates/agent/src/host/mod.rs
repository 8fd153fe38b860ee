//! This host, for all parts: its name and configuration, its network, its hardware, its ports.

pub(crate) mod chosen_address;
pub(crate) mod hardware;
pub(crate) mod idle_cores;
pub(crate) mod migration_links;
pub(crate) mod network;
pub(crate) mod own_waits;
pub(crate) mod ports;
pub(crate) mod rdma;

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use drainpipe_engine::host::facts::NoMigrationAddress;
use drainpipe_engine::problem::Problem;
use tokio::sync::watch;

use self::hardware::HostHardware;
use crate::host::idle_cores::IdleCores;
use crate::host::migration_links::MigrationLinks;
use crate::host::network::HostNetwork;
use crate::host::ports::MigrationPorts;
use crate::store::config::{Config, Peer};
use crate::store::fleet::Fleet;

/// This host.
#[derive(Debug)]
pub(crate) struct Host {
    /// The settings of its agent.
    pub(crate) config: Config,
    /// The hosts that it knows.
    pub(crate) fleet: Arc<Fleet>,
    /// Its network.
    pub(crate) network: HostNetwork,
    /// What it is.
    pub(crate) hardware: HostHardware,
    /// Ports for migrations.
    pub(crate) ports: MigrationPorts,
    /// Cores that nobody used when no migration was under way.
    pub(crate) idle_cores: IdleCores,
    chosen_address: Ipv6Addr,
    stop: watch::Receiver<bool>,
    is_leaving: AtomicBool,
}

impl Host {
    /// In a fleet whose authority has this public key. Its agent is to end once `stop` says so.
    pub(crate) fn open(
        config: Config,
        fleet: Arc<Fleet>,
        network: HostNetwork,
        authority_key: &[u8],
        stop: watch::Receiver<bool>,
    ) -> Result<Self, Problem> {
        Ok(Self {
            fleet,
            network,
            hardware: HostHardware::read()?,
            ports: MigrationPorts::new(&config.name, config.migration_ports),
            idle_cores: IdleCores::default(),
            chosen_address: chosen_address::choose(authority_key, &config.name),
            config,
            stop,
            is_leaving: AtomicBool::new(false),
        })
    }

    /// Its name.
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    /// The other hosts.
    pub(crate) fn peers(&self) -> Vec<Peer> {
        self.fleet.peers()
    }

    /// Another host, if this one knows it.
    pub(crate) fn peer(&self, name: &str) -> Result<Peer, Problem> {
        let found = self.peers().into_iter().find(|peer| peer.name == name);
        found.ok_or_else(|| Problem::not_found(format!("{} knows no host {name}", self.name())))
    }

    /// The links that carry migrations, as they are now.
    pub(crate) async fn migration_links(&self) -> Result<MigrationLinks, Problem> {
        self.network.migration_links(&self.config, &self.peers()).await
    }

    /// Refuses to begin anything once the agent is being stopped.
    pub(crate) fn check_not_stopping(&self) -> Result<(), Problem> {
        if *self.stop.borrow() {
            return Err(Problem::conflict(format!(
                "the agent of {} is being stopped and begins nothing new: try again when it has been started",
                self.name()
            )));
        }
        if self.is_leaving.load(Ordering::SeqCst) {
            return Err(Problem::conflict(format!(
                "{} is leaving its fleet and begins nothing new",
                self.name()
            )));
        }
        Ok(())
    }

    /// Begins nothing new from now on, since this host is to leave its fleet; or does so again, since it stays.
    pub(crate) fn set_leaving(&self, is_leaving: bool) {
        self.is_leaving.store(is_leaving, Ordering::SeqCst);
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
}
