//! The disks that are copied: before step 6, beside steps 6 and 7, and their end in step 8.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::migration::timing::DISKS_END_WITHIN;
use drainpipe_engine::migration::{SourceEvent, Stage};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DiskName, DiskState, KeptPart};
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_hypervisor::{CopyTo, DiskCopies};
use tracing::warn;

use super::transferring::disks_at;
use super::{Executor, LOOK_EVERY, hypervisor_failed};
use crate::outgoing::Running;
use crate::outgoing::disks::keep_left;
use crate::outgoing::target_watch::TargetWatch;
use crate::store::journal::{CopiedDisk, Unrenamed};
use crate::transfer::bandwidth::{DiskPhase, FirstShare, Throttle, Valve};
use crate::transfer::disk_streams::{Connector, DiskSender, NamingClient, SentDisk};
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};

/// [`DISKS_END_WITHIN`] where the guest's writes do not wait for the target, so that they are held back: longer than it
/// takes them to go by far.
const HELD_ENDED_WITHIN: Duration = Duration::from_secs(3);

/// So long before all of the disks is there, memory may follow in a moment.
const NEARLY_THERE_MS: f64 = 2_000.0;

impl Executor {
    pub(super) fn copied_disks(&self) -> Vec<usize> {
        let disks = self.agreed.plan.iter().flat_map(|plan| &plan.disks);
        disks.map(|disk| disk.disk.index()).collect()
    }

    /// Where disks are on the target that are elsewhere here.
    pub(super) fn places(&self) -> BTreeMap<usize, PathBuf> {
        let disks = self.agreed.plan.iter().flat_map(|plan| &plan.disks);
        disks.map(|disk| (disk.disk.index(), PathBuf::from(&disk.to))).collect()
    }

    /// The VM, as its owner would have written it there.
    pub(super) fn definition_there(&self) -> VmSpec {
        let mut definition = self.claimed.definition.clone();
        definition.move_disks(&self.places());
        definition
    }

    pub(super) fn disk_copies(&self) -> Result<&dyn DiskCopies, Problem> {
        let copies = self.vmm()?.disk_copies();
        copies.ok_or_else(|| Problem::failed("the VM's hypervisor does not copy disks"))
    }

    /// Whether disks are copied, and memory is not sent yet.
    pub(super) fn copies_disks_alone(&self) -> bool {
        self.copying.sender.is_some() && *self.running.stage.borrow() == Stage::CopyingDisks
    }

    pub(super) async fn start_disk_copies(&mut self) -> Result<SourceEvent, Problem> {
        let (Some(plan), Some(endpoint)) = (&self.agreed.plan, &self.agreed.endpoint) else {
            return Err(Problem::failed("cannot copy disks before the hosts are connected"));
        };
        let disks = endpoint
            .disks
            .as_ref()
            .ok_or_else(|| Problem::refused("the target cannot receive copies of disks"))?;
        let address = disks_at(plan, endpoint, disks.port).map_err(Problem::failed)?;
        let target = &self.running.target;
        let identity = &self.outgoing.peers.identity;
        let connector = Connector::new(address, disks.token, plan.is_encrypted(), identity, target)?;
        for copy in &plan.disks {
            let disk = self.outgoing.incoming.files.identify(&copy.from).await?;
            let leaving = CopiedDisk { disk, part: KeptPart::of_source(copy) };
            self.outgoing.journal.disk_leaves(&self.running.id, &leaving)?;
        }
        let pace = &self.copying.pace;
        let valve = Valve::Splitters(pace.clone());
        let share = FirstShare::of(&self.outgoing.transfer.bandwidth, self.sending(), plan, valve).await;
        let packing = self.outgoing.transfer.packing()?;
        let packers = disks.unpacks.then(|| packing.packers()).flatten();
        let client = self.naming_client().await?;
        let sender = DiskSender::start(&plan.disks, disks, &connector, &pace.pace, packers, client).await?;
        let started = self.start_each(&sender).await;
        pace.is(DiskPhase::Copying);
        (self.copying.sender, self.copying.throttle) = (Some(sender), Some(share.follow()));
        self.target.watch = TargetWatch::start(&self.outgoing, &self.running);
        started?;
        Ok(if self.disk_copies()?.go_along() { SourceEvent::DisksGoAlong } else { SourceEvent::Done })
    }

    /// None where QEMU asks for its disks by whatever names it is given.
    async fn naming_client(&self) -> Result<Option<NamingClient>, Problem> {
        let names = self.disk_copies()?.names(&self.copied_disks(), QMP_DEADLINE).await;
        let vmm = self.vmm()?;
        Ok(names.map_err(hypervisor_failed)?.map(|names| NamingClient { names, vmm: Arc::clone(vmm) }))
    }

    async fn start_each(&self, sender: &DiskSender) -> Result<(), Problem> {
        let copies = self.disk_copies()?;
        // What an earlier migration has left, if anything.
        copies.abandon(QEMU_DEADLINE).await.map_err(hypervisor_failed)?;
        let copy = |sent: &SentDisk| CopyTo {
            disk: sent.disk,
            address: sent.address.into(),
            name: sent.name.clone(),
        };
        let each: Vec<CopyTo> = sender.disks().iter().map(copy).collect();
        copies.start(&each, QEMU_DEADLINE).await.map_err(hypervisor_failed)
    }

    /// The next thing that happens to disks, while nothing else is sent.
    pub(super) async fn disk_event(&mut self) -> SourceEvent {
        tokio::select! {
            problem = self.target.watch.trouble() => return SourceEvent::TransferFailed(problem),
            () = self.running.cancel.notified() => return SourceEvent::Tick,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        match self.look_at_disks().await {
            Some(event) => event,
            None => match self.disk_states().await {
                Ok(Some(states)) => match self.consider_memory(&states).await {
                    Ok(()) => SourceEvent::DiskProgress(states),
                    Err(problem) => SourceEvent::TransferFailed(problem),
                },
                Ok(None) => SourceEvent::Tick,
                Err(problem) => SourceEvent::TransferFailed(problem),
            },
        }
    }

    /// Where memory follows by itself.
    async fn consider_memory(&mut self, states: &[DiskState]) -> Result<(), Problem> {
        if !self.disk_copies()?.go_along() {
            return Ok(());
        }
        let are_there = states.iter().all(|state| state.is_ready);
        if !are_there && !self.are_nearly_there() {
            return Ok(());
        }
        self.expect_connections().await;
        if are_there {
            self.hold_memory_back().await?;
            // No more of them goes than the guest writes.
            self.copying.pace.is(DiskPhase::Mirrored);
            self.end_comparing()?;
        } else if self.copying.throttle.as_ref().and_then(Throttle::limit_mbps).is_some() {
            self.hold_memory_still().await?;
        }
        Ok(())
    }

    fn are_nearly_there(&self) -> bool {
        let progress = self.running.progress.borrow();
        let mut disks = progress.disks.iter();
        disks.all(|disk| disk.is_ready || disk.eta_ms.is_some_and(|eta_ms| eta_ms < NEARLY_THERE_MS))
    }

    fn end_comparing(&self) -> Result<(), Problem> {
        self.copying.sender.as_ref().map_or(Ok(()), DiskSender::end_comparing)
    }

    /// The failure of a copy, if one has failed.
    pub(super) async fn look_at_disks(&mut self) -> Option<SourceEvent> {
        let states = self.disk_states().await;
        let is_alone = self.copies_disks_alone();
        let sender = self.copying.sender.as_ref()?;
        let failed = match states {
            Ok(states) => {
                self.copying.held_writes.states =
                    states.filter(|_| self.copying.held_writes.is_begun && !is_alone);
                sender.problem().or_else(|| self.copying.held_writes.problem.take())?
            }
            Err(problem) => sender.problem().unwrap_or(problem),
        };
        Some(SourceEvent::TransferFailed(self.vmm().err().unwrap_or(failed)))
    }

    /// Nothing while QEMU is too busy to answer.
    async fn disk_states(&self) -> Result<Option<Vec<DiskState>>, Problem> {
        let states = match self.disk_copies()?.states(QMP_DEADLINE).await {
            Ok(states) => states,
            Err(error) if error.is_mute() => return Ok(None),
            Err(error) => return Err(hypervisor_failed(error)),
        };
        let each = self.copied_disks().into_iter().map(|disk| {
            let state = states.iter().find(|state| state.disk == disk);
            let (state, disk) = state.zip(DiskName::at(disk))?;
            let sent =
                self.copying.sender.iter().flat_map(DiskSender::disks).find(|sent| sent.disk == disk.index());
            Some(DiskState {
                disk,
                copied_bytes: state.copied_bytes,
                total_bytes: state.total_bytes,
                same_bytes: sent.map_or(0, SentDisk::same_bytes),
                wire_bytes: sent.map_or(0, SentDisk::wire_bytes),
                is_written_over: sent.is_none_or(SentDisk::is_written_over),
                is_ready: state.is_ready,
                is_synchronised: state.is_synchronised,
            })
        });
        let each: Option<Vec<DiskState>> = each.collect();
        each.map(Some).ok_or_else(|| Problem::failed("the copy of a disk has ended unexpectedly"))
    }

    pub(super) async fn synchronise_disks(&mut self) -> Result<SourceEvent, Problem> {
        // From now on the guest's writes wait for this agent, or are held back by it.
        self.guard = Some(self.post_guard().await?);
        self.end_comparing()?;
        if self.disk_copies()?.holds_writes() {
            self.copying.held_writes.is_begun = true;
            return Ok(SourceEvent::WritesHeldBack);
        }
        self.copying.pace.is(DiskPhase::Mirrored);
        self.disk_copies()?.synchronise(QEMU_DEADLINE).await.map_err(hypervisor_failed)?;
        Ok(SourceEvent::Done)
    }

    pub(super) async fn end_disk_copies(&mut self) -> Result<(), Problem> {
        // The VM stands still: what is left of its writes is little, and waits for no limit.
        self.copying.throttle = None;
        let disks = self.copied_disks();
        let within = if self.copying.held_writes.is_begun { HELD_ENDED_WITHIN } else { DISKS_END_WITHIN };
        let ended = self.disk_copies()?.end(&disks, within).await.map_err(hypervisor_failed);
        ended.map_err(|problem| self.tell_of_held(problem))?;
        // Where memory followed by itself, so fast that nobody has seen it.
        self.end_comparing()?;
        if let Some(sender) = self.copying.sender.take() {
            sender.finish().await;
        }
        self.tell_target("close-disks", QMP_DEADLINE).await
    }

    /// Whether disks are copied, or were in an earlier run of this agent.
    pub(super) fn has_disk_copies(&self) -> bool {
        // One whose journal cannot be read may have.
        let leaving = self.outgoing.journal.leaving_disks(&self.running.id);
        self.copying.sender.is_some() || !leaving.is_ok_and(|disks| disks.is_empty())
    }

    /// Whatever has become of them there, the VM goes on with its own.
    pub(super) async fn abandon_disk_copies(&mut self) -> Result<(), Problem> {
        let Ok(copies) = self.disk_copies() else { return Ok(()) };
        copies.abandon(QEMU_DEADLINE).await.map_err(hypervisor_failed)
    }

    /// The VM stays, with the disks that it has.
    pub(super) fn forget_leaving_disks(&self) {
        if let Err(error) = self.outgoing.journal.forget_leaving_disks(&self.running.id) {
            warn!(%error, migration = self.running.id, "cannot record that its disks stay");
        }
    }

    /// The VM has left with copies of its disks: these are kept, under names that no VM has.
    pub(super) async fn leave_disks(&self) -> Result<(), Problem> {
        let Running { id, vm, target, .. } = &*self.running;
        let of = Unrenamed { migration: id.clone(), vm: vm.clone(), target: target.clone() };
        // It is among this host's VMs for a moment yet.
        keep_left(&self.outgoing, &of, &[]).await
    }
}
