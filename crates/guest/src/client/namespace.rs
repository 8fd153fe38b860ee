//! Work in another network namespace, without this process leaving its own.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Why a network namespace cannot be entered.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// It does not exist, or this user must not see it.
    #[error("cannot open the network namespace {path}: {source}", path = path.display())]
    Open {
        /// Its file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refuses.
    #[error(
        "cannot enter the network namespace {path}: {source}; run as root",
        path = path.display()
    )]
    Enter {
        /// Its file.
        path: PathBuf,
        /// Why not.
        source: Errno,
    },
    /// There is no thread to enter it with.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}

/// Moves the calling thread, for the rest of its life, into a namespace such as `/run/netns/NAME`.
pub(super) fn enter(namespace: Option<&Path>) -> Result<(), NamespaceError> {
    let Some(path) = namespace else { return Ok(()) };
    let file = File::open(path).map_err(|source| NamespaceError::Open { path: path.to_owned(), source })?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|source| NamespaceError::Enter { path: path.to_owned(), source })
}

/// Runs `work` in a namespace, on a thread of its own: sockets stay in the namespace in which
/// they were made.
pub(super) fn run_in<T, E>(
    namespace: Option<&Path>,
    work: impl FnOnce() -> Result<T, E> + Send,
) -> Result<T, E>
where
    T: Send,
    E: Send + From<NamespaceError>,
{
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("namespace".into())
            .spawn_scoped(scope, || {
                enter(namespace)?;
                work()
            })
            .map_err(NamespaceError::from)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
