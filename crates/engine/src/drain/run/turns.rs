//! Which VM's turn it is: to be prepared, to use the links, and to leave them to another one.

use super::super::limits::{AHEAD, FIRST_ALONE_MS};
use super::super::plan::Move;
use super::entry::{Entry, LinkClaim, Patience, Stage};
use super::planning::Planning;
use super::{Drain, DrainAction};
use crate::migration::ENDING_MS;

/// The bytes that have arrived are reported some time later.
const TOLD_AFTER_MS: f64 = 100.0;

impl Drain {
    /// By its prediction little may be left long before its migration says so: that does not know that what it has
    /// not gone through yet is zero.
    pub(super) fn arrived(&mut self, now_ms: f64, vm: &str, bytes: u64) {
        let mut more = 0;
        self.of(vm, |entry| more = entry.arrived(bytes));
        self.pace.arrived(more);
        let on_links = self.count(|entry| matches!(entry.stage, Stage::Transferring | Stage::CopyingDisks));
        let share = self.pace.bytes_per_ms(now_ms) / f64::from(on_links.max(1));
        self.of(vm, |entry| {
            if entry.left_bytes() < share * (ENDING_MS + TOLD_AFTER_MS) {
                entry.ending(now_ms);
            }
        });
    }

    /// The next one begins when little is left of another: it takes as long to its first byte. One at a time, and
    /// not in the moment in which a VM stands still.
    pub(super) fn release(&mut self, now_ms: f64, actions: &mut Vec<DrainAction>) {
        let allowed = self.concurrency.allowed();
        let on_links = self.staying_on_links(now_ms);
        let near_pause = self.count(|entry| entry.is_near_pause(now_ms));
        let free = allowed
            .saturating_sub(on_links)
            .min(allowed.saturating_add(1).saturating_sub(on_links.saturating_add(near_pause)));
        let gives_way = self.entries.iter().any(|entry| entry.is_ending(now_ms));
        let turns_before = self.turns;
        let is_next = |entry: &&mut Entry| entry.stage == Stage::Ready && entry.planned.disks.is_empty();
        for entry in self.entries.iter_mut().filter(is_next).take(usize::from(free)) {
            entry.release(if gives_way { LinkClaim::Given } else { LinkClaim::Taken });
            self.turns += 1;
            if gives_way {
                actions.push(DrainAction::GiveWay { vm: entry.planned.vm.clone() });
            }
            actions.push(DrainAction::Release { vm: entry.planned.vm.clone() });
        }
        let copied_before = actions.len();
        if !gives_way {
            self.release_copies(actions);
        }
        if self.turns > turns_before || actions.len() > copied_before {
            self.pace.begins(now_ms);
        }
    }

    /// Those with disks, whose turn came when they were begun.
    fn release_copies(&mut self, actions: &mut Vec<DrainAction>) {
        for entry in self.entries.iter_mut().filter(|entry| entry.stage == Stage::Ready) {
            if !entry.planned.disks.is_empty() {
                entry.release(LinkClaim::Taken);
                actions.push(DrainAction::Release { vm: entry.planned.vm.clone() });
            }
        }
    }

    /// VMs on the links, but for those that are about to leave them.
    pub(super) fn staying_on_links(&self, now_ms: f64) -> u8 {
        self.count(|entry| {
            entry.stage == Stage::SendingRest
                || entry.stage == Stage::Transferring && !entry.is_ending(now_ms)
        })
    }

    /// A VM that gave way to one that was to be paused may have the links when it is. It takes a moment until it does: by
    /// then the last pages of that one are gone. A VM that is paused itself gives way to nobody.
    pub(super) fn take_all(&mut self, now_ms: f64, actions: &mut Vec<DrainAction>) {
        let has_the_links = |entry: &Entry| entry.is_ending(now_ms) && entry.link_claim == LinkClaim::Taken;
        let are_wanted = self.entries.iter().any(has_the_links);
        let takes_them = |entry: &&mut Entry| {
            entry.link_claim == LinkClaim::Given && !(are_wanted && entry.stage == Stage::Transferring)
        };
        for entry in self.entries.iter_mut().filter(takes_them) {
            entry.link_claim = LinkClaim::Taken;
            actions.push(DrainAction::TakeAll { vm: entry.planned.vm.clone() });
        }
    }

    /// Not while a plan is made: it counts on the room that what is begun now would take.
    pub(super) fn begin_more(&mut self, now_ms: f64, actions: &mut Vec<DrainAction>) {
        while self.planning == Planning::Not
            && !self.spares_a_pause(now_ms)
            && let Some(next) = self.next_to_begin(now_ms)
        {
            let entry = &mut self.entries[next];
            entry.begin();
            let Move { vm, target, post_copy, .. } = entry.planned.clone();
            let post_copy = post_copy || self.limits.post_copy && entry.patience == Patience::Yielded;
            actions.push(DrainAction::Begin { vm, target, post_copy });
        }
    }

    /// While a VM is about to stand still or does, or its clients have yet to hear of it again, both hosts have
    /// something better to do than to start another QEMU, as long as one that is ready keeps the links from waiting.
    fn spares_a_pause(&self, now_ms: f64) -> bool {
        let is_ready = |entry: &Entry| entry.stage == Stage::Ready;
        let is_spared = |entry: &Entry| entry.is_near_pause(now_ms) || entry.has_just_moved(now_ms);
        self.entries.iter().any(is_ready) && self.entries.iter().any(is_spared)
    }

    fn next_to_begin(&self, now_ms: f64) -> Option<usize> {
        self.next_waiting(now_ms).filter(|_| self.has_place_beside(self.others))
    }

    /// The VM that would be begun if nobody else moved any away from this host.
    pub(super) fn next_if_others_left_a_place(&self, now_ms: f64) -> Option<&str> {
        let is_kept =
            self.planning == Planning::Not && self.has_place_beside(0) && !self.has_place_beside(self.others);
        let next = self.next_waiting(now_ms).filter(|_| is_kept)?;
        Some(&self.entries[next].planned.vm)
    }

    /// A VM that waits for a place at its target keeps nobody from being prepared for another one.
    fn next_waiting(&self, now_ms: f64) -> Option<usize> {
        let is_ahead = |entry: &Entry| matches!(entry.stage, Stage::Preparing | Stage::Ready);
        let ahead = self.count(|entry| is_ahead(entry) && entry.planned.disks.is_empty());
        let is_first = self.turns == 0 && now_ms - self.begun_ms < FIRST_ALONE_MS;
        let more = if is_first { 0 } else { AHEAD };
        let may_prepare = ahead < self.concurrency.allowed().saturating_add(more);
        let mut others_wait = false;
        self.entries.iter().position(|entry| {
            let is_next =
                entry.stage == Stage::Waiting && self.inbound(&entry.planned.target) < self.limits.inbound;
            let is_copied = !entry.planned.disks.is_empty();
            others_wait |= is_next && !is_copied;
            // Those before it in the plan go first.
            is_next && if is_copied { !others_wait && self.devices_have_room(entry) } else { may_prepare }
        })
    }

    /// Whether one VM more may leave this host beside those that others move.
    fn has_place_beside(&self, others: u8) -> bool {
        self.count(|entry| entry.stage.is_under_way()).saturating_add(others) < self.limits.outbound
    }

    fn inbound(&self, target: &str) -> u8 {
        self.count(|entry| entry.stage.is_under_way() && entry.planned.target == target)
    }
}
