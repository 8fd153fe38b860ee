//! How making or copying a disk fails.

use std::fmt;
use std::io;
use std::path::Path;

use drainpipe_engine::problem::{Problem, ProblemKind};
use rustix::io::Errno;

/// Why there is no disk.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// Somebody wanted it no more.
    #[error("cancelled")]
    Cancelled,
    /// What is wrong, where, and what to do.
    #[error(transparent)]
    Problem(#[from] Problem),
}

/// What the kernel said of a path, and what to do about it.
pub(crate) fn of_path(doing: impl fmt::Display, path: &Path, error: &io::Error) -> Problem {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let (kind, advice) = errno.map_or((ProblemKind::Failed, ""), advice);
    Problem::new(kind, format!("cannot {doing} {}: {}{advice}", path.display(), plain(error)))
}

fn advice(errno: Errno) -> (ProblemKind, &'static str) {
    match errno {
        Errno::NOENT | Errno::NOTDIR => (ProblemKind::NotFound, "; look whether the path is right"),
        Errno::ACCESS | Errno::PERM => (ProblemKind::Forbidden, "; try as root"),
        Errno::ROFS => (ProblemKind::Refused, "; name a place that can be written"),
        Errno::NOSPC | Errno::DQUOT => {
            (ProblemKind::Refused, "; free space there, or name a place that has more")
        }
        Errno::FBIG => (ProblemKind::Refused, "; its file system has no files that large"),
        Errno::BUSY => (ProblemKind::Conflict, "; unmount it, and stop what uses it"),
        _ => (ProblemKind::Failed, ""),
    }
}

/// Without the number, which says nothing to people.
fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    let words = text.split(" (os error").next().unwrap_or_default();
    let mut letters = words.chars();
    letters.next().map_or(String::new(), |first| first.to_lowercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_where_and_what_to_do() {
        let full = io::Error::from(Errno::NOSPC);
        let problem = of_path("write", Path::new("/srv/a.img"), &full);
        assert_eq!(problem.kind, ProblemKind::Refused);
        assert_eq!(
            problem.message,
            "cannot write /srv/a.img: no space left on device; free space there, or name a place that has more"
        );
    }
}
