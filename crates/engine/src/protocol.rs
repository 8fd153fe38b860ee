//! The protocol that two hosts speak with each other, agreed on in step 1.
//!
//! The number covers everything that agents send each other: requests and answers, the relay's stream, hellos, tests
//! of paths. A release whose messages the release before would not understand speaks one protocol more, and still
//! speaks the one before. So hosts one release apart migrate in both directions, using what both know, and hosts
//! further apart do not.
//!
//! | protocol | since | new in it |
//! |---|---|---|
//! | 1 | 0.1.0 | all that 0.1.0 says |
//! | 2 | 0.2.0 | a source names its release in step 2, and the round trip in step 5; QEMU itself encrypts post-copy; disks are copied; tracked connections go along |
//!
//! Code asks the agreed [`Protocol`] whether the peer knows a feature, here and nowhere else. Answers may have new
//! fields in any release: an agent that does not know one ignores it. Requests may not: an agent refuses an unknown
//! field, which might mean something important: docs/decisions/0062.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place, on};
use crate::problem::Problem;

/// Longest version that is shown; an honest one is `0.10.0-rc.1` or so.
const VERSION_LETTERS_MAX: usize = 32;

/// The protocols that an agent speaks: all from the oldest to the newest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "Range")]
pub struct Protocols {
    /// The oldest.
    oldest: u32,
    /// The newest.
    newest: u32,
}

#[derive(Deserialize)]
struct Range {
    oldest: u32,
    newest: u32,
}

impl TryFrom<Range> for Protocols {
    type Error = String;

    fn try_from(Range { oldest, newest }: Range) -> Result<Self, String> {
        if oldest > newest {
            return Err(format!("the oldest protocol, {oldest}, is newer than the newest, {newest}"));
        }
        Ok(Self { oldest, newest })
    }
}

impl Protocols {
    /// Those of this release.
    pub const OWN: Self = Self { oldest: 1, newest: 2 };
}

impl Default for Protocols {
    /// Those of 0.1.0, which does not say.
    fn default() -> Self {
        Self { oldest: 1, newest: 1 }
    }
}

impl fmt::Display for Protocols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { oldest, newest } = self;
        match newest - oldest {
            0 => write!(f, "protocol {newest}"),
            1 => write!(f, "protocols {oldest} and {newest}"),
            _ => write!(f, "protocols {oldest} to {newest}"),
        }
    }
}

/// Which Drainpipe an agent is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Release {
    /// Its version.
    pub version: String,
    /// The protocols that it speaks.
    #[serde(default)]
    pub protocols: Protocols,
}

impl Release {
    /// This one.
    pub fn own() -> Self {
        Self { version: env!("CARGO_PKG_VERSION").into(), protocols: Protocols::OWN }
    }

    /// Its version, for people. A peer may name anything.
    pub fn shown_version(&self) -> String {
        self.version.chars().filter(char::is_ascii_graphic).take(VERSION_LETTERS_MAX).collect()
    }
}

impl Default for Release {
    /// The one that does not say.
    fn default() -> Self {
        Self { version: "0.1.0".into(), protocols: Protocols::default() }
    }
}

/// The protocol that two hosts speak with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Protocol(u32);

impl Protocol {
    /// Its number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Whether it is older than the newest that this release speaks: then the peer is of an older release.
    pub fn is_of_older_release(self) -> bool {
        self.0 < Protocols::OWN.newest
    }

    /// Why two hosts that speak it copy no disks, where `peer` is the other one; nothing where they can.
    pub fn obstacle_to_disks(self, peer: &str) -> Option<String> {
        (self.0 < 2).then(|| {
            format!(
                "{peer} runs an older drainpipe (protocol {}), which copies no disks: upgrade {peer}",
                self.0
            )
        })
    }

    /// Whether the target takes what the source's firewall tracks of the VM.
    pub fn takes_tracked_connections(self) -> bool {
        self.0 >= 2
    }

    /// What a source says of its release in step 2, so that the target can refuse it; nothing where the target would not
    /// take that.
    pub fn release_in_step_2(self) -> Option<Release> {
        (self.0 >= 2).then(Release::own)
    }

    /// What a source says of the round trip of its paths in step 5, where the target would take that.
    pub fn round_trip_in_step_5(self, round_trip: Option<Duration>) -> Option<Duration> {
        round_trip.filter(|_| self.0 >= 2)
    }

    /// What a source says of the number of an attempt to connect again, where the target would take that.
    pub fn attempt_to_reconnect(self, attempt: u64) -> Option<u64> {
        (self.0 >= 2).then_some(attempt)
    }

    /// Why two hosts that speak it cannot do what was planned, where `peer` is the other one; nothing where they can.
    pub fn obstacle(self, post_copy: bool, is_encrypted: bool, peer: &str) -> Option<String> {
        (self.0 < 2 && post_copy && is_encrypted).then(|| {
            format!(
                "{peer} runs an older drainpipe (protocol {}), which encrypts post-copy in another way: upgrade {peer}, or \
                 migrate without --post-copy",
                self.0
            )
        })
    }
}

/// A host and its release.
#[derive(Debug, Clone, Copy)]
pub struct Speaker<'a> {
    /// Name of the host.
    pub host: &'a str,
    /// Its release.
    pub release: &'a Release,
}

/// Two hosts that have no protocol in common.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}; upgrade {older}, one release at a time, to {newer_version} or the one before it", self.what())]
pub struct TooFarApart {
    older: String,
    older_version: String,
    older_protocols: Protocols,
    newer: String,
    newer_version: String,
    newer_protocols: Protocols,
}

impl TooFarApart {
    fn new(older: Speaker<'_>, newer: Speaker<'_>) -> Self {
        Self {
            older: older.host.into(),
            older_version: older.release.shown_version(),
            older_protocols: older.release.protocols,
            newer: newer.host.into(),
            newer_version: newer.release.shown_version(),
            newer_protocols: newer.release.protocols,
        }
    }

    fn what(&self) -> String {
        let Self { older, older_version, older_protocols, newer, newer_version, newer_protocols } = self;
        format!(
            "{older} runs drainpipe {older_version} ({older_protocols}), {newer} runs drainpipe {newer_version} \
             ({newer_protocols}): they are more than one release apart"
        )
    }

    /// All there is to say of two such hosts: whatever else they would say of themselves may not be understood.
    pub fn finding(&self) -> Finding {
        let Self { older, newer, newer_version, .. } = self;
        Finding::new(FindingCode::AgentsTooFarApart, [Place::host(older), Place::host(newer)])
            .what(self.what())
            .effect("no VM can move between them, and nothing else was checked")
            .remedy(on(
                older,
                format!(
                    "install drainpipe {newer_version} or the release before it, one release at a time, each with \
                     systemctl restart drainpipe (VMs keep running)"
                ),
            ))
    }
}

impl From<TooFarApart> for Problem {
    fn from(apart: TooFarApart) -> Self {
        Self::refused(apart)
    }
}

/// The protocol that two hosts speak: the newest that both know. Either host comes to the same one.
pub fn agree(one: Speaker<'_>, other: Speaker<'_>) -> Result<Protocol, TooFarApart> {
    let [a, b] = [one.release.protocols, other.release.protocols];
    let newest = a.newest.min(b.newest);
    if newest >= a.oldest.max(b.oldest) {
        return Ok(Protocol(newest));
    }
    let (older, newer) = if a.newest < b.newest { (one, other) } else { (other, one) };
    Err(TooFarApart::new(older, newer))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn release(version: &str, oldest: u32, newest: u32) -> Release {
        Release { version: version.into(), protocols: Protocols { oldest, newest } }
    }

    /// The release of this number: it speaks its own protocol and the one before.
    fn of_number(number: u32) -> Release {
        release(&format!("0.{number}.0"), number.saturating_sub(1).max(1), number)
    }

    fn between(a: &Release, b: &Release) -> Result<Protocol, TooFarApart> {
        agree(Speaker { host: "a", release: a }, Speaker { host: "b", release: b })
    }

    fn any_protocols() -> impl Strategy<Value = Protocols> {
        let small = (0..9_u32, 0..9_u32);
        let any = (any::<u32>(), any::<u32>());
        prop_oneof![small, any]
            .prop_map(|(one, other)| Protocols { oldest: one.min(other), newest: one.max(other) })
    }

    proptest! {
        #[test]
        fn hosts_agree_if_they_are_one_release_apart_and_no_further(a in 1..40_u32, b in 1..40_u32) {
            let agreed = between(&of_number(a), &of_number(b));
            prop_assert_eq!(agreed.is_ok(), a.abs_diff(b) <= 1);
            if let Ok(protocol) = agreed {
                prop_assert_eq!(protocol.number(), a.min(b));
            }
        }

        #[test]
        fn both_hosts_come_to_the_same(a in any_protocols(), b in any_protocols()) {
            let [a, b] = [a, b].map(|protocols| Release { protocols, ..Release::default() });
            let there = between(&a, &b);
            let back = agree(Speaker { host: "b", release: &b }, Speaker { host: "a", release: &a });
            prop_assert_eq!(&there, &back);
            match there {
                Ok(Protocol(number)) => for Release { protocols, .. } in [&a, &b] {
                    prop_assert!((protocols.oldest..=protocols.newest).contains(&number));
                },
                Err(apart) => prop_assert!(apart.older_protocols.newest < apart.newer_protocols.oldest),
            }
        }

        #[test]
        fn what_a_peer_says_is_read_or_refused(oldest: u32, newest: u32) {
            let said = serde_json::json!({ "oldest": oldest, "newest": newest, "best": 7 });
            let read = serde_json::from_value::<Protocols>(said);
            prop_assert_eq!(read.ok(), (oldest <= newest).then_some(Protocols { oldest, newest }));
        }
    }

    #[test]
    fn the_refusal_names_both_and_whom_to_upgrade() {
        let (old, new) = (Release::default(), release("0.4.0", 3, 4));
        let text = between(&new, &old).unwrap_err().to_string();
        let expected = "b runs drainpipe 0.1.0 (protocol 1), a runs drainpipe 0.4.0 (protocols 3 and 4): they are more than \
                        one release apart; upgrade b, one release at a time, to 0.4.0 or the one before it";
        assert_eq!(text, expected);
        let finding = between(&old, &new).unwrap_err().finding();
        assert!(finding.refuses_migration);
        assert!(
            finding.remedy.starts_with("on a: install drainpipe 0.4.0 or the release before"),
            "{finding:?}"
        );
    }

    #[test]
    fn a_version_cannot_command_a_terminal() {
        let hostile = release(&format!("\u{1b}[2J\u{202e}9\n{}", "9".repeat(9_000)), 8, 9);
        let text = between(&Release::own(), &hostile).unwrap_err().to_string();
        assert!(text.is_ascii() && !text.contains(char::is_control) && text.len() < 400, "{text}");
    }

    #[test]
    fn who_does_not_say_is_0_1_0_which_this_release_understands() {
        let silent: Release = serde_json::from_value(serde_json::json!({ "version": "0.1.0" })).unwrap();
        assert_eq!(silent, Release::default());
        let protocol = between(&Release::own(), &silent).unwrap();
        assert_eq!(protocol.number(), 1);
        assert!(protocol.is_of_older_release() && protocol.release_in_step_2().is_none());
        assert_eq!(protocol.round_trip_in_step_5(Some(Duration::ZERO)), None);
    }

    #[test]
    fn two_of_this_release_speak_its_newest() {
        let protocol = between(&Release::own(), &Release::own()).unwrap();
        assert!(!protocol.is_of_older_release() && protocol.release_in_step_2() == Some(Release::own()));
    }

    #[test]
    fn encrypted_post_copy_needs_protocol_2() {
        for post_copy in [false, true] {
            for is_encrypted in [false, true] {
                let refused = Protocol(1).obstacle(post_copy, is_encrypted, "b");
                assert_eq!(refused.is_some(), post_copy && is_encrypted, "{refused:?}");
                assert!(refused.is_none_or(|why| why.contains("upgrade b")));
                assert_eq!(Protocol(2).obstacle(post_copy, is_encrypted, "b"), None);
            }
        }
    }

    #[test]
    fn each_release_says_which_it_is() {
        assert_eq!(Protocols::OWN.newest - Protocols::OWN.oldest, 1, "this release and the one before");
        assert_eq!(Release::own().version, env!("CARGO_PKG_VERSION"));
    }
}
