//! What the target's firewall already tracks of a VM, and what still has to be sent.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use drainpipe_engine::tracked::{ConnectionKey, TrackedConnection};
use drainpipe_net::Tracked;

/// A connection is sent again before a kernel forgets it for its silence.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);

/// What was sent to the target, and when that has said that its kernel tracks it. Without that it may be there or not.
#[derive(Debug, Default)]
pub(super) struct There(HashMap<ConnectionKey, (TrackedConnection, Option<Instant>)>);

/// What to send to the target.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Changes {
    /// Entries from this VM's source to be deleted first: they have ended, or are sent again.
    pub(super) ended: Vec<TrackedConnection>,
    pub(super) connections: Vec<TrackedConnection>,
}

impl There {
    /// What has to be sent, so that the target tracks all that is listed.
    pub(super) fn changes(&self, listed: &Tracked, now: Instant) -> Changes {
        self.changes_to(listed, listed.connections.iter().copied(), now)
    }

    /// The same of those that stand. None where not all are listed: what has ended would stay there unseen.
    pub(super) fn changes_ahead(&self, listed: &Tracked, now: Instant) -> Changes {
        if !listed.is_whole {
            return Changes::default();
        }
        let standing = listed.connections.iter().copied().filter(TrackedConnection::stands);
        self.changes_to(listed, standing, now)
    }

    fn changes_to(
        &self,
        listed: &Tracked,
        wanted: impl Iterator<Item = TrackedConnection>,
        now: Instant,
    ) -> Changes {
        let soon = now + EXPIRY_MARGIN;
        let connections: Vec<TrackedConnection> =
            wanted.filter(|connection| !self.has(connection, soon)).collect();
        // What is not listed may be there all the same where not all is.
        let mut gone = if listed.is_whole { self.0.clone() } else { HashMap::new() };
        for connection in &listed.connections {
            gone.remove(&connection.key());
        }
        let sent_again = connections.iter().filter_map(|connection| self.0.get(&connection.key()));
        let ended = sent_again.chain(gone.values()).map(|(there, _)| *there).collect();
        Changes { ended, connections }
    }

    /// Whether the target's kernel tracks it then as it is now.
    pub(super) fn has(&self, connection: &TrackedConnection, then: Instant) -> bool {
        let Some((there, Some(at))) = self.0.get(&connection.key()) else { return false };
        is_same(there, connection) && *at + Duration::from_secs(there.timeout_s.into()) > then
    }

    /// From now until that is answered: what has ended may be there until the target has said that it heard it.
    pub(super) fn is_sent(&mut self, Changes { ended, connections }: &Changes) {
        let sent = ended.iter().chain(connections);
        self.0.extend(sent.map(|connection| (connection.key(), (*connection, None))));
    }

    /// The target tracks these connections now, but for those left out.
    pub(super) fn is_done(&mut self, changes: &Changes, left_out: &[TrackedConnection], at: Instant) {
        for connection in changes.ended.iter().chain(&changes.connections) {
            self.0.remove(&connection.key());
        }
        let left_out: HashSet<ConnectionKey> = left_out.iter().map(TrackedConnection::key).collect();
        let taken = changes.connections.iter().filter(|connection| !left_out.contains(&connection.key()));
        self.0.extend(taken.map(|connection| (connection.key(), (*connection, Some(at)))));
    }
}

impl Changes {
    /// In parts of so many connections at most, in the same order. What is sent again is forgotten in the same part, so
    /// that none is missing for long where there is no time for all.
    pub(super) fn in_parts(self, most: usize) -> Vec<Self> {
        let mut ended: HashMap<ConnectionKey, TrackedConnection> =
            self.ended.into_iter().map(|connection| (connection.key(), connection)).collect();
        let mut parts = vec![];
        for connections in self.connections.chunks(most) {
            let sent_again = connections.iter().filter_map(|connection| ended.remove(&connection.key()));
            parts.push(Self { ended: sent_again.collect(), connections: connections.to_vec() });
        }
        let gone: Vec<TrackedConnection> = ended.into_values().collect();
        parts.extend(gone.chunks(most).map(|gone| Self { ended: gone.to_vec(), connections: vec![] }));
        parts
    }
}

/// Whether a firewall takes both alike. When it would be forgotten changes with each packet, and so does what only this
/// kernel knows of it.
fn is_same(one: &TrackedConnection, other: &TrackedConnection) -> bool {
    let lasting =
        |connection: &TrackedConnection| TrackedConnection { timeout_s: 1, ..*connection }.believable();
    lasting(one) == lasting(other)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use drainpipe_engine::tracked::{TcpEnd, TcpState, Transport};
    use proptest::prelude::*;

    use super::*;

    fn connection(port: u16, state: Option<u8>) -> TrackedConnection {
        let end = TcpEnd { window_scale: 7, flags: 3 };
        TrackedConnection {
            source: SocketAddr::from(([10, 0, 0, 1], port)),
            destination: SocketAddr::from(([10, 0, 0, 5], 80)),
            transport: state.map_or(Transport::Udp, |state| {
                Transport::Tcp(TcpState { state, source: end, destination: end })
            }),
            is_answered: true,
            is_assured: true,
            timeout_s: 100,
            mark: 0,
            zone: 0,
        }
    }

    fn whole(connections: Vec<TrackedConnection>) -> Tracked {
        Tracked { connections, is_whole: true, ..Tracked::default() }
    }

    fn tell(there: &mut There, changes: &Changes, now: Instant) {
        there.is_sent(changes);
        there.is_done(changes, &[], now);
    }

    #[test]
    fn only_what_has_changed_is_told_again() {
        let now = Instant::now();
        let (open, opening) = (connection(1, Some(3)), connection(2, Some(1)));
        let mut there = There::default();
        let first = there.changes_ahead(&whole(vec![open, opening]), now);
        assert_eq!(first, Changes { ended: vec![], connections: vec![open] }, "those that stand go ahead");
        tell(&mut there, &first, now);

        let later = TrackedConnection { timeout_s: 70, ..open };
        let second = there.changes(&whole(vec![later, opening]), now);
        assert_eq!(second, Changes { ended: vec![], connections: vec![opening] });

        let closing = connection(1, Some(4));
        let third = there.changes(&whole(vec![closing]), now);
        assert_eq!(third, Changes { ended: vec![open], connections: vec![closing] }, "as it is now");
        let fourth = there.changes(&whole(vec![]), now);
        assert_eq!(fourth, Changes { ended: vec![open], connections: vec![] });
        let cut = Tracked { is_whole: false, ..whole(vec![opening]) };
        let of_cut = Changes { ended: vec![], connections: vec![opening] };
        assert_eq!(there.changes(&cut, now), of_cut, "the other may be among those not listed");
        assert_eq!(there.changes_ahead(&cut, now), Changes::default());
    }

    #[test]
    fn what_the_targets_kernel_forgets_by_itself_is_told_anew() {
        let (now, silent) = (Instant::now(), connection(1, None));
        let mut there = There::default();
        tell(&mut there, &Changes { ended: vec![], connections: vec![silent] }, now);
        let since = |seconds| there.changes(&whole(vec![silent]), now + Duration::from_secs(seconds));
        assert_eq!(since(80), Changes::default());
        assert_eq!(since(95), Changes { ended: vec![silent], connections: vec![silent] });
        assert!(there.has(&silent, now + Duration::from_secs(95)), "it is there still");
    }

    #[test]
    fn what_was_not_answered_may_be_there_and_what_was_refused_is_not() {
        let (now, one, other) = (Instant::now(), connection(1, None), connection(2, None));
        let mut there = There::default();
        let both = there.changes(&whole(vec![one, other]), now);
        there.is_sent(&both);
        let again = there.changes(&whole(vec![one]), now);
        assert_eq!(again.connections, [one]);
        assert!(again.ended.contains(&one) && again.ended.contains(&other), "{again:#?}");

        there.is_done(&both, &[other], now);
        assert_eq!(there.changes(&whole(vec![one]), now), Changes::default());
        assert_eq!(there.changes(&whole(vec![one, other]), now).connections, [other]);
    }

    #[test]
    fn what_is_told_anew_is_forgotten_in_the_same_part() {
        let ended = vec![connection(9, None), connection(3, None), connection(1, None)];
        let connections = vec![connection(1, Some(3)), connection(2, None), connection(3, None)];
        let parts = Changes { ended, connections: connections.clone() }.in_parts(2);
        let first = Changes { ended: vec![], connections: connections[..2].to_vec() };
        let second = Changes { ended: vec![connection(3, None)], connections: connections[2..].to_vec() };
        assert_eq!(parts[..2], [first, second], "one by TCP is another one");
        let gone: Vec<TrackedConnection> = parts[2..].iter().flat_map(|part| part.ended.clone()).collect();
        assert_eq!(gone.len(), 2);
    }

    /// What is sent, whether it arrives at the target, and whether the answer arrives at the source.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Answered,
        AnswerLost,
        Lost,
    }

    proptest! {
        #[test]
        fn the_target_has_in_the_end_what_was_listed_last(
            lists in prop::collection::vec(
                (
                    prop::collection::btree_map(0_u16..8, prop::option::of(1_u8..=9), 0..8),
                    prop::sample::select(vec![Fate::Answered, Fate::AnswerLost, Fate::Lost]),
                ),
                1..6,
            ),
        ) {
            let now = Instant::now();
            let (mut there, mut kernel) = (There::default(), HashMap::new());
            let last = lists.len() - 1;
            for (number, (list, fate)) in lists.into_iter().enumerate() {
                let fate = if number == last { Fate::Answered } else { fate };
                let listed: Vec<_> =
                    list.into_iter().map(|(port, state)| connection(port + 1, state)).collect();
                let tracked = whole(listed.clone());
                let changes = if number == last {
                    there.changes(&tracked, now)
                } else {
                    there.changes_ahead(&tracked, now)
                };
                for part in changes.in_parts(3) {
                    there.is_sent(&part);
                    if fate != Fate::Lost {
                        for ended in &part.ended {
                            kernel.remove(&ended.key());
                        }
                        for sent in &part.connections {
                            // A kernel keeps what it has.
                            kernel.entry(sent.key()).or_insert(*sent);
                        }
                    }
                    if fate == Fate::Answered {
                        there.is_done(&part, &[], now);
                    }
                }
                if number == last {
                    prop_assert_eq!(kernel.len(), listed.len());
                    for connection in &listed {
                        prop_assert_eq!(kernel.get(&connection.key()), Some(connection));
                        prop_assert!(there.has(connection, now));
                    }
                }
            }
        }
    }
}
