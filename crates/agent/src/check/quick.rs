//! The quick form, before each migration and drain: what needs no traffic on the paths and no seconds.

use std::sync::Arc;

use drainpipe_engine::check::finding::Finding;
use drainpipe_engine::check::{Pair, check, worth_telling};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::plan::{Plan, Spread};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Machine;

use super::{Checks, facts, vms};
use crate::client::ApiClient;

/// What a person should know before these VMs go to `target`. What refuses a migration is among it.
pub(crate) async fn before_migration(
    checks: &Checks,
    peer: &ApiClient,
    target: &str,
    running: &[Arc<dyn Machine>],
    plan: &Plan,
) -> Result<Vec<Finding>, Problem> {
    let (target_facts, clock) = facts::ask(checks, peer, target).await?;
    let source_facts = facts::read(checks).await?;
    let vms = vms::ask(checks, peer, target, running).await?;
    let pair = Pair {
        source: &source_facts,
        target: &target_facts,
        paths: &plan.paths,
        trials: None,
        vms: &vms,
        multichannel: plan.spread() == Spread::Routed,
        may_use_all: plan.requested_option != RequestedOption::Tcp && !plan.post_copy(),
        clock,
    };
    Ok(worth_telling(check(pair)))
}
