//! The plan of a drain: an immutable value, shown by `--dry-run`; its executor decides nothing.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::concurrency::Concurrency;
use super::copy_concurrency::CopyConcurrency;
use super::disks::{self, DevicePair, DrainedDisk, device_pairs};
use super::host_links::HostLinks;
use super::limited::limit_warnings;
use super::limits::DrainLimits;
use super::order::in_turns;
use super::placement::{Assignment, place, way_of, without_reserve};
use super::predict::{Prediction, predict};
use super::schedule::{Course, Links, Places, Schedule, ScheduledTransfer, schedule};
use super::speeds::{all_mbps, completion_ms, disk_mbps, setup_ms, vm_mbps};
use super::stay::Stay;
use super::view::{DrainView, FoundTransfers, TargetView, VmView};
use crate::estimate::cores;
use crate::estimate::load::whole_bytes;
use crate::estimate::sending::{GOODPUT_SHARE, UNKNOWN_SPEED_MBPS, bytes_per_ms};
use crate::format::{link_speed, rate};
use crate::plan::NoPostCopy;

/// Which VM goes where, in this order, and which stay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainPlan {
    /// The host to be emptied.
    pub host: String,
    /// The VMs that go, the first first.
    pub moves: Vec<Move>,
    /// The VMs that stay.
    pub stays: Vec<Stay>,
    /// Those of them that could move if room became free, which is to be expected.
    #[serde(default)]
    pub await_room: Vec<String>,
    /// Whether a VM is on its way that will leave them some.
    #[serde(default)]
    pub room_is_coming: bool,
    /// How many VMs are on the links at a time to begin with.
    pub transfers: u8,
    /// Whether earlier drains have found that number, for as many targets.
    #[serde(default)]
    pub transfers_found: bool,
    /// What the links carry together to all targets that VMs go to, in Mb/s; absent where a speed is not known.
    #[serde(default)]
    pub links_mbps: Option<u64>,
    /// Until the last VM that goes runs on its target. Where cores are busy: if others want half as much of them as now, on
    /// average, since VMs leave.
    pub predicted_ms: f64,
    /// The same if they want as much as now all the time; absent where no cores are busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_most_ms: Option<f64>,
    /// What a person should know before it begins.
    pub warnings: Vec<String>,
}

/// One VM's way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Move {
    /// The VM.
    pub vm: String,
    /// Where it goes.
    pub target: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Bytes of memory that will go over the links, shared as planned.
    pub predicted_bytes: u64,
    /// Whether they are fewer since its memory is likely to be compressed.
    #[serde(default)]
    pub is_compressed: bool,
    /// Whether it may run on its target before all its memory is there, as that gets dirty faster than the links carry
    /// it. From then until the rest has followed, it needs both hosts.
    #[serde(default)]
    pub post_copy: bool,
    /// Its steps before and after the transfer, in ms: 1 to 5, 9 and 10.
    #[serde(default)]
    pub predicted_steps_ms: f64,
    /// From the start of its own transfer to its end, when it is alone on the links, in ms.
    pub predicted_transfer_ms: f64,
    /// The same, with the links shared as planned.
    pub predicted_shared_ms: f64,
    /// Why it may take longer than that, or may not end.
    pub warning: Option<String>,
    /// The disks that are copied, before the memory; none where the target sees all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DrainedDisk>,
}

impl Move {
    /// What the copies of its disks have to carry.
    pub fn disk_bytes(&self) -> u64 {
        disks::bytes(&self.disks)
    }

    /// Between which devices its disks go.
    pub(super) fn device_pairs(&self) -> BTreeSet<DevicePair> {
        device_pairs(&self.target, &self.disks)
    }
}

/// What goes over the links at a time where nothing else has been found: with multichannel one VM can fill
/// all links, and is over the sooner the fewer there are beside it.
const TRANSFERS_TO_BEGIN_WITH: u8 = 1;

/// Makes the plan for what is seen. The limits, if there are any, bound how many VMs are on the links at a time: as
/// they do in the drain that carries it out, by the targets that VMs go to.
pub fn plan(view: &DrainView, limits: Option<&DrainLimits>) -> DrainPlan {
    let (eased, busiest) = (on_busy_cores(view, cores::eased), on_busy_cores(view, cores::busiest));
    let view = eased.as_ref().unwrap_or(view);
    let assignments = place(view);
    let (mut going, mut stays) = (vec![], vec![]);
    let allows_post_copy = limits.is_some_and(|limits| limits.post_copy);
    for (vm, assignment) in view.vms.iter().zip(&assignments) {
        match assignment {
            Assignment::Target(target) => {
                let prediction = predict(vm, &view.targets[*target]);
                let wants_post_copy = allows_post_copy && !prediction.converges;
                let disks = vm.copies_to(&view.targets[*target].name);
                let no_post_copy = (!disks.is_empty()).then_some(&NoPostCopy::CopiesDisks);
                let no_post_copy = no_post_copy.or(view.targets[*target].no_post_copy.as_ref());
                let no_post_copy = no_post_copy.filter(|_| wants_post_copy);
                let post_copy = wants_post_copy && no_post_copy.is_none();
                let prediction = if post_copy { prediction.with_rest_to_follow() } else { prediction };
                going.push(Going { vm, target: *target, prediction, disks, post_copy, no_post_copy });
            }
            Assignment::Stays(why) => stays.push(Stay { vm: vm.name.clone(), why: why.clone() }),
        }
    }
    let going = in_order(going, limits.is_some_and(|limits| limits.disks_first));
    let targets: BTreeSet<usize> = going.iter().map(|going| going.target).collect();
    let learnt = learnt(view, &targets);
    let names = || targets.iter().map(|target| view.targets[*target].name.as_str());
    let most = limits.map_or(u8::MAX, |limits| limits.most_on_links(names()));
    let await_room = await_room(view, &stays);
    let host = HostLinks::of(view);
    let mut plan = DrainPlan {
        host: view.host.clone(),
        moves: vec![],
        room_is_coming: !await_room.is_empty() && view.targets.iter().any(is_leaving_room),
        await_room,
        stays,
        transfers: learnt.as_ref().map_or(TRANSFERS_TO_BEGIN_WITH, |learnt| learnt.transfers).clamp(1, most),
        transfers_found: learnt.is_some_and(|learnt| learnt.is_found && learnt.transfers <= most),
        links_mbps: host.known_mbps(&targets.union(&targets_under_way(view)).copied().collect()),
        predicted_ms: 0.0,
        predicted_most_ms: None,
        warnings: [
            of_ways(view, &targets),
            unknown_speeds(view, &targets),
            limit_warnings(view, &targets),
            without_reserve(view, &assignments),
        ]
        .concat(),
    };
    let concurrency = plan.concurrency(most, 0.0);
    let under_way = limits.map_or(u8::MAX, |limits| limits.most_under_way(names()));
    let places = Places { concurrency, under_way };
    let schedule = schedule_of(view, &going, host.clone(), places.clone(), plan.copy_concurrency());
    plan.predicted_most_ms = busiest.filter(|_| !going.is_empty()).map(|busiest| {
        let going: Vec<Going<'_>> = going.iter().map(|going| going.among(&busiest)).collect();
        let most_ms = schedule_of(&busiest, &going, host, places, plan.copy_concurrency()).total_ms;
        // Another order of the same moves may take less, though each takes longer.
        most_ms.max(schedule.total_ms)
    });
    plan.moves =
        going.iter().zip(&schedule.courses).map(|(going, course)| going.as_move(view, course)).collect();
    plan.predicted_ms = schedule.total_ms;
    plan
}

impl DrainPlan {
    /// How the number of VMs on the links is found, from now on.
    pub(super) fn concurrency(&self, most: u8, now_ms: f64) -> Concurrency {
        let mut concurrency = Concurrency::new(self.transfers, most);
        concurrency.carry_at_most(self.links_bytes_per_ms());
        if self.transfers_found { concurrency.found_before(now_ms) } else { concurrency }
    }

    /// How the number of copies of disks at a time is found, from now on.
    pub(super) fn copy_concurrency(&self) -> CopyConcurrency {
        let mut copies = CopyConcurrency::default();
        copies.carry_at_most(self.links_bytes_per_ms());
        copies
    }

    /// What the links carry together, where that is known.
    pub(super) fn links_bytes_per_ms(&self) -> Option<f64> {
        self.links_mbps.map(|mbps| bytes_per_ms(mbps as f64 * GOODPUT_SHARE))
    }
}

/// Which of those that stay have a place once all VMs have left the targets that make room.
fn await_room(view: &DrainView, stays: &[Stay]) -> Vec<String> {
    if stays.is_empty() || !view.targets.iter().any(|target| target.makes_room) {
        return vec![];
    }
    let mut roomy = view.clone();
    for target in roomy.targets.iter_mut().filter(|target| target.makes_room) {
        target.memory_available_bytes = u64::MAX;
    }
    let placed = roomy.vms.iter().zip(place(&roomy));
    let placed =
        placed.filter(|(_, assignment)| matches!(assignment, Assignment::Target(_))).map(|(vm, _)| &vm.name);
    placed.filter(|name| stays.iter().any(|stay| stay.vm == **name)).cloned().collect()
}

fn is_leaving_room(target: &TargetView) -> bool {
    target.makes_room && target.makes_room_now
}

/// A VM that goes.
struct Going<'a> {
    vm: &'a VmView,
    target: usize,
    prediction: Prediction,
    // Those that are copied.
    disks: &'a [DrainedDisk],
    post_copy: bool,
    /// Why it is not post-copied, as it would be.
    no_post_copy: Option<&'a NoPostCopy>,
}

impl<'a> Going<'a> {
    /// The same move as this view has it.
    fn among(&self, view: &DrainView) -> Going<'a> {
        let Self { vm, target, disks, post_copy, no_post_copy, .. } = *self;
        let prediction = predict(vm, &view.targets[target]);
        let prediction = if post_copy { prediction.with_rest_to_follow() } else { prediction };
        Going { vm, target, prediction, disks, post_copy, no_post_copy }
    }

    /// What goes over the links, disks included.
    fn bytes(&self) -> u64 {
        self.prediction.bytes.saturating_add(whole_bytes(self.prediction.load.disk_bytes))
    }

    fn as_move(&self, view: &DrainView, course: &Course) -> Move {
        let target = &view.targets[self.target];
        Move {
            vm: self.vm.name.clone(),
            target: target.name.clone(),
            memory_bytes: self.vm.memory_bytes,
            predicted_bytes: whole_bytes(course.bytes),
            is_compressed: self.prediction.is_compressed,
            post_copy: self.post_copy,
            predicted_steps_ms: setup_ms(target) + completion_ms(target),
            predicted_transfer_ms: self.prediction.transfer_ms,
            predicted_shared_ms: course.transfer_ms,
            warning: self.warning(target),
            disks: self.disks.to_vec(),
        }
    }

    fn warning(&self, target: &TargetView) -> Option<String> {
        let Some(memory) = self.vm.memory else {
            return Some(
                "its memory could not be sampled: the prediction assumes that none of it is zero and that \
                nothing gets dirty"
                    .into(),
            );
        };
        let what_then = if self.post_copy {
            "it goes last, over one path, and runs there before all its memory has arrived (post-copy); \
            until then, it is lost if either host is"
        } else {
            "it may not converge, so it goes last; less load in it, or more links, would help"
        };
        (!self.prediction.converges).then(|| {
            let no_post_copy = self.no_post_copy.map(|why| format!("; post-copy is not possible: {why}"));
            format!(
                "its memory gets dirty at {} and the links carry {}: {what_then}{}",
                rate(memory.dirty_bytes_per_s as f64 * 8.0 / 1e9),
                rate(vm_mbps(target) / 1e3),
                no_post_copy.unwrap_or_default()
            )
        })
    }
}

/// The largest ones to each target first: the last ones are short then, so the links are full nearly to the end. What
/// may never end goes last, and keeps nobody waiting. Whose disks are copied takes long: the others go before, unless
/// told otherwise.
fn in_order(mut going: Vec<Going<'_>>, disks_first: bool) -> Vec<Going<'_>> {
    going.sort_by_key(|going| (Reverse(going.bytes()), going.vm.name.clone()));
    let (converging, others): (Vec<_>, Vec<_>) =
        going.into_iter().partition(|going| going.prediction.converges);
    let (with_disks, without): (Vec<_>, Vec<_>) =
        converging.into_iter().partition(|going| !going.disks.is_empty());
    let converging = if disks_first { [with_disks, without] } else { [without, with_disks] };
    let in_turns = |going| in_turns(going, |going: &Going<'_>| going.target, Going::bytes);
    converging.into_iter().chain([others]).flat_map(in_turns).collect()
}

/// A number of transfers at a time, from those that earlier drains have found.
struct Learnt {
    transfers: u8,
    // Whether it was found for all of these targets, and for as many at a time.
    is_found: bool,
}

/// To each target its share of what was found for all that there were. Of a target without one nothing is known, and it
/// adds nothing.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the cast saturates")]
fn learnt(view: &DrainView, targets: &BTreeSet<usize>) -> Option<Learnt> {
    let found = |target: &usize| view.targets[*target].path_history?.transfers;
    let found: Vec<FoundTransfers> = targets.iter().filter_map(found).collect();
    let share = |found: &FoundTransfers| f64::from(found.transfers) / f64::from(found.targets.max(1));
    let shares: f64 = found.iter().map(share).sum();
    let is_found =
        found.len() == targets.len() && found.iter().all(|found| usize::from(found.targets) == targets.len());
    // What rounding adds to three thirds is no transfer.
    let transfers = (shares - 1e-6).ceil() as u8;
    (!found.is_empty()).then_some(Learnt { transfers, is_found })
}

/// Where VMs go that an earlier plan has sent on their way: they use links too.
fn targets_under_way(view: &DrainView) -> BTreeSet<usize> {
    let ways = view.vms.iter().filter_map(|vm| way_of(view, vm));
    ways.filter_map(|way| view.targets.iter().position(|target| target.name == way.name)).collect()
}

fn schedule_of(
    view: &DrainView,
    going: &[Going<'_>],
    host: HostLinks,
    places: Places,
    copy_concurrency: CopyConcurrency,
) -> Schedule {
    let of_target = |mbps: fn(&TargetView) -> f64| {
        view.targets.iter().map(|target| bytes_per_ms(mbps(target))).collect::<Vec<_>>()
    };
    let links = Links {
        vm_bytes_per_ms: of_target(vm_mbps),
        disk_bytes_per_ms: of_target(disk_mbps),
        target_bytes_per_ms: of_target(all_mbps),
        host,
    };
    let transfer = |going: &Going<'_>| ScheduledTransfer {
        target: going.target,
        load: going.prediction.load,
        setup_ms: setup_ms(&view.targets[going.target]),
        completion_ms: completion_ms(&view.targets[going.target]),
        device_pairs: device_pairs(&view.targets[going.target].name, going.disks),
    };
    schedule(&going.iter().map(transfer).collect::<Vec<_>>(), &links, places, copy_concurrency)
}

/// The same view with other cores on the ways where they are busy, if they are on any.
fn on_busy_cores(view: &DrainView, cores: fn(f64) -> f64) -> Option<DrainView> {
    let of_busy = |target: &TargetView| target.free_cores.filter(|cores| cores::are_busy(*cores));
    view.targets.iter().find_map(of_busy)?;
    let mut other = view.clone();
    for target in &mut other.targets {
        target.free_cores = of_busy(target).map(cores).or(target.free_cores);
    }
    Some(other)
}

/// What several ways have in common is said once.
fn of_ways(view: &DrainView, targets: &BTreeSet<usize>) -> Vec<String> {
    let warnings: BTreeSet<&String> =
        targets.iter().flat_map(|target| &view.targets[*target].warnings).collect();
    warnings.into_iter().cloned().collect()
}

fn unknown_speeds(view: &DrainView, targets: &BTreeSet<usize>) -> Vec<String> {
    let targets = targets.iter().map(|target| &view.targets[*target]);
    let predicted_for = link_speed(UNKNOWN_SPEED_MBPS);
    let unknown = targets.filter(|target| target.paths_mbps == 0 && target.path_history.is_none());
    unknown
        .map(|target| {
            format!("the speed of the links to {} is not known: predicted for {predicted_for}", target.name)
        })
        .collect()
}
