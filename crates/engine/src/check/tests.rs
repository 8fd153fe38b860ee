//! Two healthy hosts, and one thing wrong with them at a time.

use proptest::prelude::*;

use super::facts::{BondFacts, CheckFacts, Duplex, LinkCounters, LinkFacts, LinkState};
use super::finding::Finding;
use super::finding::Severity::{self, Error, Remark, Warning};
use super::trial::{ClockDifference, PacketTrial, PathTrial};
use super::vm::{
    CpuFeatures, DeviceIdentifier, DeviceIdentifierKind, FileIdentity, FilePurpose, FileState, Obstacle,
    VmCheck, VmFacts, VmFile, VmFit,
};
use super::{Pair, check, paths_to_try, refusal};
use crate::encryption::EncryptionPolicy;
use crate::facts::{HostFacts, HugePages, HypervisorVersion, MigrationLink};

const DAY_S: i64 = 86_400;

/// Two hosts, what was tried between them, and the difference of their clocks.
#[derive(Debug, Clone)]
struct Scene {
    a: CheckFacts,
    b: CheckFacts,
    trials: Vec<PathTrial>,
    vms: Vec<VmCheck>,
    clock: ClockDifference,
}

impl Scene {
    fn healthy() -> Self {
        let (a, b) = (host("a", 11), host("b", 12));
        let trials = paths_to_try(&a, &b, &[]).into_iter().map(|path| PathTrial {
            path,
            connection_error: None,
            forward: passing(1500),
            backward: passing(1500),
            round_trip_ms: Some(0.1),
            tcp_round_trip: None,
        });
        let trials = trials.collect();
        Self { a, b, trials, vms: vec![vm()], clock: ClockDifference { ahead_ms: 3.0, uncertainty_ms: 2.0 } }
    }

    fn findings(&self) -> Vec<Finding> {
        check(Pair {
            source: &self.a,
            target: &self.b,
            paths: &paths_to_try(&self.a, &self.b, &[]),
            trials: Some(&self.trials),
            vms: &self.vms,
            multichannel: true,
            clock: self.clock,
        })
    }

    /// As after a change of addresses or states: only paths that are still there are tried.
    fn retry(&mut self) {
        let paths = paths_to_try(&self.a, &self.b, &[]);
        self.trials.retain(|trial| paths.contains(&trial.path));
    }
}

fn host(name: &str, last: u8) -> CheckFacts {
    let names = ["e0", "e1"];
    CheckFacts {
        host: HostFacts {
            name: name.into(),
            cores: 8,
            idle_cores: None,
            vm_cores: 0.0,
            packing_cores: None,
            memory_available_bytes: 64 << 30,
            huge_pages_available: vec![],
            links: names
                .iter()
                .zip(1..)
                .map(|(link, net)| link_of(link, &format!("10.0.{net}.{last}/24")))
                .collect(),
            management_links: vec![],
            encryption: EncryptionPolicy::Required,
            migration_address: Some(format!("10.9.0.{last}").parse().unwrap()),
            bandwidth_limit_mbps: None,
            no_migration_address: None,
            rdma_devices: vec![],
            hypervisor: HypervisorVersion { name: "QEMU".into(), version: "7.2.22".into(), rdma: true },
        },
        agent_version: "0.1.0".into(),
        kernel: "6.1.0-18-amd64".into(),
        migration_ports: [49_152, 49_215],
        peers: vec!["a".into(), "b".into()],
        clock_unix_ms: 1_800_000_000_000,
        certificate_ends_unix_s: 1_800_000_000 + 300 * DAY_S,
        authority_ends_unix_s: Some(1_800_000_000 + 3_000 * DAY_S),
        qemu_replaced: false,
        libvirt_version: Some("9.0.0".into()),
        huge_pages: Some("madvise".into()),
        governors: vec!["performance".into()],
        energy_preferences: vec![],
        platform_profile: Some("balanced".into()),
        tcp_receive_bytes: Some([4096, 131_072, 6 << 20]),
        tcp_send_bytes: Some([4096, 16_384, 4 << 20]),
        links: names
            .iter()
            .map(|link| LinkFacts { name: (*link).into(), state: LinkState::Up, ..LinkFacts::default() })
            .collect(),
    }
}

/// Runs on `a` by KVM, with a disk on shared storage.
fn vm() -> VmCheck {
    let cpu = CpuFeatures { known: true, ..CpuFeatures::default() };
    let boot =
        VmFile { path: "/boot/linux".into(), purpose: FilePurpose::Boot, state: FileState::Present(disk()) };
    let image = VmFile { path: "/srv/web1.qcow2".into(), purpose: FilePurpose::Disk, ..boot.clone() };
    VmCheck {
        vm: VmFacts {
            name: "web1".into(),
            memory_bytes: 4 << 30,
            huge_page_mib: None,
            machine: "pc-q35-8.1".into(),
            cpu_model: "EPYC".into(),
            qemu_version: "7.2.22".into(),
            cpu: Some(cpu.clone()),
            files: vec![boot, image],
        },
        fit: VmFit {
            name_taken: false,
            obstacle: None,
            cpu: Some(cpu),
            files: vec![FileState::Present(disk()); 2],
        },
    }
}

fn disk() -> FileIdentity {
    FileIdentity {
        block_device: false,
        size_bytes: 1 << 30,
        inode: 77,
        local_filesystem: false,
        locked: Some(true),
        device: None,
    }
}

fn on_both(scene: &mut Scene, change: impl Fn(&mut FileIdentity)) {
    let vm = &mut scene.vms[0];
    for state in [&mut vm.vm.files[1].state, &mut vm.fit.files[1]] {
        let FileState::Present(identity) = state else { panic!("{state:?}") };
        change(identity);
    }
}

fn on_target(scene: &mut Scene, change: impl Fn(&mut FileIdentity)) {
    let FileState::Present(identity) = &mut scene.vms[0].fit.files[1] else { panic!("no disk") };
    change(identity);
}

fn link_of(name: &str, address: &str) -> MigrationLink {
    let addresses = vec!["fe80::1/64".parse().unwrap(), address.parse().unwrap()];
    MigrationLink {
        name: name.into(),
        addresses,
        speed_mbps: Some(10_000),
        mtu: 1500,
        usable: true,
        is_trusted: false,
    }
}

fn passing(bytes: u16) -> PacketTrial {
    PacketTrial { sent_bytes_max: Some(bytes), arrived_bytes_max: Some(bytes), sent: 18, arrived: 18 }
}

fn silent(bytes: u16) -> PacketTrial {
    PacketTrial { sent_bytes_max: Some(bytes), ..PacketTrial::default() }
}

fn no_answer(trial: &mut PathTrial, forward: bool, backward: bool) {
    trial.connection_error = Some("no answer".into());
    for (packets, passes) in [(&mut trial.forward, forward), (&mut trial.backward, backward)] {
        *packets = if passes { passing(1500) } else { silent(1500) };
    }
}

fn unplug(facts: &mut CheckFacts, index: usize, state: LinkState) {
    facts.host.links[index].usable = false;
    facts.links[index].state = state;
}

#[test]
fn nothing_is_said_of_healthy_hosts() {
    assert_eq!(Scene::healthy().findings(), []);
}

/// What is wrong, and the one finding that says so: its severity, code, places and a part of it.
type Case = (fn(&mut Scene), Severity, &'static str, &'static [&'static str], &'static str);

const OF_PATHS: &[Case] = &[
    (
        |s| s.b.host.links[1].mtu = 9000,
        Error,
        "mtu-differs",
        &["a e1", "b e1"],
        "on b: ip link set dev e1 mtu 1500",
    ),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.links[0].mtu = 9000;
            }
            let cut =
                PacketTrial { sent_bytes_max: Some(9000), arrived_bytes_max: Some(1500), ..passing(1500) };
            s.trials[0].forward = cut;
            s.trials[0].backward = passing(9000);
        },
        Error,
        "mtu-does-not-pass",
        &["a e0", "b e0"],
        "from a to b none larger than 1500",
    ),
    (
        |s| no_answer(&mut s.trials[1], false, false),
        Warning,
        "path-silent",
        &["a e1", "b e1"],
        "accept'; on b: nft insert rule inet filter input 'iifname \"e1\" meta l4proto { tcp, udp } th dport",
    ),
    (
        |s| no_answer(&mut s.trials[1], true, false),
        Warning,
        "path-one-way",
        &["a e1", "b e1"],
        "on a: nft insert rule inet filter input 'iifname \"e1\" meta l4proto { tcp, udp } th dport",
    ),
    (
        |s| no_answer(&mut s.trials[1], false, true),
        Warning,
        "path-one-way",
        &["a e1", "b e1"],
        "on b: nft insert rule inet filter input 'iifname \"e1\" meta l4proto { tcp, udp } th dport",
    ),
    (
        |s| no_answer(&mut s.trials[1], true, true),
        Warning,
        "tcp-blocked",
        &["a e1", "b e1"],
        "tcp dport 49152-49215",
    ),
    (
        |s| s.trials[0].backward = silent(1500),
        Warning,
        "udp-blocked",
        &["a e0", "b e0"],
        "on a: nft insert rule inet filter input 'iifname \"e0\" udp dport 49152-49215 accept'",
    ),
    (
        |s| s.trials[0].backward.arrived = 15,
        Warning,
        "path-loses-packets",
        &["a e0", "b e0"],
        "3 of 18 packets from b to a",
    ),
    (
        |s| {
            unplug(&mut s.b, 1, LinkState::Down);
            // The other end loses its carrier, which is not said too.
            unplug(&mut s.a, 1, LinkState::NoCarrier);
            s.retry();
        },
        Warning,
        "link-down",
        &["b e1"],
        "on b: ip link set dev e1 up",
    ),
    (
        |s| {
            unplug(&mut s.a, 1, LinkState::NoCarrier);
            s.retry();
        },
        Warning,
        "link-no-carrier",
        &["a e1"],
        "ethtool e1",
    ),
    (
        |s| {
            unplug(&mut s.a, 1, LinkState::Missing);
            s.retry();
        },
        Warning,
        "link-missing",
        &["a e1"],
        "no interface e1",
    ),
    (
        |s| {
            s.b.host.links[1] = link_of("e1", "10.0.7.12/24");
            s.retry();
        },
        Warning,
        "subnet-mismatch",
        &["a e1", "b e1"],
        "10.0.7.12/24",
    ),
    (
        |s| s.a.host.links[0].speed_mbps = Some(1000),
        Warning,
        "speed-differs",
        &["a e0", "b e0"],
        "at most 1000 Mb/s",
    ),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.links[1].speed_mbps = Some(1000);
            }
        },
        Remark,
        "paths-unequal",
        &["a e0", "b e0", "a e1", "b e1"],
        "1000 Mb/s",
    ),
    (
        |s| s.b.links[1].driver_speed_mbps = Some(500),
        Warning,
        "speed-below-configured",
        &["b e1"],
        "runs at 500 Mb/s, and agent.toml says 10000",
    ),
    (
        |s| {
            s.a.links[0].driver_speed_mbps = Some(10_000);
            s.a.links[0].card_speed_mbps = Some(25_000);
        },
        Remark,
        "speed-below-card",
        &["a e0"],
        "its card can do 25000",
    ),
    (
        |s| s.b.tcp_receive_bytes = Some([8_192, 65_536, 100_000]),
        Warning,
        "tcp-buffers-small",
        &["b e1"],
        "net.ipv4.tcp_rmem='8192 65536 1048576'",
    ),
];

const OF_LINKS: &[Case] = &[
    (
        |s| s.a.links[0].carries_management = true,
        Warning,
        "management-link",
        &["a e0"],
        "remove [[link]] `e0`",
    ),
    (|s| s.a.links[0].duplex = Some(Duplex::Half), Warning, "half-duplex", &["a e0"], "autoneg on"),
    (
        |s| {
            s.a.links[0].counters =
                LinkCounters { received: 1_000_000, receive_errors: 20, ..LinkCounters::default() }
        },
        Warning,
        "link-errors",
        &["a e0"],
        "20 bad packets among 1000000 since it exists",
    ),
    (
        |s| {
            s.b.links[0].counters = LinkCounters {
                over_s: Some(601),
                received: 10_000,
                receive_dropped: 2_000,
                ..LinkCounters::default()
            }
        },
        Remark,
        "link-drops",
        &["b e0"],
        "2000 packets of 10000 in the last 11 min",
    ),
    (
        |s| s.a.links[0].bond = Some(bond("802.3ad", "layer2")),
        Warning,
        "bond-mode",
        &["a e0"],
        "xmit_hash_policy layer3+4",
    ),
    (
        |s| s.a.links[0].bond = Some(bond("802.3ad", "layer3+4")),
        Remark,
        "bond-mode",
        &["a e0"],
        "several VMs, use all",
    ),
    (
        |s| s.a.links[0].bond = Some(bond("balance-xor", "encap3+4")),
        Remark,
        "bond-mode",
        &["a e0"],
        "several VMs, use all",
    ),
    (
        |s| s.a.links[0].bond = Some(bond("active-backup", "")),
        Remark,
        "bond-mode",
        &["a e0"],
        "the others wait",
    ),
    (
        |s| s.b.links[1].reverse_path_filter = Some(1),
        Warning,
        "reverse-path-filter",
        &["b e1"],
        "net/ipv4/conf/e1/rp_filter=2",
    ),
    (
        |s| {
            s.b.links[1].receive_queues = Some(1);
            s.b.links[1].receive_steering = Some(false);
        },
        Warning,
        "one-receive-queue",
        &["b e1"],
        "echo ff >",
    ),
    (
        |s| {
            s.b.links[1].receive_queues = Some(8);
            s.b.links[1].interrupt_cores = Some(1);
        },
        Warning,
        "interrupts-on-one-core",
        &["b e1"],
        "all 8 receive queues of e1",
    ),
    (
        |s| {
            s.b.host.links[1].speed_mbps = Some(10_000);
            s.a.host.links[1].speed_mbps = Some(10_000);
            s.b.links[1].receive_queues = Some(8);
            s.b.links[1].receive_queues_in_use = Some(1);
        },
        Warning,
        "one-receive-queue-used",
        &["b e1"],
        "ethtool -X e1 default",
    ),
];

const OF_HOSTS: &[Case] = &[
    (|s| s.b.peers.clear(), Error, "not-a-peer", &["b"], "add [[peer]] with name = \"a\""),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.hypervisor.version = "10.0.2".into();
            }
            s.b.host.hypervisor.version = "7.2.22".into();
        },
        Warning,
        "target-qemu-older",
        &["a", "b"],
        "machine type is newer than QEMU 7.2.22",
    ),
    (|s| s.b.agent_version = "0.2.0".into(), Warning, "agents-differ", &["a", "b"], "drainpipe 0.2.0"),
    (|s| s.a.kernel = "5.10.0-28-amd64".into(), Warning, "kernel-old", &["a"], "older than 5.15"),
    (|s| s.b.qemu_replaced = true, Warning, "qemu-replaced", &["b"], "knows of 7.2.22"),
    (|s| s.a.libvirt_version = Some("8.0.0".into()), Remark, "libvirt-old", &["a"], "older than 9.0"),
    (|s| s.clock.ahead_ms = -1_500.0, Warning, "clocks-differ", &["a", "b"], "1.5 s behind that of a"),
    (
        |s| s.b.certificate_ends_unix_s = 1_800_000_000 + 20 * DAY_S,
        Warning,
        "certificate-ends",
        &["b"],
        "in 20 days",
    ),
    (
        |s| s.b.certificate_ends_unix_s = 1_800_000_000 + 6 * DAY_S,
        Error,
        "certificate-ends",
        &["b"],
        "pki host b --force",
    ),
    (
        |s| s.b.authority_ends_unix_s = Some(1_800_000_000 + 6 * DAY_S),
        Error,
        "authority-ends",
        &["b"],
        "the authority that b trusts ends in 6 days",
    ),
    (|s| s.a.governors.push("powersave".into()), Warning, "governor-powersave", &["a"], "cpupower"),
    (
        |s| {
            s.b.governors = vec!["powersave".into()];
            s.b.energy_preferences = vec!["balance_performance".into(), "balance_power".into()];
        },
        Warning,
        "energy-preference",
        &["b"],
        "energy_performance_preference",
    ),
    (
        |s| s.a.platform_profile = Some("low-power".into()),
        Warning,
        "power-profile",
        &["a"],
        "platform_profile",
    ),
    (|s| s.a.host.rdma_devices.push("mlx5_0".into()), Remark, "rdma-on-one-side", &["a", "b"], "b has none"),
    (|s| s.b.host.migration_address = None, Warning, "no-migration-address", &["b"], "one of the 2 paths"),
    (
        |s| s.b.host.migration_address = s.a.host.migration_address,
        Error,
        "migration-addresses-equal",
        &["a", "b"],
        "10.9.0.11",
    ),
    (
        |s| s.b.host.migration_address = Some("fd00::2".parse().unwrap()),
        Warning,
        "migration-addresses-unroutable",
        &["a", "b"],
        "different IP versions",
    ),
    (
        |s| s.b.host.migration_address = Some("10.0.2.99".parse().unwrap()),
        Warning,
        "migration-addresses-unroutable",
        &["a", "b"],
        "within 10.0.2.0/24 of a",
    ),
    (
        |s| {
            s.vms.clear();
            s.b.host.memory_available_bytes = 500 << 20;
        },
        Remark,
        "target-memory-low",
        &["b"],
        "500 MiB",
    ),
];

const OF_VMS: &[Case] = &[
    (|s| s.vms[0].fit.name_taken = true, Error, "vm-name-taken", &["b VM web1"], "b has a VM web1 already"),
    (
        |s| {
            let newest = Some("pc-q35-7.2".into());
            s.vms[0].fit.obstacle = Some(Obstacle::MachineUnknown { newest });
        },
        Error,
        "vm-machine-unknown",
        &["b VM web1"],
        "the newest that it has of this kind is pc-q35-7.2",
    ),
    (|s| s.vms[0].fit.obstacle = Some(Obstacle::NoKvm), Error, "vm-kvm-missing", &["b VM web1"], "KVM"),
    (
        |s| s.vms[0].fit.obstacle = Some(Obstacle::LosesWrites),
        Error,
        "vm-writes-lost",
        &["b VM web1"],
        "memory_padding_kib = 8",
    ),
    (
        |s| s.vms[0].fit.cpu = Some(CpuFeatures::default()),
        Error,
        "vm-cpu-unknown",
        &["b VM web1"],
        "no CPU model EPYC",
    ),
    (
        |s| {
            let [source, target] = cpus(s);
            source.named.extend(["avx512f", "sha-ni", "x2apic"].map(String::from));
            source.lacking.insert("x2apic".into());
            target.lacking.extend(["x2apic", "avx512f"].map(String::from));
        },
        Error,
        "vm-cpu-features",
        &["b VM web1"],
        "(EPYC): avx512f",
    ),
    (
        |s| s.b.host.memory_available_bytes = 4 << 30,
        Error,
        "vm-memory-short",
        &["b VM web1"],
        "4224 MiB needed, 4096 MiB available",
    ),
    (
        |s| {
            s.vms = vec![vm(), vm()];
            s.b.host.memory_available_bytes = 6 << 30;
        },
        Warning,
        "vms-memory-short",
        &["b"],
        "8448 MiB together",
    ),
    (
        |s| {
            s.vms[0].vm.huge_page_mib = Some(2);
            s.b.host.huge_pages_available = vec![HugePages { size_mib: 2, count: 2_000 }];
            // None of it is in ordinary memory.
            s.b.host.memory_available_bytes = 2 << 30;
        },
        Error,
        "vm-huge-pages-short",
        &["b VM web1"],
        "2048 of 2 MiB needed, 2000 free",
    ),
    (
        |s| {
            let huge = || VmCheck { vm: VmFacts { huge_page_mib: Some(1024), ..vm().vm }, ..vm() };
            s.vms = vec![huge(), huge()];
            s.b.host.huge_pages_available = vec![HugePages { size_mib: 1024, count: 6 }];
        },
        Warning,
        "vms-huge-pages-short",
        &["b"],
        "8 huge pages of 1024 MiB together",
    ),
    (
        |s| s.vms[0].vm.machine = "pc-q35-7.2".into(),
        Remark,
        "vm-machine-old",
        &["b VM web1"],
        "install QEMU 8.1",
    ),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.hypervisor.version = "10.0.2".into();
            }
            s.vms[0].vm.machine = "pc-i440fx-7.2".into();
        },
        Warning,
        "vm-machine-old",
        &["b VM web1"],
        "one path that becomes slow slows all",
    ),
    (|s| s.vms[0].vm.qemu_version = "8.0.4".into(), Warning, "vm-qemu-newer", &["b VM web1"], "QEMU 8.0.4"),
    (
        |s| {
            s.vms[0].vm.memory_bytes = 64 << 30;
            s.b.host.memory_available_bytes = 1 << 40;
            s.b.huge_pages = Some("never".into());
        },
        Remark,
        "vm-small-pages",
        &["b VM web1"],
        "has 64 GiB",
    ),
    (
        |s| s.vms[0].fit.files[0] = FileState::Missing,
        Error,
        "vm-file-missing",
        &["b VM web1"],
        "b does not see /boot/linux",
    ),
    (
        |s| s.vms[0].fit.files[1] = FileState::Silent,
        Error,
        "vm-storage-silent",
        &["b VM web1"],
        "/srv/web1.qcow2",
    ),
    (
        |s| on_target(s, |disk| (disk.inode, disk.locked) = (78, Some(false))),
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "inode 77 and inode 78",
    ),
    (
        |s| {
            on_both(s, |disk| disk.local_filesystem = true);
            on_target(s, |disk| disk.locked = Some(false));
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "a file of its own",
    ),
    (
        |s| {
            on_both(s, |disk| disk.block_device = true);
            on_target(s, |disk| disk.size_bytes = 5);
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "1073741824 bytes and 5 bytes",
    ),
    (
        |s| {
            on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(scsi("naa.1"))));
            on_target(s, |disk| disk.device = Some(scsi("naa.2")));
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "different identifiers",
    ),
];

fn scsi(value: &str) -> DeviceIdentifier {
    DeviceIdentifier { kind: DeviceIdentifierKind::Scsi, value: value.into() }
}

fn cpus(scene: &mut Scene) -> [&mut CpuFeatures; 2] {
    let VmCheck { vm, fit } = &mut scene.vms[0];
    [&mut vm.cpu, &mut fit.cpu].map(|cpu| cpu.as_mut().unwrap())
}

#[test]
fn a_disk_that_is_the_same_is_taken_for_it() {
    let changes: [fn(&mut Scene); 7] = [
        // While the guest writes, the file grows between two looks.
        |s| on_target(s, |disk| disk.size_bytes += 65_536),
        |s| on_target(s, |disk| disk.inode = 78),
        |s| on_target(s, |disk| disk.locked = None),
        |s| on_both(s, |disk| disk.local_filesystem = true),
        |s| on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(scsi("naa.6001")))),
        // One LUN: with several paths on the source, with one on the target.
        |s| {
            let kind = DeviceIdentifierKind::DeviceMapper;
            let several_paths = DeviceIdentifier { kind, value: "mpath-36001".into() };
            on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(several_paths.clone())));
            on_target(s, |disk| disk.device = Some(scsi("naa.6001")));
        },
        |s| {
            s.vms[0].vm.files[1].purpose = FilePurpose::ReadOnlyDisk;
            on_target(s, |disk| (disk.inode, disk.locked) = (78, Some(false)));
        },
    ];
    for change in changes {
        let mut scene = Scene::healthy();
        change(&mut scene);
        assert_eq!(scene.findings(), [], "{:#?}", scene.vms);
    }
}

#[test]
fn a_cpu_feature_that_one_qemu_has_no_name_for_refuses_nothing() {
    let mut scene = Scene::healthy();
    let [source, target] = cpus(&mut scene);
    source.named.extend(["avx2", "old-name"].map(String::from));
    target.named.extend(["avx2", "new-name"].map(String::from));
    target.lacking.insert("new-name".into());
    assert_eq!(scene.findings(), [], "{:#?}", scene.vms);
}

#[test]
fn only_what_surely_fails_refuses_a_migration() {
    for (spoil, severity, code, ..) in [OF_PATHS, OF_LINKS, OF_HOSTS, OF_VMS].concat() {
        let mut scene = Scene::healthy();
        spoil(&mut scene);
        let problem = refusal(&scene.findings());
        let refuses = severity == Error && (code.starts_with("vm-") || code == "not-a-peer");
        assert_eq!(problem.is_some(), refuses, "{code}: {problem:?}");
    }
}

#[test]
fn a_peers_answer_about_a_vm_is_bounded() {
    let good = vm().fit;
    assert_eq!(good.plausible("b", 2), Ok(()));
    assert!(good.plausible("b", 1).is_err());
    let newest = Some("\u{1b}[2J".into());
    let hostile = VmFit { obstacle: Some(Obstacle::MachineUnknown { newest }), ..good.clone() };
    assert!(hostile.plausible("b", 2).is_err());
    for features in [vec!["a; reboot".to_owned()], (0..2_000).map(|number| format!("f{number}")).collect()] {
        let cpu = CpuFeatures { lacking: features.into_iter().collect(), ..CpuFeatures::default() };
        assert!(VmFit { cpu: Some(cpu), ..good.clone() }.plausible("b", 2).is_err());
    }
}

#[test]
fn each_wrong_thing_is_found_and_nothing_else() {
    for (spoil, severity, code, places, part) in [OF_PATHS, OF_LINKS, OF_HOSTS, OF_VMS].concat() {
        let mut scene = Scene::healthy();
        spoil(&mut scene);
        let findings = scene.findings();
        let [finding] = findings.as_slice() else { panic!("{code} alone is expected: {findings:#?}") };
        let found: Vec<String> = finding.places.iter().map(ToString::to_string).collect();
        assert_eq!(
            (finding.severity, finding.code.as_str(), found),
            (severity, code, places.iter().map(ToString::to_string).collect())
        );
        let said = format!("{} {} {}", finding.what, finding.effect, finding.remedy);
        assert!(said.contains(part), "`{part}` is missing: {finding:#?}");
    }
}

#[test]
fn a_link_of_the_management_network_concerns_where_it_stands_in() {
    let mut scene = Scene::healthy();
    for (facts, last) in [(&mut scene.a, 11), (&mut scene.b, 12)] {
        facts.host.management_links = vec![link_of("eth0", &format!("192.0.2.{last}/24"))];
        facts.links.push(LinkFacts {
            name: "eth0".into(),
            state: LinkState::Up,
            carries_management: true,
            ..LinkFacts::default()
        });
    }
    scene.b.host.management_links[0].mtu = 9000;
    scene.b.links[2].reverse_path_filter = Some(1);
    assert_eq!(scene.findings(), []);

    for facts in [&mut scene.a, &mut scene.b] {
        facts.host.links.clear();
    }
    let path = paths_to_try(&scene.a, &scene.b, &[]).remove(0);
    scene.trials = vec![PathTrial { path, ..scene.trials.remove(0) }];
    let findings = scene.findings();
    let found: Vec<(&str, String)> =
        findings.iter().map(|finding| (finding.code.as_str(), finding.places[0].to_string())).collect();
    let expected = [
        ("mtu-differs", "a eth0"),
        ("reverse-path-filter", "b eth0"),
        ("management-link", "a eth0"),
        ("management-link", "b eth0"),
    ];
    assert_eq!(found, expected.map(|(code, place)| (code, place.to_owned())), "{findings:#?}");
    assert_eq!(findings[2].remedy, "give migrations a link of their own");
}

#[test]
fn the_management_network_is_in_the_clear_only_where_nothing_encrypts() {
    for (policy, trusted, clear) in [
        (EncryptionPolicy::Required, false, false),
        (EncryptionPolicy::Required, true, true),
        (EncryptionPolicy::Allowed, false, true),
    ] {
        let mut scene = Scene::healthy();
        scene.a.links[0].carries_management = true;
        for facts in [&mut scene.a, &mut scene.b] {
            facts.host.encryption = policy;
            for link in &mut facts.host.links {
                link.is_trusted = trusted;
            }
        }
        let findings = scene.findings();
        let [finding] = findings.as_slice() else { panic!("{findings:#?}") };
        assert_eq!(finding.effect.contains("in the clear"), clear, "{finding:#?}");
    }
}

fn bond(mode: &str, hash: &str) -> BondFacts {
    let transmit_hash = (!hash.is_empty()).then(|| hash.into());
    BondFacts { mode: mode.into(), transmit_hash, members: 2 }
}

#[test]
fn a_dead_path_is_an_error_when_it_is_the_last() {
    let mut scene = Scene::healthy();
    scene.trials.iter_mut().for_each(|trial| no_answer(trial, false, false));
    let findings = scene.findings();
    assert_eq!(findings.len(), 2);
    assert!(findings.iter().all(|finding| finding.severity == Severity::Error), "{findings:#?}");
}

#[test]
fn a_rule_is_named_where_it_is_missing_and_only_there() {
    for (forward, backward, hosts) in [(false, true, "b"), (true, false, "a"), (false, false, "ab")] {
        let mut scene = Scene::healthy();
        no_answer(&mut scene.trials[0], forward, backward);
        scene.trials[0].connection_error = None;
        let findings = scene.findings();
        let [finding] = findings.as_slice() else { panic!("{findings:#?}") };
        for host in ["a", "b"] {
            let named = finding.remedy.contains(&format!("on {host}: nft insert rule"));
            assert_eq!(named, hosts.contains(host), "{finding:#?}");
        }
    }
}

#[test]
fn of_unequal_paths_it_is_said_which_are_spare() {
    let mut scene = Scene::healthy();
    for facts in [&mut scene.a, &mut scene.b] {
        facts.host.links[0].speed_mbps = Some(5_000);
        facts.host.links[1].speed_mbps = Some(200);
    }
    let effect = |vms: Vec<VmCheck>, scene: &Scene| {
        let findings = Scene { vms, ..scene.clone() }.findings();
        let [finding] = findings.as_slice() else { panic!("{findings:#?}") };
        assert_eq!(finding.code, "paths-unequal");
        finding.effect.clone()
    };
    let of = |name: &str, gib: u64| {
        let VmCheck { vm, fit } = vm();
        VmCheck { vm: VmFacts { name: name.into(), memory_bytes: gib << 30, ..vm }, fit }
    };
    assert_eq!(effect(vec![of("big", 16)], &scene), "none: each path gets traffic by its speed");
    let spare = effect(vec![of("big", 16), of("small", 1), of("tiny", 1)], &scene);
    assert!(spare.ends_with("when no other does: e1–e1 for VM small and 1 more"), "{spare}");
    assert!(effect(vec![], &scene).contains("one that would cost a VM more than it brings is spare"));
}

#[test]
fn paths_that_a_plan_leaves_out_are_no_mismatch() {
    let Scene { a, b, trials, vms, clock } = Scene::healthy();
    let paths = [trials[0].path.clone()];
    let pair =
        Pair { source: &a, target: &b, paths: &paths, trials: None, vms: &vms, multichannel: true, clock };
    assert_eq!(check(pair), []);
}

#[test]
fn no_path_at_all_names_every_link() {
    let mut scene = Scene::healthy();
    for (index, net) in [(0, 7), (1, 8)] {
        let name = scene.b.host.links[index].name.clone();
        scene.b.host.links[index] = link_of(&name, &format!("10.0.{net}.12/24"));
    }
    scene.retry();
    let findings = scene.findings();
    let [finding] = findings.as_slice() else { panic!("{findings:#?}") };
    assert_eq!(finding.code, "no-path");
    for address in ["10.0.1.11", "10.0.2.11", "10.0.7.12", "10.0.8.12"] {
        assert!(finding.what.contains(address), "{finding:#?}");
    }
}

#[test]
fn a_clock_that_cannot_be_read_better_is_no_finding() {
    let asked = ClockDifference::measured(10_000, 12_500, 13_000);
    assert_eq!(asked, ClockDifference { ahead_ms: 1_000.0, uncertainty_ms: 1_500.0 });
    let scene = Scene { clock: asked, ..Scene::healthy() };
    assert_eq!(scene.findings(), []);
}

#[test]
fn a_peer_speaks_for_itself_and_in_plain_words() {
    let good = host("b", 12);
    assert_eq!(good.plausible("b"), Ok(()));
    assert!(good.plausible("c").is_err());
    for word in ["", "e0; reboot", "$(reboot)", "\u{1b}[2J", "e0\n", &"x".repeat(200)] {
        let mut hostile = good.clone();
        hostile.host.links[0].name = word.into();
        assert!(hostile.plausible("b").is_err(), "{word:?}");
        let hostile = CheckFacts { kernel: word.into(), ..good.clone() };
        assert!(hostile.plausible("b").is_err(), "{word:?}");
    }
    let hostile = CheckFacts { links: vec![LinkFacts::default(); 2_000], ..good };
    assert!(hostile.plausible("b").is_err());
}

#[test]
fn heavy_loss_is_not_taken_for_an_mtu() {
    let mut scene = Scene::healthy();
    scene.trials[0].forward =
        PacketTrial { arrived_bytes_max: Some(1492), sent: 15, arrived: 8, ..passing(1500) };
    let codes: Vec<String> = scene.findings().into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["path-loses-packets"]);
}

prop_compose! {
    fn packets()(sent_max in any::<Option<u16>>(), arrived_max in any::<Option<u16>>(), sent in any::<u32>(), arrived in any::<u32>()) -> PacketTrial {
        PacketTrial { sent_bytes_max: sent_max, arrived_bytes_max: arrived_max, sent, arrived }
    }
}

proptest! {
    /// The peer's facts are what it claims.
    #[test]
    fn any_claim_of_a_peer_is_judged_without_panic(
        forward in packets(),
        backward in packets(),
        words in prop::collection::vec("\\PC{0,12}", 3),
        numbers in prop::collection::vec(any::<u64>(), 8),
        times in any::<(i64, i64, f64)>(),
        addresses in prop::collection::vec("10\\.0\\.[12]\\.[1-9]/(0|24|32)", 0..3),
    ) {
        let mut scene = Scene::healthy();
        scene.trials[0].forward = forward;
        scene.trials[0].backward = backward;
        scene.trials[0].round_trip_ms = Some(times.2);
        scene.clock = ClockDifference::measured(times.0, times.1, 0);
        let b = &mut scene.b;
        b.kernel.clone_from(&words[0]);
        b.host.hypervisor.version.clone_from(&words[1]);
        b.clock_unix_ms = times.0;
        b.certificate_ends_unix_s = times.1;
        b.host.cores = u32::try_from(numbers[7] % 70).unwrap();
        b.host.links[0].speed_mbps = Some(numbers[0]);
        b.host.links[0].addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        b.links[0].bond = Some(bond(&words[2], &words[0]));
        b.links[0].receive_queues = Some(1);
        b.links[0].receive_steering = Some(false);
        b.links[0].counters = LinkCounters {
            over_s: Some(numbers[1]), received: numbers[1], sent: numbers[2], receive_errors: numbers[3],
            send_errors: numbers[4], receive_dropped: numbers[5], send_dropped: numbers[6],
        };
        let findings = scene.findings();
        prop_assert!(findings.is_sorted_by_key(|finding| finding.severity));
        for finding in findings {
            prop_assert!(!finding.what.is_empty() && !finding.effect.is_empty() && !finding.remedy.is_empty());
            prop_assert!(!finding.places.is_empty());
        }
    }
}
