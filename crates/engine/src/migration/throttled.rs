//! A VM whose memory gets dirty too fast: its CPUs are throttled while memory is copied, and only then.

use super::{Migration, Phase};
use crate::estimate::convergence::Outpaced;
use crate::plan::Plan;
use crate::problem::Problem;
use crate::transfer::transferred::Transferred;

impl Migration {
    /// The share of their time for which the VM's CPUs are to be held back from now on, in percent. Whoever carries the
    /// actions out sees to it before the next one, and says so by [`SourceEvent::Throttled`](super::SourceEvent::Throttled).
    pub fn throttle_percent(&self) -> Option<u8> {
        // With post-copy the transfer comes to an end whatever the VM does.
        let is_post_copy = self.plan.as_ref().is_some_and(Plan::post_copy);
        self.throttle.percent().filter(|_| self.phase == Phase::Copying && !is_post_copy)
    }

    /// Whether the rounds do not end as it is now.
    pub(super) fn outpaced(&self) -> Option<Outpaced> {
        let is_post_copy = self.plan.as_ref().is_some_and(Plan::post_copy);
        if self.phase != Phase::Copying || is_post_copy {
            return None;
        }
        self.meter.outpaced(self.throttle.most_percent())
    }

    pub(super) fn consider_throttle(&mut self, now_ms: f64, transferred: Option<&Transferred>) {
        if self.phase != Phase::Copying {
            return;
        }
        // Links that fail again and again must not fill the log.
        if self.throttle.wait(self.meter.silent_ms(now_ms)) {
            self.note(now_ms, "nothing arrives: meanwhile the VM's CPUs are not throttled");
        }
        if let Some(transferred) = transferred {
            self.throttle.record(now_ms, transferred);
        }
    }

    pub(super) fn not_throttled(&mut self, now_ms: f64, problem: &Problem) {
        self.throttle.give_up();
        self.note(
            now_ms,
            format!(
                "memory gets dirty too fast, and the VM's CPUs cannot be throttled: {problem}; if it does not arrive, \
                 `--post-copy` moves it nevertheless"
            ),
        );
    }
}
