//! How far a drain has come: what the API, `drain status` and `--json` show.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::plan::Stay;
use crate::problem::Problem;

/// What a drain is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainState {
    /// VMs are being moved.
    Moving,
    /// Somebody cancelled it: what is in flight is undone or finishes.
    Cancelling,
    /// Everything that was to move has moved; nothing else is here.
    Drained,
    /// It is over, and some VMs stayed.
    Incomplete,
    /// It was cancelled; what had moved stays there.
    Cancelled,
    /// The agent stopped in the middle. The next `drain` carries on.
    Interrupted,
}

/// A drain, or the way back of what it moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainStatus {
    /// What it is doing.
    pub state: DrainState,
    /// Each VM that was planned to move, in the order of the plan, and those that somebody else has moved meanwhile.
    pub moves: Vec<MoveStatus>,
    /// The VMs that stay, and why.
    pub stays: Vec<Stay>,
    /// How many VMs may be on the links at a time, as found so far.
    pub transfers: u8,
    /// What arrived over all links in the last two seconds, in Mb/s.
    pub rate_mbps: f64,
    /// The same for each link of this host that carries something.
    #[serde(default)]
    pub links: Vec<LinkRate>,
    /// Since it began.
    pub elapsed_ms: f64,
    /// How long the first plan said that it takes.
    pub predicted_ms: f64,
    /// Until the last VM runs on its target; absent when it is over, and while nothing arrives.
    pub eta_ms: Option<f64>,
    /// What keeps it from going on until somebody mends it; then it goes on by itself. Absent when nothing does.
    #[serde(default)]
    pub obstacle: Option<Problem>,
}

impl DrainStatus {
    /// Of one that has just begun, with no move yet.
    pub fn begun() -> Self {
        Self {
            state: DrainState::Moving,
            moves: vec![],
            stays: vec![],
            transfers: 1,
            rate_mbps: 0.0,
            links: vec![],
            elapsed_ms: 0.0,
            predicted_ms: 0.0,
            eta_ms: None,
            obstacle: None,
        }
    }

    /// How many VMs it has moved.
    pub fn moved(&self) -> usize {
        self.count(MoveState::Moved)
    }

    /// How many VMs somebody else has moved meanwhile.
    pub fn left(&self) -> usize {
        self.count(MoveState::Left)
    }

    fn count(&self, state: MoveState) -> usize {
        self.moves.iter().filter(|one| one.state == state).count()
    }

    /// Bytes that have arrived, of all VMs.
    pub fn sent_bytes(&self) -> u64 {
        self.moves.iter().map(|one| one.sent_bytes).sum()
    }

    /// Bytes that will have arrived in the end, as far as is known: of those that have moved what they took, of the
    /// others what was predicted.
    pub fn expected_bytes(&self) -> u64 {
        let expected = |one: &MoveStatus| match one.state {
            MoveState::Moved | MoveState::Left => one.sent_bytes,
            _ => one.sent_bytes.max(one.predicted_bytes),
        };
        self.moves.iter().map(expected).sum()
    }

    /// Whether no VM stays or has failed, or is still to move.
    pub fn all_moved(&self) -> bool {
        self.stays.is_empty() && self.moved() + self.left() == self.moves.len()
    }
}

/// What one link carries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LinkRate {
    /// The link.
    pub link: String,
    /// What arrived over it of all VMs in the last two seconds, in Mb/s.
    pub rate_mbps: f64,
}

impl LinkRate {
    /// What links carry in all, by their names.
    pub fn summed(rates: impl IntoIterator<Item = (String, f64)>) -> Vec<Self> {
        let mut links = BTreeMap::<String, f64>::new();
        for (link, rate_mbps) in rates {
            *links.entry(link).or_default() += rate_mbps;
        }
        links.into_iter().map(|(link, rate_mbps)| Self { link, rate_mbps }).collect()
    }
}

/// How far one VM has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MoveStatus {
    /// The VM.
    pub vm: String,
    /// Where it goes.
    pub target: String,
    /// What it is doing.
    pub state: MoveState,
    /// The migration under way, or the last one.
    pub migration: Option<String>,
    /// How often it was tried.
    pub attempts: u8,
    /// Why it did not move.
    pub error: Option<Problem>,
    /// Why it does not go on for now, though nothing has failed; absent when it does.
    #[serde(default)]
    pub waits: Option<String>,
    /// Its memory.
    pub memory_bytes: u64,
    /// Bytes of it that have arrived.
    pub sent_bytes: u64,
    /// Bytes that were to go over the links.
    #[serde(default)]
    pub predicted_bytes: u64,
    /// How long its transfer was to take, with the links shared as planned.
    pub predicted_ms: f64,
    /// How long its transfer took; absent while it has not ended.
    pub transfer_ms: Option<f64>,
}

/// What one VM is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MoveState {
    /// Its turn has not come.
    Waiting,
    /// Steps 1 to 5: its target is being made ready.
    Preparing,
    /// All is ready; it waits for its turn on the links.
    Ready,
    /// Its memory is on the links.
    Transferring,
    /// It is paused for its last bytes, or the target takes over.
    Finishing,
    /// It runs on its target.
    Moved,
    /// It runs here still; see the error.
    Failed,
    /// It was handed over, and the target has not said whether it runs there.
    Undecided,
    /// Somebody else has moved it meanwhile: it runs on its target.
    Left,
}
