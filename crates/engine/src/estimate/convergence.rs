//! Memory that gets dirty about as fast as it is sent, so that the rounds of a transfer do not end.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::load::{Load, ROUNDS_MAX};
use super::sending::{GOODPUT_SHARE, bytes_per_ms};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place};
use crate::format::rate;
use crate::plan::Plan;
use crate::transfer::downtime::downtime_limit_ms;
use crate::transfer::memory_sample::MemorySample;
use crate::transfer::relayed::Compressible;
use crate::transfer::throttle::THROTTLE_PERCENT_MAX;

/// A VM whose memory gets dirty faster than this share of what is sent is not counted on to converge: each round is
/// hardly shorter than the one before.
///
/// In flight a share near 1 would be chance. A hypervisor counts a page once a round, however often it is written. So once
/// the rounds of a VM do not get shorter any more, as much gets dirty in each as was sent in it, and the two rates differ
/// only by how they are measured: QEMU's was seen between 0.8 and 1.1 of the other.
const CONVERGES_BELOW: f64 = 0.8;

/// Whether rounds get shorter, if so much gets dirty in the time in which so much is sent.
pub(crate) fn converges(dirty_bytes: f64, sent_bytes: f64) -> bool {
    dirty_bytes <= CONVERGES_BELOW * sent_bytes
}

impl Load {
    /// Whether what gets dirty in the longest pause can be sent in it, with something to spare.
    pub(crate) fn converges(&self, bytes_per_ms: f64) -> bool {
        let longest_ms = downtime_limit_ms(ROUNDS_MAX) as f64;
        converges(self.dirtied_bytes(longest_ms), bytes_per_ms * longest_ms)
    }
}

/// Whether links of this speed, with headers, carry memory away as fast as it gets dirty, with something to spare.
fn keeps_pace(memory_bytes: u64, memory: MemorySample, speed_mbps: f64) -> bool {
    Load::of(memory_bytes, Some(memory), 1.0, None).converges(bytes_per_ms(speed_mbps * GOODPUT_SHARE))
}

/// Why the rounds of a transfer do not end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Outpaced {
    /// How fast memory gets dirty.
    pub dirty_gbps: f64,
    /// How much of it is sent meanwhile, before anybody packs it.
    pub sent_gbps: f64,
    /// The share of their time for which the VM's CPUs may be held back against that, in percent; 0 for never.
    pub throttle_max_percent: u8,
}

impl Outpaced {
    /// What is done about it.
    pub fn what_is_done(&self) -> String {
        match self.throttle_max_percent {
            0 => "its CPUs are not throttled".into(),
            most => format!("its CPUs are throttled more and more, by {most} % at most"),
        }
    }

    /// What else would help.
    pub fn what_helps(&self) -> &'static str {
        match self.throttle_max_percent {
            THROTTLE_PERCENT_MAX.. => "`--post-copy` moves it nevertheless",
            _ => "`--throttle 99` or `--post-copy` moves it nevertheless",
        }
    }
}

impl fmt::Display for Outpaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [dirty, sent] = [self.dirty_gbps, self.sent_gbps].map(rate);
        write!(f, "the VM's memory changes at {dirty}, and {sent} of it are sent")
    }
}

/// A VM that is about to move.
#[derive(Debug, Clone, Copy)]
pub struct MovingVm<'a> {
    /// Its name.
    pub vm: &'a str,
    /// Where it is.
    pub source: &'a str,
    /// All of its memory.
    pub memory_bytes: u64,
    /// What a look at its memory has shown.
    pub memory: MemorySample,
    /// See [`Outpaced::throttle_max_percent`].
    pub throttle_max_percent: u8,
}

/// That this plan's paths will not keep pace with a VM; nothing where their speed is not known, or where the VM is to run
/// on the target before all its memory does.
pub fn foreseen(leaving: &MovingVm<'_>, plan: &Plan) -> Option<Finding> {
    let &MovingVm { vm, source, memory_bytes, memory, throttle_max_percent } = leaving;
    // A packed byte of memory takes less than a byte of the wire; how much is sent in a second is then more.
    let wire_share =
        memory.compressible.filter(|_| plan.is_compressed()).map_or(1.0, Compressible::wire_share);
    let speed_mbps = plan.carried_mbps()? as f64 / wire_share.max(f64::MIN_POSITIVE);
    let gbps = |bytes_per_s: f64| bytes_per_s * 8.0 / 1e9;
    let outpaced = Outpaced {
        dirty_gbps: gbps(memory.dirty_bytes_per_s as f64),
        sent_gbps: speed_mbps / 1e3,
        throttle_max_percent,
    };
    (!plan.post_copy() && !keeps_pace(memory_bytes, memory, speed_mbps)).then(|| {
        Finding::new(FindingCode::VmOutpacesPaths, [Place::vm(source, vm)])
            .what(format!(
                "memory of VM {vm} changes at {}, and the paths carry {} of it",
                rate(outpaced.dirty_gbps),
                rate(outpaced.sent_gbps)
            ))
            .effect(format!("copying it may not end before the deadline: {}", outpaced.what_is_done()))
            .remedy(format!("{}; less load in it or more links would also help", outpaced.what_helps()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outpaced(throttle_max_percent: u8) -> Outpaced {
        Outpaced { dirty_gbps: 1.2, sent_gbps: 0.94, throttle_max_percent }
    }

    #[test]
    fn what_gets_dirty_about_as_fast_as_it_is_sent_does_not_converge() {
        for (dirty_bytes, is_so) in
            [(0.0, true), (50.0, true), (79.0, true), (85.0, false), (99.0, false), (200.0, false)]
        {
            assert_eq!(converges(dirty_bytes, 100.0), is_so, "{dirty_bytes}");
        }
    }

    #[test]
    fn what_is_done_and_what_helps_is_what_is_not_done_already() {
        assert!(outpaced(80).what_is_done().contains("by 80 % at most"));
        assert!(outpaced(0).what_is_done().contains("not throttled"));
        let helps = outpaced(80).what_helps();
        assert!(helps.contains("--throttle 99") && helps.contains("--post-copy"));
        assert!(!outpaced(99).what_helps().contains("--throttle"));
    }
}
