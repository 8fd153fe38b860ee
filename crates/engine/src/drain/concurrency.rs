//! How many VMs are on the links at a time, found by trying: one number more or less is kept if it pays.
//!
//! ```text
//!            measured            paid: measure on from there
//! settled ──────────────► trying ──────────────────────────► settled
//!    ▲                      │
//!    └── hold: 10 s, 20 s … ◄┘ did not pay: back
//! ```
//!
//! More pays if it carries clearly more; fewer if it carries as much, since then each VM has less time to
//! get dirty.

use crate::estimate::sending::START;

/// After a change of the number the links need so long until they carry what they will.
const RAMP_MS: f64 = 300.0;

/// What decides a close comparison is measured for so long.
const WINDOW_MS: f64 = 2_000.0;

/// What decides a clear comparison is measured for so long: with links that carry a quarter of what they
/// could, each second counts.
const GLANCE_MS: f64 = 400.0;

/// Links that carry this share of their rate are full: more at a time could carry some percent more, and costs each guest a
/// longer pause.
pub(super) const NEARLY_FULL: f64 = 0.92;

/// In [`WINDOW_MS`] one VM more than usual may hand the links over to the next one: so much less is carried then.
const HANDED_OVER: f64 = 0.1;

/// While so much of the links is carried, a short look does not tell whether they are full.
const HALF_FULL: f64 = 0.5;

/// What is clear after a second: far above the noise of that time. After half a second it must be twice.
const CLEAR: f64 = 0.15;

/// More at a time must carry so much more.
const GAIN: f64 = 0.03;

/// Fewer at a time may carry so much less than the most that was seen. Smaller than [`GAIN`], so that no
/// number is both left and come back to.
const LOSS: f64 = 0.02;

/// After a try that did not pay nothing is tried for so long; twice as long after each further one.
const HOLD_MS: f64 = 10_000.0;

/// The longest hold, but for [`HOLD_PER_TRIAL`].
const HOLD_MS_MAX: f64 = 160_000.0;

/// The hold lasts at least so many times as long as it took to try and to be back: a VM on the links stays
/// there until it has moved.
const HOLD_PER_TRIAL: f64 = 10.0;

/// If the same number carries so much more or less than it did, other VMs are on the links, or other links.
const MIX_CHANGED: f64 = 0.15;

/// Finds how many VMs are best on the links at a time.
#[derive(Debug, Clone)]
pub(super) struct Concurrency {
    most: u8,
    settled: u8,
    trial: Option<ConcurrencyTrial>,
    window: Option<Window>,
    // What `settled` carries, in bytes per ms, once measured.
    carries: Option<f64>,
    // The most that any number carried, of this mix.
    best: f64,
    next: Direction,
    up_by_doubling: bool,
    down_by_halving: bool,
    hold_ms: f64,
    hold_until_ms: f64,
    // Looks in a row by which the links are nearly full, and not quite.
    close_looks: u32,
    // What all links carry at most, in bytes per ms; more at a time cannot carry more than that.
    links: Option<f64>,
    // A try began then that did not pay, and the links are not back at the number before.
    returning_since_ms: Option<f64>,
    tried: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

#[derive(Debug, Clone, Copy)]
struct ConcurrencyTrial {
    transfers: u8,
    direction: Direction,
}

/// Bytes since the links carry what this number of VMs gives them.
#[derive(Debug, Clone, Copy)]
struct Window {
    since_ms: f64,
    first: Option<First>,
}

/// The first sample after the ramp.
#[derive(Debug, Clone, Copy)]
struct First {
    at_ms: f64,
    bytes: u64,
    turns: u64,
}

impl Concurrency {
    /// Begins with so many; never more than `most`.
    pub(super) fn new(begin: u8, most: u8) -> Self {
        let most = most.max(1);
        Self {
            most,
            settled: begin.clamp(1, most),
            trial: None,
            window: None,
            carries: None,
            best: 0.0,
            next: Direction::Up,
            up_by_doubling: true,
            down_by_halving: true,
            hold_ms: HOLD_MS,
            hold_until_ms: f64::NEG_INFINITY,
            close_looks: 0,
            links: None,
            returning_since_ms: None,
            tried: false,
        }
    }

    /// Always so many.
    pub(super) fn fixed(transfers: u8) -> Self {
        Self { hold_until_ms: f64::INFINITY, ..Self::new(transfers, transfers) }
    }

    /// With a number that an earlier drain has found: it holds for a while.
    pub(super) fn found_before(self, now_ms: f64) -> Self {
        Self { hold_until_ms: now_ms + self.hold_ms, ..self }
    }

    /// What all links carry together from now on, in bytes per ms, where that is known.
    pub(super) fn carry_at_most(&mut self, links: Option<f64>) {
        self.links = links;
    }

    /// Never more than so many from now on.
    pub(super) fn bound(&mut self, most: u8) {
        self.most = most.max(1);
        if self.allowed().max(self.settled) > self.most {
            // What fewer transfers carry is not known.
            (self.trial, self.window, self.carries) = (None, None, None);
            self.settled = self.settled.min(self.most);
        }
    }

    /// How many VMs may be on the links.
    pub(super) fn allowed(&self) -> u8 {
        self.trial.map_or(self.settled, |trial| trial.transfers)
    }

    /// How many at a time carried most, once at least one other number has been tried.
    pub(super) fn found(&self) -> Option<u8> {
        self.tried.then_some(self.settled)
    }

    /// Takes a sample, some times a second: bytes of all VMs that have arrived since the drain began, if all that have
    /// are told of, how many VMs are on the links, and how many have had their turn so far.
    pub(super) fn observe(&mut self, now_ms: f64, arrived_bytes: Option<u64>, on_links: u8, turns: u64) {
        if on_links != self.allowed() {
            return self.look_away();
        }
        if let Some(since_ms) = self.returning_since_ms.take() {
            self.hold_until_ms = now_ms + self.hold_ms.max(HOLD_PER_TRIAL * (now_ms - since_ms));
            self.hold_ms = (self.hold_ms * 2.0).min(HOLD_MS_MAX);
        }
        let window = self.window.get_or_insert(Window { since_ms: now_ms, first: None });
        let Some(arrived_bytes) = arrived_bytes.filter(|_| now_ms >= window.since_ms + RAMP_MS) else {
            return;
        };
        let first = *window.first.get_or_insert(First { at_ms: now_ms, bytes: arrived_bytes, turns });
        let since_ms = window.since_ms;
        let span_ms = now_ms - first.at_ms;
        if span_ms < GLANCE_MS {
            return;
        }
        let idle_ms = START.ms * turns.saturating_sub(first.turns) as f64 / f64::from(on_links.max(1));
        let carries = arrived_bytes.saturating_sub(first.bytes) as f64 / span_ms;
        match self.trial {
            Some(trial) => self.judge(since_ms, trial, carries, span_ms),
            // In a short time the start of one VM counts too much, and noise where the links are nearly full.
            None if span_ms < WINDOW_MS && (idle_ms > LOSS * span_ms || self.carry(HALF_FULL, carries)) => {}
            None => self.measured(now_ms, carries, span_ms),
        }
    }

    /// What arrives at this moment says nothing of how much this number carries.
    fn look_away(&mut self) {
        self.window = None;
    }

    fn judge(&mut self, since_ms: f64, trial: ConcurrencyTrial, carries: f64, span_ms: f64) {
        let (before, pays_from) = match trial.direction {
            Direction::Up => (self.carries.unwrap_or(0.0), 1.0 + GAIN),
            Direction::Down => (self.best, 1.0 - LOSS),
        };
        if span_ms < WINDOW_MS && (carries - before * pays_from).abs() < CLEAR * before * 1_000.0 / span_ms {
            return;
        }
        self.end_trial();
        if carries > before * pays_from {
            self.settled = trial.transfers;
            self.carries = Some(carries);
            self.best = self.best.max(carries);
            // The way back is known to be worse, and a step beside it need not be.
            self.large_steps(opposite(trial.direction), false);
            self.next = trial.direction;
            self.trial = self.next_trial();
            return;
        }
        self.does_not_pay(since_ms, trial);
    }

    fn end_trial(&mut self) {
        self.trial = None;
        self.window = None;
        self.tried = true;
    }

    fn does_not_pay(&mut self, since_ms: f64, trial: ConcurrencyTrial) {
        self.large_steps(trial.direction, false);
        self.next = opposite(trial.direction);
        self.returning_since_ms = Some(since_ms);
    }

    fn measured(&mut self, now_ms: f64, carries: f64, span_ms: f64) {
        let holds = now_ms < self.hold_until_ms;
        if holds && span_ms < WINDOW_MS {
            return;
        }
        self.window = None;
        self.carries = match self.carries {
            Some(before) if (carries - before).abs() <= MIX_CHANGED * before => {
                Some(f64::midpoint(before, carries))
            }
            before => {
                if before.is_some() {
                    self.mix_changed();
                }
                self.best = carries;
                Some(carries)
            }
        };
        let is_close = self.carry(NEARLY_FULL - HANDED_OVER, carries) && !self.carry(NEARLY_FULL, carries);
        self.close_looks = if is_close { self.close_looks.saturating_add(1) } else { 0 };
        if now_ms >= self.hold_until_ms && self.close_looks != 1 {
            self.trial = self.next_trial();
        }
    }

    fn mix_changed(&mut self) {
        self.large_steps(Direction::Up, true);
        self.large_steps(Direction::Down, true);
        self.hold_ms = HOLD_MS;
        self.hold_until_ms = f64::NEG_INFINITY;
    }

    fn large_steps(&mut self, direction: Direction, large: bool) {
        match direction {
            Direction::Up => self.up_by_doubling = large,
            Direction::Down => self.down_by_halving = large,
        }
    }

    fn next_trial(&self) -> Option<ConcurrencyTrial> {
        let may_pay = |direction: &Direction| *direction == Direction::Down || !self.links_are_full();
        [self.next, opposite(self.next)].into_iter().filter(may_pay).find_map(|direction| {
            let transfers = match direction {
                Direction::Up if self.up_by_doubling => self.settled.saturating_mul(2),
                Direction::Up => self.settled.saturating_add(1),
                Direction::Down if self.down_by_halving => self.settled / 2,
                Direction::Down => self.settled - 1,
            };
            let transfers = transfers.clamp(1, self.most);
            (transfers != self.settled).then_some(ConcurrencyTrial { transfers, direction })
        })
    }

    /// Whether more at a time could not carry so much more that it would pay.
    fn links_are_full(&self) -> bool {
        self.carries.is_some_and(|carries| self.carry(NEARLY_FULL, carries))
    }

    /// Whether this is such a share of what all links carry.
    fn carry(&self, share: f64, carries: f64) -> bool {
        self.links.is_some_and(|links| carries >= share * links)
    }
}

fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Up => Direction::Down,
        Direction::Down => Direction::Up,
    }
}

#[cfg(test)]
mod tests;
