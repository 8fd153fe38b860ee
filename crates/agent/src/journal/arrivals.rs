//! What the journal knows of VMs that come here: which may run, which do, and which never will.

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
pub(crate) struct Arrival {
    /// Identifier of the migration.
    pub(crate) id: String,
    /// The VM.
    pub(crate) vm: String,
    /// Where it came from.
    pub(crate) source: String,
}

/// What the target has decided about a VM on its way. All but the first are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IncomingState {
    /// Neither may run nor was given up.
    Waiting,
    /// The source has handed it over: it runs here, or will as soon as this agent can make it.
    Running,
    /// It runs here, and the source knows.
    Finished,
    /// Given up; it never ran here and never will under this identifier.
    Discarded,
}

impl IncomingState {
    fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Finished => "finished",
            Self::Discarded => "discarded",
        }
    }

    fn from_word(word: &str) -> Self {
        match word {
            "running" => Self::Running,
            "finished" => Self::Finished,
            "discarded" => Self::Discarded,
            _ => Self::Waiting,
        }
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
            connection.execute(
                "DELETE FROM incoming WHERE state != 'waiting' AND rowid <= \
                 (SELECT max(rowid) FROM incoming) - ?1",
                [HISTORY_LENGTH],
            )?;
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
            transaction.execute("UPDATE incoming SET state = 'running' WHERE id = ?1", [id])?;
            insert_vm(&transaction, &record.spec)?;
            transaction.commit()?;
            Ok(true)
        })
    }

    /// Records that the VM does not run here after all and never did: the hypervisor refused. What
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

    /// Records that a VM that came here runs, and that its source knows.
    pub(crate) fn finish_incoming(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection.execute(
                "UPDATE incoming SET state = 'finished' WHERE id = ?1 AND state = 'running'",
                [id],
            )?;
            Ok(())
        })
    }

    /// A VM is this host's, whatever the host says that it came from: somebody boots it here.
    pub(crate) fn finish_arrivals_of(&self, name: &str) -> Result<(), JournalError> {
        self.run(|connection| finish_arrivals_of(connection, name))
    }

    /// VMs that are recorded to run here, of which nobody has said yet that they do.
    pub(crate) fn unfinished_arrivals(&self) -> Result<Vec<Arrival>, JournalError> {
        self.run(|connection| {
            let mut statement =
                connection.prepare("SELECT id, vm, source FROM incoming WHERE state = 'running'")?;
            let rows = statement
                .query_map([], |row| Ok(Arrival { id: row.get(0)?, vm: row.get(1)?, source: row.get(2)? }))?;
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
            Ok(word.map(|word| IncomingState::from_word(&word)))
        })
    }

    /// VMs that were discarded, but of whose skeletons nobody has said yet that they are gone.
    pub(crate) fn discarded_skeletons(&self) -> Result<Vec<IncomingRecord>, JournalError> {
        self.incoming_in(IncomingState::Discarded)
    }

    /// Records that nothing is left of a VM that was discarded.
    pub(crate) fn forget_skeleton(&self, id: &str) -> Result<(), JournalError> {
        self.run(|connection| {
            connection
                .execute("UPDATE incoming SET spec = '' WHERE id = ?1 AND state = 'discarded'", [id])?;
            Ok(())
        })
    }

    /// What was decided about a VM on its way, and by whom it was sent.
    pub(crate) fn incoming_state(&self, id: &str) -> Result<Option<(String, IncomingState)>, JournalError> {
        self.run(|connection| {
            Ok(connection
                .query_row("SELECT source, state FROM incoming WHERE id = ?1", [id], |row| {
                    Ok((row.get(0)?, IncomingState::from_word(&row.get::<_, String>(1)?)))
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
    pub(crate) fn post_copy_arrivals(&self) -> Result<Vec<IncomingRecord>, JournalError> {
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
        self.incoming_where(&format!("state = '{}'", state.word()))
    }

    /// Of which something is left. The condition is one of ours.
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

pub(super) fn finish_arrivals_of(connection: &Connection, vm: &str) -> Result<(), JournalCause> {
    connection.execute("UPDATE incoming SET state = 'finished' WHERE vm = ?1 AND state = 'running'", [vm])?;
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
    let state = IncomingState::from_word(&state);
    Ok(Some(IncomingRecord { id: id.into(), vm, source, spec: from_json(&spec)?, state, post_copy }))
}
