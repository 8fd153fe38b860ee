//! What a bandwidth limit needs on this host besides the pace.

use drainpipe_engine::bandwidth::pacing::{BYTES_PER_S_OF_MBPS, needs_small_packets};
use drainpipe_engine::migration::{SourceEvent, Stage};
use drainpipe_engine::plan::LimitKeeper;
use drainpipe_engine::problem::Problem;
use drainpipe_net::packets_by_pace;
use tracing::warn;

use super::Executor;
use crate::transfer::transport::connections;

impl Executor {
    /// The news, if the limit of its memory has changed, or that of its disks while they go alone.
    pub(super) async fn follow_bandwidth_limit(&mut self) -> Option<SourceEvent> {
        let limit_mbps = self.settings.bandwidth.as_ref().or(self.copying.throttle.as_ref())?.limit_mbps();
        if limit_mbps == std::mem::replace(&mut self.settings.reported_limit_mbps, limit_mbps) {
            return None;
        }
        // Not in the moments in which the VM stands still: others may hold the network's lock.
        if self.settings.bandwidth.is_some() && *self.running.stage.borrow() == Stage::Sending {
            self.keep_packets_small(limit_mbps).await;
        }
        Some(SourceEvent::BandwidthLimited(limit_mbps))
    }

    /// Where many connections of QEMU share a low limit. It is put back with the migration's other changes of the network.
    pub(super) async fn keep_packets_small(&self, limit_mbps: Option<u64>) {
        let (Some(limit_mbps), Some(plan)) = (limit_mbps, &self.agreed.plan) else { return };
        let limit_bytes_per_s = limit_mbps.saturating_mul(BYTES_PER_S_OF_MBPS);
        let are_paced = plan.relay().is_none() && plan.limit_keeper() == LimitKeeper::Agents;
        if !are_paced || !needs_small_packets(limit_bytes_per_s, connections(plan)) {
            return;
        }
        if let Err(problem) = self.make_packets_small().await {
            warn!(%problem, "a bandwidth limit may be used unevenly, because TCP's packets stay large");
        }
    }

    async fn make_packets_small(&self) -> Result<(), Problem> {
        let Some(change) = packets_by_pace().map_err(Problem::failed)? else { return Ok(()) };
        self.outgoing.host.network.change_for(&self.running.id, &[change]).await
    }
}
