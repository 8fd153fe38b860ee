//! What domains use beside themselves: networks, storage pools with their volumes, secrets.

use std::time::Duration;

use crate::connection::Connection;
use crate::error::Error;
use crate::procedure::{Procedure, remote};
use crate::xdr::{Decode, Decoder, Encoder, Malformed};

const VOLUME_BY_NAME: Procedure = remote(95, "volume by name");
const SECRET_BY_UUID: Procedure = remote(141, "secret by UUID");
const POOLS: Procedure = remote(281, "list of storage pools");
const NETWORKS: Procedure = remote(283, "list of networks");

/// Networks and pools that one list has at most (`REMOTE_NETWORK_LIST_MAX`, `REMOTE_STORAGE_POOL_LIST_MAX`).
const LISTED_MAX: usize = 16_384;
/// Lists only active networks and pools.
const ONLY_ACTIVE: u32 = 2;

/// A network or a storage pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Named {
    name: String,
    uuid: [u8; 16],
}

impl Connection {
    /// Names of the networks that are started.
    pub async fn active_networks(&self, deadline: Duration) -> Result<Vec<String>, Error> {
        self.active(NETWORKS, deadline).await.map(names)
    }

    /// Whether a storage pool is started, and has this volume.
    pub async fn has_volume(&self, pool: &str, volume: &str, deadline: Duration) -> Result<bool, Error> {
        let active = self.active(POOLS, deadline).await?;
        let Some(pool) = active.into_iter().find(|active| active.name == pool) else { return Ok(false) };
        let write = |to: &mut Encoder| {
            to.text(&pool.name);
            to.fixed(&pool.uuid);
            to.text(volume);
        };
        match self.call(VOLUME_BY_NAME, write, deadline).await {
            Ok(Volume) => Ok(true),
            Err(error) if error.is_no_storage() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether there is a secret of this UUID.
    pub async fn has_secret(&self, uuid: [u8; 16], deadline: Duration) -> Result<bool, Error> {
        match self.call(SECRET_BY_UUID, |to| to.fixed(&uuid), deadline).await {
            Ok(Secret) => Ok(true),
            Err(error) if error.is_no_secret() || error.is_no_daemon() => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn active(&self, list: Procedure, deadline: Duration) -> Result<Vec<Named>, Error> {
        let write = |to: &mut Encoder| {
            // Not their number only.
            to.bool(true);
            to.u32(ONLY_ACTIVE);
        };
        match self.call(list, write, deadline).await {
            Ok(Listed(all)) => Ok(all),
            // A libvirt without this part has none.
            Err(error) if error.is_no_support() || error.is_no_daemon() => Ok(vec![]),
            Err(error) => Err(error),
        }
    }
}

fn names(all: Vec<Named>) -> Vec<String> {
    all.into_iter().map(|one| one.name).collect()
}

impl Decode for Named {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { name: from.text()?, uuid: from.fixed()? })
    }
}

pub(super) struct Listed(Vec<Named>);

impl Decode for Listed {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let all = from.list(LISTED_MAX)?;
        let _number = from.u32()?;
        Ok(Self(all))
    }
}

/// That there is such a volume.
pub(super) struct Volume;

impl Decode for Volume {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let _pool_name_and_key = (from.text()?, from.text()?, from.text()?);
        Ok(Self)
    }
}

/// That there is such a secret.
pub(super) struct Secret;

impl Decode for Secret {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let _uuid_kind_and_use = (from.fixed::<16>()?, from.i32()?, from.text()?);
        Ok(Self)
    }
}
