//! Looks after a VM on its way to this host: asks a source that has fallen silent, and gives up a VM whose source is
//! gone, as far as that is allowed.

use super::order::Order;
use super::{IncomingState, IncomingView, Memory, Received};

/// Without a word from the source for this long, the target asks it what has become of the VM, in ms.
pub const SILENCE_MS: f64 = 10_000.0;

/// A VM whose state is not all here is given up when its source has not been heard of for this long, in ms. All of it
/// being here, it is kept: it may be the only copy that can run.
pub const GIVE_UP_AFTER_MS: f64 = 120_000.0;

/// If nobody knows whether all is here, since the hypervisor lives and says nothing, the VM is kept for so long without
/// a word from its source, in ms: a host may take that to boot.
const KEPT_MUTE_FOR_MS: f64 = 1_800_000.0;

/// With post-copy the source may still be sending what the VM needs, which cannot run there any more: TCP gives a silent
/// connection up after a quarter of an hour (`net.ipv4.tcp_retries2`). In ms.
const KEPT_WITH_POST_COPY_FOR_MS: f64 = 1_800_000.0;

/// How often the target looks after the VMs on their way, in ms.
pub const WATCH_EVERY_MS: u64 = 2_000;

/// What the watch does next. Each action is answered by one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchAction {
    /// Wait for [`WATCH_EVERY_MS`].
    Rest,
    /// Take hold of a hypervisor that stood before this agent did.
    TakeHold,
    /// Say what the journal says; answered by [`WatchEvent::State`].
    Recall,
    /// Carry this order out; answered by [`WatchEvent::Done`], whatever came of it, and for a view by [`WatchEvent::View`].
    Carry(Order),
    /// Ask its source whose it is; answered by [`WatchEvent::SourceSays`].
    AskSource,
    /// The source lives, and has not decided.
    Hear,
    /// Ask the hypervisor what has come; answered by [`WatchEvent::Received`].
    Look,
    /// There is nothing more to do for it: put the network back.
    Close,
}

/// What has come of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchEvent {
    /// It is done.
    Done,
    /// What the journal says.
    State(Option<IncomingState>),
    /// What is said of it, if its hypervisor says so.
    View(Option<IncomingView>),
    /// What the source's journal says.
    SourceSays(HandOverAnswer),
    /// What the hypervisor has.
    Received(Received),
    /// The hypervisor lives and does not answer.
    Mute,
    /// There is no hypervisor.
    Gone,
}

/// What a source says about a hand-over, by its journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOverAnswer {
    /// Not yet; it may come.
    Pending,
    /// The VM is the target's.
    HandedOver,
    /// It stays the source's.
    Refused,
    /// Its journal has no such migration, or no more: it may have lost the record, so this is no more than silence.
    Unknown,
    /// It did not answer.
    Silent,
}

/// The watch of one VM on its way.
#[derive(Debug, Clone, Copy)]
pub struct Watch {
    doing: WatchAction,
    // The source has said that the VM is the target's.
    is_handed_over: bool,
}

impl Watch {
    /// Begins by waiting.
    pub fn begin() -> (Self, WatchAction) {
        (Self { doing: WatchAction::Rest, is_handed_over: false }, WatchAction::Rest)
    }

    /// Takes what has come of the last action; says what to do next.
    pub fn handle(&mut self, now_ms: f64, memory: &Memory, event: WatchEvent) -> WatchAction {
        self.doing = self.next(now_ms, memory, event);
        self.doing
    }

    fn next(&mut self, now_ms: f64, memory: &Memory, event: WatchEvent) -> WatchAction {
        let is_silent = memory.silent_for_ms(now_ms) >= SILENCE_MS;
        match (self.doing, event) {
            (WatchAction::Rest, _) => {
                self.is_handed_over = false;
                WatchAction::TakeHold
            }
            (WatchAction::TakeHold, _) if self.is_handed_over => {
                WatchAction::Carry(Order::Run { is_sources: false })
            }
            // Its source had ordered it, and does not say so again where a part is still to come.
            (WatchAction::TakeHold, _) if memory.awaits_run() => {
                WatchAction::Carry(Order::Run { is_sources: true })
            }
            (WatchAction::TakeHold, _) if is_silent => WatchAction::Recall,
            (
                WatchAction::Recall,
                WatchEvent::State(Some(IncomingState::Running | IncomingState::Finished)),
            ) => WatchAction::Carry(Order::View),
            // Whoever gave it up may have been kept from removing it.
            (WatchAction::Recall, WatchEvent::State(Some(IncomingState::Discarded))) => {
                WatchAction::Carry(Order::Discard { is_sources: false })
            }
            (WatchAction::Recall, WatchEvent::State(_)) => WatchAction::AskSource,
            (WatchAction::Carry(Order::View), WatchEvent::View(view)) => settled(view),
            (WatchAction::AskSource, WatchEvent::SourceSays(said)) => self.by_source(now_ms, memory, said),
            (WatchAction::Look, event) => give_up(now_ms, memory, event),
            _ => WatchAction::Rest,
        }
    }

    fn by_source(&mut self, now_ms: f64, memory: &Memory, said: HandOverAnswer) -> WatchAction {
        match said {
            HandOverAnswer::Pending => WatchAction::Hear,
            HandOverAnswer::HandedOver => {
                self.is_handed_over = true;
                WatchAction::TakeHold
            }
            HandOverAnswer::Refused => WatchAction::Carry(Order::Discard { is_sources: true }),
            HandOverAnswer::Unknown | HandOverAnswer::Silent
                if memory.silent_for_ms(now_ms) <= GIVE_UP_AFTER_MS =>
            {
                WatchAction::Rest
            }
            HandOverAnswer::Unknown | HandOverAnswer::Silent => WatchAction::Look,
        }
    }
}

/// For a VM that was told to run here, and whose source says nothing more.
fn settled(view: Option<IncomingView>) -> WatchAction {
    match view {
        Some(IncomingView::Running | IncomingView::Ended) => WatchAction::Close,
        _ => WatchAction::Rest,
    }
}

/// For a source that does not say which host the VM belongs to, and was silent for long.
fn give_up(now_ms: f64, memory: &Memory, event: WatchEvent) -> WatchAction {
    let is_known_soon = memory.silent_for_ms(now_ms) < KEPT_MUTE_FOR_MS;
    match event {
        WatchEvent::Gone => WatchAction::Carry(Order::Discard { is_sources: false }),
        _ if memory.silent_for_ms(now_ms) <= memory.kept_for_ms() => WatchAction::Rest,
        // This may be the only copy that can run.
        _ if memory.is_whole() => WatchAction::Rest,
        WatchEvent::Received(received) if received.is_enough() => WatchAction::Rest,
        WatchEvent::Mute if is_known_soon => WatchAction::Rest,
        _ => WatchAction::Carry(Order::Discard { is_sources: false }),
    }
}

impl Memory {
    /// After so long without its source, it is given up while not all of its state is here and its hypervisor lives.
    fn kept_for_ms(&self) -> f64 {
        if self.allows_post_copy { KEPT_WITH_POST_COPY_FOR_MS } else { GIVE_UP_AFTER_MS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What to do about a VM whose source was last heard this long ago, given this outcome.
    fn does(silent_for_ms: f64, memory: Memory, events: &[WatchEvent]) -> Vec<WatchAction> {
        let (mut watch, _) = Watch::begin();
        events.iter().map(|event| watch.handle(silent_for_ms, &memory, *event)).collect()
    }

    const SETTLING: [WatchEvent; 3] =
        [WatchEvent::Done, WatchEvent::Done, WatchEvent::State(Some(IncomingState::Waiting))];

    fn asked(silent_for_ms: f64, memory: Memory, said: HandOverAnswer) -> WatchAction {
        let events = [&SETTLING[..], &[WatchEvent::SourceSays(said)]].concat();
        *does(silent_for_ms, memory, &events).last().expect("there are events")
    }

    #[test]
    fn a_source_that_is_heard_is_not_asked_and_a_silent_one_is() {
        assert_eq!(
            does(SILENCE_MS - 1.0, Memory::new(0.0), &SETTLING[..2]),
            [WatchAction::TakeHold, WatchAction::Rest]
        );
        let silent = does(SILENCE_MS, Memory::new(0.0), &SETTLING);
        assert_eq!(silent, [WatchAction::TakeHold, WatchAction::Recall, WatchAction::AskSource]);
    }

    #[test]
    fn what_the_source_says_is_done() {
        let says = |said| asked(SILENCE_MS, Memory::new(0.0), said);
        assert_eq!(says(HandOverAnswer::Pending), WatchAction::Hear);
        assert_eq!(says(HandOverAnswer::Refused), WatchAction::Carry(Order::Discard { is_sources: true }));
        let events =
            [&SETTLING[..], &[WatchEvent::SourceSays(HandOverAnswer::HandedOver), WatchEvent::Done]].concat();
        let done = does(SILENCE_MS, Memory::new(0.0), &events);
        assert_eq!(done[3..], [WatchAction::TakeHold, WatchAction::Carry(Order::Run { is_sources: false })]);
    }

    #[test]
    fn what_may_be_the_only_copy_is_never_given_up() {
        let mut whole = Memory::new(0.0);
        whole.note(Received::Whole);
        assert_eq!(asked(1e9, whole, HandOverAnswer::Silent), WatchAction::Look);
        assert_eq!(asked(GIVE_UP_AFTER_MS, Memory::new(0.0), HandOverAnswer::Silent), WatchAction::Rest);
        assert_eq!(
            asked(GIVE_UP_AFTER_MS + 1.0, Memory::new(0.0), HandOverAnswer::Unknown),
            WatchAction::Look
        );
        let looked = |event, silent_for_ms, memory| {
            let events = [&SETTLING[..], &[WatchEvent::SourceSays(HandOverAnswer::Silent), event]].concat();
            *does(silent_for_ms, memory, &events).last().expect("there are events")
        };
        let given_up = WatchAction::Carry(Order::Discard { is_sources: false });
        let coming = Memory::new(0.0);
        assert_eq!(looked(WatchEvent::Received(Received::InPart), 1e9, coming), WatchAction::Rest);
        assert_eq!(looked(WatchEvent::Received(Received::Incomplete), 1e9, coming), given_up);
        assert_eq!(looked(WatchEvent::Mute, KEPT_MUTE_FOR_MS - 1.0, coming), WatchAction::Rest);
        assert_eq!(looked(WatchEvent::Mute, KEPT_MUTE_FOR_MS, coming), given_up);
        assert_eq!(looked(WatchEvent::Mute, 1e9, whole), WatchAction::Rest);
        assert_eq!(looked(WatchEvent::Gone, 1e9, whole), given_up);
    }

    #[test]
    fn with_post_copy_it_is_kept_for_longer_but_not_once_its_hypervisor_is_gone() {
        let coming = Memory { allows_post_copy: true, ..Memory::new(0.0) };
        let looked = |event, silent_for_ms| {
            let events = [&SETTLING[..], &[WatchEvent::SourceSays(HandOverAnswer::Unknown), event]].concat();
            *does(silent_for_ms, coming, &events).last().expect("there are events")
        };
        let given_up = WatchAction::Carry(Order::Discard { is_sources: false });
        let incomplete = WatchEvent::Received(Received::Incomplete);
        assert_eq!(looked(incomplete, KEPT_WITH_POST_COPY_FOR_MS), WatchAction::Rest);
        assert_eq!(looked(incomplete, KEPT_WITH_POST_COPY_FOR_MS + 1.0), given_up);
        assert_eq!(looked(WatchEvent::Gone, GIVE_UP_AFTER_MS + 1.0), given_up);
    }

    #[test]
    fn what_was_told_to_run_is_told_again() {
        let mut ordered = Memory::new(0.0);
        ordered.order_to_run();
        let again = WatchAction::Carry(Order::Run { is_sources: true });
        assert_eq!(does(0.0, ordered, &SETTLING[..2]), [WatchAction::TakeHold, again]);
    }

    #[test]
    fn what_was_given_up_and_not_removed_is_removed() {
        let discarded =
            [WatchEvent::Done, WatchEvent::Done, WatchEvent::State(Some(IncomingState::Discarded))];
        let done = does(SILENCE_MS, Memory::new(0.0), &discarded);
        assert_eq!(done[2], WatchAction::Carry(Order::Discard { is_sources: false }));
    }
}
