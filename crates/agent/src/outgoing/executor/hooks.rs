//! The host's hooks: one runs before the VM's pause, and another one if the VM stays.

use drainpipe_engine::migration::progress::pause_is_near;
use drainpipe_engine::transfer::downtime::downtime_limit_ms;
use drainpipe_hypervisor::TransferStatus;
use tokio::task::JoinHandle;
use tracing::warn;

use super::Executor;
use crate::store::journal::HookDue;
use crate::vms::hooks::{self, Moment};

/// With it the hypervisor pauses the VM only when nothing is left to send, which is rare while the guest works.
pub(super) const HELD_DOWNTIME_LIMIT_MS: u64 = 0;

/// The state of the hook that runs before the pause.
#[derive(Debug, Default)]
pub(super) enum BeforePause {
    /// There is none, or it has ended.
    #[default]
    Over,
    /// It is not time for it yet.
    ToBegin,
    /// Until it ends, the VM is not to be paused.
    UnderWay(JoinHandle<()>),
}

impl Drop for BeforePause {
    fn drop(&mut self) {
        if let Self::UnderWay(hook) = self {
            hook.abort();
        }
    }
}

impl BeforePause {
    /// Whether the VM is not to be paused yet.
    pub(super) fn holds(&self) -> bool {
        match self {
            Self::Over => false,
            Self::ToBegin => true,
            Self::UnderWay(hook) => !hook.is_finished(),
        }
    }
}

/// How long a pause QEMU may take for short enough, and what keeps it from pausing the VM.
pub(super) struct DowntimeLimit {
    pub(super) ms: u64,
    pub(super) hook: BeforePause,
    /// What is left of the VM's disks might be much.
    pub(super) awaits_disks: bool,
    /// Rounds until these had ended.
    pub(super) rounds_held: u64,
}

impl Default for DowntimeLimit {
    fn default() -> Self {
        Self { ms: downtime_limit_ms(0), hook: BeforePause::default(), awaits_disks: false, rounds_held: 0 }
    }
}

impl DowntimeLimit {
    /// Whether the VM is not to be paused yet.
    pub(super) fn holds(&self) -> bool {
        self.awaits_disks || self.hook.holds()
    }
}

impl Executor {
    /// With which the transfer begins.
    pub(super) fn first_downtime_limit_ms(&mut self) -> u64 {
        if self.outgoing.host.config.hooks.before_pause.is_some() {
            self.settings.downtime_limit.hook = BeforePause::ToBegin;
        }
        if self.settings.downtime_limit.hook.holds() || self.copying.held_writes.is_begun {
            self.settings.downtime_limit.ms = HELD_DOWNTIME_LIMIT_MS;
        }
        self.settings.downtime_limit.ms
    }

    /// Begins it once the pause is near.
    pub(super) fn consider_hook(&mut self, status: &TransferStatus) {
        let ram = status.ram.unwrap_or_default();
        let is_near = is_near(ram.remaining_bytes, ram.throughput_mbps, ram.rounds);
        if matches!(self.settings.downtime_limit.hook, BeforePause::ToBegin) && is_near {
            self.settings.downtime_limit.hook = match self.note_hook_due() {
                Some(due) => self.begin_hook(due),
                None => BeforePause::Over,
            };
        }
    }

    /// The VM is paused: what the hook has not done by now cannot be done.
    pub(super) fn end_hook(&mut self) {
        let before = std::mem::take(&mut self.settings.downtime_limit.hook);
        if before.holds() {
            warn!(vm = self.running.vm, "was paused before its hook had ended or begun: the hook is stopped");
        }
    }

    fn begin_hook(&self, due: HookDue) -> BeforePause {
        let outgoing = std::sync::Arc::clone(&self.outgoing);
        BeforePause::UnderWay(tokio::spawn(async move {
            hooks::run(&outgoing.host.config.hooks, Moment::BeforePause, &due).await;
        }))
    }

    /// First: should the agent end, another hook is to undo what this one did. None where that cannot be recorded.
    fn note_hook_due(&self) -> Option<HookDue> {
        let due = HookDue {
            migration: self.running.id.clone(),
            vm: self.running.vm.clone(),
            source: self.outgoing.host.name().into(),
            target: self.running.target.clone(),
        };
        match self.outgoing.journal.hook_is_due(&due) {
            Ok(()) => Some(due),
            Err(error) => {
                warn!(vm = due.vm, %error, "the journal cannot record the hook, so `before_pause` does not run");
                None
            }
        }
    }
}

/// Whether the VM would be paused soon, at this pace: the hook may take as long as that at no cost.
fn is_near(remaining_bytes: u64, mbps: f64, rounds: u64) -> bool {
    // Mb/s are so many thousand bits a millisecond.
    let left_ms = (mbps > 0.0).then(|| remaining_bytes as f64 * 8.0 / (mbps * 1_000.0));
    pause_is_near(rounds, left_ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_is_told_when_the_pause_is_near() {
        let mib = 1 << 20;
        assert!(!is_near(1_000 * mib, 1_000.0, 1), "8 s");
        assert!(is_near(200 * mib, 1_000.0, 1), "1.7 s");
        assert!(!is_near(200 * mib, 0.0, 1), "who knows");
        assert!(is_near(1_000 * mib, 1_000.0, 2), "all was sent once");
    }
}
