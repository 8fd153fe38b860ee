//! Links, addresses and rates.

use std::time::Duration;

use drainpipe_lab::{LabSpec, LinkAddresses, client_guest_address};

use crate::support::{PATIENCE, TestLab, link, skipped, unique_name};

#[test]
fn every_host_reaches_every_other_on_every_link_and_the_client_on_the_management_network() {
    if skipped() {
        return;
    }
    for hosts in [vec!["a", "b"], vec!["a", "b", "c"]] {
        let hosts = hosts.into_iter().map(str::to_owned).collect();
        let links = vec![link(Some(500)), link(None)];
        let lab = TestLab::of(LabSpec { hosts, ..LabSpec::of_two_hosts(unique_name(), links) });
        for from in &lab.spec().hosts {
            for to in lab.spec().hosts.iter().filter(|to| *to != from) {
                for name in lab.spec().link_names() {
                    let address = lab.address(to, &name);
                    assert!(lab.echoes(from, to, address, 1400, PATIENCE), "{from} {to} {name}");
                }
            }
            let address = lab.spec().management_address(from).unwrap();
            assert!(lab.echoes("client", from, address, 1400, PATIENCE), "client {from}");
        }
    }
}

#[test]
fn links_have_the_addresses_that_were_asked_for() {
    if skipped() {
        return;
    }
    for link_addresses in [LinkAddresses::Ipv4, LinkAddresses::LinkLocal, LinkAddresses::Both] {
        let spec = LabSpec::of_two_hosts(unique_name(), vec![link(None)]);
        let lab = TestLab::of(LabSpec { link_addresses, ..spec });
        let shown = lab.command("a", "ip").unwrap().args(["address", "show", "dev", "e0"]).output().unwrap();
        let shown = String::from_utf8(shown.stdout).unwrap();
        assert_eq!(
            shown.contains("inet 10.77.1.11/24"),
            link_addresses != LinkAddresses::LinkLocal,
            "{shown}"
        );
        match link_addresses {
            LinkAddresses::Ipv4 => assert!(!shown.contains("inet6"), "{shown}"),
            LinkAddresses::LinkLocal => {
                assert!(shown.contains("inet6 fe80:") && !shown.contains("tentative"), "{shown}");
            }
            LinkAddresses::Both => {}
        }
        let status = lab.status().unwrap();
        assert_eq!(status.hosts[0].links[0].address.is_some(), link_addresses.has_ipv4());
    }
}

#[test]
fn the_client_reaches_a_guest_before_and_after_it_moves() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let run = |host: &str, commands: &str| {
        let status = lab.command(host, "sh").unwrap().args(["-ec", commands]).status().unwrap();
        assert!(status.success(), "{commands}");
    };
    // A guest is an interface with its own address and MAC address behind a port of the bridge.
    let appear = "ip link add port type veth peer name guest address 02:00:00:00:00:99
         ip link set port master guests up
         ip address add 10.77.100.50/24 dev guest
         ip link set guest up";
    let guest = "10.77.100.50".parse().unwrap();
    run("a", appear);
    assert!(lab.echoes("client", "a", guest, 1400, PATIENCE));
    run("a", "ip link delete port");
    run("b", appear);
    // The guest announces itself by sending something, here the start of an exchange.
    assert!(lab.echoes("b", "client", client_guest_address(), 100, PATIENCE));
    assert!(lab.echoes("client", "b", guest, 1400, PATIENCE));
}

#[test]
fn a_stream_gets_the_rate_of_its_link() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(Some(200)), link(Some(50))]);
    let status = lab.status().unwrap();
    for (link, rate_mbps) in status.hosts[0].links.iter().zip([200, 50]) {
        assert_eq!(link.rate_mbps, Some(rate_mbps), "as the kernel has it");
        // How near it comes to the rate depends on the machine.
        let mbps = lab.stream_mbps("a", "b", lab.address("b", &link.name), Duration::from_millis(1500));
        assert!(mbps < rate_mbps as f64 * 1.1, "{mbps:.1} of {rate_mbps} Mb/s");
    }
}
