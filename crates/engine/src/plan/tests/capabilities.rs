//! Plans when a hypervisor lacks a capability.

use proptest::prelude::*;

use super::wire::{any_capabilities, any_host, any_request};
use super::{GIB, host};
use crate::host::capabilities::{Capabilities, Committer, PostCopy};
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::HostFacts;
use crate::option::{MigrationOption, RequestedOption};
use crate::paths::path::Reach;
use crate::plan::{LimitKeeper, Packing, Parallel, Plan, PlanRequest, Spread, plan};
use crate::transfer::encryption::decide;
use crate::transfer::relayed::Compressible;

const TEXT: Option<Compressible> = Some(Compressible { share: 0.9, left: 0.3 });

/// Two hosts with idle cores, over two paths of 1 Gb/s that both trust.
fn pair() -> [HostFacts; 2] {
    [("a", 1), ("b", 2)].map(|(name, last)| HostFacts {
        encryption: EncryptionPolicy::Allowed,
        idle_cores: Some(2.0),
        ..host(name, last, 2)
    })
}

/// These hosts, when one of them lacks something.
fn lacking([mut a, mut b]: [HostFacts; 2], on_source: bool, take: fn(&mut Capabilities)) -> [HostFacts; 2] {
    let host = if on_source { &mut a } else { &mut b };
    take(&mut host.hypervisor.capabilities);
    host.hypervisor.name = "libvirt".into();
    host.hypervisor.version = "9.0.0".into();
    [a, b]
}

fn planned([a, b]: &[HostFacts; 2], request: impl Into<PlanRequest>) -> Result<Plan, String> {
    plan(a, b, request, &[], GIB).map_err(|error| error.to_string())
}

/// The plan in short: its option, its spread, and its reasons.
fn how(plan: &Plan) -> (MigrationOption, Spread, String) {
    (plan.option(), plan.spread(), plan.reason().unwrap_or_default())
}

/// Goes through both hosts, and puts the name of the one that lacks the capability into the words.
fn each_host(take: fn(&mut Capabilities), check: impl Fn([HostFacts; 2], &str)) {
    for (on_source, name) in [(true, "a"), (false, "b")] {
        check(lacking(pair(), on_source, take), &format!("libvirt 9.0.0 on {name}"));
    }
}

fn with_limit([a, b]: [HostFacts; 2]) -> [HostFacts; 2] {
    [a, HostFacts { bandwidth_limit_mbps: Some(500), ..b }]
}

fn post_copy(encrypt: bool) -> PlanRequest {
    PlanRequest { post_copy: true, encrypt, ..RequestedOption::Auto.into() }
}

#[test]
fn a_hypervisor_that_commits_by_itself_is_refused_whatever_is_asked_for() {
    each_host(
        |can| can.commits = Committer::Hypervisor,
        |hosts, who| {
            for request in RequestedOption::ALL.map(PlanRequest::from).into_iter().chain([post_copy(true)]) {
                let error = planned(&hosts, request).unwrap_err();
                let words = format!("{who} decides by itself that a VM runs on the target");
                assert!(error.starts_with(&words), "{error}");
            }
        },
    );
}

#[test]
fn where_a_hypervisor_makes_one_connection_there_is_one() {
    each_host(
        |can| can.sends_in_parallel = false,
        |hosts, who| {
            let one = format!("{who} migrates over one connection only");
            for (option, words) in [
                (RequestedOption::Tcp, String::new()),
                (RequestedOption::Auto, format!("2 paths, no RDMA device on a and b; over one path: {one}")),
                (RequestedOption::Multichannel, format!("multichannel is not possible: {one}")),
                (RequestedOption::Compression, format!("over one path: {one}; not compressed: {one}")),
                (RequestedOption::QemuZstd1, format!("over one path: {one}")),
                (
                    RequestedOption::Direct,
                    format!("no RDMA device on a and b; multichannel is not possible: {one}"),
                ),
            ] {
                let plan = planned(&hosts, option).unwrap();
                assert_eq!(how(&plan), (MigrationOption::Tcp, Spread::InTurn, words));
                assert_eq!(plan.paths.len(), 2, "the second is there for when the first fails");
            }
        },
    );
}

#[test]
fn one_connection_that_a_path_may_outrun_when_it_is_encrypted_is_told() {
    each_host(
        |can| can.sends_in_parallel = false,
        |mut hosts, who| {
            for host in &mut hosts {
                host.links.truncate(1);
                host.links[0].speed_mbps = Some(25_000);
            }
            let plan =
                planned(&hosts, PlanRequest { encrypt: true, ..RequestedOption::Auto.into() }).unwrap();
            let words = format!(
                "one path only, no RDMA device on a and b; one connection, encrypted, may carry less than \
                e0–e0: {who} migrates over one connection only"
            );
            assert_eq!(how(&plan), (MigrationOption::Tcp, Spread::InTurn, words));
        },
    );
}

#[test]
fn connections_that_no_agent_can_watch_take_one_path_and_a_relays_take_all() {
    each_host(
        |can| can.connections_are_ours = false,
        |hosts, who| {
            let plan = planned(&hosts, RequestedOption::Multichannel).unwrap();
            let words = format!(
                "multichannel is not possible: no agent can see which path each connection of {who} uses"
            );
            assert_eq!(how(&plan), (MigrationOption::Tcp, Spread::InTurn, words));
            let packed = planned(&hosts, RequestedOption::QemuZstd3).unwrap();
            assert_eq!((packed.option(), packed.spread()), (MigrationOption::QemuZstd3, Spread::InTurn));
            let requests = [
                PlanRequest { memory: TEXT, ..RequestedOption::Compression.into() },
                PlanRequest { memory: TEXT, ..RequestedOption::Auto.into() },
                PlanRequest { encrypt: true, ..RequestedOption::Multichannel.into() },
            ];
            for relayed in requests.map(|request| planned(&hosts, request).unwrap()) {
                assert!(relayed.relay().is_some() && relayed.spread() == Spread::Routed, "{relayed:?}");
                assert!(!how(&relayed).2.contains(who), "{relayed:?}");
                assert_eq!(relayed.limit_keeper(), LimitKeeper::Agents);
            }
        },
    );
}

#[test]
fn a_limit_is_left_to_a_hypervisor_whose_connections_cannot_be_paced() {
    let not_ours = lacking(pair(), true, |can| can.connections_are_ours = false);
    let plan = planned(&not_ours, RequestedOption::Tcp).unwrap();
    assert_eq!((plan.limit_keeper(), plan.reason()), (LimitKeeper::Hypervisor, None));
    let limited = planned(&with_limit(not_ours), RequestedOption::Tcp).unwrap();
    let words = "the limit of 0.50 Gb/s is left to libvirt 9.0.0 on a, whose connections no agent can pace"
        .to_owned();
    assert_eq!((limited.limit_keeper(), limited.reason()), (LimitKeeper::Hypervisor, Some(words)));
    // The target's connections send nothing.
    let not_theirs = lacking(pair(), false, |can| can.connections_are_ours = false);
    let plan = planned(&with_limit(not_theirs), RequestedOption::Tcp).unwrap();
    assert_eq!((plan.limit_keeper(), plan.reason()), (LimitKeeper::Agents, None));
}

#[test]
fn a_limit_that_nobody_can_keep_is_no_limit_and_so_there_is_no_plan() {
    let hosts = lacking(pair(), true, |can| {
        (can.connections_are_ours, can.keeps_limit) = (false, false);
    });
    let plan = planned(&hosts, RequestedOption::Tcp).unwrap();
    assert_eq!((plan.limit_keeper(), plan.reason()), (LimitKeeper::Nobody, None));
    let hosts = with_limit(hosts);
    let error = planned(&hosts, RequestedOption::Tcp).unwrap_err();
    assert!(
        error.starts_with(
            "there is a bandwidth limit of 0.50 Gb/s, and nobody can make libvirt 9.0.0 on a keep it"
        ),
        "{error}"
    );
    let relayed = planned(&hosts, PlanRequest { encrypt: true, ..RequestedOption::Tcp.into() }).unwrap();
    assert_eq!(relayed.limit_keeper(), LimitKeeper::Agents);
    // A hypervisor whose connections are paced need not do anything.
    let paced = with_limit(lacking(pair(), true, |can| can.keeps_limit = false));
    assert_eq!(planned(&paced, RequestedOption::Tcp).unwrap().limit_keeper(), LimitKeeper::Agents);
}

#[test]
fn without_a_relay_memory_goes_as_it_is_and_says_so_where_it_would_shrink() {
    each_host(
        |can| can.is_relayed = false,
        |hosts, who| {
            let words = format!("not compressed: {who} cannot go through a relay");
            for memory in [TEXT, None] {
                let asked =
                    planned(&hosts, PlanRequest { memory, ..RequestedOption::Compression.into() }).unwrap();
                assert_eq!(how(&asked), (MigrationOption::Multichannel, Spread::Routed, words.clone()));
            }
            let auto =
                |memory| planned(&hosts, PlanRequest { memory, ..RequestedOption::Auto.into() }).unwrap();
            let two_paths = "2 paths, no RDMA device on a and b";
            let chosen = how(&auto(TEXT));
            assert_eq!(chosen.0, MigrationOption::Multichannel);
            assert_eq!(chosen.2, format!("{two_paths}; {words}"));
            assert_eq!(how(&auto(None)).2, two_paths);
        },
    );
}

#[test]
fn without_a_relay_nothing_goes_in_the_clear_that_is_to_be_encrypted() {
    each_host(
        |can| can.is_relayed = false,
        |hosts, who| {
            for option in RequestedOption::ALL {
                let error = planned(&hosts, PlanRequest { encrypt: true, ..option.into() }).unwrap_err();
                let words = format!(
                    "the migration is to be encrypted (asked for), and {who} cannot go through a relay, which does that"
                );
                assert!(error.starts_with(&words), "{error}");
            }
            // Post-copy is encrypted without a relay.
            assert!(planned(&hosts, post_copy(true)).unwrap().is_encrypted_by_hypervisor());
        },
    );
}

#[test]
fn a_hypervisor_that_packs_nothing_sends_memory_as_it_is() {
    each_host(
        |can| can.packs = false,
        |hosts, who| {
            for option in [RequestedOption::QemuZstd1, RequestedOption::QemuZstd3] {
                let words = format!("uncompressed: {who} does not compress what it sends");
                let plan = planned(&hosts, option).unwrap();
                assert_eq!(how(&plan), (MigrationOption::Multichannel, Spread::Routed, words));
            }
            assert!(planned(&hosts, RequestedOption::Compression).unwrap().is_compressed());
        },
    );
}

#[test]
fn post_copy_is_refused_where_a_hypervisor_has_none() {
    each_host(
        |can| can.post_copy = None,
        |hosts, who| {
            let error = planned(&hosts, post_copy(false)).unwrap_err();
            assert_eq!(
                error,
                format!("post-copy was asked for, and {who} has no post-copy: do not ask for it")
            );
            assert!(planned(&hosts, RequestedOption::Auto).is_ok());
        },
    );
}

#[test]
fn post_copy_that_is_to_be_encrypted_is_refused_where_a_hypervisor_does_not_encrypt_it() {
    each_host(
        |can| can.post_copy = Some(PostCopy { in_parallel: true, encrypts: false }),
        |hosts, who| {
            let error = planned(&hosts, post_copy(true)).unwrap_err();
            assert!(error.contains(&format!("{who} does not encrypt post-copy")), "{error}");
            assert!(planned(&hosts, post_copy(false)).unwrap().post_copy());
        },
    );
}

#[test]
fn a_source_that_does_not_wait_before_it_switches_over_does_no_post_copy() {
    let take: fn(&mut Capabilities) = |can| can.pauses_before_switchover = false;
    let hosts = lacking(pair(), true, take);
    let error = planned(&hosts, post_copy(false)).unwrap_err();
    let words =
        "libvirt 9.0.0 on a does not wait before it switches over, when the hand-over must be recorded";
    assert!(error.contains(words), "{error}");
    assert!(planned(&hosts, RequestedOption::Auto).is_ok());
    assert!(planned(&lacking(pair(), false, take), post_copy(false)).is_ok());
}

/// The capabilities that a plan uses and a hypervisor lacks.
fn overreach(plan: &Plan, [a, b]: &[HostFacts; 2]) -> Vec<&'static str> {
    let source = a.hypervisor.capabilities;
    let both = |can: fn(&Capabilities) -> bool| can(&source) && can(&b.hypervisor.capabilities);
    let is_relayed = plan.relay().is_some();
    let packs = matches!(plan.transfer.parallel().map(Parallel::packing), Some(Packing::ByHypervisor(..)));
    let is_limited = a.bandwidth_limit_mbps.is_some() || b.bandwidth_limit_mbps.is_some();
    let keeper_can = match plan.limit_keeper() {
        LimitKeeper::Agents => is_relayed || source.connections_are_ours,
        LimitKeeper::Hypervisor => source.keeps_limit,
        LimitKeeper::Nobody => !is_limited,
    };
    let encrypts = both(|can| can.post_copy.is_some_and(|post_copy| post_copy.encrypts));
    let uses = [
        ("commits", true, both(|can| can.commits == Committer::Agents)),
        ("sends_in_parallel", plan.transfer.parallel().is_some(), both(|can| can.sends_in_parallel)),
        ("packs", packs, both(|can| can.packs)),
        ("is_relayed", is_relayed, both(|can| can.is_relayed)),
        (
            "connections_are_ours",
            plan.spread() == Spread::Routed && !is_relayed,
            both(|can| can.connections_are_ours),
        ),
        ("keeps_limit", true, keeper_can),
        ("post_copy", plan.post_copy(), both(|can| can.post_copy.is_some())),
        ("pauses_before_switchover", plan.post_copy(), source.pauses_before_switchover),
        ("encrypts", plan.is_encrypted_by_hypervisor(), encrypts),
        ("rdma", plan.transfer.is_by_rdma(), a.hypervisor.rdma && b.hypervisor.rdma),
    ];
    uses.into_iter().filter(|(_, is_used, can)| *is_used && !can).map(|(what, ..)| what).collect()
}

#[test]
fn a_plan_for_what_hosts_could_do_before_is_seen_to_overreach() {
    let hosts = pair();
    let request = PlanRequest { memory: TEXT, encrypt: true, ..RequestedOption::Compression.into() };
    let plan = planned(&hosts, request).unwrap();
    assert_eq!(overreach(&plan, &hosts), Vec::<&str>::new());
    let can_nothing = lacking(hosts, false, |can| *can = Capabilities::NONE);
    assert_eq!(overreach(&plan, &can_nothing), ["commits", "sends_in_parallel", "is_relayed"]);
}

/// Any two hosts, or two that could do everything that is requested if their hypervisors could.
fn any_pair() -> impl Strategy<Value = [HostFacts; 2]> {
    let any_two = (any_host("a", 1), any_host("b", 2)).prop_map(<[HostFacts; 2]>::from);
    let able_but_for_hypervisors = [any_capabilities(), any_capabilities()].prop_map(|capabilities| {
        let mut hosts = pair();
        for (host, capabilities) in hosts.iter_mut().zip(capabilities) {
            host.hypervisor.capabilities = capabilities;
        }
        hosts
    });
    prop_oneof![any_two, able_but_for_hypervisors]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn no_plan_uses_what_a_hypervisor_of_either_host_cannot_do(
        mut hosts in any_pair(),
        request in any_request(),
        limits in [prop::option::of(Just(500_u64)), prop::option::of(Just(500_u64))],
        is_dead: [bool; 3],
    ) {
        for (host, limit) in hosts.iter_mut().zip(limits) {
            host.bandwidth_limit_mbps = limit;
        }
        let reach = |link: &str| Reach { link: link.into(), peer_link: link.into() };
        let reaches = ["e0", "e1", "e2"].map(reach);
        let Ok(made) = plan(&hosts[0], &hosts[1], request, &reaches, GIB) else { return Ok(()) };
        let decided = decide(&hosts[0], &hosts[1], request.encrypt, &made.paths);
        prop_assert_eq!(decided, Ok(made.encryption()));
        let trials = is_dead.map(|is_dead| if is_dead { Err("no answer".to_owned()) } else { Ok(()) });
        let narrowed = made.clone().narrow(&trials, "a", "b").ok();
        for plan in [made].into_iter().chain(narrowed) {
            prop_assert_eq!(overreach(&plan, &hosts), Vec::<&str>::new(), "{:?}", plan);
        }
    }

    /// All QEMUs of today do so.
    #[test]
    fn where_hypervisors_can_do_all_no_reason_names_one(
        mut hosts in any_pair(),
        request in any_request(),
    ) {
        for host in &mut hosts {
            host.hypervisor.rdma = true;
            host.hypervisor.capabilities = Capabilities {
                tells_connections_apart: false,
                zero_pages_in_parallel: false,
                ..Capabilities::ALL
            };
        }
        let said = match planned(&hosts, request) {
            Ok(plan) => {
                let keeper =
                    if plan.transfer.is_by_rdma() { LimitKeeper::Nobody } else { LimitKeeper::Agents };
                prop_assert_eq!(plan.limit_keeper(), keeper);
                plan.reason().unwrap_or_default()
            }
            Err(error) => error,
        };
        prop_assert!(!said.contains("QEMU"), "{}", said);
    }
}
