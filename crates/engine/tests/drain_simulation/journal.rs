//! What the agent records of a drain, and what it knows of the drain after a restart. `agent/src/drain/executor.rs` and
//! `record.rs` do the same.

use std::collections::BTreeSet;

use drainpipe_engine::drain::status::{DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::journal::RECORD_AGAIN_AFTER;
use drainpipe_engine::problem::Problem;

use crate::milliseconds::ms;
use crate::planted::Planted;
use crate::world::{At, World, departure, name_of};

/// The time between two attempts to write.
const AGAIN_AFTER_MS: f64 = ms(RECORD_AGAIN_AFTER);

/// The drain's record.
#[derive(Debug)]
pub(crate) struct Journal {
    /// What a later life of the agent will read.
    written: Vec<MoveStatus>,
    /// The VMs that stay, by what is written.
    written_stays: Vec<String>,
    /// What this life of the agent believes to be written.
    recorded: DrainStatus,
    again_at_ms: Option<f64>,
}

impl Journal {
    pub(crate) fn new() -> Self {
        Self { written: vec![], written_stays: vec![], recorded: DrainStatus::begun(), again_at_ms: None }
    }

    /// The agent has read the journal.
    pub(crate) fn opened(&mut self) {
        self.recorded = DrainStatus { moves: self.written.clone(), ..DrainStatus::begun() };
        self.again_at_ms = None;
    }

    /// Writes this status; returns whether all of it is written.
    pub(crate) fn write(
        &mut self,
        now_ms: f64,
        status: DrainStatus,
        disk_full: bool,
        planted: Planted,
    ) -> bool {
        if self.again_at_ms.is_some_and(|again_at_ms| now_ms < again_at_ms) {
            return false;
        }
        self.again_at_ms = None;
        if is_same(&self.recorded, &status) {
            return true;
        }
        if disk_full && planted != Planted::BelievedRecord {
            self.again_at_ms = Some(now_ms + AGAIN_AFTER_MS);
            return false;
        }
        if !disk_full {
            self.write_changed(&status.moves);
            self.written_stays = status.stays.iter().map(|stay| stay.vm.clone()).collect();
        }
        self.recorded = status;
        true
    }

    fn write_changed(&mut self, moves: &[MoveStatus]) {
        let is_known = |one: &MoveStatus| {
            self.recorded.moves.iter().any(|known| known.vm == one.vm && is_same_move(known, one))
        };
        for one in moves.iter().filter(|one| !is_known(one)) {
            match self.written.iter_mut().find(|written| written.vm == one.vm) {
                Some(written) => written.clone_from(one),
                None => self.written.push(one.clone()),
            }
        }
        self.written.retain(|written| moves.iter().any(|one| one.vm == written.vm));
    }

    /// Adds the VMs that somebody else has moved since.
    fn settle_departures(&self, moves: &mut Vec<MoveStatus>, world: &World) {
        let has_left = |name: &str| world.vms.iter().any(|vm| vm.name == name && vm.at == At::Elsewhere);
        for one in moves.iter_mut().filter(|one| has_left(&one.vm)) {
            if matches!(one.state, MoveState::Waiting | MoveState::Failed) {
                *one = departure().status_of(one.vm.clone());
            }
        }
        let stays = self.written_stays.iter().filter(|vm| has_left(vm));
        moves.extend(stays.map(|vm| departure().status_of(vm.clone())));
    }

    pub(crate) fn is_behind(&self) -> bool {
        self.again_at_ms.is_some()
    }

    /// What the journal says, with what has become of the migrations that it left open.
    pub(crate) fn settled(&self, world: &World, planted: Planted) -> Vec<MoveStatus> {
        let is_open = |state| {
            !matches!(state, MoveState::Waiting | MoveState::Moved | MoveState::Failed | MoveState::Left)
        };
        let mut moves = self.written.clone();
        for one in moves.iter_mut().filter(|one| is_open(one.state) && planted != Planted::Unsettled) {
            settle(one, world);
        }
        self.settle_departures(&mut moves, world);
        moves
    }
}

fn settle(one: &mut MoveStatus, world: &World) {
    let Some(id) = &one.migration else {
        one.state = MoveState::Waiting;
        return;
    };
    let is_handed_over = |id: &String| {
        world.vms.iter().any(|vm| name_of(vm.migration) == *id && matches!(vm.at, At::InDoubt(_)))
    };
    one.state = match world.results.get(id) {
        Some(true) => MoveState::Moved,
        Some(false) => MoveState::Failed,
        None if is_handed_over(id) => MoveState::InDoubt,
        None => MoveState::Preparing,
    };
    match one.state {
        MoveState::Moved => one.error = None,
        MoveState::Failed => one.error = Some(Problem::failed("it failed")),
        _ => {}
    }
}

/// Whether two rows differ only in what changes all the time.
fn is_same_move(one: &MoveStatus, other: &MoveStatus) -> bool {
    (&one.vm, &one.target, one.state, &one.migration)
        == (&other.vm, &other.target, other.state, &other.migration)
        && (one.attempts, &one.error, &one.waits) == (other.attempts, &other.error, &other.waits)
}

fn is_same(one: &DrainStatus, other: &DrainStatus) -> bool {
    (one.state, one.transfers, &one.stays) == (other.state, other.transfers, &other.stays)
        && one.moves.len() == other.moves.len()
        && one.moves.iter().zip(&other.moves).all(|(one, other)| is_same_move(one, other))
}

/// The status of a drain that was continued, with what its earlier lives have moved.
pub(crate) fn with_earlier(mut status: DrainStatus, earlier: &[MoveStatus]) -> DrainStatus {
    if earlier.is_empty() {
        return status;
    }
    let listed: BTreeSet<&str> = status.moves.iter().map(|one| one.vm.as_str()).collect();
    let stays = |vm: &str| status.stays.iter().any(|stay| stay.vm == vm);
    let is_reported = |one: &&MoveStatus| {
        listed.contains(one.vm.as_str()) || (one.state != MoveState::InDoubt && stays(&one.vm))
    };
    let mut moves: Vec<MoveStatus> = earlier.iter().filter(|one| !is_reported(one)).cloned().collect();
    status.stays.retain(|stay| moves.iter().all(|one| one.vm != stay.vm));
    moves.append(&mut status.moves);
    DrainStatus { moves, ..status }
}
