mod capabilities;
mod rdma;
mod wire;

use super::making::CORE_ENCRYPTS_MBPS;
use super::*;
use crate::estimate::prediction;
use crate::fixtures;
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::{HostFacts, HypervisorVersion, MigrationLink, NoMigrationAddress, NoPacking};
use crate::paths::path::Reach;
use crate::storage::{CopyReason, DiskCopy, DiskImage, DiskName};
use crate::transfer::relayed::Compressible;

const GIB: u64 = 1 << 30;

fn host(name: &str, last: u8, links: u8) -> HostFacts {
    let link = |index| MigrationLink {
        addresses: vec![format!("10.77.{}.{last}/24", index + 1).parse().unwrap()],
        speed_mbps: Some(1000),
        is_trusted: true,
        ..fixtures::link(&format!("e{index}"))
    };
    let host = fixtures::host(name);
    HostFacts {
        memory_available_bytes: 1 << 34,
        links: (0..links).map(link).collect(),
        migration_address: Some(format!("10.77.200.{last}").parse().unwrap()),
        hypervisor: HypervisorVersion { rdma: true, ..host.hypervisor },
        ..host
    }
}

#[test]
fn limits_and_disks_make_it_longer() {
    let hosts = |all_mbps, storage_mbps| {
        let a = HostFacts { bandwidth_limit_mbps: all_mbps, ..host("a", 1, 2) };
        (a, HostFacts { storage_limit_mbps: storage_mbps, ..host("b", 2, 2) })
    };
    let request = PlanRequest { zero_share: Some(0.5), ..RequestedOption::Multichannel.into() };
    let predicted_s = |all_mbps, storage_mbps, allocated_bytes| {
        let (a, b) = hosts(all_mbps, storage_mbps);
        let mut plan = plan(&a, &b, request, &[], GIB).unwrap();
        let disk = DiskCopy {
            disk: DiskName::at(0).unwrap(),
            from: "/srv/web.img".into(),
            to: "/srv/web.img".into(),
            image: DiskImage::Raw,
            size_bytes: 8 * GIB,
            allocated_bytes,
            why: CopyReason::AskedFor,
            from_device: None,
            is_flattened: false,
        };
        plan.disks.push(disk);
        prediction::total_ms(&a, &b, &plan, &request, GIB).unwrap() / 1e3
    };
    let gigabit_s = GIB as f64 * 8.0 / 1e9 / 0.95;
    let base_s = predicted_s(None, None, 0);
    for (all_mbps, storage_mbps, more_s) in [
        (None, None, gigabit_s / 2.0),
        (None, Some(100), gigabit_s * 10.0),
        // Half a GiB of memory, too.
        (Some(100), None, gigabit_s * 10.0 + gigabit_s * (5.0 - 0.25)),
        (Some(100), Some(400), gigabit_s * 10.0 + gigabit_s * (5.0 - 0.25)),
    ] {
        let longer_s = predicted_s(all_mbps, storage_mbps, GIB) - base_s;
        assert!((longer_s - more_s).abs() < 0.01, "{all_mbps:?} {storage_mbps:?}: {longer_s} not {more_s} s");
    }
}

#[test]
fn auto_takes_multichannel_over_two_paths_and_tcp_over_one() {
    let two = plan(&host("a", 1, 2), &host("b", 2, 2), RequestedOption::Auto, &[], GIB).unwrap();
    assert_eq!(two.option(), MigrationOption::Multichannel);
    assert_eq!(two.spread(), Spread::Routed);
    assert_eq!(two.paths.len(), 2);
    let one = plan(&host("a", 1, 1), &host("b", 2, 2), RequestedOption::Auto, &[], GIB).unwrap();
    assert_eq!(one.option(), MigrationOption::Tcp);
    assert!(one.reason().unwrap().contains("one path only"));
}

#[test]
fn post_copy_goes_over_one_connection_and_says_so() {
    let request = |option| PlanRequest { post_copy: true, encrypt: true, ..PlanRequest::from(option) };
    let plan_of = |option| plan(&host("a", 1, 2), &host("b", 2, 2), request(option), &[], GIB);
    for option in [RequestedOption::Auto, RequestedOption::Tcp] {
        let plan = plan_of(option).unwrap();
        assert!(plan.post_copy() && plan.is_encrypted_by_hypervisor() && plan.relay().is_none());
        assert_eq!((plan.requested_option, plan.option()), (option, MigrationOption::Tcp));
        assert_eq!((plan.spread(), plan.transfer.parallel().map(Parallel::channels)), (Spread::InTurn, None));
        assert!(plan.reason().unwrap().starts_with("over one connection"));
    }
    let error = plan_of(RequestedOption::Multichannel).unwrap_err().to_string();
    assert!(error.contains("which multichannel does not"), "{error}");
}

#[test]
fn what_may_be_faster_than_one_connection_is_encrypted_by_several() {
    let pair = |links: u8, speed_mbps| {
        [("a", 1), ("b", 2)].map(|(name, last)| {
            let mut host = host(name, last, links);
            for link in &mut host.links {
                (link.speed_mbps, link.is_trusted) = (speed_mbps, false);
            }
            host
        })
    };
    let auto = |[a, b]: &[HostFacts; 2]| plan(a, b, RequestedOption::Auto, &[], GIB).unwrap();
    let several = (MigrationOption::Multichannel, Spread::InTurn, Some(MULTICHANNEL_CONNECTIONS));
    let one = (MigrationOption::Tcp, Spread::InTurn, None);
    let how = |plan: &Plan| (plan.option(), plan.spread(), plan.transfer.parallel().map(Parallel::channels));
    for (speed_mbps, expected, words) in [
        (Some(25_000), several, "encrypts some 7 Gb/s, less than the 25 Gb/s of e0–e0"),
        (None, several, "and the speed of e0–e0 is not known"),
        (Some(CORE_ENCRYPTS_MBPS), one, "one path only, no RDMA device on a and b"),
    ] {
        let plan = auto(&pair(1, speed_mbps));
        assert!(plan.is_encrypted());
        assert_eq!(how(&plan), expected, "{speed_mbps:?}");
        let reason = plan.reason().unwrap();
        assert!(reason.starts_with("one path only") && reason.ends_with(words), "{reason}");
    }
    // Also with several paths that nothing can be routed over.
    let [a, b] = pair(2, Some(25_000));
    let unroutable_pair = [HostFacts { migration_address: None, ..a }, b];
    let unroutable = auto(&unroutable_pair);
    assert_eq!(how(&unroutable), several);
    let reason = unroutable.reason().unwrap();
    assert!(reason.contains("2 paths") && reason.contains("over one path: no migration_address"), "{reason}");
    let narrowed = unroutable.narrow(&[Err("no answer".to_owned()), Ok(())], "a", "b").unwrap();
    assert_eq!((how(&narrowed), narrowed.paths.len()), (several, 1));
    for option in [RequestedOption::Multichannel, RequestedOption::Compression, RequestedOption::Direct] {
        let [a, b] = &unroutable_pair;
        let asked = PlanRequest { memory: Some(Compressible { share: 0.0, left: 1.0 }), ..option.into() };
        assert_eq!(how(&plan(a, b, asked, &[], GIB).unwrap()), several, "{option}");
    }
    // Unencrypted, one connection is enough, and a request for one is met.
    let [mut a, mut b] = pair(1, Some(25_000));
    let asked = plan(&a, &b, RequestedOption::Tcp, &[], GIB).unwrap();
    assert_eq!((how(&asked), asked.reason()), (one, None));
    (a.links[0].is_trusted, b.links[0].is_trusted) = (true, true);
    assert_eq!(how(&auto(&[a, b])), one);
}

#[test]
fn compression_stays_out_where_the_paths_outrun_it_and_a_limit_of_either_host_slows_them() {
    let fast = |name, last| {
        let mut host = host(name, last, 2);
        for link in &mut host.links {
            link.speed_mbps = Some(5000);
        }
        host
    };
    let option = |source: &HostFacts, target: &HostFacts| {
        plan(source, target, RequestedOption::Compression, &[], GIB).unwrap()
    };
    let (a, b) = (fast("a", 1), fast("b", 2));
    let out = option(&a, &b);
    assert_eq!((out.option(), out.is_compressed()), (MigrationOption::Multichannel, false));
    assert!(out.reason().unwrap().contains("the paths carry 10.0 Gb/s"));
    for (limit_mbps, is_compressed) in [(1000, true), (7000, true), (8000, false), (20_000, false)] {
        let limited = |host: &HostFacts| HostFacts { bandwidth_limit_mbps: Some(limit_mbps), ..host.clone() };
        for plan in [option(&limited(&a), &b), option(&a, &limited(&b))] {
            assert_eq!(plan.is_compressed(), is_compressed, "{limit_mbps}: {:?}", plan.reason());
        }
    }
}

#[test]
fn auto_compresses_what_is_known_to_shrink_where_cores_are_idle() {
    let auto = |memory, idle_cores| {
        let host = |name, last, links| HostFacts { idle_cores, ..host(name, last, links) };
        let request = PlanRequest { memory, ..RequestedOption::Auto.into() };
        [1, 2].map(|links| plan(&host("a", 1, links), &host("b", 2, 2), request, &[], GIB).unwrap())
    };
    let text = Some(Compressible { share: 0.5, left: 0.3 });
    for plan in auto(text, Some(2.0)) {
        assert!(plan.is_compressed() && plan.spread() == Spread::Routed, "{plan:?}");
        assert!(plan.reason().unwrap().contains("compressed: takes 65 % of the time"));
    }
    let random = Some(Compressible { share: 0.02, left: 0.9 });
    let no_gain = [auto(text, Some(0.2)), auto(text, None), auto(None, Some(2.0)), auto(random, Some(2.0))];
    for plan in no_gain.into_iter().flatten() {
        assert!(!plan.is_compressed() && !plan.reason().unwrap().contains("compressed"));
    }
}

#[test]
fn what_does_not_shrink_is_not_compressed_whoever_asks() {
    let random = Some(Compressible { share: 0.0, left: 1.0 });
    let request = PlanRequest { memory: random, ..RequestedOption::Compression.into() };
    let plan_of = |source: &HostFacts, target: &HostFacts| plan(source, target, request, &[], GIB).unwrap();
    let plan = plan_of(&host("a", 1, 2), &host("b", 2, 2));
    assert_eq!((plan.option(), plan.is_compressed()), (MigrationOption::Multichannel, false));
    assert_eq!(plan.reason().unwrap(), "not compressed: hardly any of the memory shrinks");
    // Nor over one path, nor if it is not known what the paths carry.
    let one_path = HostFacts { migration_address: None, ..host("b", 2, 2) };
    let plan = plan_of(&host("a", 1, 2), &one_path);
    assert_eq!((plan.option(), plan.is_compressed()), (MigrationOption::Tcp, false));
    let reason = plan.reason().unwrap();
    assert!(reason.contains("over one path") && reason.contains("hardly any"), "{reason}");
    let mut unknown = host("a", 1, 2);
    unknown.links.iter_mut().for_each(|link| link.speed_mbps = None);
    let mut other = host("b", 2, 2);
    other.links.iter_mut().for_each(|link| link.speed_mbps = None);
    assert!(!plan_of(&unknown, &other).is_compressed());
    // If the memory shrinks, the plan says that nobody knows whether compression pays.
    let plan = super::plan(&unknown, &other, RequestedOption::Compression, &[], GIB).unwrap();
    assert!(plan.is_compressed() && plan.reason().unwrap().contains("set speed_mbps"));
}

#[test]
fn where_nothing_packs_memory_goes_as_it_is_whether_or_not_a_speed_is_known() {
    let (mut a, mut b) = (host("a", 1, 2), host("b", 2, 2));
    (a.packing_cores, a.no_packing) = (Some(0), Some(NoPacking::CpusLost));
    for speed_mbps in [Some(1_000), None] {
        for link in a.links.iter_mut().chain(&mut b.links) {
            link.speed_mbps = speed_mbps;
        }
        let asked = plan(&a, &b, RequestedOption::Compression, &[], GIB).unwrap();
        assert_eq!((asked.option(), asked.is_compressed()), (MigrationOption::Multichannel, false));
        let reason = asked.reason().unwrap();
        let words =
            "not compressed: no core of the source may compress, because the agent may no longer run on any";
        assert!(reason.starts_with(words), "{reason}");
        let auto = plan(&a, &b, RequestedOption::Auto, &[], GIB).unwrap();
        assert_eq!(auto.reason().unwrap(), "2 paths, no RDMA device on a and b");
        // How well the target packs does not matter.
        let back = plan(&b, &a, RequestedOption::Compression, &[], GIB).unwrap();
        assert!(back.is_compressed(), "{:?}", back.reason());
    }
}

#[test]
fn multichannel_without_a_migration_address_falls_back_to_tcp() {
    let mut b = host("b", 2, 2);
    b.migration_address = None;
    let plan = plan(&host("a", 1, 2), &b, RequestedOption::Multichannel, &[], GIB).unwrap();
    assert_eq!(plan.option(), MigrationOption::Tcp);
    assert!(plan.reason().unwrap().contains("no migration_address is configured on b"));
}

fn with_ipv6(name: &str, last: u8) -> HostFacts {
    let mut host = host(name, last, 2);
    host.migration_address = Some(format!("fd00::{last}").parse().unwrap());
    for link in &mut host.links {
        link.addresses.push(format!("fe80::{last}/64").parse().unwrap());
    }
    host
}

fn reach(link: &str) -> Reach {
    Reach { link: link.into(), peer_link: link.into() }
}

#[test]
fn ipv6_routes_go_over_the_paths_that_have_it_and_the_others_are_named() {
    let (a, b) = (with_ipv6("a", 1), with_ipv6("b", 2));
    let asked = RequestedOption::Multichannel;
    let both = plan(&a, &b, asked, &[reach("e0"), reach("e1")], GIB).unwrap();
    assert_eq!((both.paths.len(), both.reason()), (2, None));
    let one = plan(&a, &b, asked, &[reach("e1")], GIB).unwrap();
    assert_eq!((one.paths.len(), one.paths[0].link.as_str()), (1, "e1"));
    assert!(one.reason().unwrap().contains("left out e0–e0: no IPv6"));
    let none = plan(&a, &b, asked, &[], GIB).unwrap();
    assert_eq!((none.option(), none.paths.len()), (MigrationOption::Tcp, 2));
    assert!(none.reason().unwrap().contains("give both hosts a private IPv4 address"));
    let auto = plan(&a, &b, RequestedOption::Auto, &[reach("e0"), reach("e1")], GIB).unwrap();
    assert_eq!(auto.option(), MigrationOption::Multichannel);
}

#[test]
fn migration_addresses_that_cannot_be_routed_are_explained() {
    let reason = |change: fn(&mut HostFacts)| {
        let mut b = host("b", 2, 2);
        change(&mut b);
        let plan = plan(&host("a", 1, 2), &b, RequestedOption::Multichannel, &[], GIB).unwrap();
        assert_eq!(plan.option(), MigrationOption::Tcp);
        plan.reason().unwrap()
    };
    for (change, words) in [
        ((|b| b.migration_address = Some("10.77.200.1".parse().unwrap())) as fn(&mut HostFacts), "the same"),
        (|b| b.migration_address = Some("fd00::2".parse().unwrap()), "different IP versions"),
        (|b| b.migration_address = Some("10.77.1.9".parse().unwrap()), "within 10.77.1.0/24 of a"),
        (
            |b| (b.migration_address, b.no_migration_address) = (None, Some(NoMigrationAddress::Ipv6Off)),
            "on b IPv6 is off, and no migration_address is configured; set it",
        ),
    ] {
        let reason = reason(change);
        assert!(reason.contains(words), "{reason}");
    }
}

#[test]
fn the_management_network_is_named_where_nothing_else_is_left() {
    let mut a = host("a", 1, 1);
    a.management_links = std::mem::take(&mut a.links);
    let plan = plan(&a, &host("b", 2, 1), RequestedOption::Tcp, &[], GIB).unwrap();
    assert!(plan.reason().unwrap().contains("over the management network"));
}

#[test]
fn what_was_asked_for_and_is_possible_needs_no_reason() {
    for requested in [RequestedOption::Tcp, RequestedOption::Compression, RequestedOption::Multichannel] {
        let plan = plan(&host("a", 1, 2), &host("b", 2, 2), requested, &[], GIB).unwrap();
        assert_eq!(plan.reason(), None, "{requested:?}");
    }
}

#[test]
fn a_path_that_does_not_answer_is_left_out_with_its_reason() {
    let made = |requested| plan(&host("a", 1, 2), &host("b", 2, 2), requested, &[], GIB).unwrap();
    let trials = [Err("no answer".to_owned()), Ok(())];
    let routed = made(RequestedOption::Multichannel).narrow(&trials, "a", "b").unwrap();
    assert_eq!(routed.paths.len(), 1);
    assert_eq!(routed.reason().unwrap(), "left out e0–e0: no answer");
    let in_turn = made(RequestedOption::Tcp).narrow(&trials, "a", "b").unwrap();
    assert_eq!(in_turn.paths[0].link, "e1");
    let in_turn = made(RequestedOption::Tcp).narrow(&[Ok(()), Ok(())], "a", "b").unwrap();
    assert_eq!((in_turn.paths.len(), in_turn.reason()), (1, None));
    let none = [Err("no answer".to_owned()), Err("refused".to_owned())];
    let error = made(RequestedOption::Auto).narrow(&none, "a", "b").unwrap_err().to_string();
    assert!(error.contains("e0–e0: no answer, e1–e1: refused"), "{error}");
}

#[test]
fn a_path_that_costs_more_than_it_brings_is_on_standby_and_carries_alone() {
    let mut a = host("a", 1, 2);
    a.links[1].speed_mbps = Some(10);
    let made = plan(&a, &host("b", 2, 2), RequestedOption::Multichannel, &[], GIB).unwrap();
    assert_eq!(made.paths.iter().map(|path| path.is_standby).collect::<Vec<_>>(), [false, true]);
    assert!(made.reason().unwrap().starts_with("e1–e1 is on standby"), "{:?}", made.reason());
    let alone = made.narrow(&[Err("no answer".to_owned()), Ok(())], "a", "b").unwrap();
    assert_eq!((alone.paths.len(), alone.paths[0].is_standby), (1, false));
}

#[test]
fn encryption_needs_a_relay_and_no_other_option() {
    let (mut a, b) = (host("a", 1, 2), host("b", 2, 2));
    let clear = plan(&a, &b, RequestedOption::Tcp, &[], GIB).unwrap();
    assert!(clear.relay().is_none(), "{:?}", clear.encryption());
    let asked = PlanRequest { encrypt: true, ..RequestedOption::Tcp.into() };
    let encrypted = plan(&a, &b, asked, &[], GIB).unwrap();
    assert_eq!(encrypted.relay(), Some(Relay::Encrypts));
    assert_eq!((encrypted.option(), encrypted.paths), (clear.option(), clear.paths));
    a.encryption = EncryptionPolicy::Off;
    let error = plan(&a, &b, asked, &[], GIB).unwrap_err();
    assert_eq!(error, PlanError::EncryptionOff { host: "a".into() });
}

#[test]
fn no_path_names_both_ends() {
    let error = plan(&host("a", 1, 0), &host("b", 2, 2), RequestedOption::Tcp, &[], GIB).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("no links fit for migrations") && text.contains("10.77.1.2/24"), "{text}");
}
