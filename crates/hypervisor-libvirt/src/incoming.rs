//! An incoming domain: libvirt's `Prepare` and `Finish`, on a connection of their own. Until `Finish`, libvirt ends
//! the domain together with that connection, and lets nobody run it; after it, the domain stays paused, without a job, until
//! it is ordered to run, or others let it run.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drainpipe_hypervisor::spec::VmName;
use drainpipe_hypervisor::{
    Address, MigrationStatus, Parcel, ResolvedSpec, TransferStatus, Transport, VmError, VmErrorKind,
};
use drainpipe_libvirt::{Connection, Domain, Parameter, migrate_flags as flags, migrate_parameters as names};

use crate::daemon::Daemon;
use crate::domain::{self, DomainDescription, Inexpressible};
use crate::errors::failed;
use crate::lock::lock;
use crate::phases::{Handed, Terms, terms};

/// One migration to here.
#[derive(Debug)]
pub(crate) struct IncomingMigration {
    connection: Connection,
    terms: Terms,
    autostart: bool,
    disks: Vec<String>,
    drives: Vec<String>,
    description: DomainDescription,
    /// What `Finish` needs.
    last: Mutex<Option<Parcel>>,
    /// libvirt was asked to finish, and has not said whether it has.
    is_unsaid: AtomicBool,
    ended: Mutex<Option<Result<(), String>>>,
}

impl IncomingMigration {
    /// Makes a paused QEMU listen, for copies of disks at `disks_at`, and returns the message for the source.
    pub(crate) async fn prepare(
        daemon: &Daemon,
        spec: &ResolvedSpec,
        transport: Transport,
        address: &Address,
        disks_at: &Path,
        parcel: &Parcel,
        deadline: Duration,
    ) -> Result<(Self, Parcel), VmError> {
        let handed = Handed::of(parcel)?;
        let xml = parcel.description.as_deref();
        let xml = xml.ok_or_else(|| VmError::failed("its source has sent no XML of the domain"))?;
        let description = checked_description(spec, xml)?;
        let mut terms = terms(transport, handed.is_persistent)?.to(address).copying(&handed.disks);
        if !handed.disks.is_empty() {
            terms = terms.disks_to(&Address::Unix(disks_at.into()));
        }
        let name = spec.spec().name.as_str();
        terms.parameters.push(Parameter::text(names::DESTINATION_NAME, name));
        let connection = daemon.lasting(deadline).await.map_err(failed)?;
        let mut parameters = terms.parameters.clone();
        parameters.push(Parameter::text(names::DESTINATION_XML, xml));
        let cookie = handed.cookie.as_bytes();
        let prepared = connection.migrate_prepare(&parameters, cookie, terms.flags, deadline).await;
        let answer = Handed::cookie(prepared.map_err(failed)?.cookie)?.parcel(None);
        let Handed { autostart, disks, drives, .. } = handed;
        let (last, is_unsaid, ended) = Default::default();
        let coming =
            Self { connection, terms, autostart, disks, drives, description, last, is_unsaid, ended };
        Ok((coming, answer))
    }

    /// Keeps what `Finish` needs.
    pub(crate) fn keep(&self, last: Parcel) {
        *lock(&self.last) = Some(last);
    }

    /// What is kept for `Finish`.
    pub(crate) fn last(&self) -> Result<Parcel, VmError> {
        lock(&self.last).clone().ok_or_else(|| VmError::failed("its source has not handed its last over"))
    }

    /// Takes the last of the guest, and leaves it paused.
    pub(crate) async fn finish(&self, last: &Parcel, deadline: Duration) -> Result<(), VmError> {
        self.is_unsaid.store(true, Ordering::Relaxed);
        let finished = self.try_finish(last, deadline).await.map(drop);
        // Without an answer, it may have finished, or may do so later.
        if !finished.as_ref().is_err_and(|error| matches!(error.kind, VmErrorKind::Mute | VmErrorKind::Gone))
        {
            *lock(&self.ended) = Some(finished.as_ref().map(drop).map_err(ToString::to_string));
            self.is_unsaid.store(false, Ordering::Relaxed);
        }
        finished
    }

    /// Whether libvirt was asked to finish, and has not said whether it has.
    pub(crate) fn is_unsaid(&self) -> bool {
        self.is_unsaid.load(Ordering::Relaxed)
    }

    /// libvirt has finished after all.
    pub(crate) fn has_finished(&self) {
        *lock(&self.ended) = Some(Ok(()));
        self.is_unsaid.store(false, Ordering::Relaxed);
    }

    async fn try_finish(&self, parcel: &Parcel, deadline: Duration) -> Result<Domain, VmError> {
        let cookie = Handed::of(parcel)?.cookie;
        let Terms { flags, parameters } = &self.terms;
        let finish = self.connection.migrate_finish(
            parameters,
            cookie.as_bytes(),
            flags | flags::PAUSED,
            false,
            deadline,
        );
        let finished = finish.await.map_err(failed)?;
        finished.domain.ok_or_else(|| VmError::failed("libvirt has discarded the domain that came"))
    }

    /// What has come.
    pub(crate) fn status(&self) -> TransferStatus {
        match &*lock(&self.ended) {
            Some(Ok(())) => TransferStatus::of(MigrationStatus::Completed),
            Some(Err(why)) => TransferStatus {
                error_desc: Some(why.clone()),
                ..TransferStatus::of(MigrationStatus::Failed)
            },
            None if self.connection.is_closed() => TransferStatus {
                error_desc: Some("libvirt has ended meanwhile, and so has the incoming domain".into()),
                ..TransferStatus::of(MigrationStatus::Failed)
            },
            None if lock(&self.last).is_some() => TransferStatus::of(MigrationStatus::PreSwitchover),
            None => TransferStatus::of(MigrationStatus::Active),
        }
    }

    /// Whether it is to be started when its host has booted, once it runs there.
    pub(crate) fn autostart(&self) -> bool {
        self.autostart
    }

    /// The disks that are copied here, as the guest calls them.
    pub(crate) fn disks(&self) -> &[String] {
        &self.disks
    }

    /// What QEMU calls them.
    pub(crate) fn drives(&self) -> &[String] {
        &self.drives
    }

    /// What is to come.
    pub(crate) fn description(&self) -> &DomainDescription {
        &self.description
    }

    /// Whether all is here.
    pub(crate) fn is_complete(&self) -> bool {
        matches!(*lock(&self.ended), Some(Ok(())))
    }

    /// Ends the domain, unless all is here.
    pub(crate) async fn close(&self, deadline: Duration) {
        self.connection.close(deadline).await;
    }
}

/// The XML comes from another host: it must be that of the VM which was let in.
fn checked_description(spec: &ResolvedSpec, xml: &str) -> Result<DomainDescription, VmError> {
    let description = DomainDescription::parse(xml).map_err(VmError::failed)?;
    if let Some(obstacle) = description.obstacles().first() {
        return Err(VmError::failed(obstacle));
    }
    let mut described =
        description.vm_spec().map_err(|reasons| VmError::failed(Inexpressible::in_words(&reasons)))?;
    let name: &VmName = &spec.spec().name;
    // libvirt leaves out of this XML what it has found images to be based on; the specification says it.
    let disks = &spec.spec().disks;
    if described.disks.iter().all(|disk| disks.contains(disk)) {
        described.disks.clone_from(disks);
    }
    if let Some(key) = spec.difference(&described) {
        return Err(VmError::failed(format!(
            "the XML of the domain {name} does not match what its source has said about it: they differ in `{key}`"
        )));
    }
    domain::refusal(xml, &described).map_or(Ok(description), |untrusted| Err(VmError::failed(untrusted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = include_str!("../tests/domains/debian.xml");

    fn without_backing(xml: &str) -> String {
        let (start, end) = (xml.find("<backingStore type").unwrap(), xml.find("<target dev='vda'").unwrap());
        [&xml[..start], &xml[end..]].concat()
    }

    #[test]
    fn what_a_disk_is_based_on_may_be_missing_from_the_xml_and_not_from_the_specification() {
        let spec = |xml: &str| {
            ResolvedSpec::try_from(DomainDescription::parse(xml).unwrap().vm_spec().unwrap()).unwrap()
        };
        let bare = without_backing(XML);
        assert!(checked_description(&spec(XML), XML).is_ok());
        assert!(checked_description(&spec(XML), &bare).is_ok());
        let error = checked_description(&spec(&bare), XML).unwrap_err().to_string();
        assert!(error.contains("they differ in `disk`"), "{error}");
    }
}
