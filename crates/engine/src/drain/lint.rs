//! Whether a plan may be carried out. Everything is derived again from the view, without any of the planner's code, so
//! that the planner's mistakes show here.

use std::collections::{BTreeMap, BTreeSet};

use super::disks::FileSystemView;
use super::plan::{DrainPlan, Move};
use super::view::{DrainView, PlacedVm, TargetView, VmView};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place};
use crate::format::{exact_bytes, mib_free, mib_needed};

/// What is wrong with a plan for what was seen. A plan with any finding must not be carried out.
pub fn lint(view: &DrainView, plan: &DrainPlan) -> Vec<Finding> {
    let lint = Lint::new(view, plan);
    let of_moves = plan.moves.iter().flat_map(|planned| lint.of_move(planned));
    let of_targets = lint.to_each.iter().flat_map(|(target, vms)| lint.of_target(target, vms));
    [lint.of_whole(), lint.of_count()].into_iter().flatten().chain(of_moves).chain(of_targets).collect()
}

struct Lint<'a> {
    view: &'a DrainView,
    plan: &'a DrainPlan,
    vms: BTreeMap<&'a str, &'a VmView>,
    targets: BTreeMap<&'a str, &'a TargetView>,
    to_each: BTreeMap<&'a str, Vec<&'a VmView>>,
}

impl<'a> Lint<'a> {
    fn new(view: &'a DrainView, plan: &'a DrainPlan) -> Self {
        let vms: BTreeMap<&str, &VmView> = view.vms.iter().map(|vm| (vm.name.as_str(), vm)).collect();
        let mut targets = BTreeMap::new();
        for target in &view.targets {
            targets.entry(target.name.as_str()).or_insert(target);
        }
        let mut to_each: BTreeMap<&str, Vec<&VmView>> = BTreeMap::new();
        for planned in &plan.moves {
            if let Some(vm) = vms.get(planned.vm.as_str()) {
                to_each.entry(&planned.target).or_default().push(vm);
            }
        }
        Self { view, plan, vms, targets, to_each }
    }

    fn finding(&self, code: FindingCode, vm: Option<&str>, what: String) -> Finding {
        let host = &self.view.host;
        let place = vm.map_or_else(|| Place::host(host), |vm| Place::vm(host, vm));
        Finding::new(code, [place]).what(what).effect("this plan must not be carried out").remedy(
            "drain again, for a plan of what is there now; if it says the same, report it as an \
                error in Drainpipe",
        )
    }

    fn of_whole(&self) -> Vec<Finding> {
        let mut findings = vec![];
        if self.plan.host != self.view.host {
            let what = format!("the plan is for {}, not for {}", self.plan.host, self.view.host);
            findings.push(self.finding(FindingCode::DrainOtherHost, None, what));
        }
        let is_time = |ms: f64| ms.is_finite() && ms >= 0.0;
        let mut times = self
            .plan
            .moves
            .iter()
            .flat_map(|planned| [planned.predicted_transfer_ms, planned.predicted_shared_ms]);
        let whole = [Some(self.plan.predicted_ms), self.plan.predicted_most_ms];
        if !whole.into_iter().flatten().all(is_time) || !times.all(is_time) || self.plan.transfers == 0 {
            let what = "a time or the number of transfers makes no sense".into();
            findings.push(self.finding(FindingCode::DrainNoNumber, None, what));
        }
        findings
    }

    /// Each VM of the view is in the plan once, and nothing else is.
    fn of_count(&self) -> Vec<Finding> {
        let mut counts: BTreeMap<&str, usize> = self.vms.keys().map(|vm| (*vm, 0)).collect();
        let moves = self.plan.moves.iter().map(|planned| &planned.vm);
        for vm in moves.chain(self.plan.stays.iter().map(|stay| &stay.vm)) {
            *counts.entry(vm).or_default() += 1;
        }
        let finding = |(vm, count): (&str, usize)| {
            let (code, what) = match count {
                _ if !self.vms.contains_key(vm) => {
                    (FindingCode::DrainUnknownVm, "is in the plan and not on the host")
                }
                0 => (FindingCode::DrainVmLost, "is on the host and not in the plan"),
                1 => return None,
                _ => (FindingCode::DrainVmDoubled, "is in the plan more than once"),
            };
            Some(self.finding(code, Some(vm), format!("VM {vm} {what}")))
        };
        let unexplained = self.plan.stays.iter().filter(|stay| stay.why.is_empty());
        let unexplained = unexplained.map(|stay| {
            self.finding(
                FindingCode::DrainNoReason,
                Some(&stay.vm),
                format!("VM {} stays without a reason", stay.vm),
            )
        });
        counts.into_iter().filter_map(finding).chain(unexplained).collect()
    }

    fn of_move(&self, planned: &Move) -> Vec<Finding> {
        let Some(vm) = self.vms.get(planned.vm.as_str()) else { return vec![] };
        let mut findings = vec![];
        let mut finding = |code, what| findings.push(self.finding(code, Some(&vm.name), what));
        if planned.memory_bytes != vm.memory_bytes {
            finding(
                FindingCode::DrainOtherMemory,
                format!("the plan says that VM {} has {}", vm.name, exact_bytes(planned.memory_bytes)),
            );
        }
        if vm.copies.get(&planned.target).map_or(&[][..], Vec::as_slice) != planned.disks {
            finding(
                FindingCode::DrainOtherDisks,
                format!(
                    "the plan copies other disks of VM {} than those that {} lacks",
                    vm.name, planned.target
                ),
            );
        }
        if let Some(why) = vm.placement.stays.as_ref().or(vm.immovable.as_ref()) {
            finding(
                FindingCode::DrainMustStay,
                format!("VM {} would move although it must stay: {why}", vm.name),
            );
        }
        match self.targets.get(planned.target.as_str()) {
            None => finding(FindingCode::DrainUnknownTarget, format!("{} was not examined", planned.target)),
            Some(target) => {
                let clash = target.vms.iter().any(|there| there.name == vm.name);
                let clash = clash.then(|| "it has a VM of that name".to_owned());
                let itself = (target.name == self.view.host).then(|| "it is the host itself".to_owned());
                let refusal = vm.refusals.get(&target.name).cloned();
                if let Some(why) = itself.or_else(|| target.unavailable.clone()).or(refusal).or(clash) {
                    finding(
                        FindingCode::DrainRefused,
                        format!("VM {} cannot go to {}: {why}", vm.name, target.name),
                    );
                }
            }
        }
        findings.extend(self.torn_groups(vm, &planned.target));
        findings
    }

    /// No VM of a group that must be together may be left behind or be elsewhere.
    fn torn_groups(&self, vm: &VmView, target: &str) -> Vec<Finding> {
        let shares = |other: &BTreeSet<String>| !vm.placement.together.is_disjoint(other);
        let moved = self.to_each.iter().filter(|(other, _)| **other != target);
        let moved =
            moved.flat_map(|(_, vms)| vms.iter().map(|vm| (vm.name.as_str(), &vm.placement.together)));
        let targets = self.view.targets.iter();
        let there = targets.clone().filter(|other| other.name != target).flat_map(|other| &other.vms);
        let there = there.map(|vm| (vm.name.as_str(), &vm.placement.together));
        let stays: BTreeSet<&str> = self.plan.stays.iter().map(|stay| stay.vm.as_str()).collect();
        let is_on_its_way = |vm: &VmView| {
            vm.immovable.is_some()
                && targets.clone().any(|target| target.vms.iter().any(|there| there.name == vm.name))
        };
        let left =
            self.view.vms.iter().filter(|other| stays.contains(other.name.as_str()) && !is_on_its_way(other));
        let left = left.map(|vm| (vm.name.as_str(), &vm.placement.together));
        let torn = moved.chain(there).chain(left).filter(|(_, together)| shares(together));
        torn.map(|(other, _)| {
            let what =
                format!("VM {} must be together with {other}, and would be on {target} without it", vm.name);
            self.finding(FindingCode::DrainTornGroup, Some(&vm.name), what)
        })
        .collect()
    }

    fn of_target(&self, target: &str, vms: &[&VmView]) -> Vec<Finding> {
        let Some(view) = self.targets.get(target) else { return vec![] };
        let mut findings = self.joined_groups(view, vms);
        let needs_bytes: u128 = vms.iter().map(|vm| u128::from(vm.needs_bytes)).sum();
        if needs_bytes > u128::from(view.memory_available_bytes) {
            let what = format!(
                "what is to go to {target} needs {} of memory, and {} are free",
                mib_needed(needs_bytes),
                mib_free(view.memory_available_bytes)
            );
            findings.push(self.finding(FindingCode::DrainOvercommit, None, what));
        }
        findings.extend(self.overfilled(view, vms));
        findings.extend(self.unmentioned_risk(view, needs_bytes));
        findings
    }

    /// Two VMs may not count on the same room for their disks.
    fn overfilled(&self, target: &TargetView, vms: &[&VmView]) -> Vec<Finding> {
        let disks = || vms.iter().filter_map(|vm| vm.copies.get(&target.name)).flatten();
        let finding = |of: &FileSystemView| {
            let there = disks().filter(|disk| disk.to_device == of.device);
            let needs_bytes: u128 = there.map(|disk| u128::from(disk.copy.room_bytes())).sum();
            (needs_bytes > u128::from(of.free_bytes)).then(|| {
                let what = format!(
                    "disks that are to go to one file system of {} need {}, and {} are free",
                    target.name,
                    mib_needed(needs_bytes),
                    mib_free(of.free_bytes)
                );
                self.finding(FindingCode::DrainOvercommit, None, what)
            })
        };
        target.file_systems.iter().filter_map(finding).collect()
    }

    /// The failure of one more host may leave its VMs without room, but the plan must mention it.
    ///
    /// Memory in all, which is the least that must be there: whether each VM fits is the planner's to see.
    fn unmentioned_risk(&self, lost: &TargetView, comes_bytes: u128) -> Option<Finding> {
        let words = format!("if {} failed after this,", lost.name);
        let is_mentioned = self.plan.warnings.iter().any(|warning| warning.starts_with(&words));
        let there: u128 = lost.vms.iter().map(|vm| u128::from(vm.needs_bytes)).sum();
        let others = self.targets.values().copied().filter(|other| {
            other.name != lost.name && other.name != self.view.host && other.unavailable.is_none()
        });
        let left = |other: &TargetView| {
            let comes = self.to_each.get(other.name.as_str()).into_iter().flatten();
            let comes: u128 = comes.map(|vm| u128::from(vm.needs_bytes)).sum();
            u128::from(other.memory_available_bytes).saturating_sub(comes)
        };
        let left: u128 = others.map(left).sum();
        (there + comes_bytes > left && !is_mentioned).then(|| {
            let what = format!(
                "if {} failed after this, its VMs would have nowhere to go, and the plan does not say so",
                lost.name
            );
            self.finding(FindingCode::DrainRiskUnmentioned, None, what)
        })
    }

    /// No two VMs of a group that must be apart may come together.
    fn joined_groups(&self, target: &TargetView, vms: &[&VmView]) -> Vec<Finding> {
        let mut findings = vec![];
        for (index, vm) in vms.iter().enumerate() {
            let earlier = vms[..index].iter().map(|other| (other.name.as_str(), &other.placement.apart));
            let there =
                target.vms.iter().map(|PlacedVm { name, placement, .. }| (name.as_str(), &placement.apart));
            for (other, _) in
                there.chain(earlier).filter(|(_, apart)| !apart.is_disjoint(&vm.placement.apart))
            {
                let what = format!(
                    "VM {} must be apart from {other}, and both would be on {}",
                    vm.name, target.name
                );
                findings.push(self.finding(FindingCode::DrainJoinedGroup, Some(&vm.name), what));
            }
        }
        findings
    }
}
