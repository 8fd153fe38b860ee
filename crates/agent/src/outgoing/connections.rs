//! Settings of the connections of the source's QEMU, which exist only some time after it was told to send.

use std::io;
use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

/// How long all of QEMU's connections are looked for.
const FOUND_WITHIN: Duration = Duration::from_secs(2);

/// `TCP_NOTSENT_LOWAT` of a connection that has none of its own: `net.ipv4.tcp_notsent_lowat` counts.
const AS_ON_THE_HOST: u32 = 0;

/// One thing that is set on all connections.
#[derive(Debug)]
pub(super) struct Setting {
    /// What it is for the user that it is not set.
    otherwise: &'static str,
    state: SettingState,
}

#[derive(Debug)]
enum SettingState {
    NotTried,
    TriedSince(Instant),
    Set,
    GivenUp,
}

impl Setting {
    pub(super) fn new(otherwise: &'static str) -> Self {
        Self { otherwise, state: SettingState::NotTried }
    }

    /// Whether it is set on all connections, or that was given up.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, SettingState::Set | SettingState::GivenUp)
    }

    /// To be set again, to something else; unless that was given up.
    fn change(&mut self) {
        if matches!(self.state, SettingState::Set) {
            self.state = SettingState::NotTried;
        }
    }

    /// Has `set` set it on what there is, unless it is set on all of `connections`, or that was given up: a
    /// migration does without. `set` says on how many it did.
    pub(super) fn attempt(&mut self, connections: usize, set: impl FnOnce() -> io::Result<usize>) {
        let since = match self.state {
            SettingState::Set | SettingState::GivenUp => return,
            SettingState::NotTried => Instant::now(),
            SettingState::TriedSince(since) => since,
        };
        self.state = match set() {
            Ok(found) if found >= connections => SettingState::Set,
            Ok(_) if since.elapsed() < FOUND_WITHIN => SettingState::TriedSince(since),
            Ok(found) => {
                warn!("found {found} of QEMU's {connections} connections: {}", self.otherwise);
                SettingState::GivenUp
            }
            Err(error) => {
                warn!(%error, "{}", self.otherwise);
                SettingState::GivenUp
            }
        };
    }
}

/// How many unsent bytes each connection may hold.
#[derive(Debug)]
pub(super) struct UnsentLimit {
    bytes: Option<u32>,
    setting: Setting,
}

impl UnsentLimit {
    /// As on the host.
    pub(super) fn new() -> Self {
        let otherwise =
            "their queues stay as they are, so the VM's pause may be long, or its last rounds slow";
        Self { bytes: None, setting: Setting { otherwise, state: SettingState::Set } }
    }

    /// Has `set` set what it is now, if that is not done; without a limit, what it is on the host.
    pub(super) fn follow(
        &mut self,
        bytes: Option<u32>,
        connections: usize,
        set: impl FnOnce(u32) -> io::Result<usize>,
    ) {
        if bytes != self.bytes {
            self.bytes = bytes;
            self.setting.change();
        }
        self.setting.attempt(connections, || set(bytes.unwrap_or(AS_ON_THE_HOST)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u32 = 512 << 10;

    /// The limits that were set one after the other, by a kernel that finds this many of two connections.
    fn all_set(limits: &[Option<u32>], found: &[usize]) -> Vec<u32> {
        let (mut limit, mut set) = (UnsentLimit::new(), vec![]);
        for (bytes, found) in limits.iter().zip(found) {
            limit.follow(*bytes, 2, |value| {
                set.push(value);
                Ok(*found)
            });
        }
        set
    }

    #[test]
    fn a_limit_is_set_once_and_lifted_once() {
        let limits = [None, Some(LIMIT), Some(LIMIT), None, None, Some(LIMIT)];
        assert_eq!(all_set(&limits, &[2; 6]), [LIMIT, AS_ON_THE_HOST, LIMIT]);
    }

    #[test]
    fn connections_that_are_not_there_yet_get_the_limit_of_that_time() {
        assert_eq!(all_set(&[Some(LIMIT), Some(LIMIT), Some(LIMIT)], &[0, 1, 2]), [LIMIT; 3]);
        assert_eq!(all_set(&[Some(LIMIT), None, None], &[1, 2, 2]), [LIMIT, AS_ON_THE_HOST]);
    }

    #[test]
    fn what_the_kernel_forbids_is_not_tried_again() {
        let (mut limit, mut tries) = (UnsentLimit::new(), 0);
        for bytes in [Some(LIMIT), None, Some(LIMIT)] {
            limit.follow(bytes, 2, |_| {
                tries += 1;
                Err(io::ErrorKind::PermissionDenied.into())
            });
        }
        assert_eq!(tries, 1);
    }
}
