//! What was there before a change, and what has come of undoing it.

use serde::{Deserialize, Serialize};

use crate::route_attributes::RouteAttributes;

/// What was there before a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "before")]
pub enum Before {
    /// Nothing: undoing removes what was added.
    Absent,
    /// The address, already on that link.
    Address,
    /// A route of Drainpipe's own to that destination.
    Route(RouteAttributes),
    /// Unreachable without its route, by Drainpipe.
    Unreachable,
    /// The kernel setting's value.
    Sysctl {
        /// As `sysctl` prints it.
        value: String,
    },
}

/// What undoing a change came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "undo", content = "reason")]
pub enum Undo {
    /// It is again as it was before.
    Undone,
    /// It was as before already: never applied, undone earlier, or gone with its link.
    NothingToDo,
    /// Someone else has changed it since, so it was left as it is.
    LeftAlone(String),
}
