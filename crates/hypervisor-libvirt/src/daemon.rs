//! A libvirt daemon of this host, and the connection that all its domains share.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_hypervisor::ResolvedSpec;
use drainpipe_hypervisor_qemu::Privileges;
use drainpipe_libvirt::{Connection, DomainEvent, Error};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, MutexGuard, Notify, broadcast};
use tokio::time::timeout;
use uuid::Uuid;

use crate::meeting::Meeting;
use crate::snapshots::SnapshotFile;
use crate::sockets::Sockets;

/// QEMU's domains of the whole host.
const URI: &str = "qemu:///system";

/// Events kept for a domain that is slow to read them.
const EVENTS_KEPT: usize = 256;

/// A daemon, which may end and be restarted meanwhile.
#[derive(Debug)]
pub(crate) struct Daemon {
    sockets: Sockets,
    state_directory: PathBuf,
    privileges: Privileges,
    // Until it is known whether they stay.
    leaving: Mutex<BTreeSet<Uuid>>,
    shared: Mutex<Option<Connection>>,
    events: broadcast::Sender<DomainEvent>,
    changed: Arc<Notify>,
}

impl Daemon {
    /// The one that answers at one of `sockets`. Nothing is asked yet. What is not to be lost is kept below `state_directory`.
    pub(crate) fn at(sockets: Sockets, state_directory: PathBuf, privileges: Privileges) -> Self {
        let events = broadcast::channel(EVENTS_KEPT).0;
        Self {
            sockets,
            state_directory,
            privileges,
            leaving: Mutex::default(),
            shared: Mutex::default(),
            events,
            changed: Arc::default(),
        }
    }

    /// Who reaches into its QEMUs.
    pub(crate) fn privileges(&self) -> &Privileges {
        &self.privileges
    }

    /// Where it answers, or would.
    pub(crate) fn socket(&self) -> &Path {
        self.sockets.path()
    }

    /// For what is known of a domain's snapshots.
    pub(crate) fn snapshot_file(&self, uuid: Uuid) -> SnapshotFile {
        SnapshotFile::of_domain(&self.state_directory, uuid)
    }

    /// Those that begin to leave, and do not stay yet: their own migrations see to their snapshots. Nobody else's are
    /// touched without holding this.
    pub(crate) async fn leaving(&self) -> MutexGuard<'_, BTreeSet<Uuid>> {
        self.leaving.lock().await
    }

    /// For a domain of this daemon's to meet the agent.
    pub(crate) fn meeting(&self, spec: &ResolvedSpec) -> Meeting {
        Meeting::beside(self.sockets.path(), spec)
    }

    /// Whether there may be one.
    pub(crate) fn is_there(&self) -> bool {
        self.sockets.path().exists()
    }

    /// Whether it has ended, and nothing starts it when it is spoken to.
    pub(crate) async fn has_ended(&self) -> bool {
        let kind = UnixStream::connect(self.sockets.path()).await.err().map(|error| error.kind());
        matches!(kind, Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound))
    }

    /// The connection for questions and orders; a new one where the last has ended.
    pub(crate) async fn shared(&self, deadline: Duration) -> Result<Connection, Error> {
        let connecting = timeout(deadline, self.shared_unbounded(deadline));
        connecting.await.unwrap_or(Err(Error::TimedOut { what: "connect", after: deadline }))
    }

    async fn shared_unbounded(&self, deadline: Duration) -> Result<Connection, Error> {
        let mut shared = self.shared.lock().await;
        if let Some(connection) = shared.as_ref().filter(|connection| !connection.is_closed()) {
            return Ok(connection.clone());
        }
        let connection = self.own(deadline).await?;
        tokio::spawn(pass_on(connection.events(), self.events.clone(), Arc::clone(&self.changed)));
        connection.subscribe(deadline).await?;
        *shared = Some(connection.clone());
        Ok(connection)
    }

    /// A connection for one migration: libvirt ends what belongs to it with the connection.
    pub(crate) async fn own(&self, deadline: Duration) -> Result<Connection, Error> {
        Connection::open(self.sockets.path(), URI, deadline).await
    }

    /// The same, but libvirt does not take an agent that stands still for one that is gone.
    pub(crate) async fn lasting(&self, deadline: Duration) -> Result<Connection, Error> {
        Connection::open_for_long(self.sockets.path(), URI, deadline).await
    }

    /// Events of domains from now on. None come while there is no [shared](Self::shared) connection.
    pub(crate) fn events(&self) -> broadcast::Receiver<DomainEvent> {
        self.events.subscribe()
    }

    /// Returns when a domain has come or gone, or the connection has ended.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

async fn pass_on(
    mut from: broadcast::Receiver<DomainEvent>,
    to: broadcast::Sender<DomainEvent>,
    changed: Arc<Notify>,
) {
    loop {
        match from.recv().await {
            Ok(event) => {
                if matches!(event, DomainEvent::Lifecycle { .. }) {
                    changed.notify_one();
                }
                // Nobody may listen.
                let _unheard = to.send(event);
            }
            Err(broadcast::error::RecvError::Lagged(_)) => changed.notify_one(),
            Err(broadcast::error::RecvError::Closed) => return changed.notify_one(),
        }
    }
}
