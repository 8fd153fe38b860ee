//! Two healthy hosts, and one thing wrong with them at a time.

mod hosts;
mod links;
mod paths;
mod vms;

use proptest::prelude::*;

use super::facts::{BondFacts, CheckFacts, Duplex, LinkCounters, LinkFacts, LinkState};
use super::trial::{ClockDifference, PacketTrial, PathTrial};
use super::vm::{
    CpuFeatures, FileIdentity, FilePurpose, FileState, Obstacle, VmCheck, VmFacts, VmFile, VmFit,
};
use super::{NotReached, Pair, check, no_way_back, paths_to_try, refusal, unreachable};
use crate::finding::Finding;
use crate::finding::Severity::{self, Error, Remark, Warning};
use crate::fixtures;
use crate::host::facts::{HostFacts, HugePages, HypervisorVersion, MigrationLink};
use crate::protocol::Protocols;
use crate::storage::{DeviceIdentifier, DeviceIdentifierKind};

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
            may_use_all: true,
            clock: self.clock,
        })
    }

    /// Tries only the paths that still exist, after a change of addresses or states.
    fn retry(&mut self) {
        let paths = paths_to_try(&self.a, &self.b, &[]);
        self.trials.retain(|trial| paths.contains(&trial.path));
    }
}

fn host(name: &str, last: u8) -> CheckFacts {
    let names = ["e0", "e1"];
    let facts = fixtures::host(name);
    CheckFacts {
        host: HostFacts {
            cores: 8,
            memory_available_bytes: 64 << 30,
            links: names
                .iter()
                .zip(1..)
                .map(|(link, net)| link_of(link, &format!("10.0.{net}.{last}/24")))
                .collect(),
            migration_address: Some(format!("10.9.0.{last}").parse().unwrap()),
            hypervisor: HypervisorVersion { rdma: true, ..facts.hypervisor },
            ..facts
        },
        agent_version: "0.2.0".into(),
        protocols: Protocols::OWN,
        kernel: "6.1.0-18-amd64".into(),
        migration_ports: [49_152, 49_215],
        peers: vec!["a".into(), "b".into()],
        clock_unix_ms: 1_800_000_000_000,
        certificate_ends_unix_s: 1_800_000_000 + 300 * DAY_S,
        authority_ends_unix_s: Some(1_800_000_000 + 3_000 * DAY_S),
        qemu_replaced: false,
        foreign_host_routes: vec![],
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

/// A VM that runs on `a` with KVM, with a disk on shared storage.
fn vm() -> VmCheck {
    let cpu = CpuFeatures { known: true, ..CpuFeatures::default() };
    let boot =
        VmFile { path: "/boot/linux".into(), purpose: FilePurpose::Boot, state: FileState::Present(disk()) };
    let image = VmFile { path: "/srv/web1.qcow2".into(), purpose: FilePurpose::Disk, ..boot.clone() };
    VmCheck {
        vm: VmFacts {
            name: "web1".into(),
            memory_bytes: 4 << 30,
            padding_bytes: 0,
            huge_page_mib: None,
            machine: "pc-q35-8.1".into(),
            cpu_model: "EPYC".into(),
            qemu_version: "7.2.22".into(),
            cpu: Some(cpu.clone()),
            files: vec![boot, image],
            obstacles: vec![],
            doubts: vec![],
            needs: vec![],
        },
        fit: VmFit { cpu: Some(cpu), files: vec![FileState::Present(disk()); 2], ..VmFit::default() },
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

fn link_of(name: &str, address: &str) -> MigrationLink {
    let addresses = vec!["fe80::1/64".parse().unwrap(), address.parse().unwrap()];
    MigrationLink { addresses, speed_mbps: Some(10_000), ..fixtures::link(name) }
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

/// A fault, and the one finding that reports it: its severity, code, places and a part of its text.
type Case = (fn(&mut Scene), Severity, &'static str, &'static [&'static str], &'static str);

fn all_cases() -> Vec<Case> {
    [paths::OF_PATHS, links::OF_LINKS, hosts::OF_HOSTS, vms::OF_VMS].concat()
}

#[test]
fn each_wrong_thing_is_found_and_nothing_else() {
    for (spoil, severity, code, places, part) in all_cases() {
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
fn only_what_surely_fails_refuses_a_migration() {
    for (spoil, severity, code, ..) in all_cases() {
        let mut scene = Scene::healthy();
        spoil(&mut scene);
        let problem = refusal(&scene.findings());
        let of_hosts = ["not-a-peer", "route-taken", "agents-too-far-apart"];
        let refuses = severity == Error && (code.starts_with("vm-") || of_hosts.contains(&code));
        assert_eq!(problem.is_some(), refuses, "{code}: {problem:?}");
    }
}

fn bond(mode: &str, hash: &str) -> BondFacts {
    let transmit_hash = (!hash.is_empty()).then(|| hash.into());
    BondFacts { mode: mode.into(), transmit_hash, members: 2 }
}

prop_compose! {
    fn packets()(sent_max in any::<Option<u16>>(), arrived_max in any::<Option<u16>>(), sent in any::<u32>(), arrived in any::<u32>()) -> PacketTrial {
        PacketTrial { sent_bytes_max: sent_max, arrived_bytes_max: arrived_max, sent, arrived }
    }
}

proptest! {
    /// A peer's facts are only what it claims.
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
