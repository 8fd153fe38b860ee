//! What each path has carried of a migration, and what has arrived, by the kernel's count of its connections. QEMU
//! counts what it has written, including megabytes that may wait in its sockets; links also count what others send.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use drainpipe_engine::migration::progress::PathCounter;
use drainpipe_engine::paths::path::Path;
use drainpipe_net::{EndedFlows, Flow, FlowCounters, RouteState};
use tracing::{debug, warn};

use crate::host::network::HostNetwork;
use crate::paths::look_pace::LookPace;

/// If more than this part of the segments sent between two readings was sent again, that is more than TCP's own doing:
/// with a full queue it is far below 0.1 % over a while, and may be more in a single reading.
const LOSING_MIN: f64 = 0.01;

/// Fewer than that are chance.
const LOSING_SEGMENTS_MIN: u32 = 3;

/// The connections of one transfer.
#[derive(Debug)]
pub(crate) struct PathCounters {
    destination: SocketAddr,
    expected: usize,
    looks: LookPace,
    // By connections that others took the place of.
    earlier_bytes: u64,
    route: Option<RouteState>,
    connections: Vec<Connection>,
    paths: Vec<PathCount>,
    // By link.
    sent_elsewhere: BTreeMap<String, u64>,
    ended: Option<EndedFlows>,
}

#[derive(Debug)]
struct Connection {
    flow: Flow,
    link: Option<String>,
    counters: FlowCounters,
}

/// What one path carried.
#[derive(Debug)]
struct PathCount {
    path: Path,
    sent_bytes: u64,
    arrived_bytes: u64,
    retransmitted_segments: u64,
    // Since the reading before the last one.
    lately: Lately,
}

/// Segments between two readings.
#[derive(Debug, Clone, Copy, Default)]
struct Lately {
    sent: u32,
    retransmitted: u32,
}

impl Lately {
    fn is_losing(self) -> bool {
        let Self { sent, retransmitted } = self;
        retransmitted >= LOSING_SEGMENTS_MIN && f64::from(retransmitted) >= f64::from(sent) * LOSING_MIN
    }
}

impl PathCounters {
    /// Begins to count: `expected` connections will be made to `destination` over these paths.
    pub(crate) fn expect(expected: usize, destination: SocketAddr, paths: &[Path]) -> Self {
        let count = |path: &Path| PathCount {
            path: path.clone(),
            sent_bytes: 0,
            arrived_bytes: 0,
            retransmitted_segments: 0,
            lately: Lately::default(),
        };
        Self {
            destination,
            expected,
            looks: LookPace::quick(),
            earlier_bytes: 0,
            route: None,
            connections: vec![],
            paths: paths.iter().map(count).collect(),
            sent_elsewhere: BTreeMap::new(),
            ended: None,
        }
    }

    /// The connections are broken, and as many others will be made to `destination`.
    pub(crate) fn expect_again(&mut self, destination: SocketAddr) {
        self.earlier_bytes = self.bytes().unwrap_or(self.earlier_bytes);
        self.connections.clear();
        (self.destination, self.looks, self.route) = (destination, LookPace::quick(), None);
    }

    /// Reads the kernel's counters. What cannot be read counts as it was.
    pub(crate) async fn read(&mut self, network: &HostNetwork, now_ms: f64) {
        if self.connections.len() < self.expected && self.looks.is_due(now_ms) {
            self.look(network).await;
        }
        if self.may_have_moved(network).await {
            self.find_ways(network).await;
        }
        let mut ended =
            self.ended.as_ref().map(|ended| ended.read(self.destination.port())).unwrap_or_default();
        for count in &mut self.paths {
            count.lately = Lately::default();
        }
        for index in 0..self.connections.len() {
            let flow = self.connections[index].flow;
            if let Some(last) = ended.remove(&flow) {
                self.count(index, last);
            } else if let Ok(Some(now)) = network.flow_counters(flow).await {
                self.count(index, now);
            }
        }
    }

    fn count(&mut self, connection: usize, now: FlowCounters) {
        let Connection { link, counters, .. } = &mut self.connections[connection];
        let Some(link) = link else { return };
        let before = std::mem::replace(counters, now);
        let sent_bytes = now.sent_bytes.saturating_sub(before.sent_bytes);
        let Some(count) = self.paths.iter_mut().find(|count| count.path.link == *link) else {
            *self.sent_elsewhere.entry(link.clone()).or_default() += sent_bytes;
            return;
        };
        count.sent_bytes += sent_bytes;
        count.arrived_bytes += now.acknowledged_bytes.saturating_sub(before.acknowledged_bytes);
        let retransmitted = now.retransmitted_segments.saturating_sub(before.retransmitted_segments);
        count.retransmitted_segments += u64::from(retransmitted);
        // The kernel's count begins again after 2³² segments.
        let sent = now.sent_segments.wrapping_sub(before.sent_segments);
        count.lately.sent = count.lately.sent.saturating_add(sent);
        count.lately.retransmitted = count.lately.retransmitted.saturating_add(retransmitted);
    }

    /// The paths on which much had to be sent again between the last two readings.
    pub(crate) fn losing(&self) -> Vec<Path> {
        let losing = self.paths.iter().filter(|count| count.lately.is_losing());
        losing.map(|count| count.path.clone()).collect()
    }

    /// The last of the memory is about to be sent; then QEMU closes its connections.
    pub(crate) fn expect_end(&mut self) {
        match EndedFlows::listen() {
            Ok(ended) => self.ended = Some(ended),
            Err(error) => warn!(%error, "the last bytes of each connection cannot be counted"),
        }
    }

    async fn look(&mut self, network: &HostNetwork) {
        let flows = match network.flows_to(self.destination.ip()).await {
            Ok(flows) => flows,
            Err(problem) => return debug!(%problem, "it is not known what arrives"),
        };
        for flow in flows.into_iter().filter(|flow| flow.destination.port() == self.destination.port()) {
            if !self.connections.iter().any(|connection| connection.flow == flow) {
                self.connections.push(Connection { flow, link: None, counters: FlowCounters::default() });
            }
        }
    }

    /// Asking for each connection costs as much as all the rest.
    async fn may_have_moved(&mut self, network: &HostNetwork) -> bool {
        let Ok(route) = network.route_state(self.destination.ip()).await else { return true };
        let is_same = self.route.as_ref() == Some(&route);
        self.route = Some(route);
        !is_same || self.connections.iter().any(|connection| connection.link.is_none())
    }

    async fn find_ways(&mut self, network: &HostNetwork) {
        let flows: Vec<Flow> = self.connections.iter().map(|connection| connection.flow).collect();
        let Ok(links) = network.links_of_flows(&flows).await else { return };
        for (connection, link) in self.connections.iter_mut().zip(links) {
            // For a moment there may be no route.
            connection.link = link.or_else(|| connection.link.take());
        }
    }

    /// For each path the bytes that were sent by it, with those that were sent again and without headers.
    /// None if not all connections are known or the kernel does not count.
    pub(crate) fn sent_by_path(&self) -> Option<Vec<u64>> {
        let is_counted = |connection: &Connection| {
            let Connection { link, counters, .. } = connection;
            link.is_some() && (counters.sent_bytes > 0 || counters.acknowledged_bytes <= 1)
        };
        let all = self.connections.len() >= self.expected && self.connections.iter().all(is_counted);
        all.then(|| self.paths.iter().map(|count| count.sent_bytes).collect())
    }

    /// Bytes that were sent over links that are on none of the paths.
    pub(crate) fn sent_elsewhere(&self) -> impl Iterator<Item = (&str, u64)> {
        let each = self.sent_elsewhere.iter().map(|(link, bytes)| (link.as_str(), *bytes));
        each.filter(|(_, bytes)| *bytes > 0)
    }

    /// Bytes that the target's host has confirmed; none as long as no connection is known.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let each = self.connections.iter().map(|connection| connection.counters.acknowledged_bytes);
        (!self.connections.is_empty()).then(|| self.earlier_bytes + each.sum::<u64>())
    }

    /// For each path what has arrived.
    pub(crate) fn by_path(&self) -> Vec<PathCounter> {
        let waits = |connection: &Connection| connection.counters.unacknowledged_segments > 0;
        let counter = |(index, count): (usize, &PathCount)| PathCounter {
            link: count.path.link.clone(),
            peer_link: count.path.peer_link.clone(),
            arrived_bytes: count.arrived_bytes,
            is_waiting: self.on_path(index).any(waits),
        };
        self.paths.iter().enumerate().map(counter).collect()
    }

    fn on_path(&self, index: usize) -> impl Iterator<Item = &Connection> {
        let link = self.paths.get(index).map(|count| &count.path.link);
        self.connections.iter().filter(move |connection| link.is_some() && connection.link.as_ref() == link)
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
