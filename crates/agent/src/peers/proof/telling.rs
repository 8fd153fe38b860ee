//! Each agent tells the others how far its journal has got, and hears what they know of it. If one knows of more than
//! there is, the journal is no longer believed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drainpipe_engine::journal::TELL_EVERY;
use drainpipe_engine::journal::{Doubt, JournalFile};
use drainpipe_engine::journal::{GENERATION_MAX, JournalMark, JournalStanding, Testimony, Witness, doubts};
use drainpipe_engine::problem::Problem;
use futures_util::future::join_all;
use tokio::time::{sleep, timeout};
use tracing::{debug, error, info, warn};

use crate::peers::Peers;
use crate::peers::client::ApiClient;
use crate::store::journal::Journal;
use drainpipe_api_types::{HeardMark, Hearing};

/// Longest that another host may take to answer. It has it in mind.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// How long after a record the other hosts learn of it: several records at a time.
const TELL_AFTER: Duration = Duration::from_millis(500);

/// Whether anybody but this host itself has shown that nothing is missing in its journal.
#[derive(Debug)]
pub(crate) struct Proof {
    peers: Arc<Peers>,
    journal: Arc<Journal>,
    // As it was when the agent started, before anybody heard of it.
    at_start: JournalMark,
    is_proven: AtomicBool,
}

impl Proof {
    /// Nobody has yet, for the journal as it stood when the agent started.
    pub(crate) fn new(peers: &Arc<Peers>, journal: &Arc<Journal>, at_start: JournalStanding) -> Self {
        Self {
            peers: Arc::clone(peers),
            journal: Arc::clone(journal),
            at_start: at_start.mark,
            is_proven: AtomicBool::new(false),
        }
    }

    /// A host that has heard of the very last record of an earlier run knows of none that is missing.
    fn consider(&self, heard: &JournalMark) -> Result<(), Problem> {
        let knows_all =
            heard.identity == self.at_start.identity && heard.generation >= self.at_start.generation;
        if knows_all && !self.is_proven.swap(true, Ordering::Relaxed) {
            self.journal.prove()?;
        }
        Ok(())
    }

    /// Tells one host, and listens.
    pub(crate) async fn tell(&self, name: &str, peer: &ApiClient) -> Result<(), Problem> {
        let Some(heard) = hear(peer, Some(self.journal.standing()?)).await? else { return Ok(()) };
        // What was recorded meanwhile, it may have heard of meanwhile.
        let file = JournalFile::Sound(self.journal.standing()?);
        let by = Witness::Peer(name.into());
        let found = doubts(&file, &[Testimony { by, heard: heard.clone() }], &[]);
        if found.is_empty() {
            return self.consider(&heard);
        }
        self.doubt(found, heard);
        Ok(())
    }

    fn doubt(&self, found: Vec<Doubt>, heard: JournalMark) {
        error!(doubts = crate::store::journal::in_words(&found), "the journal is no longer believed");
        self.journal.doubt(found, heard);
    }
}

/// What a host has heard of this one's journal. It hears how the journal stands now, if that is given.
pub(crate) async fn hear(
    peer: &ApiClient,
    standing: Option<JournalStanding>,
) -> Result<Option<JournalMark>, Problem> {
    let asked =
        peer.post_within::<HeardMark>("/v1/journal/marks", &Hearing { standing }, ANSWER_DEADLINE).await?;
    Ok(asked.heard.filter(|mark| mark.generation <= GENERATION_MAX))
}

/// Tells all hosts of each record that bears on whose a VM is, and all of them again from time to time.
pub(crate) async fn keep_telling(proof: Arc<Proof>) {
    let mut generations = proof.journal.generations();
    loop {
        generations.mark_unchanged();
        let messages = proof.peers.all().into_iter().map(|(name, peer)| {
            let proof = &proof;
            async move {
                if let Err(problem) = proof.tell(&name, &peer).await {
                    debug!(peer = name, %problem, "it does not say what it has heard about this host's journal");
                }
            }
        });
        join_all(messages).await;
        let news = timeout(TELL_EVERY, generations.changed()).await;
        if matches!(news, Ok(Err(_))) {
            return;
        }
        sleep(TELL_AFTER).await;
    }
}

/// Says so in the log when an agent goes on with a journal that an operator has adopted.
pub(super) fn note_adopted(standing: &JournalStanding) {
    info!(mark = ?standing.mark, "the journal is adopted");
    if standing.replaces.len() > 8 {
        warn!(
            times = standing.replaces.len(),
            "journals were adopted again and again: find out why they are lost"
        );
    }
}
