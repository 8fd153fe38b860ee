//! Faults of the hosts themselves.

use super::*;
use crate::check::facts::ForeignRoute;
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::{RdmaFacts, RdmaPort};

pub(super) const OF_HOSTS: &[Case] = &[
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
        "Debian 12 has 7.2, its bookworm-backports a newer one",
    ),
    (
        |s| {
            s.b.agent_version = "0.1.0".into();
            s.b.protocols = Protocols::default();
        },
        Remark,
        "agents-differ",
        &["a", "b"],
        "(protocol 1)",
    ),
    (
        |s| s.b.protocols = serde_json::from_str(r#"{"oldest": 3, "newest": 4}"#).unwrap(),
        Error,
        "agents-too-far-apart",
        &["a", "b"],
        "on a: install drainpipe",
    ),
    (|s| s.a.kernel = "5.10.0-28-amd64".into(), Warning, "kernel-old", &["a"], "older than 5.15"),
    (|s| s.b.qemu_replaced = true, Warning, "qemu-replaced", &["b"], "knows 7.2.22"),
    (
        |s| {
            let address = s.b.host.migration_address.expect("b has one");
            s.a.foreign_host_routes.push(ForeignRoute { address, protocol: 3 });
        },
        Error,
        "route-taken",
        &["a"],
        "on a: ip route del 10.9.0.12 proto 3",
    ),
    (|s| s.a.libvirt_version = Some("8.0.0".into()), Remark, "libvirt-old", &["a"], "older than 9.0"),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.hypervisor.version = "10.2.1".into();
            }
            with_libvirt(&mut s.a, "11.3.0");
        },
        Remark,
        "libvirt-copies-no-qcow2",
        &["a"],
        "8.0 to 10.2.1 do",
    ),
    (
        |s| {
            s.b.host.hypervisor.version = "10.2.2".into();
            with_libvirt(&mut s.a, "9.0.0");
            with_libvirt(&mut s.b, "11.9.0");
        },
        Warning,
        "libvirt-ht",
        &["a", "b"],
        "extra features: ht",
    ),
    (|s| s.clock.ahead_ms = -1_500.0, Warning, "clocks-differ", &["a", "b"], "1.50 s behind that of a"),
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
    (|s| with_rdma(s, None), Remark, "rdma-unused", &["a", "b"], "b runs an older drainpipe"),
    (
        |s| with_rdma(s, Some(RdmaFacts { connects: false, memory_lock_bytes: None })),
        Remark,
        "rdma-unused",
        &["a", "b"],
        "load the module rdma_ucm",
    ),
    (
        |s| with_rdma(s, Some(RdmaFacts { connects: true, memory_lock_bytes: Some(8 << 20) })),
        Remark,
        "rdma-unused",
        &["a", "b"],
        "may lock 8 MiB",
    ),
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

/// Both hosts have RDMA on `e0`, and `b` says this about it.
fn with_libvirt(facts: &mut CheckFacts, version: &str) {
    facts.host.libvirt = Some(HypervisorVersion {
        name: "libvirt".into(),
        version: version.into(),
        ..facts.host.hypervisor.clone()
    });
}

fn with_rdma(scene: &mut Scene, of_b: Option<RdmaFacts>) {
    let all = RdmaFacts { connects: true, memory_lock_bytes: None };
    for (facts, rdma) in [(&mut scene.a, Some(all)), (&mut scene.b, of_b)] {
        facts.host.rdma_devices.push("mlx5_0".into());
        facts.host.rdma = rdma;
        facts.host.links[0].rdma = Some(RdmaPort { device: "mlx5_0".into(), is_active: true });
    }
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
fn a_migration_over_one_connection_is_told_nothing_of_migration_addresses() {
    let mut scene = Scene::healthy();
    let paths = paths_to_try(&scene.a, &scene.b, &[]);
    let found = |scene: &Scene, may_use_all| {
        let (source, target) = (&scene.a, &scene.b);
        let (paths, vms, clock) = (&paths[..], &[][..], scene.clock);
        check(Pair { source, target, paths, trials: None, vms, multichannel: false, may_use_all, clock })
    };
    // The paths of a single connection may use IPv4, though there is IPv6.
    for facts in [&mut scene.a, &mut scene.b] {
        let host = facts.host.name.len();
        facts.host.migration_address = Some(format!("fd00::{host}").parse().unwrap());
    }
    scene.b.host.migration_address = Some("fd00::2".parse().unwrap());
    assert_eq!(found(&scene, true)[0].code, "migration-addresses-unroutable");
    assert_eq!(found(&scene, false), []);
}

#[test]
fn certificates_that_are_not_accepted_are_nothing_for_the_firewall() {
    for is_for_certificates in [false, true] {
        let reason = NotReached { why: "another authority signed it".into(), is_for_certificates };
        for finding in [unreachable("a", "b", 7420, &reason), no_way_back("a", "b", 7420, &reason)] {
            assert_eq!(finding.remedy.contains("firewall"), !is_for_certificates, "{finding:#?}");
            assert_eq!(finding.remedy.contains("drainpipe pki host"), is_for_certificates, "{finding:#?}");
        }
    }
}
