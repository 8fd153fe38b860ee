//! From a specification to the commands that make it: values in, values out.

use std::net::Ipv4Addr;

use crate::addresses::{
    GUEST_NETWORK, MANAGEMENT_NETWORK, client_guest_address, client_management_address, link_address,
    link_network, management_address,
};
use crate::names::{self, CLIENT, GUEST_BRIDGE, GUEST_UPLINK, MANAGEMENT_INTERFACE, SWITCH, switch_port};
use crate::spec::{DEFAULT_MTU_BYTES, LabSpec, LinkAddresses};
use crate::tbf;
use crate::tools::{Batch, Program};

/// All but one of the addresses 01-80-C2-00-00-00 to -0F, a bit each; see `group_fwd_mask` in ip-link(8).
const ALL_BUT_PAUSE: u16 = 0xfffd;

/// One end of a link: the namespace and the interface in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) namespace: String,
    pub(crate) interface: String,
}

/// The batches that make the lab, in order.
pub(crate) fn build(spec: &LabSpec) -> Vec<Batch> {
    let mut batches = vec![make_namespaces(spec), make_switch(spec)];
    batches.extend((0..spec.hosts.len()).map(|host| make_host(spec, host)));
    batches.push(make_client(spec));
    batches.extend(shape(spec));
    batches
}

/// Removes namespaces, and with them every interface in them.
pub(crate) fn remove_namespaces(namespaces: &[String]) -> Batch {
    let lines = namespaces.iter().map(|name| format!("netns delete {name}")).collect();
    Batch { program: Program::Ip, namespace: None, lines }
}

/// The host's end of a link.
pub(crate) fn near_end(spec: &LabSpec, host: usize, link: usize) -> End {
    End { namespace: spec.namespace(&spec.hosts[host]), interface: names::link(link) }
}

/// What the host's end of a link is plugged into: the other host, or the switch.
pub(crate) fn far_end(spec: &LabSpec, host: usize, link: usize) -> End {
    if is_direct(spec) {
        near_end(spec, 1 - host, link)
    } else {
        let interface = switch_port(&names::link(link), &spec.hosts[host]);
        End { namespace: spec.namespace(SWITCH), interface }
    }
}

/// Every interface that sends on a link.
pub(crate) fn ends(spec: &LabSpec, link: usize) -> Vec<End> {
    let hosts = 0..spec.hosts.len();
    let near = hosts.clone().map(|host| near_end(spec, host, link));
    if is_direct(spec) {
        near.collect()
    } else {
        near.chain(hosts.map(|host| far_end(spec, host, link))).collect()
    }
}

fn is_direct(spec: &LabSpec) -> bool {
    spec.hosts.len() == 2
}

fn make_namespaces(spec: &LabSpec) -> Batch {
    let lines = spec.nodes().map(|node| format!("netns add {}", spec.namespace(node))).collect();
    Batch { program: Program::Ip, namespace: None, lines }
}

fn make_switch(spec: &LabSpec) -> Batch {
    let mut lines = vec!["link set lo up".to_owned()];
    lines.extend(bridge(MANAGEMENT_INTERFACE));
    lines.extend(bridge(GUEST_BRIDGE));
    for host in &spec.hosts {
        let namespace = spec.namespace(host);
        lines.extend(plug_in(MANAGEMENT_INTERFACE, host, &namespace, MANAGEMENT_INTERFACE));
        lines.extend(plug_in(GUEST_BRIDGE, host, &namespace, GUEST_UPLINK));
    }
    let client = spec.namespace(CLIENT);
    lines.extend(plug_in(MANAGEMENT_INTERFACE, CLIENT, &client, MANAGEMENT_INTERFACE));
    lines.extend(plug_in(GUEST_BRIDGE, CLIENT, &client, GUEST_BRIDGE));
    if !is_direct(spec) {
        for (link, settings) in spec.links.iter().enumerate() {
            let bridge_name = names::link(link);
            lines.extend(bridge(&bridge_name));
            for host in &spec.hosts {
                let port = switch_port(&bridge_name, host);
                lines.extend(plug_in(&bridge_name, host, &spec.namespace(host), &bridge_name));
                lines.push(format!("link set {port} mtu {}", settings.mtu_bytes));
            }
        }
    }
    Batch::new(Program::Ip, &spec.namespace(SWITCH), lines)
}

fn make_host(spec: &LabSpec, host: usize) -> Batch {
    let mut lines = Vec::new();
    if is_direct(spec) && host == 0 {
        let peer = spec.namespace(&spec.hosts[1]);
        let pairs = spec.link_names().into_iter();
        lines.extend(pairs.map(|name| format!("link add {name} type veth peer name {name} netns {peer}")));
    }
    lines.extend(if spec.machines.is_some() { patch_panel(spec) } else { configure_host(spec, host) });
    Batch::new(Program::Ip, &spec.namespace(&spec.hosts[host]), lines)
}

/// What makes interfaces that are there the ones of a host.
pub(crate) fn configure_host(spec: &LabSpec, host: usize) -> Vec<String> {
    let mut lines = vec!["link set lo up".to_owned()];
    lines.extend(bridge(GUEST_BRIDGE));
    lines.push(format!("link set {GUEST_UPLINK} master {GUEST_BRIDGE} up"));
    let management = management_address(host);
    lines.push(address(MANAGEMENT_INTERFACE, management, MANAGEMENT_NETWORK.prefix_len()));
    lines.push(format!("link set {MANAGEMENT_INTERFACE} up"));
    for (link, settings) in spec.links.iter().enumerate() {
        let name = names::link(link);
        if spec.link_addresses == LinkAddresses::Ipv4 {
            lines.push(format!("link set {name} addrgenmode none"));
        }
        if spec.link_addresses.has_ipv4() {
            lines.push(address(&name, link_address(link, host), link_network(link).prefix_len()));
        }
        lines.push(format!("link set {name} mtu {} up", settings.mtu_bytes));
    }
    lines
}

/// The interfaces of a machine, in the order of its cards: each is a cable in the machine's namespace.
pub(crate) fn cables(spec: &LabSpec) -> Vec<String> {
    let first = [MANAGEMENT_INTERFACE, GUEST_UPLINK].map(str::to_owned);
    first.into_iter().chain(spec.link_names()).collect()
}

/// The tap at which a card of a machine is plugged in.
pub(crate) fn tap(cable: &str) -> String {
    format!("{cable}-tap")
}

/// A machine's namespace joins each cable to a tap and does nothing else: it has no addresses, and passes on whatever
/// comes, also what a bridge keeps to itself by IEEE 802.1D, such as LACP; all but pause frames, which Linux does not let
/// through.
fn patch_panel(spec: &LabSpec) -> Vec<String> {
    let mtu =
        |cable: &str| spec.link_index(cable).map_or(DEFAULT_MTU_BYTES, |link| spec.links[link].mtu_bytes);
    let patch = |cable: String| {
        let (tap, joined, mtu_bytes) = (tap(&cable), format!("{cable}-br"), mtu(&cable));
        let mut lines = vec![format!("tuntap add dev {tap} mode tap")];
        lines.extend(bridge(&joined));
        lines.push(format!("link set {joined} addrgenmode none mtu {mtu_bytes}"));
        for port in [&cable, &tap] {
            lines.push(format!("link set {port} addrgenmode none mtu {mtu_bytes}"));
            lines.push(format!("link set {port} master {joined} up"));
            lines.push(format!("link set {port} type bridge_slave group_fwd_mask {ALL_BUT_PAUSE}"));
        }
        lines
    };
    cables(spec).into_iter().flat_map(patch).collect()
}

fn make_client(spec: &LabSpec) -> Batch {
    let management = client_management_address();
    let lines = vec![
        "link set lo up".to_owned(),
        address(MANAGEMENT_INTERFACE, management, MANAGEMENT_NETWORK.prefix_len()),
        format!("link set {MANAGEMENT_INTERFACE} up"),
        address(GUEST_BRIDGE, client_guest_address(), GUEST_NETWORK.prefix_len()),
        format!("link set {GUEST_BRIDGE} up"),
    ];
    Batch::new(Program::Ip, &spec.namespace(CLIENT), lines)
}

/// One batch per namespace that has shaped interfaces.
fn shape(spec: &LabSpec) -> Vec<Batch> {
    let mut batches: Vec<Batch> = Vec::new();
    for (link, settings) in spec.links.iter().enumerate() {
        let Some(rate_mbps) = settings.rate_mbps else { continue };
        for end in ends(spec, link) {
            let line = tbf::set_rate(&end.interface, rate_mbps);
            let same = |batch: &&mut Batch| batch.namespace.as_ref() == Some(&end.namespace);
            match batches.iter_mut().find(same) {
                Some(batch) => batch.lines.push(line),
                None => batches.push(Batch::new(Program::Tc, &end.namespace, vec![line])),
            }
        }
    }
    batches
}

/// A bridge that forwards at once: without spanning tree there is no learning delay, and without
/// multicast snooping the announcements of a moved guest reach every port.
fn bridge(name: &str) -> [String; 2] {
    [
        format!("link add {name} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"),
        format!("link set {name} up"),
    ]
}

/// A veth pair from the switch's `bridge` to `interface` in `namespace`.
///
/// Both ends are made where they belong: an interface made elsewhere and moved would show up, for
/// a moment, among the machine's own, where network managers pick it up.
fn plug_in(bridge: &str, node: &str, namespace: &str, interface: &str) -> [String; 2] {
    let port = switch_port(bridge, node);
    [
        format!("link add {port} type veth peer name {interface} netns {namespace}"),
        format!("link set {port} master {bridge} up"),
    ]
}

fn address(interface: &str, address: Ipv4Addr, prefix_length: u8) -> String {
    format!("address add {address}/{prefix_length} broadcast + dev {interface}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::{MAX_HOSTS, MAX_LINKS};
    use crate::spec::{LinkSpec, MachineSpec};

    /// IFNAMSIZ without its terminating zero.
    const MAX_INTERFACE_NAME_CHARS: usize = 15;

    fn largest() -> LabSpec {
        let hosts = (0..MAX_HOSTS).map(|host| format!("hostname{host:02}")).collect();
        let links = vec![LinkSpec { rate_mbps: Some(100_000), mtu_bytes: 65_535 }; MAX_LINKS];
        LabSpec {
            name: "x".repeat(32),
            hosts,
            links,
            link_addresses: LinkAddresses::default(),
            own_cpus: false,
            libvirt: false,
            libvirt_qemu: None,
            libvirt_daemon: None,
            machines: None,
        }
    }

    #[test]
    fn interface_names_fit_the_kernel_in_the_largest_lab() {
        let spec = largest();
        spec.validate().unwrap();
        for batch in build(&spec).iter().filter(|batch| batch.program == Program::Ip) {
            let made = batch.lines.iter().filter_map(|line| line.strip_prefix("link add "));
            for name in made.flat_map(|line| line.split(' ').step_by(5).take(2)) {
                assert!(name.len() <= MAX_INTERFACE_NAME_CHARS, "{name}");
            }
        }
    }

    #[test]
    fn nothing_but_namespaces_is_made_in_the_machines_own() {
        for spec in [LabSpec::of_two_hosts("x", vec![LinkSpec::default()]), largest()] {
            for batch in build(&spec).iter().filter(|batch| batch.namespace.is_none()) {
                assert!(batch.lines.iter().all(|line| line.starts_with("netns ")));
            }
        }
    }

    #[test]
    fn the_namespace_of_a_machine_speaks_with_nobody_and_holds_nothing_back() {
        let machines = MachineSpec {
            qemu: "qemu".into(),
            boot_files: "/files".into(),
            memory_mib: 1024,
            cpus: 1,
            kvm: false,
        };
        let jumbo = LinkSpec { mtu_bytes: 9000, ..LinkSpec::default() };
        let spec = LabSpec { machines: Some(machines), ..LabSpec::of_two_hosts("x", vec![jumbo]) };
        let Batch { lines, .. } = make_host(&spec, 1);
        assert!(!lines.iter().any(|line| line.starts_with("address ")), "{lines:#?}");
        for port in ["mgmt", "uplink", "e0", "mgmt-tap", "uplink-tap", "e0-tap"] {
            let mtu = if port.starts_with("e0") { 9000 } else { 1500 };
            assert!(lines.contains(&format!("link set {port} addrgenmode none mtu {mtu}")), "{lines:#?}");
            assert!(lines.contains(&format!("link set {port} type bridge_slave group_fwd_mask 65533")));
        }
    }

    #[test]
    fn every_end_is_shaped_and_no_other_interface() {
        let rates = [Some(1000), None].map(|rate_mbps| LinkSpec { rate_mbps, ..LinkSpec::default() });
        let mut spec = LabSpec::of_two_hosts("x", rates.to_vec());
        assert_eq!(shape(&spec).iter().map(|batch| batch.lines.len()).collect::<Vec<_>>(), [1, 1]);
        spec.hosts.push("c".to_owned());
        // Each host's own end, and the switch's three ports.
        assert_eq!(shape(&spec).iter().map(|batch| batch.lines.len()).collect::<Vec<_>>(), [1, 1, 1, 3]);
    }
}
