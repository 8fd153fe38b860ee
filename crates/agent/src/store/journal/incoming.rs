//! The journal's records of VMs that come here: which may run, which do, and which never will.

use drainpipe_engine::migration::target::IncomingState;
use drainpipe_hypervisor::spec::VmSpec;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use super::{HISTORY_LENGTH, Journal, JournalCause, JournalError, from_json, insert_vm, to_json};

/// A VM on its way to this host.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IncomingRecord {
    /// Identifier of the migration, given by the source.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// The host it comes from.
    pub(crate) source: String,
    /// What it is built from.
    pub(crate) spec: VmSpec,
    /// What was decided about it.
    pub(crate) state: IncomingState,
    /// Whether it may run here before all its memory is there.
    pub(crate) post_copy: bool,
}

/// A VM that came here and may not have been let run yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnfinishedIncoming {
    /// Identifier of the migration.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// Where it came from.
    pub(crate) source: String,
}

fn word(state: IncomingState) -> &'static str {
    match state {
        IncomingState::Waiting => "waiting",
        IncomingState::Running => "running",
        IncomingState::Finished => "finished",
        IncomingState::Discarded => "discarded",
    }
}

fn from_word(word: &str) -> IncomingState {
    match word {
        "running" => IncomingState::Running,
        "finished" => IncomingState::Finished,
        "discarded" => IncomingState::Discarded,
        _ => IncomingState::Waiting,
    }
}

impl Journal {
    /// Records a VM on its way here. `false` when that identifier is known already.
    pub(crate) fn begin_incoming(&self, id: &str, source: &str, spec: &VmSpec) -> Result<bool, JournalError> {
        self.run(|connection| {
            let rows = connection.execute(
                "INSERT INTO incoming (id, vm, source, spec, state) VALUES (?1, ?2, ?3, ?4, 'waiting') \
                 ON CONFLICT (id) DO NOTHING",
                params![id, spec.name.as_str(), source, to_json(spec)?],
            )?;
            prune(connection, HISTORY_LENGTH)?;
            Ok(rows == 1)
        })
    }

    /// Records, before the VM runs, that it runs here. `false` when it was discarded before.
    pub(crate) fn run_incoming(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let Some(record) = incoming(&transaction, id)? else { return Ok(false) };
            match record.state {
                IncomingState::Waiting => {}
                IncomingState::Running | IncomingState::Finished => return Ok(true),
                IncomingState::Discarded => return Ok(false),
            }
            // It has left since, if it was here before.
            finish_incoming_of(&transaction, &record.vm)?;
            transaction.execute("UPDATE incoming SET state = 'running' WHERE id = ?1", [id])?;
            insert_vm(&transaction, &record.spec)?;
            transaction.commit()?;
            Ok(true)
        })
    }

    /// Records that the VM does not run here after all and never did: the hypervisor refused, or had ended. What
    /// [`Self::run_incoming`] recorded is taken back. `false` when it was not recorded, or is finished.
    pub(crate) fn take_back_run(&self, id: &str) -> Result<bool, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let rows = transaction.execute(
                "UPDATE incoming SET state = 'discarded' WHERE id = ?1 AND state = 'running'",
                [id],
            )?;
            if rows == 1 {
                transaction
                    .execute("DELETE FROM vms WHERE name = (SELECT vm FROM incoming WHERE id = ?1)", [id])?;
            }
            transaction.commit()?;
            Ok(rows == 1)
        })
    }

    /// Records that nothing is left to do for a VM that came here, and runs or did. The disks that were made for it are its
    /// own.
    pub(crate) fn finish_incoming(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            transaction.execute(
                "UPDATE incoming SET state = 'finished' WHERE id = ?1 AND state = 'running'",
                [id],
            )?;
            disks_are_its_own(&transaction)?;
            transaction.commit()?;
            Ok(())
        })
    }

    /// Records that the source of a migration has nothing more to ask: it knows that the VM runs here, or that it does
    /// not and never will.
    pub(crate) fn source_knows(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("UPDATE incoming SET source_knows = 1 WHERE id = ?1", [id])?;
            Ok(())
        })
    }

    /// A VM is this host's, whatever the host says that it came from: somebody boots it here.
    pub(crate) fn finish_incoming_of(&self, name: &str) -> Result<(), JournalError> {
        self.run(|connection| finish_incoming_of(connection, name))
    }

    /// VMs that are recorded to run here although nobody has confirmed yet that they do.
    pub(crate) fn unfinished_incoming(&self) -> Result<Vec<UnfinishedIncoming>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT id, vm, source FROM incoming WHERE state = 'running'")?;
            let rows = statement.query_map([], |row| {
                Ok(UnfinishedIncoming { id: row.get(0)?, vm: row.get(1)?, source: row.get(2)? })
            })?;
            Ok(rows.collect::<Result<_, _>>()?)
        })
    }

    /// Records that the VM never ran here and never will. What is recorded after that: nothing where nothing was.
    pub(crate) fn discard_incoming(&self, id: &str) -> Result<Option<IncomingState>, JournalError> {
        self.run(|connection| {
            let transaction = connection.transaction()?;
            transaction.execute(
                "UPDATE incoming SET state = 'discarded' WHERE id = ?1 AND state = 'waiting'",
                [id],
            )?;
            let word: Option<String> = transaction
                .query_row("SELECT state FROM incoming WHERE id = ?1", [id], |row| row.get(0))
                .optional()?;
            transaction.commit()?;
            Ok(word.map(|word| from_word(&word)))
        })
    }

    /// VMs that were discarded, and whose QEMUs may not be gone yet.
    pub(crate) fn discarded_incoming_vms(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_in(IncomingState::Discarded)
    }

    /// Records that nothing is left of a VM that was discarded.
    pub(crate) fn forget_incoming_vm(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection
                .execute("UPDATE incoming SET spec = '' WHERE id = ?1 AND state = 'discarded'", [id])?;
            Ok(())
        })
    }

    /// What was decided about a VM on its way, and which host sent it.
    pub(crate) fn incoming_state(&self, id: &str) -> Result<Option<(String, IncomingState)>, JournalError> {
        self.run(|connection| {
            Ok(connection
                .query_row("SELECT source, state FROM incoming WHERE id = ?1", [id], |row| {
                    Ok((row.get(0)?, from_word(&row.get::<_, String>(1)?)))
                })
                .optional()?)
        })
    }

    /// A VM that came here, or was to.
    pub(crate) fn incoming_record(&self, id: &str) -> Result<Option<IncomingRecord>, JournalError> {
        self.run(|connection| incoming(connection, id))
    }

    /// Records that a VM may run here before all its memory is there.
    pub(crate) fn allow_post_copy(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute("UPDATE incoming SET post_copy = 1 WHERE id = ?1", [id])?;
            Ok(())
        })
    }

    /// VMs that run here, or did, and may have before all their memory was there.
    pub(crate) fn post_copy_incoming(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_where("post_copy = 1 AND state IN ('running', 'finished')")
    }

    /// Whether no VM of this name came here, or was to, by a later migration.
    pub(crate) fn is_last_incoming(&self, record: &IncomingRecord) -> Result<bool, JournalError> {
        const LAST: &str = "SELECT id FROM incoming WHERE vm = ?1 ORDER BY rowid DESC LIMIT 1";
        let last: Option<String> = self
            .run(|connection| Ok(connection.query_row(LAST, [&record.vm], |row| row.get(0)).optional()?))?;
        Ok(last.as_ref() == Some(&record.id))
    }

    /// VMs on their way here about which nothing final was decided.
    pub(crate) fn waiting_incoming(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_in(IncomingState::Waiting)
    }

    fn incoming_in(&self, state: IncomingState) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_where(&format!("state = '{}'", word(state)))
    }

    /// Records that something is left of. The condition is one of ours.
    fn incoming_where(&self, condition: &str) -> Result<Vec<IncomingRecord>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare(&format!("SELECT id FROM incoming WHERE spec != '' AND {condition}"))?;
            let ids =
                statement.query_map([], |row| row.get::<_, String>(0))?.collect::<Result<Vec<_>, _>>()?;
            ids.iter().filter_map(|id| incoming(connection, id).transpose()).collect()
        })
    }
}

/// Forgets the oldest of those that are settled, but for the last ones: what a host says of one that it has forgotten is no
/// promise, and nobody may run what has been forgotten. Those that the source knows about, and of which nothing is here,
/// are settled.
fn prune(connection: &Connection, keep: u32) -> Result<(), JournalCause> {
    connection.execute(
        "DELETE FROM incoming WHERE rowid <= (SELECT max(rowid) FROM incoming) - ?1 AND source_knows = 1 AND \
         (state = 'discarded' AND spec = '' OR state = 'finished' AND vm NOT IN (SELECT name FROM vms))",
        [keep],
    )?;
    Ok(())
}

pub(super) fn finish_incoming_of(connection: &Connection, vm: &str) -> Result<(), JournalCause> {
    connection.execute("UPDATE incoming SET state = 'finished' WHERE vm = ?1 AND state = 'running'", [vm])?;
    disks_are_its_own(connection)
}

/// What was made for VMs that run here, or did, is never removed as something that was made for nothing.
fn disks_are_its_own(connection: &Connection) -> Result<(), JournalCause> {
    connection.execute(
        "DELETE FROM made_disks WHERE migration IN (SELECT id FROM incoming WHERE state = 'finished')",
        [],
    )?;
    Ok(())
}

fn incoming(connection: &Connection, id: &str) -> Result<Option<IncomingRecord>, JournalCause> {
    let row = connection
        .query_row("SELECT vm, source, spec, state, post_copy FROM incoming WHERE id = ?1", [id], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get::<_, String>(2)?, row.get::<_, String>(3)?, row.get(4)?))
        })
        .optional()?;
    let Some((vm, source, spec, state, post_copy)) = row else { return Ok(None) };
    // Nothing is left of one without a specification.
    if spec.is_empty() {
        return Ok(None);
    }
    let state = from_word(&state);
    Ok(Some(IncomingRecord { id: id.into(), vm, source, spec: from_json(&spec)?, state, post_copy }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;

    use super::*;

    fn begin(journal: &Journal, id: &str, vm: &str) {
        let spec = json!({ "name": vm, "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
        assert!(journal.begin_incoming(id, "a", &serde_json::from_value(spec).unwrap()).unwrap());
    }

    fn state(journal: &Journal, id: &str) -> Option<IncomingState> {
        journal.incoming_state(id).unwrap().map(|(_, state)| state)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_not_settled_is_not_pruned() {
        let (_directory, journal) = Journal::temporary();
        for id in ["waiting", "running", "here", "unheard", "left", "remains", "gone", "discarded"] {
            begin(&journal, id, id);
        }
        for id in ["running", "here", "unheard", "left"] {
            assert!(journal.run_incoming(id).unwrap());
        }
        for id in ["here", "unheard", "left"] {
            journal.finish_incoming(id).unwrap();
        }
        for id in ["unheard", "left"] {
            journal.forget_vm(id).unwrap();
        }
        for id in ["remains", "gone", "discarded"] {
            assert_eq!(journal.discard_incoming(id).unwrap(), Some(IncomingState::Discarded));
        }
        for id in ["gone", "discarded"] {
            journal.forget_incoming_vm(id).unwrap();
        }
        for id in ["waiting", "running", "here", "left", "remains", "discarded"] {
            journal.source_knows(id).unwrap();
        }
        begin(&journal, "last", "last");
        journal.run(|connection| prune(connection, 1)).unwrap();
        for id in ["waiting", "running", "here", "unheard", "remains", "gone", "last"] {
            assert!(state(&journal, id).is_some(), "{id}");
        }
        for id in ["left", "discarded"] {
            assert_eq!(state(&journal, id), None, "{id}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_vm_that_comes_again_closes_its_arrivals_before() {
        let (_directory, journal) = Journal::temporary();
        for id in ["first", "second"] {
            begin(&journal, id, "web");
            assert!(journal.run_incoming(id).unwrap());
        }
        assert_eq!(state(&journal, "first"), Some(IncomingState::Finished));
        assert_eq!(state(&journal, "second"), Some(IncomingState::Running));
        // It must not be taken from the VMs that are here.
        assert!(!journal.take_back_run("first").unwrap());
        assert_eq!(journal.vms().unwrap().len(), 1);
    }

    /// More than the records that are kept.
    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_gives_up_what_nobody_knows_leaves_no_record_and_prunes_nothing() {
        let (_directory, journal) = Journal::temporary();
        begin(&journal, "here", "here");
        assert!(journal.run_incoming("here").unwrap());
        journal.finish_incoming("here").unwrap();
        begin(&journal, "left", "left");
        assert_eq!(journal.discard_incoming("left").unwrap(), Some(IncomingState::Discarded));
        journal.forget_incoming_vm("left").unwrap();
        journal.source_knows("left").unwrap();
        for id in 0..HISTORY_LENGTH + 400 {
            assert_eq!(journal.discard_incoming(&Uuid::from_u128(id.into()).to_string()).unwrap(), None);
        }
        begin(&journal, "permitted", "permitted");
        let recorded = journal.run(|connection| {
            let mut statement = connection.prepare("SELECT id FROM incoming ORDER BY rowid")?;
            Ok(statement.query_map([], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?)
        });
        assert_eq!(recorded.unwrap(), ["here", "left", "permitted"]);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nothing_is_recorded_of_a_migration_that_is_not_known() {
        let (_directory, journal) = Journal::temporary();
        assert_eq!(journal.discard_incoming("x").unwrap(), None);
        journal.source_knows("x").unwrap();
        assert_eq!(state(&journal, "x"), None);
        assert!(!journal.run_incoming("x").unwrap());
    }
}
