//! How far a drain has got: what the API, `drain status` and `--json` show.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::stay::Stay;
use crate::migration::progress::CompressionProgress;
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
    /// The same where cores were busy, if others went on to want as much of them; absent where none were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub predicted_most_ms: Option<f64>,
    /// Until the last VM runs on its target; absent when it is over, and while nobody knows.
    pub eta_ms: Option<f64>,
    /// What keeps it from going on until somebody mends it; then it goes on by itself. Absent when nothing does.
    #[serde(default)]
    pub obstacle: Option<Problem>,
    /// What a person should know of the last plan.
    #[serde(default)]
    pub warnings: Vec<String>,
}

impl DrainStatus {
    /// The status of one that has just begun, with no move yet.
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
            predicted_most_ms: None,
            eta_ms: None,
            obstacle: None,
            warnings: vec![],
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

    /// Targets that have VMs still to come.
    pub fn targets_left(&self) -> BTreeSet<&str> {
        let is_left = |one: &&MoveStatus| one.state == MoveState::Waiting || one.state.is_under_way();
        self.moves.iter().filter(is_left).map(|one| one.target.as_str()).collect()
    }

    fn count(&self, state: MoveState) -> usize {
        self.moves.iter().filter(|one| one.state == state).count()
    }

    /// Bytes that have arrived, of all VMs.
    pub fn sent_bytes(&self) -> u64 {
        self.moves.iter().map(MoveStatus::arrived_bytes).sum()
    }

    /// Bytes that will have arrived in the end, as far as is known: of those that have moved what they took, of the
    /// others what was predicted.
    pub fn expected_bytes(&self) -> u64 {
        self.moves.iter().map(MoveStatus::expected_bytes).sum()
    }

    /// Whether it goes on, and a VM is on its way.
    pub fn has_vm_under_way(&self) -> bool {
        let goes_on = matches!(self.state, DrainState::Moving | DrainState::Cancelling);
        goes_on && self.moves.iter().any(|one| one.state.is_under_way())
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
    /// The rate of links in all, by their names.
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
    /// Bytes of its memory that have arrived.
    pub sent_bytes: u64,
    /// Bytes of memory that were to go over the links.
    #[serde(default)]
    pub predicted_bytes: u64,
    /// How long its transfer was to take, with the links shared as planned.
    pub predicted_ms: f64,
    /// How long its transfer took; absent while it has not ended.
    pub transfer_ms: Option<f64>,
    /// What compression has recently done; absent without it, and while its memory is not on the links.
    #[serde(default)]
    pub compression: Option<CompressionProgress>,
    /// Its disks that are copied; absent where none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksProgress>,
}

/// How far the disks of one VM are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DisksProgress {
    /// What was to be copied.
    pub bytes: u64,
    /// How much of it has been copied.
    pub copied_bytes: u64,
    /// Whether they are being copied; then its memory follows.
    pub are_being_copied: bool,
}

impl MoveStatus {
    /// Bytes of it that have arrived, disks included.
    pub fn arrived_bytes(&self) -> u64 {
        self.sent_bytes.saturating_add(self.disks.map_or(0, |disks| disks.copied_bytes))
    }

    /// Bytes that will have arrived in the end, as far as is known: of one that has moved what it took, of another what
    /// was predicted.
    pub fn expected_bytes(&self) -> u64 {
        let disks = self.disks.map_or(0, |disks| disks.bytes);
        match self.state {
            MoveState::Moved | MoveState::Left => self.arrived_bytes(),
            _ => self.arrived_bytes().max(self.predicted_bytes.saturating_add(disks)),
        }
    }
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
    /// Its disks or its memory are on the links.
    Transferring,
    /// It is paused for its last bytes, or the target takes over.
    Finishing,
    /// It runs on its target.
    Moved,
    /// It runs here still; see the error.
    Failed,
    /// It has ended, here or on its target; see the error.
    Lost,
    /// It was handed over, and the target has not said whether it runs there.
    // Its name in 0.1.0.
    #[serde(rename = "undecided")]
    InDoubt,
    /// Somebody else has moved it meanwhile: it runs on its target.
    Left,
}

impl MoveState {
    /// Whether its migration has begun and has not ended.
    pub fn is_under_way(self) -> bool {
        matches!(self, Self::Preparing | Self::Ready | Self::Transferring | Self::Finishing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(state: DrainState, moves: &[MoveState]) -> DrainStatus {
        let row = |state: &MoveState| MoveStatus {
            vm: "v".into(),
            target: "b".into(),
            state: *state,
            migration: None,
            attempts: 1,
            error: None,
            waits: None,
            memory_bytes: 1,
            sent_bytes: 0,
            predicted_bytes: 1,
            predicted_ms: 1.0,
            transfer_ms: None,
            compression: None,
            disks: None,
        };
        DrainStatus { state, moves: moves.iter().map(row).collect(), ..DrainStatus::begun() }
    }

    #[test]
    fn a_vm_is_under_way_from_its_begin_to_its_end_while_the_drain_goes_on() {
        use MoveState::{Failed, Finishing, InDoubt, Left, Moved, Preparing, Ready, Transferring, Waiting};
        for state in [Preparing, Ready, Transferring, Finishing] {
            assert!(status(DrainState::Moving, &[Moved, state]).has_vm_under_way(), "{state:?}");
            assert!(status(DrainState::Cancelling, &[state]).has_vm_under_way(), "{state:?}");
            assert!(!status(DrainState::Interrupted, &[state]).has_vm_under_way(), "{state:?}");
        }
        let others = [Waiting, Moved, Failed, InDoubt, Left];
        assert!(!status(DrainState::Moving, &others).has_vm_under_way());
    }

    #[test]
    fn targets_are_left_to_which_vms_are_still_to_go() {
        use MoveState::{Failed, Moved, Transferring, Waiting};
        let mut drain = status(DrainState::Moving, &[Moved, Waiting, Transferring, Failed]);
        assert_eq!(drain.targets_left().len(), 1);
        for (one, target) in drain.moves.iter_mut().zip(["a", "b", "c", "d"]) {
            one.target = target.into();
        }
        assert_eq!(drain.targets_left(), ["b", "c"].into());
    }
}
