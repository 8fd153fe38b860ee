//! What each host reports about itself to a check.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::facts::{HostFacts, MigrationLink};
use crate::known::if_known;
use crate::protocol::{Protocols, Release};

/// One host, as far as a check needs it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CheckFacts {
    /// What migrations need to know.
    pub host: HostFacts,
    /// Version of the agent.
    pub agent_version: String,
    /// The protocols that it speaks.
    #[serde(default)]
    pub protocols: Protocols,
    /// Kernel release, such as `6.1.0-18-amd64`.
    pub kernel: String,
    /// Ports for incoming migrations and trials, from the first to the last.
    pub migration_ports: [u16; 2],
    /// Names of the hosts that its configuration knows.
    pub peers: Vec<String>,
    /// Its clock: milliseconds since 1970 began.
    pub clock_unix_ms: i64,
    /// When its certificate ends: seconds since 1970 began.
    pub certificate_ends_unix_s: i64,
    /// When the certificate of its authority ends: seconds since 1970 began.
    #[serde(default)]
    pub authority_ends_unix_s: Option<i64>,
    /// Whether QEMU's program was replaced since the agent asked it what it can do.
    #[serde(default)]
    pub qemu_replaced: bool,
    /// Version of libvirt, where it is installed.
    pub libvirt_version: Option<String>,
    /// When memory is given in huge pages, as the kernel says it: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// CPU frequency governors in use; empty where the kernel has none to choose.
    pub governors: Vec<String>,
    /// The energy preference of cores that choose their frequency themselves; empty if they do not.
    #[serde(default)]
    pub energy_preferences: Vec<String>,
    /// The firmware's power profile, where there is a choice.
    #[serde(default)]
    pub platform_profile: Option<String>,
    /// What TCP gives one connection for receiving: the least, at first, at most (`tcp_rmem`).
    #[serde(default)]
    pub tcp_receive_bytes: Option<[u64; 3]>,
    /// The same for sending (`tcp_wmem`).
    #[serde(default)]
    pub tcp_send_bytes: Option<[u64; 3]>,
    /// Addresses to which another program has made a route of their own, and the numbers of these routes' protocols.
    #[serde(default)]
    pub foreign_host_routes: Vec<ForeignRoute>,
    /// More about each of the host's migration links, and of those of the management network that may stand in
    /// for them.
    pub links: Vec<LinkFacts>,
}

/// Longest word that a host may say of itself.
pub(super) const WORD_BYTES_MAX: usize = 128;

/// Most links, peers or addresses that a host may name.
pub const LIST_MAX: usize = 1_024;

/// Why a peer's facts are not taken: what they say ends up in texts, and in commands that people copy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImplausibleFacts {
    /// The facts of another host.
    #[error("{asked} was asked, and describes itself as {answered:?}: is `name` right in its agent.toml?")]
    OtherHost {
        /// The host that was asked.
        asked: String,
        /// The host that the answer describes.
        answered: String,
    },
    /// A word that is none.
    #[error("{host} reports {word:?}, which is not the name of any interface, version or setting")]
    Word {
        /// The host that reported it.
        host: String,
        /// What it said, cut short.
        word: String,
    },
    /// Too long a list.
    #[error("{host} lists more than {LIST_MAX} links, peers, addresses or routes")]
    List {
        /// The host that reported it.
        host: String,
    },
}

impl CheckFacts {
    /// Whether a peer's facts may be used.
    pub fn plausible(&self, asked: &str) -> Result<(), ImplausibleFacts> {
        if self.host.name != asked {
            let answered = self.host.name.chars().take(WORD_BYTES_MAX).collect();
            return Err(ImplausibleFacts::OtherHost { asked: asked.into(), answered });
        }
        let host = || asked.to_owned();
        let HostFacts { links, management_links, .. } = &self.host;
        let every_link = links.iter().chain(management_links);
        let addresses = every_link.map(|link| link.addresses.len()).max().unwrap_or(0);
        let lists = [
            links.len(),
            management_links.len(),
            self.links.len(),
            self.peers.len(),
            self.governors.len(),
            self.host.huge_pages_available.len(),
            self.energy_preferences.len(),
            self.foreign_host_routes.len(),
            addresses,
        ];
        if lists.into_iter().any(|length| length > LIST_MAX) {
            return Err(ImplausibleFacts::List { host: host() });
        }
        match self.words().find(|word| !is_plain(word)) {
            Some(word) => {
                let word = word.chars().take(WORD_BYTES_MAX).collect();
                Err(ImplausibleFacts::Word { host: host(), word })
            }
            None => Ok(()),
        }
    }

    fn words(&self) -> impl Iterator<Item = &str> {
        let bonds = || self.links.iter().filter_map(|link| link.bond.as_ref());
        let host = &self.host;
        let ports = || host.links.iter().chain(&host.management_links).filter_map(|link| link.rdma.as_ref());
        [&self.agent_version, &self.kernel, &host.hypervisor.name, &host.hypervisor.version]
            .into_iter()
            .chain(host.links.iter().chain(&host.management_links).map(|link| &link.name))
            .chain(self.links.iter().map(|link| &link.name))
            .chain(&host.rdma_devices)
            .chain(ports().map(|port| &port.device))
            .chain(&self.peers)
            .chain(&self.governors)
            .chain(&self.energy_preferences)
            .chain(&self.platform_profile)
            .chain(&self.huge_pages)
            .chain(&self.libvirt_version)
            .chain(bonds().map(|bond| &bond.mode))
            .chain(self.links.iter().filter_map(|link| link.rdma_device.as_ref()))
            .chain(bonds().filter_map(|bond| bond.transmit_hash.as_ref()))
            .map(String::as_str)
    }

    /// Name of the host.
    pub fn name(&self) -> &str {
        &self.host.name
    }

    /// The release that its agent is of.
    pub(super) fn release(&self) -> Release {
        Release { version: self.agent_version.clone(), protocols: self.protocols }
    }

    /// A link that carries migrations, or does so where no other makes a path, by its name.
    pub(super) fn migration_link(&self, name: &str) -> Option<&MigrationLink> {
        self.host.link(name)
    }

    /// What more is known of a link.
    pub(super) fn link(&self, name: &str) -> Option<&LinkFacts> {
        self.links.iter().find(|link| link.name == name)
    }
}

/// A route to a single address that is not Drainpipe's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForeignRoute {
    /// The address.
    #[schema(value_type = String)]
    pub address: IpAddr,
    /// Number of its protocol, as in `rt_protos` of iproute2: 3 is `boot`, which `ip route` makes, 4 is `static`.
    pub protocol: u8,
}

/// A migration link, beyond what migrations need to know of it. What is not known is absent, and no
/// ground for a finding.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct LinkFacts {
    /// Name of the interface.
    pub name: String,
    /// Whether it can carry anything.
    pub state: LinkState,
    /// Whether it has the address on which the agent listens.
    pub carries_management: bool,
    /// What the driver negotiated.
    #[serde(default, deserialize_with = "if_known")]
    pub duplex: Option<Duplex>,
    /// What the driver says that it runs at, in Mb/s, whatever the configuration says.
    #[serde(default)]
    pub driver_speed_mbps: Option<u64>,
    /// Whether the speed that migrations go by is the one that the configuration says.
    #[serde(default)]
    pub is_speed_configured: bool,
    /// The fastest that the card can do, in Mb/s.
    #[serde(default)]
    pub card_speed_mbps: Option<u64>,
    /// Receive queues.
    pub receive_queues: Option<u32>,
    /// Receive queues to which the card spreads what arrives (RSS).
    #[serde(default)]
    pub receive_queues_in_use: Option<u32>,
    /// Whether the kernel spreads what arrives over several cores (RPS).
    pub receive_steering: Option<bool>,
    /// How many cores its interrupts go to.
    #[serde(default)]
    pub interrupt_cores: Option<u32>,
    /// The team, if it is one.
    pub bond: Option<BondFacts>,
    /// The RDMA device that shares its port.
    #[serde(default)]
    pub rdma_device: Option<String>,
    /// Reverse path filter in effect for IPv4: 0 off, 1 strict, 2 loose.
    pub reverse_path_filter: Option<u8>,
    /// Traffic since the link exists.
    pub counters: LinkCounters,
}

/// Whether a link can carry anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// There is no such interface.
    #[default]
    Missing,
    /// Switched off.
    Down,
    /// Nothing answers at the other end of the cable.
    NoCarrier,
    /// It can.
    Up,
}

/// Whether a link can send and receive at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Duplex {
    /// It can.
    Full,
    /// It cannot.
    Half,
}

/// A team of links.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BondFacts {
    /// The mode as the kernel names it, such as `802.3ad`.
    pub mode: String,
    /// How frames are spread over its members, such as `layer3+4`; absent where the mode has no such
    /// choice.
    pub transmit_hash: Option<String>,
    /// How many members it has.
    pub members: u32,
}

/// Packets of a link, counted lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct LinkCounters {
    /// Over so many seconds; absent where it is since the link exists.
    #[serde(default)]
    pub over_s: Option<u64>,
    /// Received.
    pub received: u64,
    /// Sent.
    pub sent: u64,
    /// Arrived damaged.
    pub receive_errors: u64,
    /// Could not be sent.
    pub send_errors: u64,
    /// Arrived and found no room.
    pub receive_dropped: u64,
    /// Dropped before sending.
    pub send_dropped: u64,
}

/// Neither a blank nor anything that a shell or a terminal takes for a command.
pub(super) fn is_plain(word: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+:@~".contains(&byte);
    !word.is_empty() && word.len() <= WORD_BYTES_MAX && word.bytes().all(plain)
}
