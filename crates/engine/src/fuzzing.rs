//! Decisions that depend on what a peer says, as functions of bytes: each asserts what holds whatever the peer says,
//! and panics where it does not. `make fuzz` looks for such bytes.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::check::facts::CheckFacts;
use crate::check::path_report::PathReport;
use crate::check::sizes::{Arrived, first_sizes, next_sizes};
use crate::check::trial::{ClockDifference, PacketTrial, PathTrial};
use crate::check::vm::{CpuFeatures, FileIdentity, FilePurpose, FileState, VmCheck, VmFacts, VmFile, VmFit};
use crate::check::{Pair, check, paths_to_try, refusal, worth_telling};
use crate::drain;
use crate::drain::view::{DrainView, LimitView, PathView, PlacedVm, Placement, TargetView, VmView};
use crate::finding::Finding;
use crate::host::capabilities::Capabilities;
use crate::host::facts::{HostFacts, MemoryNeeds, MigrationLink};
use crate::option::RequestedOption;
use crate::paths::path::{Path, Reach, links_to_try};
use crate::plan::{Plan, PlanRequest, plan};
use crate::transfer::relayed::{Compressible, Verdict};

/// The memory for texts about an answer of a few kilobytes, and for lists of it.
pub const ANSWERS_HOLD_BYTES: usize = 8 << 20;

/// The most rounds of packets of one size after the other.
const ROUNDS_MAX: usize = 8;

const MEMORY_BYTES: u64 = 8 << 30;

/// This host.
static OURS: LazyLock<CheckFacts> =
    LazyLock::new(|| serde_json::from_str(include_str!("fuzzing/ours.json")).expect("facts of a host"));

/// Everything that a peer is asked before a migration or a drain to it.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Answers {
    facts: CheckFacts,
    fit: VmFit,
    /// For each path, what has arrived of the packets of each size.
    arrived: Vec<Arrived>,
    /// The numbers of the links that have answered over link-local addresses.
    reached: Vec<(usize, usize)>,
    vms: Vec<PlacedVm>,
    limit_mbps: Option<u64>,
}

/// Answers of a peer, as JSON.
///
/// Holds: a plan goes over links of both hosts, each once. What is predicted is a number. What is told of a peer
/// whose facts are plausible can be shown on a terminal. A plan for a drain is one that may be carried out.
pub fn answers(data: &[u8]) {
    let Ok(answers) = serde_json::from_slice::<Answers>(data) else { return };
    let is_plausible = answers.facts.plausible("b").is_ok();
    let plans = plans(&answers, is_plausible);
    if is_plausible && answers.fit.plausible("b", vm().files.len(), vm().needs.len()).is_ok() {
        findings(&answers);
    }
    for (option, plan) in plans {
        drain_to(&answers, option, &plan);
    }
}

/// Answers of a peer that is like this host.
pub fn answers_seeds() -> Vec<Vec<u8>> {
    let theirs =
        include_str!("fuzzing/ours.json").replace(r#""name": "a""#, r#""name": "b""#).replace(".11", ".12");
    let facts: Value = serde_json::from_str(&theirs).expect("facts of a host");
    let vm =
        json!({"name": "db", "needs_bytes": 1 << 30, "placement": {"apart": ["db"], "together": ["shop"]}});
    let healthy = json!({
        "facts": facts, "fit": fit(), "arrived": [{"128": 3, "1500": 3}, {"128": 3, "1400": 2}],
        "reached": [[2, 2]], "vms": [vm], "limit_mbps": 5000,
    });
    let mut other = healthy.clone();
    other["facts"]["host"]["migration_address"] = json!(null);
    other["facts"]["host"]["no_migration_address"] = json!({"why": "ipv6_off"});
    let capabilities = Capabilities { connections_are_ours: false, ..Capabilities::ALL };
    other["facts"]["host"]["hypervisor"]["capabilities"] = json!(capabilities);
    other["fit"]["obstacle"] = json!({"machine_unknown": {"newest": "pc-q35-7.2"}});
    other["fit"]["cpu"]["lacking"] = json!(["avx512f"]);
    [healthy, other].map(|seed| seed.to_string().into_bytes()).to_vec()
}

fn plans(answers: &Answers, is_plausible: bool) -> Vec<(RequestedOption, Plan)> {
    let (ours, theirs) = (&OURS.host, &answers.facts.host);
    let reaches = reaches(ours, theirs, &answers.reached);
    let memory = Some(Compressible { share: 0.9, left: 0.4 });
    let mut plans = vec![];
    for option in RequestedOption::ALL {
        links_to_try(ours, theirs, option);
        for encrypt in [false, true] {
            let request = PlanRequest { option, encrypt, memory, ..PlanRequest::default() };
            let made = plan(ours, theirs, request, &reaches, MEMORY_BYTES);
            if is_plausible {
                let reason =
                    made.as_ref().map_or_else(ToString::to_string, |plan| format!("{:?}", plan.reason()));
                assert!(!reason.contains(char::is_control), "{reason:?}");
            }
            let Ok(plan) = made else { continue };
            check_plan(&plan, theirs);
            plans.push((option, plan));
        }
    }
    plans
}

fn reaches(ours: &HostFacts, theirs: &HostFacts, reached: &[(usize, usize)]) -> Vec<Reach> {
    let name = |host: &HostFacts, number: usize| host.links.get(number).map(|link| link.name.clone());
    let reach = |(link, peer_link): &(usize, usize)| {
        Some(Reach { link: name(ours, *link)?, peer_link: name(theirs, *peer_link)? })
    };
    reached.iter().filter_map(reach).collect()
}

fn check_plan(plan: &Plan, theirs: &HostFacts) {
    assert!(plan.carrying().next().is_some());
    plan.carried_mbps();
    for (number, path) in plan.paths.iter().enumerate() {
        let has = |host: &HostFacts, link: &str, address| {
            let mut links =
                host.links.iter().chain(&host.management_links).filter(|other| other.name == link);
            links.any(|link| link.addresses.iter().any(|net| net.addr() == address))
        };
        assert!(has(&OURS.host, &path.link, path.address));
        assert!(has(theirs, &path.peer_link, path.peer_address));
        let card = |link: &str| OURS.host.link(link).map(MigrationLink::card);
        assert!(plan.paths[..number].iter().all(|other| card(&other.link) != card(&path.link)));
    }
    let trials: Vec<_> =
        (0..plan.paths.len()).map(|number| [Ok(()), Err("silent".into())][number % 2].clone()).collect();
    let narrowed = plan.clone().narrow(&trials, "a", "b").expect("the first path is as it should be");
    assert!(narrowed.carrying().next().is_some());
}

fn findings(answers: &Answers) {
    let theirs = &answers.facts;
    let reaches = reaches(&OURS.host, &theirs.host, &answers.reached);
    let paths = paths_to_try(&OURS, theirs, &reaches);
    let trials: Vec<PathTrial> =
        paths.iter().enumerate().map(|(number, path)| trial(answers, number, path.clone())).collect();
    let clock = ClockDifference::measured(1_800_000_000_000, theirs.clock_unix_ms, 1_800_000_000_040);
    let vms = [VmCheck { vm: vm(), fit: answers.fit.clone() }];
    let tried = Pair {
        source: &OURS,
        target: theirs,
        paths: &paths,
        trials: Some(&trials),
        vms: &vms,
        multichannel: true,
        may_use_all: true,
        clock,
    };
    check(tried).iter().for_each(check_finding);
    refusal(&worth_telling(check(Pair { trials: None, multichannel: false, ..tried })));
    for trial in trials {
        PathReport::of(trial, &OURS, theirs);
    }
}

/// Both ends try a path like this: each sends as long as it learns something from it.
fn trial(answers: &Answers, number: usize, path: Path) -> PathTrial {
    let mtu = |facts: &CheckFacts, link: &str| {
        let mtu = facts.host.link(link).map_or(0, |link| link.mtu);
        u16::try_from(mtu).unwrap_or(u16::MAX)
    };
    let arrived = |number: usize| answers.arrived.get(number).cloned().unwrap_or_default();
    let packets = |mtu_bytes: u16, number: usize| {
        let (mut sent, arrived) = (first_sizes(mtu_bytes), arrived(number));
        for _ in 0..ROUNDS_MAX {
            let sizes = next_sizes(mtu_bytes, &sent, &arrived);
            assert!(sizes.len() <= 16 && sizes.iter().all(|size| *size < mtu_bytes));
            sent.extend(sizes);
        }
        PacketTrial::sum_up(&sent, 3, &arrived)
    };
    PathTrial {
        connection_error: (answers.arrived.len() > 4).then(|| "no answer".into()),
        forward: packets(mtu(&OURS, &path.link), 2 * number),
        backward: packets(mtu(&answers.facts, &path.peer_link), 2 * number + 1),
        round_trip_ms: Some(0.2),
        tcp_round_trip: None,
        path,
    }
}

fn check_finding(finding: &Finding) {
    for text in [&finding.what, &finding.effect, &finding.remedy] {
        assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
        assert!(text.len() < 16 << 10);
    }
}

/// The agent sees a target like this: see `look_at` in its `drain/view.rs`.
fn drain_to(answers: &Answers, option: RequestedOption, plan: &Plan) {
    let theirs = &answers.facts.host;
    let relay =
        PlanRequest::from(option).relay_means(&OURS.host, theirs, plan.carrying(), plan.is_encrypted());
    if let Some(Verdict::Compressed { wire_share }) = relay.map(|means| means.verdict(None)) {
        assert!(wire_share > 0.0 && wire_share < 1.0);
    }
    let needs = |huge_page_mib| MemoryNeeds::of(MEMORY_BYTES, huge_page_mib);
    for pages in [None, Some(2), Some(1024)].map(|size_mib| needs(size_mib).huge_pages).into_iter().flatten()
    {
        theirs.huge_pages_of(pages.size_mib);
    }
    let vm = |name: &str| VmView {
        name: name.into(),
        needs_bytes: needs(None).bytes,
        memory_bytes: MEMORY_BYTES,
        placement: Placement::default(),
        immovable: None,
        refusals: BTreeMap::new(),
        memory: None,
        copies: BTreeMap::new(),
    };
    let path = |path: &Path| PathView {
        link: path.link.clone(),
        link_mbps: OURS.host.link(&path.link).and_then(|link| link.speed_mbps),
        mbps: path.speed_mbps,
    };
    let target = TargetView {
        name: theirs.name.clone(),
        unavailable: None,
        warnings: vec![],
        memory_available_bytes: theirs.memory_available_bytes,
        file_systems: vec![],
        makes_room: answers.vms.len() > 2,
        makes_room_now: answers.vms.len() > 3,
        vms: answers.vms.clone(),
        paths_mbps: [plan.carried_mbps(), answers.limit_mbps].into_iter().flatten().min().unwrap_or(0),
        paths: plan.carrying().map(path).collect(),
        limit: LimitView { mbps: answers.limit_mbps, later: vec![] },
        free_cores: relay.map(|relay| relay.source_cores.min(relay.target_cores)),
        relay,
        no_post_copy: None,
        path_history: None,
    };
    let view = DrainView {
        host: "a".into(),
        vms: vec![vm("web"), vm("mail")],
        targets: vec![target],
        limit: LimitView::default(),
    };
    let plan = drain::plan::plan(&view, None);
    assert_eq!(drain::lint::lint(&view, &plan), []);
}

/// A running VM of this host.
fn vm() -> VmFacts {
    let file = |path: &str, purpose| VmFile { path: path.into(), purpose, state: FileState::Present(disk()) };
    VmFacts {
        name: "web".into(),
        memory_bytes: MEMORY_BYTES,
        padding_bytes: 0,
        huge_page_mib: Some(2),
        machine: "pc-q35-8.1".into(),
        cpu_model: "EPYC".into(),
        qemu_version: "7.2.22".into(),
        cpu: Some(CpuFeatures { known: true, ..CpuFeatures::default() }),
        files: vec![file("/boot/linux", FilePurpose::Boot), file("/srv/web.qcow2", FilePurpose::Disk)],
        obstacles: vec![],
        doubts: vec![],
        needs: vec![],
    }
}

fn fit() -> VmFit {
    let cpu = CpuFeatures { known: true, ..CpuFeatures::default() };
    let files = vec![FileState::Present(disk()); vm().files.len()];
    VmFit { cpu: Some(cpu), files, ..VmFit::default() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fuzzed_holds_for_its_seeds() {
        for seed in answers_seeds() {
            let understood: Answers = serde_json::from_slice(&seed).unwrap();
            assert_eq!(understood.facts.plausible("b"), Ok(()));
            answers(&seed);
        }
    }
}
