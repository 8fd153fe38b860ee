//! One VM of a drain under way.

use super::super::eta::{Load, LoadStage};
use super::super::plan::Move;
use super::super::status::{DisksProgress, MoveState, MoveStatus};
use super::super::stay::{Stay, StayReason};
use super::{Closing, Departure};
use crate::format::bytes;
use crate::problem::{Problem, ProblemKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    /// No host can take it, by the last plan; another plan may place it.
    LeftOut,
    /// It has no QEMU on this host any more.
    Gone,
    Preparing,
    /// Its target takes no more VMs for now.
    AwaitingPlace,
    Ready,
    /// Its disks are copied; its memory follows by itself.
    CopyingDisks,
    Transferring,
    /// It is paused, and its last bytes are on the links.
    SwitchingOver,
    /// With post-copy: it runs on its target, and the rest of its memory is on the links.
    SendingRest,
    Finishing,
    Moved,
    Failed,
    InDoubt,
    /// It has ended.
    Lost,
    /// Somebody else has moved it.
    Left,
}

impl Stage {
    pub(super) fn is_under_way(self) -> bool {
        self.is_prepared_for()
            || matches!(self, Self::Ready | Self::SendingRest)
            || self.is_on_links()
            || self.is_paused()
    }

    /// Whether something of it is sent while it runs here.
    pub(super) fn is_on_links(self) -> bool {
        matches!(self, Self::CopyingDisks | Self::Transferring)
    }

    /// Whether its memory is on the links.
    pub(super) fn sends_memory(self) -> bool {
        matches!(self, Self::Transferring | Self::SendingRest) || self.is_paused()
    }

    fn is_paused(self) -> bool {
        matches!(self, Self::SwitchingOver | Self::Finishing)
    }

    /// Whether its steps 1 to 5 are under way.
    pub(super) fn is_prepared_for(self) -> bool {
        matches!(self, Self::Preparing | Self::AwaitingPlace)
    }

    /// Whether it has not moved, and is not under way.
    pub(super) fn is_here(self) -> bool {
        self.is_open() || self == Self::Failed
    }

    /// Whether a new plan may say something else of it.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Waiting | Self::LeftOut | Self::Gone)
    }
}

/// A VM that has sent so many times what it should have sent does not converge: it gives the links to others.
/// Predictions are right within a sixth or so; what gets dirty depends on what the VM does meanwhile.
const YIELDS_AFTER: f64 = 2.0;

/// What a VM that converges has to send at most, in times of its memory: it gets dirty at up to 0.8 of what the
/// links carry, so 1 / (1 − 0.8).
const CONVERGES_WITHIN: f64 = 5.0;

/// A VM that keeps nobody waiting is given up once it has sent its memory so many times. It is throttled in four
/// steps, each after two rounds at most, and it then has to converge.
const GIVEN_UP_AFTER: f64 = 20.0;

/// A VM that has little left to send should be paused by then: three times what it takes where the next one shares the
/// links.
const ENDS_WITHIN_MS: f64 = 2_000.0;

/// A VM that is paused should have moved by then. Others wait no longer for what may fail.
const TAKEN_OVER_WITHIN_MS: f64 = 1_000.0;

/// How often targets may refuse a VM without that being an attempt. Most of all they do when others have taken its room
/// since the plan was made. The next plan sees that.
const REFUSALS_MAX: u8 = 8;

/// Clients of a VM should hear of it again so long after its pause. Where it runs now, its first moments cost more
/// CPU than those that follow.
const HEARD_AGAIN_WITHIN_MS: f64 = 500.0;

/// How long a VM that does not converge is borne with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// It has sent no more than was to be expected.
    Untried,
    /// It has given the links to others, and is tried again after them.
    Yielded,
    /// It was tried long enough.
    Exhausted,
}

/// What a VM that sends does with the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkClaim {
    /// It uses what it can.
    Taken,
    /// It leaves them to another one that is about to be paused.
    Given,
}

/// A VM that was planned to move.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) planned: Move,
    pub(super) stage: Stage,
    pub(super) migration: Option<String>,
    pub(super) attempts: u8,
    // How often targets have refused it, up to `REFUSALS_MAX`: more do not count.
    refusals: u8,
    /// Its migration is being undone.
    pub(super) cancelled: bool,
    pub(super) patience: Patience,
    /// It failed, and no plan has placed it since.
    pub(super) needs_plan: bool,
    /// It failed while a plan was being made in which it is still under way.
    pub(super) missed_plan: bool,
    /// What was sent of its memory, in the running attempt or the last one.
    pub(super) sent_bytes: u64,
    // How much was copied of its disks.
    copied_bytes: u64,
    error: Option<Problem>,
    left_out_why: StayReason,
    pub(super) link_claim: LinkClaim,
    // Little of it is left to send, since then.
    ending_since_ms: Option<f64>,
    paused_at_ms: Option<f64>,
    transfer_ms: Option<f64>,
}

impl Entry {
    pub(super) fn new(planned: Move) -> Self {
        Self {
            planned,
            stage: Stage::Waiting,
            migration: None,
            attempts: 0,
            refusals: 0,
            cancelled: false,
            patience: Patience::Untried,
            needs_plan: false,
            missed_plan: false,
            sent_bytes: 0,
            copied_bytes: 0,
            error: None,
            left_out_why: StayReason::Gone,
            link_claim: LinkClaim::Taken,
            ending_since_ms: None,
            paused_at_ms: None,
            transfer_ms: None,
        }
    }

    /// One that was not planned to move, and that somebody else has moved.
    pub(super) fn departed(vm: String, departure: Departure) -> Self {
        let mut entry = Self::new(Move {
            vm,
            target: departure.target.clone(),
            memory_bytes: departure.memory_bytes,
            predicted_bytes: 0,
            is_compressed: false,
            post_copy: false,
            predicted_steps_ms: 0.0,
            predicted_transfer_ms: 0.0,
            predicted_shared_ms: 0.0,
            warning: None,
            disks: vec![],
        });
        entry.left(departure);
        entry
    }

    /// Somebody else has moved it.
    pub(super) fn left(&mut self, departure: Departure) {
        self.stage = Stage::Left;
        self.planned.target = departure.target;
        self.migration = Some(departure.migration);
        self.error = None;
    }

    /// The same VM by a new plan.
    pub(super) fn replanned(self, planned: Move) -> Self {
        Self { planned, stage: Stage::Waiting, needs_plan: false, missed_plan: false, ..self }
    }

    /// A new plan does not move it: for this reason, or because it knows nothing of it.
    pub(super) fn leave_out(&mut self, why: Option<StayReason>) {
        self.stage = if why.is_some() { Stage::LeftOut } else { Stage::Gone };
        self.left_out_why = why.unwrap_or(StayReason::Gone);
    }

    pub(super) fn begin(&mut self) {
        self.stage = Stage::Preparing;
        self.attempts = self.attempts.saturating_add(1);
        (self.sent_bytes, self.copied_bytes) = (0, 0);
        self.link_claim = LinkClaim::Taken;
        self.ending_since_ms = None;
        self.paused_at_ms = None;
        self.cancelled = false;
    }

    pub(super) fn busy(&mut self) {
        if self.stage == Stage::Preparing {
            self.stage = Stage::AwaitingPlace;
        }
    }

    /// Whether it is to be taken from the links, since it does not converge.
    pub(super) fn overstays(&self, may_yield: bool) -> bool {
        if self.stage != Stage::Transferring || self.cancelled {
            return false;
        }
        let (sent, memory) = (self.sent_bytes as f64, self.planned.memory_bytes as f64);
        let expected = (self.planned.predicted_bytes as f64).clamp(memory, CONVERGES_WITHIN * memory);
        let yields = may_yield && self.may_yield() && sent > YIELDS_AFTER * expected;
        yields || sent > GIVEN_UP_AFTER * memory
    }

    /// Whether it may be tried again after the others. Its disks would be copied once more.
    pub(super) fn may_yield(&self) -> bool {
        self.patience == Patience::Untried && self.planned.disks.is_empty()
    }

    /// How far it is, by what was planned for it alone.
    pub(super) fn load(&self) -> Load {
        let stage = match self.stage {
            Stage::Moved => LoadStage::Moved,
            _ if self.is_taken_back() => LoadStage::Over,
            Stage::Waiting | Stage::AwaitingPlace => LoadStage::ToCome,
            Stage::Preparing => LoadStage::Preparing,
            Stage::Ready => LoadStage::Ready,
            Stage::CopyingDisks
            | Stage::Transferring
            | Stage::SwitchingOver
            | Stage::SendingRest
            | Stage::Finishing => LoadStage::OnLinks,
            _ => LoadStage::Over,
        };
        let predicted_bytes = self.planned.predicted_bytes.saturating_add(self.planned.disk_bytes());
        Load {
            stage,
            steps_ms: self.planned.predicted_steps_ms,
            transfer_ms: self.planned.predicted_transfer_ms,
            predicted_bytes,
            sent_bytes: self.sent_bytes.saturating_add(self.copied_bytes),
        }
    }

    /// Whether its migration is being undone, and not to be begun again after the others.
    fn is_taken_back(&self) -> bool {
        self.cancelled && self.patience != Patience::Yielded
    }

    /// It is no failure that it has given the links to others, nor that targets refused it.
    pub(super) fn attempts_allowed(&self, attempts: u8) -> u8 {
        attempts.saturating_add(u8::from(self.patience == Patience::Yielded)).saturating_add(self.refusals)
    }

    /// Its migration has failed. A target refuses it before anything of it is sent.
    pub(super) fn note_failure(&mut self, problem: &Problem) {
        if self.stage.is_prepared_for() && problem.kind == ProblemKind::Refused {
            self.refusals = self.refusals.saturating_add(1).min(REFUSALS_MAX);
        }
    }

    /// Why it was taken from the links.
    pub(super) fn overstayed(&self) -> Problem {
        let [sent, memory] = [self.sent_bytes, self.planned.memory_bytes].map(|amount| bytes(amount as f64));
        let what = format!(
            "its memory gets dirty faster than the links carry it: {sent} were sent for its {memory}, \
            without an end in sight"
        );
        Problem::failed(match self.patience {
            Patience::Exhausted => {
                format!(
                    "{what}; it still runs here. It may move with less load in it, over more links, with a \
                    higher --throttle, or, at a risk, with --post-copy"
                )
            }
            _ => format!("{what}; it waits until the others have moved"),
        })
    }

    pub(super) fn prepared(&mut self) {
        if self.stage.is_prepared_for() {
            self.stage = Stage::Ready;
        }
    }

    /// Takes the bytes that have arrived since the migration began; says how many are new.
    pub(super) fn arrived(&mut self, bytes: u64) -> u64 {
        if !self.stage.is_under_way() {
            return 0;
        }
        let more = bytes.saturating_sub(self.sent_bytes);
        self.sent_bytes += more;
        if more > 0 {
            self.memory_follows();
        }
        more
    }

    /// Takes what has been copied of its disks; says how much is new.
    pub(super) fn disks_copied(&mut self, bytes: u64) -> u64 {
        if !self.stage.is_under_way() {
            return 0;
        }
        let more = bytes.saturating_sub(self.copied_bytes);
        self.copied_bytes += more;
        more
    }

    /// Its turn has come.
    pub(super) fn release(&mut self, link_claim: LinkClaim) {
        let is_copied = !self.planned.disks.is_empty();
        self.stage = if is_copied { Stage::CopyingDisks } else { Stage::Transferring };
        self.link_claim = link_claim;
    }

    /// Its disks are there. Other news may have come before that.
    pub(super) fn memory_follows(&mut self) {
        if self.stage == Stage::CopyingDisks {
            self.stage = Stage::Transferring;
        }
    }

    /// How much should still be sent, by the prediction. All of it as long as nothing has arrived.
    pub(super) fn left_bytes(&self) -> f64 {
        if self.sent_bytes == 0 {
            return f64::INFINITY;
        }
        self.planned.predicted_bytes.saturating_sub(self.sent_bytes) as f64
    }

    pub(super) fn ending(&mut self, now_ms: f64) {
        self.memory_follows();
        if self.stage == Stage::Transferring {
            self.ending_since_ms.get_or_insert(now_ms);
        }
    }

    /// Whether it is still on the links, with little left. One that does not come to its end is as any other.
    pub(super) fn is_ending(&self, now_ms: f64) -> bool {
        let is_recent = |since_ms| now_ms - since_ms < ENDS_WITHIN_MS;
        self.stage == Stage::Transferring && self.ending_since_ms.is_some_and(is_recent)
    }

    /// Whether it is about to stand still, or does.
    pub(super) fn is_near_pause(&self, now_ms: f64) -> bool {
        self.is_being_taken_over(now_ms) || self.is_ending(now_ms)
    }

    /// Whether it stands still, and has not moved yet; for so long at most as that should take.
    pub(super) fn is_being_taken_over(&self, now_ms: f64) -> bool {
        let is_recent = |ms| ms < TAKEN_OVER_WITHIN_MS;
        self.stage.is_paused() && self.paused_for_ms(now_ms).is_some_and(is_recent)
    }

    /// Whether it has just been taken over.
    pub(super) fn has_just_moved(&self, now_ms: f64) -> bool {
        let is_recent = |ms| ms < HEARD_AGAIN_WITHIN_MS;
        self.stage == Stage::Moved && self.paused_for_ms(now_ms).is_some_and(is_recent)
    }

    pub(super) fn paused(&mut self, now_ms: f64) {
        self.memory_follows();
        if self.stage == Stage::Transferring {
            self.stage = Stage::SwitchingOver;
            self.paused_at_ms = Some(now_ms);
        }
    }

    /// It runs on its target: from here on it stands still no more than its pages are late.
    pub(super) fn rest_follows(&mut self) {
        if self.stage == Stage::Transferring || self.stage.is_paused() {
            self.stage = Stage::SendingRest;
            self.paused_at_ms = None;
        }
    }

    /// All of it has been sent; the news of its pause may not have come.
    pub(super) fn sent(&mut self, now_ms: f64) {
        self.paused(now_ms);
        if matches!(self.stage, Stage::SwitchingOver | Stage::SendingRest) {
            self.stage = Stage::Finishing;
        }
    }

    /// How long ago it was paused.
    pub(super) fn paused_for_ms(&self, now_ms: f64) -> Option<f64> {
        self.paused_at_ms.map(|paused_at_ms| now_ms - paused_at_ms)
    }

    pub(super) fn try_again(&mut self, problem: Problem, is_planning: bool) {
        self.end(Stage::Waiting, problem);
        self.needs_plan = true;
        self.missed_plan = is_planning;
    }

    /// It has given the links to others, and its target still has room for it by the plan.
    pub(super) fn keep_place(&mut self, is_planning: bool) {
        let problem = self.overstayed();
        self.end(Stage::Waiting, problem);
        self.missed_plan = is_planning;
    }

    pub(super) fn moved(&mut self, transfer_ms: f64) {
        self.stage = Stage::Moved;
        self.error = None;
        self.transfer_ms = Some(transfer_ms);
    }

    pub(super) fn end(&mut self, stage: Stage, problem: Problem) {
        self.stage = stage;
        self.error = Some(problem);
    }

    pub(super) fn give_up(&mut self, closing: Closing) {
        let why = match closing {
            Closing::Cancelled => "the drain was cancelled before it had moved",
            Closing::DeadlinePassed => "the drain's deadline passed before it had moved",
        };
        let before = match &self.error {
            Some(error) => format!("; an earlier attempt failed: {error}"),
            None => String::new(),
        };
        let problem =
            Problem::failed(format!("{why}; it still runs here, and another drain moves it{before}"));
        self.end(Stage::Failed, problem);
    }

    /// As a VM that stays: one that was never tried and that no host can take.
    pub(super) fn as_stay(&self) -> Option<Stay> {
        let is_left_out = matches!(self.stage, Stage::LeftOut | Stage::Gone);
        (is_left_out && self.attempts == 0)
            .then(|| Stay { vm: self.planned.vm.clone(), why: self.left_out_why.clone() })
    }

    pub(super) fn status(&self) -> MoveStatus {
        MoveStatus {
            vm: self.planned.vm.clone(),
            target: self.planned.target.clone(),
            state: self.state(),
            migration: self.migration.clone(),
            attempts: self.attempts,
            error: self.problem(),
            waits: self.waits(),
            memory_bytes: self.planned.memory_bytes,
            sent_bytes: self.sent_bytes,
            predicted_bytes: self.planned.predicted_bytes,
            predicted_ms: self.planned.predicted_shared_ms,
            transfer_ms: self.transfer_ms,
            compression: None,
            disks: self.disks(),
        }
    }

    fn disks(&self) -> Option<DisksProgress> {
        (!self.planned.disks.is_empty()).then(|| DisksProgress {
            bytes: self.planned.disk_bytes(),
            copied_bytes: self.copied_bytes,
            are_being_copied: self.stage == Stage::CopyingDisks,
        })
    }

    fn state(&self) -> MoveState {
        match self.stage {
            Stage::Waiting => MoveState::Waiting,
            Stage::Preparing | Stage::AwaitingPlace => MoveState::Preparing,
            Stage::Ready => MoveState::Ready,
            Stage::CopyingDisks | Stage::Transferring | Stage::SendingRest => MoveState::Transferring,
            Stage::SwitchingOver | Stage::Finishing => MoveState::Finishing,
            Stage::Moved => MoveState::Moved,
            Stage::LeftOut | Stage::Gone | Stage::Failed => MoveState::Failed,
            Stage::InDoubt => MoveState::InDoubt,
            Stage::Lost => MoveState::Lost,
            Stage::Left => MoveState::Left,
        }
    }

    fn waits(&self) -> Option<String> {
        (self.stage == Stage::AwaitingPlace).then(|| {
            format!(
                "{} accepts no more VMs at a time; it continues when others have arrived there",
                self.planned.target
            )
        })
    }

    fn problem(&self) -> Option<Problem> {
        let error = self.error.clone()?;
        Some(match self.stage {
            Stage::LeftOut | Stage::Gone => {
                Problem { message: format!("{error}; after that: {}", self.left_out_why), ..error }
            }
            _ => error,
        })
    }
}
