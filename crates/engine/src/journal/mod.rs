//! Whether a host's journal may be believed: judged by its own content, by what others have heard about it, and by
//! what runs on the host.
//!
//! A journal is identified by its mark: a random identity, and a generation that rises with each record that affects
//! which host a VM belongs to. The host's runtime directory, which does not survive a reboot, and the other hosts keep
//! the last mark that they heard. A journal that lacks what they have heard may lack anything: it must not answer for
//! VMs until somebody has looked.

pub mod start;

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Between two attempts to write into a journal that could not be written.
pub const RECORD_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// How often an agent tells the others how far its journal is, also if there is no news: one that did not answer may do
/// now.
pub const TELL_EVERY: Duration = Duration::from_secs(20);

/// A generation that no journal reaches. A host that names a later one knows of nothing.
pub const GENERATION_MAX: u64 = 1 << 53;

/// Which journal it is, and how far it has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalMark {
    /// Random; made with the journal, and made again when a doubted one is adopted.
    pub identity: String,
    /// Goes up with each record that bears on whose a VM is.
    #[schema(maximum = 9_007_199_254_740_992_u64)]
    pub generation: u64,
}

/// What a host tells others of its journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalStanding {
    /// Its mark.
    pub mark: JournalMark,
    /// The identities in whose place an operator has put it.
    #[serde(default)]
    pub replaces: Vec<String>,
}

impl JournalStanding {
    /// Whether it may be taken for the one that had this mark, or for what was put in its place.
    pub fn follows(&self, heard: &JournalMark) -> bool {
        if self.mark.identity == heard.identity {
            return self.mark.generation >= heard.generation;
        }
        self.replaces.contains(&heard.identity)
    }
}

/// The journal as it lies on the disk when the agent looks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalFile {
    /// There is none.
    Missing,
    /// It has no bytes.
    Empty,
    /// It cannot be read, for this reason.
    Malformed(String),
    /// It can be read.
    Sound(JournalStanding),
}

/// A witness that has heard of a host's journal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Witness {
    /// The host's own runtime directory.
    RuntimeDirectory,
    /// Another host.
    Peer(String),
}

impl fmt::Display for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RuntimeDirectory => f.write_str("the runtime directory"),
            Self::Peer(name) => write!(f, "host {name}"),
        }
    }
}

/// What a witness has heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Testimony {
    /// Who.
    pub by: Witness,
    /// The last mark that it heard.
    pub heard: JournalMark,
}

/// Why a journal is not believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Doubt {
    /// There is none, or it is empty, though there was one.
    Lost {
        /// It is there, with no bytes.
        is_empty: bool,
        /// What says that there was one: witnesses, and QEMUs that live.
        by: Vec<String>,
    },
    /// It cannot be read.
    Malformed(String),
    /// It is not the one that a witness has heard of.
    Another(Witness),
    /// A witness has heard of later records.
    Older {
        /// The witness.
        by: Witness,
        /// The generation that it has heard of.
        heard: u64,
        /// The journal's own generation.
        found: u64,
    },
    /// QEMUs of these VMs live on the host, and no record knows of them.
    Unrecorded(Vec<String>),
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost { is_empty, by } => {
                let what = if *is_empty { "it is empty" } else { "there is none" };
                write!(f, "{what}, but there was one by what {} say", by.join(", "))
            }
            Self::Malformed(why) => write!(f, "it cannot be read ({why})"),
            Self::Another(by) => write!(f, "it is not the journal that {by} knows"),
            Self::Older { by, heard, found } => {
                write!(
                    f,
                    "it is older than {by} knows: it ends at record {found}, and {by} has heard of record {heard}"
                )
            }
            Self::Unrecorded(vms) => {
                write!(f, "QEMUs run here that it does not know: of VM {}", vms.join(", "))
            }
        }
    }
}

/// Why a journal is not to be believed, if so. `unrecorded` are the VMs whose QEMUs live on the host and that the
/// journal does not know; without a journal, all that live.
pub fn doubts(file: &JournalFile, testimonies: &[Testimony], unrecorded: &[String]) -> Vec<Doubt> {
    match file {
        JournalFile::Missing | JournalFile::Empty => {
            let lives = unrecorded.iter().map(|vm| format!("the QEMU of VM {vm}"));
            let by: Vec<String> =
                testimonies.iter().map(|testimony| testimony.by.to_string()).chain(lives).collect();
            let is_empty = *file == JournalFile::Empty;
            if by.is_empty() { vec![] } else { vec![Doubt::Lost { is_empty, by }] }
        }
        JournalFile::Malformed(why) => vec![Doubt::Malformed(why.clone())],
        JournalFile::Sound(standing) => {
            let mut doubts: Vec<Doubt> =
                testimonies.iter().filter_map(|testimony| doubt_by(standing, testimony)).collect();
            if !unrecorded.is_empty() {
                doubts.push(Doubt::Unrecorded(unrecorded.to_vec()));
            }
            doubts
        }
    }
}

fn doubt_by(standing: &JournalStanding, Testimony { by, heard }: &Testimony) -> Option<Doubt> {
    if standing.follows(heard) {
        return None;
    }
    Some(if standing.mark.identity == heard.identity {
        Doubt::Older { by: by.clone(), heard: heard.generation, found: standing.mark.generation }
    } else {
        Doubt::Another(by.clone())
    })
}

/// What is to stand in place of a doubted journal: a new one, beyond all that was heard of.
pub fn replacement(
    found: Option<&JournalStanding>,
    testimonies: &[Testimony],
    identity: String,
) -> JournalStanding {
    let heard = testimonies.iter().map(|testimony| &testimony.heard);
    let marks: Vec<&JournalMark> = found.map(|standing| &standing.mark).into_iter().chain(heard).collect();
    let generation = marks.iter().map(|mark| mark.generation).max().unwrap_or(0).saturating_add(1);
    let mut replaces: Vec<String> = found.map(|standing| standing.replaces.clone()).unwrap_or_default();
    replaces.extend(marks.iter().map(|mark| mark.identity.clone()));
    replaces.sort();
    replaces.dedup();
    JournalStanding { mark: JournalMark { identity, generation }, replaces }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mark(identity: &str, generation: u64) -> JournalMark {
        JournalMark { identity: identity.into(), generation }
    }

    fn sound(identity: &str, generation: u64) -> JournalFile {
        JournalFile::Sound(JournalStanding { mark: mark(identity, generation), replaces: vec![] })
    }

    fn heard_by(by: Witness, identity: &str, generation: u64) -> Testimony {
        Testimony { by, heard: mark(identity, generation) }
    }

    #[test]
    fn a_first_start_is_no_loss() {
        assert_eq!(doubts(&JournalFile::Missing, &[], &[]), []);
        assert_eq!(doubts(&sound("one", 3), &[], &[]), []);
    }

    #[test]
    fn a_lost_journal_is_known_by_each_witness_and_by_what_lives() {
        let file = [JournalFile::Missing, JournalFile::Empty];
        for file in file {
            let by_runtime = [heard_by(Witness::RuntimeDirectory, "one", 0)];
            assert!(matches!(&doubts(&file, &by_runtime, &[])[..], [Doubt::Lost { .. }]));
            let by_peer = [heard_by(Witness::Peer("b".into()), "one", 0)];
            let found = doubts(&file, &by_peer, &[]);
            assert!(found[0].to_string().contains("host b"), "{found:?}");
            let found = doubts(&file, &[], &["web".into()]);
            assert!(found[0].to_string().contains("QEMU of VM web"), "{found:?}");
        }
    }

    #[test]
    fn an_older_one_another_and_an_unrecorded_one_among_the_qemus_are_told_apart() {
        let peer = || Witness::Peer("b".into());
        let older = doubts(&sound("one", 3), &[heard_by(peer(), "one", 4)], &[]);
        assert_eq!(older, [Doubt::Older { by: peer(), heard: 4, found: 3 }]);
        let another = doubts(&sound("one", 9), &[heard_by(peer(), "two", 4)], &[]);
        assert_eq!(another, [Doubt::Another(peer())]);
        let unrecorded = doubts(&sound("one", 9), &[heard_by(peer(), "one", 9)], &["web".into()]);
        assert_eq!(unrecorded, [Doubt::Unrecorded(vec!["web".into()])]);
        let malformed = doubts(&JournalFile::Malformed("no database".into()), &[], &[]);
        assert_eq!(malformed, [Doubt::Malformed("no database".into())]);
    }

    fn any_testimony() -> impl Strategy<Value = Testimony> {
        let by = prop_oneof![Just(Witness::RuntimeDirectory), "[b-d]".prop_map(Witness::Peer)];
        (by, "[a-c]", 0..20u64).prop_map(|(by, identity, generation)| heard_by(by, &identity, generation))
    }

    fn any_file() -> impl Strategy<Value = JournalFile> {
        let replaces = proptest::collection::vec("[a-c]", 0..3);
        let sound = ("[a-c]", 0..20u64, replaces).prop_map(|(identity, generation, replaces)| {
            JournalFile::Sound(JournalStanding { mark: mark(&identity, generation), replaces })
        });
        prop_oneof![
            Just(JournalFile::Missing),
            Just(JournalFile::Empty),
            ".*".prop_map(JournalFile::Malformed),
            sound
        ]
    }

    proptest! {
        /// Nothing that was promised, by a record that somebody has heard of, is missing in a journal that is believed.
        #[test]
        fn what_is_believed_has_all_that_was_heard_of(
            file in any_file(),
            testimonies in proptest::collection::vec(any_testimony(), 0..4),
            unrecorded in proptest::collection::vec("[w-z]", 0..3),
        ) {
            if !doubts(&file, &testimonies, &unrecorded).is_empty() {
                return Ok(());
            }
            prop_assert!(unrecorded.is_empty());
            for Testimony { heard, .. } in &testimonies {
                let JournalFile::Sound(standing) = &file else { panic!("{file:?} is believed against a witness") };
                let is_same = standing.mark.identity == heard.identity;
                prop_assert!(is_same || standing.replaces.contains(&heard.identity));
                prop_assert!(!is_same || standing.mark.generation >= heard.generation);
            }
        }

        /// What an operator has put in its place is believed by the same witnesses, and what was there before is not.
        #[test]
        fn what_is_adopted_is_believed_and_what_it_replaces_no_more(
            file in any_file(),
            testimonies in proptest::collection::vec(any_testimony(), 0..4),
        ) {
            let found = match &file {
                JournalFile::Sound(standing) => Some(standing),
                _ => None,
            };
            let adopted = replacement(found, &testimonies, "new".into());
            let heard = heard_by(Witness::RuntimeDirectory, "new", adopted.mark.generation);
            prop_assert_eq!(doubts(&JournalFile::Sound(adopted), &testimonies, &[]), vec![]);
            prop_assert!(!doubts(&file, &[heard], &[]).is_empty());
        }

        /// The host's own records never make it doubt itself.
        #[test]
        fn a_journal_that_goes_on_is_believed(first in 0..20u64, heard in 0..20u64, more in 0..20u64) {
            let heard = heard_by(Witness::RuntimeDirectory, "one", first.min(heard));
            prop_assert_eq!(doubts(&sound("one", first + more), &[heard], &[]), vec![]);
        }
    }
}
