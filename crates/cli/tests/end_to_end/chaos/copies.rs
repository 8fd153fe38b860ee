//! All present and former QEMUs, and when their guests ran, by QEMU's own word and clock.

use std::fmt;

/// The number of a QEMU, in the order in which they were started.
pub(super) type CopyId = usize;

/// All QEMUs, oldest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Copies(Vec<Copy>);

/// Identifies a QEMU.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) vm: String,
    pub(super) host: String,
    pub(super) pid: i32,
    /// Whether it was started to take over a guest.
    pub(super) is_incoming: bool,
}

/// A QEMU, and what it said about its guest.
#[derive(Debug, Clone)]
pub(super) struct Copy {
    pub(super) identity: Identity,
    runs: Vec<Run>,
    status: String,
    shut_down_by: Option<String>,
    has_ended: bool,
}

/// A time during which a guest ran, in microseconds of the clock with which QEMU stamps its events.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    from: u64,
    /// The last time at which it answered that the guest runs.
    seen: u64,
    /// When it reported that the guest stopped.
    to: Option<u64>,
}

impl Run {
    /// Until when the guest certainly ran. A QEMU that was killed, or is mute, has said nothing since.
    fn certain_until_us(&self) -> u64 {
        self.to.unwrap_or(self.seen).max(self.from)
    }

    /// For how long both certainly ran.
    fn overlap_us(&self, other: &Self) -> u64 {
        let from = self.from.max(other.from);
        self.certain_until_us().min(other.certain_until_us()).saturating_sub(from)
    }
}

impl Copy {
    /// Whether its guest runs, by the QEMU's last word. The guest of a frozen QEMU counts as running.
    pub(super) fn is_running(&self) -> bool {
        !self.has_ended && self.ran_last()
    }

    fn ran_last(&self) -> bool {
        self.runs.last().is_some_and(|run| run.to.is_none())
    }
}

impl fmt::Display for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { identity: Identity { vm, host, pid, is_incoming }, runs, status, shut_down_by, has_ended } =
            self;
        let role = if *is_incoming { "came" } else { "booted" };
        write!(
            f,
            "{vm} on {host}, pid {pid}, {role}, said `{status}` last, shut down by {shut_down_by:?}, "
        )?;
        write!(f, "has ended: {has_ended}, ran:")?;
        runs.iter().try_for_each(|run| {
            let until = run.to.map_or_else(|| "now".to_owned(), |to| to.to_string());
            write!(f, " {} to {until} (seen {})", run.from, run.seen)
        })
    }
}

impl Copies {
    pub(super) fn began(&mut self, identity: Identity) -> CopyId {
        let status = "nothing".into();
        self.0.push(Copy { identity, runs: vec![], status, shut_down_by: None, has_ended: false });
        self.0.len() - 1
    }

    pub(super) fn ended(&mut self, id: CopyId) {
        self.0[id].has_ended = true;
    }

    /// Notes that the guest runs; returns whether that is its first run in a QEMU to which it came.
    pub(super) fn resumed(&mut self, id: CopyId, at_us: u64) -> bool {
        let copy = &mut self.0[id];
        if copy.ran_last() {
            return false;
        }
        copy.runs.push(Run { from: at_us, seen: at_us, to: None });
        copy.identity.is_incoming && copy.runs.len() == 1
    }

    pub(super) fn stopped(&mut self, id: CopyId, at_us: u64) {
        if let Some(run) = self.0[id].runs.last_mut() {
            run.to.get_or_insert(at_us);
        }
    }

    pub(super) fn shut_down(&mut self, id: CopyId, reason: &str) {
        self.0[id].shut_down_by = Some(reason.to_owned());
    }

    pub(super) fn answered(&mut self, id: CopyId, asked_us: u64, status: &str) {
        let copy = &mut self.0[id];
        status.clone_into(&mut copy.status);
        if let Some(run) = copy.runs.last_mut().filter(|run| run.to.is_none()) {
            if status == "running" {
                run.seen = run.seen.max(asked_us);
            } else {
                run.to = Some(run.seen);
            }
        } else if status == "running" {
            // The run began before the monitor could hear of it.
            copy.runs.push(Run { from: asked_us, seen: asked_us, to: None });
        }
    }

    pub(super) fn is_running(&self, id: CopyId) -> bool {
        self.0[id].is_running()
    }

    /// The QEMUs of a VM that have not ended.
    pub(super) fn living<'a>(&'a self, vm: &'a str) -> impl Iterator<Item = &'a Copy> {
        self.0.iter().filter(move |copy| copy.identity.vm == vm && !copy.has_ended)
    }

    /// The host on which a VM runs, according to its QEMU.
    pub(super) fn runs_on(&self, vm: &str) -> Option<&str> {
        let of_vm = self.0.iter().rev().filter(|copy| copy.identity.vm == vm);
        of_vm.into_iter().find(|copy| copy.is_running()).map(|copy| copy.identity.host.as_str())
    }

    /// Two QEMUs of one VM whose guests ran at the same time.
    pub(super) fn two_at_once(&self) -> Option<String> {
        let pairs = self.0.iter().enumerate().flat_map(|(at, one)| {
            let others = self.0[..at].iter().filter(|other| other.identity.vm == one.identity.vm);
            others.map(move |other| (one, other))
        });
        let overlap = |(one, other): &(&Copy, &Copy)| {
            let overlaps =
                one.runs.iter().flat_map(|run| other.runs.iter().map(|other| run.overlap_us(other)));
            overlaps.max().unwrap_or(0)
        };
        let (one, other) = pairs.max_by_key(overlap).filter(|pair| overlap(pair) > 0)?;
        let ms = overlap(&(one, other)) / 1_000;
        Some(format!("two copies ran at once, for {ms} ms at least:\n  {one}\n  {other}"))
    }

    /// QEMUs that ended while their guests ran.
    pub(super) fn ended_while_running(&self) -> impl Iterator<Item = &Copy> {
        self.0.iter().filter(|copy| copy.has_ended && copy.ran_last())
    }

    /// Everything, one line each.
    pub(super) fn tell(&self) -> String {
        let lines: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        lines.join("\n")
    }

    /// Forgets what is over, or comparing would take longer and longer. Call this when everything has settled.
    pub(super) fn forget_the_ended(&mut self) {
        // Ids are positions, so QEMUs that have ended stay in the list, without the runs that would be compared.
        self.0.iter_mut().filter(|copy| copy.has_ended).for_each(|copy| copy.runs.clear());
    }
}
