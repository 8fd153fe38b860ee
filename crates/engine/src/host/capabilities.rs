//! What a host's hypervisor can do in a migration. Plans ask for abilities, never for a hypervisor's name or version.
//!
//! Each ability is stated so that two kinds of hypervisor can answer. QEMU is driven by its agent alone. libvirt owns
//! its domains, and its migration protocol, run phase by phase by two agents, begins, prepares, performs, finishes and
//! confirms.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What a host's hypervisor can do in a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is an ability of its own, and any may be without the others"
)]
pub struct Capabilities {
    /// What decides that the VM runs on the target. Both hosts are asked before anything else: if it is not the
    /// agents, a lost answer may leave two running copies, so there is no plan.
    pub commits: Committer,
    /// Whether it pauses the VM before the last of its state leaves, and then waits for its agent. Asked of the source
    /// for post-copy, whose hand-over must be recorded in between. Where all state is sent before the target runs, the
    /// hand-over may come after it too: libvirt's `Perform` ends with both sides paused.
    pub pauses_before_switchover: bool,
    /// Whether its connections are sockets of this host that the agent may look at, pace and cut. Asked of the source
    /// for a limit, and of both to use several paths: the agents weight the route by where connections have landed, and
    /// show a target that takes the first of them for the main one no other before it. Where not, nothing is set on them.
    /// A relay's connections are the agent's own, whatever the hypervisor's are.
    pub connections_are_ours: bool,
    /// Whether it knows a migration's connections by what each says first. Asked of the target of several connections:
    /// where not, the main one must be there before the others, so they all begin over one path.
    pub tells_connections_apart: bool,
    /// Whether memory may go over several connections at once (QEMU's multifd, libvirt's `PARALLEL`). Asked of both for
    /// whatever is not one connection: multichannel, compression, and encryption by several cores.
    pub sends_in_parallel: bool,
    /// Whether its several connections may carry which pages are zero, too. Asked of both; where not, the main one does.
    pub zero_pages_in_parallel: bool,
    /// Whether it packs by itself what it sends over several connections. Asked of both for `qemu-zstd-1` and
    /// `qemu-zstd-3`.
    pub packs: bool,
    /// Whether it sends to, and takes from, a socket of its agent in place of the other hypervisor. Asked of both for
    /// compression and encryption, which a relay does.
    pub is_relayed: bool,
    /// Whether it keeps a bandwidth limit by itself, also one that changes while it sends. Asked of the source where
    /// nobody else can: there is no relay, and its connections are not the agent's.
    pub keeps_limit: bool,
    /// How it does post-copy; absent where it does not. Asked of both where that is asked for.
    pub post_copy: Option<PostCopy>,
    /// Whether it copies a VM's disks to the target too, and takes such copies. Asked of both where disks are to be copied.
    pub copies_disks: bool,
}

/// What decides that a VM runs on the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Committer {
    /// The agents: the hypervisor has neither copy run by itself once all state has been sent. So it is with QEMU's `-S`,
    /// and with libvirt's `Finish` if that leaves the VM paused.
    Agents,
    /// The hypervisor, by itself, as in a migration that libvirt does in one call.
    Hypervisor,
}

/// How a hypervisor does post-copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PostCopy {
    /// Whether together with several connections. No plan asks yet: post-copy goes over one.
    pub in_parallel: bool,
    /// Whether it encrypts that by itself, with a key of the agents. Asked of both where it is to be encrypted: a relay
    /// must not stand between a VM and its memory.
    pub encrypts: bool,
}

impl Capabilities {
    /// Nothing: for a hypervisor about which only the name is known.
    pub const NONE: Self = Self {
        commits: Committer::Hypervisor,
        pauses_before_switchover: false,
        connections_are_ours: false,
        tells_connections_apart: false,
        sends_in_parallel: false,
        zero_pages_in_parallel: false,
        packs: false,
        is_relayed: false,
        keeps_limit: false,
        post_copy: None,
        copies_disks: false,
    };

    /// All that there is: what each hypervisor lacks of it, the crate says that drives it.
    pub const ALL: Self = Self {
        commits: Committer::Agents,
        pauses_before_switchover: true,
        connections_are_ours: true,
        tells_connections_apart: true,
        sends_in_parallel: true,
        zero_pages_in_parallel: true,
        packs: true,
        is_relayed: true,
        keeps_limit: true,
        post_copy: Some(PostCopy { in_parallel: true, encrypts: true }),
        copies_disks: true,
    };
}
