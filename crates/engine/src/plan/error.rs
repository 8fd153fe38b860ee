//! Why there can be no plan.

use thiserror::Error;

use super::incapable::{Incapable, NoPostCopy};
use crate::format::rate;
use crate::host::facts::HostFacts;
use crate::option::RequestedOption;

/// Why there can be no plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// No link of the one reaches a link of the other.
    #[error(
        "no path from {source_host} ({source_links}) to {target_host} ({target_links}): no two links are in \
         one subnet, and none answered over IPv6 link-local addresses; are the cables in, the switch ports in \
         one VLAN, the migration ports open for UDP in both firewalls? Or give both ends addresses in one subnet"
    )]
    NoPath {
        /// Name of the source.
        source_host: String,
        /// Its links, in words.
        source_links: String,
        /// Name of the target.
        target_host: String,
        /// Its links, in words.
        target_links: String,
    },
    /// Links share subnets, but nothing gets through.
    #[error(
        "nothing gets through from {source_host} to {target_host}: {tried}; \
         are the cables in, the switch ports in one VLAN, the migration ports open in both firewalls? \
         drainpipe check {source_host} {target_host} says which rule is missing"
    )]
    NothingGetsThrough {
        /// Name of the source.
        source_host: String,
        /// Name of the target.
        target_host: String,
        /// Each path and why it was given up.
        tried: String,
    },
    /// Post-copy takes one connection.
    #[error(
        "post-copy goes over one connection, both ways, which {option} does not: use it with the option tcp or auto"
    )]
    NoPostCopy {
        /// What was asked for with it.
        option: RequestedOption,
    },
    /// The hypervisors cannot do it.
    #[error("post-copy was asked for, and {0}: do not ask for it")]
    PostCopyImpossible(NoPostCopy),
    /// A hypervisor would decide where the VM runs.
    #[error(
        "{0} decides by itself that a VM runs on the target: a lost answer could leave it running on both hosts, so \
         Drainpipe does not move it"
    )]
    HypervisorCommits(Incapable),
    /// It must be encrypted, and cannot be.
    #[error(
        "the migration is to be encrypted ({why}), and {hypervisor} cannot go through a relay, which does \
        that: if its network may be trusted, add it to trusted_networks on both hosts, and do not ask for \
        encryption"
    )]
    NotRelayed {
        /// Why it is to be encrypted.
        why: String,
        /// The hypervisor that cannot.
        hypervisor: Incapable,
    },
    /// A limit holds, and nobody can keep it.
    #[error(
        "there is a bandwidth limit of {}, and nobody can make {hypervisor} keep it: lift the limit, or ask \
        for encryption or compression, whose relay keeps it",
        rate(*limit_mbps as f64 / 1e3)
    )]
    NoLimit {
        /// The source's hypervisor.
        hypervisor: Incapable,
        /// The limit, in Mb/s.
        limit_mbps: u64,
    },
    /// It must be encrypted, and may not be.
    #[error(
        "encryption was asked for, and is off on {host}: set encryption to \"allowed\" or \"required\" in its \
         agent.toml, or do not ask for it"
    )]
    EncryptionOff {
        /// Name of the host.
        host: String,
    },
}

impl PlanError {
    pub(super) fn no_path(source: &HostFacts, target: &HostFacts) -> Self {
        Self::NoPath {
            source_host: source.name.clone(),
            source_links: describe_links(source),
            target_host: target.name.clone(),
            target_links: describe_links(target),
        }
    }
}

fn describe_links(host: &HostFacts) -> String {
    if host.links.is_empty() {
        return "no links fit for migrations".into();
    }
    let links: Vec<String> = host
        .links
        .iter()
        .map(|link| {
            let addresses: Vec<String> = link.addresses.iter().map(ToString::to_string).collect();
            let state = if link.usable { "" } else { " down" };
            format!("{}{state} {}", link.name, addresses.join(" "))
        })
        .collect();
    links.join(", ")
}
