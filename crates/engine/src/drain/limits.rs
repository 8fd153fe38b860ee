//! Bounds of a drain: those that somebody sets, and how many VMs are prepared ahead.

use std::collections::BTreeSet;

/// VMs that are prepared, or being prepared, beyond those that may be on the links: with two the links need
/// not wait for steps 1 to 5, even if one of them fails.
pub(super) const AHEAD: u8 = 2;

/// Until the first VM is on the links none is prepared beyond those that may be there, so that it gets there sooner;
/// for so long at most.
pub(super) const FIRST_ALONE_MS: f64 = 1_000.0;

/// Bounds of one drain.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrainLimits {
    /// After this nothing new is begun, and what is not on the links yet is given up.
    pub total_ms: Option<f64>,
    /// VMs at most that leave this host at a time, those being prepared included, and those that somebody else moves.
    pub outbound: u8,
    /// VMs at most on their way to one target at a time, those being prepared included.
    pub inbound: u8,
    /// VMs at most on the links at a time, if somebody has set it.
    pub transfers: Option<u8>,
    /// How often one VM is tried.
    pub attempts: u8,
    /// Whether VMs that do not converge may run on their targets before all their memory is there.
    pub post_copy: bool,
    /// Whether VMs whose disks are copied go before the others, and not after them.
    pub disks_first: bool,
}

impl DrainLimits {
    /// How many VMs may be on the links at a time that go to these targets.
    pub(super) fn most_on_links<'a>(&self, targets: impl Iterator<Item = &'a str>) -> u8 {
        self.transfers.unwrap_or(u8::MAX).min(self.most_under_way(targets)).max(1)
    }

    /// How many may be under way at a time, those being prepared included.
    pub(super) fn most_under_way<'a>(&self, targets: impl Iterator<Item = &'a str>) -> u8 {
        let targets = u8::try_from(targets.collect::<BTreeSet<_>>().len()).unwrap_or(u8::MAX);
        let inbound = self.inbound.max(1).saturating_mul(targets.max(1));
        self.outbound.min(inbound).max(1)
    }
}
