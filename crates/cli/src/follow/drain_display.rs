//! Progress of a drain: on a terminal, a line for each VM that is moving and one for the whole drain; in a log, a line
//! for each change.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use drainpipe_api_types::{DrainKind, DrainView};
use drainpipe_engine::drain::status::{DrainStatus, LinkRate, MoveState, MoveStatus};
use drainpipe_engine::format;
use indicatif::{MultiProgress, ProgressBar};

use super::line::style;
use super::{Say, describe_packing};
use crate::output;

/// How often a log gets a line about the whole drain.
const WHOLE_EVERY: Duration = Duration::from_secs(10);

pub(super) enum Display {
    Bars(Bars),
    Lines(Lines),
}

/// Which way VMs go, in words.
struct Words {
    name: String,
    /// Between a VM and the other host.
    way: &'static str,
    moved: &'static str,
}

impl Words {
    fn of(begun: &DrainView) -> Self {
        let host = &begun.host;
        match begun.kind {
            Some(DrainKind::Failback) => {
                Self { name: format!("back to {host}"), way: "←", moved: "is back from" }
            }
            _ => Self { name: format!("drain of {host}"), way: "→", moved: "runs on" },
        }
    }

    fn describe_turn(&self, one: &MoveStatus) -> String {
        let MoveStatus { vm, target, .. } = one;
        let Self { way, moved, .. } = self;
        let why = one.error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
        match one.state {
            MoveState::Moved => {
                let took = one.transfer_ms.map(|ms| format!(", {} on the links", format::duration(ms)));
                format!("{vm} {moved} {target}{}", took.unwrap_or_default())
            }
            MoveState::Failed => format!("{vm} was not moved{why}"),
            MoveState::Lost => format!("{vm} has ended, and is lost{why}"),
            MoveState::InDoubt => format!("it is not known yet where {vm} runs{why}"),
            MoveState::Left => format!("{vm} was moved to {target} by somebody else"),
            MoveState::Waiting => format!("{vm} is waiting for another attempt{why}"),
            _ => format!("{vm} {way} {target}: {}", state_word(one)),
        }
    }
}

impl Display {
    /// Tells at once what there is to expect.
    pub(super) fn new(begun: &DrainView) -> Self {
        let words = Words::of(begun);
        if let Some(status) = &begun.status {
            let predicted = format::estimate_up_to(status.predicted_ms, status.predicted_most_ms);
            output::remark(&format!(
                "{}: {}, {predicted} predicted",
                words.name,
                format::vms(status.moves.len())
            ));
        }
        if output::is_watched() { Self::Bars(Bars::new(words)) } else { Self::Lines(Lines::new(words)) }
    }

    pub(super) fn show(&self, view: &DrainView) {
        let Some(status) = &view.status else { return };
        match self {
            Self::Bars(bars) => bars.show(status),
            Self::Lines(lines) => lines.show(status),
        }
    }

    pub(super) fn end(&self) {
        if let Self::Bars(bars) = self {
            bars.end();
        }
    }
}

impl Say for Display {
    fn say(&self, text: &str) {
        match self {
            Self::Bars(bars) => bars.say(text),
            Self::Lines(_) => output::remark(text),
        }
    }
}

/// For a person at a terminal.
pub(super) struct Bars {
    words: Words,
    all: MultiProgress,
    whole: ProgressBar,
    vms: RefCell<BTreeMap<String, ProgressBar>>,
}

impl Bars {
    fn new(words: Words) -> Self {
        let all = MultiProgress::new();
        let whole = all.add(ProgressBar::new(1).with_style(style("")));
        whole.set_prefix(words.name.clone());
        Self { words, all, whole, vms: RefCell::default() }
    }

    fn show(&self, status: &DrainStatus) {
        for one in &status.moves {
            self.show_move(one);
        }
        self.whole.set_length((own_moves(status) as u64).max(1));
        self.whole.set_position(status.moved() as u64);
        self.whole.set_message(describe_whole(status));
    }

    fn show_move(&self, one: &MoveStatus) {
        let mut vms = self.vms.borrow_mut();
        if !is_under_way(one.state) {
            if let Some(bar) = vms.remove(&one.vm) {
                bar.finish_and_clear();
                self.all.remove(&bar);
                // Stays above the lines that move.
                let _nobody_watches = self.all.println(self.words.describe_turn(one));
            }
            return;
        }
        let bar = vms.entry(one.vm.clone()).or_insert_with(|| {
            let bar = ProgressBar::new(1).with_style(style("  "));
            let bar = self.all.insert_before(&self.whole, bar);
            bar.set_prefix(format!("{} {} {}", one.vm, self.words.way, one.target));
            bar
        });
        let disk_bytes = one.disks.map_or(0, |disks| disks.bytes);
        let whole = one.memory_bytes.saturating_add(disk_bytes).max(1);
        bar.set_length(whole);
        bar.set_position(one.arrived_bytes().min(whole));
        bar.set_message(describe_move(one));
    }

    fn say(&self, text: &str) {
        let _nobody_watches = self.all.println(text);
    }

    fn end(&self) {
        for bar in self.vms.borrow().values() {
            bar.finish_and_clear();
        }
        self.whole.finish_and_clear();
    }
}

/// For a log.
pub(super) struct Lines {
    words: Words,
    states: RefCell<BTreeMap<String, MoveState>>,
    whole_printed_at: Cell<Instant>,
}

impl Lines {
    fn new(words: Words) -> Self {
        Self { words, states: RefCell::default(), whole_printed_at: Cell::new(Instant::now()) }
    }

    fn show(&self, status: &DrainStatus) {
        for one in &status.moves {
            let before = self.states.borrow_mut().insert(one.vm.clone(), one.state);
            if before != Some(one.state) && is_news(one.state) {
                output::remark(&self.words.describe_turn(one));
            }
        }
        if self.whole_printed_at.get().elapsed() >= WHOLE_EVERY {
            self.whole_printed_at.set(Instant::now());
            output::remark(&format!("{}: {}", self.words.name, describe_whole(status)));
        }
    }
}

/// What a VM is doing, in a word or two.
pub(crate) fn state_word(one: &MoveStatus) -> &'static str {
    match one.state {
        MoveState::Waiting => "waiting",
        MoveState::Preparing => "preparing",
        MoveState::Ready => "ready",
        MoveState::Transferring if copies_disks(one) => "copying disks",
        MoveState::Transferring => "on the links",
        MoveState::Finishing => "finishing",
        MoveState::Moved => "moved",
        MoveState::Failed => "failed",
        MoveState::Lost => "lost",
        MoveState::InDoubt => "not known yet",
        MoveState::Left => "moved by others",
    }
}

fn copies_disks(one: &MoveStatus) -> bool {
    one.disks.is_some_and(|disks| disks.are_being_copied)
}

fn is_under_way(state: MoveState) -> bool {
    matches!(state, MoveState::Preparing | MoveState::Ready | MoveState::Transferring | MoveState::Finishing)
}

fn is_news(state: MoveState) -> bool {
    !matches!(state, MoveState::Waiting | MoveState::Preparing | MoveState::Ready | MoveState::Finishing)
}

fn describe_whole(status: &DrainStatus) -> String {
    let waits = status.obstacle.as_ref().map_or(String::new(), |why| format!("; it waits: {why}"));
    format!(
        "{} of {} moved, {}{waits}",
        status.moved(),
        format::vms(own_moves(status)),
        describe_pace(status)
    )
}

/// How many VMs there are to move, without those that somebody else has moved.
pub(crate) fn own_moves(status: &DrainStatus) -> usize {
    status.moves.len() - status.left()
}

/// How much has arrived, how fast, and how long it takes still.
pub(crate) fn describe_pace(status: &DrainStatus) -> String {
    let left = status.eta_ms.map_or(String::new(), |eta| format!(", {} left", format::estimate(eta)));
    format!(
        "{} of about {}, {}{}, {} at a time{left}",
        format::bytes(status.sent_bytes() as f64),
        format::bytes(status.expected_bytes() as f64),
        format::rate(status.rate_mbps / 1000.0),
        describe_links(status),
        usize::from(status.transfers).min(own_moves(status).max(1))
    )
}

/// A single link carries the whole rate, which is shown already.
fn describe_links(status: &DrainStatus) -> String {
    if status.links.len() < 2 {
        return String::new();
    }
    let each = |link: &LinkRate| format!("{} {}", link.link, format::rate(link.rate_mbps / 1000.0));
    format!(" ({})", status.links.iter().map(each).collect::<Vec<_>>().join(", "))
}

fn describe_move(one: &MoveStatus) -> String {
    let state = state_word(one);
    match one.state {
        MoveState::Transferring => {
            let (sent, expected) =
                (format::bytes(one.arrived_bytes() as f64), format::bytes(one.expected_bytes() as f64));
            format!("{state}: {sent} sent of about {expected}{}", describe_packing(one.compression))
        }
        _ => one.waits.as_ref().map_or_else(|| state.into(), |waits| format!("{state}: {waits}")),
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::migration::progress::CompressionProgress;
    use drainpipe_engine::problem::Problem;

    use super::*;

    fn a_move(state: MoveState, error: Option<Problem>) -> MoveStatus {
        MoveStatus {
            vm: "web1".into(),
            target: "b".into(),
            state,
            migration: None,
            attempts: 1,
            error,
            waits: None,
            memory_bytes: 1 << 30,
            sent_bytes: 1 << 20,
            predicted_bytes: 0,
            predicted_ms: 1.0,
            transfer_ms: Some(2_000.0),
            compression: None,
            disks: None,
        }
    }

    #[test]
    fn a_vm_on_the_links_is_told_with_what_compression_does() {
        let compression = Some(CompressionProgress { ratio: 2.93, cores: 1.38 });
        let sends =
            MoveStatus { predicted_bytes: 1 << 30, compression, ..a_move(MoveState::Transferring, None) };
        let expected = "on the links: 1.00 MiB sent of about 1.00 GiB, compressing 2.9 : 1 on 1.4 cores";
        assert_eq!(describe_move(&sends), expected);
    }

    #[test]
    fn the_whole_is_told_in_vms_bytes_and_links() {
        let move_of = |state, sent_bytes, predicted_bytes| MoveStatus {
            sent_bytes,
            predicted_bytes,
            ..a_move(state, None)
        };
        let moves = vec![
            move_of(MoveState::Moved, 1 << 30, 2 << 30),
            move_of(MoveState::Transferring, 1 << 29, 1 << 30),
        ];
        let links = LinkRate::summed([("e1".into(), 400.0), ("e0".into(), 900.0), ("e1".into(), 500.0)]);
        let status = DrainStatus { moves, links, rate_mbps: 1_800.0, ..DrainStatus::begun() };
        assert_eq!(
            describe_whole(&status),
            "1 of 2 VMs moved, 1.50 GiB of about 2.00 GiB, 1.80 Gb/s (e0 0.90 Gb/s, e1 0.90 Gb/s), 1 at a time"
        );
    }

    #[test]
    fn the_way_back_is_told_the_other_way_round() {
        let view = |kind| DrainView {
            host: "a".into(),
            cordoned: false,
            swap_with: None,
            kind: Some(kind),
            id: None,
            started_at: None,
            ended_at: None,
            request: None,
            status: None,
        };
        let (there, back) = (Words::of(&view(DrainKind::Drain)), Words::of(&view(DrainKind::Failback)));
        let moved = a_move(MoveState::Moved, None);
        assert_eq!(there.describe_turn(&moved), "web1 runs on b, 2.00 s on the links");
        assert_eq!(back.describe_turn(&moved), "web1 is back from b, 2.00 s on the links");
        assert_eq!(back.describe_turn(&a_move(MoveState::Transferring, None)), "web1 ← b: on the links");
        let failed = a_move(MoveState::Failed, Some(Problem::failed("b is short of memory")));
        assert_eq!(there.describe_turn(&failed), "web1 was not moved: b is short of memory");
        let left = a_move(MoveState::Left, None);
        assert_eq!(there.describe_turn(&left), "web1 was moved to b by somebody else");
    }
}
