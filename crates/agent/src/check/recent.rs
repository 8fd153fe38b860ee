//! What the links have counted recently. Errors and drops that rise are worth a finding; those of a cable that was
//! replaced a month ago are not.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use drainpipe_engine::check::facts::LinkCounters;
use drainpipe_net::Link;

use crate::store::lock::lock;

/// Counted is since the last look before that, or since the first look.
const LOOK_BACK: Duration = Duration::from_mins(15);

/// Looks that are closer together are not kept, however often somebody asks.
const APART: Duration = Duration::from_secs(30);

/// Looks at the links' counters, the oldest first.
#[derive(Debug, Default)]
pub(super) struct RecentCounters(Mutex<VecDeque<CounterSample>>);

#[derive(Debug)]
struct CounterSample {
    at: Instant,
    // By the interface's index, so that a new one of the same name is another.
    links: BTreeMap<u32, LinkCounters>,
}

impl RecentCounters {
    /// Takes a look at all links; gives what each has counted lately.
    pub(super) fn look(&self, at: Instant, links: &[Link]) -> BTreeMap<u32, LinkCounters> {
        self.since(at, links.iter().map(|link| (link.index, totals(link))).collect())
    }

    fn since(&self, at: Instant, links: BTreeMap<u32, LinkCounters>) -> BTreeMap<u32, LinkCounters> {
        let mut looks = lock(&self.0);
        while looks.get(1).is_some_and(|second| at.duration_since(second.at) >= LOOK_BACK) {
            looks.pop_front();
        }
        let lately = links.iter().map(|(index, now)| {
            let before = looks.front().and_then(|look| Some((look.at, look.links.get(index)?)));
            (*index, before.map_or(*now, |(then, before)| difference(*now, *before, at.duration_since(then))))
        });
        let lately = lately.collect();
        if looks.back().is_none_or(|last| at.duration_since(last.at) >= APART) {
            looks.push_back(CounterSample { at, links });
        }
        lately
    }
}

fn totals(link: &Link) -> LinkCounters {
    LinkCounters {
        over_s: None,
        received: link.counters.rx_packets,
        sent: link.counters.tx_packets,
        receive_errors: link.counters.rx_errors,
        send_errors: link.counters.tx_errors,
        receive_dropped: link.counters.rx_dropped,
        send_dropped: link.counters.tx_dropped,
    }
}

fn difference(now: LinkCounters, before: LinkCounters, over: Duration) -> LinkCounters {
    // A driver that was loaded again counts from 0.
    let since = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
    LinkCounters {
        over_s: Some(over.as_secs()),
        received: since(now.received, before.received),
        sent: since(now.sent, before.sent),
        receive_errors: since(now.receive_errors, before.receive_errors),
        send_errors: since(now.send_errors, before.send_errors),
        receive_dropped: since(now.receive_dropped, before.receive_dropped),
        send_dropped: since(now.send_dropped, before.send_dropped),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(receive_errors: u64) -> BTreeMap<u32, LinkCounters> {
        BTreeMap::from([(1, LinkCounters { receive_errors, ..LinkCounters::default() })])
    }

    #[test]
    fn errors_count_while_they_are_news() {
        let (recent, start) = (RecentCounters::default(), Instant::now());
        let look = |minute: u64, total: u64| {
            let counted = recent.since(start + Duration::from_mins(minute), errors(total));
            (counted[&1].over_s, counted[&1].receive_errors)
        };
        assert_eq!(look(0, 1_000), (None, 1_000), "nothing is known of before");
        assert_eq!(look(5, 1_000), (Some(300), 0));
        assert_eq!(look(10, 1_020), (Some(600), 20));
        assert_eq!(look(20, 1_020), (Some(900), 20), "since the look at the fifth minute");
        assert_eq!(look(40, 1_020), (Some(1_200), 0));
        assert_eq!(look(41, 7), (Some(1_260), 7), "counted anew");
        let other = BTreeMap::from([(2, LinkCounters { sent: 5, ..LinkCounters::default() })]);
        assert_eq!(recent.since(start + Duration::from_mins(42), other.clone()), other, "a new link");
    }

    #[test]
    fn looks_are_bounded() {
        let (recent, start) = (RecentCounters::default(), Instant::now());
        for second in 0..10_000 {
            recent.since(start + Duration::from_secs(second), errors(second));
        }
        let kept = recent.0.lock().unwrap().len();
        assert!(kept <= 2 + 15 * 2, "{kept}");
    }
}
