//! Whether a VM may be started here, by what this host's journal proves and what the other hosts answer.

use std::collections::{BTreeMap, BTreeSet};

use crate::problem::Problem;

/// What another host says of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// It has it, in this way.
    Has(String),
    /// It does not.
    HasNot,
    /// It cannot be asked, for this reason.
    Unknown(String),
}

/// What is known when a VM is to be started.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// This host.
    pub here: &'a str,
    /// The VM.
    pub vm: &'a str,
    /// Whether this host's journal is known to lack nothing since it has the VM: so it would say that the VM has left.
    pub is_proven: bool,
    /// The hosts that may have it by this host's journal.
    pub tied_to: &'a BTreeSet<String>,
    /// What each of the other hosts says.
    pub answers: &'a BTreeMap<String, Answer>,
    /// Hosts that do not have it, as the operator says.
    pub although_unreachable: &'a BTreeSet<String>,
}

/// The hosts for which the operator's word was needed; or why the VM may not be started.
pub fn may_start(asked: &Asked<'_>) -> Result<Vec<String>, Problem> {
    let Asked { here, vm, answers, although_unreachable, .. } = asked;
    if let Some((host, how)) = answers.iter().find_map(|(host, answer)| match answer {
        Answer::Has(how) => Some((host, how)),
        _ => None,
    }) {
        return Err(Problem::conflict(format!(
            "VM {vm} is not started on {here}: {host} has it ({how}), and it would run twice on the same disks. \
             `drainpipe vms` lists it; `drainpipe vm rm {vm}` on {here} removes what is left of it here"
        )));
    }
    let doubtful: Vec<(&String, &String)> = answers
        .iter()
        .filter_map(|(host, answer)| match answer {
            Answer::Unknown(why) if asked.may_be_on(host) => Some((host, why)),
            _ => None,
        })
        .collect();
    if let Some((host, why)) = doubtful.iter().find(|(host, _)| !although_unreachable.contains(*host)) {
        let options: Vec<String> =
            doubtful.iter().map(|(host, _)| format!("--although-unreachable {host}")).collect();
        let options = options.join(" ");
        return Err(Problem::refused(format!(
            "VM {vm} is not started on {here}: {host} may have it and cannot be asked ({why}), and it would run twice on \
             the same disks. Try again when it answers; if you are sure that it does not run there, for \
                 example because that host is powered off: `drainpipe vm start {vm} {options}`"
        )));
    }
    Ok(doubtful.into_iter().map(|(host, _)| host.clone()).collect())
}

impl Asked<'_> {
    fn may_be_on(&self, host: &str) -> bool {
        !self.is_proven || self.tied_to.contains(host)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn start(
        is_proven: bool,
        tied: &[&str],
        answer: Answer,
        although: &[&str],
    ) -> Result<Vec<String>, Problem> {
        let answers = BTreeMap::from([("b".to_owned(), answer), ("c".to_owned(), Answer::HasNot)]);
        may_start(&Asked {
            here: "a",
            vm: "web",
            is_proven,
            tied_to: &names(tied),
            answers: &answers,
            although_unreachable: &names(although),
        })
    }

    #[test]
    fn a_dead_host_stops_nobody_from_starting_what_is_provably_here() {
        let dead = || Answer::Unknown("no answer".into());
        assert_eq!(start(true, &[], dead(), &[]), Ok(vec![]));
        assert!(start(true, &["b"], dead(), &[]).is_err());
        assert!(start(false, &[], dead(), &[]).is_err());
    }

    #[test]
    fn the_refusal_names_the_host_and_the_way_out_and_that_is_taken() {
        let dead = || Answer::Unknown("no answer".into());
        let refused = start(false, &[], dead(), &["c"]).unwrap_err().message;
        assert!(
            refused.contains("b may have it") && refused.contains("--although-unreachable b"),
            "{refused}"
        );
        assert_eq!(start(false, &[], dead(), &["b"]), Ok(vec!["b".to_owned()]));
    }

    fn any_answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(Answer::Has("it lives".into())),
            Just(Answer::HasNot),
            Just(Answer::Unknown("silent".into()))
        ]
    }

    proptest! {
        /// No operator's word makes a VM run twice that a host says it has, and nobody else's makes it run where it may be
        /// elsewhere.
        #[test]
        fn nothing_starts_that_another_host_has(
            is_proven: bool,
            tied in proptest::collection::btree_set("[b-e]", 0..4),
            answers in proptest::collection::btree_map("[b-e]", any_answer(), 0..4),
            although in proptest::collection::btree_set("[b-e]", 0..4),
        ) {
            let asked = Asked {
                here: "a",
                vm: "web",
                is_proven,
                tied_to: &tied,
                answers: &answers,
                although_unreachable: &although,
            };
            let Ok(overridden) = may_start(&asked) else { return Ok(()) };
            for (host, answer) in &answers {
                prop_assert!(!matches!(answer, Answer::Has(_)));
                if *answer != Answer::HasNot {
                    let is_excused = although.contains(host) && overridden.contains(host);
                    prop_assert!(is_excused || is_proven && !tied.contains(host));
                }
            }
        }
    }
}
