use std::time::Duration;

use super::life::with_flags;
use super::opening::Truth;
use crate::connection::Connection;
use crate::domain::Domain;
use crate::error::Error;
use crate::procedure::{Procedure, remote};
use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

const CREATE: Procedure = remote(185, "create a snapshot");
const XML: Procedure = remote(186, "XML of a snapshot");
const COUNT: Procedure = remote(187, "number of snapshots");
const HAS_CURRENT: Procedure = remote(190, "has a current snapshot");
const CURRENT: Procedure = remote(191, "current snapshot");
const DELETE: Procedure = remote(193, "forget a snapshot");
const LIST: Procedure = remote(274, "list of snapshots");
const CHECKPOINTS: Procedure = remote(413, "list of checkpoints");

/// Snapshots, or checkpoints, that one list has at most (`REMOTE_DOMAIN_SNAPSHOT_LIST_MAX`).
const LISTED_MAX: usize = 16_384;
/// Parents before their children, as they are to be defined again.
const SNAPSHOTS_IN_ORDER: u32 = 1 << 10;
const CHECKPOINTS_IN_ORDER: u32 = 1 << 1;
const SECURE: u32 = 1;
const METADATA_ONLY: u32 = 1 << 1;

/// Flags of [`Connection::create_snapshot`] (`VIR_DOMAIN_SNAPSHOT_CREATE_…`).
pub mod snapshot_flags {
    /// Nothing but what is known of one that is there.
    pub const REDEFINE: u32 = 1;
    /// And it is the current one.
    pub const CURRENT: u32 = 1 << 1;
    /// The snapshot has disks only, without memory.
    pub const DISK_ONLY: u32 = 1 << 4;
    /// All or nothing.
    pub const ATOMIC: u32 = 1 << 7;
}

/// A snapshot of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name, unique in its domain.
    pub name: String,
    /// Its domain.
    pub domain: Domain,
}

/// A checkpoint of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its name, unique in its domain.
    pub name: String,
    /// Its domain.
    pub domain: Domain,
}

impl Connection {
    /// How many snapshots a domain has.
    pub async fn snapshot_count(&self, domain: &Domain, deadline: Duration) -> Result<u32, Error> {
        let Count(count) = self.call(COUNT, |to| with_flags(to, domain, 0), deadline).await?;
        Ok(count)
    }

    /// Its snapshots, parents before their children.
    pub async fn snapshots(&self, domain: &Domain, deadline: Duration) -> Result<Vec<Snapshot>, Error> {
        let List(snapshots) = self.call(LIST, |to| list_of(to, domain, SNAPSHOTS_IN_ORDER), deadline).await?;
        Ok(snapshots)
    }

    /// The description of a snapshot, as XML, with passwords.
    pub async fn snapshot_xml(&self, snapshot: &Snapshot, deadline: Duration) -> Result<String, Error> {
        let write = |to: &mut Encoder| {
            to.text(&snapshot.name);
            snapshot.domain.encode(to);
            to.u32(SECURE);
        };
        self.call(XML, write, deadline).await
    }

    /// The snapshot that the next one is based on; none where there is none.
    pub async fn current_snapshot(
        &self,
        domain: &Domain,
        deadline: Duration,
    ) -> Result<Option<Snapshot>, Error> {
        let Truth(has_one) = self.call(HAS_CURRENT, |to| with_flags(to, domain, 0), deadline).await?;
        if !has_one {
            return Ok(None);
        }
        self.call(CURRENT, |to| with_flags(to, domain, 0), deadline).await.map(Some)
    }

    /// Has libvirt forget a snapshot, which stays in the domain's disks. Its children become its parent's.
    pub async fn forget_snapshot(&self, snapshot: &Snapshot, deadline: Duration) -> Result<(), Error> {
        let write = |to: &mut Encoder| {
            to.text(&snapshot.name);
            snapshot.domain.encode(to);
            to.u32(METADATA_ONLY);
        };
        self.call(DELETE, write, deadline).await
    }

    /// Makes a snapshot, or with [`snapshot_flags::REDEFINE`] has libvirt know of one.
    pub async fn create_snapshot(
        &self,
        domain: &Domain,
        xml: &str,
        flags: u32,
        deadline: Duration,
    ) -> Result<Snapshot, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.text(xml);
            to.u32(flags);
        };
        self.call(CREATE, write, deadline).await
    }

    /// A domain's checkpoints, parents before their children.
    pub async fn checkpoints(&self, domain: &Domain, deadline: Duration) -> Result<Vec<Checkpoint>, Error> {
        let List(checkpoints) =
            self.call(CHECKPOINTS, |to| list_of(to, domain, CHECKPOINTS_IN_ORDER), deadline).await?;
        Ok(checkpoints)
    }
}

fn list_of(to: &mut Encoder, domain: &Domain, flags: u32) {
    domain.encode(to);
    // Not their number only.
    to.bool(true);
    to.u32(flags);
}

struct Count(u32);

impl Decode for Count {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        // Below 0 would be an error, which comes as one.
        from.i32().map(|count| Self(count.try_into().unwrap_or(0)))
    }
}

pub(super) struct List<T>(Vec<T>);

impl<T: Decode> Decode for List<T> {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let list = from.list(LISTED_MAX)?;
        let _number = from.i32()?;
        Ok(Self(list))
    }
}

impl Decode for Snapshot {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { name: from.text()?, domain: Domain::decode(from)? })
    }
}

impl Decode for Checkpoint {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { name: from.text()?, domain: Domain::decode(from)? })
    }
}
