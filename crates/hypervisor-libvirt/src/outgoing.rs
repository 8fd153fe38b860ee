//! A domain that leaves: libvirt's `Begin` and `Perform`, on a connection of their own.
//!
//! libvirt ends the job with that connection. Before `Perform` that undoes all; once `Perform` has returned, it leaves the
//! guest paused without a job, for whoever goes on or goes back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::format::bound;
use drainpipe_hypervisor::{Address, Happening, MigrationStatus, Transport, VmError, VmErrorKind, VmEvent};
use drainpipe_libvirt::{Connection, Domain, Parameter, migrate_parameters as names};
use tokio::sync::{broadcast, watch};
use tokio::time::timeout;

use crate::daemon::Daemon;
use crate::errors::failed;
use crate::phases::{Handed, Terms, terms};
use crate::snapshots::KnownSnapshot;

/// `Perform` is one call, which takes as long as the engine lets a migration take.
const PERFORM_MAX: Duration = Duration::from_hours(30 * 24);

/// The problem of an abort that was not ours: nobody asks about those.
const ABORTED: &str = "somebody has aborted its migration on this host, for example with `virsh domjobabort`";

/// How far it is.
#[derive(Debug, Clone)]
enum Phase {
    Begun,
    Performing,
    /// `Perform` has returned this cookie.
    Sent(Vec<u8>),
    Failed(VmError),
    /// By whomever.
    Aborted,
}

/// One migration away.
#[derive(Debug)]
pub(crate) struct OutgoingMigration {
    connection: Connection,
    terms: Terms,
    phase: watch::Sender<Phase>,
}

impl OutgoingMigration {
    /// Makes the domain ready to leave, and returns the message for the target, with the domain's XML.
    pub(crate) async fn begin(
        daemon: &Daemon,
        domain: &Domain,
        transport: Transport,
        disks: &[String],
        snapshots: &[KnownSnapshot],
        deadline: Duration,
    ) -> Result<(Self, Handed, String), VmError> {
        let connection = daemon.own(deadline).await.map_err(failed)?;
        let is_persistent = connection.is_persistent(domain, deadline).await.map_err(failed)?;
        let autostart = is_persistent && connection.autostart(domain, deadline).await.map_err(failed)?;
        let terms = terms(transport, is_persistent)?.copying(disks);
        let begun = connection.migrate_begin(domain, &terms.parameters, terms.flags, deadline).await;
        let begun = begun.map_err(failed)?;
        let (disks, snapshots) = (disks.to_vec(), snapshots.to_vec());
        let handed = Handed { is_persistent, autostart, disks, snapshots, ..Handed::cookie(begun.cookie)? };
        let leaving = Self { connection, terms, phase: watch::Sender::new(Phase::Begun) };
        Ok((leaving, handed, begun.xml))
    }

    /// Sends the guest; it goes on by itself, and `events` hear of its end.
    pub(crate) fn perform(
        self: &Arc<Self>,
        domain: &Domain,
        address: &Address,
        disks_to: Option<SocketAddr>,
        bandwidth_mib_per_s: Option<u64>,
        handed: &Handed,
        events: Arc<broadcast::Sender<VmEvent>>,
    ) {
        let mut terms = self.terms.clone().to(address);
        if let Some(disks_to) = disks_to {
            terms = terms.disks_to(&disks_to.into());
        }
        terms.parameters.extend(bandwidth_mib_per_s.map(|speed| Parameter::large(names::BANDWIDTH, speed)));
        self.phase.send_replace(Phase::Performing);
        let (leaving, domain, cookie) =
            (Arc::clone(self), domain.clone(), handed.cookie.clone().into_bytes());
        tokio::spawn(async move {
            let Terms { flags, parameters } = terms;
            let performed =
                leaving.connection.migrate_perform(&domain, &parameters, &cookie, flags, PERFORM_MAX).await;
            let (phase, status) = match performed {
                // The engine goes on from there, also if nobody has said that the guest was paused.
                Ok(cookie) => (Phase::Sent(cookie), MigrationStatus::PreSwitchover),
                Err(error) if error.is_operation_aborted() => (Phase::Aborted, MigrationStatus::Cancelled),
                Err(error) => (Phase::Failed(failed(error)), MigrationStatus::Failed),
            };
            leaving.phase.send_replace(phase);
            // Nobody may listen.
            let _unheard = events.send(VmEvent { what: Happening::Migration(status), at: None });
        });
    }

    /// The status of the migration of a domain whose guest is paused or not.
    pub(crate) fn status(
        &self,
        is_paused: bool,
        is_switched_over: bool,
    ) -> (MigrationStatus, Option<String>) {
        match &*self.phase.borrow() {
            Phase::Begun => (MigrationStatus::Setup, None),
            Phase::Sent(_) if is_switched_over => (MigrationStatus::Completed, None),
            Phase::Performing if is_switched_over => (MigrationStatus::Device, None),
            Phase::Performing if !is_paused => (MigrationStatus::Active, None),
            Phase::Performing | Phase::Sent(_) => (MigrationStatus::PreSwitchover, None),
            Phase::Failed(error) => (MigrationStatus::Failed, Some(error.to_string())),
            Phase::Aborted => (MigrationStatus::Cancelled, Some(ABORTED.into())),
        }
    }

    /// Whether it is being sent.
    pub(crate) fn is_performing(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Performing)
    }

    /// Whether all has been sent.
    pub(crate) fn has_sent(&self) -> bool {
        matches!(*self.phase.borrow(), Phase::Sent(_))
    }

    /// Why it does not go on; none if it does.
    pub(crate) fn failure(&self) -> Option<VmError> {
        match &*self.phase.borrow() {
            Phase::Failed(error) => Some(error.clone()),
            Phase::Aborted => Some(VmError::failed(ABORTED)),
            Phase::Begun | Phase::Performing | Phase::Sent(_) => None,
        }
    }

    /// Waits until all has been sent, and returns libvirt's cookie for `Finish`.
    pub(crate) async fn sent(&self, deadline: Duration) -> Result<Vec<u8>, VmError> {
        match self.end_of_perform(deadline).await? {
            Phase::Sent(cookie) => Ok(cookie),
            Phase::Failed(error) => Err(error),
            Phase::Aborted => Err(VmError::failed(ABORTED)),
            Phase::Begun | Phase::Performing => Err(VmError::failed("its transfer was not begun")),
        }
    }

    /// Stops it. Whether all had been sent by then.
    pub(crate) async fn cancel(&self, domain: &Domain, deadline: Duration) -> Result<bool, VmError> {
        if matches!(*self.phase.borrow(), Phase::Begun) {
            return Ok(false);
        }
        if matches!(*self.phase.borrow(), Phase::Performing) {
            let aborted = self.connection.abort_job(domain, deadline).await;
            // One that ended meanwhile has no job to abort.
            if let Err(error) = aborted.map_err(failed)
                && error.kind == VmErrorKind::Mute
            {
                return Err(error);
            }
        }
        Ok(matches!(self.end_of_perform(deadline).await?, Phase::Sent(_)))
    }

    async fn end_of_perform(&self, deadline: Duration) -> Result<Phase, VmError> {
        let mut phase = self.phase.subscribe();
        let ended = phase.wait_for(|phase| !matches!(phase, Phase::Performing));
        match timeout(deadline, ended).await {
            // The sender is this migration's own, so it is there.
            Ok(phase) => Ok(phase.map_or(Phase::Begun, |phase| phase.clone())),
            Err(_) => Err(VmError::new(
                VmErrorKind::Mute,
                format!("libvirt has not sent the last of the VM within {}", bound(deadline)),
            )),
        }
    }

    /// Gives libvirt's job up, by its connection.
    pub(crate) async fn close(&self, deadline: Duration) {
        self.connection.close(deadline).await;
    }
}
