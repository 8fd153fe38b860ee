//! VMs whose disks are copied: when it is their turn, and how many at a time are best.

use std::collections::BTreeSet;

use super::super::copy_concurrency::Busy;
use super::Drain;
use super::entry::{Entry, Stage};

impl Drain {
    pub(super) fn disks_copied(&mut self, vm: &str, bytes: u64) {
        let mut more = 0;
        self.of(vm, |entry| more = entry.disks_copied(bytes));
        self.copied_bytes = self.copied_bytes.saturating_add(more);
        self.pace.arrived(more);
    }

    /// Whether the disks of this one may be copied beside those of others. It holds its devices from the beginning of
    /// its migration until its memory follows: by then the next one is made ready.
    pub(super) fn devices_have_room(&self, entry: &Entry) -> bool {
        let holds_devices = |entry: &Entry| entry.stage.is_prepared_for() || entry.stage == Stage::Ready;
        let busy = self.busy(|entry| holds_devices(entry) || entry.stage == Stage::CopyingDisks);
        self.copy_concurrency.have_room(&entry.planned.device_pairs(), &busy)
    }

    fn busy(&self, which: impl Fn(&Entry) -> bool) -> Busy {
        let mut busy = Busy::new();
        for pair in
            self.entries.iter().filter(|entry| which(entry)).flat_map(|entry| entry.planned.device_pairs())
        {
            let count = busy.entry(pair).or_default();
            *count = count.saturating_add(1);
        }
        busy
    }

    /// What copies carry says nothing while memory is on the links too.
    pub(super) fn observe_copies(&mut self, now_ms: f64) {
        let busy = self.busy(|entry| entry.stage == Stage::CopyingDisks);
        let is_alone = !self.entries.iter().any(|entry| entry.stage.sends_memory());
        let waits = self
            .entries
            .iter()
            .filter(|entry| entry.stage == Stage::Waiting || entry.stage.is_prepared_for());
        let wanted: BTreeSet<_> = waits.flat_map(|entry| entry.planned.device_pairs()).collect();
        self.copy_concurrency.observe(now_ms, is_alone.then_some(self.copied_bytes), &busy, &wanted);
    }
}
