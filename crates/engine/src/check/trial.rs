//! A test between two hosts, and its results.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::sizes::{Arrived, SMALL_BYTES, largest};
use crate::paths::path::Path;

/// One path, tried for real.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PathTrial {
    /// The path, seen from the source.
    pub path: Path,
    /// Why a TCP connection from source to target failed; absent when it stood.
    pub connection_error: Option<String>,
    /// Packets from source to target.
    pub forward: PacketTrial,
    /// Packets from target to source.
    pub backward: PacketTrial,
    /// Least time from the source to the target and back, in milliseconds, by datagrams.
    pub round_trip_ms: Option<f64>,
    /// The same as the source's kernel has it of the TCP connection.
    #[serde(default)]
    pub tcp_round_trip: Option<TcpRoundTrip>,
}

/// Time there and back of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TcpRoundTrip {
    /// Smoothed, in milliseconds (`tcpi_rtt`).
    pub smoothed_ms: f64,
    /// The least, in milliseconds (`tcpi_min_rtt`).
    pub least_ms: f64,
}

impl PathTrial {
    /// The least time there and back that is known, in milliseconds. What an agent measures is longer than what
    /// the kernel does by the time in which the agent waits for a core.
    pub fn least_round_trip_ms(&self) -> Option<f64> {
        let by_tcp = self.tcp_round_trip.map(|tcp| tcp.least_ms);
        self.round_trip_ms.into_iter().chain(by_tcp).reduce(f64::min)
    }
}

/// Packets that must not be fragmented, sent one way over one path.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct PacketTrial {
    /// Largest packet that was sent: the MTU of the link that it was sent by, in bytes. Absent where
    /// none could be sent.
    pub sent_bytes_max: Option<u16>,
    /// Largest packet that arrived, in bytes.
    pub arrived_bytes_max: Option<u16>,
    /// Packets sent that were not larger than the largest that arrived.
    pub sent: u32,
    /// How many of these arrived.
    pub arrived: u32,
}

impl PacketTrial {
    /// Sums up what was sent, `copies` of each size, and what arrived.
    pub fn sum_up(sent: &[u16], copies: u32, arrived: &Arrived) -> Self {
        let arrived_bytes_max = largest(arrived);
        let passing = |size: &u16| arrived_bytes_max.is_some_and(|largest| *size <= largest);
        let count = |sizes: usize| u32::try_from(sizes).unwrap_or(u32::MAX);
        Self {
            sent_bytes_max: sent.iter().copied().max(),
            arrived_bytes_max,
            sent: count(sent.iter().copied().filter(passing).count()).saturating_mul(copies),
            arrived: sent.iter().filter_map(|size| arrived.get(size)).map(|count| (*count).min(copies)).sum(),
        }
    }

    /// Whether anything passes in this direction.
    pub fn passes(&self) -> bool {
        self.arrived_bytes_max.is_some_and(|bytes| bytes >= SMALL_BYTES)
    }

    /// Whether so many are lost, whatever their size, that all copies of one size may be lost by chance.
    pub fn loses_much(&self) -> bool {
        u64::from(self.arrived) * 4 < u64::from(self.sent) * 3
    }

    /// Whether everything passes that the sending link may send.
    pub fn passes_whole(&self) -> bool {
        self.arrived_bytes_max >= self.sent_bytes_max
    }
}

/// How far the target's clock is from the source's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ClockDifference {
    /// Positive where the target's clock is ahead, in milliseconds.
    pub ahead_ms: f64,
    /// How wrong that may be: half the time that asking took.
    pub uncertainty_ms: f64,
}

impl ClockDifference {
    /// From the source's clock before and after it read the target's; all in milliseconds.
    pub fn measured(before_ms: i64, target_ms: i64, after_ms: i64) -> Self {
        let [before, target, after] = [before_ms, target_ms, after_ms].map(|ms| ms as f64);
        Self { ahead_ms: target - f64::midpoint(before, after), uncertainty_ms: (after - before).abs() / 2.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::path;

    #[test]
    fn the_least_round_trip_is_that_of_either_kind() {
        let trial = |round_trip_ms, by_tcp: Option<f64>| PathTrial {
            path: path("e0"),
            connection_error: None,
            forward: PacketTrial::default(),
            backward: PacketTrial::default(),
            round_trip_ms,
            tcp_round_trip: by_tcp.map(|least_ms| TcpRoundTrip { smoothed_ms: 9.0, least_ms }),
        };
        assert_eq!(trial(Some(2.0), Some(1.0)).least_round_trip_ms(), Some(1.0));
        assert_eq!(trial(Some(2.0), Some(3.0)).least_round_trip_ms(), Some(2.0));
        assert_eq!(trial(None, Some(3.0)).least_round_trip_ms(), Some(3.0));
        assert_eq!(trial(None, None).least_round_trip_ms(), None);
    }
}
