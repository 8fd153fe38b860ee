//! Everything that is known about a path: what was tested on it, and what its links are.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::facts::{BondFacts, CheckFacts, Duplex};
use super::trial::PathTrial;

/// A path that was tried, and the link at each end of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathReport {
    /// What came of trying it.
    #[serde(flatten)]
    pub trial: PathTrial,
    /// The source's link.
    pub source: PathEndFacts,
    /// The target's link.
    pub target: PathEndFacts,
}

/// One end of a path. What is not known, or a link does not have, is absent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct PathEndFacts {
    /// As configured, else as the driver says.
    pub speed_mbps: Option<u64>,
    /// What the driver negotiated.
    pub duplex: Option<Duplex>,
    /// Largest packet that the link may send, in bytes.
    pub mtu_bytes: Option<u32>,
    /// Receive queues of the network card; links made of software have none that matter.
    pub receive_queues: Option<u32>,
    /// Those to which the card spreads what arrives (RSS).
    pub receive_queues_in_use: Option<u32>,
    /// Whether the kernel spreads what arrives over several cores (RPS).
    pub receive_steering: Option<bool>,
    /// How many cores its interrupts go to.
    pub interrupt_cores: Option<u32>,
    /// The team, if it is one.
    pub bond: Option<BondFacts>,
    /// The RDMA device that shares its port.
    pub rdma_device: Option<String>,
}

impl PathReport {
    /// A trial between two hosts, with what they say of its links.
    pub fn of(trial: PathTrial, source: &CheckFacts, target: &CheckFacts) -> Self {
        let ends = [(source, &trial.path.link), (target, &trial.path.peer_link)];
        let [source, target] = ends.map(|(facts, link)| PathEndFacts::of(facts, link));
        Self { trial, source, target }
    }
}

impl PathEndFacts {
    fn of(facts: &CheckFacts, name: &str) -> Self {
        let link = facts.host.link(name);
        let more = facts.link(name).cloned().unwrap_or_default();
        Self {
            speed_mbps: link.and_then(|link| link.speed_mbps),
            duplex: more.duplex,
            mtu_bytes: link.map(|link| link.mtu),
            receive_queues: more.receive_queues,
            receive_queues_in_use: more.receive_queues_in_use,
            receive_steering: more.receive_steering,
            interrupt_cores: more.interrupt_cores,
            bond: more.bond,
            rdma_device: more.rdma_device,
        }
    }
}
