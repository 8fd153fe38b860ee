//! The events of a drain: from those who follow its migrations, from its executor, from whoever cancels it, and from
//! the clock.

use std::collections::VecDeque;
use std::time::Duration;

use drainpipe_engine::drain::run::DrainEvent;
use tokio::sync::{mpsc, watch};
use tokio::time::{Interval, MissedTickBehavior, interval};

use crate::drain::Course;

/// How often the engine learns that time has passed.
const TICK: Duration = Duration::from_millis(200);

/// Events that may wait. A task that has more to send waits, too.
const NEWS_MAX: usize = 64;

pub(super) struct News {
    tell: mpsc::Sender<DrainEvent>,
    events: mpsc::Receiver<DrainEvent>,
    // What the executor itself has to tell.
    own: VecDeque<DrainEvent>,
    cancelled: watch::Receiver<bool>,
    ticks: Interval,
}

impl News {
    pub(super) fn of(course: &Course) -> Self {
        let (tell, events) = mpsc::channel(NEWS_MAX);
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { tell, events, own: VecDeque::new(), cancelled: course.cancelled.subscribe(), ticks }
    }

    /// For who has to tell something.
    pub(super) fn sender(&self) -> mpsc::Sender<DrainEvent> {
        self.tell.clone()
    }

    /// The executor has this to tell.
    pub(super) fn push(&mut self, event: DrainEvent) {
        self.own.push_back(event);
    }

    /// The next of what the executor has to tell.
    pub(super) fn own(&mut self) -> Option<DrainEvent> {
        self.own.pop_front()
    }

    /// The next of what others have to tell.
    pub(super) async fn next(&mut self) -> DrainEvent {
        tokio::select! {
            // Its sender is kept here, so it is never closed.
            Some(event) = self.events.recv() => event,
            Ok(()) = self.cancelled.changed() => DrainEvent::CancelRequested,
            _ = self.ticks.tick() => DrainEvent::Tick,
        }
    }
}
