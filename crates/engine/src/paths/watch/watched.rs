//! One path, seen from one end: what is received on it, and whether it is in use.

use super::heard::Heard;
use super::{
    CLOSE_LOOK_MS, FORGIVEN_AFTER_MS, Fault, HOLD_MAX_MS, HOLD_MS, Hearing, Hello, LARGE_LOST_AFTER,
    LOSSES_IN, LOSSES_OUT, PEER_LIVES_MS, Pace, PathNews, SILENT_AFTER_MS, SILENT_TICKS, UNWATCHED_AFTER_MS,
    Unwatched,
};

/// What paths are judged by. A watch goes by all of it; tests show what becomes of one that does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JudgedBy {
    /// Whether full packets arrive: not small ones alone.
    pub(super) full_packets: bool,
    /// Whether either end was late itself: not time alone.
    pub(super) own_lateness: bool,
}

impl JudgedBy {
    pub(super) const ALL: Self = Self { full_packets: true, own_lateness: true };
}

/// One path.
#[derive(Debug)]
pub(super) struct Watched {
    judged_by: JudgedBy,
    // The last hello of each pace.
    pub(super) sent: ByPace<u64>,
    pub(super) heard: ByPace<Heard>,
    large: Large,
    // Hellos heard since the last tick.
    pub(super) heard_at_tick: u32,
    // Ticks in a row at which others were heard and this one was not.
    missed_ticks: u32,
    pub(super) last_heard_ms: f64,
    // Since a hello came or the other end began, whatever this end has slept through since.
    pub(super) quiet_since_ms: f64,
    pub(super) last_heard_closely_ms: f64,
    look_closely_until_ms: f64,
    pub(super) peer: Option<Hello>,
    state: WatchedState,
    failures: u32,
    // None until the other end is known.
    pub(super) began_ms: Option<f64>,
    pub(super) is_heard: bool,
    pub(super) was_heard_there: bool,
    // Until hellos are heard again.
    is_said_unwatched: bool,
    pub(super) heard_since_ms: f64,
}

/// Something of hellos of each pace.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ByPace<T> {
    pub(super) steady: T,
    pub(super) close: T,
    pub(super) large: T,
}

impl<T> ByPace<T> {
    fn of(&mut self, pace: Pace) -> &mut T {
        match pace {
            Pace::Steady => &mut self.steady,
            Pace::Close => &mut self.close,
            Pace::Large => &mut self.large,
        }
    }
}

/// What has come of large hellos.
#[derive(Debug, Default)]
struct Large {
    // Steady hellos that have come since the last large one, or since the other end began.
    steady_since: u32,
    came: LargeCame,
}

/// Where large hellos of the other end have come since it began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum LargeCame {
    /// On no path. The other end may say none.
    #[default]
    Nowhere,
    /// On other paths.
    Elsewhere,
    /// On this one.
    Here,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum WatchedState {
    In { since_ms: f64 },
    Out { fault: Fault, good_since_ms: Option<f64> },
}

impl Watched {
    pub(super) fn new(judged_by: JudgedBy, now_ms: f64) -> Self {
        Self {
            judged_by,
            sent: ByPace::default(),
            heard: ByPace::default(),
            large: Large::default(),
            heard_at_tick: 0,
            missed_ticks: 0,
            last_heard_ms: now_ms,
            quiet_since_ms: now_ms,
            last_heard_closely_ms: now_ms,
            look_closely_until_ms: now_ms,
            peer: None,
            state: WatchedState::In { since_ms: now_ms },
            failures: 0,
            began_ms: None,
            is_heard: false,
            was_heard_there: false,
            is_said_unwatched: false,
            heard_since_ms: now_ms,
        }
    }

    /// The other end begins to say hello, from 1.
    pub(super) fn begin(&mut self, now_ms: f64) {
        self.began_ms = Some(now_ms);
        self.quiet_since_ms = now_ms;
        self.is_heard = false;
        self.heard = ByPace::default();
        // It may be of another release now.
        self.large = Large::default();
        self.look_closely_until_ms = now_ms;
        // That hellos have come through before still counts; what they said does not.
        self.peer = self.peer.map(|_| Hello::FORGOTTEN);
        self.wake(now_ms);
    }

    /// After the watch stood still: what it slept through is no silence and no loss, and no sign of life of
    /// a path that was out.
    pub(super) fn wake(&mut self, now_ms: f64) {
        self.missed_ticks = 0;
        self.large.steady_since = 0;
        match &mut self.state {
            WatchedState::In { .. } => self.last_heard_ms = now_ms,
            WatchedState::Out { good_since_ms, .. } => *good_since_ms = None,
        }
    }

    pub(super) fn is_in(&self) -> bool {
        matches!(self.state, WatchedState::In { .. })
    }

    /// Nothing has been heard for long. Whether that is a silence of the path is another matter:
    /// [`Self::has_fallen_silent`].
    pub(super) fn is_silent(&self, now_ms: f64) -> bool {
        now_ms - self.last_heard_ms > SILENT_AFTER_MS
    }

    fn has_fallen_silent(&self, now_ms: f64) -> bool {
        let is_not_late = self.missed_ticks >= SILENT_TICKS || !self.judged_by.own_lateness;
        self.is_silent(now_ms) && is_not_late
    }

    /// At each tick, once what has come is heard.
    pub(super) fn count_tick(&mut self, is_any_heard: bool) {
        if std::mem::take(&mut self.heard_at_tick) > 0 {
            self.missed_ticks = 0;
        } else if is_any_heard {
            self.missed_ticks = self.missed_ticks.saturating_add(1);
        }
    }

    /// Heard just now, and for so long that the other agent, had it stood still, is awake on all paths.
    pub(super) fn is_proof_of_life(&self, now_ms: f64) -> bool {
        now_ms - self.last_heard_ms <= PEER_LIVES_MS && now_ms - self.heard_since_ms >= SILENT_AFTER_MS
    }

    fn losses_here(&self) -> u8 {
        self.heard.steady.losses().max(self.heard.close.losses())
    }

    fn losses(&self) -> u8 {
        self.losses_here().max(self.peer.map_or(0, |hello| hello.losses))
    }

    /// What the other end is told. A path that is out for loss counts again, so that it does not come back for
    /// having lost much in a short time only; until it has proven clean, what put it out is what counts there.
    fn losses_to_tell(&self) -> u8 {
        if self.is_clean() { self.losses_here() } else { self.losses_here().max(LOSSES_OUT) }
    }

    /// Whether it has proven here that it loses nothing any more, if that is what it is out for.
    fn is_clean(&self) -> bool {
        let lost = matches!(self.fault_it_is_out_for(), Some(Fault::Loss(_)));
        !lost || (self.heard.steady.is_full() && self.losses_here() <= LOSSES_IN)
    }

    pub(super) fn looks_closely(&self, now_ms: f64) -> bool {
        self.is_in() && self.peer.is_some() && now_ms < self.look_closely_until_ms
    }

    pub(super) fn look_closely(&mut self, now_ms: f64) {
        self.look_closely_until_ms = now_ms + CLOSE_LOOK_MS;
    }

    /// Whether it is no replay, which would be no sign of life.
    pub(super) fn record(&mut self, hello: Hello, anew: bool, now_ms: f64) -> bool {
        let heard = self.heard.of(hello.pace);
        if hello.sequence <= heard.newest {
            heard.record_late(hello.sequence);
            return false;
        }
        *heard =
            if anew || heard.is_empty() { Heard::first(hello.sequence) } else { heard.next(hello.sequence) };
        match hello.pace {
            Pace::Steady => self.large.steady_since = self.large.steady_since.saturating_add(1),
            Pace::Close => self.last_heard_closely_ms = now_ms,
            Pace::Large => {
                self.large.steady_since = 0;
                self.large.came = LargeCame::Here;
            }
        }
        true
    }

    pub(super) fn has_heard_large(&self) -> bool {
        self.large.came == LargeCame::Here
    }

    /// Whether large hellos have come on any path.
    pub(super) fn compare_large(&mut self, came_on_any: bool) {
        if !self.has_heard_large() {
            self.large.came = if came_on_any { LargeCame::Elsewhere } else { LargeCame::Nowhere };
        }
    }

    fn hearing_large(&self) -> Hearing {
        match (self.large.came, self.large.steady_since) {
            (LargeCame::Here | LargeCame::Elsewhere, LARGE_LOST_AFTER..) => Hearing::NoMore,
            (LargeCame::Here, _) => Hearing::Now,
            (LargeCame::Nowhere | LargeCame::Elsewhere, _) => Hearing::Never,
        }
    }

    fn loses_large(&self, peer: Hello) -> bool {
        [self.hearing_large(), peer.hearing_large].contains(&Hearing::NoMore)
    }

    pub(super) fn say_next(&mut self, pace: Pace, now_ms: f64) -> Hello {
        let last = self.sent.of(pace);
        *last += 1;
        Hello {
            sequence: *last,
            pace,
            hearing: self.hearing(now_ms),
            hearing_large: self.hearing_large(),
            losses: self.losses_to_tell(),
        }
    }

    pub(super) fn is_heard_there(&self) -> bool {
        self.peer.is_some_and(|hello| hello.hearing != Hearing::NoMore)
    }

    fn hearing(&self, now_ms: f64) -> Hearing {
        match self.peer {
            None => Hearing::Never,
            Some(_) if self.has_fallen_silent(now_ms) => Hearing::NoMore,
            Some(_) => Hearing::Now,
        }
    }

    fn fault(&self, now_ms: f64, peer_hears: bool) -> Option<Fault> {
        let peer = self.peer?;
        if self.has_fallen_silent(now_ms) {
            Some(Fault::Silent)
        } else if peer_hears && !self.is_heard_there() {
            Some(Fault::OneWay)
        } else if self.judged_by.full_packets && self.loses_large(peer) {
            Some(Fault::LargePackets)
        } else {
            Some(self.losses()).filter(|losses| *losses >= LOSSES_OUT).map(Fault::Loss)
        }
    }

    fn hold_ms(&self) -> f64 {
        let doublings = i32::try_from(self.failures.saturating_sub(1)).unwrap_or(i32::MAX);
        (HOLD_MS * 2_f64.powi(doublings)).min(HOLD_MAX_MS)
    }

    /// Goes out or comes back, if it must; true if it did.
    pub(super) fn judge(&mut self, now_ms: f64, peer_hears: bool) -> bool {
        let fault = self.fault(now_ms, peer_hears);
        let next = match self.state {
            WatchedState::In { since_ms } => self.stay_or_go(since_ms, fault, now_ms),
            WatchedState::Out { fault: old, good_since_ms } => {
                let is_clean_there = self.losses() <= LOSSES_IN || !matches!(old, Fault::Loss(_));
                let is_good = self.is_heard && fault.is_none() && is_clean_there && self.is_clean();
                self.wait_or_return(
                    old,
                    good_since_ms.filter(|_| is_good).or(is_good.then_some(now_ms)),
                    now_ms,
                )
            }
        };
        let turned = self.is_in() != matches!(next, WatchedState::In { .. });
        self.state = next;
        turned
    }

    fn stay_or_go(&mut self, since_ms: f64, fault: Option<Fault>, now_ms: f64) -> WatchedState {
        if now_ms - since_ms >= FORGIVEN_AFTER_MS {
            self.failures = 0;
        }
        let Some(fault) = fault else { return self.state };
        self.failures = self.failures.saturating_add(1);
        if matches!(fault, Fault::Loss(_)) {
            self.heard.steady = Heard::first(self.heard.steady.newest);
            self.heard.close.forget();
        }
        WatchedState::Out { fault, good_since_ms: None }
    }

    fn wait_or_return(&self, fault: Fault, good_since_ms: Option<f64>, now_ms: f64) -> WatchedState {
        if good_since_ms.is_some_and(|since_ms| now_ms - since_ms >= self.hold_ms()) {
            return WatchedState::In { since_ms: now_ms };
        }
        WatchedState::Out { fault, good_since_ms }
    }

    pub(super) fn fault_it_is_out_for(&self) -> Option<Fault> {
        match self.state {
            WatchedState::In { .. } => None,
            WatchedState::Out { fault, .. } => Some(fault),
        }
    }

    /// What is to be said of whether it is watched; once each time.
    pub(super) fn watching(&mut self, now_ms: f64) -> Option<PathNews> {
        let is_unheard = self.peer.is_none()
            && self.began_ms.is_some_and(|began_ms| now_ms - began_ms > UNWATCHED_AFTER_MS);
        match (self.is_said_unwatched, self.is_heard) {
            (true, true) => {
                self.is_said_unwatched = false;
                Some(PathNews::Watched)
            }
            (false, false) if is_unheard => self.unwatched(Unwatched::Unheard),
            _ => None,
        }
    }

    pub(super) fn unwatched(&mut self, why: Unwatched) -> Option<PathNews> {
        self.is_heard = false;
        let newly = self.began_ms.is_some() && !self.is_said_unwatched;
        self.is_said_unwatched |= newly;
        newly.then_some(PathNews::Unwatched(why))
    }
}
