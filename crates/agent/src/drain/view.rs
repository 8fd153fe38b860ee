//! What is known when a drain is planned: the VMs here, the hosts that may take them, and earlier migrations to these.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::check::vm::Notice;
use drainpipe_engine::drain::disks::DrainedDisk;
use drainpipe_engine::drain::status::DrainStatus;
use drainpipe_engine::drain::view::{
    DrainView, LimitView, PathView, PlacedVm, Placement, TargetView, VmView,
};
use drainpipe_engine::estimate::cores::{busy_warnings, cores_had};
use drainpipe_engine::finding::Finding;
use drainpipe_engine::finding::code::FindingCode;
use drainpipe_engine::format::bound;
use drainpipe_engine::host::facts::{MemoryNeeds, MigrationLink};
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::plan::{NoPostCopy, Plan, PlanRequest};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{self, GroupName, VmSpec};
use drainpipe_hypervisor::{Machine, RunState, Unmanaged};
use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tracing::warn;

use super::Drains;
use super::disks::{self, Copies, OwnDisks};
use crate::check;
use crate::outgoing::memory_look;
use crate::outgoing::{Meeting, meet};
use crate::paths::path_history::{self, Learnt};
use crate::vms::hypervisors::manager_of_all;
use crate::vms::{PresentVm, QMP_DEADLINE};
use drainpipe_api_types::{BandwidthView, DrainKind, DrainRequest, VmList, VmState};

/// How long one target may take to say what it is, what it has and which VMs it would take.
const TARGET_DEADLINE: Duration = Duration::from_secs(10);

/// Targets and VMs that are looked at at a time.
const LOOKS_AT_ONCE: usize = 32;

/// Looks at this host and at all that may take its VMs.
pub(super) async fn look(drains: &Drains, request: &DrainRequest) -> DrainView {
    // Before what is here: one that arrives meanwhile must not be missing in both.
    let expected = drains.incoming.entries.definitions_but_from(request.swap_with.as_deref());
    let present = drains.vms.present();
    let coming = coming(expected, &present);
    let swap = Swap::look(drains, request).await;
    let present: Vec<PresentVm> =
        present.into_iter().filter(|vm| !swap.vms.contains(vm.definition.name.as_str())).collect();
    let running: Vec<Arc<dyn Machine>> = present.iter().filter_map(|vm| vm.vmm.clone()).collect();
    let disks = disks::look(request, &running).await;
    let leaving = RunningVms { running: &running, disks: &disks };
    let names = targets(drains, request);
    let turns = Semaphore::new(LOOKS_AT_ONCE);
    let targets = names.iter().map(|name| async {
        let _turn = turns.acquire().await;
        look_at(drains, name, request, leaving, &swap).await
    });
    let vms = present.into_iter().map(|vm| async {
        let _turn = turns.acquire().await;
        drains.transfer.first_sessions.begin_step(vm.vmm.as_deref());
        look_at_vm(vm).await
    });
    let (targets, vms) = tokio::join!(join_all(targets), join_all(vms));
    let mut vms: Vec<VmView> = vms.into_iter().chain(coming).collect();
    vms.extend(drains.vms.unmanaged().into_iter().filter_map(unmanaged));
    let mut views = vec![];
    for target in targets {
        for vm in &mut vms {
            if let Some(why) = target.refusals.get(&vm.name) {
                vm.refusals.insert(target.view.name.clone(), why.clone());
            }
            if let Some(copies) = target.copies.get(&vm.name) {
                vm.copies.insert(target.view.name.clone(), copies.clone());
            }
        }
        views.push(target.view);
    }
    forget_leaving(&mut views, &vms);
    DrainView {
        host: drains.host.name().into(),
        vms,
        targets: views,
        limit: limit_of(drains.transfer.bandwidth.view()),
    }
}

/// What is on its way here still runs on the host that it leaves: it does not go there.
fn forget_leaving(targets: &mut [TargetView], here: &[VmView]) {
    let is_coming =
        |name: &str| here.iter().any(|vm| vm.name == name && vm.immovable.as_deref() == Some(COMING));
    for target in targets {
        target.vms.retain(|placed| !is_coming(&placed.name));
    }
}

/// The hosts that were named, or all that this one knows.
fn targets(drains: &Drains, request: &DrainRequest) -> Vec<String> {
    let named: Vec<String> = super::targets_named(request).cloned().collect();
    if named.is_empty() {
        return drains.host.peers().into_iter().map(|peer| peer.name).collect();
    }
    named
}

/// What this host has to know when it changes places with another one.
#[derive(Debug, Default)]
struct Swap {
    partner: Option<String>,
    /// VMs that came from there, or are to come: they stay here.
    vms: BTreeSet<String>,
    /// Whether room may come free there.
    partner_makes_room: bool,
    /// Whether a VM of its own is on its way from there.
    partner_makes_room_now: bool,
    /// Why it is not known which VMs came from there. Then none goes.
    unknown: Option<String>,
}

impl Swap {
    /// Asked once it is known which VMs are here: what comes later is none of them.
    async fn look(drains: &Drains, request: &DrainRequest) -> Self {
        let Some(partner) = &request.swap_with else { return Self::default() };
        let swapped_in = drains.journal.swapped_in().unwrap_or_else(|error| {
            warn!(%error, "only the other host knows which VMs came by the swap");
            vec![]
        });
        let mut vms: BTreeSet<String> = swapped_in.into_iter().collect();
        vms.extend(drains.incoming.entries.names_from(partner));
        let other = match drains.peers.target(partner) {
            Ok(peer) => peer.get_within::<drainpipe_api_types::DrainView>("/v1/drain", TARGET_DEADLINE).await,
            Err(problem) => Err(problem),
        };
        let (other, unknown) = match other {
            Ok(other) => (Some(other), None),
            Err(problem) => (None, Some(problem.message)),
        };
        let other = other.filter(|other| {
            other.kind == Some(DrainKind::Drain) && other.swap_with.as_deref() == Some(drains.host.name())
        });
        // One that has not begun yet will.
        let partner_makes_room = other.as_ref().is_none_or(|other| other.ended_at.is_none());
        let status = other.and_then(|other| other.status);
        let partner_makes_room_now = status.as_ref().is_some_and(DrainStatus::has_vm_under_way);
        let moves = status.map(|status| status.moves).unwrap_or_default();
        vms.extend(moves.into_iter().filter(|one| one.target == drains.host.name()).map(|one| one.vm));
        Self { partner: Some(partner.clone()), vms, partner_makes_room, partner_makes_room_now, unknown }
    }

    fn is_with(&self, name: &str) -> bool {
        self.partner.as_deref() == Some(name)
    }
}

async fn look_at_vm(vm: PresentVm) -> VmView {
    let immovable = match (&vm.busy, &vm.vmm) {
        (Some(busy), _) => Some(busy.clone()),
        (None, Some(vmm)) => why_immovable(&**vmm).await,
        (None, None) => Some("its QEMU has just ended".into()),
    };
    let memory = match vm.vmm.filter(|_| immovable.is_none()) {
        Some(vmm) => memory_look::sample(&*vmm).await,
        None => None,
    };
    VmView { memory, ..described(&vm.definition, immovable) }
}

fn described(definition: &VmSpec, immovable: Option<String>) -> VmView {
    let memory_bytes = definition.memory_mib << 20;
    VmView {
        name: definition.name.to_string(),
        needs_bytes: MemoryNeeds::of(memory_bytes, definition.huge_page_mib).bytes,
        memory_bytes,
        placement: placement(&definition.placement),
        immovable,
        refusals: BTreeMap::new(),
        memory: None,
        copies: BTreeMap::new(),
    }
}

fn placement(placement: &spec::Placement) -> Placement {
    let names = |groups: &BTreeSet<GroupName>| groups.iter().map(ToString::to_string).collect();
    Placement {
        stays: placement.stays.clone(),
        apart: names(&placement.apart),
        together: names(&placement.together),
    }
}

async fn why_immovable(vmm: &dyn Machine) -> Option<String> {
    match vmm.run_state(QMP_DEADLINE).await {
        Ok(RunState::Running) => why_kept(vmm).await,
        Ok(state) => Some(format!("it is {state}; only a running VM moves")),
        Err(error) => Some(format!("its QEMU does not answer: {error}")),
    }
}

/// What its own host says against moving it to whatever other.
async fn why_kept(vmm: &dyn Machine) -> Option<String> {
    let obstacles = match vmm.demands(QMP_DEADLINE).await {
        Ok(demands) => demands.obstacles,
        Err(error) => return Some(format!("its owner's daemon does not answer: {error}")),
    };
    let refusal = |notice: &Notice| format!("cannot move: {}; {}", notice.what, notice.remedy);
    let all: Vec<String> = obstacles.iter().map(refusal).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// A VM without a specification.
fn unmanaged(one: Unmanaged) -> Option<VmView> {
    one.run_state?;
    let memory_bytes = one.memory_mib << 20;
    Some(VmView {
        name: one.name,
        memory_bytes,
        needs_bytes: MemoryNeeds::of(memory_bytes, None).bytes,
        placement: Placement::default(),
        immovable: Some(format!("cannot move: {}", one.why)),
        refusals: BTreeMap::new(),
        memory: None,
        copies: BTreeMap::new(),
    })
}

/// Why a VM cannot be moved that has not arrived yet.
const COMING: &str = "it is on its way here: drain again when it has arrived";

/// VMs that were let come before this host was cordoned, and are not here yet.
fn coming(expected: Vec<VmSpec>, present: &[PresentVm]) -> Vec<VmView> {
    let is_here = |expected: &VmSpec| present.iter().any(|vm| vm.definition.name == expected.name);
    let coming = expected.into_iter().filter(|definition| !is_here(definition));
    coming.map(|definition| described(&definition, Some(COMING.into()))).collect()
}

/// The VMs that run here, and their disks where these may be copied.
#[derive(Clone, Copy)]
struct RunningVms<'a> {
    running: &'a [Arc<dyn Machine>],
    disks: &'a OwnDisks,
}

/// A target, and of some of the VMs, by their names: why it would not take them, and which disks would be copied.
struct LookedAt {
    view: TargetView,
    refusals: BTreeMap<String, String>,
    copies: BTreeMap<String, Vec<DrainedDisk>>,
}

async fn look_at(
    drains: &Drains,
    name: &str,
    asked_for: &DrainRequest,
    leaving: RunningVms<'_>,
    swap: &Swap,
) -> LookedAt {
    let (journal, free_cores) = (&drains.journal, drains.host.idle_cores.known());
    let learnt = path_history::of_target(journal, free_cores, name, asked_for.option);
    let learnt = learnt.unwrap_or_else(|problem| {
        warn!(%problem, "earlier migrations to {name} cannot be read");
        Learnt::default()
    });
    let Learnt { saved_mbps, compressed_slower, .. } = learnt;
    let request =
        PlanRequest { saved_mbps, compressed_slower, encrypt: asked_for.encrypt, ..asked_for.option.into() };
    let asked = match timeout(TARGET_DEADLINE, ask(drains, name, request, leaving, swap)).await {
        Ok(asked) => asked,
        Err(_) => Err(Problem::failed(format!("no answer within {}", bound(TARGET_DEADLINE)))),
    };
    let mut looked_at = asked.unwrap_or_else(|problem| LookedAt {
        view: TargetView {
            name: name.into(),
            unavailable: Some(problem.message),
            warnings: vec![],
            memory_available_bytes: 0,
            file_systems: vec![],
            makes_room: false,
            makes_room_now: false,
            vms: vec![],
            paths_mbps: 0,
            paths: vec![],
            limit: LimitView::default(),
            free_cores: None,
            relay: None,
            no_post_copy: None,
            path_history: None,
        },
        refusals: BTreeMap::new(),
        copies: BTreeMap::new(),
    });
    looked_at.view.path_history = learnt.path_history;
    if swap.is_with(name) {
        looked_at.view.makes_room = swap.partner_makes_room;
        looked_at.view.makes_room_now = swap.partner_makes_room_now;
        looked_at.view.unavailable = looked_at.view.unavailable.or_else(|| swap.unknown.clone());
    }
    looked_at
}

async fn ask(
    drains: &Drains,
    name: &str,
    request: PlanRequest,
    leaving: RunningVms<'_>,
    swap: &Swap,
) -> Result<LookedAt, Problem> {
    let RunningVms { running, disks } = leaving;
    let peer = drains.peers.target(name)?;
    let largest = running.iter().map(|vmm| vmm.spec().memory_kib() << 10).max();
    let definitions = running.iter().map(|vmm| vmm.spec().spec());
    let meeting =
        meet(&drains.outgoing, &peer, name, manager_of_all(definitions), request, largest.unwrap_or(0))
            .await?;
    let list = peer.get::<VmList>("/v1/vms");
    let limit = peer.get::<BandwidthView>("/v1/bandwidth");
    let checked = check::ask_of_vms(&drains.checks, &peer, name, running);
    let (list, limit, checked) = tokio::try_join!(list, limit, checked)?;
    let copies = Copies::to(name, &meeting, running, disks, &checked);
    let Meeting { source, target, plan, .. } = meeting;
    let plan = Plan { disks: copies.disks(), ..plan };
    let findings = check::judge(&drains.checks, &peer, name, checked, &plan).await?;
    let limits = [drains.transfer.bandwidth.limit_mbps(), limit.limit_mbps];
    // The plan knows the partner's memory by itself, and that more of it may become free.
    let counts = |finding: &&Finding| !swap.is_with(name) || !is_of_memory(finding);
    let (mut refusals, all_refused) = refusals(findings.iter().filter(counts));
    // Why a disk is not copied says more than that it is missing.
    refusals.extend(copies.refusals);
    let swaps = swap.is_with(name) && target.swap_with.as_deref() == Some(drains.host.name());
    let cordoned = (target.cordoned && !swaps).then(|| {
        format!(
            "it is cordoned: `drainpipe resume {name}` ends that; `--swap` on both hosts lets them exchange their VMs"
        )
    });
    let no_post_copy = NoPostCopy::between(&source, &target.facts, plan.is_encrypted());
    let view = TargetView {
        name: name.into(),
        unavailable: cordoned.or(all_refused),
        warnings: findings
            .iter()
            .filter(|finding| is_of_way(finding))
            .map(in_a_line)
            .chain(busy_warnings(&source, &target.facts))
            .collect(),
        memory_available_bytes: target.facts.memory_available_bytes,
        file_systems: copies.file_systems,
        makes_room: false,
        makes_room_now: false,
        vms: list.vms.iter().filter(|vm| vm.state != VmState::Stopped).map(placed).collect(),
        paths_mbps: carried_mbps(&plan, limits.into_iter().flatten().min()),
        paths: paths(&plan, |link| source.link(link)),
        limit: limit_of(limit),
        free_cores: cores_had(&source, &target.facts),
        relay: request.relay_means(&source, &target.facts, plan.carrying(), plan.is_encrypted()),
        no_post_copy,
        path_history: None,
    };
    Ok(LookedAt { view, refusals, copies: copies.of_vms })
}

fn placed(vm: &drainpipe_api_types::VmView) -> PlacedVm {
    PlacedVm {
        name: vm.name.clone(),
        needs_bytes: MemoryNeeds::of(vm.memory_mib.saturating_mul(1 << 20), vm.huge_page_mib).bytes,
        placement: placement(&vm.placement),
    }
}

fn is_of_memory(finding: &Finding) -> bool {
    finding.is(FindingCode::VmMemoryShort)
}

/// Other findings each migration tells of itself; this one is of all that depends on the management network meanwhile.
fn is_of_way(finding: &Finding) -> bool {
    finding.is(FindingCode::ManagementLink)
}

fn in_a_line(finding: &Finding) -> String {
    format!("{}: {}; {}", finding.what, finding.effect, finding.remedy)
}

/// Why single VMs are refused, by their names; and why all of them are.
fn refusals<'a>(findings: impl Iterator<Item = &'a Finding>) -> (BTreeMap<String, String>, Option<String>) {
    let (mut of_vms, mut of_all) = (BTreeMap::<String, String>::new(), None);
    for finding in findings.filter(|finding| finding.refuses_migration) {
        let why = format!("{}; {}", finding.what, finding.remedy);
        let vms: Vec<&String> = finding.places.iter().filter_map(|place| place.vm.as_ref()).collect();
        if vms.is_empty() {
            of_all.get_or_insert(why.clone());
        }
        for vm in vms {
            let known = of_vms.entry(vm.clone()).or_default();
            *known = if known.is_empty() { why.clone() } else { format!("{known}. {why}") };
        }
    }
    (of_vms, of_all)
}

/// What the plan's paths carry together within the hosts' limits; 0 where that is not known.
fn carried_mbps(plan: &Plan, limit_mbps: Option<u64>) -> u64 {
    [plan.carried_mbps(), limit_mbps].into_iter().flatten().min().unwrap_or(0)
}

/// The paths that carry at once, each with the card of this host that it takes, which VLANs share, and its speed where
/// that is known.
fn paths<'a>(plan: &Plan, own: impl Fn(&str) -> Option<&'a MigrationLink>) -> Vec<PathView> {
    let view = |path: &Path| PathView {
        link: own(&path.link).map_or(path.link.as_str(), MigrationLink::card).into(),
        link_mbps: own(&path.link).and_then(|link| link.speed_mbps),
        mbps: path.speed_mbps,
    };
    plan.carrying().map(view).collect()
}

fn limit_of(view: BandwidthView) -> LimitView {
    LimitView { mbps: view.limit_mbps, later: view.later }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use drainpipe_engine::finding::{Place, Severity};
    use drainpipe_engine::option::RequestedOption;
    use drainpipe_engine::plan::{
        LimitKeeper, MULTICHANNEL_CONNECTIONS, Packing, Parallel, Paths, Protection, Spread, Transfer,
    };
    use drainpipe_engine::transfer::encryption::WhyClear;
    use serde_json::json;

    use super::*;

    fn finding(what: &str, place: Place, refuses_migration: bool) -> Finding {
        Finding {
            severity: Severity::Error,
            code: "of-a-test".into(),
            places: vec![place],
            what: what.into(),
            effect: String::new(),
            remedy: "mend it".into(),
            refuses_migration,
            fix: None,
        }
    }

    #[test]
    fn a_vm_on_its_way_here_is_not_on_its_way_to_where_it_still_runs() {
        let placed = |name: &str| json!({ "name": name, "needs_bytes": 1, "placement": {} });
        let target = json!({
            "name": "a", "memory_available_bytes": 1, "vms": [placed("w"), placed("there")], "paths_mbps": 1
        });
        let mut targets: Vec<TargetView> = vec![serde_json::from_value(target).unwrap()];
        let here = |name: &str, immovable: &str| -> VmView {
            let vm = json!({
                "name": name, "needs_bytes": 1, "memory_bytes": 1, "placement": {}, "immovable": immovable,
                "refusals": {}
            });
            serde_json::from_value(vm).unwrap()
        };
        forget_leaving(&mut targets, &[here("w", COMING), here("there", "it is being moved")]);
        let left: Vec<&str> = targets[0].vms.iter().map(|vm| vm.name.as_str()).collect();
        assert_eq!(left, ["there"], "which leaves this host");
    }

    #[test]
    fn what_refuses_one_vm_refuses_no_other_and_what_names_none_refuses_all() {
        let of_one = [
            finding("no disk", Place::vm("b", "web"), true),
            finding("no CPU", Place::vm("b", "web"), true),
            finding("slow", Place::host("b"), false),
        ];
        let (of_vms, of_all) = refusals(of_one.iter());
        assert_eq!((of_vms.len(), of_all), (1, None));
        assert_eq!(of_vms["web"], "no disk; mend it. no CPU; mend it");
        let (of_vms, of_all) = refusals([finding("not a peer", Place::host("b"), true)].iter());
        assert_eq!((of_vms.len(), of_all.as_deref()), (0, Some("not a peer; mend it")));
    }

    fn plan(spread: Spread, speeds_mbps: &[Option<u64>]) -> Plan {
        let path = |speed_mbps: &Option<u64>| Path {
            link: "e0".into(),
            address: Ipv4Addr::LOCALHOST.into(),
            peer_link: "e0".into(),
            peer_address: Ipv4Addr::LOCALHOST.into(),
            speed_mbps: *speed_mbps,
            is_standby: false,
            mtu_bytes: None,
        };
        let protection = Protection::Clear(WhyClear::NotRequired, LimitKeeper::Agents);
        Plan {
            requested_option: RequestedOption::Auto,
            transfer: Transfer::Parallel(
                Parallel::new(MULTICHANNEL_CONNECTIONS, spread, Packing::Nobody(protection)).unwrap(),
            ),
            paths: Paths::try_from(speeds_mbps.iter().map(path).collect::<Vec<_>>()).unwrap(),
            disks: vec![],
            reasons: vec![],
        }
    }

    #[test]
    fn paths_carry_what_they_can_within_the_limit() {
        let two = [Some(1_000), Some(400)];
        assert_eq!(carried_mbps(&plan(Spread::Routed, &two), None), 1_400);
        assert_eq!(carried_mbps(&plan(Spread::InTurn, &two), None), 1_000);
        assert_eq!(carried_mbps(&plan(Spread::Routed, &two), Some(500)), 500);
        assert_eq!(carried_mbps(&plan(Spread::Routed, &[Some(1_000), None]), None), 0);
        assert_eq!(carried_mbps(&plan(Spread::Routed, &[None]), Some(500)), 500);
    }

    #[test]
    fn only_paths_that_carry_count_with_the_speed_of_their_own_link() {
        let seen = |spread| {
            let own = MigrationLink {
                name: "e0".into(),
                addresses: vec![],
                speed_mbps: Some(10_000),
                mtu: 1500,
                usable: true,
                is_trusted: false,
                card: Some("card".into()),
                rdma: None,
            };
            let seen = paths(&plan(spread, &[Some(1_000), None]), |link| (link == "e0").then_some(&own));
            assert!(seen.iter().all(|path| path.link == "card"), "{seen:?}");
            seen.into_iter().map(|path| (path.link_mbps, path.mbps)).collect::<Vec<_>>()
        };
        assert_eq!(seen(Spread::Routed), [(Some(10_000), Some(1_000)), (Some(10_000), None)]);
        assert_eq!(seen(Spread::InTurn), [(Some(10_000), Some(1_000))]);
    }
}
