use std::time::Duration;

use crate::connection::Connection;
use crate::domain::Domain;
use crate::error::Error;
use crate::parameters::{PARAMETERS_MAX, Parameter};
use crate::procedure::{Procedure, remote};
use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

const BEGIN: Procedure = remote(302, "begin a migration");
const PREPARE: Procedure = remote(303, "prepare for a migration");
const PERFORM: Procedure = remote(305, "perform a migration");
const FINISH: Procedure = remote(306, "finish a migration");
const CONFIRM: Procedure = remote(307, "confirm a migration");

/// Flags of a migration, the same in all of its phases (`VIR_MIGRATE_…`).
pub mod migrate_flags {
    /// The guest runs meanwhile.
    pub const LIVE: u32 = 1;
    /// The source's daemon connects to the target's. Not for migrations by phases.
    pub const PEER2PEER: u32 = 1 << 1;
    /// Memory goes through the daemons. Not for migrations by phases.
    pub const TUNNELLED: u32 = 1 << 2;
    /// The target defines the domain.
    pub const PERSIST_DEST: u32 = 1 << 3;
    /// The source forgets its definition.
    pub const UNDEFINE_SOURCE: u32 = 1 << 4;
    /// The target leaves the guest paused.
    pub const PAUSED: u32 = 1 << 5;
    /// Disks go too.
    pub const NON_SHARED_DISK: u32 = 1 << 6;
    /// Disks go too, without what their backing files have.
    pub const NON_SHARED_INC: u32 = 1 << 7;
    /// Nobody may change the domain meanwhile.
    pub const CHANGE_PROTECTION: u32 = 1 << 8;
    /// Also where libvirt sees a danger to disks.
    pub const UNSAFE: u32 = 1 << 9;
    /// The definition only, of a domain that is off.
    pub const OFFLINE: u32 = 1 << 10;
    /// Memory is compressed.
    pub const COMPRESSED: u32 = 1 << 11;
    /// An error of a disk ends the migration.
    pub const ABORT_ON_ERROR: u32 = 1 << 12;
    /// QEMU slows the guest down if it must.
    pub const AUTO_CONVERGE: u32 = 1 << 13;
    /// All memory is pinned for RDMA.
    pub const RDMA_PIN_ALL: u32 = 1 << 14;
    /// Post-copy may be started.
    pub const POSTCOPY: u32 = 1 << 15;
    /// QEMU encrypts.
    pub const TLS: u32 = 1 << 16;
    /// Several connections (QEMU's multifd).
    pub const PARALLEL: u32 = 1 << 17;
    /// Disks are written on both sides at once (libvirt 8.0).
    pub const NON_SHARED_SYNCHRONOUS_WRITES: u32 = 1 << 18;
    /// A post-copy that was cut goes on (libvirt 8.5).
    pub const POSTCOPY_RESUME: u32 = 1 << 19;
    /// Without copies in the kernel (libvirt 8.5).
    pub const ZEROCOPY: u32 = 1 << 20;
}

/// Names of a migration's parameters (`VIR_MIGRATE_PARAM_…`).
pub mod migrate_parameters {
    /// Text: where memory goes, such as `tcp:10.0.0.2:49152`.
    pub const URI: &str = "migrate_uri";
    /// Text: the domain's name at the target.
    pub const DESTINATION_NAME: &str = "destination_name";
    /// Text: the domain's XML at the target.
    pub const DESTINATION_XML: &str = "destination_xml";
    /// Text: the XML that the target defines.
    pub const PERSISTENT_XML: &str = "persistent_xml";
    /// `ULong`: MiB per second.
    pub const BANDWIDTH: &str = "bandwidth";
    /// `ULong`: MiB per second, in post-copy.
    pub const BANDWIDTH_POSTCOPY: &str = "bandwidth.postcopy";
    /// Text: the address at which the target listens.
    pub const LISTEN_ADDRESS: &str = "listen_address";
    /// Text, several times: a disk that goes too.
    pub const DISKS: &str = "migrate_disks";
    /// `Int`: the port at which the target takes disks.
    pub const DISKS_PORT: &str = "disks_port";
    /// Text: where disks go.
    pub const DISKS_URI: &str = "disks_uri";
    /// `Int`: how many connections `PARALLEL` has.
    pub const PARALLEL_CONNECTIONS: &str = "parallel.connections";
    /// Text: the name in the target's certificate.
    pub const TLS_DESTINATION: &str = "tls.destination";
    /// `Int`: percent by which auto-converge begins.
    pub const AUTO_CONVERGE_INITIAL: &str = "auto_converge.initial";
    /// `Int`: percent by which it goes on.
    pub const AUTO_CONVERGE_INCREMENT: &str = "auto_converge.increment";
    /// Text, several times: a way to compress.
    pub const COMPRESSION: &str = "compression";
}

/// What comes of Begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Begun {
    /// What the target is to start.
    pub xml: String,
    /// For Prepare.
    pub cookie: Vec<u8>,
}

/// What comes of Prepare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// For Perform.
    pub cookie: Vec<u8>,
    /// Where the target listens, unless the parameters said where.
    pub uri: Option<String>,
}

/// What comes of Finish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The domain at the target; none if it was discarded.
    pub domain: Option<Domain>,
    /// For Confirm.
    pub cookie: Vec<u8>,
}

/// The phases of libvirt's migration protocol, version 3, each on the host where it belongs. Cookies go from one to the
/// next as they are.
impl Connection {
    /// At the source: makes the domain ready to leave. Ends with this connection.
    pub async fn migrate_begin(
        &self,
        domain: &Domain,
        parameters: &[Parameter],
        flags: u32,
        deadline: Duration,
    ) -> Result<Begun, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.list(parameters, PARAMETERS_MAX);
            to.u32(flags);
        };
        self.call(BEGIN, write, deadline).await
    }

    /// At the target: starts a paused hypervisor that listens. It ends with this connection, until Finish has returned.
    pub async fn migrate_prepare(
        &self,
        parameters: &[Parameter],
        cookie_in: &[u8],
        flags: u32,
        deadline: Duration,
    ) -> Result<Prepared, Error> {
        let write = |to: &mut Encoder| {
            to.list(parameters, PARAMETERS_MAX);
            to.cookie(cookie_in);
            to.u32(flags);
        };
        self.call(PREPARE, write, deadline).await
    }

    /// At the source: moves the memory, and leaves the guest paused. Who gives up waiting has aborted nothing.
    pub async fn migrate_perform(
        &self,
        domain: &Domain,
        parameters: &[Parameter],
        cookie_in: &[u8],
        flags: u32,
        deadline: Duration,
    ) -> Result<Vec<u8>, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            // The target's daemon, to which nobody but us connects.
            to.optional_text(None);
            to.list(parameters, PARAMETERS_MAX);
            to.cookie(cookie_in);
            to.u32(flags);
        };
        let Cookie(cookie) = self.call(PERFORM, write, deadline).await?;
        Ok(cookie)
    }

    /// At the target: lets the guest run, or leaves it paused with [`migrate_flags::PAUSED`], or discards it.
    pub async fn migrate_finish(
        &self,
        parameters: &[Parameter],
        cookie_in: &[u8],
        flags: u32,
        cancelled: bool,
        deadline: Duration,
    ) -> Result<Finished, Error> {
        let write = |to: &mut Encoder| {
            to.list(parameters, PARAMETERS_MAX);
            to.cookie(cookie_in);
            to.u32(flags);
            to.bool(cancelled);
        };
        match self.call(FINISH, write, deadline).await {
            // There is no domain that it could name, so it says so by an error.
            Err(error) if error.is_migrate_finish_ok() => Ok(Finished { domain: None, cookie: vec![] }),
            finished => finished,
        }
    }

    /// At the source: ends the domain, or lets its guest run on if `cancelled`.
    pub async fn migrate_confirm(
        &self,
        domain: &Domain,
        parameters: &[Parameter],
        cookie_in: &[u8],
        flags: u32,
        cancelled: bool,
        deadline: Duration,
    ) -> Result<(), Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.list(parameters, PARAMETERS_MAX);
            to.cookie(cookie_in);
            to.u32(flags);
            to.bool(cancelled);
        };
        self.call(CONFIRM, write, deadline).await
    }
}

pub(super) struct Cookie(Vec<u8>);

impl Decode for Cookie {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.cookie().map(Self)
    }
}

impl Decode for Begun {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let (cookie, xml) = (from.cookie()?, from.text()?);
        Ok(Self { xml, cookie })
    }
}

impl Decode for Prepared {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { cookie: from.cookie()?, uri: from.optional(Decoder::text)? })
    }
}

impl Decode for Finished {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { domain: Some(Domain::decode(from)?), cookie: from.cookie()? })
    }
}
