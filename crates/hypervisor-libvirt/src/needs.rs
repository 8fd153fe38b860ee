//! Which of the things that domains need this host's libvirt lacks.

use std::time::Duration;

use drainpipe_hypervisor::{Need, VmError};
use drainpipe_libvirt::Connection;

use crate::errors::failed;

/// Whether libvirt is who knows.
pub(crate) fn is_libvirts(need: &Need) -> bool {
    matches!(need, Need::Network(_) | Need::Volume { .. } | Need::Secret(_))
}

/// By their places.
pub(crate) async fn lacking(
    connection: &Connection,
    needs: &[Need],
    deadline: Duration,
) -> Result<Vec<usize>, VmError> {
    let names_networks = needs.iter().any(|need| matches!(need, Need::Network(_)));
    let networks =
        if names_networks { connection.active_networks(deadline).await.map_err(failed)? } else { vec![] };
    let mut lacking = vec![];
    for (index, need) in needs.iter().enumerate() {
        let is_there = match need {
            Need::Network(name) => Ok(networks.contains(name)),
            Need::Volume { pool, volume } => connection.has_volume(pool, volume, deadline).await,
            Need::Secret(uuid) => connection.has_secret(*uuid.as_bytes(), deadline).await,
            _ => Ok(true),
        };
        if !is_there.map_err(failed)? {
            lacking.push(index);
        }
    }
    Ok(lacking)
}
