//! VMs whose QEMU runs, but did not answer when the agent started: the agent connects to it as soon as it does.
//!
//! A QEMU whose target died may not answer until its guard has acted, and one whose storage hangs until that answers
//! again (docs/decisions/0040).

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use tokio::time::sleep;
use tracing::{debug, info, warn};

use crate::disk_moves::{self, DiskMoves};
use crate::incoming;
use crate::outgoing::{self, Outgoing};
use crate::vms::Claim;
use crate::vms::cpu_priority;
use crate::vms::throttles;

/// How often it is tried, and how many times: a day.
const TRY_EVERY: Duration = Duration::from_secs(5);
const TRIES_MAX: u32 = 17_280;

/// Tries to connect to each unresponsive VM, until that succeeds.
pub(crate) fn keep_trying(outgoing: &Arc<Outgoing>, moves: &Arc<DiskMoves>) {
    for name in outgoing.vms.unresponsive() {
        tokio::spawn(try_for_long(Arc::clone(outgoing), Arc::clone(moves), name));
    }
}

async fn try_for_long(outgoing: Arc<Outgoing>, moves: Arc<DiskMoves>, name: String) {
    for _ in 0..TRIES_MAX {
        sleep(TRY_EVERY).await;
        if outgoing.vms.why_unresponsive(&name).is_none() {
            return info!(vm = name, "was stopped");
        }
        match reach(&outgoing, &moves, &name).await {
            Ok(()) => return info!(vm = name, "within reach again"),
            Err(problem) => debug!(vm = name, %problem, "still unresponsive"),
        }
    }
    warn!(vm = name, "unresponsive; the agent tries again when it restarts");
}

/// Goes on with what the agent has left of it.
async fn reach(outgoing: &Arc<Outgoing>, moves: &Arc<DiskMoves>, name: &str) -> Result<(), Problem> {
    let open = outgoing.journal.open_migrations()?.into_iter().find(|open| open.vm == name);
    let disk_move = outgoing.journal.disk_moves()?.into_iter().find(|of| of.vm == name);
    let claim = match (&open, &disk_move) {
        (Some(open), _) => Claim::Migrating(open.id.clone()),
        (None, Some(of)) => Claim::MovingDisk(of.disk, of.id.clone()),
        (None, None) => Claim::Changing,
    };
    let claimed = outgoing.vms.reach(name, claim).await?;
    if let Some(vmm) = &claimed.vmm {
        cpu_priority::end(&**vmm);
        tokio::spawn(throttles::let_writes_go(Arc::clone(vmm)));
    }
    match (open, disk_move) {
        (Some(open), _) => outgoing::take_up(outgoing, open, claimed),
        (None, Some(of)) => disk_moves::take_up(moves, &of, claimed),
        (None, None) => incoming::take_up_reached(&outgoing.incoming, name).await?,
    }
    Ok(())
}
