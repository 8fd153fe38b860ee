//! Steps 8 to 10: the last of the state is sent, and the VM belongs to the target; or everything is undone, and the VM
//! stays.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use drainpipe_engine::format::bound;
use drainpipe_engine::migration::timing::{ASK_AGAIN_AFTER, MUTE_AFTER, RECEIVED_WAIT, SWITCH_OVER_DEADLINE};
use drainpipe_engine::migration::{SourceEvent, TargetState, VmCondition};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_hypervisor::{Connections, Machine, RunState};
use tracing::warn;

use super::hooks::BeforePause;
use super::{Executor, hypervisor_failed};
use crate::guard::Guard;
use crate::outgoing::received_path;
use crate::outgoing::target_watch::TargetWatch;
use crate::outgoing::tracked::OnWay;
use crate::vms::cpu_priority;
use crate::vms::{QEMU_DEADLINE, QMP_DEADLINE};
use drainpipe_api_types::{IncomingView, TargetUse};

/// How much longer than [`RECEIVED_WAIT`] the answer may take. The VM stands still meanwhile.
const RECEIVED_ANSWER_DEADLINE: Duration = Duration::from_secs(3);

/// For how long a QEMU that somebody has stopped is waited for before its transfer is undone, and how often it is looked at.
const STOPPED_MAX: Duration = Duration::from_mins(2);
const LOOK_AT_STOPPED_EVERY: Duration = Duration::from_millis(50);

/// How long it may take until the process of a QEMU that has closed its socket has ended.
const EXIT_KNOWN_WITHIN: Duration = Duration::from_secs(1);

/// How often to ask again a target that is said to be lost.
const LOST_QUESTIONS: u8 = 3;

impl Executor {
    pub(super) async fn switch_over(&mut self) -> Result<(), Problem> {
        self.target.watch = TargetWatch::default();
        self.end_hook();
        if self.post_copy.is_begun
            && let Some(throttle) = self.settings.bandwidth.take()
        {
            throttle.lift();
        }
        self.observed.measurements.transfer_is_ending();
        self.end_standstill_watch();
        self.is_switching_over = true;
        if let Some(Err(error)) = self.guard.as_ref().map(Guard::switches_over) {
            warn!(%error, "its guard is gone, or does not learn that the VM is paused");
        }
        let mut on_way = self.tracked.on_way.take();
        on_way.iter_mut().for_each(OnWay::send_rest);
        self.send_rest().await?;
        if let Some(on_way) = on_way {
            self.tracked.gone = Some(on_way.settle(&self.running.vm).await);
        }
        Ok(())
    }

    async fn send_rest(&self) -> Result<(), Problem> {
        let vmm = self.vmm()?;
        self.outgoing.transfer.first_sessions.begin(&**vmm);
        let here = async {
            vmm.switch_over(QMP_DEADLINE).await.map_err(hypervisor_failed)?;
            self.hand_last_over(&**vmm).await
        };
        if self.post_copy.is_begun {
            // One after the other: from here on nothing is undone because the target does not answer.
            here.await?;
            let (received, let_go) = tokio::join!(self.wait_received(), self.await_let_go());
            return received.and(let_go);
        }
        tokio::try_join!(self.wait_received(), here).map(drop)
    }

    /// What the target's hypervisor needs beside what this one sends. Meanwhile this one lets go: should the target not get
    /// it, the guest has to be told to run here in any case.
    async fn hand_last_over(&self, vmm: &dyn Machine) -> Result<(), Problem> {
        match vmm.sent(SWITCH_OVER_DEADLINE).await.map_err(hypervisor_failed)? {
            Some(parcel) => {
                let complete = self.incoming("complete");
                let peer = self.peer()?;
                let there = peer.post_within::<()>(&complete, &parcel, SWITCH_OVER_DEADLINE);
                let here = async { vmm.let_go(QMP_DEADLINE).await.map_err(hypervisor_failed) };
                tokio::try_join!(there, here).map(drop)
            }
            None => Ok(()),
        }
    }

    async fn wait_received(&self) -> Result<(), Problem> {
        let path = received_path(&self.running.id, true);
        let end = Instant::now() + SWITCH_OVER_DEADLINE;
        while Instant::now() < end {
            let answer_deadline = RECEIVED_WAIT + RECEIVED_ANSWER_DEADLINE;
            let view: IncomingView = self.peer()?.get_within(&path, answer_deadline).await?;
            if matches!(view, IncomingView::Ready | IncomingView::ReadyInPart) {
                return Ok(());
            }
        }
        Err(Problem::failed(format!(
            "the last of the state did not arrive within {}; look at the links",
            bound(SWITCH_OVER_DEADLINE)
        )))
    }

    pub(super) fn record_hand_over(&self) -> Result<(), Problem> {
        if self.outgoing.journal.hand_over(&self.running.id)? {
            return Ok(());
        }
        Err(guard_acted())
    }

    pub(super) async fn ask_target(&mut self) -> Result<SourceEvent, Problem> {
        // Also one that answers at once may answer the same for long, as while it cannot write down that the VM runs.
        if let Some(asked_at) = self.target.asked_at {
            tokio::time::sleep(ASK_AGAIN_AFTER.saturating_sub(asked_at.elapsed())).await;
        }
        self.target.asked_at = Some(Instant::now());
        // If the configuration does not name the host any more, nobody can say whether it answers.
        self.peer().map_err(Problem::failed)?;
        let had_qemu = self.vmm().is_ok();
        let view = self.target_view().await;
        if is_like_lost(&view) && *self.running.target_lost.borrow() && self.stays_silent().await {
            return Ok(SourceEvent::TargetSays(TargetState::Lost));
        }
        let state = match view {
            Ok(IncomingView::Running) => TargetState::Running,
            Ok(IncomingView::RunningInPart) => {
                self.end_if_astray().await?;
                TargetState::RunningInPart
            }
            Ok(IncomingView::Ended) => TargetState::Ended,
            Ok(IncomingView::Ready) if !self.is_astray().await? => TargetState::Ready,
            // If QEMU is gone, nobody knows whether the VM ran on in it for a while, and the rest of its memory is lost.
            Ok(IncomingView::ReadyInPart) if self.vmm().is_ok() && !self.is_astray().await? => {
                TargetState::Ready
            }
            // It may have sent the rest before it ended, and after the target was asked.
            Ok(IncomingView::ReadyInPart) if had_qemu && self.vmm().is_err() => {
                return Err(Problem::hypervisor_gone("its QEMU has ended since the target was asked"));
            }
            Ok(IncomingView::Discarded) => TargetState::Discarded,
            Ok(IncomingView::Unknown) => TargetState::Unknown,
            // Its QEMU does not say how much it has. That may be the only copy, if there is none here.
            Err(problem) if problem.kind != ProblemKind::Failed || self.vmm().is_err() => {
                return Err(problem);
            }
            Ok(IncomingView::Waiting | IncomingView::Ready | IncomingView::ReadyInPart) | Err(_) => {
                let is_needed = self.check_not_needed_there(view.is_err()).await;
                // What the target says is why it is not known.
                is_needed.map_err(|needed| {
                    view.err().map_or_else(|| needed.clone(), |why| why.context(&needed))
                })?;
                self.discard_on_target().await?
            }
        };
        Ok(SourceEvent::TargetSays(state))
    }

    /// Has the target give the VM up, if it has a record of it.
    pub(super) async fn discard_on_target(&self) -> Result<TargetState, Problem> {
        match self.peer()?.delete::<()>(&self.incoming("")).await {
            Ok(()) => Ok(TargetState::Discarded),
            Err(problem) if problem.kind == ProblemKind::NotFound => Ok(TargetState::Unknown),
            Err(problem) => Err(problem),
        }
    }

    async fn target_view(&self) -> Result<IncomingView, Problem> {
        self.peer()?.get(&self.incoming("")).await
    }

    /// Whether a target that is said to be lost does not answer again and again.
    async fn stays_silent(&self) -> bool {
        for _ in 0..LOST_QUESTIONS {
            tokio::time::sleep(ASK_AGAIN_AFTER).await;
            if !is_like_lost(&self.target_view().await) {
                return false;
            }
        }
        true
    }

    pub(super) async fn end_on_source(&mut self) -> Result<(), Problem> {
        self.guard = None;
        match &self.claimed.vmm {
            Some(vmm) => vmm.power_off(QEMU_DEADLINE).await.map_err(Problem::failed),
            None => Ok(()),
        }
    }

    pub(super) fn revoke_hand_over(&self) -> Result<(), Problem> {
        self.outgoing.journal.revoke_hand_over(&self.running.id)?;
        Ok(())
    }

    pub(super) async fn clean_up(&mut self) -> Result<(), Problem> {
        if let Err(error) = self.read_final_counters().await {
            warn!(%error, "no final counters");
        }
        let path = self.incoming("finish");
        let there = async { self.peer()?.post::<TargetUse>(&path, &()).await };
        let here = async {
            self.destroy().await?;
            self.leave_disks().await
        };
        let network = self.put_back();
        let (used, destroyed, put_back) = tokio::join!(there, here, network);
        self.forget_tracked().await;
        (self.guard, self.relay) = (None, None);
        // A target that does not answer puts its network back by itself when it hears nothing more.
        self.observed.target_use = used.unwrap_or_default();
        destroyed.and(put_back)
    }

    async fn destroy(&self) -> Result<(), Problem> {
        let ended = match &self.claimed.vmm {
            Some(vmm) => vmm.destroy(QEMU_DEADLINE).await,
            // As after this host has booted again.
            None => self.outgoing.vms.hypervisor().end_managed(&self.claimed.definition, QEMU_DEADLINE).await,
        };
        ended.map_err(Problem::failed)
    }

    async fn read_final_counters(&mut self) -> Result<(), Problem> {
        // First: it is known also of a QEMU that does not answer.
        if let Some(relay) = &self.relay {
            self.observed.measurements.relayed(relay);
        }
        if let (Some(status), Some(vmm)) = (self.status().await?, &self.claimed.vmm) {
            self.observed.measurements.transfer_ends(&**vmm, &status);
        }
        let now_ms = self.now_ms();
        self.observed.measurements.sample(&self.outgoing.host.network, now_ms).await
    }

    pub(super) async fn stop_transfer(&mut self) -> Result<(), Problem> {
        (self.settings.bandwidth, self.target.watch) = (None, TargetWatch::default());
        self.tracked.on_way = None;
        self.settings.downtime_limit.hook = BeforePause::Over;
        if self.vmm().is_err() {
            return Ok(());
        }
        self.wait_while_stopped().await;
        let has_disk_copies = self.has_disk_copies();
        // First: QEMU would wait for what is on its way.
        (self.copying.sender, self.copying.throttle) = (None, None);
        self.on_own_connections(
            |of_vm, peer| of_vm.discard_unsent(peer),
            "the kernel keeps trying to send what QEMU has left",
        );
        if self.is_switching_over {
            self.cut_if_mute().await;
        }
        // A QEMU that was mute would not have heard it before.
        let abandoned = if has_disk_copies { self.abandon_disk_copies().await } else { Ok(()) };
        if let Err(error) = self.read_final_counters().await {
            warn!(%error, "no final counters: its connections are cut, so that it does not wait for them");
            self.cut();
        }
        if !self.is_switching_over
            && let Some(relay) = &self.relay
        {
            // Over slow links QEMU would wait for what its threads have in hand, be cut, and might then wait for itself
            // without end (docs/decisions/0040). While the VM is paused, it might call the migration completed.
            relay.stop_sending();
        }
        let cancelled = self.vmm()?.cancel(QEMU_DEADLINE).await;
        // QEMU 7.2 may call it over while some of its threads still wait in `send`, and its main thread for them,
        // for as long as the target is silent. It answers nothing meanwhile.
        self.cut();
        // Not before: QEMU would call the migration failed.
        self.relay = None;
        cancelled.map(drop).map_err(hypervisor_failed).and(abandoned)
    }

    /// The VM stands still for as long in any case; what is cut off meanwhile may never run again
    /// ([`drainpipe_hypervisor::Vm::is_stopped`]). Whether it was stopped.
    async fn wait_while_stopped(&self) -> bool {
        let Ok(vmm) = self.vmm() else { return false };
        if !vmm.is_stopped() {
            return false;
        }
        warn!(
            vm = self.running.vm,
            "somebody has stopped its QEMU, for example by SIGSTOP: its migration is undone once QEMU continues"
        );
        let end = Instant::now() + STOPPED_MAX;
        while vmm.is_stopped() && Instant::now() < end {
            tokio::time::sleep(LOOK_AT_STOPPED_EVERY).await;
        }
        true
    }

    /// Where nobody takes the last bytes, QEMU waits with the lock that each command needs: asked to cancel, it would
    /// say nothing, and the VM would stand still for as long as that is waited for.
    async fn cut_if_mute(&mut self) {
        if self.is_mute().await && (!self.wait_while_stopped().await || self.is_mute().await) {
            warn!(vm = self.running.vm, "its QEMU waits for the target: cut its connections");
            self.cut();
            self.relay = None;
        }
    }

    async fn is_mute(&self) -> bool {
        let Ok(vmm) = self.vmm() else { return false };
        vmm.migration(MUTE_AFTER).await.is_err_and(|error| error.is_mute())
    }

    fn cut(&self) {
        self.on_own_connections(
            |of_vm, peer| of_vm.cut(peer),
            "the VM may stand still for as long as QEMU waits for its target",
        );
    }

    /// What is left of the memory is not sent by whatever way there is once the network is put back, and nobody
    /// waits for it. The relay sees to it by itself.
    fn on_own_connections(
        &self,
        act: fn(&dyn Connections, SocketAddr) -> io::Result<usize>,
        else_what: &str,
    ) {
        let Some((vmm, address)) = self.own_connections() else { return };
        if let Some(Err(error)) = vmm.connections().map(|connections| act(connections, address)) {
            warn!(%error, "{else_what}");
        }
    }

    /// What the VM is doing here. Fails where its QEMU does not say.
    pub(super) async fn look_at_vm(&self) -> Result<VmCondition, Problem> {
        let Some(vmm) = &self.claimed.vmm else { return Ok(self.has_ended()) };
        match vmm.run_state(QMP_DEADLINE).await {
            Ok(RunState::Running) => Ok(VmCondition::Runs),
            Ok(_) => Ok(VmCondition::Paused),
            // QEMU closes its sockets a moment before its process has ended.
            Err(_) if vmm.wait_exit(EXIT_KNOWN_WITHIN).await.is_some() => Ok(self.has_ended()),
            Err(error) => Err(hypervisor_failed(error)),
        }
    }

    fn has_ended(&self) -> VmCondition {
        let why = self.vmm().err().unwrap_or_else(|| Problem::hypervisor_gone("its QEMU has ended"));
        VmCondition::Ended(why)
    }

    pub(super) async fn resume_on_source(&mut self) -> Result<(), Problem> {
        let vmm = self.vmm()?;
        cpu_priority::end_soon(vmm);
        vmm.run(QMP_DEADLINE).await.map_err(hypervisor_failed)?;
        // Its guard, or QEMU by itself, may have let it run before.
        self.read_events();
        self.guard = None;
        Ok(())
    }
}

/// A host that answers anything else is not lost. One that came back without its records does not know.
fn is_like_lost(view: &Result<IncomingView, Problem>) -> bool {
    match view {
        Ok(view) => *view == IncomingView::Unknown,
        Err(problem) => matches!(problem.kind, ProblemKind::Unreachable | ProblemKind::NotFound),
    }
}

pub(super) fn guard_acted() -> Problem {
    Problem::failed("this agent stood still for so long that its guard let the VM run here")
}
