//! Whether a migration goes over several paths at once, and why not.

use std::fmt;

use super::incapable::Incapable;
use super::route::NoRoute;
use crate::host::facts::HostFacts;

/// Why a migration goes over one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotSpread {
    /// Nothing can be routed between the migration addresses.
    NoRoute(NoRoute),
    /// A hypervisor makes one connection, which has one path.
    OneConnection(Incapable),
    /// A hypervisor's connections are not its agent's, and no relay's are there in their place. Nobody sees which path
    /// each has.
    NotWatched(Incapable),
}

impl NotSpread {
    /// Why hypervisors make no connections that can be spread; nothing where they do. `is_relayed` where a relay's are
    /// on the paths.
    pub(super) fn by_hypervisors(source: &HostFacts, target: &HostFacts, is_relayed: bool) -> Option<Self> {
        let is_watched = |hosts| Incapable::among(hosts, |can| is_relayed || can.connections_are_ours);
        let one_connection = Incapable::to_send_in_parallel(source, target).map(Self::OneConnection);
        one_connection.or_else(|| is_watched([source, target]).map(Self::NotWatched))
    }
}

impl fmt::Display for NotSpread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoute(why) => why.fmt(f),
            Self::OneConnection(hypervisor) => write!(f, "{hypervisor} migrates over one connection only"),
            Self::NotWatched(hypervisor) => {
                write!(f, "no agent can see which path each connection of {hypervisor} uses")
            }
        }
    }
}
