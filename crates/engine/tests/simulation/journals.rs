//! A source's journal that was put back from before the hand-over: the engine's real judgement of it, and an operator
//! who starts the VM that this journal calls stopped.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::journal::TELL_EVERY;
use drainpipe_engine::journal::start::{Answer, Asked, may_start};
use drainpipe_engine::journal::{JournalFile, JournalMark, JournalStanding, Testimony, Witness, doubts};

use crate::milliseconds::ms;
use crate::planted::Planted;
use crate::qemu::SourceQemu;
use crate::source::Record;
use crate::world::{Host, Life, Sight, World};

/// How often an agent asks what others know of its journal.
const TELL_EVERY_MS: f64 = ms(TELL_EVERY);

/// A journal that lies in place of the source's right one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Older {
    /// Whether it has the last migration, though not its outcome. If not, it is from before that migration began.
    pub has_begun: bool,
    generation: u64,
    /// If not, the agent answers for no VM, begins nothing and ends nothing.
    is_believed: bool,
}

/// The journal's generation: it goes up with each record that bears on who has the VM.
fn generation(records: &[Record]) -> u64 {
    let of_one = |record: &Record| {
        let (handed_over, is_revoked) = (u64::from(record.handed_over), u64::from(record.is_revoked));
        1 + handed_over + 2 * is_revoked + 4 * u64::from(record.outcome.is_some())
    };
    records.iter().map(of_one).sum()
}

fn mark(generation: u64) -> JournalMark {
    JournalMark { identity: "source".into(), generation }
}

impl World {
    /// The runtime directory hears of each record at once, the target soon after.
    pub(crate) fn tell_of_journal(&mut self) {
        let is_up = self.source.life == Life::Up;
        if self.source.older.is_some() || !is_up && self.source.witnessed.is_none() {
            return;
        }
        let generation = generation(&self.source.journal);
        self.source.witnessed = Some(generation);
        if is_up && self.target_speaks() && self.random.chance(10) {
            self.target.heard = generation;
        }
    }

    fn target_speaks(&self) -> bool {
        self.target.life == Life::Up && self.now_ms >= self.network.parted_until_ms
    }

    /// The source's agent ends and is restarted on an older journal, perhaps because its host was restored from a
    /// backup. If nobody had heard of the lost records, nobody could tell that journal from the right one.
    pub(crate) fn put_older_journal(&mut self, for_ms: f64) {
        let Some((last, before)) = self.source.journal.split_last() else { return };
        let from_before = generation(before);
        if self.source.older.is_some() || self.target.heard <= from_before {
            return;
        }
        let is_in_between = *last != Record::default() && self.source.witnessed.is_some();
        let has_begun = is_in_between && self.random.chance(50);
        let generation = from_before + u64::from(has_begun);
        let older = Older { has_begun, generation, is_believed: false };
        let is_booted = !has_begun && self.random.chance(80);
        if is_booted {
            self.reboot_source(for_ms);
        } else {
            self.crash_source(for_ms);
        }
        self.source.older = Some(older);
        self.operator.is_to_start = true;
    }

    /// The host boots, and its runtime directory is empty. What it would say of a migration whose target is silent too
    /// is not modelled.
    pub(crate) fn forget_witness(&mut self) {
        self.source.witnessed = None;
        if let Some(older) = self.source.older.as_mut().filter(|older| older.has_begun) {
            (older.has_begun, older.generation) = (false, older.generation - 1);
        }
    }

    /// Whether the agent trusts the journal that it finds when it starts.
    pub(crate) fn believes_journal(&mut self) -> bool {
        let Some(older) = self.source.older else { return true };
        let by_host = self.source.witnessed.map(|heard| (Witness::RuntimeDirectory, heard));
        let by_target = || self.target_speaks().then_some((Witness::Peer("b".into()), self.target.heard));
        let heard = by_host.or_else(by_target);
        let is_believed = self.judge_journal(older, heard);
        if is_believed {
            self.source.witnessed = Some(older.generation);
            self.source.tells_ms = self.now_ms + TELL_EVERY_MS;
        }
        is_believed
    }

    fn judge_journal(&mut self, older: Older, heard: Option<(Witness, u64)>) -> bool {
        let testimonies: Vec<Testimony> =
            heard.map(|(by, heard)| Testimony { by, heard: mark(heard) }).into_iter().collect();
        let found = JournalFile::Sound(JournalStanding { mark: mark(older.generation), replaces: vec![] });
        let is_doubted = !doubts(&found, &testimonies, &[]).is_empty();
        if is_doubted {
            self.saw(Sight::JournalDoubted);
        }
        let is_believed = !is_doubted || self.planted == Planted::OlderJournalBelieved;
        self.source.older = Some(Older { is_believed, ..older });
        is_believed
    }

    /// From time to time, the agent asks the target what it knows of the journal.
    pub(crate) fn hear_of_journal(&mut self) {
        let asks =
            self.source.life == Life::Up && self.now_ms >= self.source.tells_ms && self.target_speaks();
        if let Some(older) = self.source.older.filter(|older| older.is_believed && asks) {
            self.source.tells_ms = self.now_ms + TELL_EVERY_MS;
            self.ask_target_of_journal(older);
        }
    }

    fn ask_target_of_journal(&mut self, older: Older) -> bool {
        self.judge_journal(older, Some((Witness::Peer("b".into()), self.target.heard)))
    }

    /// Whether the operator finds a VM at the source that its journal calls stopped, and that is to run.
    pub(crate) fn has_to_start(&self) -> bool {
        let is_stopped = self.source.older.is_some_and(|older| older.is_believed && !older.has_begun);
        let is_served = self.source.life == Life::Up && self.source.qemu.is_none();
        self.operator.is_to_start && is_stopped && is_served
    }

    /// `vm start`.
    pub(crate) fn start_stopped(&mut self) {
        self.operator.is_to_start = false;
        if self.planted != Planted::StartsUnasked && !self.nobody_else_has_it() {
            self.saw(Sight::StartRefused);
            return;
        }
        self.newest += 1;
        self.source.qemu = Some(SourceQemu::booted(self.newest));
    }

    fn nobody_else_has_it(&mut self) -> bool {
        let speaks = self.target_speaks();
        let older = self.source.older.filter(|_| speaks);
        if older.is_some_and(|older| !self.ask_target_of_journal(older)) {
            return false;
        }
        let has_it = self.copy_at(Host::Target).is_some() || !self.target.entries.is_empty();
        let answer = match (speaks, has_it) {
            (true, true) => Answer::Has("its QEMU lives there".into()),
            (true, false) => Answer::HasNot,
            (false, _) => Answer::Unknown("no answer".into()),
        };
        may_start(&Asked {
            here: "a",
            vm: "web",
            is_proven: false,
            tied_to: &BTreeSet::new(),
            answers: &BTreeMap::from([("b".into(), answer)]),
            although_unreachable: &BTreeSet::new(),
        })
        .is_ok()
    }

    /// Somebody puts the right journal back, and restarts the agent on it.
    pub(crate) fn find_source_journal(&mut self) {
        if self.source.older.take().is_some() {
            self.crash_source(0.0);
            self.operator.is_to_start = false;
        }
    }
}
