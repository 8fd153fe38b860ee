//! Whether a relay packs what goes over the network, and why not.

use std::fmt;

use super::incapable::Incapable;
use super::{PlanRequest, Reason};
use crate::format::rate;
use crate::host::facts::{HostFacts, NoPacking};
use crate::option::RequestedOption;
use crate::paths::path::Path;
use crate::transfer::relayed::{Compressible, RelayMeans, Verdict};

/// Why memory is not compressed, as was asked for.
#[derive(Debug, Clone, PartialEq)]
pub enum NotCompressed {
    /// No core of the source may pack, for this reason where it says one.
    NoCore(Option<NoPacking>),
    /// This hypervisor goes through no relay.
    NotRelayed(Incapable),
    /// This one makes one connection, and several are compressed.
    OneConnection(Incapable),
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
    request: &PlanRequest,
    source: &HostFacts,
    target: &HostFacts,
    means: Option<RelayMeans>,
) -> (bool, Option<Reason>) {
    let not = |why| (false, Some(Reason::NotCompressed(why)));
    if request.option != RequestedOption::Compression {
        return match means.map(|means| means.verdict(request.memory)) {
            Some(Verdict::Compressed { wire_share }) => (true, Some(Reason::Compressed { wire_share })),
            _ if !request.may_be_compressed_unasked() => (false, None),
            _ => NotCompressed::by_hypervisors(source, target).map_or((false, None), not),
        };
    }
    if let Some(why) = NotCompressed::by_hypervisors(source, target) {
        return not(why);
    }
    if source.packing_cores == Some(0) {
        return not(NotCompressed::NoCore(source.no_packing));
    }
    match means.map(|means| (means, means.verdict(request.memory))) {
        Some((_, Verdict::Compressed { .. })) => (true, None),
        Some((means, verdict)) => not(NotCompressed::by_relay(means, verdict)),
        None if request.memory.is_some_and(|memory| !memory.shrinks()) => not(NotCompressed::NothingShrinks),
        None => (true, Some(Reason::CompressedUnweighed)),
    }
}

impl NotCompressed {
    /// For what a hypervisor cannot do; nothing where both can.
    fn by_hypervisors(source: &HostFacts, target: &HostFacts) -> Option<Self> {
        let not_relayed = Incapable::to_be_relayed(source, target).map(Self::NotRelayed);
        not_relayed.or_else(|| Incapable::to_send_in_parallel(source, target).map(Self::OneConnection))
    }

    /// For what a relay would make of it.
    fn by_relay(means: RelayMeans, verdict: Verdict) -> Self {
        let RelayMeans { wire_mbps, source_cores, target_cores, .. } = means;
        match verdict {
            Verdict::NothingShrinks => Self::NothingShrinks,
            _ => Self::Outrun { wire_mbps, source_cores, target_cores },
        }
    }
}

impl PlanRequest {
    /// What a relay between two hosts has, over these paths; none where another option was asked for, a hypervisor can do
    /// nothing with a relay, or it is not known what the paths carry.
    pub fn relay_means<'a>(
        &self,
        source: &HostFacts,
        target: &HostFacts,
        paths: impl Iterator<Item = &'a Path>,
        is_encrypted: bool,
    ) -> Option<RelayMeans> {
        let is_possible = NotCompressed::by_hypervisors(source, target).is_none();
        if !self.option.may_compress() || !is_possible {
            return None;
        }
        let is_asked_for = self.option == RequestedOption::Compression;
        let means = RelayMeans::of(source, target, paths, is_encrypted, is_asked_for)?;
        let Self { saved_mbps, compressed_slower, .. } = *self;
        Some(RelayMeans { saved_mbps, compressed_slower, ..means })
    }

    /// Whether memory was looked at that shrinks, and the choice is the agents'.
    fn may_be_compressed_unasked(&self) -> bool {
        self.option.may_compress() && self.memory.is_some_and(Compressible::shrinks)
    }
}

impl fmt::Display for NotCompressed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not compressed: ")?;
        match self {
            Self::NoCore(None) => f.write_str("no core of the source may compress"),
            Self::NoCore(Some(why)) => write!(f, "no core of the source may compress, because {why}"),
            Self::NotRelayed(hypervisor) => write!(f, "{hypervisor} cannot go through a relay"),
            Self::OneConnection(hypervisor) => write!(f, "{hypervisor} migrates over one connection only"),
            Self::NothingShrinks => f.write_str("hardly any of the memory shrinks"),
            Self::Outrun { wire_mbps, source_cores, target_cores } => write!(
                f,
                "the paths carry {}, which a relay could hardly improve with the cores that the VMs leave, \
                 {source_cores:.1} of the source and {target_cores:.1} of the target",
                rate(wire_mbps / 1e3)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn it_says_what_the_paths_carry_and_which_cores_a_relay_would_have() {
        let host = |vm_cores| HostFacts { cores: 1, vm_cores, ..fixtures::host("a") };
        let (needed, free) = (host(0.97), host(0.0));
        let path = Path { speed_mbps: Some(20_000), ..fixtures::path("e0") };
        let request = PlanRequest::from(RequestedOption::Compression);
        let means = request.relay_means(&needed, &free, [&path, &path].into_iter(), false);
        let (is_compressed, reason) = weigh(&request, &needed, &free, means);
        let why = reason.unwrap().to_string();
        assert!(!is_compressed && why.contains("40.0 Gb/s"), "{why}");
        assert!(
            why.ends_with("the cores that the VMs leave, 0.0 of the source and 1.0 of the target"),
            "{why}"
        );
    }
}
