//! This host and the others, for people and peers.

use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Release;
use futures_util::future::join_all;

use super::Checks;
use crate::peers::LIST_DEADLINE;
use crate::peers::release::look_at_host;
use drainpipe_api_types::{HostStatus, HostView, PeerView};

impl Checks {
    /// This host, for people and peers.
    pub(crate) async fn host_view(&self) -> Result<HostView, Problem> {
        let kvm = self.vms.facts().kvm_missing.is_none();
        let cordon = self.journal.cordon()?;
        let release = Release::own();
        let hardware = &self.host.hardware;
        let peers = self.host.peers().into_iter();
        Ok(HostView {
            facts: self.incoming.facts().await?,
            agent_version: release.version,
            protocols: release.protocols,
            kernel: hardware.kernel.clone(),
            cpu_model: hardware.cpu_model.clone(),
            memory_bytes: hardware.memory_bytes,
            accelerator: if kvm { "kvm" } else { "tcg" }.into(),
            cordoned: cordon.is_some(),
            swap_with: cordon.and_then(|cordon| cordon.swap_with),
            peers: peers
                .map(|peer| PeerView { name: peer.name, address: peer.address.to_string() })
                .collect(),
            paths: self.known_paths.all(),
        })
    }

    /// All hosts that this one knows, itself first.
    pub(crate) async fn all_hosts(&self) -> Result<Vec<HostStatus>, Problem> {
        let own = HostStatus {
            name: self.host.name().into(),
            address: self.host.config.listen.to_string(),
            host: Some(self.host_view().await?),
            error: None,
        };
        let others = self.host.peers().into_iter().map(|peer| async move {
            let asked = match self.peers.get(&peer.name) {
                Some(client) => look_at_host(self.host.name(), &client, &peer.name, LIST_DEADLINE).await,
                None => Err(Problem::failed("no client")),
            };
            let (host, error) = match asked {
                Ok(view) => (Some(view), None),
                Err(problem) => (None, Some(problem.message)),
            };
            HostStatus { name: peer.name, address: peer.address.to_string(), host, error }
        });
        let mut all = vec![own];
        all.extend(join_all(others).await);
        Ok(all)
    }
}
