//! Which target takes which VM: memory, refusals, and groups that must be together or apart.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::disks;
use super::speeds::paths_mbps;
use super::stay::{Obstacle, StayReason, TargetObstacle};
use super::view::{DrainView, Placement, TargetView, VmView};
use crate::format::bytes;

/// What became of each VM of the view, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Assignment {
    /// It goes to the target with this index in the view.
    Target(usize),
    /// It stays, for this reason.
    Stays(StayReason),
}

/// Places every VM of the view.
///
/// Largest first, on the target that sees most of its disks, then with the fastest paths, then with the most room. Where
/// that leaves VMs here, other orders are tried; the one that leaves the fewest here is taken, and of these the one
/// that copies least.
pub(super) fn place(view: &DrainView) -> Vec<Assignment> {
    let units = units(view);
    let rooms = rooms(view);
    let attempts = [Order::LargestFirst, Order::ConfinedFirst].into_iter().flat_map(|order| {
        [Fit::Fast, Fit::TightWhereSeen, Fit::Tight]
            .map(|fit| place_in(view, &units, rooms.clone(), order, fit))
    });
    attempts.min_by_key(|assignments| left_here(view, assignments)).unwrap_or_default()
}

/// And what is copied.
fn left_here(view: &DrainView, assignments: &[Assignment]) -> (usize, u64, u64) {
    let each = view.vms.iter().zip(assignments);
    each.fold((0, 0, 0_u64), |(count, bytes, copied), (vm, place)| match place {
        Assignment::Stays(_) => (count + 1, vm.needs_bytes.saturating_add(bytes), copied),
        Assignment::Target(target) => {
            (count, bytes, copied.saturating_add(copied_bytes(&[vm], &view.targets[*target])))
        }
    })
}

/// What goes to this target beside memory.
fn copied_bytes(vms: &[&VmView], target: &TargetView) -> u64 {
    let each = vms.iter().map(|vm| disks::bytes(vm.copies_to(&target.name)));
    each.fold(0, u64::saturating_add)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    LargestFirst,
    /// Those that few targets can take go first.
    ConfinedFirst,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// The fewest disks to copy, then the fastest paths, then the most room.
    Fast,
    /// The fewest disks to copy, then as the next one.
    TightWhereSeen,
    /// The least room that is enough, so that large rooms are kept for large VMs.
    Tight,
}

/// VMs that go together or not at all; indices into the view.
type Unit = Vec<usize>;

fn place_in<'a>(
    view: &'a DrainView,
    units: &[Unit],
    mut rooms: Vec<Room<'a>>,
    order: Order,
    fit: Fit,
) -> Vec<Assignment> {
    let mut assignments = vec![Assignment::Stays(StayReason::NoTarget); view.vms.len()];
    let mut sorted: Vec<(&Unit, Vec<&VmView>)> =
        units.iter().map(|unit| (unit, unit.iter().map(|vm| &view.vms[*vm]).collect())).collect();
    sorted.sort_by_cached_key(|(_, vms)| {
        let takers = rooms.iter().filter(|room| room.obstacle(view, vms).is_none()).count();
        let confined = if order == Order::ConfinedFirst { takers } else { 0 };
        (confined, Reverse(needs_bytes(vms)), vms.iter().map(|vm| vm.name.clone()).min())
    });
    for (unit, vms) in sorted {
        let chosen = choose(view, &vms, &mut rooms, fit);
        for vm in unit {
            assignments[*vm] = match &chosen {
                Ok(target) => Assignment::Target(*target),
                Err(why) => Assignment::Stays(why_of(view, &vms, *vm, why.clone())),
            };
        }
    }
    assignments
}

fn needs_bytes(vms: &[&VmView]) -> u64 {
    vms.iter().fold(0, |sum, vm| sum.saturating_add(vm.needs_bytes))
}

/// What disks need on one file system.
struct DiskNeeds<'a> {
    bytes: u64,
    // One of them.
    path: &'a str,
}

/// By the devices of a target's file systems.
fn disk_needs<'a>(vms: &[&'a VmView], target: &str) -> BTreeMap<u64, DiskNeeds<'a>> {
    let mut needs = BTreeMap::<u64, DiskNeeds<'a>>::new();
    for disk in vms.iter().flat_map(|vm| vm.copies_to(target)) {
        let of = needs.entry(disk.to_device).or_insert(DiskNeeds { bytes: 0, path: &disk.copy.to });
        of.bytes = of.bytes.saturating_add(disk.copy.room_bytes());
    }
    needs
}

fn choose<'a>(
    view: &DrainView,
    vms: &[&'a VmView],
    rooms: &mut [Room<'a>],
    fit: Fit,
) -> Result<usize, StayReason> {
    let immovable = vms.iter().find_map(|vm| Some((vm, why_immovable(view, vm)?)));
    if let Some((mate, why)) = immovable {
        return Err(StayReason::MateStays { mate: mate.name.clone(), why: Box::new(why) });
    }
    if let Some(group) = shared_apart_group(vms) {
        return Err(StayReason::TogetherAndApart { apart: group.to_owned() });
    }
    let obstacles: Vec<Option<Obstacle>> = rooms.iter().map(|room| room.obstacle(view, vms)).collect();
    let fitting = rooms.iter_mut().zip(&obstacles).filter(|(_, obstacle)| obstacle.is_none());
    let best = fitting.map(|(room, _)| room).min_by_key(|room| match fit {
        Fit::Fast => (
            copied_bytes(vms, room.target),
            Reverse(paths_mbps(room.target).to_bits()),
            Reverse(room.free_bytes),
        ),
        Fit::TightWhereSeen => {
            (copied_bytes(vms, room.target), Reverse(0), Reverse(u64::MAX - room.free_bytes))
        }
        Fit::Tight => (0, Reverse(0), Reverse(u64::MAX - room.free_bytes)),
    });
    let Some(best) = best else { return Err(no_target(rooms, obstacles)) };
    best.take(vms);
    Ok(best.index)
}

fn no_target(rooms: &[Room<'_>], obstacles: Vec<Option<Obstacle>>) -> StayReason {
    if rooms.is_empty() {
        return StayReason::NoTarget;
    }
    let each = rooms.iter().zip(obstacles);
    let each = each
        .filter_map(|(room, what)| Some(TargetObstacle { target: room.target.name.clone(), what: what? }));
    StayReason::NoneTakesIt(each.collect())
}

/// Why this VM cannot go wherever to.
fn why_immovable(view: &DrainView, vm: &VmView) -> Option<StayReason> {
    if let Some(why) = &vm.placement.stays {
        return Some(StayReason::MustStay { why: why.clone() });
    }
    let why = vm.immovable.clone()?;
    Some(match way_of(view, vm) {
        Some(target) => StayReason::OnItsWay { target: target.name.clone(), why },
        None => StayReason::Immovable { why },
    })
}

/// Where a VM is going that is being moved already.
pub(super) fn way_of<'a>(view: &'a DrainView, vm: &VmView) -> Option<&'a TargetView> {
    vm.immovable.as_ref()?;
    view.targets.iter().find(|target| target.vms.iter().any(|placed| placed.name == vm.name))
}

/// Why one VM of a unit stays that stays as a whole.
fn why_of(view: &DrainView, unit: &[&VmView], vm: usize, why: StayReason) -> StayReason {
    let vm = &view.vms[vm];
    if let Some(own) = why_immovable(view, vm) {
        return own;
    }
    let mates: Vec<String> =
        unit.iter().map(|other| &other.name).filter(|name| **name != vm.name).cloned().collect();
    if mates.is_empty() { why } else { StayReason::TogetherWith { mates, why: Box::new(why) } }
}

fn shared_apart_group<'a>(vms: &[&'a VmView]) -> Option<&'a str> {
    let mut seen = BTreeSet::new();
    vms.iter().flat_map(|vm| &vm.placement.apart).map(String::as_str).find(|group| !seen.insert(*group))
}

/// VMs that share a `together` group, directly or by way of others, are one unit. A VM that is on its way
/// already is a unit of its own: its group follows it.
fn units(view: &DrainView) -> Vec<Unit> {
    let mut units: Vec<(Unit, BTreeSet<&str>)> = vec![];
    for (index, vm) in view.vms.iter().enumerate() {
        let mut unit = vec![index];
        let mut groups: BTreeSet<&str> = match way_of(view, vm) {
            Some(_) => BTreeSet::new(),
            None => vm.placement.together.iter().map(String::as_str).collect(),
        };
        let (joined, others) = units.into_iter().partition(|(_, theirs)| !theirs.is_disjoint(&groups));
        units = others;
        let joined: Vec<(Unit, BTreeSet<&str>)> = joined;
        for (theirs, their_groups) in joined {
            unit.extend(theirs);
            groups.extend(their_groups);
        }
        unit.sort_unstable();
        units.push((unit, groups));
    }
    units.into_iter().map(|(unit, _)| unit).collect()
}

/// A target, with what is planned to go there.
#[derive(Debug, Clone)]
struct Room<'a> {
    index: usize,
    target: &'a TargetView,
    free_bytes: u64,
    // What is free on its file systems, by their devices.
    free_on: BTreeMap<u64, u64>,
    planned: Vec<&'a VmView>,
}

/// One for each target; for one that is named twice, the first.
fn rooms(view: &DrainView) -> Vec<Room<'_>> {
    let mut names = BTreeSet::new();
    let once = view.targets.iter().enumerate().filter(|(_, target)| names.insert(target.name.as_str()));
    once.map(|(index, target)| Room {
        index,
        target,
        free_bytes: target.memory_available_bytes,
        free_on: target.file_systems.iter().map(|of| (of.device, of.free_bytes)).collect(),
        planned: vec![],
    })
    .collect()
}

impl<'a> Room<'a> {
    fn take(&mut self, vms: &[&'a VmView]) {
        self.free_bytes = self.free_bytes.saturating_sub(needs_bytes(vms));
        for (device, needs) in disk_needs(vms, &self.target.name) {
            self.free_on.entry(device).and_modify(|free| *free = free.saturating_sub(needs.bytes));
        }
        self.planned.extend(vms);
    }

    /// Those that are there, and those that are planned to be.
    fn inhabitants(&self) -> impl Iterator<Item = (&'a str, &'a Placement)> {
        let there = self.target.vms.iter().map(|vm| (vm.name.as_str(), &vm.placement));
        there.chain(self.planned.iter().map(|vm| (vm.name.as_str(), &vm.placement)))
    }

    /// Why these cannot all come here.
    fn obstacle(&self, view: &DrainView, vms: &[&VmView]) -> Option<Obstacle> {
        if self.target.name == view.host {
            return Some(Obstacle::IsDrained);
        }
        let unavailable = self.target.unavailable.clone().map(Obstacle::Found);
        unavailable
            .or_else(|| vms.iter().find_map(|vm| self.refusal(vm)))
            .or_else(|| self.group_elsewhere(view, vms))
            .or_else(|| vms.iter().find_map(|vm| self.too_near(vm)))
            .or_else(|| self.lacking_memory(vms))
            .or_else(|| self.lacking_room(vms))
    }

    fn refusal(&self, vm: &VmView) -> Option<Obstacle> {
        if self.target.vms.iter().any(|there| there.name == vm.name) {
            return Some(Obstacle::HasNamesake { vm: vm.name.clone() });
        }
        vm.refusals.get(&self.target.name).cloned().map(Obstacle::Found)
    }

    fn group_elsewhere(&self, view: &DrainView, vms: &[&VmView]) -> Option<Obstacle> {
        let groups: BTreeSet<&String> = vms.iter().flat_map(|vm| &vm.placement.together).collect();
        if groups.is_empty() {
            return None;
        }
        let elsewhere = view.targets.iter().filter(|target| target.name != self.target.name);
        elsewhere.flat_map(|target| target.vms.iter().map(move |vm| (target, vm))).find_map(|(target, vm)| {
            let group = vm.placement.together.iter().find(|group| groups.contains(group))?.clone();
            Some(Obstacle::GroupElsewhere { mate: vm.name.clone(), group, host: target.name.clone() })
        })
    }

    fn too_near(&self, vm: &VmView) -> Option<Obstacle> {
        self.inhabitants().find_map(|(name, placement)| {
            let group = placement.apart.intersection(&vm.placement.apart).next()?.clone();
            Some(Obstacle::TooNear { vm: vm.name.clone(), other: name.to_owned(), group })
        })
    }

    fn lacking_room(&self, vms: &[&VmView]) -> Option<Obstacle> {
        disk_needs(vms, &self.target.name).into_iter().find_map(|(device, needs)| {
            let free_bytes = *self.free_on.get(&device).filter(|free| **free < needs.bytes)?;
            Some(Obstacle::LackingRoom { needed_bytes: needs.bytes, free_bytes, path: needs.path.to_owned() })
        })
    }

    fn lacking_memory(&self, vms: &[&VmView]) -> Option<Obstacle> {
        let (needed_bytes, free_bytes) = (needs_bytes(vms), self.free_bytes);
        (needed_bytes > free_bytes).then_some(Obstacle::LackingMemory { needed_bytes, free_bytes })
    }
}

/// For each target that VMs go to: why, if it failed after that, the other targets could not take its VMs.
///
/// Memory and `apart` groups only: what else would be in the way is known of VMs that are here alone.
pub(super) fn without_reserve(view: &DrainView, assignments: &[Assignment]) -> Vec<String> {
    let mut rooms = rooms(view);
    for room in &mut rooms {
        let comes = |(vm, assignment): (_, &Assignment)| {
            (*assignment == Assignment::Target(room.index)).then_some(vm)
        };
        let planned: Vec<&VmView> = view.vms.iter().zip(assignments).filter_map(comes).collect();
        room.take(&planned);
    }
    let used = rooms.iter().filter(|room| !room.planned.is_empty());
    used.filter_map(|lost| why_without_reserve(view, lost, &rooms)).collect()
}

fn why_without_reserve(view: &DrainView, lost: &Room<'_>, rooms: &[Room<'_>]) -> Option<String> {
    let there = lost.target.vms.iter().map(|vm| (vm.name.as_str(), vm.needs_bytes, &vm.placement));
    let planned = lost.planned.iter().map(|vm| (vm.name.as_str(), vm.needs_bytes, &vm.placement));
    let mut homeless: Vec<(&str, u64, &Placement)> = there.chain(planned).collect();
    homeless.sort_by_key(|(name, needs_bytes, _)| (Reverse(*needs_bytes), *name));
    let others = rooms.iter().filter(|room| {
        room.index != lost.index && room.target.unavailable.is_none() && room.target.name != view.host
    });
    let mut others: Vec<(u64, BTreeSet<&String>)> = others
        .map(|room| {
            (room.free_bytes, room.inhabitants().flat_map(|(_, placement)| &placement.apart).collect())
        })
        .collect();
    let name = &lost.target.name;
    if others.is_empty() {
        return Some(format!("if {name} failed after this, no other target could take its VMs"));
    }
    homeless.into_iter().find_map(|(vm, needs_bytes, placement)| {
        let fits = |(free_bytes, apart): &&mut (u64, BTreeSet<&String>)| {
            *free_bytes >= needs_bytes && placement.apart.iter().all(|group| !apart.contains(group))
        };
        let Some((free_bytes, apart)) = others.iter_mut().filter(fits).min_by_key(|(free_bytes, _)| *free_bytes)
        else {
            return Some(format!(
                "if {name} failed after this, the other targets could not take all of its VMs: no room for {vm} \
                 ({})",
                bytes(needs_bytes as f64)
            ));
        };
        *free_bytes -= needs_bytes;
        apart.extend(&placement.apart);
        None
    })
}
