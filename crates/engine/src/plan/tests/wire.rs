//! Plans in JSON.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::{GIB, host};
use crate::host::capabilities::{Capabilities, Committer, PostCopy};
use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::{HostFacts, NoPacking, RdmaFacts, RdmaPort};
use crate::option::RequestedOption;
use crate::paths::path::Reach;
use crate::plan::{
    LimitKeeper, MULTICHANNEL_CONNECTIONS, Packing, Parallel, Plan, PlanRequest, Protection, Reason, Spread,
    Transfer, ZstdLevel, plan,
};
use crate::transfer::encryption::{Encryption, WhyClear, WhyEncrypted};
use crate::transfer::relayed::Compressible;

/// A plan as 0.1.0 writes it.
fn over_one_connection() -> Value {
    json!({
        "requested_option": "auto",
        "option": "tcp",
        "reason": "over one connection, which post-copy needs in both directions",
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

/// The same over several connections, and compressed.
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

fn by_rdma() -> Value {
    changed(
        over_one_connection(),
        &[
            ("option", json!("direct")),
            ("encryption", json!({ "is_encrypted": false, "why": "" })),
            ("post_copy", json!(false)),
            ("limit_keeper", json!("nobody")),
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
fn a_plan_is_read_and_told_as_it_is_also_one_of_0_1_0() {
    let multichannel =
        changed(compressed(), &[("option", json!("multichannel")), ("is_compressed", json!(false))]);
    // Encrypted on several cores.
    let over_one_path = changed(multichannel.clone(), &[("spread", json!("in_turn"))]);
    let qemu_zstd = changed(multichannel.clone(), &[("option", json!("qemu-zstd-3"))]);
    assert_eq!(read(multichannel.clone()).unwrap().limit_keeper(), LimitKeeper::Agents);
    let of_request = [over_one_connection(), compressed(), multichannel, over_one_path, qemu_zstd, by_rdma()];
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
    let (one, several, direct) = (over_one_connection(), compressed(), by_rdma());
    let encrypted = changed(one.clone(), &[("post_copy", json!(false))]);
    let as_it_is =
        changed(several.clone(), &[("option", json!("multichannel")), ("is_compressed", json!(false))]);
    let packed_by_qemu = changed(as_it_is.clone(), &[("option", json!("qemu-zstd-1"))]);
    let in_clear = json!({ "is_encrypted": false, "why": "" });
    let in_clear_by_route = changed(as_it_is.clone(), &[("encryption", in_clear.clone())]);
    let packed_in_clear = changed(several.clone(), &[("encryption", in_clear)]);
    let mut on_standby = one["paths"].clone();
    on_standby[0]["is_spare"] = json!(true);
    for (plan, field, value, words) in [
        (&one, "paths", json!([]), "a plan without a path"),
        (&one, "paths", on_standby, "all on standby"),
        (&one, "multifd_channels", json!(16), "over one connection, with multifd_channels"),
        (&one, "multifd_channels", json!(0), "over one connection, with multifd_channels"),
        (&one, "spread", json!("routed"), "that is routed"),
        (&one, "is_compressed", json!(true), "by tcp that is compressed"),
        (&direct, "post_copy", json!(true), "by direct with post-copy"),
        (&direct, "encryption", one["encryption"].clone(), "by direct that is encrypted"),
        (&direct, "limit_keeper", json!("agents"), "by direct whose limit somebody keeps"),
        (&direct, "multifd_channels", json!(16), "over one connection, with multifd_channels"),
        (&direct, "spread", json!("routed"), "that is routed"),
        (&one, "option", json!("multichannel"), "over many connections, without multifd_channels"),
        (&several, "multifd_channels", json!(null), "over many connections, without"),
        (&several, "multifd_channels", json!(0), "over many connections, without"),
        (&several, "post_copy", json!(true), "by compression with post-copy, which goes over one"),
        (&several, "is_compressed", json!(false), "by compression that is not compressed"),
        (&several, "option", json!("multichannel"), "by multichannel that is compressed"),
        (&several, "option", json!("qemu-zstd-1"), "by qemu-zstd-1 that is compressed"),
        (&several, "option", json!("tcp"), "by tcp, which goes over one connection"),
        (
            &encrypted,
            "limit_keeper",
            json!("hypervisor"),
            "by tcp through the agents, with a limit that somebody else",
        ),
        (&as_it_is, "limit_keeper", json!("nobody"), "by multichannel through the agents, with a limit"),
        (
            &packed_by_qemu,
            "limit_keeper",
            json!("hypervisor"),
            "by qemu-zstd-1 through the agents, with a limit",
        ),
        (&in_clear_by_route, "limit_keeper", json!("nobody"), "by multichannel that is routed, with a limit"),
        (&in_clear_by_route, "limit_keeper", json!("hypervisor"), "that is routed, with a limit"),
        (&several, "limit_keeper", json!("nobody"), "by compression through the agents, with a limit"),
        (
            &packed_in_clear,
            "limit_keeper",
            json!("hypervisor"),
            "by compression through the agents, with a limit",
        ),
    ] {
        let error = read(changed(plan.clone(), &[(field, value)])).unwrap_err();
        assert!(error.contains(words), "{field}: {error}");
    }
}

/// All that there are, with one number of connections.
fn all_transfers() -> Vec<Transfer> {
    let keepers = [LimitKeeper::Agents, LimitKeeper::Hypervisor, LimitKeeper::Nobody];
    let why_clear = || WhyClear::Stated("asked for".into());
    let why_encrypted = || WhyEncrypted::Stated("asked for".into());
    let both = || [Encryption::Clear(why_clear()), Encryption::Encrypted(why_encrypted())];
    let clear = |limit_keeper| Protection::Clear(why_clear(), limit_keeper);
    let protections = || keepers.map(clear).into_iter().chain([Protection::Encrypted(why_encrypted())]);
    let post_copy = both().into_iter().flat_map(|encryption| {
        keepers.map(|limit_keeper| Transfer::PostCopy { encryption: encryption.clone(), limit_keeper })
    });
    let by_hypervisor = |level| protections().map(move |protection| Packing::ByHypervisor(level, protection));
    let packings = protections()
        .map(Packing::Nobody)
        .chain([ZstdLevel::One, ZstdLevel::Three].into_iter().flat_map(by_hypervisor))
        .chain(both().map(Packing::ByRelay));
    let parallel = packings.flat_map(|packing| {
        let by = |spread| Parallel::new(MULTICHANNEL_CONNECTIONS, spread, packing.clone());
        [by(Spread::InTurn), by(Spread::Routed)].into_iter().flatten().map(Transfer::Parallel)
    });
    let one_connection = protections().map(Transfer::OneConnection);
    one_connection.chain(post_copy).chain(parallel).chain([Transfer::Rdma(why_clear())]).collect()
}

/// Every combination of what a plan says of its transfer, also those that cannot be.
fn all_wire_forms() -> Vec<Value> {
    let encryption = |is_encrypted: bool| json!({ "is_encrypted": is_encrypted, "why": "asked for" });
    let fields = [
        (
            "option",
            ["tcp", "direct", "multichannel", "compression", "qemu-zstd-1", "qemu-zstd-3"]
                .map(Value::from)
                .to_vec(),
        ),
        ("spread", vec![json!("in_turn"), json!("routed")]),
        ("multifd_channels", vec![json!(null), json!(0), json!(16)]),
        ("is_compressed", vec![json!(false), json!(true)]),
        ("encryption", [false, true].map(encryption).to_vec()),
        ("post_copy", vec![json!(false), json!(true)]),
        ("limit_keeper", ["agents", "hypervisor", "nobody"].map(Value::from).to_vec()),
    ];
    fields.iter().fold(vec![over_one_connection()], |forms, (field, values)| {
        let with_each = |form: &Value| {
            values.iter().map(|value| changed(form.clone(), &[(*field, value.clone())])).collect::<Vec<_>>()
        };
        forms.iter().flat_map(with_each).collect()
    })
}

#[test]
fn every_transfer_has_a_wire_form_of_its_own_and_every_other_form_is_refused() {
    let transfers = all_transfers();
    let written = |transfer: &Transfer| {
        let plan = Plan { transfer: transfer.clone(), ..read(over_one_connection()).unwrap() };
        let mut plan = serde_json::to_value(plan).unwrap();
        plan.as_object_mut().unwrap().entry("limit_keeper").or_insert("agents".into());
        plan
    };
    let possible: Vec<Value> = transfers.iter().map(written).collect();
    for (transfer, form) in transfers.iter().zip(&possible) {
        assert_eq!(read(form.clone()).unwrap().transfer, *transfer, "{form}");
    }
    let (of_transfers, others): (Vec<Value>, Vec<Value>) =
        all_wire_forms().into_iter().partition(|form| possible.contains(form));
    assert_eq!(of_transfers.len(), transfers.len());
    for form in others {
        let error = read(form).unwrap_err();
        assert!(error.starts_with("a plan by "), "{error}");
    }
}

fn speed() -> impl Strategy<Value = Option<u64>> {
    prop::sample::select(vec![None, Some(0), Some(10), Some(1_000), Some(25_000)])
}

prop_compose! {
    /// A host with up to three links, any of which may belong to the management network.
    pub(super) fn any_host(name: &'static str, last: u8)(
        links in prop::collection::vec((speed(), any::<[bool; 3]>()), 0..=3),
        address in prop::sample::select(vec![None, Some("10.77.200."), Some("10.77.1.10"), Some("fd00::")]),
        encryption in prop::sample::select(vec![EncryptionPolicy::Required, EncryptionPolicy::Allowed, EncryptionPolicy::Off]),
        (has_rdma, knows_rdma, of_links) in (any::<bool>(), prop::bool::weighted(0.8), any::<[bool; 3]>()),
        rdma in any_rdma(),
        capabilities in any_capabilities(),
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
        for (link, is_active) in host.links.iter_mut().chain(&mut host.management_links).zip(of_links) {
            link.rdma = has_rdma.then(|| RdmaPort { device: "mlx5_0".into(), is_active });
        }
        host.rdma = rdma;
        (host.hypervisor.rdma, host.hypervisor.capabilities) = (knows_rdma, capabilities);
        HostFacts { idle_cores, packing_cores, no_packing, encryption, ..host }
    }
}

/// Facts that mostly suffice for RDMA.
fn any_rdma() -> impl Strategy<Value = Option<RdmaFacts>> {
    let lock = prop::option::weighted(0.2, prop::sample::select(vec![8 << 20, 2 * GIB]));
    let facts = (prop::bool::weighted(0.8), lock)
        .prop_map(|(connects, memory_lock_bytes)| RdmaFacts { connects, memory_lock_bytes });
    prop::option::weighted(0.8, facts)
}

/// Most capabilities, so that there is a plan now and then.
pub(super) fn any_capabilities() -> impl Strategy<Value = Capabilities> {
    let can = || prop::bool::weighted(0.8);
    let post_copy =
        (any::<bool>(), can()).prop_map(|(in_parallel, encrypts)| PostCopy { in_parallel, encrypts });
    let commits = prop_oneof![9 => Just(Committer::Agents), 1 => Just(Committer::Hypervisor)];
    let rest = (can(), can(), can(), can(), can(), can(), can(), can(), can());
    (commits, prop::option::weighted(0.8, post_copy), rest).prop_map(|(commits, post_copy, rest)| {
        Capabilities {
            commits,
            pauses_before_switchover: rest.0,
            connections_are_ours: rest.1,
            tells_connections_apart: rest.2,
            sends_in_parallel: rest.3,
            packs: rest.4,
            is_relayed: rest.5,
            keeps_limit: rest.6,
            post_copy,
            copies_disks: rest.7,
            zero_pages_in_parallel: rest.8,
        }
    })
}

prop_compose! {
    pub(super) fn any_request()(
        option in prop::sample::select(RequestedOption::ALL.to_vec()),
        (encrypt, post_copy) in any::<(bool, bool)>(),
        memory in prop::option::of((0.0..=1.0, 0.0..=1.0)),
    ) -> PlanRequest {
        let memory = memory.map(|(share, left)| Compressible { share, left });
        PlanRequest { encrypt, post_copy, memory, ..option.into() }
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
            let sent = serde_json::to_value(&plan).unwrap();
            let read: Plan = serde_json::from_value(sent.clone()).unwrap();
            prop_assert_eq!(serde_json::to_value(&read).unwrap(), sent);
            let reasons = plan.reason().map(Reason::Stated).into_iter().collect();
            let (spread, relay, limit_keeper) = (plan.spread(), plan.relay(), plan.limit_keeper());
            prop_assert_eq!((read.spread(), read.relay(), read.limit_keeper()), (spread, relay, limit_keeper));
            prop_assert_eq!(read.encryption().is_encrypted(), plan.is_encrypted());
            prop_assert_eq!(read.encryption().why(), plan.encryption().why());
            let transfer = read.transfer.clone();
            prop_assert_eq!(read, Plan { transfer, reasons, ..plan });
        }
    }
}
