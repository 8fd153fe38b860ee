//! Plans for arbitrary views, and what the linter finds in them.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::disks::{DrainedDisk, FileSystemView};
use super::limits::DrainLimits;
use super::lint::lint;
use super::plan::{DrainPlan, Move, plan};
use super::run::Drain;
use super::stay::{Stay, StayReason};
use super::view::{
    DrainView, FoundTransfers, LimitView, PathHistory, PathView, PlacedVm, Placement, TargetView, VmView,
};
use crate::migration::ENDING_MS;
use crate::plan::NoPostCopy;
use crate::storage::{CopyReason, DiskCopy, DiskImage, DiskName};
use crate::transfer::memory_sample::MemorySample;
use crate::transfer::relayed::{Compressible, RelayMeans};

const GIB: u64 = 1 << 30;

fn vm(name: &str, gib: u64) -> VmView {
    VmView {
        name: name.into(),
        needs_bytes: gib * GIB,
        memory_bytes: gib * GIB,
        placement: Placement::default(),
        immovable: None,
        refusals: BTreeMap::new(),
        copies: BTreeMap::new(),
        memory: Some(MemorySample {
            zero_share: 0.0,
            dirty_bytes_per_s: 0,
            dirty_set_bytes: 0,
            compressible: None,
        }),
    }
}

fn target(name: &str, gib: u64) -> TargetView {
    TargetView {
        name: name.into(),
        unavailable: None,
        warnings: vec![],
        memory_available_bytes: gib * GIB,
        file_systems: vec![],
        makes_room: false,
        makes_room_now: false,
        vms: vec![],
        paths_mbps: 2_000,
        paths: vec![],
        limit: LimitView::default(),
        free_cores: None,
        relay: None,
        no_post_copy: None,
        path_history: None,
    }
}

fn view(vms: Vec<VmView>, targets: Vec<TargetView>) -> DrainView {
    DrainView { host: "a".into(), vms, targets, limit: LimitView::default() }
}

fn limits(outbound: u8, inbound: u8, transfers: Option<u8>) -> DrainLimits {
    DrainLimits {
        total_ms: None,
        outbound,
        inbound,
        transfers,
        attempts: 2,
        post_copy: false,
        disks_first: false,
    }
}

/// Limits with at most this many transfers on the links, whatever the targets are.
fn at_most(transfers: u8) -> DrainLimits {
    limits(u8::MAX, u8::MAX, Some(transfers))
}

fn groups(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}

fn together(mut vm: VmView, names: &[&str]) -> VmView {
    vm.placement.together = groups(names);
    vm
}

fn apart(mut vm: VmView, names: &[&str]) -> VmView {
    vm.placement.apart = groups(names);
    vm
}

fn placed(vm: &VmView) -> PlacedVm {
    PlacedVm { name: vm.name.clone(), needs_bytes: vm.needs_bytes, placement: vm.placement.clone() }
}

fn target_of<'a>(plan: &'a DrainPlan, vm: &str) -> Option<&'a str> {
    plan.moves.iter().find(|planned| planned.vm == vm).map(|planned| planned.target.as_str())
}

fn why(plan: &DrainPlan, vm: &str) -> String {
    plan.stays.iter().find(|stay| stay.vm == vm).unwrap().why.to_string()
}

fn codes(view: &DrainView, plan: &DrainPlan) -> BTreeSet<String> {
    lint(view, plan).into_iter().map(|finding| finding.code).collect()
}

#[test]
fn the_fastest_target_takes_what_fits_and_the_next_one_the_rest() {
    let mut fast = target("b", 5);
    fast.paths_mbps = 10_000;
    let plan = plan(&view(vec![vm("x", 2), vm("y", 3), vm("z", 4)], vec![target("c", 8), fast]), None);
    assert_eq!(target_of(&plan, "z"), Some("b"));
    assert_eq!((target_of(&plan, "y"), target_of(&plan, "x")), (Some("c"), Some("c")));
}

#[test]
fn a_tight_fit_is_found_when_spreading_leaves_somebody_out() {
    let view = view(vec![vm("x", 6), vm("y", 5), vm("z", 5)], vec![target("b", 6), target("c", 10)]);
    assert_eq!(plan(&view, None).stays, vec![]);
}

#[test]
fn large_ones_go_first_and_those_that_may_not_end_last() {
    let mut busy = vm("busy", 8);
    busy.memory = Some(MemorySample {
        zero_share: 0.0,
        dirty_bytes_per_s: GIB,
        dirty_set_bytes: GIB,
        compressible: None,
    });
    let view = view(vec![vm("small", 1), busy, vm("large", 4)], vec![target("b", 64)]);
    let whole = plan(&view, None);
    let order: Vec<&str> = whole.moves.iter().map(|planned| planned.vm.as_str()).collect();
    assert_eq!(order, ["large", "small", "busy"]);
    assert!(whole.moves[2].warning.as_ref().unwrap().contains("may not converge"));
    assert!(whole.moves.iter().all(|planned| !planned.post_copy));

    // The memory sent once, and what got dirty meanwhile.
    let plan = plan(&view, Some(&DrainLimits { post_copy: true, ..at_most(1) }));
    let by_post_copy: Vec<bool> = plan.moves.iter().map(|planned| planned.post_copy).collect();
    assert_eq!(by_post_copy, [false, false, true]);
    let busy = &plan.moves[2];
    assert!(busy.warning.as_ref().unwrap().contains("(post-copy)"), "{busy:?}");
    assert!((8 * GIB..=9 * GIB + (1 << 20)).contains(&busy.predicted_bytes), "{busy:?}");
    assert!(busy.predicted_transfer_ms < 10.0 * plan.moves[0].predicted_transfer_ms, "{plan:?}");
}

#[test]
fn where_the_hosts_have_no_post_copy_a_vm_goes_without_and_is_told_why() {
    let busy =
        MemorySample { zero_share: 0.0, dirty_bytes_per_s: GIB, dirty_set_bytes: GIB, compressible: None };
    let busy = VmView { memory: Some(busy), ..vm("busy", 8) };
    let no_post_copy = Some(NoPostCopy::Stated("libvirt 9.0.0 on b has no post-copy".into()));
    let view = view(vec![busy], vec![TargetView { no_post_copy, ..target("b", 64) }]);
    let planned = |post_copy| plan(&view, Some(&DrainLimits { post_copy, ..at_most(1) })).moves.remove(0);
    let (asked, unasked) = (planned(true), planned(false));
    assert!(!asked.post_copy && !unasked.post_copy);
    let words = "may not converge, so it goes last; less load in it, or more links, would help; post-copy is not \
                 possible: libvirt 9.0.0 on b has no post-copy";
    assert!(asked.warning.as_ref().unwrap().ends_with(words), "{asked:?}");
    assert!(!unasked.warning.as_ref().unwrap().contains("post-copy"), "{unasked:?}");
}

#[test]
fn targets_with_links_of_their_own_take_turns() {
    let over = |name: &str, link: &str| {
        let path = PathView { link: link.into(), link_mbps: Some(1_000), mbps: Some(1_000) };
        TargetView { paths_mbps: 1_000, paths: vec![path], ..target(name, 9) }
    };
    // Placed by hand: the three largest on one target.
    let only = |mut vm: VmView, target: &str| {
        vm.refusals = BTreeMap::from([(target.into(), "not there".into())]);
        vm
    };
    let to_b = ["b1", "b2", "b3"].map(|name| only(vm(name, 3), "c"));
    let to_c = ["c1", "c2", "c3", "c4", "c5"].map(|name| only(vm(name, 1), "b"));
    let view = view([&to_b[..], &to_c].concat(), vec![over("b", "e0"), over("c", "e1")]);
    let plan = plan(&view, Some(&at_most(2)));
    let order: Vec<&str> = plan.moves.iter().map(|planned| planned.vm.as_str()).collect();
    assert_eq!(order, ["b1", "c1", "c2", "b2", "c3", "c4", "b3", "c5"]);
}

#[test]
fn who_stays_learns_what_would_let_it_go() {
    let mut pinned = vm("pinned", 1);
    pinned.placement.stays = Some("licence of this host".into());
    let mut paused = vm("paused", 1);
    paused.immovable = Some("it is paused".into());
    let mut refused = vm("refused", 1);
    refused.refusals.insert("b".into(), "no CPU flag avx2".into());
    let plan = plan(&view(vec![pinned, paused, refused, vm("huge", 99)], vec![target("b", 8)]), None);
    assert_eq!(plan.moves, vec![]);
    assert!(why(&plan, "pinned").contains("licence of this host; take `stays` out"));
    assert!(why(&plan, "paused").contains("it is paused; fix that"));
    assert!(why(&plan, "refused").contains("b: no CPU flag avx2"));
    assert!(why(&plan, "huge").contains("b: 101376 MiB are needed, and 8192 MiB are free"));
}

#[test]
fn without_a_target_everybody_stays() {
    let plan = plan(&view(vec![vm("x", 1)], vec![]), None);
    assert!(why(&plan, "x").contains("name one with --to"));
}

#[test]
fn a_group_goes_together_or_not_at_all() {
    let group = |gib| vec![together(vm("x", 2), &["shop"]), together(vm("y", gib), &["shop", "mail"])];
    let targets = vec![target("b", 5), target("c", 5)];
    let fits = plan(&view(group(3), targets.clone()), None);
    assert_eq!(target_of(&fits, "x"), target_of(&fits, "y"));
    let too_large = plan(&view(group(4), targets), None);
    assert!(why(&too_large, "x").starts_with("it must be together with y: no host can take it"));
}

#[test]
fn a_group_follows_those_of_it_that_are_elsewhere_or_on_their_way() {
    let mut away = together(vm("away", 1), &["shop"]);
    let mut c = target("c", 8);
    c.vms = vec![placed(&away)];
    away.immovable = Some("it is being moved".into());
    let rest = together(vm("rest", 1), &["shop"]);
    let plan = plan(&view(vec![away, rest], vec![target("b", 64), c]), None);
    assert_eq!(target_of(&plan, "rest"), Some("c"));
    assert!(why(&plan, "away").contains("on its way to c already"));
}

#[test]
fn who_must_be_apart_is_apart_from_those_there_too() {
    let mut b = target("b", 64);
    b.vms = vec![placed(&apart(vm("there", 1), &["db"]))];
    let vms = vec![apart(vm("x", 1), &["db"]), apart(vm("y", 1), &["db"])];
    let plan = plan(&view(vms, vec![b, target("c", 8)]), None);
    assert_eq!(target_of(&plan, "x"), Some("c"));
    assert!(why(&plan, "y").contains("b: y must be apart from there"));
}

#[test]
fn a_target_that_could_not_be_lost_is_told() {
    let vms = || vec![vm("x", 4), vm("y", 4)];
    let enough = plan(&view(vms(), vec![target("b", 9), target("c", 9)]), None);
    assert_eq!(enough.warnings, Vec::<String>::new());
    let scarce = plan(&view(vms(), vec![target("b", 5), target("c", 5)]), None);
    assert!(scarce.warnings[0].contains("if b failed after this") && scarce.warnings[0].contains("4.00 GiB"));
    let only = plan(&view(vms(), vec![target("b", 9)]), None);
    assert!(only.warnings[0].contains("no other target could take its VMs"));
}

#[test]
fn what_is_wrong_with_the_ways_there_is_told_once_and_only_of_targets_that_are_used() {
    let way = |name, gib, warnings: &[&str]| TargetView {
        warnings: warnings.iter().map(ToString::to_string).collect(),
        ..target(name, gib)
    };
    let vms = vec![apart(vm("x", 1), &["db"]), apart(vm("y", 1), &["db"])];
    let targets = vec![way("b", 9, &["of a", "of b"]), way("c", 9, &["of a"]), way("d", 0, &["of d"])];
    let plan = plan(&view(vms, targets), None);
    assert_eq!(plan.warnings[..2], ["of a", "of b"], "{:?}", plan.warnings);
    assert!(!plan.warnings.contains(&"of d".to_owned()), "{:?}", plan.warnings);
}

#[test]
fn the_number_to_begin_with_is_from_history_and_bounded() {
    let mut b = target("b", 64);
    let transfers = |b: &TargetView, most: Option<u8>| {
        plan(&view(vec![vm("x", 1)], vec![b.clone()]), most.map(at_most).as_ref()).transfers
    };
    assert_eq!(transfers(&b, Some(4)), 1);
    b.path_history = Some(history_of(4, 1));
    assert_eq!((transfers(&b, None), transfers(&b, Some(2)), transfers(&b, Some(0))), (4, 2, 1));
}

fn history_of(transfers: u8, targets: u8) -> PathHistory {
    let transfers = Some(FoundTransfers { transfers, targets });
    PathHistory { transfer_mbps: 500.0, setup_ms: 90.0, completion_ms: 40.0, transfers, disk_mbps: None }
}

#[test]
fn of_a_number_that_was_found_for_several_targets_each_has_its_share() {
    let planned = |found: &[Option<(u8, u8)>], most: u8| {
        let target = |(at, found): (usize, &Option<(u8, u8)>)| TargetView {
            no_post_copy: None,
            path_history: found.map(|(transfers, targets)| history_of(transfers, targets)),
            ..target(["b", "c", "d"][at], 64)
        };
        let vms = (0..6).map(|at| vm(&format!("v{at}"), 1)).collect();
        let plan = plan(&view(vms, found.iter().enumerate().map(target).collect()), Some(&at_most(most)));
        (plan.transfers, plan.transfers_found)
    };
    assert_eq!(planned(&[Some((4, 2)), Some((4, 2))], 8), (4, true));
    assert_eq!(planned(&[Some((4, 2)), Some((4, 2))], 3), (3, false));
    assert_eq!(planned(&[Some((1, 2)), Some((1, 2))], 8), (1, true), "one fills what leads to both");
    assert_eq!(planned(&[Some((4, 2))], 8), (2, false), "not found for one target alone");
    assert_eq!(planned(&[Some((3, 2))], 8), (2, false));
    assert_eq!(planned(&[Some((1, 3)); 3], 8), (1, true));
    assert_eq!(planned(&[Some((2, 1)), Some((3, 1))], 8), (5, false));
    assert_eq!(planned(&[Some((2, 1)), None], 8), (2, false));
    assert_eq!(planned(&[None, None], 8), (1, false));
    assert_eq!(planned(&[Some((u8::MAX, 0)), Some((u8::MAX, 0))], u8::MAX), (u8::MAX, false));
}

#[test]
fn a_target_that_nothing_goes_to_lets_no_more_vms_on_the_links() {
    let b = TargetView { path_history: Some(history_of(8, 1)), ..target("b", 64) };
    let cordoned = TargetView { unavailable: Some("it is cordoned".into()), ..target("c", 64) };
    let planned = plan(&view(vec![vm("x", 1)], vec![b, cordoned]), Some(&limits(8, 2, None)));
    assert_eq!((planned.transfers, planned.transfers_found), (2, false));
}

#[test]
fn the_whole_is_predicted_from_set_up_to_completion() {
    let mut b = target("b", 64);
    b.path_history = Some(PathHistory {
        transfer_mbps: 800.0,
        setup_ms: 90.0,
        completion_ms: 40.0,
        transfers: None,
        disk_mbps: None,
    });
    let plan = plan(&view(vec![vm("x", 1), vm("y", 1)], vec![b]), Some(&at_most(1)));
    let [first_ms, second_ms] = [0, 1].map(|at: usize| plan.moves[at].predicted_shared_ms);
    assert!(first_ms > GIB as f64 / 100_000.0, "{first_ms}");
    // One after the other; the second VM connects while little is left of the first one.
    let whole_ms = 90.0 + first_ms + second_ms + 40.0;
    assert!(
        (whole_ms - 2.0 * ENDING_MS..=whole_ms).contains(&plan.predicted_ms),
        "{} {whole_ms}",
        plan.predicted_ms
    );
}

#[test]
fn on_busy_cores_many_small_vms_take_as_long_as_their_steps_and_may_take_longer() {
    let small = |at: usize| VmView { memory_bytes: GIB / 8, ..vm(&format!("v{at}"), 1) };
    let planned = |free_cores: Option<f64>| {
        let b = TargetView { free_cores, ..target("b", 64) };
        plan(&view((0..24).map(small).collect(), vec![b]), Some(&limits(8, 4, None)))
    };
    let (unknown, idle, busy) = (planned(None), planned(Some(8.0)), planned(Some(0.02)));
    assert_eq!((idle.predicted_ms.to_bits(), idle.predicted_most_ms), (unknown.predicted_ms.to_bits(), None));
    // Each takes some 1.4 s to begin and to end, much of which overlaps with others.
    assert!((10_000.0..60_000.0).contains(&busy.predicted_ms), "{}", busy.predicted_ms);
    assert!(busy.predicted_ms > 1.1 * idle.predicted_ms, "{} {}", busy.predicted_ms, idle.predicted_ms);
    let most_ms = busy.predicted_most_ms.unwrap();
    assert!((1.2..6.0).contains(&(most_ms / busy.predicted_ms)), "{most_ms} {}", busy.predicted_ms);
    assert!(lint(&view((0..24).map(small).collect(), vec![target("b", 64)]), &busy).is_empty());
}

#[test]
fn what_each_vm_takes_is_predicted_for_the_number_that_there_will_be() {
    let vms = || (0..8).map(|at| vm(&format!("v{at}"), 1)).collect();
    let with = |transfer_mbps: f64, transfers: Option<u8>| {
        let transfers = transfers.map(|transfers| FoundTransfers { transfers, targets: 1 });
        let path_history =
            PathHistory { transfer_mbps, setup_ms: 90.0, completion_ms: 40.0, transfers, disk_mbps: None };
        let b = TargetView { path_history: Some(path_history), ..target("b", 64) };
        plan(&view(vms(), vec![b]), None)
    };
    let alone_ms = |plan: &DrainPlan| plan.moves[0].predicted_transfer_ms;
    // One VM fills the links, or nearly, so more at a time are not even tried. They share them when one ends.
    let full = with(1_800.0, None);
    assert!(
        full.moves.iter().all(|one| (one.predicted_shared_ms - alone_ms(&full)).abs() < 2.0 * ENDING_MS),
        "{full:#?}"
    );
    let four = with(1_900.0, Some(4));
    let shared = four.moves[0].predicted_shared_ms / alone_ms(&four);
    assert!((3.8..=4.2).contains(&shared), "{shared}");
}

/// A target that this host reaches over one link of 1 Gb/s, by two VMs at a time.
fn over(link: &str, link_mbps: u64, name: &str) -> TargetView {
    let path_history = PathHistory { transfer_mbps: 950.0, ..history_of(2, 1) };
    TargetView {
        paths_mbps: 1_000,
        paths: vec![PathView { link: link.into(), link_mbps: Some(link_mbps), mbps: Some(1_000) }],
        no_post_copy: None,
        path_history: Some(path_history),
        ..target(name, 64)
    }
}

#[test]
fn what_goes_to_several_targets_goes_at_once_as_far_as_the_links_carry_it() {
    let planned = |targets| plan(&view(vec![vm("x", 2), vm("y", 2)], targets), None);
    let shared = planned(vec![over("e0", 1_000, "b"), over("e0", 1_000, "c")]);
    let pairwise = planned(vec![over("e0", 1_000, "b"), over("e1", 1_000, "c")]);
    let one_fast_link = planned(vec![over("e0", 10_000, "b"), over("e0", 10_000, "c")]);
    assert_eq!((target_of(&shared, "x"), target_of(&shared, "y")), (Some("b"), Some("c")));
    assert_eq!(
        (shared.links_mbps, pairwise.links_mbps, one_fast_link.links_mbps),
        (Some(1_000), Some(2_000), Some(2_000))
    );
    for twice in [&pairwise, &one_fast_link] {
        let share = twice.predicted_ms / shared.predicted_ms;
        assert!((0.5..0.52).contains(&share), "{share} of what they take over one link of their speed");
        let alone = &twice.moves[0];
        assert!((alone.predicted_shared_ms - alone.predicted_transfer_ms).abs() < 1.0, "{alone:?}");
    }
    assert!(shared.moves[0].predicted_shared_ms > 1.9 * shared.moves[0].predicted_transfer_ms);
}

#[test]
fn no_more_goes_at_once_than_the_limit_of_the_host() {
    let targets = vec![over("e0", 1_000, "b"), over("e1", 1_000, "c")];
    let limit = LimitView { mbps: Some(1_000), later: vec![] };
    let limited = DrainView { limit, ..view(vec![vm("x", 2), vm("y", 2)], targets) };
    let plan = plan(&limited, None);
    assert_eq!(plan.links_mbps, Some(1_000));
    assert!(plan.moves[0].predicted_shared_ms > 1.9 * plan.moves[0].predicted_transfer_ms);
    let now = "predicted for the present bandwidth limit of a, 1000 Mb/s";
    assert!(plan.warnings.contains(&now.to_owned()), "{:?}", plan.warnings);
}

#[test]
fn links_of_what_is_under_way_count_in_a_new_plan() {
    let mut away = vm("away", 2);
    let b = TargetView { vms: vec![placed(&away)], ..over("e0", 1_000, "b") };
    away.immovable = Some("it is being moved".into());
    let mut rest = vm("rest", 2);
    rest.refusals.insert("b".into(), "refused".into());
    let plan = plan(&view(vec![away, rest], vec![b, over("e1", 1_000, "c")]), None);
    assert_eq!((target_of(&plan, "rest"), plan.links_mbps), (Some("c"), Some(2_000)));
}

#[test]
fn room_is_coming_while_a_vm_is_on_its_way_from_where_it_is_awaited() {
    let planned = |makes_room, makes_room_now, gib| {
        let b = TargetView { makes_room, makes_room_now, ..target("b", gib) };
        let plan = plan(&view(vec![vm("x", 4)], vec![b]), None);
        (plan.await_room.len(), plan.room_is_coming)
    };
    assert_eq!(planned(true, true, 3), (1, true));
    assert_eq!(planned(true, false, 3), (1, false));
    assert_eq!(planned(false, true, 3), (0, false));
    assert_eq!(planned(true, true, 4), (0, false), "it has all that it needs");
}

fn some_groups() -> impl Strategy<Value = BTreeSet<String>> {
    prop_oneof![3 => Just(BTreeSet::new()), 1 => prop::collection::btree_set("[pqr]", 1..3)]
}

fn some_placement() -> impl Strategy<Value = Placement> {
    (prop::option::weighted(0.05, Just("reason".to_owned())), some_groups(), some_groups())
        .prop_map(|(stays, apart, together)| Placement { stays, apart, together })
}

fn some_vm() -> impl Strategy<Value = VmView> {
    let refusals = prop::collection::btree_map("[bcde]", Just("refused".to_owned()), 0..2);
    let zero_share = prop_oneof![9 => 0.0..=1.0, 1 => any::<f64>()];
    let memory = prop::option::of((zero_share, 0..4 * GIB, prop_oneof![0..4 * GIB, Just(u64::MAX)]));
    let immovable = prop::option::weighted(0.1, Just("paused".to_owned()));
    let share = || prop_oneof![9 => 0.0..=1.0, 1 => any::<f64>()];
    let compressible =
        prop::option::of((share(), share()).prop_map(|(share, left)| Compressible { share, left }));
    let copies = prop::collection::btree_map("[bcde]", some_disks(), 0..3);
    (0..9_u64, some_placement(), immovable, refusals, memory, compressible, copies).prop_map(
        |(gib, placement, immovable, refusals, memory, compressible, copies)| VmView {
            copies,
            placement,
            immovable,
            refusals,
            memory: memory.map(|(zero_share, dirty_bytes_per_s, dirty_set_bytes)| MemorySample {
                zero_share,
                dirty_bytes_per_s,
                dirty_set_bytes,
                compressible,
            }),
            ..vm("", gib)
        },
    )
}

fn disk(from_device: u64, to_device: u64, gib: u64) -> DrainedDisk {
    let copy = DiskCopy {
        disk: DiskName::at(0).unwrap(),
        from: "/srv/disk".into(),
        to: "/srv/disk".into(),
        image: DiskImage::Raw,
        size_bytes: gib * GIB,
        allocated_bytes: gib * GIB,
        why: CopyReason::NotSeen,
        is_flattened: false,
        from_device: None,
    };
    DrainedDisk { copy, from_device, to_device }
}

fn some_disks() -> impl Strategy<Value = Vec<DrainedDisk>> {
    let some_disk = (0..2_u64, 0..3_u64, 0..9_u64);
    prop::collection::vec(some_disk.prop_map(|(from, to, gib)| disk(from, to, gib)), 1..3)
}

fn some_memory() -> impl Strategy<Value = PathHistory> {
    let ms = || prop_oneof![9 => 0.0..1e4, 1 => any::<f64>()];
    let mbps = prop_oneof![9 => 1.0..1e5, 1 => any::<f64>()];
    let found = prop::option::of((any::<u8>(), any::<u8>()));
    let disk_mbps = prop::option::of(prop_oneof![9 => 1.0..1e5, 1 => any::<f64>()]);
    (mbps, ms(), ms(), found, disk_mbps).prop_map(
        |(transfer_mbps, setup_ms, completion_ms, found, disk_mbps)| {
            let transfers = found.map(|(transfers, targets)| FoundTransfers { transfers, targets });
            PathHistory { transfer_mbps, setup_ms, completion_ms, transfers, disk_mbps }
        },
    )
}

fn some_relay() -> impl Strategy<Value = RelayMeans> {
    let cores = || prop_oneof![9 => 0.0..64.0, 1 => any::<f64>()];
    let mbps = || prop_oneof![9 => 1.0..1e5, 1 => any::<f64>()];
    let of_wire = (any::<bool>(), any::<bool>(), mbps(), prop::option::of(mbps()));
    (of_wire, cores(), cores(), cores()).prop_map(
        |((is_asked_for, is_encrypted, wire_mbps, saved_mbps), source_cores, target_cores, packing_cores)| {
            RelayMeans {
                is_asked_for,
                is_encrypted,
                wire_mbps,
                source_cores,
                target_cores,
                packing_cores,
                saved_mbps,
                compressed_slower: None,
            }
        },
    )
}

fn some_target() -> impl Strategy<Value = TargetView> {
    let there = prop::collection::vec(("v[0-9]{1,2}", 0..9_u64, some_placement()), 0..3);
    let there = there.prop_map(|vms| {
        let placed = |(name, gib, placement)| PlacedVm { name, needs_bytes: gib * GIB, placement };
        vms.into_iter().map(placed).collect::<Vec<_>>()
    });
    let unavailable = prop::option::weighted(0.1, Just("silent".to_owned()));
    let path_history = prop::option::of(some_memory());
    let relay = prop::option::of(some_relay());
    let paths = (0..20_000_u64, prop::collection::vec(some_path(), 0..4));
    let file_system = |(device, gib): (u64, u64)| FileSystemView { device, free_bytes: gib * GIB };
    let file_systems = prop::collection::btree_map(0..2_u64, 0..24_u64, 0..3)
        .prop_map(move |free| free.into_iter().map(file_system).collect::<Vec<_>>());
    ("[abcde]", 0..32_u64, there, unavailable, paths, relay, path_history, file_systems).prop_map(
        |(name, gib, vms, unavailable, (paths_mbps, paths), relay, path_history, file_systems)| TargetView {
            file_systems,
            unavailable,
            vms,
            paths_mbps,
            paths,
            free_cores: relay.map(|relay| relay.source_cores),
            relay,
            no_post_copy: None,
            path_history,
            ..target(&name, gib)
        },
    )
}

fn some_path() -> impl Strategy<Value = PathView> {
    let speed = || prop::option::of(0..20_000_u64);
    ("e[0-3]", speed(), speed()).prop_map(|(link, link_mbps, mbps)| PathView { link, link_mbps, mbps })
}

fn some_view() -> impl Strategy<Value = DrainView> {
    let limit = prop::option::of(0..20_000_u64).prop_map(|mbps| LimitView { mbps, later: vec![] });
    let (vms, targets) =
        (prop::collection::vec(some_vm(), 0..14), prop::collection::vec(some_target(), 0..5));
    (vms, targets, limit).prop_map(|(mut vms, targets, limit)| {
        for (index, vm) in vms.iter_mut().enumerate() {
            vm.name = format!("v{index}");
        }
        DrainView { limit, ..view(vms, targets) }
    })
}

/// Another VM that moves and shares a group with this one.
fn mate(
    plan: &DrainPlan,
    view: &DrainView,
    vm: &VmView,
    groups: fn(&Placement) -> &BTreeSet<String>,
) -> Option<usize> {
    plan.moves.iter().position(|planned| {
        let mut others = view.vms.iter().filter(|other| other.name == planned.vm && other.name != vm.name);
        others.any(|other| !groups(&other.placement).is_disjoint(groups(&vm.placement)))
    })
}

/// Breaks one rule, and returns what the linter must call that.
fn plant(plan: &mut DrainPlan, view: &DrainView, fault: usize, at: Index) -> Option<&'static str> {
    let moves = plan.moves.len();
    if moves == 0 {
        return None;
    }
    let at = at.index(moves);
    let vm = view.vms.iter().find(|vm| vm.name == plan.moves[at].vm)?;
    match fault {
        0 => {
            plan.moves.remove(at);
            Some("drain-vm-lost")
        }
        1 => {
            plan.moves.push(plan.moves[at].clone());
            Some("drain-vm-doubled")
        }
        2 => {
            plan.stays.push(Stay { vm: plan.moves[at].vm.clone(), why: StayReason::Stated(String::new()) });
            Some("drain-no-reason")
        }
        3 => {
            plan.moves[at].target = "nowhere".into();
            Some("drain-unknown-target")
        }
        4 => {
            let refusing =
                vm.refusals.keys().find(|name| view.targets.iter().any(|target| target.name == **name));
            plan.moves[at].target.clone_from(refusing?);
            Some("drain-refused")
        }
        5 => {
            let small = view.targets.iter().find(|target| target.memory_available_bytes < vm.needs_bytes)?;
            let first = view.targets.iter().find(|target| target.name == small.name)?;
            plan.moves[at].target.clone_from(&small.name);
            (first == small).then_some("drain-overcommit")
        }
        6 => {
            let stays = view.vms.iter().find(|vm| vm.immovable.is_some() || vm.placement.stays.is_some())?;
            plan.stays.retain(|stay| stay.vm != stays.name);
            plan.moves[at].vm.clone_from(&stays.name);
            Some("drain-must-stay")
        }
        7 => {
            let near = mate(plan, view, vm, |placement| &placement.apart)?;
            plan.moves[at].target = plan.moves[near].target.clone();
            Some("drain-joined-group")
        }
        8 => {
            let left = mate(plan, view, vm, |placement| &placement.together)?;
            let left = plan.moves.remove(left);
            plan.stays.push(Stay { vm: left.vm, why: StayReason::NoTarget });
            Some("drain-torn-group")
        }
        9 => {
            plan.predicted_ms = f64::NAN;
            Some("drain-no-number")
        }
        10 => {
            plan.host = "z".into();
            Some("drain-other-host")
        }
        11 => {
            plan.moves[at].vm = "unknown".into();
            Some("drain-unknown-vm")
        }
        12 => {
            let usable = view.targets.iter().filter(|target| target.unavailable.is_none());
            let other_news =
                |planned: &Move| format!("how fast the links to {} are is not known", planned.target);
            plan.warnings = plan.moves.iter().map(other_news).collect();
            (usable.count() == 1 && vm.needs_bytes > 0).then_some("drain-risk-unmentioned")
        }
        13 => {
            plan.moves[at].disks.push(disk(0, 0, 1));
            Some("drain-other-disks")
        }
        14 => {
            let lacks_room = |target: &&TargetView| {
                let needs = |device| {
                    let there =
                        vm.copies_to(&target.name).iter().filter(move |disk| disk.to_device == device);
                    there.map(|disk| disk.copy.room_bytes()).sum::<u64>()
                };
                let is_first = view.targets.iter().find(|other| other.name == target.name) == Some(*target);
                is_first && target.file_systems.iter().any(|of| needs(of.device) > of.free_bytes)
            };
            let full = view.targets.iter().find(lacks_room)?;
            plan.moves[at].target.clone_from(&full.name);
            plan.moves[at].disks = vm.copies_to(&full.name).to_vec();
            Some("drain-overcommit")
        }
        _ => {
            plan.moves[at].memory_bytes += 1;
            Some("drain-other-memory")
        }
    }
}

const FAULTS: usize = 16;

/// A VM with a disk that these targets do not see.
fn with_disk(name: &str, gib: u64, disk_gib: u64, targets: &[&str]) -> VmView {
    let copies = targets.iter().map(|target| ((*target).to_owned(), vec![disk(0, 7, disk_gib)]));
    VmView { copies: copies.collect(), ..vm(name, gib) }
}

fn with_room(name: &str, gib: u64, disk_gib: u64) -> TargetView {
    let file_systems = vec![FileSystemView { device: 7, free_bytes: disk_gib * GIB }];
    TargetView { file_systems, ..target(name, gib) }
}

fn order(plan: &DrainPlan) -> Vec<&str> {
    plan.moves.iter().map(|planned| planned.vm.as_str()).collect()
}

#[test]
fn a_vm_goes_where_its_disks_are_seen_unless_somebody_would_stay() {
    let slow = TargetView { paths_mbps: 100, ..target("c", 4) };
    let vms = vec![with_disk("x", 4, 9, &["b"])];
    let seen = view(vms.clone(), vec![with_room("b", 64, 64), slow.clone()]);
    assert_eq!(target_of(&plan(&seen, None), "x"), Some("c"));
    let refused = BTreeMap::from([("b".to_owned(), "no such CPU".to_owned())]);
    let other = VmView { refusals: refused, ..vm("y", 4) };
    let busy = view([vms, vec![other]].concat(), vec![with_room("b", 64, 64), slow]);
    let plan = plan(&busy, None);
    assert_eq!((target_of(&plan, "x"), target_of(&plan, "y")), (Some("b"), Some("c")));
    assert_eq!((plan.moves.len(), lint(&busy, &plan)), (2, vec![]));
}

#[test]
fn two_vms_do_not_count_on_the_same_room() {
    let vms = ["x", "y", "z"].map(|name| with_disk(name, 1, 5, &["b"]));
    let view = view(vms.to_vec(), vec![with_room("b", 64, 11)]);
    let plan = plan(&view, None);
    assert_eq!((order(&plan), plan.stays.len()), (vec!["x", "y"], 1));
    let said = "5.00 GiB where /srv/disk would be, and 1.00 GiB are free there";
    assert!(why(&plan, "z").contains(said), "{}", why(&plan, "z"));
}

#[test]
fn whose_disks_are_copied_go_last_unless_told_otherwise_and_take_their_time() {
    let vms = vec![with_disk("disk", 1, 8, &["b"]), vm("large", 4), vm("small", 1)];
    let view = view(vms, vec![with_room("b", 64, 64)]);
    let usual = plan(&view, None);
    assert_eq!(order(&usual), ["large", "small", "disk"]);
    let limits = DrainLimits { disks_first: true, ..at_most(1) };
    assert_eq!(order(&plan(&view, Some(&limits))), ["disk", "large", "small"]);
    let ms = |gib: f64| gib * GIB as f64 / (1_900.0 * 125.0);
    assert!(usual.moves[2].predicted_transfer_ms > ms(9.0), "{usual:#?}");
    assert!(usual.moves[0].predicted_transfer_ms < ms(5.0), "{usual:#?}");
    assert!((ms(14.0)..1.1 * ms(14.0)).contains(&usual.predicted_ms), "{usual:#?}");
    assert_eq!((usual.moves[2].predicted_bytes, usual.moves[2].disk_bytes()), (GIB, 8 * GIB));
}

#[test]
fn what_copies_were_seen_to_carry_bounds_the_prediction() {
    let slow = PathHistory { disk_mbps: Some(400.0), ..history_of(1, 1) };
    let b = TargetView { path_history: Some(slow), ..with_room("b", 64, 64) };
    let plan = plan(&view(vec![with_disk("x", 1, 8, &["b"])], vec![b]), None);
    let disk_ms = 8.0 * GIB as f64 / (400.0 * 125.0);
    assert!(plan.moves[0].predicted_transfer_ms > disk_ms, "{plan:#?}");
}

#[test]
fn with_disks_there_is_no_post_copy() {
    let memory =
        MemorySample { zero_share: 0.0, dirty_bytes_per_s: GIB, dirty_set_bytes: GIB, compressible: None };
    let busy = VmView { memory: Some(memory), ..with_disk("x", 8, 1, &["b"]) };
    let limits = DrainLimits { post_copy: true, ..at_most(1) };
    let plan = plan(&view(vec![busy], vec![with_room("b", 64, 64)]), Some(&limits));
    assert!(!plan.moves[0].post_copy, "{plan:#?}");
    assert!(plan.moves[0].warning.as_ref().unwrap().contains("its disks are copied"), "{plan:#?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn no_plan_fails_lint(view in some_view(), transfers: Option<u8>) {
        let plan = plan(&view, transfers.map(at_most).as_ref());
        prop_assert_eq!(lint(&view, &plan), vec![]);
    }

    #[test]
    fn a_drain_begins_with_as_many_at_a_time_as_was_planned(
        view in some_view(),
        outbound: u8,
        inbound: u8,
        transfers: Option<u8>,
    ) {
        let limits = limits(outbound, inbound, transfers);
        let plan = plan(&view, Some(&limits));
        let planned = plan.transfers;
        prop_assert_eq!(Drain::begin(plan, limits, 0, 0.0).0.status(0.0).transfers, planned);
    }

    #[test]
    fn the_same_view_makes_the_same_plan_whatever_the_order_of_vms(view in some_view()) {
        let mut turned = view.clone();
        turned.vms.reverse();
        let (one, other) = (plan(&view, None), plan(&turned, None));
        prop_assert_eq!(&one, &plan(&view, None));
        prop_assert_eq!(one.moves, other.moves);
    }

    #[test]
    fn nobody_stays_who_could_still_go_alone(view in some_view()) {
        let plan = plan(&view, None);
        let free: Vec<&VmView> = view.vms.iter().filter(|vm| {
            let alone = vm.placement == Placement::default() && vm.immovable.is_none() && vm.refusals.is_empty();
            alone && target_of(&plan, &vm.name).is_none()
        }).collect();
        for vm in free {
            let mut more = plan.clone();
            more.stays.retain(|stay| stay.vm != vm.name);
            for target in &view.targets {
                let going = super::plan::Move {
                    vm: vm.name.clone(),
                    target: target.name.clone(),
                    memory_bytes: vm.memory_bytes,
                    predicted_bytes: 0,
                    is_compressed: false,
                    post_copy: false,
                    predicted_steps_ms: 0.0,
                    predicted_transfer_ms: 0.0,
                    predicted_shared_ms: 0.0,
                    warning: None,
                    disks: vm.copies_to(&target.name).to_vec(),
                };
                let mut with = more.clone();
                with.moves.push(going);
                prop_assert!(!lint(&view, &with).is_empty(), "{} could go to {}", vm.name, target.name);
            }
        }
    }
}

#[test]
fn every_planted_fault_is_found() {
    let mut runner = TestRunner::deterministic();
    let mut planted = [0; FAULTS];
    for _ in 0..1_000 {
        let view = some_view().new_tree(&mut runner).unwrap().current();
        let at = any::<Index>().new_tree(&mut runner).unwrap().current();
        let sound = plan(&view, None);
        for (fault, planted) in planted.iter_mut().enumerate() {
            let mut plan = sound.clone();
            if let Some(code) = plant(&mut plan, &view, fault, at) {
                assert!(codes(&view, &plan).contains(code), "{code} not found in {plan:#?} for {view:#?}");
                *planted += 1;
            }
        }
    }
    assert!(planted.iter().all(|times| *times >= 10), "{planted:?}");
}
