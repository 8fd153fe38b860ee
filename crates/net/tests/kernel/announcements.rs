//! Announcements that tell bridges and switches where a guest is.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::hosts::{Namespace, TwoHosts, may_make_namespaces};
use drainpipe_net::{Announced, Error, Network};

const MAC: [u8; 6] = [0x52, 0x54, 0, 0xd0, 0, 0x32];
const MAC_TEXT: &str = "52:54:00:d0:00:32";

/// A guest at `vnet0` of the left host's bridge. The cable leads to the right host's bridge, which serves as its
/// switch.
fn bridged(settings: &str) -> TwoHosts {
    let hosts = TwoHosts::new();
    for host in [&hosts.left, &hosts.right] {
        host.ip(&format!("link add br0 mtu 9000 type bridge stp_state 0 forward_delay 0 {settings}"));
        host.ip("link set p0 mtu 9000 master br0");
        host.ip("link set br0 up");
    }
    hosts.left.ip("link add vnet0 mtu 9000 address fe:54:00:d0:00:32 type veth peer name guest");
    hosts.left.ip("link set vnet0 master br0 up");
    hosts.left.ip("link set guest up");
    hosts
}

fn bridge(host: &Namespace, arguments: &str) -> String {
    let bridge = Command::new("bridge").args(["-n", host.name()]).args(arguments.split(' ')).output();
    let output = bridge.expect("bridge(8) of iproute2");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The bridge's entries for the guest, such as `dev vnet0 master br0`.
fn entries(host: &Namespace) -> Vec<String> {
    let all = bridge(host, "fdb show br br0");
    let of_guest = all.lines().filter_map(|line| line.strip_prefix(MAC_TEXT));
    of_guest.map(|entry| entry.trim().to_owned()).collect()
}

fn announce(host: &Namespace, tap: &str) -> Result<Announced, Error> {
    host.run(|| async { Network::open().unwrap().announce(tap, MAC).await })
}

/// Returns when the ports have begun to forward.
fn wait_until_forwarding(host: &Namespace, ports: usize) {
    let end = Instant::now() + Duration::from_secs(30);
    while bridge(host, "link show").matches("state forwarding").count() < ports {
        assert!(Instant::now() < end, "{}", bridge(host, "link show"));
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_guest_is_found_where_it_is_and_not_where_it_was_thought_to_be() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = bridged("");
    wait_until_forwarding(&hosts.left, 2);
    wait_until_forwarding(&hosts.right, 1);
    let before = hosts.left.ip("-j link show");
    bridge(&hosts.left, &format!("fdb replace {MAC_TEXT} dev p0 master dynamic"));
    assert_eq!(entries(&hosts.left), ["dev p0 master br0"]);
    assert!(entries(&hosts.right).is_empty());

    assert_eq!(announce(&hosts.left, "vnet0").unwrap(), Announced::ToAll);

    assert_eq!(entries(&hosts.left), ["dev vnet0 master br0"]);
    assert_eq!(entries(&hosts.right), ["dev p0 master br0"], "the switch has heard it");
    assert_eq!(hosts.left.ip("-j link show"), before, "the bridge is as it was, and has no other port");
}

#[test]
fn what_somebody_has_fixed_stays_fixed() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = bridged("");
    wait_until_forwarding(&hosts.left, 2);
    bridge(&hosts.left, &format!("fdb replace {MAC_TEXT} dev vnet0 master static"));
    assert_eq!(announce(&hosts.left, "vnet0").unwrap(), Announced::ToAll);
    assert_eq!(entries(&hosts.left), ["dev vnet0 master br0 static"]);
}

#[test]
fn a_guest_is_announced_in_its_own_vlan() {
    let Some(hosts) = bridged_with_vlans() else { return };
    bridge(&hosts.left, "vlan add dev vnet0 vid 20 pvid untagged");
    bridge(&hosts.left, &format!("fdb replace {MAC_TEXT} dev p0 master dynamic vlan 20"));

    assert_eq!(announce(&hosts.left, "vnet0").unwrap(), Announced::ToAll);

    let left = entries(&hosts.left);
    assert!(left.contains(&"dev vnet0 vlan 20 master br0".into()), "{left:?}");
    assert!(left.iter().all(|entry| entry.contains("dev vnet0")), "{left:?}");
    assert_eq!(entries(&hosts.right), ["dev p0 vlan 20 master br0"], "the switch has heard it there alone");
}

#[test]
fn of_a_guest_that_tags_all_it_sends_the_bridge_alone_is_told() {
    let Some(hosts) = bridged_with_vlans() else { return };
    bridge(&hosts.left, "vlan del dev vnet0 vid 1");
    bridge(&hosts.left, "vlan add dev vnet0 vid 20");
    bridge(&hosts.left, &format!("fdb replace {MAC_TEXT} dev p0 master dynamic vlan 20"));
    assert_eq!(announce(&hosts.left, "vnet0").unwrap(), Announced::ToBridge);
    let left = entries(&hosts.left);
    assert!(left.contains(&"dev vnet0 vlan 20 master br0".into()), "{left:?}");
    assert!(entries(&hosts.right).is_empty());
}

/// Two hosts whose cable carries VLAN 20 tagged; `None` if the kernel's bridges know no VLANs.
fn bridged_with_vlans() -> Option<TwoHosts> {
    if !may_make_namespaces() {
        return None;
    }
    if !Namespace::new().may_ip("link add tried type bridge vlan_filtering 1") {
        eprintln!("SKIPPED: this kernel's bridges know no VLANs");
        return None;
    }
    let hosts = bridged("vlan_filtering 1");
    for host in [&hosts.left, &hosts.right] {
        bridge(host, "vlan add dev p0 vid 20");
    }
    wait_until_forwarding(&hosts.left, 2);
    wait_until_forwarding(&hosts.right, 1);
    Some(hosts)
}

#[test]
fn a_tap_at_no_bridge_is_left_alone() {
    if !may_make_namespaces() {
        return;
    }
    let hosts = TwoHosts::new();
    assert_eq!(announce(&hosts.left, "p0").unwrap(), Announced::ToNobody);
    assert!(matches!(announce(&hosts.left, "gone"), Err(Error::UnknownLink(_))));
}
