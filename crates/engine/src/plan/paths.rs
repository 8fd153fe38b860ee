//! The paths of a plan.

use std::ops::Deref;

use thiserror::Error;

use crate::paths::path::Path;

/// Paths by which a migration can go: at least one, and not all of them on standby.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths(Vec<Path>);

/// Paths by which no migration can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NothingCarries {
    /// There is none.
    #[error("a plan without a path")]
    NoPath,
    /// None would carry.
    #[error("a plan whose paths are all on standby")]
    AllOnStandby,
}

impl Paths {
    /// The first of them.
    pub fn first(&self) -> &Path {
        &self.0[0]
    }

    /// One of them alone, which need not be on standby then: the one that has this number, as often as they are gone
    /// through.
    #[must_use]
    pub fn alone(&self, number: usize) -> Self {
        let path = self.0[number % self.0.len()].clone();
        Self(vec![Path { is_standby: false, ..path }])
    }

    /// The same paths, seen from the other end.
    #[must_use]
    pub(super) fn reversed(&self) -> Self {
        Self(self.0.iter().map(Path::reversed).collect())
    }
}

impl TryFrom<Vec<Path>> for Paths {
    type Error = NothingCarries;

    fn try_from(paths: Vec<Path>) -> Result<Self, NothingCarries> {
        match () {
            () if paths.is_empty() => Err(NothingCarries::NoPath),
            () if paths.iter().all(|path| path.is_standby) => Err(NothingCarries::AllOnStandby),
            () => Ok(Self(paths)),
        }
    }
}

impl From<Paths> for Vec<Path> {
    fn from(paths: Paths) -> Self {
        paths.0
    }
}

impl Deref for Paths {
    type Target = [Path];

    fn deref(&self) -> &[Path] {
        &self.0
    }
}
