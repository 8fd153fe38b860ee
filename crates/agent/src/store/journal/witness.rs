//! The runtime directory as a witness of the journal: it says which journal this host has had since it booted, and how
//! far that had got. It disappears at a reboot, as all QEMUs do.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use drainpipe_engine::journal::JournalMark;
use serde::{Deserialize, Serialize};

/// What the runtime directory has heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Witnessed {
    /// The last mark.
    pub(crate) mark: JournalMark,
    /// What the journal says of VMs that it has had since this generation is known to be complete.
    pub(crate) proven_from: u64,
}

impl Witnessed {
    /// Nothing was witnessed since the host booted: what came before, others must prove.
    pub(super) fn at_boot(mark: JournalMark) -> Self {
        Self { proven_from: mark.generation.saturating_add(1), mark }
    }
}

/// The file.
#[derive(Debug, Clone)]
pub(crate) struct RuntimeWitness {
    path: PathBuf,
}

impl RuntimeWitness {
    pub(crate) fn in_directory(runtime_directory: &Path) -> Self {
        Self { path: runtime_directory.join("journal.json") }
    }

    /// What it has heard, if it has since the host booted. Fails if it cannot be read.
    pub(crate) fn read(&self) -> io::Result<Option<Witnessed>> {
        let text = match fs::read(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let explained =
            |error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", self.path.display()));
        serde_json::from_slice(&text).map(Some).map_err(explained)
    }

    /// Whole or not at all.
    pub(super) fn write(&self, witnessed: &Witnessed) -> io::Result<()> {
        // The agent and its guards write it.
        let new = self.path.with_extension(format!("json.{}", std::process::id()));
        fs::write(&new, serde_json::to_vec(witnessed)?)?;
        fs::rename(&new, &self.path)
    }
}
