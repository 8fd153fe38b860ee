//! Keeps the connections of a source's QEMU to a limit, by the kernel's pacing (`drainpipe_engine::bandwidth::pacing` says why).

#[cfg(test)]
mod tests;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::bandwidth::pacing::{self, BYTES_PER_S_OF_MBPS, Connection, LOOK_EVERY, waiting_bytes};
use drainpipe_hypervisor::{ConnectionUse, Machine, Pace};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tracing::warn;

use crate::vms::QMP_DEADLINE;

/// How long all of QEMU's connections are looked for. It sends next to nothing meanwhile.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

/// The same, where they are made only once the last of the VM's disks is there.
const AWAITED_WITHIN: Duration = Duration::from_mins(1);

/// Between two looks for connections that are not there yet: QEMU sends nothing for 100 ms.
const CONNECTED_LOOK_EVERY: Duration = Duration::from_millis(2);

/// The limit of one QEMU's connections, in Mb/s of the links.
#[derive(Debug, Clone)]
pub(crate) struct Pacer {
    connections: Connections,
    limit_mbps: Arc<watch::Sender<Option<u64>>>,
    // Where its connections are not the agent's.
    is_left_to_hypervisor: bool,
    found_within: Duration,
}

#[derive(Debug, Clone)]
struct Connections {
    vmm: Arc<dyn Machine>,
    peer: SocketAddr,
    count: usize,
}

/// The pacing under way; dropped, it stays as it is.
#[derive(Debug)]
pub(crate) struct Pacing {
    task: JoinHandle<()>,
    // Those that may be paced.
    connections: Option<Connections>,
}

impl Pacer {
    /// Paces the `count` connections to `peer` that are to come. Begins without a limit.
    pub(crate) fn new(vmm: Arc<dyn Machine>, peer: SocketAddr, count: usize) -> Self {
        let limit_mbps = Arc::new(watch::channel(None).0);
        let connections = Connections { vmm, peer, count };
        Self { connections, limit_mbps, is_left_to_hypervisor: false, found_within: FOUND_WITHIN }
    }

    /// The same, but they are made only in a while.
    pub(crate) fn awaited(self) -> Self {
        Self { found_within: AWAITED_WITHIN, ..self }
    }

    /// The same, but QEMU keeps the limit as well as it can, and nothing is set on its connections.
    pub(crate) fn left_to_hypervisor(self) -> Self {
        Self { is_left_to_hypervisor: true, ..self }
    }

    pub(crate) fn set(&self, limit_mbps: Option<u64>) {
        self.limit_mbps.send_replace(limit_mbps);
    }

    /// QEMU's own limit at first: with one that it does not keep itself, nothing, since its connections cannot be paced
    /// before they are there.
    pub(crate) fn hypervisor_begins_with_mbps(&self) -> Option<u64> {
        self.limit_mbps.borrow().map(|mbps| if self.is_left_to_hypervisor { mbps } else { 0 })
    }

    /// QEMU has the order to send.
    pub(crate) fn begin(&self) -> Pacing {
        let connections = self.connections.clone();
        let pace = Keeping {
            connections: connections.clone(),
            limit_mbps: self.limit_mbps.subscribe(),
            began: Instant::now(),
            found_until: Instant::now() + self.found_within,
            pacing: pacing::Pacing::default(),
            are_found: self.is_left_to_hypervisor,
            are_paced: false,
            is_kept_by_hypervisor: self.is_left_to_hypervisor,
            hypervisor_mbps: self.hypervisor_begins_with_mbps(),
        };
        let connections = (!self.is_left_to_hypervisor).then_some(connections);
        Pacing { task: tokio::spawn(pace.keep()), connections }
    }
}

impl Pacing {
    /// Lets QEMU send without a limit.
    pub(crate) fn lift(self) {
        self.task.abort();
        if let Some(connections) = &self.connections {
            connections.unpace();
        }
    }
}

impl Drop for Pacing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connections {
    fn unpace(&self) {
        let Some(connections) = self.vmm.connections() else { return };
        if let Err(error) = connections.pace(self.peer, &mut |in_use| vec![Pace::NONE; in_use.len()]) {
            warn!(%error, "QEMU's connections still keep a bandwidth limit that no longer applies");
        }
    }
}

struct Keeping {
    connections: Connections,
    limit_mbps: watch::Receiver<Option<u64>>,
    began: Instant,
    found_until: Instant,
    pacing: pacing::Pacing,
    are_found: bool,
    are_paced: bool,
    // Where the kernel does not let its connections be paced.
    is_kept_by_hypervisor: bool,
    // QEMU's last setting.
    hypervisor_mbps: Option<u64>,
}

impl Keeping {
    async fn keep(mut self) {
        loop {
            let limit_mbps = *self.limit_mbps.borrow_and_update();
            match limit_mbps {
                Some(mbps) if !self.is_kept_by_hypervisor => {
                    self.pace(mbps.saturating_mul(BYTES_PER_S_OF_MBPS));
                }
                None if self.are_paced => {
                    self.connections.unpace();
                    self.are_paced = false;
                }
                Some(_) | None => {}
            }
            self.tell_hypervisor(limit_mbps).await;
            let is_settled =
                self.hypervisor_mbps == limit_mbps && (self.is_kept_by_hypervisor || limit_mbps.is_none());
            let look_every = if self.are_found { LOOK_EVERY } else { CONNECTED_LOOK_EVERY };
            tokio::select! {
                changed = self.limit_mbps.changed() => if changed.is_err() { return },
                () = sleep(look_every), if !is_settled => {}
            }
        }
    }

    fn pace(&mut self, limit_bytes_per_s: u64) {
        let Some(connections) = self.connections.vmm.connections() else {
            return self.is_left_to_hypervisor("its connections do not belong to this agent");
        };
        let (at, pacing) = (self.began.elapsed(), &mut self.pacing);
        let paced = connections.pace(self.connections.peer, &mut |in_use| {
            let unsent_bytes = waiting_bytes(limit_bytes_per_s, in_use.len());
            let connections: Vec<_> = in_use.iter().map(as_looked_at).collect();
            let paces = pacing.look(at, limit_bytes_per_s, &connections);
            paces.into_iter().map(|bytes_per_s| Pace { bytes_per_s, unsent_bytes }).collect()
        });
        self.are_paced = true;
        match paced {
            Ok(found) if self.are_found || found >= self.connections.count => self.are_found = true,
            Ok(_) if Instant::now() < self.found_until => {}
            Ok(found) => {
                let count = self.connections.count;
                self.is_left_to_hypervisor(&format!("found {found} of QEMU's {count} connections"));
            }
            // QEMU has just ended: the transfer is over, which others tell.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => self.is_left_to_hypervisor(&error.to_string()),
        }
    }

    fn is_left_to_hypervisor(&mut self, why: &str) {
        warn!(why, "a bandwidth limit is left to QEMU, which may send more where it has several connections");
        (self.are_found, self.is_kept_by_hypervisor) = (true, true);
    }

    /// What QEMU is to keep to by itself.
    async fn tell_hypervisor(&mut self, limit_mbps: Option<u64>) {
        let own_mbps = match limit_mbps {
            Some(_) if self.is_kept_by_hypervisor => limit_mbps,
            Some(_) if !self.are_found => return,
            Some(_) | None => None,
        };
        if own_mbps == self.hypervisor_mbps {
            return;
        }
        match self.connections.vmm.set_bandwidth(own_mbps, QMP_DEADLINE).await {
            Ok(()) => self.hypervisor_mbps = own_mbps,
            Err(error) => warn!(%error, "QEMU's own bandwidth limit cannot be changed"),
        }
    }
}

fn as_looked_at(used: &ConnectionUse) -> Connection {
    let ConnectionUse { is_in_use, has_unsent, link_bytes } = *used;
    Connection { is_in_use, has_unsent, link_bytes }
}
