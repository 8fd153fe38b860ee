//! The view of a drain: from the running one, or from the journal and from what has become of its migrations since.

use std::collections::BTreeSet;

use drainpipe_engine::drain::run::Departure;
use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::problem::{Problem, ProblemKind};

use super::Drains;
use crate::store::journal::{DrainRecord, Journal};
use crate::vms::does_not_run;
use drainpipe_api_types::{DrainKind, DrainView};

/// This host's cordon, and what is under way or was last.
pub(crate) fn view(drains: &Drains) -> Result<DrainView, Problem> {
    let cordon = drains.journal.cordon()?;
    let nothing = DrainView {
        host: drains.host.name().into(),
        cordoned: cordon.is_some(),
        swap_with: cordon.and_then(|cordon| cordon.swap_with),
        kind: None,
        id: None,
        started_at: None,
        ended_at: None,
        request: None,
        status: None,
    };
    if let Some(course) = drains.under_way.current() {
        let mut status = course.status.borrow().clone();
        match course.kind {
            DrainKind::Drain => decide(&drains.journal, &mut status.moves)?,
            DrainKind::Failback => in_doubt(&mut status.moves).for_each(|one| settle_return(drains, one)),
        }
        return Ok(DrainView {
            kind: Some(course.kind),
            id: Some(course.id.clone()),
            started_at: Some(course.started_at.to_string()),
            request: course.request.clone(),
            status: Some(status),
            ..nothing
        });
    }
    let Some(record) = drains.journal.last_run()? else { return Ok(nothing) };
    let mut record = settled(drains, record)?;
    if record.ended_at.is_none() {
        // One that is carried on is being planned.
        let beginning = drains.under_way.is_beginning();
        record.status.state = if beginning { DrainState::Moving } else { DrainState::Interrupted };
    }
    Ok(DrainView {
        kind: Some(record.kind),
        id: Some(record.id),
        started_at: Some(record.started_at.to_string()),
        ended_at: record.ended_at.map(|ended_at| ended_at.to_string()),
        request: record.request,
        status: Some(record.status),
        ..nothing
    })
}

fn in_doubt(moves: &mut [MoveStatus]) -> impl Iterator<Item = &mut MoveStatus> {
    moves.iter_mut().filter(|one| one.state == MoveState::InDoubt)
}

/// Finds out what has become of the VMs in doubt of a drain under way. The journal still has it when the drain is over,
/// so it is not written down.
fn decide(journal: &Journal, moves: &mut [MoveStatus]) -> Result<(), Problem> {
    for one in in_doubt(moves) {
        let Some(id) = &one.migration else { continue };
        if let Some(result) = journal.result(id)? {
            end(one, &result);
        }
    }
    Ok(())
}

/// A drain that is not under way, with what has become by now of what it left open.
pub(super) fn settled(drains: &Drains, mut record: DrainRecord) -> Result<DrainRecord, Problem> {
    for one in &mut record.status.moves {
        // It was for a drain that went on.
        one.waits = None;
    }
    for one in &mut record.status.moves {
        match record.kind {
            DrainKind::Drain if is_open(one.state) => settle(drains, one)?,
            DrainKind::Failback if is_open(one.state) => settle_return(drains, one),
            // No matter who has brought it.
            DrainKind::Failback if one.state == MoveState::Waiting && has_arrived(drains, &one.vm) => {
                one.state = MoveState::Moved;
            }
            DrainKind::Drain | DrainKind::Failback => {}
        }
        if one.state == MoveState::Lost && has_arrived(drains, &one.vm) {
            note_boot(one);
        }
    }
    // What leaves after the cordon is lifted is the day's work, and none of this drain's.
    if record.cordons {
        settle_departures(drains, &mut record)?;
    }
    if record.status.state == DrainState::Incomplete && record.status.all_moved() {
        record.status.state = DrainState::Drained;
    }
    Ok(record)
}

fn is_open(state: MoveState) -> bool {
    !matches!(
        state,
        MoveState::Waiting | MoveState::Moved | MoveState::Failed | MoveState::Lost | MoveState::Left
    )
}

fn settle(drains: &Drains, one: &mut MoveStatus) -> Result<(), Problem> {
    let Some(id) = &one.migration else {
        one.state = MoveState::Waiting;
        return Ok(());
    };
    if let Some(result) = drains.journal.result(id)? {
        end(one, &result);
        return Ok(());
    }
    let handed_over = drains.journal.open_migration(id)?.is_some_and(|open| open.handed_over);
    one.state = if handed_over { MoveState::InDoubt } else { MoveState::Preparing };
    Ok(())
}

/// What it was doing is lost, and somebody has booted it again: it runs here, and is still to move.
fn note_boot(one: &mut MoveStatus) {
    let again = "it was booted again and runs here: drain again to move it";
    one.state = MoveState::Failed;
    one.error = Some(match one.error.take() {
        Some(problem) => Problem { message: format!("{}; {again}", problem.message), ..problem },
        None => Problem::failed(again),
    });
}

/// VMs that somebody else has moved since count as having left.
fn settle_departures(drains: &Drains, record: &mut DrainRecord) -> Result<(), Problem> {
    let DrainRecord { id: drain, status: DrainStatus { moves, stays, .. }, .. } = record;
    for one in moves.iter_mut().filter(|one| matches!(one.state, MoveState::Waiting | MoveState::Failed)) {
        if let Some(departure) = departure(drains, &one.vm, drain)? {
            (one.state, one.error) = (MoveState::Left, None);
            (one.target, one.migration) = (departure.target, Some(departure.migration));
        }
    }
    for stay in std::mem::take(stays) {
        match departure(drains, &stay.vm, drain)? {
            Some(departure) => moves.push(departure.status_of(stay.vm)),
            None => stays.push(stay),
        }
    }
    Ok(())
}

/// The migrations that a drain has begun itself.
pub(super) fn own_migrations(moves: &[MoveStatus]) -> BTreeSet<String> {
    let own = moves.iter().filter(|one| one.state != MoveState::Left);
    own.filter_map(|one| one.migration.clone()).collect()
}

/// What has left by a migration that an earlier attempt at the same drain had begun was moved by the drain, and comes
/// back with the others. Such a migration may end when the new attempt has been planned already.
pub(super) fn claim_own(moves: &mut [MoveStatus], own: &BTreeSet<String>) {
    let is_own = |one: &MoveStatus| one.migration.as_ref().is_some_and(|id| own.contains(id));
    for one in moves.iter_mut().filter(|one| one.state == MoveState::Left && is_own(one)) {
        one.state = MoveState::Moved;
    }
}

/// Before the cordon is lifted: writes down what has become of what a drain left open.
pub(super) fn settle_for_good(drains: &Drains) -> Result<(), Problem> {
    let Some(drain) = drains.journal.last_drain()?.filter(|drain| drain.cordons) else { return Ok(()) };
    let DrainRecord { id, status, .. } = settled(drains, drain)?;
    let moves: Vec<_> = status.moves.iter().enumerate().collect();
    Ok(drains.journal.record_drain(&id, &status, &moves, &[])?)
}

/// Where a VM that this drain has seen here has gone since, if it is not here any more and the history knows. Nothing
/// comes to a host that is cordoned but by a swap, so after a migration since then it has not come back.
pub(super) fn departure(drains: &Drains, vm: &str, drain: &str) -> Result<Option<Departure>, Problem> {
    if drains.vms.contains(vm) {
        return Ok(None);
    }
    Ok(drains.journal.left_since_drain(vm, drain)?.map(|last| Departure {
        target: last.target,
        migration: last.id,
        memory_bytes: last.memory.memory_bytes,
    }))
}

/// What has become of a VM that was to come back and that no way back follows now. The host that it comes from has the
/// result; here is known whether it has arrived, and whether it is on its way.
fn settle_return(drains: &Drains, one: &mut MoveStatus) {
    if has_arrived(drains, &one.vm) {
        (one.state, one.error) = (MoveState::Moved, None);
    } else if drains.outgoing.migrations.of_vm(&one.vm).is_some()
        || drains.incoming.entries.has(&one.vm)
        || drains.vms.why_unresponsive(&one.vm).is_some()
    {
        // It is as it was.
    } else if let Ok(definition) = drains.vms.definition(&one.vm) {
        (one.state, one.error) = (MoveState::Failed, Some(does_not_run(&definition)));
    } else {
        let error = format!(
            "it has not come to {host}, and {host} does not know that it is on its way: {} had it last; \
            give the same command again to fetch it",
            one.target,
            host = drains.host.name()
        );
        (one.state, one.error) = (MoveState::Waiting, Some(Problem::failed(error)));
    }
}

/// Whether a VM runs here, and is not on its way from here.
pub(super) fn has_arrived(drains: &Drains, vm: &str) -> bool {
    // One that is on its way from here, or may have left, has its QEMU here too.
    let is_leaving = drains.outgoing.migrations.of_vm(vm).is_some();
    // One whose QEMU has just ended is counted for a moment yet.
    !is_leaving && drains.vms.running(vm).is_some_and(|vmm| vmm.alive())
}

/// Puts down how a migration ended.
pub(super) fn end(one: &mut MoveStatus, result: &MigrationResult) {
    one.error = problem_of(result);
    one.state = match result.outcome {
        Outcome::Completed => MoveState::Moved,
        Outcome::Failed if result.has_vm_ended() => MoveState::Lost,
        Outcome::Failed | Outcome::Cancelled => MoveState::Failed,
        Outcome::InDoubt => MoveState::InDoubt,
        Outcome::Lost => MoveState::Lost,
    };
    if result.outcome == Outcome::Completed {
        (one.error, one.transfer_ms) = (None, Some(result.times.transfer_ms));
    }
}

/// What went wrong with a migration that did not complete.
pub(super) fn problem_of(result: &MigrationResult) -> Option<Problem> {
    match (result.outcome, &result.failure.error) {
        (Outcome::Completed, _) => None,
        (_, Some(error)) => {
            Some(Problem::new(result.failure.error_kind.unwrap_or(ProblemKind::Failed), error))
        }
        (Outcome::Cancelled, None) => Some(Problem::failed("it was cancelled; the VM runs where it ran")),
        (_, None) => Some(Problem::failed(format!(
            "no reason is known; `drainpipe history {}` has the log",
            result.id
        ))),
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use serde_json::json;

    use super::*;
    use drainpipe_api_types::{DrainRequest, MigrateRequest};

    fn in_doubt_move(vm: &str) -> MoveStatus {
        MoveStatus {
            vm: vm.into(),
            target: "b".into(),
            state: MoveState::InDoubt,
            migration: Some(format!("of {vm}")),
            attempts: 1,
            error: Some(Problem::failed("b has not said whether it runs there")),
            waits: None,
            memory_bytes: 1 << 30,
            sent_bytes: 7,
            predicted_bytes: 7,
            predicted_ms: 1.0,
            transfer_ms: None,
            compression: None,
            disks: None,
        }
    }

    fn begin(journal: &Journal, vm: &str) {
        let request: MigrateRequest = serde_json::from_value(json!({ "vm": vm, "target": "b" })).unwrap();
        journal.begin_migration(&format!("of {vm}"), &request, Timestamp::UNIX_EPOCH).unwrap();
    }

    fn finish(journal: &Journal, vm: &str, outcome: &str, error: Option<&str>) {
        finish_at(journal, vm, outcome, error, Timestamp::UNIX_EPOCH);
    }

    fn finish_at(journal: &Journal, vm: &str, outcome: &str, error: Option<&str>, now: Timestamp) {
        let result = json!({
            "id": format!("of {vm}"), "vm": vm, "source": "a", "target": "b", "started_at": "1970-01-01T00:00:00Z",
            "requested_option": "auto", "option": "tcp", "outcome": outcome, "error": error,
            "total_ms": 9.0, "setup_ms": 1.0, "transfer_ms": 5.0, "completion_ms": 3.0, "memory_bytes": 1 << 30,
            "wire_bytes": 7, "throughput_gbps": 1.0, "rounds": 2,
            "cpu_seconds": { "source_vmm": 0.0, "source_agent": 0.0, "target_vmm": 0.0, "target_agent": 0.0 },
            "paths": [], "events": [], "samples": [],
        });
        let result: MigrationResult = serde_json::from_value(result).unwrap();
        journal.end_migration(&result, result.has_left(), now).unwrap();
    }

    #[test]
    fn what_an_earlier_attempt_had_begun_was_not_moved_by_somebody_else() {
        let earlier = [
            in_doubt_move("db"),
            MoveStatus { state: MoveState::Left, ..in_doubt_move("shop") },
            MoveStatus { migration: None, ..in_doubt_move("web") },
        ];
        let own = own_migrations(&earlier);
        let left = |vm| MoveStatus { state: MoveState::Left, ..in_doubt_move(vm) };
        let mut moves = [left("db"), left("shop"), left("web"), in_doubt_move("db")];
        claim_own(&mut moves, &own);
        let states = moves.map(|one| one.state);
        let expected = [MoveState::Moved, MoveState::Left, MoveState::Left, MoveState::InDoubt];
        assert_eq!(states, expected);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_in_doubt_is_told_as_it_is_once_its_target_has_answered() {
        let (_directory, journal) = Journal::temporary();
        let vms = ["db", "shop", "web"];
        for vm in vms {
            begin(&journal, vm);
        }
        let before = vms.map(in_doubt_move);
        let mut moves = before.clone();
        decide(&journal, &mut moves).unwrap();
        assert_eq!(moves, before);
        finish(&journal, "db", "completed", None);
        finish(&journal, "shop", "failed", Some("b has discarded it"));
        decide(&journal, &mut moves).unwrap();
        assert_eq!(
            moves[0],
            MoveStatus { state: MoveState::Moved, error: None, transfer_ms: Some(5.0), ..before[0].clone() }
        );
        assert_eq!(moves[1].state, MoveState::Failed);
        assert!(moves[1].error.as_ref().is_some_and(|error| error.message.contains("discarded")));
        assert_eq!(moves[2], before[2]);
    }

    /// The drain begins at 1000 s by a clock that is then put back.
    #[tokio::test(flavor = "multi_thread")]
    async fn who_has_left_since_a_drain_began_is_known_whatever_the_clock_says() {
        let (_directory, journal) = Journal::temporary();
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        for (vm, ended_s) in [("long-gone", 500), ("by-a-clock-that-was-ahead", 5_000), ("just-gone", 995)] {
            begin(&journal, vm);
            finish_at(&journal, vm, "completed", None, at(ended_s));
        }
        begin(&journal, "on-its-way");
        journal.begin_drain("one", at(1_000), &DrainRequest::default()).unwrap();
        for (vm, ended_s) in [("on-its-way", 10), ("later", 20)] {
            if vm == "later" {
                begin(&journal, vm);
            }
            finish_at(&journal, vm, "completed", None, at(ended_s));
        }
        begin(&journal, "ended-there");
        finish_at(&journal, "ended-there", "lost", Some("it has ended on the target"), at(30));
        let left = |vm: &str| journal.left_since_drain(vm, "one").unwrap().is_some();
        assert!(["just-gone", "on-its-way", "later", "ended-there"].into_iter().all(left));
        assert!(!["long-gone", "by-a-clock-that-was-ahead"].into_iter().any(left));
    }
}
