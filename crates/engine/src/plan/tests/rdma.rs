//! Plans with RDMA.

use proptest::prelude::*;

use super::wire::{any_host, any_request};
use super::{GIB, host};
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::{HostFacts, RdmaFacts, RdmaPort};
use crate::option::{MigrationOption, RequestedOption};
use crate::paths::path::Reach;
use crate::plan::{LimitKeeper, Plan, PlanRequest, plan};

/// Two hosts whose second links have RDMA devices.
fn pair() -> [HostFacts; 2] {
    [("a", 1), ("b", 2)].map(|(name, last)| {
        let mut host = host(name, last, 2);
        host.links[1].rdma = Some(RdmaPort { device: "mlx5_0".into(), is_active: true });
        let rdma = Some(RdmaFacts { connects: true, memory_lock_bytes: None });
        HostFacts { rdma_devices: vec!["mlx5_0".into()], rdma, ..host }
    })
}

fn planned([a, b]: &[HostFacts; 2], request: impl Into<PlanRequest>) -> Plan {
    plan(a, b, request, &[], GIB).unwrap()
}

#[test]
fn direct_goes_by_the_path_that_has_devices_at_both_ends() {
    let plan = planned(&pair(), RequestedOption::Direct);
    assert_eq!((plan.option(), plan.transfer.is_by_rdma()), (MigrationOption::Direct, true));
    assert_eq!(plan.paths.iter().map(ToString::to_string).collect::<Vec<_>>(), ["e1–e1"]);
    assert_eq!((plan.reason(), plan.limit_keeper()), (None, LimitKeeper::Nobody));
    assert!(plan.relay().is_none() && !plan.is_encrypted() && !plan.post_copy());
}

#[test]
fn nobody_gets_rdma_who_does_not_ask_for_it() {
    for option in RequestedOption::ALL.into_iter().filter(|option| *option != RequestedOption::Direct) {
        assert_ne!(planned(&pair(), option).option(), MigrationOption::Direct, "{option}");
    }
    let reason = planned(&pair(), RequestedOption::Auto).reason().unwrap();
    assert_eq!(reason, "2 paths, RDMA is used only if the option direct asks for it");
}

/// A change that makes RDMA impossible.
type Change = fn(&mut [HostFacts; 2]);

#[test]
fn where_rdma_cannot_be_used_it_is_multichannel_and_says_why() {
    let cases: [(Change, &str); 10] = [
        (|[a, b]| [a, b].into_iter().for_each(|host| host.rdma_devices.clear()), "no RDMA device on a and b"),
        (|[_, b]| b.rdma_devices.clear(), "no RDMA device on b"),
        (|[a, _]| a.hypervisor.rdma = false, "QEMU 7.2.22 on a cannot move VMs by RDMA"),
        (|[_, b]| b.rdma = None, "b runs an older drainpipe, which does not use its RDMA device: upgrade b"),
        (|[a, _]| a.rdma.as_mut().unwrap().connects = false, "on a: load the module rdma_ucm there"),
        (
            |[a, _]| a.rdma.as_mut().unwrap().memory_lock_bytes = Some(8 << 20),
            "RDMA locks 1280 MiB of memory, and VMs of a may lock 8 MiB: start its agent with LimitMEMLOCK=infinity",
        ),
        (
            |[a, _]| a.links[1].rdma = None,
            "no path that carries now has an RDMA device and an address at both ends: there is e0–e0, e1–e1",
        ),
        (|[_, b]| b.links[1].rdma.as_mut().unwrap().is_active = false, "the RDMA devices of e1–e1 are down"),
        (
            |[_, b]| (b.encryption, b.links[1].is_trusted) = (EncryptionPolicy::Required, false),
            "require it, and not both hosts trust the network of e1–e1)",
        ),
        (
            |[_, b]| b.bandwidth_limit_mbps = Some(500),
            "RDMA keeps no bandwidth limit, and there is one of 0.50 Gb/s",
        ),
    ];
    for (change, words) in cases {
        let mut hosts = pair();
        change(&mut hosts);
        let plan = planned(&hosts, RequestedOption::Direct);
        let reason = plan.reason().unwrap_or_default();
        assert!(reason.contains(words), "{words}: {reason}");
        assert_eq!(plan.option(), MigrationOption::Multichannel, "{words}");
        let [a, b] = hosts;
        let back = planned(&[b, a], RequestedOption::Direct);
        assert!(back.reason().unwrap_or_default().contains(words), "{words}: {:?}", back.reason());
    }
}

#[test]
fn enough_may_be_locked_for_the_vm_and_its_devices() {
    let mut hosts = pair();
    hosts[0].rdma.as_mut().unwrap().memory_lock_bytes = Some(GIB + (256 << 20));
    assert_eq!(planned(&hosts, RequestedOption::Direct).option(), MigrationOption::Direct);
}

#[test]
fn asked_for_encryption_goes_before_direct() {
    let request = PlanRequest { encrypt: true, ..RequestedOption::Direct.into() };
    let plan = planned(&pair(), request);
    assert!(plan.is_encrypted() && plan.option() != MigrationOption::Direct);
    assert!(plan.reason().unwrap().contains("RDMA cannot be encrypted"), "{:?}", plan.reason());
}

#[test]
fn a_device_that_does_not_answer_leaves_its_path_to_no_other_option() {
    let one = planned(&pair(), RequestedOption::Direct).narrow(&[Err("no answer".to_owned())], "a", "b");
    assert!(one.unwrap_err().to_string().contains("e1–e1: no answer"));
}

proptest! {
    #[test]
    fn every_path_of_rdma_has_devices_and_nothing_that_rdma_lacks(
        hosts in [any_host("a", 1), any_host("b", 2)],
        request in any_request(),
        limit in prop::option::of(Just(500_u64)),
    ) {
        let [mut a, b] = hosts;
        a.bandwidth_limit_mbps = limit;
        let request = PlanRequest { option: RequestedOption::Direct, post_copy: false, ..request };
        let reach = |link: &str| Reach { link: link.into(), peer_link: link.into() };
        let Ok(plan) = plan(&a, &b, request, &["e0", "e1", "e2"].map(reach), GIB) else { return Ok(()) };
        if !plan.transfer.is_by_rdma() {
            prop_assert!(plan.reason().is_some_and(|reason| !reason.contains("asks for it")), "{:?}", plan);
            return Ok(());
        }
        prop_assert!(plan.relay().is_none() && !plan.is_encrypted() && !request.encrypt);
        prop_assert!(limit.is_none() && plan.spread() == crate::plan::Spread::InTurn);
        for host in [&a, &b] {
            prop_assert!(host.rdma.is_some_and(|rdma| rdma.connects) && host.hypervisor.rdma);
        }
        for path in plan.paths.iter() {
            let has_device = |host: &HostFacts, link: &str| {
                host.link(link).and_then(|link| link.rdma.as_ref()).is_some_and(|port| port.is_active)
            };
            prop_assert!(has_device(&a, &path.link) && has_device(&b, &path.peer_link), "{}", path);
            prop_assert!(!path.is_link_local());
        }
    }
}
