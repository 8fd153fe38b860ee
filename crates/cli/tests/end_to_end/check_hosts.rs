//! `drainpipe check` of what is wrong with hosts' configurations, settings and links, besides their paths.
//!
//! Findings that no test provokes here, in `check` or in `check_vms` are tested in the engine only, because labs cannot
//! have them. Hosts of a lab share the clock (`clocks-differ`), the program (`agents-differ`) and the libraries
//! (`libvirt-old`). The agent does not start with a QEMU that is too old (`qemu-old`). Links in software have neither
//! errors nor queues (`link-errors`, `one-receive-queue`, `one-receive-queue-used`, `interrupts-on-one-core`), and the
//! ports of their switches are in no VLAN: one in a wrong VLAN is a silent path (`path-silent`, `no-path`), which a
//! fault provokes. An authority that ends soon (`authority-ends`) would need all certificates of a lab again. A VM with
//! KVM (`vm-kvm-missing`), one of 64 GiB (`vm-small-pages`), storage that hangs (`vm-storage-silent`) and a machine
//! without memory (`target-memory-low`) are not available.

use std::fs;
use std::process::Command;

use drainpipe_engine::finding::Finding;
use rustix::process::Signal;

use crate::Test;
use crate::check::{WELL, assert_found, assert_silent, check, on, report};
use crate::check_vms::restart_agent_with_mounts;
use crate::drain::{restart_agent_with_memory, set_memory};
use crate::program::{REFUSED, WARNED, drainpipe};
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] = &[
    ("links_as_configured", links_as_configured),
    ("hosts_as_configured", hosts_as_configured),
    ("a_certificate_that_ends_soon", a_certificate_that_ends_soon),
    ("a_link_without_carrier_and_one_that_drops", a_link_without_carrier_and_one_that_drops),
    ("what_the_kernel_shows", what_the_kernel_shows),
    ("vms_that_do_not_fit", vms_that_do_not_fit),
];

/// Restarts an agent with another configuration.
#[track_caller]
fn reconfigure(lab: &TestLab, host: &str, from: &str, to: &str) {
    lab.stop_agent(host, Signal::TERM);
    lab.configure(host, from, to);
    lab.start_agent(host);
}

fn links_as_configured() {
    let lab = TestLab::fast();
    let ends = ["a e1", "b e1"];
    let e1 = "name = \"e1\"\n";
    let slow = format!("{e1}speed_mbps = 100\n");
    reconfigure(&lab, "b", e1, &slow);
    assert_found(&lab, WARNED, "speed-differs", &ends, "e1 of b at 100 Mb/s");
    reconfigure(&lab, "a", e1, &slow);
    assert_found(&lab, WARNED, "speed-low", &ends, "both ends of e1–e1 run at 100 Mb/s");
    for host in ["a", "b"] {
        reconfigure(&lab, host, "speed_mbps = 100\n", "speed_mbps = 5000\n");
    }
    let all = ["a e0", "b e0", "a e1", "b e1"];
    assert_found(&lab, WELL, "paths-unequal", &all, "e1–e1 5000 Mb/s");
    reconfigure(&lab, "a", "speed_mbps = 5000\n", "");
    // A veth's driver says 10 Gb/s.
    reconfigure(&lab, "b", "speed_mbps = 5000\n", "speed_mbps = 25000\n");
    let (_, findings) = check(&lab, "a", "b");
    let below = findings.iter().find(|finding| finding.code == "speed-below-configured");
    assert!(
        below.is_some_and(|finding| finding.what.contains("e1 of b runs at 10000 Mb/s")),
        "{findings:#?}"
    );
    reconfigure(&lab, "b", "speed_mbps = 25000\n", "");
    assert_silent(&lab);
    reconfigure(&lab, "b", "[[peer]]", "[[link]]\nname = \"e9\"\n\n[[peer]]");
    assert_found(&lab, WARNED, "link-missing", &["b e9"], "b has no interface e9");
}

fn hosts_as_configured() {
    let lab = TestLab::fast();
    on(&lab, "b", "sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
    assert_silent(&lab);
    let address = "migration_address = \"10.77.255.12\"\n";
    reconfigure(&lab, "b", address, "");
    assert_found(&lab, WARNED, "no-migration-address", &["b"], "IPv6 is off");
    reconfigure(&lab, "b", "probe_every_s", &format!("{address}probe_every_s"));
    assert_silent(&lab);
    let peer = "[[peer]]\nname = \"a\"\naddress = \"10.77.0.11:7420\"\n";
    reconfigure(&lab, "b", peer, "");
    assert_found(&lab, REFUSED, "not-a-peer", &["b"], "add [[peer]] with name = \"a\"");
}

fn a_certificate_that_ends_soon() {
    let lab = TestLab::fast();
    let authority = lab.directory("client").join("pki");
    for (days, exit_code) in [("20", WARNED), ("5", REFUSED)] {
        let directory = ["--directory", authority.to_str().unwrap()];
        drainpipe(&[&["pki", "host", "b", "--force", "--days", days], directory.as_slice()].concat()).done();
        lab.stop_agent("b", Signal::TERM);
        for file in ["host.pem", "host.key"] {
            fs::copy(authority.join("hosts/b").join(file), lab.directory("b").join("pki").join(file))
                .unwrap();
        }
        lab.start_agent("b");
        assert_found(&lab, exit_code, "certificate-ends", &["b"], "drainpipe pki host b --force");
    }
}

fn a_link_without_carrier_and_one_that_drops() {
    // The links of three hosts meet in a switch.
    let lab = TestLab::up(&["--hosts", "a,b,c", "--link", "unlimited", "--link", "unlimited"]);
    let switch = lab.namespace("switch");
    let set = |state: &str| {
        let switch = switch.file_name().unwrap().to_str().unwrap();
        let words = ["-n", switch, "link", "set", "dev", "e1-b", state];
        assert!(Command::new("ip").args(words).status().unwrap().success());
    };
    set("down");
    assert_found(&lab, WARNED, "link-no-carrier", &["b e1"], "e1 of b has no carrier");
    set("up");
    assert_silent(&lab);

    // Frames of a protocol that nobody speaks: the kernel counts them as dropped.
    let frames = r#"my ($index) = `ip -o link show dev e1` =~ /^(\d+):/;
        socket(my $all, 17, 3, 0) or die;
        my $frame = ("\xff" x 6) . ("\x02" x 6) . "\x88\xb5" . ("\0" x 50);
        my $to = pack("S n i S C C a8", 17, 0x88b5, $index, 0, 0, 6, "\xff" x 6);
        send($all, $frame, 0, $to) or die for 1 .. 2000;"#;
    lab.exec("a", &["perl", "-e", frames]).done();
    assert_found(&lab, WELL, "link-drops", &["b e1"], "ip -s link show e1");
}

/// Things that labs do not have, mounted over what the kernel shows to one host's agent.
fn what_the_kernel_shows() {
    let lab = TestLab::fast();
    let release = lab.write("osrelease", "5.10.0-28-amd64\n");
    let shows = format!(
        "mount --bind {release} /proc/sys/kernel/osrelease \
         && indexes=$(cat /sys/class/net/e0/ifindex /sys/class/net/e1/ifindex) && set -- $indexes \
         && mount -t tmpfs none /sys/class && mkdir -p /sys/class/infiniband/rxe0 \
         && cd /sys/class && mkdir -p net/e0 net/e1/bonding \
         && echo $1 > net/e0/ifindex && echo half > net/e0/duplex && echo $2 > net/e1/ifindex \
         && echo e2 e3 > net/e1/bonding/slaves && echo 802.3ad 4 > net/e1/bonding/mode \
         && echo layer2 0 > net/e1/bonding/xmit_hash_policy \
         && mount -t tmpfs none /sys/devices/system/cpu \
         && mkdir -p /sys/devices/system/cpu/cpufreq/policy0 \
         && echo powersave > /sys/devices/system/cpu/cpufreq/policy0/scaling_governor"
    );
    restart_agent_with_mounts(&lab, "b", &shows);
    let shows = "mount -t tmpfs none /sys/devices/system/cpu \
        && mkdir -p /sys/devices/system/cpu/cpufreq/policy0 && cd /sys/devices/system/cpu/cpufreq/policy0 \
        && echo powersave > scaling_governor && echo balance_power > energy_performance_preference \
        && mount -t tmpfs none /sys/firmware && mkdir /sys/firmware/acpi \
        && echo low-power > /sys/firmware/acpi/platform_profile";
    restart_agent_with_mounts(&lab, "a", shows);
    let report = report(&lab, "a", "b", &[]);
    let of = |host: &str, code: &str| {
        let here = |finding: &&Finding| finding.places.first().is_some_and(|place| place.host == host);
        report.findings.iter().filter(here).find(|finding| finding.code == code)
    };
    for (host, code, part) in [
        ("a", "energy-preference", "cores of a are told to prefer saving energy (balance_power)"),
        ("a", "power-profile", "the firmware of a has the power profile low-power"),
        ("b", "kernel-old", "Linux 5.10.0-28-amd64 of b is older than 5.15"),
        ("b", "governor-powersave", "cores of b run under the governor powersave"),
        ("b", "rdma-on-one-side", "b has RDMA (rxe0), a has none"),
        ("b", "half-duplex", "e0 of b has negotiated half duplex"),
        ("b", "bond-mode", "e1 of b is a bond of 2 links in mode 802.3ad, which hashes no ports (layer2)"),
    ] {
        let said = of(host, code).map(|finding| finding.what.as_str());
        assert!(said.is_some_and(|what| what.contains(part)), "{code}: {report:#?}");
    }
    // Cores that choose their own frequency call that powersave.
    assert_eq!(of("a", "governor-powersave"), None);
}

fn vms_that_do_not_fit() {
    let lab = TestLab::fast();
    for name in ["web", "db"] {
        lab.create(
            &format!(
                "name = \"{name}\"\nmemory_mib = 256\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n\
                 accelerator = \"tcg\"\n"
            ),
            name,
        );
        lab.drainpipe(&["vm", "start", name]).done();
    }
    restart_agent_with_memory(&lab, "b", 480);
    assert_found(&lab, WARNED, "vms-memory-short", &["b"], "the 2 VMs of a need");
    lab.drainpipe(&["vm", "stop", "db", "--force"]).done();
    assert_silent(&lab);
    set_memory(&lab, "b", 200);
    assert_found(&lab, REFUSED, "vm-memory-short", &["b VM web"], "b is short of memory for VM web");
}
