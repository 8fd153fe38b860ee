//! Where a VM's owner allows it to be when a host is emptied. It changes nothing about the machine.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{GroupName, SpecProblem, problem};

/// Groups of one kind that a VM may be in.
const GROUPS_MAX: usize = 16;

/// Longest reason, in characters: it stands in tables.
const REASON_LENGTH_MAX: usize = 200;

/// Where a VM may be. Groups of VMs to keep apart and groups to keep together are different things,
/// also when they have the same name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Why a drain must leave it where it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 200, example = "licence bound to this host")]
    pub stays: Option<String>,
    /// Groups whose VMs a drain puts on different hosts.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<GroupName>, max_items = 16)]
    pub apart: BTreeSet<GroupName>,
    /// Groups whose VMs a drain moves all to the same host, or not at all.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[schema(value_type = Vec<GroupName>, max_items = 16)]
    pub together: BTreeSet<GroupName>,
}

impl Placement {
    /// Whether the VM may be anywhere.
    pub(super) fn is_free(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn validate(&self) -> Result<(), SpecProblem> {
        self.stays.as_deref().map_or(Ok(()), check_reason)?;
        check_groups("placement.apart", &self.apart)?;
        check_groups("placement.together", &self.together)
    }
}

fn check_reason(reason: &str) -> Result<(), SpecProblem> {
    let length = reason.chars().count();
    // It is shown on terminals.
    let is_plain = !reason.contains(char::is_control);
    if is_plain && !reason.trim().is_empty() && length <= REASON_LENGTH_MAX {
        return Ok(());
    }
    let message = format!(
        "say why the VM must stay, in 1 to {REASON_LENGTH_MAX} characters on one line, as in \
         \"licence bound to this host\"; or remove this line"
    );
    Err(problem("placement.stays", message))
}

fn check_groups(key: &str, groups: &BTreeSet<GroupName>) -> Result<(), SpecProblem> {
    let count = groups.len();
    if count <= GROUPS_MAX {
        return Ok(());
    }
    Err(problem(key, format!("{count} groups are too many: at most {GROUPS_MAX} are allowed")))
}
