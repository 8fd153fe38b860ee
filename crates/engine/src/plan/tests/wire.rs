//! Plans in JSON.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{GIB, host};
use crate::encryption::EncryptionPolicy;
use crate::facts::{HostFacts, NoPacking};
use crate::option::RequestedOption;
use crate::path::Reach;
use crate::plan::{Plan, Reason, Request, plan};
use crate::relayed::Compressible;

/// As 0.1.0 tells it.
fn over_one_connection() -> Value {
    json!({
        "requested_option": "auto",
        "option": "tcp",
        "reason": "over one connection, which post-copy needs both ways of",
        "paths": [{
            "link": "e0", "address": "10.77.1.1", "peer_link": "e0", "peer_address": "10.77.1.2", "speed_mbps": 1000,
            "is_spare": false, "mtu_bytes": 1500,
        }],
        "spread": "in_turn",
        "multifd_channels": null,
        "is_compressed": false,
        "encryption": { "is_encrypted": true, "why": "asked for" },
        "post_copy": true,
    })
}

/// The same, over several and packed.
fn compressed() -> Value {
    changed(
        over_one_connection(),
        &[
            ("option", json!("compression")),
            ("spread", json!("routed")),
            ("multifd_channels", json!(16)),
            ("is_compressed", json!(true)),
            ("post_copy", json!(false)),
        ],
    )
}

fn changed(mut plan: Value, changes: &[(&str, Value)]) -> Value {
    for (field, value) in changes {
        plan[field] = value.clone();
    }
    plan
}

fn read(plan: Value) -> Result<Plan, String> {
    serde_json::from_value(plan).map_err(|error| error.to_string())
}

#[test]
fn a_plan_of_0_1_0_is_read_and_told_as_it_is() {
    let multichannel =
        changed(compressed(), &[("option", json!("multichannel")), ("is_compressed", json!(false))]);
    // Encrypted on several cores.
    let over_one_path = changed(multichannel.clone(), &[("spread", json!("in_turn"))]);
    let qemu_zstd = changed(multichannel.clone(), &[("option", json!("qemu-zstd-3"))]);
    let of_request = [over_one_connection(), compressed(), multichannel, over_one_path, qemu_zstd];
    for plan in of_request {
        assert_eq!(serde_json::to_value(read(plan.clone()).unwrap()).unwrap(), plan);
    }
    let mut short = over_one_connection();
    for absent in ["reason", "multifd_channels", "is_compressed", "encryption", "post_copy"] {
        short.as_object_mut().unwrap().remove(absent);
    }
    let short = read(short).unwrap();
    assert_eq!((short.relay(), short.post_copy(), short.reason()), (None, false, None));
}

#[test]
fn a_plan_that_contradicts_itself_is_refused_in_words() {
    let (one, several) = (over_one_connection(), compressed());
    let mut on_standby = one["paths"].clone();
    on_standby[0]["is_spare"] = json!(true);
    for (plan, field, value, words) in [
        (&one, "paths", json!([]), "a plan without a path"),
        (&one, "paths", on_standby, "all on standby"),
        (&one, "multifd_channels", json!(16), "over one connection, with multifd_channels"),
        (&one, "multifd_channels", json!(0), "over one connection, with multifd_channels"),
        (&one, "spread", json!("routed"), "that is routed"),
        (&one, "is_compressed", json!(true), "by tcp that is compressed"),
        (&one, "option", json!("direct"), "by direct, which this release does not do"),
        (&one, "option", json!("multichannel"), "over many connections, without multifd_channels"),
        (&several, "multifd_channels", json!(null), "over many connections, without"),
        (&several, "multifd_channels", json!(0), "over many connections, without"),
        (&several, "post_copy", json!(true), "by compression with post-copy, which goes over one"),
        (&several, "is_compressed", json!(false), "by compression that is not compressed"),
        (&several, "option", json!("multichannel"), "by multichannel that is compressed"),
        (&several, "option", json!("qemu-zstd-1"), "by qemu-zstd-1 that is compressed"),
        (&several, "option", json!("tcp"), "by tcp, which goes over one connection"),
    ] {
        let error = read(changed(plan.clone(), &[(field, value)])).unwrap_err();
        assert!(error.contains(words), "{field}: {error}");
    }
}

fn speed() -> impl Strategy<Value = Option<u64>> {
    prop::sample::select(vec![None, Some(0), Some(10), Some(1_000), Some(25_000)])
}

prop_compose! {
    /// With up to three links, of which any may belong to the management network.
    fn any_host(name: &'static str, last: u8)(
        links in prop::collection::vec((speed(), any::<[bool; 3]>()), 0..=3),
        address in prop::sample::select(vec![None, Some("10.77.200."), Some("10.77.1.10"), Some("fd00::")]),
        encryption in prop::sample::select(vec![EncryptionPolicy::Required, EncryptionPolicy::Allowed, EncryptionPolicy::Off]),
        (has_rdma, knows_rdma) in any::<(bool, bool)>(),
        idle_cores in prop::option::of(0.0..8.0),
        packing_cores in prop::option::of(0..2_u32),
        no_packing in prop::option::of(Just(NoPacking::CpusLost)),
    ) -> HostFacts {
        let mut host = host(name, last, u8::try_from(links.len()).unwrap());
        for (link, (speed_mbps, [is_trusted, has_ipv6, _])) in host.links.iter_mut().zip(&links) {
            (link.speed_mbps, link.is_trusted) = (*speed_mbps, *is_trusted);
            if *has_ipv6 {
                link.addresses.push(format!("fe80::{last}/64").parse().unwrap());
            }
        }
        let of_management = |index: usize| links[index].1[2] && index > 0;
        let (management, own) = host.links.drain(..).enumerate().partition(|(index, _)| of_management(*index));
        let links_of = |links: Vec<(usize, _)>| links.into_iter().map(|(_, link)| link).collect();
        (host.management_links, host.links) = (links_of(management), links_of(own));
        host.migration_address = address.map(|address| format!("{address}{last}").parse().unwrap());
        host.rdma_devices.extend(has_rdma.then(|| "mlx5_0".into()));
        host.hypervisor.rdma = knows_rdma;
        HostFacts { idle_cores, packing_cores, no_packing, encryption, ..host }
    }
}

prop_compose! {
    fn any_request()(
        option in prop::sample::select(RequestedOption::ALL.to_vec()),
        (encrypt, post_copy) in any::<(bool, bool)>(),
        memory in prop::option::of((0.0..=1.0, 0.0..=1.0)),
    ) -> Request {
        let memory = memory.map(|(share, left)| Compressible { share, left });
        Request { encrypt, post_copy, memory, ..option.into() }
    }
}

proptest! {
    #[test]
    fn a_plan_survives_json_and_its_reasons_become_words(
        (a, b) in (any_host("a", 1), any_host("b", 2)),
        request in any_request(),
        is_dead: [bool; 3],
    ) {
        let reach = |link: &str| Reach { link: link.into(), peer_link: link.into() };
        let Ok(made) = plan(&a, &b, request, &["e0", "e1", "e2"].map(reach), GIB) else { return Ok(()) };
        let trials = is_dead.map(|is_dead| if is_dead { Err("no answer".to_owned()) } else { Ok(()) });
        let narrowed = made.clone().narrow(&trials, "a", "b").ok();
        for plan in [made.reversed(), made].into_iter().chain(narrowed) {
            let told = serde_json::to_value(&plan).unwrap();
            let read: Plan = serde_json::from_value(told.clone()).unwrap();
            prop_assert_eq!(serde_json::to_value(&read).unwrap(), told);
            let reasons = plan.reason().map(Reason::Told).into_iter().collect();
            prop_assert_eq!(read, Plan { reasons, ..plan });
        }
    }
}
