//! Where a host that has joined keeps the files from its fleet.

use std::path::{Path, PathBuf};

use drainpipe_identity::JoinedFiles;

/// Its certificate and the list of hosts, within the state directory.
pub(crate) fn files(state_directory: &Path) -> JoinedFiles {
    JoinedFiles::within(&state_directory.join("fleet"))
}

/// The authority's key, on the one host that has it.
pub(crate) fn authority_directory(state_directory: &Path) -> PathBuf {
    state_directory.join("authority")
}
