//! Checks everything between this host and another before a migration.
//!
//! ```text
//! facts     what this host says of itself
//! host_view the same for people, and that of all hosts
//! sysfs     what only sysfs knows of a link
//! packets   datagrams of every size, counted where they arrive
//! session   the other host's side of the trials
//! way_back  whether the other host's agent reaches this one's
//! vms       what both hosts say of VMs that may move
//! needs     what VMs of another manager need of a host
//! run       both sides together: facts, trials, the engine's findings
//! quick     the part of it that runs before each migration
//! idle      the part of it that runs now and then while there is none
//! recent    what the links have counted lately
//! ```

mod facts;
pub(crate) mod fixes;
mod host_view;
mod idle;
mod needs;
pub(crate) mod packets;
mod quick;
mod recent;
mod run;
mod session;
mod sysfs;
mod vms;
mod way_back;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use drainpipe_engine::problem::Problem;
use drainpipe_net::Network;
use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

use self::idle::KnownPaths;
use self::recent::RecentCounters;
use crate::host::Host;
use crate::incoming::Incoming;
use crate::peers::Peers;
use crate::peers::slots::Slots;
use crate::store::journal::Journal;
use crate::store::lock::lock;
use crate::vms::Vms;
use crate::vms::vm_files::VmFiles;

pub(crate) use facts::read;
pub(crate) use idle::keep_trying;
pub(crate) use quick::{DiskThere, before_migration, disks_of, disks_there, judge};
pub(crate) use run::run;
pub(crate) use session::{Round, RoundResult, SessionRequest, SessionView, close, open, play, source_of};
pub(crate) use vms::{VmsRequest, ask as ask_of_vms, fits};
pub(crate) use way_back::{WayBack, try_back};

/// Checks that one agent leads at once. Each sends some hundred packets on each path.
const CHECKS_MAX: usize = 2;

/// Checks that one agent takes part in at once, led by one other and by all others.
const SESSIONS_OF_ONE_MAX: usize = 2;
const SESSIONS_MAX: usize = 8;

/// Checks of what is between this host and others, led from here and by others.
#[derive(Debug)]
pub(crate) struct Checks {
    /// The host.
    pub(crate) host: Arc<Host>,
    peers: Arc<Peers>,
    journal: Arc<Journal>,
    vms: Arc<Vms>,
    files: Arc<VmFiles>,
    incoming: Arc<Incoming>,
    // The version of the manager of VMs that is installed, whether it runs or not.
    manager_version: fn() -> Option<String>,
    // What the paths to each peer were like when no migration used them.
    known_paths: KnownPaths,
    network: Network,
    recent: RecentCounters,
    led: Semaphore,
    taken_part_in: Slots,
    sessions: Mutex<HashMap<Uuid, Arc<session::Session>>>,
}

impl Checks {
    /// None yet. Must be called within the host's network namespace.
    pub(crate) fn open(
        incoming: &Arc<Incoming>,
        manager_version: fn() -> Option<String>,
    ) -> Result<Self, Problem> {
        Ok(Self {
            host: Arc::clone(&incoming.host),
            peers: Arc::clone(&incoming.peers),
            journal: Arc::clone(&incoming.journal),
            vms: Arc::clone(&incoming.vms),
            files: Arc::clone(&incoming.files),
            incoming: Arc::clone(incoming),
            manager_version,
            known_paths: KnownPaths::default(),
            network: Network::open().map_err(Problem::failed)?,
            recent: RecentCounters::default(),
            led: Semaphore::new(CHECKS_MAX),
            taken_part_in: Slots::new("checks", SESSIONS_OF_ONE_MAX, SESSIONS_MAX),
            sessions: Mutex::default(),
        })
    }

    /// Notes what the links have counted, for later looks to compare with.
    pub(crate) async fn look_at_links(&self) -> Result<(), Problem> {
        let links = self.network.links().await.map_err(Problem::failed)?;
        self.recent.look(Instant::now(), &links);
        Ok(())
    }

    fn begin(&self) -> Result<SemaphorePermit<'_>, Problem> {
        self.led.try_acquire().map_err(|_| {
            Problem::conflict(format!(
                "{CHECKS_MAX} checks are running on this host: try again in a few seconds"
            ))
        })
    }

    fn add(&self, id: Uuid, session: session::Session) -> Result<(), Problem> {
        let mut sessions = lock(&self.sessions);
        if sessions.contains_key(&id) {
            return Err(Problem::conflict(format!("check {id} is already running")));
        }
        sessions.insert(id, Arc::new(session));
        Ok(())
    }

    fn get(&self, id: Uuid) -> Option<Arc<session::Session>> {
        lock(&self.sessions).get(&id).cloned()
    }

    fn remove(&self, id: Uuid) {
        lock(&self.sessions).remove(&id);
    }
}
