//! Looks after one VM on its way, as the engine decides: asks a source that falls silent, and gives up a VM whose
//! source is gone, as far as that is allowed.

use std::sync::Arc;

use drainpipe_engine::migration::target::order::{Order, OrderAnswer};
use drainpipe_engine::migration::target::silence::{HandOverAnswer, Watch, WatchAction, WatchEvent};
use drainpipe_engine::problem::Problem;
use tokio::time::sleep;
use tracing::{debug, warn};

use super::Incoming;
use super::ending::finish_incoming;
use super::order::carry_out;
use super::vm::{IncomingVm, WATCH_EVERY};
use drainpipe_api_types::HandOverView;

/// Looks after it for as long as it is on its way.
pub(super) async fn watch(incoming: Arc<Incoming>, entry: Arc<IncomingVm>) {
    let (mut watch, mut action) = Watch::begin();
    while incoming.entries.is_there(&entry) {
        let event = perform(&incoming, &entry, action).await;
        let memory = *entry.memory();
        action = watch.handle(entry.now_ms(), &memory, event);
    }
}

pub(super) async fn perform(incoming: &Arc<Incoming>, entry: &IncomingVm, action: WatchAction) -> WatchEvent {
    match action {
        WatchAction::Rest => sleep(WATCH_EVERY).await,
        WatchAction::TakeHold => {
            if let Err(problem) = entry.take_hold(&incoming.vms).await {
                debug!(migration = entry.id, %problem, "its QEMU does not answer yet");
            }
        }
        WatchAction::Recall => match incoming.journal.incoming_state(&entry.id) {
            Ok(state) => return WatchEvent::State(state.map(|(_, state)| state)),
            Err(error) => cannot_settle(entry, &error.into()),
        },
        WatchAction::Carry(order) => return carry(incoming, entry, order).await,
        WatchAction::AskSource => {
            let (said, problem) = ask_source(incoming, &entry.source, &entry.id).await;
            if let Some(problem) = problem {
                cannot_settle(entry, &problem);
            }
            return WatchEvent::SourceSays(said);
        }
        WatchAction::Hear => entry.hear(),
        WatchAction::Look => return look(incoming, entry).await,
        WatchAction::Close => {
            if let Err(problem) = finish_incoming(incoming, &entry.id).await {
                cannot_settle(entry, &problem);
            }
        }
    }
    WatchEvent::Done
}

fn cannot_settle(entry: &IncomingVm, problem: &Problem) {
    warn!(migration = entry.id, %problem, "a VM on its way here cannot be settled; tried again soon");
}

async fn carry(incoming: &Arc<Incoming>, entry: &IncomingVm, order: Order) -> WatchEvent {
    if order == (Order::Discard { is_sources: false }) {
        warn!(
            migration = entry.id,
            source = entry.source,
            "given up: its source is gone, or has given it up"
        );
    }
    let carried = carry_out(incoming, &entry.id, order).await;
    match (&carried, order) {
        (Err(problem), Order::Run { is_sources: true }) => {
            debug!(migration = entry.id, %problem, "it does not run here yet");
        }
        (Err(problem), _) => cannot_settle(entry, problem),
        (Ok(_), _) => {}
    }
    match (carried, order) {
        (Ok(OrderAnswer::View(view)), Order::View) => WatchEvent::View(Some(view)),
        (_, Order::View) => WatchEvent::View(None),
        _ => WatchEvent::Done,
    }
}

/// Which host a VM belongs to, by its source's journal; or why that is not known.
pub(super) async fn ask_source(
    incoming: &Incoming,
    source: &str,
    id: &str,
) -> (HandOverAnswer, Option<Problem>) {
    let said = match incoming.peers.get(source) {
        Some(peer) => peer.get::<HandOverView>(&format!("/v1/handovers/{id}")).await,
        None => Err(Problem::not_found(format!("{source} is no longer a peer"))),
    };
    match said {
        Ok(HandOverView::Pending) => (HandOverAnswer::Pending, None),
        Ok(HandOverView::HandedOver) => (HandOverAnswer::HandedOver, None),
        Ok(HandOverView::Refused) => (HandOverAnswer::Refused, None),
        Ok(HandOverView::Unknown) => {
            let why = format!("{source} has no record of this migration");
            (HandOverAnswer::Unknown, Some(Problem::failed(why)))
        }
        Err(problem) => (HandOverAnswer::Silent, Some(problem)),
    }
}

/// What its QEMU has, before it is given up.
async fn look(incoming: &Incoming, entry: &IncomingVm) -> WatchEvent {
    // An error is of one that stood before this agent did, lives, and has not answered since.
    if entry.built().is_none() && entry.take_hold(&incoming.vms).await.is_err() {
        return WatchEvent::Mute;
    }
    let Some(vmm) = entry.built().filter(|vmm| vmm.alive()) else { return WatchEvent::Gone };
    match entry.look(&*vmm).await {
        Ok((received, _)) => WatchEvent::Received(received),
        Err(_) if !vmm.alive() => WatchEvent::Gone,
        Err(_) => WatchEvent::Mute,
    }
}
