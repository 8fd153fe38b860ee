//! Which paths of a migration in flight are fit to carry it.
//!
//! Both hosts send hellos on each path all the time, as in Bidirectional Forwarding Detection (RFC 5880),
//! and tell each other what they receive. So each end knows about both directions, and the two come to the
//! same judgement without further messages. The rules:
//! - A path on which nothing is received while something is on another path is out. If nothing is received on any
//!   path, the other agent may only stand still: nothing changes, and TCP waits. Time alone proves no silence, because
//!   either agent may have to wait for a core: other paths must have been heard at as many ticks of this end as hellos
//!   would have come meanwhile.
//! - A path on which small packets still arrive and full ones no longer do is out: memory goes in full ones. One hello
//!   in four is as large as a packet of the path may be. The number of others that have come since the last large one,
//!   or from the beginning if there was none, shows whether large ones are lost, however late either agent is. An
//!   agent from before there were large hellos sends none on any path: if none has come on another path either, they
//!   judge nothing.
//! - A path on which no hello has ever come through is not judged: it carried TCP a moment ago, so a
//!   firewall drops the hellos.
//! - A path that loses packets again and again is out: TCP would crawl on it, and the last of the memory
//!   would wait. A short silence that is over counts as one loss.
//! - A path that may lose packets, because a hello was lost or TCP had to send much again, is watched closely
//!   for a second: ten times as many hellos show within a second what 20 a second show in several. They judge,
//!   not TCP, which causes losses at a full queue itself.
//! - A path that is out comes back once it has been good for a while; longer each time, so that a
//!   flapping link does harm ever more rarely.

mod heard;
mod news;
mod watched;

pub use self::news::{Fault, PathChange, PathNews, Unwatched};
use self::watched::{JudgedBy, Watched};

/// A host says hello on each path this often, in ms: 20 datagrams of 26 bytes a second.
pub const HELLO_EVERY_MS: f64 = 50.0;

/// Between two hellos on a path that is looked at closely, in ms.
pub const CLOSE_HELLO_EVERY_MS: f64 = 5.0;

/// How long a path is looked at closely after each sign of loss: 200 hellos.
const CLOSE_LOOK_MS: f64 = 1_000.0;

/// What was counted in a close look says nothing any more when no such hello has come for that long.
const CLOSE_LOOK_OVER_MS: f64 = 250.0;

/// How many ticks at which something was heard on another path make a silence; [`SILENT_AFTER_MS`] of them.
const SILENT_TICKS: u32 = 8;

/// One in so many hellos is large: 5 packets a second, 60 kb/s where the MTU is 1500.
const LARGE_EVERY: u64 = 4;

/// How many hellos without a large one among them mean that large packets do not arrive: five of those were lost.
const LARGE_LOST_AFTER: u32 = 20;

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

/// How many losses within the last [`heard::WINDOW`] hellos put a path out: 4 %. TCP's own drops at a full
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
    /// Whether the other end's large ones are heard.
    pub hearing_large: Hearing,
    /// How many times the other end's hellos were lost recently; those in a row count once.
    pub losses: u8,
}

impl Hello {
    /// In place of what was said before.
    const FORGOTTEN: Self = Self {
        sequence: 0,
        pace: Pace::Steady,
        hearing: Hearing::Now,
        hearing_large: Hearing::Never,
        losses: 0,
    };
}

/// How often hellos of a kind are said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// Each [`HELLO_EVERY_MS`].
    Steady,
    /// Each [`CLOSE_HELLO_EVERY_MS`], while a path is looked at closely.
    Close,
    /// Beside one in [`LARGE_EVERY`] of the steady ones, as large as a packet may be.
    Large,
}

/// Whether one end hears the other one's hellos.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hearing {
    /// It never has. A firewall may drop the hellos of one direction, so this is no silence.
    Never,
    /// It has, recently.
    Now,
    /// It did, and does not any more.
    NoMore,
}

/// All paths between two hosts that migrations use, seen from one of them.
#[derive(Debug)]
pub struct PathWatch {
    judged_by: JudgedBy,
    paths: Vec<Watched>,
    last_tick_ms: f64,
    awake_at_ms: f64,
}

impl PathWatch {
    /// Watches no path yet.
    pub fn new(now_ms: f64) -> Self {
        Self { judged_by: JudgedBy::ALL, paths: vec![], last_tick_ms: now_ms, awake_at_ms: now_ms }
    }

    /// One path more, good a moment ago. It is not judged before [`Self::begin`].
    pub fn add(&mut self, now_ms: f64) {
        self.paths.push(Watched::new(self.judged_by, now_ms));
    }

    /// Watches a path no more. Those behind it move up.
    pub fn remove(&mut self, path: usize) {
        if path < self.paths.len() {
            self.paths.remove(path);
        }
    }

    /// The other end of a path is known from now on. `was_heard`: it knows that its hellos came through to
    /// here, in an earlier run of this agent; so it is no firewall if they do not now.
    pub fn begin(&mut self, path: usize, was_heard: bool, now_ms: f64) {
        let Some(path) = self.paths.get_mut(path) else { return };
        if was_heard && path.peer.is_none() {
            path.peer = Some(Hello::FORGOTTEN);
        }
        path.begin(now_ms);
    }

    /// Whether hellos from here have been heard at the other end of a path; or it ended before it could have said so. If
    /// the path fails just then, it would not be judged there, and what that end answers would go on over it.
    pub fn was_heard_there(&self, path: usize) -> bool {
        let lived_until_ms = self.paths.iter().map(|path| path.last_heard_ms).fold(0.0, f64::max);
        let was_cut_short =
            |path: &Watched| path.began_ms.is_some_and(|ms| lived_until_ms - ms < UNWATCHED_AFTER_MS);
        self.paths.get(path).is_some_and(|path| path.was_heard_there || was_cut_short(path))
    }

    /// The other agent has begun its end of the watch again: it says hello from 1, and may need a while until
    /// it does. What is to be told of it: nothing unless hellos have been missed.
    pub fn restart(&mut self, now_ms: f64) -> Vec<PathChange> {
        let is_deaf = self.is_deaf(now_ms);
        let news = if is_deaf { self.unwatched(Unwatched::AgentRestarted) } else { vec![] };
        for path in self.paths.iter_mut().filter(|path| path.began_ms.is_some()) {
            path.begin(now_ms);
        }
        self.awake_at_ms = now_ms + WAKING_MS;
        news
    }

    /// No path is watched, for this reason, until hellos are received again. Returns the news about it.
    pub fn unwatched(&mut self, why: Unwatched) -> Vec<PathChange> {
        self.news_of_all(|path| path.unwatched(why))
    }

    /// Whether nothing has been heard on any path for so long that the other agent may have forgotten the
    /// watch. To ask it costs nothing: so it counts, too, while this host is so busy that the watch is late again and
    /// again and judges no path.
    pub fn is_deaf(&self, now_ms: f64) -> bool {
        let is_deaf = |path: &Watched| now_ms - path.quiet_since_ms > DEAF_AFTER_MS;
        let mut begun = self.paths.iter().filter(|path| path.began_ms.is_some()).peekable();
        begun.peek().is_some() && begun.all(is_deaf)
    }

    fn news_of_all(&mut self, mut news: impl FnMut(&mut Watched) -> Option<PathNews>) -> Vec<PathChange> {
        let each = self.paths.iter_mut().enumerate();
        each.filter_map(|(path, watched)| Some(PathChange { path, news: news(watched)? })).collect()
    }

    /// Why a path is out, if it is.
    pub fn fault_of(&self, path: usize) -> Option<Fault> {
        self.paths.get(path)?.fault_it_is_out_for()
    }

    /// The next hello to say on a path.
    pub fn hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path)?;
        Some(path.say_next(Pace::Steady, now_ms))
    }

    /// The next hello to say on a path after each [`CLOSE_HELLO_EVERY_MS`]; none unless it is looked at closely.
    pub fn close_hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path).filter(|path| path.looks_closely(now_ms))?;
        Some(path.say_next(Pace::Close, now_ms))
    }

    /// The next large hello to say on a path after a steady one, if it is time for it.
    pub fn large_hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path).filter(|path| path.sent.steady.is_multiple_of(LARGE_EVERY))?;
        Some(path.say_next(Pace::Large, now_ms))
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
        path.quiet_since_ms = now_ms;
        path.heard_at_tick = path.heard_at_tick.saturating_add(1);
        path.is_heard = true;
        path.was_heard_there |= hello.hearing == Hearing::Now;
        path.peer = Some(hello);
    }

    /// Judges all paths; to be called after each [`HELLO_EVERY_MS`]. Returns the news.
    pub fn tick(&mut self, now_ms: f64) -> Vec<PathChange> {
        let is_any_heard = self.paths.iter().any(|path| path.heard_at_tick > 0);
        let is_any_large_heard = self.paths.iter().any(Watched::has_heard_large);
        for path in &mut self.paths {
            path.count_tick(is_any_heard);
            path.compare_large(is_any_large_heard);
            if now_ms - path.last_heard_closely_ms > CLOSE_LOOK_OVER_MS {
                path.heard.close.forget();
            }
        }
        let mut news = self.news_of_all(|path| path.watching(now_ms));
        news.extend(self.judge(now_ms));
        news
    }

    fn judge(&mut self, now_ms: f64) -> Vec<PathChange> {
        let slept = self.judged_by.own_lateness && now_ms - self.last_tick_ms > SLEPT_AFTER_MS;
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
