//! What outgoing and incoming migrations share.

pub(crate) mod bandwidth;
pub(crate) mod disk_socket;
pub(crate) mod disk_streams;
pub(crate) mod pacer;
pub(crate) mod relay;
pub(crate) mod scheduling_group;
pub(crate) mod transport;

use std::sync::Arc;

use drainpipe_engine::problem::Problem;
use drainpipe_relay::ConcurrentSenders;

use crate::host::Host;
use crate::paths::discovery;
use crate::paths::path_watch::PathWatches;
use crate::peers::Peers;
use crate::peers::slots::Slots;
use crate::store::journal::{Journal, JournalError};
use crate::transfer::bandwidth::Bandwidth;
use crate::transfer::relay::{LostCpus, Packing};
use crate::vms::Vms;
use crate::vms::cpu_priority::FirstSessions;

/// What they share.
#[derive(Debug)]
pub(crate) struct Transfers {
    /// The paths that migrations use, in either direction.
    pub(crate) watches: Arc<PathWatches>,
    /// Limits of what migrations take of the links.
    pub(crate) bandwidth: Arc<Bandwidth>,
    /// Sessions that go before others, for a VM that is silent.
    pub(crate) first_sessions: FirstSessions,
    /// Trials of links under way that others have asked for.
    pub(crate) discoveries: Slots,
    host: Arc<Host>,
    vms: Arc<Vms>,
    // CPUs that were to pack, and on which the agent may not run any more.
    lost_cpus: LostCpus,
    // What packs for migrations from here.
    concurrent: ConcurrentSenders,
}

impl Transfers {
    /// With the bandwidth limit of an earlier run of the agent.
    pub(crate) fn open(
        host: &Arc<Host>,
        peers: &Arc<Peers>,
        journal: &Arc<Journal>,
        vms: &Arc<Vms>,
    ) -> Result<Self, JournalError> {
        Ok(Self {
            watches: Arc::new(PathWatches::new(host, peers)),
            bandwidth: Arc::new(Bandwidth::open(host, peers, journal)?),
            first_sessions: FirstSessions::new(vms),
            discoveries: discovery::trials(),
            host: Arc::clone(host),
            vms: Arc::clone(vms),
            lost_cpus: LostCpus::default(),
            concurrent: ConcurrentSenders::default(),
        })
    }

    /// The threads that pack on this host at present.
    pub(crate) fn packing(&self) -> Result<Packing, Problem> {
        Packing::of(&self.host.config.compression, &self.lost_cpus, &self.vms, &self.concurrent)
    }
}
