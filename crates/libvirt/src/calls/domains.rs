use std::time::Duration;

use super::bits;
use super::opening::Truth;
use crate::connection::Connection;
use crate::domain::{Domain, DomainInfo, DomainStatus};
use crate::error::Error;
use crate::procedure::{Procedure, remote};
use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

const XML: Procedure = remote(14, "XML of a domain");
const AUTOSTART: Procedure = remote(15, "autostart");
const INFO: Procedure = remote(16, "figures of a domain");
const BY_NAME: Procedure = remote(23, "domain by name");
const BY_UUID: Procedure = remote(24, "domain by UUID");
const IS_PERSISTENT: Procedure = remote(151, "is persistent");
const STATE: Procedure = remote(212, "state of a domain");
const SET_METADATA: Procedure = remote(264, "set metadata");
const METADATA: Procedure = remote(265, "metadata");
const LIST: Procedure = remote(273, "list of domains");

/// Domains that one list has at most (`REMOTE_DOMAIN_LIST_MAX`).
const DOMAINS_MAX: usize = 16_384;
const ONLY_ACTIVE: u32 = 1;
/// Affects the definition, and the running domain if there is one.
const LIVE_AND_CONFIG: u32 = 1 | 2;
const CONFIG: u32 = 2;

/// Which XML of a domain is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct XmlFlags {
    /// With passwords.
    pub secure: bool,
    /// As it would be started, and not as it is now.
    pub inactive: bool,
    /// Without what older releases of libvirt do not know.
    pub migratable: bool,
}

/// A text that belongs to a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetadataOf<'a> {
    /// Its description, for people.
    Description,
    /// Its name for people.
    Title,
    /// An element of XML, of whoever's namespace it is.
    Element {
        /// The namespace.
        uri: &'a str,
        /// The prefix of the namespace, which only writing needs.
        prefix: &'a str,
    },
}

impl Connection {
    /// All domains, or those that are active.
    pub async fn domains(&self, only_active: bool, deadline: Duration) -> Result<Vec<Domain>, Error> {
        let write = |to: &mut Encoder| {
            // Not their number only.
            to.bool(true);
            to.u32(if only_active { ONLY_ACTIVE } else { 0 });
        };
        let Domains(domains) = self.call(LIST, write, deadline).await?;
        Ok(domains)
    }

    /// The domain of this name.
    pub async fn domain_by_name(&self, name: &str, deadline: Duration) -> Result<Domain, Error> {
        self.call(BY_NAME, |to| to.text(name), deadline).await
    }

    /// The domain of this UUID.
    pub async fn domain_by_uuid(&self, uuid: [u8; 16], deadline: Duration) -> Result<Domain, Error> {
        self.call(BY_UUID, |to| to.fixed(&uuid), deadline).await
    }

    /// Its definition, as XML.
    pub async fn xml(&self, domain: &Domain, flags: XmlFlags, deadline: Duration) -> Result<String, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.u32(flags.bits());
        };
        self.call(XML, write, deadline).await
    }

    /// What it is doing, and why.
    pub async fn state(&self, domain: &Domain, deadline: Duration) -> Result<DomainStatus, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.u32(0);
        };
        self.call(STATE, write, deadline).await
    }

    /// Its figures.
    pub async fn info(&self, domain: &Domain, deadline: Duration) -> Result<DomainInfo, Error> {
        self.call(INFO, |to| domain.encode(to), deadline).await
    }

    /// Whether its definition outlives it.
    pub async fn is_persistent(&self, domain: &Domain, deadline: Duration) -> Result<bool, Error> {
        let Truth(is_persistent) = self.call(IS_PERSISTENT, |to| domain.encode(to), deadline).await?;
        Ok(is_persistent)
    }

    /// Whether the daemon starts it when its host has booted.
    pub async fn autostart(&self, domain: &Domain, deadline: Duration) -> Result<bool, Error> {
        let Truth(autostart) = self.call(AUTOSTART, |to| domain.encode(to), deadline).await?;
        Ok(autostart)
    }

    /// A text of it, as it is now; none if it has no such text.
    pub async fn metadata(
        &self,
        domain: &Domain,
        of: MetadataOf<'_>,
        deadline: Duration,
    ) -> Result<Option<String>, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.i32(of.number());
            to.optional_text(of.uri());
            to.u32(0);
        };
        match self.call(METADATA, write, deadline).await {
            Err(error) if error.is_no_metadata() => Ok(None),
            metadata => metadata.map(Some),
        }
    }

    /// Sets or removes a text of its definition and, if it `is_active`, of what is there now. It must be persistent.
    pub async fn set_metadata(
        &self,
        domain: &Domain,
        of: MetadataOf<'_>,
        text: Option<&str>,
        is_active: bool,
        deadline: Duration,
    ) -> Result<(), Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.i32(of.number());
            to.optional_text(text);
            to.optional_text(of.prefix());
            to.optional_text(of.uri());
            to.u32(if is_active { LIVE_AND_CONFIG } else { CONFIG });
        };
        self.call(SET_METADATA, write, deadline).await
    }
}

impl XmlFlags {
    fn bits(self) -> u32 {
        bits([self.secure, self.inactive, false, self.migratable])
    }
}

impl MetadataOf<'_> {
    fn number(self) -> i32 {
        match self {
            Self::Description => 0,
            Self::Title => 1,
            Self::Element { .. } => 2,
        }
    }

    fn uri(&self) -> Option<&str> {
        if let Self::Element { uri, .. } = self { Some(uri) } else { None }
    }

    fn prefix(&self) -> Option<&str> {
        if let Self::Element { prefix, .. } = self { Some(prefix) } else { None }
    }
}

pub(super) struct Domains(Vec<Domain>);

impl Decode for Domains {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let domains = from.list(DOMAINS_MAX)?;
        let _number = from.u32()?;
        Ok(Self(domains))
    }
}
