//! What has arrived of a migration, by the kernel's count of its connections. QEMU counts what it has
//! written, of which megabytes may wait in its sockets.

use std::net::SocketAddr;

use drainpipe_engine::path::Path;
use drainpipe_engine::progress::PathArrival;
use drainpipe_net::{Flow, FlowCounters};
use tracing::debug;

use crate::look_pace::LookPace;
use crate::network::HostNetwork;

/// Between two questions which path each connection goes over.
const WAYS_EVERY_MS: f64 = 1_000.0;

/// The connections of one transfer.
#[derive(Debug)]
pub(crate) struct Arrivals {
    destination: SocketAddr,
    expected: usize,
    looks: LookPace,
    next_ways_ms: f64,
    connections: Vec<Connection>,
    paths: Vec<PathCount>,
}

#[derive(Debug)]
struct Connection {
    flow: Flow,
    path: Option<usize>,
    counters: FlowCounters,
}

/// What one path carried.
#[derive(Debug)]
struct PathCount {
    path: Path,
    arrived_bytes: u64,
    retransmitted_segments: u64,
}

impl Arrivals {
    /// So many connections will be made to `destination` over these paths.
    pub(crate) fn expect(expected: usize, destination: SocketAddr, paths: &[Path]) -> Self {
        let count =
            |path: &Path| PathCount { path: path.clone(), arrived_bytes: 0, retransmitted_segments: 0 };
        Self {
            destination,
            expected,
            looks: LookPace::quick(),
            next_ways_ms: 0.0,
            connections: vec![],
            paths: paths.iter().map(count).collect(),
        }
    }

    /// Reads the kernel's counters. What cannot be read counts as it was.
    pub(crate) async fn read(&mut self, network: &HostNetwork, now_ms: f64) {
        if self.connections.len() < self.expected && self.looks.is_due(now_ms) {
            self.look(network).await;
        }
        if now_ms >= self.next_ways_ms && !self.connections.is_empty() {
            self.next_ways_ms = now_ms + WAYS_EVERY_MS;
            self.find_ways(network).await;
        }
        for connection in &mut self.connections {
            let Ok(Some(now)) = network.flow_counters(connection.flow).await else { continue };
            let before = std::mem::replace(&mut connection.counters, now);
            if let Some(path) = connection.path.and_then(|path| self.paths.get_mut(path)) {
                path.arrived_bytes += now.acknowledged_bytes.saturating_sub(before.acknowledged_bytes);
                path.retransmitted_segments +=
                    u64::from(now.retransmitted_segments.saturating_sub(before.retransmitted_segments));
            }
        }
    }

    async fn look(&mut self, network: &HostNetwork) {
        let flows = match network.flows_to(self.destination.ip()).await {
            Ok(flows) => flows,
            Err(problem) => return debug!(%problem, "what arrives is not known"),
        };
        for flow in flows.into_iter().filter(|flow| flow.destination.port() == self.destination.port()) {
            if !self.connections.iter().any(|connection| connection.flow == flow) {
                self.connections.push(Connection { flow, path: None, counters: FlowCounters::default() });
                self.next_ways_ms = 0.0;
            }
        }
    }

    async fn find_ways(&mut self, network: &HostNetwork) {
        let flows: Vec<Flow> = self.connections.iter().map(|connection| connection.flow).collect();
        let Ok(links) = network.links_of_flows(&flows).await else { return };
        for (connection, link) in self.connections.iter_mut().zip(links) {
            let way = self.paths.iter().position(|count| Some(&count.path.link) == link.as_ref());
            // For a moment there may be no route.
            connection.path = way.or(connection.path);
        }
    }

    /// Bytes that the target's host has confirmed; none as long as no connection is known.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let each = self.connections.iter().map(|connection| connection.counters.acknowledged_bytes);
        (!self.connections.is_empty()).then(|| each.sum())
    }

    /// For each path what has arrived.
    pub(crate) fn by_path(&self) -> Vec<PathArrival> {
        let waits = |connection: &Connection| connection.counters.unacknowledged_segments > 0;
        let arrival = |(index, count): (usize, &PathCount)| PathArrival {
            path: count.path.to_string(),
            arrived_bytes: count.arrived_bytes,
            is_waiting: self.on_path(index).any(waits),
        };
        self.paths.iter().enumerate().map(arrival).collect()
    }

    fn on_path(&self, index: usize) -> impl Iterator<Item = &Connection> {
        self.connections.iter().filter(move |connection| connection.path == Some(index))
    }

    /// Connections on the path of this index.
    pub(crate) fn connections_on(&self, index: usize) -> Option<u64> {
        (!self.connections.is_empty()).then(|| self.on_path(index).count() as u64)
    }

    /// Segments that were sent again on the path of this index.
    pub(crate) fn retransmitted_segments(&self, index: usize) -> Option<u64> {
        let count = self.paths.get(index)?;
        (!self.connections.is_empty()).then_some(count.retransmitted_segments)
    }
}
