//! What the target's firewall tracks of a VM already, and what it has to be told yet.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use drainpipe_net::{Tracked, TrackedConnection, Transport};

/// By then before a kernel forgets a connection that it hears nothing of, it is told anew.
const EXPIRY_MARGIN: Duration = Duration::from_secs(10);

/// What tells connections apart: its ends, whether it is TCP, and its zone.
type Key = (SocketAddr, SocketAddr, bool, u16);

/// What the target's kernel tracks, as it was told, and when.
#[derive(Debug, Default)]
pub(super) struct There(HashMap<Key, (TrackedConnection, Instant)>);

/// What is to be told to the target.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Changes {
    /// It forgets these first: they have ended, or are told anew.
    pub(super) ended: Vec<TrackedConnection>,
    pub(super) connections: Vec<TrackedConnection>,
}

impl There {
    /// What has to be told, so that the target tracks what is listed: all of it, or only those that stand.
    pub(super) fn changes(&self, listed: &Tracked, only_standing: bool, now: Instant) -> Changes {
        let wanted = |connection: &&TrackedConnection| !only_standing || connection.stands();
        let is_missing = |connection: &&TrackedConnection| !self.has(connection, now);
        let connections: Vec<TrackedConnection> =
            listed.connections.iter().filter(wanted).filter(is_missing).copied().collect();
        // What is not listed may be there all the same where not all is.
        let mut gone = if listed.is_whole { self.0.clone() } else { HashMap::new() };
        for connection in &listed.connections {
            gone.remove(&key(connection));
        }
        let told_anew = connections.iter().filter_map(|connection| self.0.get(&key(connection)));
        let ended = told_anew.chain(gone.values()).map(|(told, _)| *told).collect();
        Changes { ended, connections }
    }

    /// Whether the target's kernel tracks it as it is now.
    pub(super) fn has(&self, connection: &TrackedConnection, now: Instant) -> bool {
        self.0.get(&key(connection)).is_some_and(|(told, at)| {
            let expires = *at + Duration::from_secs(told.timeout_s.into());
            is_same(told, connection) && expires > now + EXPIRY_MARGIN
        })
    }

    pub(super) fn has_forgotten(&mut self, ended: &[TrackedConnection]) {
        for connection in ended {
            self.0.remove(&key(connection));
        }
    }

    pub(super) fn has_taken(&mut self, connections: &[TrackedConnection], at: Instant) {
        self.0.extend(connections.iter().map(|connection| (key(connection), (*connection, at))));
    }
}

fn key(connection: &TrackedConnection) -> Key {
    let is_tcp = matches!(connection.transport, Transport::Tcp(_));
    (connection.source, connection.destination, is_tcp, connection.zone)
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
    use drainpipe_net::{TcpEnd, TcpState};
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

    #[test]
    fn only_what_has_changed_is_told_again() {
        let now = Instant::now();
        let (open, opening) = (connection(1, Some(3)), connection(2, Some(1)));
        let mut there = There::default();
        let first = there.changes(&whole(vec![open, opening]), true, now);
        assert_eq!(first, Changes { ended: vec![], connections: vec![open] }, "those that stand go ahead");
        there.has_taken(&first.connections, now);

        let later = TrackedConnection { timeout_s: 70, ..open };
        let second = there.changes(&whole(vec![later, opening]), false, now);
        assert_eq!(second, Changes { ended: vec![], connections: vec![opening] });

        let closing = connection(1, Some(4));
        let third = there.changes(&whole(vec![closing]), false, now);
        assert_eq!(third, Changes { ended: vec![open], connections: vec![closing] }, "as it is now");
        let fourth = there.changes(&whole(vec![]), false, now);
        assert_eq!(fourth, Changes { ended: vec![open], connections: vec![] });
        let cut = Tracked { is_whole: false, ..whole(vec![]) };
        assert_eq!(there.changes(&cut, false, now), Changes::default(), "it may be among those not listed");
    }

    #[test]
    fn what_the_targets_kernel_forgets_by_itself_is_told_anew() {
        let (now, silent) = (Instant::now(), connection(1, None));
        let mut there = There::default();
        there.has_taken(&[silent], now);
        assert!(there.has(&silent, now + Duration::from_secs(80)));
        let late = there.changes(&whole(vec![silent]), false, now + Duration::from_secs(95));
        assert_eq!(late, Changes { ended: vec![silent], connections: vec![silent] });
    }

    proptest! {
        #[test]
        fn the_target_has_in_the_end_what_was_listed_last(
            lists in prop::collection::vec(prop::collection::btree_map(0_u16..8, prop::option::of(1_u8..=9), 0..8), 1..6),
        ) {
            let now = Instant::now();
            let (mut there, mut kernel) = (There::default(), HashMap::new());
            let last = lists.len() - 1;
            for (number, list) in lists.into_iter().enumerate() {
                let listed: Vec<_> = list.into_iter().map(|(port, state)| connection(port + 1, state)).collect();
                let changes = there.changes(&whole(listed.clone()), number < last, now);
                for ended in &changes.ended {
                    prop_assert_eq!(kernel.remove(&key(ended)), Some(*ended), "it was told");
                }
                there.has_forgotten(&changes.ended);
                for told in &changes.connections {
                    prop_assert_eq!(kernel.insert(key(told), *told), None, "a kernel keeps what it has");
                }
                there.has_taken(&changes.connections, now);
                if number == last {
                    prop_assert_eq!(kernel.len(), listed.len());
                    for connection in &listed {
                        prop_assert_eq!(kernel.get(&key(connection)), Some(connection));
                    }
                }
            }
        }
    }
}
