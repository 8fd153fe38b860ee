//! Which paths of a migration in flight are fit to carry it.
//!
//! Both hosts say hello on each path all the time, as in Bidirectional Forwarding Detection (RFC 5880),
//! and tell each other what they hear. So each end knows of both directions, and the two come to the
//! same judgement without a further word. The rules:
//! - A path on which nothing is heard, while another path is, is out. While nothing is heard on any
//!   path, the other agent may just stand still: nothing changes, and TCP waits.
//! - A path on which no hello has ever come through is not judged: it carried TCP a moment ago, so a
//!   firewall drops the hellos.
//! - A path that loses packets again and again is out: TCP would crawl on it, and the last of the memory
//!   would wait. A short silence that is over is one loss.
//! - A path that may lose packets, because a hello was lost or TCP had to send much again, is looked at closely
//!   for a second: ten times as many hellos tell within a second what 20 a second tell in several. They judge,
//!   not TCP, whose losses at a full queue are its own doing.
//! - A path that is out comes back once it has been good for a while; longer each time, so that a
//!   flapping link does its harm ever more rarely.

mod heard;
mod news;

use self::heard::Heard;
pub use self::news::{Fault, PathNews, Turn, Unwatched};

/// A host says hello on each path this often, in ms: 20 datagrams of 26 bytes a second.
pub const HELLO_EVERY_MS: f64 = 50.0;

/// Between two hellos on a path that is looked at closely, in ms.
pub const CLOSE_HELLO_EVERY_MS: f64 = 5.0;

/// How long a path is looked at closely after each sign of loss: 200 hellos.
const CLOSE_LOOK_MS: f64 = 1_000.0;

/// What was counted in a close look says nothing any more when no such hello has come for that long.
const CLOSE_LOOK_OVER_MS: f64 = 250.0;

/// Eight hellos missed. TCP's first retransmission, after 200 ms or a little more, is lost then; the
/// next one finds the new way.
const SILENT_AFTER_MS: f64 = 400.0;

/// Another path's hello is proof that the other agent lives, if it is no older than that.
const PEER_LIVES_MS: f64 = 150.0;

/// The watch itself stood still when its ticks are that far apart. What it did not hear then, it may
/// have slept through.
const SLEPT_AFTER_MS: f64 = 200.0;

/// A path is said to be unwatched when no hello has come through for that long from the start.
const UNWATCHED_AFTER_MS: f64 = 1_000.0;

/// After it stood still, the watch judges nothing for that long: old hellos are still in its sockets, more
/// on one path than on another, and those that found no room there were not lost on the way.
const WAKING_MS: f64 = 1_000.0;

/// So many losses within the last [`heard::WINDOW`] hellos put a path out: 4 %. TCP's own drops at a full
/// queue stay far below 0.1 %.
const LOSSES_OUT: u8 = 5;

/// A path that was out for loss must be that clean.
const LOSSES_IN: u8 = 1;

/// The other agent is to be asked whether it still watches when nothing has been heard on any path for
/// that long. Longer than most short failures of all links.
const DEAF_AFTER_MS: f64 = 2_000.0;

/// How long a path must have been good before it comes back, the first time; doubled each time.
const HOLD_MS: f64 = 1_000.0;

/// The longest hold.
const HOLD_MAX_MS: f64 = 32_000.0;

/// A path that stayed in for so long has its failures forgiven.
const FORGIVEN_AFTER_MS: f64 = 60_000.0;

/// What one end says on one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// One more each time, from 1; of each pace for itself.
    pub sequence: u64,
    /// Whether it is one of a close look.
    pub pace: Pace,
    /// Whether the other end is heard on this path.
    pub hearing: Hearing,
    /// How many times the other end's hellos were lost of late; those in a row count once.
    pub losses: u8,
}

impl Hello {
    /// In place of what was said before.
    const FORGOTTEN: Self = Self { sequence: 0, pace: Pace::Steady, hearing: Hearing::Now, losses: 0 };
}

/// How often hellos of a kind are said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Each [`HELLO_EVERY_MS`].
    Steady,
    /// Each [`CLOSE_HELLO_EVERY_MS`], while a path is looked at closely.
    Close,
}

/// Whether one end hears the other one's hellos.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hearing {
    /// It never has. A firewall may drop the hellos of one direction, so this is no silence.
    Never,
    /// It has of late.
    Now,
    /// It did, and does not any more.
    NoMore,
}

/// All paths between two hosts that migrations use, seen from one of them.
#[derive(Debug)]
pub struct PathWatch {
    paths: Vec<Watched>,
    last_tick_ms: f64,
    awake_at_ms: f64,
}

#[derive(Debug)]
struct Watched {
    sent: u64,
    sent_closely: u64,
    heard: Heard,
    heard_closely: Heard,
    last_heard_ms: f64,
    last_heard_closely_ms: f64,
    look_closely_until_ms: f64,
    peer: Option<Hello>,
    state: State,
    failures: u32,
    // None until the other end is known.
    began_ms: Option<f64>,
    is_heard: bool,
    was_heard_there: bool,
    // Until hellos are heard again.
    is_said_unwatched: bool,
    heard_since_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    In { since_ms: f64 },
    Out { fault: Fault, good_since_ms: Option<f64> },
}

impl Watched {
    fn new(now_ms: f64) -> Self {
        Self {
            sent: 0,
            sent_closely: 0,
            heard: Heard::default(),
            heard_closely: Heard::default(),
            last_heard_ms: now_ms,
            last_heard_closely_ms: now_ms,
            look_closely_until_ms: now_ms,
            peer: None,
            state: State::In { since_ms: now_ms },
            failures: 0,
            began_ms: None,
            is_heard: false,
            was_heard_there: false,
            is_said_unwatched: false,
            heard_since_ms: now_ms,
        }
    }

    /// The other end begins to say hello, from 1.
    fn begin(&mut self, now_ms: f64) {
        self.began_ms = Some(now_ms);
        self.is_heard = false;
        self.heard = Heard::default();
        self.heard_closely = Heard::default();
        self.look_closely_until_ms = now_ms;
        // That hellos have come through before still counts; what they said does not.
        self.peer = self.peer.map(|_| Hello::FORGOTTEN);
        self.wake(now_ms);
    }

    /// After the watch stood still: what it slept through is no silence and no loss, and no sign of life of
    /// a path that was out.
    fn wake(&mut self, now_ms: f64) {
        match &mut self.state {
            State::In { .. } => self.last_heard_ms = now_ms,
            State::Out { good_since_ms, .. } => *good_since_ms = None,
        }
    }

    fn is_in(&self) -> bool {
        matches!(self.state, State::In { .. })
    }

    fn is_silent(&self, now_ms: f64) -> bool {
        now_ms - self.last_heard_ms > SILENT_AFTER_MS
    }

    /// Heard just now, and for so long that the other agent, had it stood still, is awake on all paths.
    fn is_proof_of_life(&self, now_ms: f64) -> bool {
        now_ms - self.last_heard_ms <= PEER_LIVES_MS && now_ms - self.heard_since_ms >= SILENT_AFTER_MS
    }

    fn losses_here(&self) -> u8 {
        self.heard.losses().max(self.heard_closely.losses())
    }

    fn losses(&self) -> u8 {
        self.losses_here().max(self.peer.map_or(0, |hello| hello.losses))
    }

    /// What the other end is told. A path that is out for loss counts anew, so that it does not come back for
    /// having lost much in a short time only; until it has proven clean, what put it out is what counts there.
    fn losses_to_tell(&self) -> u8 {
        if self.is_clean() { self.losses_here() } else { self.losses_here().max(LOSSES_OUT) }
    }

    /// Whether it has proven here that it loses nothing any more, if that is what it is out for.
    fn is_clean(&self) -> bool {
        let lost = matches!(self.fault_it_is_out_for(), Some(Fault::Loss(_)));
        !lost || (self.heard.is_full() && self.losses_here() <= LOSSES_IN)
    }

    fn looks_closely(&self, now_ms: f64) -> bool {
        self.is_in() && self.peer.is_some() && now_ms < self.look_closely_until_ms
    }

    fn look_closely(&mut self, now_ms: f64) {
        self.look_closely_until_ms = now_ms + CLOSE_LOOK_MS;
    }

    /// Whether it is no replay, which would be no sign of life.
    fn record(&mut self, hello: Hello, anew: bool, now_ms: f64) -> bool {
        let heard = match hello.pace {
            Pace::Steady => &mut self.heard,
            Pace::Close => &mut self.heard_closely,
        };
        if hello.sequence <= heard.newest {
            heard.record_late(hello.sequence);
            return false;
        }
        *heard =
            if anew || heard.is_empty() { Heard::first(hello.sequence) } else { heard.next(hello.sequence) };
        if hello.pace == Pace::Close {
            self.last_heard_closely_ms = now_ms;
        }
        true
    }

    fn say(&self, sequence: u64, pace: Pace, now_ms: f64) -> Hello {
        Hello { sequence, pace, hearing: self.hearing(now_ms), losses: self.losses_to_tell() }
    }

    fn is_heard_there(&self) -> bool {
        self.peer.is_some_and(|hello| hello.hearing != Hearing::NoMore)
    }

    fn hearing(&self, now_ms: f64) -> Hearing {
        match self.peer {
            None => Hearing::Never,
            Some(_) if self.is_silent(now_ms) => Hearing::NoMore,
            Some(_) => Hearing::Now,
        }
    }

    fn fault(&self, now_ms: f64, peer_hears: bool) -> Option<Fault> {
        self.peer?;
        if self.is_silent(now_ms) {
            Some(Fault::Silent)
        } else if peer_hears && !self.is_heard_there() {
            Some(Fault::OneWay)
        } else {
            Some(self.losses()).filter(|losses| *losses >= LOSSES_OUT).map(Fault::Loss)
        }
    }

    fn hold_ms(&self) -> f64 {
        let doublings = i32::try_from(self.failures.saturating_sub(1)).unwrap_or(i32::MAX);
        (HOLD_MS * 2_f64.powi(doublings)).min(HOLD_MAX_MS)
    }

    /// Goes out or comes back, if it must; true if it did.
    fn judge(&mut self, now_ms: f64, peer_hears: bool) -> bool {
        let fault = self.fault(now_ms, peer_hears);
        let next = match self.state {
            State::In { since_ms } => self.stay_or_go(since_ms, fault, now_ms),
            State::Out { fault: old, good_since_ms } => {
                let is_clean_there = self.losses() <= LOSSES_IN || !matches!(old, Fault::Loss(_));
                let is_good = self.is_heard && fault.is_none() && is_clean_there && self.is_clean();
                self.wait_or_return(
                    old,
                    good_since_ms.filter(|_| is_good).or(is_good.then_some(now_ms)),
                    now_ms,
                )
            }
        };
        let turned = self.is_in() != matches!(next, State::In { .. });
        self.state = next;
        turned
    }

    fn stay_or_go(&mut self, since_ms: f64, fault: Option<Fault>, now_ms: f64) -> State {
        if now_ms - since_ms >= FORGIVEN_AFTER_MS {
            self.failures = 0;
        }
        let Some(fault) = fault else { return self.state };
        self.failures = self.failures.saturating_add(1);
        if matches!(fault, Fault::Loss(_)) {
            self.heard = Heard::first(self.heard.newest);
            self.heard_closely.forget();
        }
        State::Out { fault, good_since_ms: None }
    }

    fn wait_or_return(&self, fault: Fault, good_since_ms: Option<f64>, now_ms: f64) -> State {
        if good_since_ms.is_some_and(|since_ms| now_ms - since_ms >= self.hold_ms()) {
            return State::In { since_ms: now_ms };
        }
        State::Out { fault, good_since_ms }
    }

    fn fault_it_is_out_for(&self) -> Option<Fault> {
        match self.state {
            State::In { .. } => None,
            State::Out { fault, .. } => Some(fault),
        }
    }

    /// What is to be said of whether it is watched; once each time.
    fn watching(&mut self, now_ms: f64) -> Option<PathNews> {
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

    fn unwatched(&mut self, why: Unwatched) -> Option<PathNews> {
        self.is_heard = false;
        let newly = self.began_ms.is_some() && !self.is_said_unwatched;
        self.is_said_unwatched |= newly;
        newly.then_some(PathNews::Unwatched(why))
    }
}

impl PathWatch {
    /// Watches no path yet.
    pub fn new(now_ms: f64) -> Self {
        Self { paths: vec![], last_tick_ms: now_ms, awake_at_ms: now_ms }
    }

    /// One path more, good a moment ago. It is not judged before [`Self::begin`].
    pub fn add(&mut self, now_ms: f64) {
        self.paths.push(Watched::new(now_ms));
    }

    /// Watches a path no more. Those behind it move up.
    pub fn remove(&mut self, path: usize) {
        if path < self.paths.len() {
            self.paths.remove(path);
        }
    }

    /// The other end of a path is known from now on. `was_heard`: it knows that its hellos came through to
    /// here, in an earlier life of this agent; so it is no firewall if they do not now.
    pub fn begin(&mut self, path: usize, was_heard: bool, now_ms: f64) {
        let Some(path) = self.paths.get_mut(path) else { return };
        if was_heard && path.peer.is_none() {
            path.peer = Some(Hello::FORGOTTEN);
        }
        path.begin(now_ms);
    }

    /// Whether hellos from here have been heard at the other end of a path.
    pub fn was_heard_there(&self, path: usize) -> bool {
        self.paths.get(path).is_some_and(|path| path.was_heard_there)
    }

    /// The other agent has begun its end of the watch anew: it says hello from 1, and may need a while until
    /// it does. What is to be told of it: nothing unless hellos have been missed.
    pub fn restart(&mut self, now_ms: f64) -> Vec<Turn> {
        let is_deaf = self.is_deaf(now_ms);
        let news = if is_deaf { self.unwatched(Unwatched::AgentRestarted) } else { vec![] };
        for path in self.paths.iter_mut().filter(|path| path.began_ms.is_some()) {
            path.begin(now_ms);
        }
        self.awake_at_ms = now_ms + WAKING_MS;
        news
    }

    /// No path is watched, for this reason, until hellos are heard again. What is to be told of it.
    pub fn unwatched(&mut self, why: Unwatched) -> Vec<Turn> {
        self.news_of_all(|path| path.unwatched(why))
    }

    /// Whether nothing has been heard on any path for so long that the other agent may have forgotten the
    /// watch.
    pub fn is_deaf(&self, now_ms: f64) -> bool {
        let is_deaf = |path: &Watched| now_ms - path.last_heard_ms > DEAF_AFTER_MS;
        self.paths.iter().any(|path| path.peer.is_some()) && self.paths.iter().all(is_deaf)
    }

    fn news_of_all(&mut self, mut news: impl FnMut(&mut Watched) -> Option<PathNews>) -> Vec<Turn> {
        let each = self.paths.iter_mut().enumerate();
        each.filter_map(|(path, watched)| Some(Turn { path, news: news(watched)? })).collect()
    }

    /// Why a path is out, if it is.
    pub fn fault_of(&self, path: usize) -> Option<Fault> {
        self.paths.get(path)?.fault_it_is_out_for()
    }

    /// The next hello to say on a path.
    pub fn hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path)?;
        path.sent += 1;
        Some(path.say(path.sent, Pace::Steady, now_ms))
    }

    /// The next hello to say on a path after each [`CLOSE_HELLO_EVERY_MS`]; none unless it is looked at closely.
    pub fn close_hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path).filter(|path| path.looks_closely(now_ms))?;
        path.sent_closely += 1;
        Some(path.say(path.sent_closely, Pace::Close, now_ms))
    }

    /// Whether any path is looked at closely.
    pub fn looks_closely(&self, now_ms: f64) -> bool {
        self.paths.iter().any(|path| path.looks_closely(now_ms))
    }

    /// TCP has had to send much again on a path.
    pub fn suspect(&mut self, path: usize, now_ms: f64) {
        if let Some(path) = self.paths.get_mut(path) {
            path.look_closely(now_ms);
        }
    }

    /// A hello was heard on a path.
    pub fn heard(&mut self, path: usize, hello: Hello, now_ms: f64) {
        let waking = now_ms < self.awake_at_ms;
        let Some(path) = self.paths.get_mut(path) else { return };
        // What was lost while nothing came through says nothing of the path as it is now.
        let was_silent = path.is_silent(now_ms);
        let anew = waking || was_silent || path.peer.is_none();
        if !path.record(hello, anew, now_ms) {
            return;
        }
        if was_silent {
            path.heard_since_ms = now_ms;
        }
        if path.peer.is_some_and(|before| hello.losses > before.losses) {
            path.look_closely(now_ms);
        }
        path.last_heard_ms = now_ms;
        path.is_heard = true;
        path.was_heard_there |= hello.hearing == Hearing::Now;
        path.peer = Some(hello);
    }

    /// Judges all paths; to be called after each [`HELLO_EVERY_MS`]. What is to be told of it.
    pub fn tick(&mut self, now_ms: f64) -> Vec<Turn> {
        for path in &mut self.paths {
            if now_ms - path.last_heard_closely_ms > CLOSE_LOOK_OVER_MS {
                path.heard_closely.forget();
            }
        }
        let mut news = self.news_of_all(|path| path.watching(now_ms));
        news.extend(self.judge(now_ms));
        news
    }

    fn judge(&mut self, now_ms: f64) -> Vec<Turn> {
        let slept = now_ms - self.last_tick_ms > SLEPT_AFTER_MS;
        self.last_tick_ms = now_ms;
        if slept {
            for path in &mut self.paths {
                path.wake(now_ms);
            }
            self.awake_at_ms = now_ms + WAKING_MS;
        }
        if now_ms < self.awake_at_ms {
            return vec![];
        }
        let peer_lives = self.paths.iter().any(|path| path.is_proof_of_life(now_ms));
        if !peer_lives {
            return vec![];
        }
        // An agent that wakes up says that it hears nothing, of all paths alike.
        let peer_hears = self.paths.iter().any(|path| path.is_proof_of_life(now_ms) && path.is_heard_there());
        self.news_of_all(|path| {
            let turned = path.judge(now_ms, peer_hears);
            turned.then(|| path.fault_it_is_out_for().map_or(PathNews::Back, PathNews::Out))
        })
    }

    /// Which paths are to carry; all of them if none is good.
    pub fn in_use(&self) -> Vec<bool> {
        let none = self.paths.iter().all(|path| !path.is_in());
        self.paths.iter().map(|path| none || path.is_in()).collect()
    }
}

#[cfg(test)]
mod tests;
