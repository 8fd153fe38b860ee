//! Which source may send the next VM to a target that several hosts are drained to.

use std::collections::BTreeMap;

/// A source that has not asked again for so long, in ms, does not wait any more.
pub const ASKS_WITHIN_MS: f64 = 4_000.0;

/// The places of one target: VMs at most that are on their way there at a time.
#[derive(Debug, Clone, Default)]
pub struct Inbound {
    // Since when each source has been waiting, and when it last asked.
    waiting: BTreeMap<String, (f64, f64)>,
}

impl Inbound {
    /// Whether one more VM of `source` may come, where so many of each source are on their way. One that must
    /// wait asks again, at least once within [`ASKS_WITHIN_MS`].
    ///
    /// A free place goes to the source with the fewest VMs on their way; of several, to the one that has waited
    /// longest. So a source that is refused comes to its share as places become free.
    pub fn admits(&mut self, now_ms: f64, limit: u8, on_way: &BTreeMap<String, usize>, source: &str) -> bool {
        self.waiting.retain(|_, (_, asked_ms)| now_ms - *asked_ms <= ASKS_WITHIN_MS);
        let since_ms = self.waiting.get(source).map_or(now_ms, |(since_ms, _)| *since_ms);
        let rank = |source: &str, since_ms: f64| (on_way.get(source).copied().unwrap_or(0), since_ms);
        let own = rank(source, since_ms);
        let others = self.waiting.iter().filter(|(other, _)| *other != source);
        let is_first = others.into_iter().all(|(other, (since_ms, _))| own <= rank(other, *since_ms));
        let is_admitted = on_way.values().sum::<usize>() < usize::from(limit) && is_first;
        if is_admitted {
            self.waiting.remove(source);
        } else {
            self.waiting.insert(source.to_owned(), (since_ms, now_ms));
        }
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_way(of: &[(&str, usize)]) -> BTreeMap<String, usize> {
        of.iter().map(|(source, count)| ((*source).to_owned(), *count)).collect()
    }

    #[test]
    fn all_sources_together_keep_to_the_limit() {
        let mut inbound = Inbound::default();
        assert!(inbound.admits(0.0, 2, &on_way(&[("a", 1)]), "c"));
        assert!(!inbound.admits(1.0, 2, &on_way(&[("a", 1), ("c", 1)]), "d"));
        assert!(inbound.admits(2.0, 2, &on_way(&[("a", 1)]), "d"));
    }

    #[test]
    fn who_has_many_on_the_way_lets_others_go_first_while_they_ask() {
        let mut inbound = Inbound::default();
        assert!(!inbound.admits(0.0, 4, &on_way(&[("a", 4)]), "c"));
        assert!(!inbound.admits(100.0, 4, &on_way(&[("a", 3)]), "a"));
        assert!(inbound.admits(200.0, 4, &on_way(&[("a", 3)]), "c"));
        // A drain that has died keeps no place.
        assert!(!inbound.admits(300.0, 4, &on_way(&[("a", 3), ("c", 1)]), "d"));
        assert!(inbound.admits(301.0 + ASKS_WITHIN_MS, 4, &on_way(&[("a", 2), ("c", 1)]), "a"));
    }

    #[test]
    fn of_equals_the_one_that_has_waited_longest_is_next() {
        let mut inbound = Inbound::default();
        let full = on_way(&[("a", 1)]);
        assert!(!inbound.admits(0.0, 1, &full, "c") && !inbound.admits(1.0, 1, &full, "d"));
        assert!(!inbound.admits(2.0, 1, &on_way(&[]), "d"));
        assert!(inbound.admits(3.0, 1, &on_way(&[]), "c"));
        assert!(!inbound.admits(4.0, 1, &on_way(&[("c", 1)]), "d"));
        assert!(inbound.admits(5.0, 1, &on_way(&[]), "d"));
    }

    /// Sources with many VMs each that ask twice a second, at a target where each VM takes ten seconds: each comes
    /// to its share, and no place stays free for more than the half second between two questions.
    #[test]
    fn places_are_shared_evenly_and_used() {
        for (sources, limit) in [(2, 4), (3, 4), (4, 4), (5, 2), (8, 3)] {
            let mut inbound = Inbound::default();
            let (mut ends, mut served) = (Vec::<(f64, usize)>::new(), vec![0_usize; sources]);
            for turn in 0..2_000_u32 {
                let now_ms = f64::from(turn) * 500.0;
                ends.retain(|(end_ms, _)| *end_ms > now_ms);
                for (source, served) in served.iter_mut().enumerate() {
                    let count = |of: usize| ends.iter().filter(|(_, other)| *other == of).count();
                    let counts = (0..sources).map(|of| (of.to_string(), count(of))).collect();
                    if inbound.admits(now_ms, limit, &counts, &source.to_string()) {
                        ends.push((now_ms + 10_000.0, source));
                        *served += 1;
                    }
                    assert!(ends.len() <= usize::from(limit));
                }
            }
            let (least, most) = (served.iter().min().unwrap(), served.iter().max().unwrap());
            assert!(most - least <= 2, "{sources} sources, {limit} places: {served:?}");
            assert!(served.iter().sum::<usize>() >= usize::from(limit) * 90, "{served:?}");
        }
    }
}
