//! What is left of a plan after its paths were tested.

use super::reason::FailedPath;
use super::{Paths, Plan, PlanError, Reason, Spread};
use crate::paths::path_record::TrialOutcome;

impl Plan {
    /// What is left of the plan once each of its paths has been tried; `trials` in their order.
    pub fn narrow(
        self,
        trials: &[TrialOutcome],
        source_host: &str,
        target_host: &str,
    ) -> Result<Self, PlanError> {
        let (mut left, mut failed) = (vec![], vec![]);
        for (path, trial) in self.paths.iter().zip(trials) {
            match trial {
                Ok(()) => left.push(path.clone()),
                Err(why) => failed.push(FailedPath { path: path.to_string(), why: why.clone() }),
            }
        }
        if self.spread() == Spread::InTurn {
            left.truncate(1);
        }
        if left.iter().all(|path| path.is_standby) {
            for path in &mut left {
                path.is_standby = false;
            }
        }
        let Ok(paths) = Paths::try_from(left) else {
            let tried: Vec<String> = failed.iter().map(ToString::to_string).collect();
            return Err(PlanError::NothingGetsThrough {
                source_host: source_host.into(),
                target_host: target_host.into(),
                tried: tried.join(", "),
            });
        };
        let mut reasons = self.reasons;
        if !failed.is_empty() {
            reasons.push(Reason::Failed(failed));
        }
        Ok(Self { paths, reasons, ..self })
    }
}
