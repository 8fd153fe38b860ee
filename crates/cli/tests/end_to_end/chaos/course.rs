//! An errand of a round, from its beginning to its end.

use std::time::{Duration, Instant};

use super::monitor::Seen;
use super::plan::{Errand, Moment, Next, Planned};

/// An errand of the round, and who takes part in it, as soon as that is known.
pub(super) struct Course {
    pub(super) errand: Errand,
    pub(super) source: Option<String>,
    pub(super) target: Option<String>,
    pub(super) vm: Option<String>,
    pub(super) next: Option<Next>,
    /// The second move once it has begun, for as long as it may have to be repeated.
    pub(super) gone_on: Option<Next>,
    pub(super) seen: Vec<(Moment, Instant)>,
    pub(super) begins: Duration,
    pub(super) has_begun: bool,
}

impl Course {
    pub(super) fn of(planned: &Planned) -> Self {
        let next = match planned.errand {
            Errand::Move { next, .. } => next,
            Errand::DrainAndBack { .. } => None,
        };
        Self {
            errand: planned.errand,
            source: None,
            target: None,
            vm: None,
            next,
            gone_on: None,
            seen: vec![],
            begins: planned.after,
            has_begun: false,
        }
    }

    pub(super) fn has_post_copy(&self) -> bool {
        match self.errand {
            Errand::Move { way, next, .. } => way.post_copy || next.is_some_and(|next| next.way.post_copy),
            Errand::DrainAndBack { post_copy, .. } => post_copy,
        }
    }

    /// For a drain, the VM that leaves first counts.
    pub(super) fn sees(&mut self, seen: &Seen) {
        let Some(source) = &self.source else { return };
        let is_drain = matches!(self.errand, Errand::DrainAndBack { .. });
        if is_drain && self.vm.is_none() && seen.moment == Moment::IncomingVm && seen.host != *source {
            (self.vm, self.target) = (Some(seen.vm.clone()), Some(seen.host.clone()));
        }
        let side = match seen.moment {
            Moment::IncomingVm | Moment::Resumed => &self.target,
            Moment::Active | Moment::Paused | Moment::Left => &self.source,
        };
        if self.vm.as_ref() == Some(&seen.vm) && side.as_ref() == Some(&seen.host) {
            self.seen.push((seen.moment, seen.at));
        }
    }
}
