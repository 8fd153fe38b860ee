//! Faults of the paths between two hosts.

use super::*;

pub(super) const OF_PATHS: &[Case] = &[
    (
        |s| s.b.host.links[1].mtu = 9000,
        Warning,
        "mtu-differs",
        &["a e1", "b e1"],
        "on b: ip link set dev e1 mtu 1500",
    ),
    (
        |s| s.b.host.links[1].mtu = 1280,
        Error,
        "mtu-differs",
        &["a e1", "b e1"],
        "moves to this path in flight hangs",
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
        Warning,
        "mtu-does-not-pass",
        &["a e0", "b e0"],
        "from a to b none larger than 1500",
    ),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.links[0].mtu = 9000;
            }
            s.trials[0].forward = passing(9000);
            s.trials[0].backward =
                PacketTrial { sent_bytes_max: Some(9000), arrived_bytes_max: Some(1500), ..passing(1500) };
        },
        Warning,
        "mtu-does-not-pass",
        &["a e0", "b e0"],
        "migrations from b to a do not use this path",
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
            // The other end loses its carrier, which is not reported too.
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
        "net.ipv4.tcp_rmem='8192 65536 4194304'",
    ),
];

#[test]
fn a_dead_path_is_an_error_when_it_is_the_last() {
    let mut scene = Scene::healthy();
    scene.trials.iter_mut().for_each(|trial| no_answer(trial, false, false));
    let findings = scene.findings();
    assert_eq!(findings.len(), 2);
    assert!(findings.iter().all(|finding| finding.severity == Severity::Error), "{findings:#?}");
}

#[test]
fn an_mtu_that_does_not_pass_is_an_error_when_no_other_path_is_left() {
    let mut scene = Scene::healthy();
    let severities = |scene: &Scene| -> Vec<Severity> {
        let findings = scene.findings();
        findings.iter().filter(|one| one.code == "mtu-does-not-pass").map(|one| one.severity).collect()
    };
    for (count, expected) in [(1, vec![Warning]), (2, vec![Error, Error])] {
        for trial in &mut scene.trials[..count] {
            trial.forward.arrived_bytes_max = Some(1400);
        }
        assert_eq!(severities(&scene), expected);
    }
}

#[test]
fn a_low_speed_that_is_configured_is_told_by_a_check_and_not_by_each_migration() {
    let mut scene = Scene::healthy();
    for facts in [&mut scene.a, &mut scene.b] {
        for link in &mut facts.host.links {
            link.speed_mbps = Some(100);
        }
    }
    let paths = paths_to_try(&scene.a, &scene.b, &[]);
    let count = |scene: &Scene, trials| {
        let (source, target, clock) = (&scene.a, &scene.b, scene.clock);
        let (paths, vms) = (&paths[..], &scene.vms[..]);
        let pair = Pair { source, target, paths, trials, vms, multichannel: true, may_use_all: true, clock };
        check(pair).iter().filter(|finding| finding.code == "speed-low").count()
    };
    let trials = scene.trials.clone();
    assert_eq!([count(&scene, Some(&trials)), count(&scene, None)], [2, 2]);
    for facts in [&mut scene.a, &mut scene.b] {
        facts.links[0].is_speed_configured = true;
    }
    assert_eq!([count(&scene, Some(&trials)), count(&scene, None)], [2, 1]);
}

#[test]
fn of_unequal_paths_it_is_said_which_are_on_standby() {
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
    let standby = effect(vec![of("big", 16), of("small", 1), of("tiny", 1)], &scene);
    assert!(standby.ends_with("when no other does: e1–e1 for VM small and 1 more"), "{standby}");
    assert!(effect(vec![], &scene).contains("one that would cost a VM more than it brings is on standby"));
}

#[test]
fn paths_that_a_plan_leaves_out_are_no_mismatch() {
    let Scene { a, b, trials, vms, clock } = Scene::healthy();
    let paths = [trials[0].path.clone()];
    let pair = Pair {
        source: &a,
        target: &b,
        paths: &paths,
        trials: None,
        vms: &vms,
        multichannel: true,
        may_use_all: true,
        clock,
    };
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
fn heavy_loss_is_not_taken_for_an_mtu() {
    let mut scene = Scene::healthy();
    scene.trials[0].forward =
        PacketTrial { arrived_bytes_max: Some(1492), sent: 15, arrived: 8, ..passing(1500) };
    let codes: Vec<String> = scene.findings().into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["path-loses-packets"]);
}
