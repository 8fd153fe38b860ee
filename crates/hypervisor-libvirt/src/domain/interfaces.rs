//! The network interfaces of a domain.

use std::path::PathBuf;

use drainpipe_hypervisor::spec::MacAddress;

use super::element::Element;

/// A network interface of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// What it is connected to.
    pub kind: InterfaceKind,
    /// Its MAC address.
    pub mac: Option<MacAddress>,
    /// The host's end, such as `vnet0`.
    pub target: Option<String>,
    /// The guest's device, such as `virtio`.
    pub model: Option<String>,
    /// Pairs of queues.
    pub queues: Option<u32>,
    /// The MTU that the guest sees.
    pub mtu: Option<u32>,
    /// Whether the guest goes on over another interface while this one is unplugged for a migration.
    pub is_unplugged_to_migrate: bool,
}

/// What an interface is connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterfaceKind {
    /// A bridge of the host.
    Bridge {
        /// Its name.
        name: String,
        /// Whether it is Open vSwitch's.
        is_openvswitch: bool,
    },
    /// A network of libvirt's.
    Network {
        /// Its name, which the target must have too.
        name: String,
        /// The bridge that it has on this host.
        bridge: Option<String>,
    },
    /// A link of the host itself, by macvtap.
    Direct {
        /// The link.
        link: String,
        /// `vepa`, `bridge`, `private` or `passthrough`.
        mode: Option<String>,
    },
    /// A tap that somebody else connects.
    Ethernet,
    /// A network inside QEMU, or by a process beside it.
    User,
    /// A host's device, handed to the guest.
    HostDevice {
        /// Its address.
        address: String,
    },
    /// Another process, behind a socket.
    VhostUser {
        /// The socket.
        socket: Option<PathBuf>,
    },
    /// vDPA.
    Vdpa,
    /// Something else: `mcast`, `udp`, or what a newer libvirt has.
    Other(String),
}

pub(super) fn parse(interface: Element<'_>) -> Interface {
    let mac = interface.at("mac").and_then(|mac| mac.parsed("address"));
    let teaming = interface.at("teaming").and_then(|teaming| teaming.attribute("type"));
    Interface {
        kind: kind(interface),
        mac,
        target: interface.at("target").and_then(|target| target.text_of("dev")),
        model: interface.at("model").and_then(|model| model.text_of("type")),
        queues: interface.at("driver").and_then(|driver| driver.parsed("queues")),
        mtu: interface.at("mtu").and_then(|mtu| mtu.parsed("size")),
        is_unplugged_to_migrate: teaming == Some("transient"),
    }
}

fn kind(interface: Element<'_>) -> InterfaceKind {
    let source = |attribute: &str| interface.at("source").and_then(|source| source.text_of(attribute));
    let name = |attribute: &str| source(attribute).unwrap_or_default();
    let network = |name| InterfaceKind::Network { name, bridge: source("bridge") };
    match interface.attribute("type").unwrap_or_default() {
        // While the domain runs, libvirt shows what its network is made of.
        "bridge" | "direct" if source("network").is_some() => network(name("network")),
        "bridge" => InterfaceKind::Bridge { name: name("bridge"), is_openvswitch: is_openvswitch(interface) },
        "network" => network(name("network")),
        "direct" => InterfaceKind::Direct { link: name("dev"), mode: source("mode") },
        "ethernet" => InterfaceKind::Ethernet,
        "user" => InterfaceKind::User,
        "hostdev" => InterfaceKind::HostDevice { address: host_address(interface) },
        "vhostuser" => InterfaceKind::VhostUser { socket: source("path").map(PathBuf::from) },
        "vdpa" => InterfaceKind::Vdpa,
        other => InterfaceKind::Other(other.to_owned()),
    }
}

fn is_openvswitch(interface: Element<'_>) -> bool {
    interface.at("virtualport").is_some_and(|port| port.attribute("type") == Some("openvswitch"))
}

fn host_address(interface: Element<'_>) -> String {
    interface.at("source/address").map(super::devices::pci_address).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::element;

    fn kind_of(xml: &str) -> InterfaceKind {
        kind(Element::root(&element::parse(xml).unwrap()))
    }

    #[test]
    fn a_network_is_one_also_while_the_domain_runs() {
        for (shown, bridge) in [
            ("<interface type='network'><source network='front'/></interface>", None),
            (
                "<interface type='bridge'><source network='front' bridge='br0'/></interface>",
                Some("br0".into()),
            ),
            ("<interface type='direct'><source network='front' dev='eth0' mode='bridge'/></interface>", None),
        ] {
            assert_eq!(kind_of(shown), InterfaceKind::Network { name: "front".into(), bridge }, "{shown}");
        }
        let own = "<interface type='bridge'><source bridge='br0'/></interface>";
        let expected = InterfaceKind::Bridge { name: "br0".into(), is_openvswitch: false };
        assert_eq!(kind_of(own), expected);
    }
}
