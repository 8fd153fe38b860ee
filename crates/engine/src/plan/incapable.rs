//! What a plan cannot make a hypervisor do, and what is done instead.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::host::capabilities::{Capabilities, Committer};
use crate::host::facts::HostFacts;

/// A hypervisor that cannot do something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Incapable {
    /// Name of its host.
    host: String,
    /// Its name, for people.
    name: String,
    version: String,
}

impl Incapable {
    /// The first of these hosts whose hypervisor lacks an ability.
    pub(super) fn among<const N: usize>(
        hosts: [&HostFacts; N],
        can: impl Fn(&Capabilities) -> bool,
    ) -> Option<Self> {
        let host = hosts.into_iter().find(|host| !can(&host.hypervisor.capabilities))?;
        let hypervisor = &host.hypervisor;
        let (name, version) = (hypervisor.name.clone(), hypervisor.version.clone());
        Some(Self { host: host.name.clone(), name, version })
    }

    /// One that lets a VM run on the target by itself.
    pub(super) fn to_leave_the_hand_over_to_agents(source: &HostFacts, target: &HostFacts) -> Option<Self> {
        Self::among([source, target], |can| can.commits == Committer::Agents)
    }

    /// One that migrates over one connection only.
    pub(super) fn to_send_in_parallel(source: &HostFacts, target: &HostFacts) -> Option<Self> {
        Self::among([source, target], |can| can.sends_in_parallel)
    }

    /// One that goes through no relay, which a plan needs.
    pub(super) fn to_be_relayed(source: &HostFacts, target: &HostFacts) -> Option<Self> {
        Self::among([source, target], |can| can.is_relayed)
    }
}

impl fmt::Display for Incapable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, name, version } = self;
        write!(f, "{name} {version} on {host}")
    }
}

/// Why a VM is not post-copied between two hosts. On the wire, its words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum NoPostCopy {
    /// A hypervisor has none.
    Unable(Incapable),
    /// The source's does not wait for the hand-over to be recorded.
    DoesNotWait(Incapable),
    /// It is to be encrypted, which one does not.
    InClearOnly(Incapable),
    /// Its disks are copied with it.
    CopiesDisks,
    /// What another host says.
    Stated(String),
}

impl From<NoPostCopy> for String {
    fn from(reason: NoPostCopy) -> Self {
        reason.to_string()
    }
}

impl From<String> for NoPostCopy {
    fn from(words: String) -> Self {
        Self::Stated(words)
    }
}

impl NoPostCopy {
    /// Nothing where they can.
    pub fn between(source: &HostFacts, target: &HostFacts, is_encrypted: bool) -> Option<Self> {
        let hosts = [source, target];
        let unable = Incapable::among(hosts, |can| can.post_copy.is_some()).map(Self::Unable);
        let does_not_wait =
            || Incapable::among([source], |can| can.pauses_before_switchover).map(Self::DoesNotWait);
        let encrypts = |can: &Capabilities| can.post_copy.is_some_and(|post_copy| post_copy.encrypts);
        let in_clear_only =
            || Incapable::among(hosts, |can| !is_encrypted || encrypts(can)).map(Self::InClearOnly);
        unable.or_else(does_not_wait).or_else(in_clear_only)
    }
}

impl fmt::Display for NoPostCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unable(hypervisor) => write!(f, "{hypervisor} has no post-copy"),
            Self::DoesNotWait(hypervisor) => write!(
                f,
                "{hypervisor} does not wait before it switches over, when the hand-over must be recorded"
            ),
            Self::InClearOnly(hypervisor) => {
                write!(f, "{hypervisor} does not encrypt post-copy, and this migration is to be encrypted")
            }
            Self::CopiesDisks => f.write_str("its disks are copied, and the two cannot be combined yet"),
            Self::Stated(words) => f.write_str(words),
        }
    }
}
