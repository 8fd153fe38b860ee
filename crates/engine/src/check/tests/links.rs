//! Faults of a host's links.

use super::*;

pub(super) const OF_LINKS: &[Case] = &[
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
fn a_migration_is_told_that_it_goes_over_the_management_network_since_all_other_links_are_down() {
    // As without configuration: if nothing else is usable, it is a link like any other.
    let found = |spoil: fn(&mut CheckFacts)| {
        let mut scene = Scene::healthy();
        for facts in [&mut scene.a, &mut scene.b] {
            facts.links[0].carries_management = true;
            spoil(facts);
        }
        scene.retry();
        let findings = crate::check::worth_telling(scene.findings()).into_iter();
        findings.filter(|finding| finding.code == "management-link").collect::<Vec<_>>()
    };
    let down = found(|facts| unplug(facts, 1, LinkState::Down));
    assert_eq!(down.len(), 2, "{down:#?}");
    assert!(down[0].remedy.contains("which are all down: e1"), "{down:#?}");
    let only = found(|facts| {
        facts.host.links.truncate(1);
        facts.links.truncate(1);
    });
    assert_eq!(only, []);
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
