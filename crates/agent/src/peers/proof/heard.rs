//! What each other host last said about its journal, for the case that this is lost. It has its own file: this host's
//! journal may be lost too.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use drainpipe_engine::journal::{JournalMark, JournalStanding};
use drainpipe_engine::problem::Problem;
use tracing::warn;

use crate::store::lock::lock;

/// By host.
#[derive(Debug)]
pub(crate) struct Heard {
    path: PathBuf,
    marks: Mutex<BTreeMap<String, JournalMark>>,
}

impl Heard {
    /// What was heard before is read from the state directory.
    pub(crate) fn open(state_directory: &Path) -> Result<Self, Problem> {
        let path = state_directory.join("heard.json");
        let marks = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(Problem::failed(format!("cannot read {}: {error}", path.display()))),
            Ok(text) => serde_json::from_slice(&text).unwrap_or_else(|error| {
                // It is of use to others only, and they tell it again.
                warn!(%error, path = %path.display(), "what other hosts have said about their journals is lost");
                BTreeMap::new()
            }),
        };
        Ok(Self { path, marks: Mutex::new(marks) })
    }

    /// What a host has said before. What it says now is kept, unless it lacks what it has said before.
    pub(crate) fn note(&self, host: &str, standing: Option<&JournalStanding>) -> Option<JournalMark> {
        let mut marks = lock(&self.marks);
        let before = marks.get(host).cloned();
        let Some(standing) = standing else { return before };
        if before.as_ref().is_some_and(|before| !standing.follows(before)) {
            warn!(host, ?standing, ?before, "its journal is another one than before, or older");
            return before;
        }
        if before.as_ref() != Some(&standing.mark) {
            marks.insert(host.into(), standing.mark.clone());
            // A slow disk must not keep the thread's other tasks waiting.
            if let Err(error) = tokio::task::block_in_place(|| write(&self.path, &marks)) {
                warn!(%error, path = %self.path.display(), "what another host says about its journal is \
                    kept in memory only");
            }
        }
        before
    }
}

/// Whole or not at all, and durable.
fn write(path: &Path, marks: &BTreeMap<String, JournalMark>) -> io::Result<()> {
    let new = path.with_extension("json.new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(marks)?)?;
    file.sync_data()?;
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(identity: &str, generation: u64) -> JournalStanding {
        let mark = JournalMark { identity: identity.into(), generation };
        JournalStanding { mark, replaces: vec![] }
    }

    #[test]
    fn what_was_heard_outlives_the_agent_and_what_is_older_is_not_taken() {
        let directory = tempfile::tempdir().unwrap();
        let open = || Heard::open(directory.path()).unwrap();
        let (first, later) = (standing("one", 3), standing("one", 9));
        assert_eq!(open().note("b", Some(&first)), None);
        assert_eq!(open().note("b", Some(&later)), Some(first.mark.clone()));
        for untrue in [&first, &standing("two", 99)] {
            assert_eq!(open().note("b", Some(untrue)), Some(later.mark.clone()));
        }
        assert_eq!(open().note("b", None), Some(later.mark.clone()));
        let adopted = JournalStanding { replaces: vec!["one".into()], ..standing("three", 1) };
        assert_eq!(open().note("b", Some(&adopted)), Some(later.mark));
        assert_eq!(open().note("b", None), Some(adopted.mark));
    }
}
