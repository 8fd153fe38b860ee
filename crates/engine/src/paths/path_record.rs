//! What is known about the paths between two hosts while no migration uses them: which worked when they were last
//! tested, and since when the others have not.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::facts::{HostFacts, MigrationLink};
use crate::paths::path::{Path, write_name};

/// What trying a path has shown: nothing against it, or why it cannot be used.
pub type TrialOutcome = Result<(), String>;

/// One path, as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathRecord {
    /// Link of the host that tried it.
    pub link: String,
    /// Link of the other host.
    pub peer_link: String,
    /// Why it does not work; absent when it does.
    pub fault: Option<String>,
    /// When it was first found to work, or not to work, as it does now (RFC 3339).
    pub since: String,
}

impl fmt::Display for PathRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_name(f, &self.link, &self.peer_link)
    }
}

/// What is known after another trial. A path that was known and has not been found this time does not work any
/// more, unless one of its links stands in another path by now, or is for migrations no longer.
///
/// `own` and `peer` are the facts from which the paths were found, `tried` what came of each of them, `now`
/// the time (RFC 3339).
pub fn after_trial(
    known: &[PathRecord],
    [own, peer]: [&HostFacts; 2],
    tried: &[(Path, TrialOutcome)],
    now: &str,
) -> Vec<PathRecord> {
    let found = tried.iter().map(|(path, trial)| (&path.link, &path.peer_link, trial.clone().err()));
    let lost = known.iter().filter_map(|record| {
        let is_tried =
            |(path, _): &(Path, TrialOutcome)| path.link == record.link || path.peer_link == record.peer_link;
        let ends = [(own, own.link(&record.link)?), (peer, peer.link(&record.peer_link)?)];
        (!tried.iter().any(is_tried)).then(|| (&record.link, &record.peer_link, Some(why_not_found(ends))))
    });
    found
        .chain(lost)
        .map(|(link, peer_link, fault)| {
            let before = known.iter().find(|old| (&old.link, &old.peer_link) == (link, peer_link));
            let same = before.filter(|old| old.fault.is_some() == fault.is_some());
            PathRecord {
                link: link.clone(),
                peer_link: peer_link.clone(),
                fault,
                since: same.map_or(now, |old| &old.since).to_owned(),
            }
        })
        .collect()
}

fn why_not_found(ends: [(&HostFacts, &MigrationLink); 2]) -> String {
    let down = ends.iter().filter(|(_, link)| !link.usable);
    let down: Vec<String> = down.map(|(host, link)| format!("{} of {}", link.name, host.name)).collect();
    match down.len() {
        0 => "its ends no longer reach each other".into(),
        1 => format!("{} is down", down[0]),
        _ => format!("{} are down, or one of them is and the other has no carrier", down.join(" and ")),
    }
}

/// The paths that have turned, from working to not or back. One that was not known before has turned if it
/// does not work.
pub fn turned<'a>(before: &[PathRecord], after: &'a [PathRecord]) -> Vec<&'a PathRecord> {
    let was_good = |new: &PathRecord| {
        let old = before.iter().find(|old| (&old.link, &old.peer_link) == (&new.link, &new.peer_link));
        old.is_none_or(|old| old.fault.is_none())
    };
    after.iter().filter(|new| was_good(new) != new.fault.is_none()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn host(name: &str, links: &[(&str, bool)]) -> HostFacts {
        let link = |(name, usable): &(&str, bool)| MigrationLink { usable: *usable, ..fixtures::link(name) };
        HostFacts { links: links.iter().map(link).collect(), ..fixtures::host(name) }
    }

    fn tried(link: &str, peer_link: &str, trial: TrialOutcome) -> (Path, TrialOutcome) {
        (Path { peer_link: peer_link.into(), ..fixtures::path(link) }, trial)
    }

    const UP: [(&str, bool); 2] = [("e0", true), ("e1", true)];

    fn in_words(records: &[PathRecord]) -> Vec<String> {
        let of = |record: &PathRecord| {
            format!("{record} {} {}", record.fault.as_deref().unwrap_or("ok"), record.since)
        };
        records.iter().map(of).collect()
    }

    #[test]
    fn a_path_that_turns_is_told_once_and_keeps_its_time() {
        let (a, b) = (host("a", &UP), host("b", &UP));
        let hosts = [&a, &b];
        let good = [tried("e0", "e0", Ok(())), tried("e1", "e1", Ok(()))];
        let silent = [good[0].clone(), tried("e1", "e1", Err("no answer".into()))];
        let first = after_trial(&[], hosts, &good, "1");
        assert_eq!(in_words(&first), ["e0–e0 ok 1", "e1–e1 ok 1"]);
        assert_eq!(turned(&[], &first), Vec::<&PathRecord>::new());
        let second = after_trial(&first, hosts, &silent, "2");
        assert_eq!(in_words(&second), ["e0–e0 ok 1", "e1–e1 no answer 2"]);
        assert_eq!(turned(&first, &second), [&second[1]]);
        let third = after_trial(&second, hosts, &silent, "3");
        assert_eq!(third, second);
        assert_eq!(turned(&second, &third), Vec::<&PathRecord>::new());
        let fourth = after_trial(&third, hosts, &good, "4");
        assert_eq!(in_words(&fourth), ["e0–e0 ok 1", "e1–e1 ok 4"]);
        assert_eq!(turned(&third, &fourth), [&fourth[1]]);
        // Bad from the first look on.
        assert_eq!(turned(&[], &second), [&second[1]]);
    }

    #[test]
    fn a_path_that_is_not_found_any_more_does_not_work() {
        let (a, b) = (host("a", &UP), host("b", &UP));
        let both = [tried("e0", "e0", Ok(())), tried("e1", "e1", Ok(()))];
        let known = after_trial(&[], [&a, &b], &both, "1");
        let lost = |peer: &HostFacts| in_words(&after_trial(&known, [&a, peer], &both[..1], "2"));
        assert_eq!(lost(&b), ["e0–e0 ok 1", "e1–e1 its ends no longer reach each other 2"]);
        let down = host("b", &[("e0", true), ("e1", false)]);
        assert_eq!(lost(&down), ["e0–e0 ok 1", "e1–e1 e1 of b is down 2"]);
        let both_down =
            after_trial(&known, [&host("a", &[("e0", true), ("e1", false)]), &down], &both[..1], "2");
        assert!(both_down[1].fault.as_ref().unwrap().starts_with("e1 of a and e1 of b are down"));
        // No longer for migrations.
        assert_eq!(lost(&host("b", &UP[..1])), ["e0–e0 ok 1"]);
    }

    #[test]
    fn links_that_are_paired_otherwise_are_known_by_their_new_path() {
        let (a, b) = (host("a", &UP), host("b", &UP));
        let straight = [tried("e0", "e0", Ok(())), tried("e1", "e1", Ok(()))];
        let crossed = [tried("e0", "e1", Ok(())), tried("e1", "e0", Ok(()))];
        let known = after_trial(&[], [&a, &b], &straight, "1");
        let known = after_trial(&known, [&a, &b], &crossed, "2");
        assert_eq!(in_words(&known), ["e0–e1 ok 2", "e1–e0 ok 2"]);
    }
}
