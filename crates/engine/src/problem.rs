//! What went wrong, in one shape for the engine, the API and the command line.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

/// A failure that a person reads and a script tells apart.
#[derive(Debug, Clone, PartialEq, Eq, Error, Serialize, Deserialize, ToSchema)]
#[error("{message}")]
pub struct Problem {
    /// Which kind it is; the exit code and the HTTP status follow from it.
    pub kind: ProblemKind,
    /// What is wrong, where, and what to do.
    pub message: String,
    /// Whether the two sides answer and do not accept each other's certificates. Known where it was tried only.
    #[serde(skip)]
    pub is_for_certificates: bool,
    /// Whether it says only that the VM's hypervisor on this host has closed its control socket, or has ended. Known to
    /// who asked that hypervisor only.
    #[serde(skip)]
    pub is_hypervisor_gone: bool,
}

/// Kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// The request makes no sense: syntax, values.
    BadInput,
    /// No such VM, host or migration.
    NotFound,
    /// Something of that name is there already, or something else is under way.
    Conflict,
    /// A check found that it cannot work: memory, versions, files.
    Refused,
    /// This caller may not.
    Forbidden,
    /// A host does not answer.
    Unreachable,
    /// It was tried and failed; or a newer Drainpipe has another word for it.
    #[serde(other)]
    Failed,
}

impl Problem {
    /// A problem of this kind.
    pub fn new(kind: ProblemKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), is_for_certificates: false, is_hypervisor_gone: false }
    }

    /// See [`ProblemKind::Failed`].
    pub fn failed(message: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Failed, message)
    }

    /// See [`ProblemKind::NotFound`].
    pub fn not_found(message: impl fmt::Display) -> Self {
        Self::new(ProblemKind::NotFound, message)
    }

    /// See [`ProblemKind::Conflict`].
    pub fn conflict(message: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Conflict, message)
    }

    /// See [`ProblemKind::Refused`].
    pub fn refused(message: impl fmt::Display) -> Self {
        Self::new(ProblemKind::Refused, message)
    }

    /// See [`ProblemKind::BadInput`].
    pub fn bad_input(message: impl fmt::Display) -> Self {
        Self::new(ProblemKind::BadInput, message)
    }

    /// See [`Self::is_hypervisor_gone`].
    pub fn hypervisor_gone(message: impl fmt::Display) -> Self {
        Self { is_hypervisor_gone: true, ..Self::failed(message) }
    }

    /// The same problem, with what was being done in front.
    #[must_use]
    pub fn context(mut self, doing: impl fmt::Display) -> Self {
        self.message = format!("{doing}: {}", self.message);
        self
    }
}
