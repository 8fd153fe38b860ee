//! What was done, when, and to whom: for the table at the end, and to judge how long a VM may have been silent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a VM may be silent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Promise {
    /// Bounds a VM that no fault concerns, even while it is moved.
    pub(super) undisturbed: Duration,
    /// Bounds a VM that a fault concerns.
    pub(super) disturbed: Bound,
    /// Bounds such a VM in a silence during which no QEMU has paused it. `None` if QEMUs hang too: then nothing is
    /// promised.
    pub(super) not_paused: Option<Duration>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Bound {
    InAll(Duration),
    /// This time beyond that of the faults.
    BeyondFaults(Duration),
}

impl Promise {
    /// For faults of all kinds at once: a machine without KVM that is busy with much else, or the 15 s until a source
    /// gives up waiting for its last bytes to arrive, and what its QEMU and such a machine add.
    pub(super) const WHATEVER_HAPPENS: Self = Self {
        undisturbed: Duration::from_secs(8),
        disturbed: Bound::BeyondFaults(Duration::from_secs(25)),
        not_paused: None,
    };
}

/// How long a guest may still be heard after QEMU says that it is paused, because its answers are on their way.
const HEARD_AFTER_PAUSE: Duration = Duration::from_millis(500);

/// How long a fault is felt after its end, since connections that it slowed down recover late.
const AFTERMATH: Duration = Duration::from_secs(30);

/// The victim of a fault.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Victim {
    Agent(String),
    Guard(String),
    Qemu {
        vm: String,
        host: String,
    },
    Link {
        host: String,
        link: String,
    },
    /// A host's journal is lost, or replaced by an older one.
    Journal(String),
    JournalDisk(String),
    /// The machine on which a lab has all its hosts.
    Machine,
    /// A host's clock is wrong. No VM may stand still because of that.
    Clock(String),
    /// By a host's clock, its certificates are not valid yet, so that it and the others cannot reach each other.
    Certificates(String),
    /// A host receives many requests.
    Requests(String),
}

impl Victim {
    /// Whether a VM that has moved between these hosts may stand still because of it.
    fn concerns(&self, vm: &str, hosts: &BTreeSet<String>) -> bool {
        match self {
            Self::Agent(host)
            | Self::Journal(host)
            | Self::JournalDisk(host)
            | Self::Certificates(host)
            | Self::Requests(host)
            | Self::Link { host, .. } => hosts.contains(host),
            Self::Machine => true,
            Self::Clock(_) => false,
            Self::Guard(of) | Self::Qemu { vm: of, .. } => of == vm,
        }
    }
}

#[derive(Debug, Clone)]
struct Suffered {
    victim: Victim,
    from: Instant,
    to: Option<Instant>,
}

/// The record of one run.
pub(super) struct Ledger {
    began: Instant,
    directory: PathBuf,
    log: File,
    suffered: Vec<Suffered>,
    promise: Promise,
    /// When QEMUs paused VMs in this round.
    pauses: Vec<(String, Instant)>,
    /// The hosts between which each VM has moved in this round.
    hosts_of: BTreeMap<String, BTreeSet<String>>,
    counts: BTreeMap<String, usize>,
    longest_silence: (Duration, String),
    /// Since the last call of [`Self::take_longest_silence`].
    longest_of_late: Duration,
    /// The largest part, in percent, that a silence used of what faults and promises allow.
    most_used_percent: u128,
    longest_settling: Duration,
}

impl Ledger {
    /// Keeps its log, and other files, in a new directory.
    pub(super) fn create(directory: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&directory)?;
        let log = File::create(directory.join("chaos.log"))?;
        Ok(Self {
            began: Instant::now(),
            directory,
            log,
            suffered: vec![],
            promise: Promise::WHATEVER_HAPPENS,
            pauses: vec![],
            hosts_of: BTreeMap::new(),
            counts: BTreeMap::new(),
            longest_silence: (Duration::ZERO, "of no VM".into()),
            longest_of_late: Duration::ZERO,
            most_used_percent: 0,
            longest_settling: Duration::ZERO,
        })
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn note(&mut self, what: &str) {
        let at = self.began.elapsed().as_secs_f64();
        // A full disk does not end the run.
        let _ = writeln!(self.log, "{at:9.3} [{:.3}] {what}", super::monitor::now_us() as f64 / 1e6);
    }

    pub(super) fn count(&mut self, what: &str) {
        *self.counts.entry(what.to_owned()).or_default() += 1;
    }

    pub(super) fn fault_began(&mut self, victim: Victim) {
        self.suffered.push(Suffered { victim, from: Instant::now(), to: None });
    }

    pub(super) fn fault_ended(&mut self, victim: &Victim) {
        let now = Instant::now();
        let open = self.suffered.iter_mut().filter(|one| one.victim == *victim && one.to.is_none());
        open.for_each(|one| one.to = Some(now));
    }

    pub(super) fn is_suffering(&self, victim: &Victim) -> bool {
        self.suffered.iter().any(|one| one.victim == *victim && one.to.is_none())
    }

    /// Whether the victim suffers now, or did so lately.
    pub(super) fn has_suffered(&self, victim: &Victim) -> bool {
        self.suffered
            .iter()
            .any(|one| one.victim == *victim && one.to.is_none_or(|to| to.elapsed() < AFTERMATH))
    }

    pub(super) fn moves(&mut self, vm: &str, hosts: impl IntoIterator<Item = String>) {
        self.hosts_of.entry(vm.to_owned()).or_default().extend(hosts);
    }

    /// Notes how long it took after the end of all faults until everything was over.
    pub(super) fn settled_after(&mut self, elapsed: Duration) {
        self.longest_settling = self.longest_settling.max(elapsed);
    }

    pub(super) fn round_begins(&mut self, promise: Promise) {
        self.promise = promise;
    }

    /// Notes that a QEMU has paused a VM.
    pub(super) fn paused(&mut self, vm: &str, at: Instant) {
        self.pauses.push((vm.to_owned(), at));
    }

    pub(super) fn round_is_over(&mut self) {
        self.hosts_of.clear();
        self.pauses.clear();
        let now = Instant::now();
        self.suffered.retain(|one| one.to.is_none_or(|to| now - to < AFTERMATH));
    }

    /// How long a VM may be silent that has been silent since then.
    fn silence_max(&self, vm: &str, since: Instant, now: Instant) -> Duration {
        let Some(faults) = self.time_of_faults(vm, since, now) else { return self.promise.undisturbed };
        let is_within = |at: Instant| at + HEARD_AFTER_PAUSE > since && at <= now;
        let was_paused = self.pauses.iter().any(|(of, at)| of == vm && is_within(*at));
        match (self.promise.not_paused, self.promise.disturbed) {
            (Some(max), _) if !was_paused => max,
            (_, Bound::InAll(max)) => max,
            (_, Bound::BeyondFaults(beyond)) => faults + beyond,
        }
    }

    /// How much of that time there were faults that concern this VM. `None` if there were none, and none shortly
    /// before.
    fn time_of_faults(&self, vm: &str, since: Instant, now: Instant) -> Option<Duration> {
        let none = BTreeSet::new();
        let hosts = self.hosts_of.get(vm).unwrap_or(&none);
        let mut times: Vec<(Instant, Instant)> = self
            .suffered
            .iter()
            .filter(|one| one.victim.concerns(vm, hosts))
            .map(|one| (one.from, one.to.unwrap_or(now)))
            .filter(|(_, to)| *to + AFTERMATH > since)
            .collect();
        times.sort();
        let mut covered = Duration::ZERO;
        let mut until = since;
        for (from, to) in &times {
            covered += to.saturating_duration_since(until.max(*from));
            until = until.max(*to);
        }
        (!times.is_empty()).then_some(covered)
    }

    /// What is wrong with a silence that began then and goes on, or has just ended.
    pub(super) fn judge_silence(&mut self, vm: &str, since: Instant, now: Instant) -> Option<String> {
        let (silence, max) = (now - since, self.silence_max(vm, since, now));
        if silence > self.longest_silence.0 {
            self.longest_silence = (silence, format!("of {vm}, {max:.1?} were allowed"));
        }
        self.longest_of_late = self.longest_of_late.max(silence);
        self.most_used_percent = self.most_used_percent.max(silence.as_millis() * 100 / max.as_millis());
        (silence > max).then(|| {
            let began = since.saturating_duration_since(self.began).as_secs_f64();
            format!("{vm} has been silent for {silence:.1?} since {began:.3}, {max:.1?} are allowed")
        })
    }

    /// The longest silence since the last call.
    pub(super) fn take_longest_silence(&mut self) -> Duration {
        std::mem::take(&mut self.longest_of_late)
    }

    pub(super) fn counted(&self, what: &str) -> usize {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// The sum of all counts whose names begin with this.
    pub(super) fn counted_as(&self, beginning: &str) -> usize {
        self.counts.iter().filter(|(what, _)| what.starts_with(beginning)).map(|(_, count)| count).sum()
    }

    /// A table of what was done.
    pub(super) fn table(&self) -> String {
        let mut table = String::from("| what | how often |\n|---|---|\n");
        for (what, count) in &self.counts {
            writeln!(table, "| {what} | {count} |").expect("a String takes all");
        }
        let (longest, whose) = &self.longest_silence;
        writeln!(table, "| longest silence | {longest:.1?} {whose} |").expect("a String takes all");
        writeln!(table, "| most of what was allowed | {} % |", self.most_used_percent)
            .expect("a String takes all");
        let settling = self.longest_settling;
        writeln!(table, "| longest until all had settled | {settling:.1?} |").expect("a String takes all");
        table
    }
}
