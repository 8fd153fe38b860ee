//! Whether a relay packs what goes over the network, and why not.

use std::fmt;

use super::{Reason, Request};
use crate::facts::{HostFacts, NoPacking};
use crate::format::rate;
use crate::option::RequestedOption;
use crate::relayed::{RelayMeans, Verdict};

/// Why memory is not compressed, as was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NotCompressed {
    /// No core of the source may pack, for this reason where it says one.
    NoCore(Option<NoPacking>),
    /// Hardly any of the memory shrinks.
    NothingShrinks,
    /// The paths carry so much that a relay could hardly better it.
    Outrun {
        /// What they carry, in Mb/s.
        wire_mbps: f64,
        /// Cores of the source that the VMs leave.
        source_cores: f64,
        /// Cores of the target that they leave.
        target_cores: f64,
    },
}

/// Whether it is compressed: only where that can make a migration faster, and unasked for where it does so for certain.
/// `means` are none where it is not known what the paths carry.
pub(super) fn weigh(
    request: &Request,
    source: &HostFacts,
    means: Option<RelayMeans>,
) -> (bool, Option<Reason>) {
    if request.option != RequestedOption::Compression {
        return match means.map(|means| means.verdict(request.memory)) {
            Some(Verdict::Compressed { wire_share }) => (true, Some(Reason::Compressed { wire_share })),
            _ => (false, None),
        };
    }
    let not = |why| (false, Some(Reason::NotCompressed(why)));
    if source.packing_cores == Some(0) {
        return not(NotCompressed::NoCore(source.no_packing));
    }
    match means.map(|means| (means, means.verdict(request.memory))) {
        Some((_, Verdict::Compressed { .. })) => (true, None),
        Some((means, verdict)) => not(means.why_not(verdict)),
        None if request.memory.is_some_and(|memory| !memory.shrinks()) => not(NotCompressed::NothingShrinks),
        None => (true, Some(Reason::CompressedUnweighed)),
    }
}

impl fmt::Display for NotCompressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not compressed: ")?;
        match self {
            Self::NoCore(None) => f.write_str("no core of the source may pack"),
            Self::NoCore(Some(why)) => write!(f, "no core of the source may pack, since {why}"),
            Self::NothingShrinks => f.write_str("hardly any of the memory shrinks"),
            Self::Outrun { wire_mbps, source_cores, target_cores } => write!(
                f,
                "the paths carry {}, which a relay could hardly better with the cores that the VMs leave, \
                 {source_cores:.1} of the source and {target_cores:.1} of the target",
                rate(wire_mbps / 1e3)
            ),
        }
    }
}
