use std::time::Duration;

use super::bits;
use super::opening::Truth;
use crate::connection::Connection;
use crate::domain::Domain;
use crate::error::Error;
use crate::procedure::{Procedure, remote, urgent};
use crate::xdr::{Encode, Encoder};

const DEFINE: Procedure = remote(11, "define");
const RESUME: Procedure = remote(28, "resume");
const SET_AUTOSTART: Procedure = remote(29, "set autostart");
const SHUT_DOWN: Procedure = remote(33, "shut down");
const SUSPEND: Procedure = urgent(34, "suspend");
const HAS_MANAGED_SAVE: Procedure = remote(183, "has a managed save");
const START: Procedure = remote(196, "start");
const UNDEFINE: Procedure = remote(231, "undefine");
const DESTROY: Procedure = urgent(234, "destroy");

const START_PAUSED: u32 = 1;
const DESTROY_GRACEFULLY: u32 = 1;

/// What may go with a domain's definition, or stay. libvirt refuses to undefine a domain that has what is not said here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of libvirt's")]
pub struct UndefineFlags {
    /// Its managed save goes.
    pub managed_save: bool,
    /// What is known of its snapshots goes; the snapshots stay in its disks.
    pub snapshots_metadata: bool,
    /// The file of its firmware's variables goes.
    pub nvram: bool,
    /// The file of its firmware's variables stays.
    pub keep_nvram: bool,
    /// What is known of its checkpoints goes.
    pub checkpoints_metadata: bool,
    /// The state of its TPM stays (libvirt 8.9).
    pub keep_tpm: bool,
}

impl Connection {
    /// Makes a domain of XML, or changes the one that has its UUID. It is not started.
    pub async fn define(&self, xml: &str, deadline: Duration) -> Result<Domain, Error> {
        self.call(DEFINE, |to| to.text(xml), deadline).await
    }

    /// Starts a domain that is defined.
    pub async fn start(&self, domain: &Domain, paused: bool, deadline: Duration) -> Result<Domain, Error> {
        let flags = if paused { START_PAUSED } else { 0 };
        self.call(START, |to| with_flags(to, domain, flags), deadline).await
    }

    /// Stops its guest for the time being.
    pub async fn suspend(&self, domain: &Domain, deadline: Duration) -> Result<(), Error> {
        self.call(SUSPEND, |to| domain.encode(to), deadline).await
    }

    /// Lets its guest go on.
    pub async fn resume(&self, domain: &Domain, deadline: Duration) -> Result<(), Error> {
        self.call(RESUME, |to| domain.encode(to), deadline).await
    }

    /// Asks its guest to end, which it may or may not do.
    pub async fn shutdown(&self, domain: &Domain, deadline: Duration) -> Result<(), Error> {
        self.call(SHUT_DOWN, |to| domain.encode(to), deadline).await
    }

    /// Ends it at once. `graceful` fails where a hypervisor would have to be killed.
    pub async fn destroy(&self, domain: &Domain, graceful: bool, deadline: Duration) -> Result<(), Error> {
        let flags = if graceful { DESTROY_GRACEFULLY } else { 0 };
        self.call(DESTROY, |to| with_flags(to, domain, flags), deadline).await
    }

    /// Forgets its definition. One that is active goes on without.
    pub async fn undefine(
        &self,
        domain: &Domain,
        flags: UndefineFlags,
        deadline: Duration,
    ) -> Result<(), Error> {
        self.call(UNDEFINE, |to| with_flags(to, domain, flags.bits()), deadline).await
    }

    /// Whether the daemon starts it when its host has booted.
    pub async fn set_autostart(
        &self,
        domain: &Domain,
        autostart: bool,
        deadline: Duration,
    ) -> Result<(), Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.bool(autostart);
        };
        self.call(SET_AUTOSTART, write, deadline).await
    }

    /// Whether its memory is kept in a file, for its next start.
    pub async fn has_managed_save(&self, domain: &Domain, deadline: Duration) -> Result<bool, Error> {
        let Truth(has_one) = self.call(HAS_MANAGED_SAVE, |to| with_flags(to, domain, 0), deadline).await?;
        Ok(has_one)
    }
}

pub(super) fn with_flags(to: &mut Encoder, domain: &Domain, flags: u32) {
    domain.encode(to);
    to.u32(flags);
}

impl UndefineFlags {
    fn bits(self) -> u32 {
        bits([
            self.managed_save,
            self.snapshots_metadata,
            self.nvram,
            self.keep_nvram,
            self.checkpoints_metadata,
            // That of its TPM goes.
            false,
            self.keep_tpm,
        ])
    }
}
