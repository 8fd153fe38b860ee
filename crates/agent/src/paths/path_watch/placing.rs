//! Which connections of this host's migrations go to a peer, and which paths they should use.

use std::net::IpAddr;

use drainpipe_engine::paths::path::Path;
use drainpipe_net::{Flow, Placement, weights};

use crate::host::network::HostNetwork;
use crate::paths::look_pace::LookPace;

/// A border between two paths' connections is found by halving, and numbers that are closer than weights
/// can part are not worth more.
const ATTEMPTS: u8 = 12;

/// The connections to one peer that carry memory.
#[derive(Debug)]
pub(super) struct Placing {
    flows: Vec<Flow>,
    placement: Placement,
    attempts_left: u8,
    looks: LookPace,
}

impl Default for Placing {
    fn default() -> Self {
        Self { flows: vec![], placement: Placement::new(0), attempts_left: 0, looks: LookPace::default() }
    }
}

impl Placing {
    /// Looks which connections there are to these ports of the peer.
    pub(super) async fn look(&mut self, network: &HostNetwork, peer: IpAddr, ports: &[u16], now_ms: f64) {
        if !self.looks.is_due(now_ms) {
            return;
        }
        let Ok(mut flows) = network.flows_to(peer).await else { return };
        flows.retain(|flow| ports.contains(&flow.destination.port()));
        flows.sort_by_key(|flow| (flow.destination.port(), flow.source.port()));
        if flows == self.flows {
            if !flows.is_empty() {
                self.looks.slow_down();
            }
            return;
        }
        self.placement = Placement::new(flows.len());
        self.flows = flows;
        self.begin();
    }

    /// How many there are to this port of the peer.
    pub(super) fn connections_to(&self, port: u16) -> usize {
        self.flows.iter().filter(|flow| flow.destination.port() == port).count()
    }

    /// A transfer begins, so connections will be made.
    pub(super) fn look_soon(&mut self) {
        self.looks = LookPace::quick();
    }

    /// The route has changed.
    pub(super) fn begin(&mut self) {
        self.attempts_left = if self.flows.is_empty() { 0 } else { ATTEMPTS };
    }

    /// Whether weights are to be tried.
    pub(super) fn is_open(&self) -> bool {
        self.attempts_left > 0
    }

    /// Weights for these paths.
    pub(super) fn weights(&self, paths: &[Path]) -> Vec<u16> {
        if self.flows.is_empty() { weights(&speeds(paths)) } else { self.placement.weights(&speeds(paths)) }
    }

    /// Looks at what these weights have done. Ends the attempts when all is as it should be, or cannot be
    /// known. False if it contradicts what was seen before: then nothing is known any more.
    pub(super) async fn learn(&mut self, network: &HostNetwork, paths: &[Path], weights: &[u16]) -> bool {
        self.attempts_left = self.attempts_left.saturating_sub(1);
        let links = network.links_of_flows(&self.flows).await.unwrap_or_default();
        let path_over =
            |link: &Option<String>| paths.iter().position(|path| Some(&path.link) == link.as_ref());
        let taken: Option<Vec<usize>> = links.iter().map(path_over).collect();
        let Some(taken) = taken.filter(|taken| taken.len() == self.flows.len()) else {
            self.attempts_left = 0;
            return true;
        };
        let agrees = self.placement.observe(weights, &taken);
        if !agrees || Placement::is_fair(&taken, &speeds(paths)) {
            self.attempts_left = 0;
        }
        agrees
    }
}

fn speeds(paths: &[Path]) -> Vec<Option<u64>> {
    paths.iter().map(|path| path.speed_mbps).collect()
}
