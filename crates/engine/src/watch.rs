//! Which paths of a migration in flight are fit to carry it.
//!
//! Both hosts say hello on each path all the time, as in Bidirectional Forwarding Detection (RFC 5880),
//! and tell each other what they hear. So each end knows of both directions, and the two come to the
//! same judgement without a further word. The rules:
//! - A path on which nothing is heard, while another path is, is out. While nothing is heard on any
//!   path, the other agent may just stand still: nothing changes, and TCP waits.
//! - A path on which no hello has ever come through is not judged: it carried TCP a moment ago, so a
//!   firewall drops the hellos.
//! - A path that loses packets is out: TCP would crawl on it, and the last of the memory would wait.
//! - A path that is out comes back once it has been good for a while; longer each time, so that a
//!   flapping link does its harm ever more rarely.

/// A host says hello on each path this often, in ms: 20 datagrams of 26 bytes a second.
pub const HELLO_EVERY_MS: f64 = 50.0;

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

/// Hellos that count for the loss: the last 6.4 s.
const WINDOW: u32 = u128::BITS;

/// Of [`WINDOW`] hellos so many lost put a path out: 4 %. TCP's own drops at a full queue stay far
/// below 0.1 %.
const LOST_OUT: u8 = 5;

/// A path that was out for loss must be that clean.
const LOST_IN: u8 = 1;

/// How long a path must have been good before it comes back, the first time; doubled each time.
const HOLD_MS: f64 = 1_000.0;

/// The longest hold.
const HOLD_MAX_MS: f64 = 32_000.0;

/// A path that stayed in for so long has its failures forgiven.
const FORGIVEN_AFTER_MS: f64 = 60_000.0;

/// What one end says on one path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// One more each time, from 1.
    pub sequence: u64,
    /// Whether the other end has been heard on this path of late.
    pub hears_you: bool,
    /// How many of the other end's last 128 hellos were lost.
    pub lost: u8,
}

/// Why a path is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is heard from the other end.
    Silent,
    /// The other end hears nothing.
    OneWay,
    /// So many of the last 128 hellos were lost.
    Loss(u8),
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent => write!(f, "nothing has come through for {SILENT_AFTER_MS:.0} ms"),
            Self::OneWay => f.write_str("the other host hears nothing on it"),
            Self::Loss(lost) => write!(f, "it lost {lost} of {WINDOW} packets"),
        }
    }
}

/// What is to be told of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathNews {
    /// It went out.
    Out(Fault),
    /// It came back.
    Back,
    /// It carries so many Mb/s, or as many again, and has a share to fit.
    Carries(u64),
    /// No hello comes through on it.
    Unwatched,
}

impl std::fmt::Display for PathNews {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Out(fault) => write!(f, "is out: {fault}"),
            Self::Back => f.write_str("is back"),
            Self::Carries(mbps) => write!(f, "is taken for one of {mbps} Mb/s, by what it carries"),
            Self::Unwatched => {
                f.write_str("is not watched: open the migration ports for UDP too, in both firewalls")
            }
        }
    }
}

/// A path went out or came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Which path.
    pub path: usize,
    /// Why it is out; none if it is back.
    pub fault: Option<Fault>,
}

/// All paths of one migration, seen from one host.
#[derive(Debug)]
pub struct PathWatch {
    paths: Vec<Watched>,
    last_tick_ms: f64,
    awake_at_ms: f64,
}

#[derive(Debug)]
struct Watched {
    sent: u64,
    heard: Heard,
    last_heard_ms: f64,
    peer: Option<Hello>,
    state: State,
    failures: u32,
    began_ms: f64,
    told_unwatched: bool,
    heard_since_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    In { since_ms: f64 },
    Out { fault: Fault, good_since_ms: Option<f64> },
}

/// The hellos heard on one path: bit 0 is the newest, bit 1 the one sent before it.
#[derive(Debug, Clone, Copy, Default)]
struct Heard {
    newest: u64,
    bits: u128,
    expected: u32,
}

impl Heard {
    fn first(sequence: u64) -> Self {
        Self { newest: sequence, bits: 1, expected: 1 }
    }

    fn next(self, sequence: u64) -> Self {
        let ahead = u32::try_from(sequence.saturating_sub(self.newest)).unwrap_or(u32::MAX);
        Self {
            newest: sequence,
            bits: self.bits.checked_shl(ahead).unwrap_or(0) | 1,
            expected: self.expected.saturating_add(ahead).min(WINDOW),
        }
    }

    fn record_late(&mut self, sequence: u64) {
        let behind = u32::try_from(self.newest - sequence).unwrap_or(u32::MAX);
        // One from before the window began does not count.
        if behind < self.expected {
            self.bits |= 1_u128.checked_shl(behind).unwrap_or(0);
        }
    }

    fn lost(self) -> u8 {
        u8::try_from(self.expected.saturating_sub(self.bits.count_ones())).unwrap_or(u8::MAX)
    }
}

impl Watched {
    fn new(now_ms: f64) -> Self {
        Self {
            sent: 0,
            heard: Heard::default(),
            last_heard_ms: now_ms,
            peer: None,
            state: State::In { since_ms: now_ms },
            failures: 0,
            began_ms: now_ms,
            told_unwatched: false,
            heard_since_ms: now_ms,
        }
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

    fn lost(&self) -> u8 {
        self.heard.lost().max(self.peer.map_or(0, |hello| hello.lost))
    }

    fn is_heard_there(&self) -> bool {
        self.peer.is_some_and(|hello| hello.hears_you)
    }

    fn fault(&self, now_ms: f64, peer_hears: bool) -> Option<Fault> {
        self.peer?;
        if self.is_silent(now_ms) {
            Some(Fault::Silent)
        } else if peer_hears && !self.is_heard_there() {
            Some(Fault::OneWay)
        } else {
            Some(self.lost()).filter(|lost| *lost >= LOST_OUT).map(Fault::Loss)
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
                let is_good = fault.is_none() && (self.lost() <= LOST_IN || !matches!(old, Fault::Loss(_)));
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
}

impl PathWatch {
    /// Watches so many paths, all of them good a moment ago.
    pub fn new(paths: usize, now_ms: f64) -> Self {
        Self {
            paths: (0..paths).map(|_| Watched::new(now_ms)).collect(),
            last_tick_ms: now_ms,
            awake_at_ms: now_ms,
        }
    }

    /// The next hello to say on a path.
    pub fn hello(&mut self, path: usize, now_ms: f64) -> Option<Hello> {
        let path = self.paths.get_mut(path)?;
        path.sent += 1;
        Some(Hello {
            sequence: path.sent,
            // What was never heard is no silence: a firewall may drop the hellos of one direction.
            hears_you: path.peer.is_none() || !path.is_silent(now_ms),
            lost: path.heard.lost(),
        })
    }

    /// A hello was heard on a path.
    pub fn heard(&mut self, path: usize, hello: Hello, now_ms: f64) {
        let waking = now_ms < self.awake_at_ms;
        let Some(path) = self.paths.get_mut(path) else { return };
        // A replay is no sign of life.
        if hello.sequence <= path.heard.newest {
            path.heard.record_late(hello.sequence);
            return;
        }
        // What was lost while nothing came through says nothing of the path as it is now.
        if path.is_silent(now_ms) {
            path.heard_since_ms = now_ms;
        }
        let anew = waking || path.is_silent(now_ms) || path.peer.is_none();
        path.heard = if anew { Heard::first(hello.sequence) } else { path.heard.next(hello.sequence) };
        path.last_heard_ms = now_ms;
        path.peer = Some(hello);
    }

    /// Judges all paths; to be called after each [`HELLO_EVERY_MS`].
    pub fn tick(&mut self, now_ms: f64) -> Vec<Turn> {
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
        let turned = self.paths.iter_mut().enumerate().filter_map(|(path, watched)| {
            let turned = watched.judge(now_ms, peer_hears);
            turned.then(|| Turn { path, fault: watched.fault_it_is_out_for() })
        });
        turned.collect()
    }

    /// The paths on which no hello has come through in all of the first second; each is said once.
    pub fn newly_unwatched(&mut self, now_ms: f64) -> Vec<usize> {
        let unheard = |path: &Watched| path.peer.is_none() && now_ms - path.began_ms > UNWATCHED_AFTER_MS;
        let told = |(index, path): (usize, &mut Watched)| {
            let newly = unheard(path) && !path.told_unwatched;
            path.told_unwatched |= newly;
            newly.then_some(index)
        };
        self.paths.iter_mut().enumerate().filter_map(told).collect()
    }

    /// Which paths are to carry; all of them if none is good.
    pub fn in_use(&self) -> Vec<bool> {
        let none = self.paths.iter().all(|path| !path.is_in());
        self.paths.iter().map(|path| none || path.is_in()).collect()
    }
}

#[cfg(test)]
mod tests;
