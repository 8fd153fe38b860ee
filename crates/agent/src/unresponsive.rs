//! VMs whose QEMU lives, but did not answer when the agent started: taken hold of as soon as it does.
//!
//! A QEMU whose target died may be mute until its guard has acted, and one whose storage hangs for as long as that
//! does (docs/decisions/0040).

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::agent::Agent;
use crate::vms::Claim;
use crate::{cpu_priority, incoming, outgoing};

/// How often it is tried, and how many times: a day.
const TRY_EVERY: Duration = Duration::from_secs(5);
const TRIES_MAX: u32 = 17_280;

/// Tries to take hold of each that is out of reach, until it is not.
pub(crate) fn keep_trying(agent: &Arc<Agent>) {
    for name in agent.vms.unresponsive() {
        tokio::spawn(try_for_long(Arc::clone(agent), name));
    }
}

async fn try_for_long(agent: Arc<Agent>, name: String) {
    for _ in 0..TRIES_MAX {
        sleep(TRY_EVERY).await;
        if agent.vms.why_unresponsive(&name).is_none() {
            return info!(vm = name, "was stopped");
        }
        match reach(&agent, &name).await {
            Ok(()) => return info!(vm = name, "within reach again"),
            Err(problem) => debug!(vm = name, %problem, "still out of reach"),
        }
    }
    warn!(vm = name, "out of reach until the agent is started anew");
}

/// Goes on with what the agent has left of it.
async fn reach(agent: &Arc<Agent>, name: &str) -> Result<(), Problem> {
    let open = agent.journal.open_migrations()?.into_iter().find(|open| open.vm == name);
    let claim = open.as_ref().map_or(Claim::Changing, |open| Claim::Migrating(open.id.clone()));
    let claimed = agent.vms.reach(name, claim).await?;
    if let Some(vmm) = &claimed.vmm {
        cpu_priority::end(vmm);
    }
    match open {
        Some(open) => outgoing::take_up(agent, open, claimed),
        None => incoming::resume_recorded(agent, |vm| vm == name).await?,
    }
    Ok(())
}
