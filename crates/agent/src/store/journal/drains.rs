//! The journal's records of drains and failbacks. A drain whose row is open keeps this host cordoned until somebody
//! resumes it.

use drainpipe_engine::drain::status::{DrainState, DrainStatus, MoveStatus};
use drainpipe_engine::drain::view::FoundTransfers;
use drainpipe_engine::option::RequestedOption;
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};

use super::{Journal, JournalCause, JournalError, from_json, to_json};
use drainpipe_api_types::{DrainKind, DrainRequest};

/// How many drains and ways back are kept.
const DRAINS_KEPT: u32 = 1_000;

/// A drain, or a way back, as it was last recorded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DrainRecord {
    /// Its identifier.
    pub(crate) id: String,
    /// Which of the two it is.
    pub(crate) kind: DrainKind,
    /// The host whose VMs may come here meanwhile.
    pub(crate) swap_with: Option<String>,
    /// When it began.
    pub(crate) started_at: Timestamp,
    /// When it ended; absent while it is under way.
    pub(crate) ended_at: Option<Timestamp>,
    /// Whether this host is cordoned for it.
    pub(crate) cordons: bool,
    /// The last request; for a failback, how VMs move; absent if an older Drainpipe began it.
    pub(crate) request: Option<DrainRequest>,
    /// How far it has come.
    pub(crate) status: DrainStatus,
}

/// A drain that begins or is carried on.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BegunDrain {
    /// As it begins.
    pub(crate) record: DrainRecord,
    // As it stood; absent of a new one.
    before: Option<DrainRecord>,
}

/// What keeps VMs from coming here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cordon {
    /// The host whose VMs may come all the same.
    pub(crate) swap_with: Option<String>,
}

impl Journal {
    /// What keeps VMs from coming here, if anything does.
    pub(crate) fn cordon(&self) -> Result<Option<Cordon>, JournalError> {
        self.run(|connection| {
            let cordon = connection.query_row("SELECT swap_with FROM drains WHERE cordons = 1", [], |row| {
                Ok(Cordon { swap_with: row.get(0)? })
            });
            Ok(cordon.optional()?)
        })
    }

    /// VMs that have come here since the host was cordoned: those of the host with which it changes places.
    pub(crate) fn swapped_in(&self) -> Result<Vec<String>, JournalError> {
        self.run(|connection| {
            let mut statement = connection.prepare(
                "SELECT incoming.vm FROM incoming JOIN drains ON drains.cordons = 1 \
                 AND incoming.rowid > drains.last_incoming AND incoming.source = drains.swap_with \
                 WHERE incoming.state != 'discarded'",
            )?;
            Ok(statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?)
        })
    }

    /// Cordons the host for a drain that begins or is carried on. A drain that has not been resumed is
    /// carried on under its own identifier, else it gets this one. VMs of the host that it swaps with may come all
    /// the same.
    pub(crate) fn begin_drain(
        &self,
        id: &str,
        now: Timestamp,
        request: &DrainRequest,
    ) -> Result<BegunDrain, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let open = open_drain(&transaction)?;
            let before = open.as_ref().map(|open| known_record(&transaction, open)).transpose()?;
            let id = if let Some(open) = open {
                transaction.execute("UPDATE drains SET ended_at = NULL WHERE id = ?1", [&open])?;
                open
            } else {
                insert(&transaction, id, DrainKind::Drain, now)?;
                id.to_owned()
            };
            transaction.execute(
                "UPDATE drains SET swap_with = ?2, request = ?3 WHERE id = ?1",
                params![id, request.swap_with, to_json(request)?],
            )?;
            let record = known_record(&transaction, &id)?;
            transaction.commit()?;
            Ok(BegunDrain { record, before })
        })
    }

    /// Takes back the beginning of a drain that could not even be planned: one that was to be carried on is as it
    /// was before, a new one is forgotten, and the host's cordon with it.
    pub(crate) fn take_back_drain(&self, begun: &BegunDrain) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            let id = &begun.record.id;
            if let Some(before) = &begun.before {
                let ended_at = before.ended_at.map(|ended_at| ended_at.to_string());
                let request = before.request.as_ref().map(to_json).transpose()?;
                transaction.execute(
                    "UPDATE drains SET swap_with = ?2, ended_at = ?3, request = ?4 WHERE id = ?1",
                    params![id, before.swap_with, ended_at, request],
                )?;
            } else {
                transaction.execute("DELETE FROM drain_moves WHERE drain = ?1", [id])?;
                transaction.execute("DELETE FROM drains WHERE id = ?1", [id])?;
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Records that the way back of these VMs begins, moved as `request` says, and lets VMs come here again: both or
    /// neither.
    pub(crate) fn begin_failback(
        &self,
        id: &str,
        now: Timestamp,
        request: &DrainRequest,
        status: &DrainStatus,
    ) -> Result<DrainRecord, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            insert(&transaction, id, DrainKind::Failback, now)?;
            let request = to_json(request)?;
            transaction.execute("UPDATE drains SET request = ?2 WHERE id = ?1", params![id, request])?;
            update(&transaction, id, status)?;
            for (place, one) in status.moves.iter().enumerate() {
                record_move(&transaction, id, place, one)?;
            }
            lift_cordon(&transaction)?;
            let record = known_record(&transaction, id)?;
            transaction.commit()?;
            Ok(record)
        })
    }

    /// Records how far a drain has come: all of it but its moves, and of these the ones given, with
    /// their places in the order. VMs that are `gone` are among them no more.
    pub(crate) fn record_drain(
        &self,
        id: &str,
        status: &DrainStatus,
        moves: &[(usize, &MoveStatus)],
        gone: &[&str],
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            update(&transaction, id, status)?;
            for (place, one) in moves {
                record_move(&transaction, id, *place, one)?;
            }
            for vm in gone {
                transaction
                    .execute("DELETE FROM drain_moves WHERE drain = ?1 AND vm = ?2", params![id, vm])?;
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Records that a drain or a way back is over. The host stays cordoned.
    pub(crate) fn end_drain(&self, id: &str, now: Timestamp) -> Result<(), JournalError> {
        self.run(|connection| {
            connection
                .execute("UPDATE drains SET ended_at = ?2 WHERE id = ?1", params![id, now.to_string()])?;
            Ok(())
        })
    }

    /// Records of each of these targets how many transfers at a time were found to carry most, by this option.
    pub(crate) fn remember_transfers<'a>(
        &self,
        targets: impl Iterator<Item = &'a str>,
        option: RequestedOption,
        found: FoundTransfers,
    ) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            for target in targets {
                transaction.execute(
                    "INSERT INTO transfers_found (target, requested_option, transfers, targets) \
                     VALUES (?1, ?2, ?3, ?4) ON CONFLICT (target, requested_option) \
                     DO UPDATE SET transfers = excluded.transfers, targets = excluded.targets",
                    params![target, to_json(&option)?, found.transfers, found.targets],
                )?;
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Records of what was under way when the agent stopped that it was interrupted.
    pub(crate) fn interrupt_drains(&self, now: Timestamp) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            for id in ids(&transaction, "SELECT id FROM drains WHERE ended_at IS NULL")? {
                let Some(record) = record(&transaction, &id)? else { continue };
                let status = DrainStatus { state: DrainState::Interrupted, eta_ms: None, ..record.status };
                update(&transaction, &id, &status)?;
                transaction
                    .execute("UPDATE drains SET ended_at = ?2 WHERE id = ?1", params![id, now.to_string()])?;
            }
            transaction.commit()?;
            Ok(())
        })
    }

    /// Lets VMs come here again.
    pub(crate) fn lift_cordon(&self) -> Result<(), JournalError> {
        self.run(|connection| lift_cordon(connection))
    }

    /// The last drain or way back.
    pub(crate) fn last_run(&self) -> Result<Option<DrainRecord>, JournalError> {
        self.last("SELECT id FROM drains ORDER BY rowid DESC LIMIT 1")
    }

    /// The last drain: what it has moved is what a way back brings home.
    pub(crate) fn last_drain(&self) -> Result<Option<DrainRecord>, JournalError> {
        self.last("SELECT id FROM drains WHERE kind = '\"drain\"' ORDER BY rowid DESC LIMIT 1")
    }

    fn last(&self, query: &str) -> Result<Option<DrainRecord>, JournalError> {
        self.run(|connection| match ids(connection, query)?.first() {
            Some(id) => record(connection, id),
            None => Ok(None),
        })
    }

    /// How many transfers at a time carried most by this option, as the last drain has found that moved a VM to
    /// `target`.
    pub(crate) fn transfers_found(
        &self,
        target: &str,
        option: RequestedOption,
    ) -> Result<Option<FoundTransfers>, JournalError> {
        self.run(|connection| {
            let found = connection.query_row(
                "SELECT transfers, targets FROM transfers_found WHERE target = ?1 AND requested_option = ?2",
                params![target, to_json(&option)?],
                |row| Ok(FoundTransfers { transfers: row.get(0)?, targets: row.get(1)? }),
            );
            Ok(found.optional()?)
        })
    }
}

/// The drain that has this host cordoned.
fn open_drain(connection: &Connection) -> Result<Option<String>, JournalCause> {
    Ok(connection.query_row("SELECT id FROM drains WHERE cordons = 1", [], |row| row.get(0)).optional()?)
}

fn insert(connection: &Connection, id: &str, kind: DrainKind, now: Timestamp) -> Result<(), JournalCause> {
    let status = DrainStatus::begun();
    connection.execute(
        "INSERT INTO drains (id, kind, cordons, started_at, status, last_incoming, first_migration) \
         VALUES (?1, ?2, ?3, ?4, ?5, (SELECT ifnull(max(rowid), 0) FROM incoming), \
         (SELECT ifnull(min(rowid), (SELECT ifnull(max(rowid), 0) + 1 FROM migrations)) FROM migrations \
          WHERE result IS NULL))",
        params![id, to_json(&kind)?, kind == DrainKind::Drain, now.to_string(), to_json(&status)?],
    )?;
    let old = "cordons = 0 AND rowid <= (SELECT max(rowid) FROM drains) - ?1";
    let of_old = format!("DELETE FROM drain_moves WHERE drain IN (SELECT id FROM drains WHERE {old})");
    connection.execute(&of_old, [DRAINS_KEPT])?;
    connection.execute(&format!("DELETE FROM drains WHERE {old}"), [DRAINS_KEPT])?;
    Ok(())
}

fn lift_cordon(connection: &Connection) -> Result<(), JournalCause> {
    connection.execute("UPDATE drains SET cordons = 0 WHERE cordons = 1", [])?;
    Ok(())
}

fn record_move(
    connection: &Connection,
    id: &str,
    place: usize,
    one: &MoveStatus,
) -> Result<(), JournalCause> {
    connection.execute(
        "INSERT INTO drain_moves (drain, vm, place, move) VALUES (?1, ?2, ?3, ?4) \
         ON CONFLICT (drain, vm) DO UPDATE SET place = excluded.place, move = excluded.move",
        params![id, one.vm, u32::try_from(place).unwrap_or(u32::MAX), to_json(one)?],
    )?;
    Ok(())
}

fn update(connection: &Connection, id: &str, status: &DrainStatus) -> Result<(), JournalCause> {
    // Its obstacle is of the moment, and gone when this can be written.
    let without_moves = DrainStatus { moves: vec![], obstacle: None, ..status.clone() };
    connection
        .execute("UPDATE drains SET status = ?2 WHERE id = ?1", params![id, to_json(&without_moves)?])?;
    Ok(())
}

fn ids(connection: &Connection, query: &str) -> Result<Vec<String>, JournalCause> {
    let mut statement = connection.prepare(query)?;
    Ok(statement.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?)
}

fn record(connection: &Connection, id: &str) -> Result<Option<DrainRecord>, JournalCause> {
    let query =
        "SELECT kind, started_at, ended_at, status, swap_with, cordons, request FROM drains WHERE id = ?1";
    let Some((kind, started_at, ended_at, status, swap_with, cordons, request)) =
        connection.query_row(query, [id], raw).optional()?
    else {
        return Ok(None);
    };
    let status: DrainStatus = from_json(&status)?;
    Ok(Some(DrainRecord {
        id: id.into(),
        kind: from_json(&kind)?,
        swap_with,
        started_at: started_at.parse()?,
        ended_at: ended_at.map(|ended_at| ended_at.parse()).transpose()?,
        cordons,
        request: request.map(|request| from_json(&request)).transpose()?,
        status: DrainStatus { moves: moves(connection, id)?, ..status },
    }))
}

fn known_record(connection: &Connection, id: &str) -> Result<DrainRecord, JournalCause> {
    Ok(record(connection, id)?.ok_or(rusqlite::Error::QueryReturnedNoRows)?)
}

type RawRecord = (String, String, Option<String>, String, Option<String>, bool, Option<String>);

fn raw(row: &Row<'_>) -> rusqlite::Result<RawRecord> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?))
}

fn moves(connection: &Connection, id: &str) -> Result<Vec<MoveStatus>, JournalCause> {
    let mut statement =
        connection.prepare("SELECT move FROM drain_moves WHERE drain = ?1 ORDER BY place, rowid")?;
    let texts = statement.query_map([id], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()?;
    texts.iter().map(|text| from_json(text)).collect()
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::drain::status::MoveState;

    use super::super::schema::SCHEMA_CHANGES;
    use super::*;

    fn moved(vm: &str, target: &str, state: MoveState) -> MoveStatus {
        MoveStatus {
            vm: vm.into(),
            target: target.into(),
            state,
            migration: Some(format!("migration of {vm}")),
            attempts: 1,
            error: None,
            waits: None,
            memory_bytes: 1 << 28,
            sent_bytes: 7,
            predicted_bytes: 0,
            predicted_ms: 100.0,
            transfer_ms: None,
            compression: None,
            disks: None,
        }
    }

    fn swap_with(host: Option<&str>) -> DrainRequest {
        DrainRequest { swap_with: host.map(str::to_owned), ..DrainRequest::default() }
    }

    fn begin(journal: &Journal, id: &str, swaps_with: Option<&str>) -> BegunDrain {
        journal.begin_drain(id, Timestamp::UNIX_EPOCH, &swap_with(swaps_with)).unwrap()
    }

    fn begun(journal: &Journal, id: &str) -> DrainRecord {
        begin(journal, id, None).record
    }

    fn fail_back(journal: &Journal, id: &str, status: &DrainStatus) -> Result<DrainRecord, JournalError> {
        journal.begin_failback(id, Timestamp::UNIX_EPOCH, &DrainRequest::default(), status)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_drain_cordons_the_host_until_it_is_resumed() {
        let (directory, journal) = Journal::temporary();
        assert!(journal.cordon().unwrap().is_none());
        begun(&journal, "one");
        journal.end_drain("one", Timestamp::UNIX_EPOCH).unwrap();
        drop(journal);
        let journal = Journal::open(directory.path(), directory.path()).unwrap();
        assert!(journal.cordon().unwrap().is_some());
        journal.lift_cordon().unwrap();
        assert!(journal.cordon().unwrap().is_none());
        fail_back(&journal, "two", &DrainStatus::begun()).unwrap();
        assert!(journal.cordon().unwrap().is_none());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_way_back_begins_with_the_end_of_the_cordon_or_not_at_all() {
        let (_directory, journal) = Journal::temporary();
        begun(&journal, "one");
        let status =
            DrainStatus { moves: vec![moved("web", "b", MoveState::Waiting)], ..DrainStatus::begun() };
        let refuse =
            "CREATE TRIGGER full BEFORE INSERT ON drain_moves BEGIN SELECT RAISE(ABORT, 'full'); END";
        journal.lock().execute_batch(refuse).unwrap();
        fail_back(&journal, "two", &status).unwrap_err();
        assert!(journal.cordon().unwrap().is_some());
        assert_eq!(journal.last_run().unwrap().unwrap().id, "one");
        journal.lock().execute_batch("DROP TRIGGER full").unwrap();
        let way_back = fail_back(&journal, "two", &status).unwrap();
        assert_eq!((way_back.kind, way_back.status), (DrainKind::Failback, status));
        assert!(journal.cordon().unwrap().is_none());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_came_by_a_swap_is_told_from_what_was_here() {
        let (_directory, journal) = Journal::temporary();
        let come = |id: &str, name: &str, source: &str| {
            let text = format!("name = \"{name}\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"");
            assert!(journal.begin_incoming(id, source, &toml::from_str(&text).unwrap()).unwrap());
            assert!(journal.run_incoming(id).unwrap());
        };
        come("1", "earlier", "b");
        let swap = || begin(&journal, "one", Some("b")).record;
        assert_eq!(swap().swap_with.as_deref(), Some("b"));
        assert_eq!(journal.cordon().unwrap(), Some(Cordon { swap_with: Some("b".into()) }));
        come("2", "swapped", "b");
        come("3", "of-another", "c");
        // Carried on, what had come then is what came by it still.
        swap();
        assert_eq!(journal.swapped_in().unwrap(), ["swapped"]);
        assert_eq!(begun(&journal, "two").swap_with, None);
        journal.lift_cordon().unwrap();
        assert!(journal.cordon().unwrap().is_none() && journal.swapped_in().unwrap().is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_drain_that_is_not_resumed_is_carried_on_with_what_it_has_moved() {
        let (_directory, journal) = Journal::temporary();
        let status = begun(&journal, "one").status;
        let (second, first) =
            (moved("db", "c", MoveState::Moved), moved("web", "b", MoveState::Transferring));
        journal.record_drain("one", &status, &[(1, &second), (0, &first)], &[]).unwrap();
        journal.interrupt_drains(Timestamp::UNIX_EPOCH).unwrap();
        let interrupted = journal.last_run().unwrap().unwrap();
        assert_eq!(
            (interrupted.status.state, interrupted.ended_at.is_some()),
            (DrainState::Interrupted, true)
        );
        let again = begun(&journal, "two");
        assert_eq!((again.id.as_str(), again.ended_at), ("one", None));
        assert_eq!(again.status.moves, [first, second]);
        journal.record_drain("one", &status, &[], &["web"]).unwrap();
        assert_eq!(journal.last_run().unwrap().unwrap().status.moves.len(), 1);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_drain_that_is_carried_on_and_refused_is_as_it_was() {
        let (_directory, journal) = Journal::temporary();
        let ended_at = Timestamp::from_second(7).unwrap();
        for ended_at in [Some(ended_at), None] {
            let status = begin(&journal, "one", Some("b")).record.status;
            let one = moved("web", "b", MoveState::Moved);
            journal.record_drain("one", &status, &[(0, &one)], &[]).unwrap();
            if let Some(ended_at) = ended_at {
                journal.end_drain("one", ended_at).unwrap();
            }
            let before = journal.last_run().unwrap();
            for host in [None, Some("c")] {
                let again = begin(&journal, "two", host);
                assert_eq!((again.record.id.as_str(), again.record.swap_with.as_deref()), ("one", host));
                assert_eq!(again.record.request, Some(swap_with(host)));
                journal.take_back_drain(&again).unwrap();
                assert_eq!(journal.last_run().unwrap(), before);
            }
            assert_eq!(journal.cordon().unwrap(), Some(Cordon { swap_with: Some("b".into()) }));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_journal_of_each_earlier_version_is_brought_up_to_date() {
        for made in 0..SCHEMA_CHANGES.len() {
            let directory = tempfile::tempdir().unwrap();
            let connection = Connection::open(directory.path().join("journal.sqlite")).unwrap();
            SCHEMA_CHANGES[..made].iter().for_each(|sql| connection.execute_batch(sql).unwrap());
            connection.pragma_update(None, "user_version", u32::try_from(made).unwrap()).unwrap();
            if made > 0 {
                let row = "INSERT INTO migrations (id, vm, target, result) VALUES ('1', 'web', 'b', '{}')";
                connection.execute_batch(row).unwrap();
            }
            drop(connection);
            let journal = Journal::open(directory.path(), directory.path()).unwrap();
            assert_eq!(journal.transfers_found("b", RequestedOption::Tcp).unwrap(), None, "{made}");
            assert_eq!(begun(&journal, "one").id, "one", "{made}");
            assert_eq!(journal.left_since_drain("web", "one").unwrap(), None, "{made}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_found_is_kept_for_a_target_and_an_option() {
        let (_directory, journal) = Journal::temporary();
        let found = |target: &str, option| journal.transfers_found(target, option).unwrap();
        let of = |transfers, targets| FoundTransfers { transfers, targets };
        journal.remember_transfers(["b", "c"].into_iter(), RequestedOption::Tcp, of(4, 2)).unwrap();
        journal.remember_transfers(["b"].into_iter(), RequestedOption::Multichannel, of(2, 1)).unwrap();
        journal.remember_transfers(["c"].into_iter(), RequestedOption::Tcp, of(3, 1)).unwrap();
        assert_eq!(found("b", RequestedOption::Tcp), Some(of(4, 2)));
        assert_eq!(found("c", RequestedOption::Tcp), Some(of(3, 1)));
        assert_eq!(found("b", RequestedOption::Multichannel), Some(of(2, 1)));
        assert_eq!(found("c", RequestedOption::Multichannel), None);
        assert_eq!(found("b", RequestedOption::Auto), None);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn after_a_resume_a_drain_is_a_new_one_and_the_way_back_is_none() {
        let (_directory, journal) = Journal::temporary();
        begun(&journal, "one");
        journal.lift_cordon().unwrap();
        let two = begin(&journal, "two", None);
        assert_eq!(two.record.id, "two");
        fail_back(&journal, "three", &DrainStatus::begun()).unwrap();
        assert_eq!(journal.last_run().unwrap().unwrap().id, "three");
        assert_eq!(journal.last_drain().unwrap().unwrap().id, "two");
        journal.take_back_drain(&two).unwrap();
        assert!(journal.cordon().unwrap().is_none());
        assert_eq!(journal.last_drain().unwrap().unwrap().id, "one");
    }
}
