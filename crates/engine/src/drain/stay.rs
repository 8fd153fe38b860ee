//! The VMs that stay, and why.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::format::{bytes, mib_free, mib_needed};
use crate::problem::Problem;

/// Targets that the reason of a VM that stays names one by one.
const NAMED_TARGETS: usize = 5;

/// One VM that stays.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Stay {
    /// The VM.
    pub vm: String,
    /// Why, and what would let it go.
    #[schema(value_type = String)]
    pub why: StayReason,
}

/// Why a VM stays. Its words, which are what goes over the wire, say what would let it go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum StayReason {
    /// Its owner says so.
    MustStay {
        /// Why, in the owner's words.
        why: String,
    },
    /// An earlier plan has sent it on its way.
    OnItsWay {
        /// Where to.
        target: String,
        /// What the host says of it.
        why: String,
    },
    /// It cannot be moved now, wherever to.
    Immovable {
        /// What the host says of it.
        why: String,
    },
    /// A VM of its unit cannot be moved.
    MateStays {
        /// That VM.
        mate: String,
        /// Why not.
        why: Box<StayReason>,
    },
    /// It must be together with VMs that it must be apart from.
    TogetherAndApart {
        /// The group that keeps them apart.
        apart: String,
    },
    /// There is no other host.
    NoTarget,
    /// There are, and none can take it.
    NoneTakesIt(Vec<TargetObstacle>),
    /// It goes with others or not at all.
    TogetherWith {
        /// These.
        mates: Vec<String>,
        /// Why they stay.
        why: Box<StayReason>,
    },
    /// It has failed to move, and no other plan could be made.
    NotPlannedAnew(Problem),
    /// It was to be moved, and has ended meanwhile.
    Gone,
    /// It was to come back, and somebody has moved it on.
    MovedOn {
        /// The host that it was to come from.
        from: String,
    },
    /// What another host says, or an earlier run of this one.
    Stated(String),
}

/// Why one target cannot take VMs that go together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetObstacle {
    pub(super) target: String,
    pub(super) what: Obstacle,
}

/// What is in the way at a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Obstacle {
    IsDrained,
    /// It takes none, or not this one: what has been found there.
    Found(String),
    HasNamesake {
        vm: String,
    },
    GroupElsewhere {
        mate: String,
        group: String,
        host: String,
    },
    TooNear {
        vm: String,
        other: String,
        group: String,
    },
    LackingMemory {
        needed_bytes: u64,
        free_bytes: u64,
    },
    LackingRoom {
        needed_bytes: u64,
        free_bytes: u64,
        // One of the disks that would be there.
        path: String,
    },
}

impl StayReason {
    /// Whether nobody has given one.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Stated(words) if words.trim().is_empty())
    }
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MustStay { why } => write!(
                f,
                "it must stay, by its specification: {why}; take `stays` out of its [placement] to let it go"
            ),
            Self::OnItsWay { target, why } => write!(f, "it is on its way to {target} already: {why}"),
            Self::Immovable { why } => {
                write!(f, "it cannot be moved at present: {why}; fix that and drain again")
            }
            Self::MateStays { mate, why } => write!(f, "{mate} stays: {why}"),
            Self::TogetherAndApart { apart } => write!(
                f,
                "VMs of one `together` group are also in the `apart` group {apart}, so no host can hold \
                them; remove one of the two from their specifications"
            ),
            Self::NoTarget => f.write_str("there is no other host to take it; name one with --to"),
            Self::NoneTakesIt(obstacles) => {
                let named: Vec<String> =
                    obstacles.iter().take(NAMED_TARGETS).map(ToString::to_string).collect();
                write!(f, "no host can take it: {}", named.join("; "))?;
                let more = obstacles.len() - named.len();
                if more > 0 {
                    write!(f, "; and {more} more hosts cannot either")?;
                }
                f.write_str("; fix one of these, or name another host with --to")
            }
            Self::TogetherWith { mates, why } => {
                write!(f, "it must be together with {}: {why}", mates.join(", "))
            }
            Self::NotPlannedAnew(problem) => write!(f, "no new place was found for it: {problem}"),
            Self::Gone => f.write_str(
                "it no longer runs: it was stopped or removed, or its QEMU has died; nothing is left to move",
            ),
            Self::MovedOn { from } => {
                write!(f, "it is no longer on {from}; `drainpipe vms` shows where it is")
            }
            Self::Stated(words) => f.write_str(words),
        }
    }
}

impl fmt::Display for TargetObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.target, self.what)
    }
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IsDrained => f.write_str("it is the host that is being drained"),
            Self::Found(what) => f.write_str(what),
            Self::HasNamesake { vm } => write!(f, "there is a VM {vm} on it"),
            Self::GroupElsewhere { mate, group, host } => {
                write!(f, "{mate} of its group {group} is on {host}")
            }
            Self::TooNear { vm, other, group } => {
                write!(f, "{vm} must be apart from {other}, by the group {group}")
            }
            Self::LackingMemory { needed_bytes, free_bytes } => write!(
                f,
                "{} are needed, and {} are free after what is planned to go there",
                mib_needed(*needed_bytes),
                mib_free(*free_bytes)
            ),
            Self::LackingRoom { needed_bytes, free_bytes, path } => write!(
                f,
                "its disks need {} where {path} would be, and {} are free there after what is planned to go there",
                bytes(*needed_bytes as f64),
                bytes(*free_bytes as f64)
            ),
        }
    }
}

impl From<StayReason> for String {
    fn from(reason: StayReason) -> Self {
        reason.to_string()
    }
}

impl From<String> for StayReason {
    fn from(words: String) -> Self {
        Self::Stated(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn none_takes_it(hosts: &[&str]) -> StayReason {
        let cordoned = |host: &&str| TargetObstacle {
            target: (*host).to_owned(),
            what: Obstacle::Found("it is cordoned".into()),
        };
        StayReason::NoneTakesIt(hosts.iter().map(cordoned).collect())
    }

    #[test]
    fn of_many_hosts_some_are_named_and_the_others_counted() {
        assert_eq!(
            none_takes_it(&["b", "c"]).to_string(),
            "no host can take it: b: it is cordoned; c: it is cordoned; fix one of these, or name another \
            host with --to"
        );
        let many = none_takes_it(&["b", "c", "d", "e", "f", "g", "h"]).to_string();
        assert!(many.contains("f: it is cordoned; and 2 more hosts cannot either; fix"), "{many}");
    }

    #[test]
    fn its_reason_goes_over_the_wire_in_words() {
        let why = Box::new(StayReason::MustStay { why: "licence".into() });
        let why = Box::new(StayReason::MateStays { mate: "db".into(), why });
        let stay = Stay { vm: "web".into(), why: StayReason::TogetherWith { mates: vec!["db".into()], why } };
        let words = "it must be together with db: db stays: it must stay, by its specification: licence; take `stays` \
                     out of its [placement] to let it go";
        let wire = serde_json::json!({ "vm": "web", "why": words });
        assert_eq!(serde_json::to_value(&stay).unwrap(), wire);
        let read: Stay = serde_json::from_value(wire).unwrap();
        assert_eq!((read.vm.as_str(), read.why.to_string().as_str()), ("web", words));
    }
}
