//! CPUs as the kernel and its tools write them: `0-3,8`; see cpuset(7).

use std::fmt;

use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Deserialize;

/// Some of a host's CPUs, at least one.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct CpuList(Vec<usize>);

impl CpuList {
    /// Those on which this process may run.
    pub(crate) fn of_this_process() -> std::io::Result<Self> {
        let set = sched_getaffinity(None)?;
        Ok(Self((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()))
    }

    /// In ascending order.
    pub(crate) fn cpus(&self) -> &[usize] {
        &self.0
    }

    /// Those that are not in the other list; none if it has all of them.
    pub(crate) fn without(&self, other: &Self) -> Option<Self> {
        self.those(|cpu| !other.0.contains(&cpu))
    }

    /// Those that are in the other list too; none if it has none of them.
    pub(crate) fn within(&self, other: &Self) -> Option<Self> {
        self.those(|cpu| other.0.contains(&cpu))
    }

    fn those(&self, are_meant: impl Fn(usize) -> bool) -> Option<Self> {
        let meant: Vec<usize> = self.0.iter().copied().filter(|cpu| are_meant(*cpu)).collect();
        (!meant.is_empty()).then_some(Self(meant))
    }
}

impl TryFrom<String> for CpuList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let wrong = || {
            format!(
                "`{text}` is not a list of CPUs: write it like \"0-3,8\", with numbers below {}",
                CpuSet::MAX_CPU
            )
        };
        let mut cpus = vec![];
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let first: usize = first.trim().parse().map_err(|_| wrong())?;
            let last: usize = last.trim().parse().map_err(|_| wrong())?;
            if first > last || last >= CpuSet::MAX_CPU {
                return Err(wrong());
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self
            .0
            .chunk_by(|one, next| one + 1 == *next)
            .filter_map(|range| match (range.first()?, range.last()?) {
                (first, last) if first == last => Some(first.to_string()),
                (first, last) => Some(format!("{first}-{last}")),
            })
            .collect();
        f.write_str(&ranges.join(","))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(text: &str) -> Result<CpuList, String> {
        CpuList::try_from(text.to_owned())
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(list("8, 0-2,1").unwrap().cpus(), [0, 1, 2, 8]);
        for wrong in ["", "a", "3-1", "1-", "-1", "0,,1", "1024", "0-99999999999999999999", "0-9999999999"] {
            let error = list(wrong).unwrap_err();
            assert!(error.contains("\"0-3,8\""), "{wrong}: {error}");
        }
    }

    #[test]
    fn what_is_missing_and_what_is_left_is_named() {
        let own = list("0-3").unwrap();
        assert_eq!(list("2-6,9").unwrap().without(&own).unwrap().to_string(), "4-6,9");
        assert_eq!(list("1,3").unwrap().without(&own), None);
        assert_eq!(list("2-6,9").unwrap().within(&own).unwrap().to_string(), "2-3");
        assert_eq!(list("4-6").unwrap().within(&own), None);
        assert!(!CpuList::of_this_process().unwrap().cpus().is_empty());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(cpus in prop::collection::btree_set(0..CpuSet::MAX_CPU, 1..20)) {
            let cpus = CpuList(cpus.into_iter().collect());
            prop_assert_eq!(list(&cpus.to_string()).unwrap(), cpus);
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[0-9,\\- a]{0,30}") {
            if let Ok(cpus) = list(&text) {
                prop_assert!(!cpus.cpus().is_empty());
            }
        }
    }
}
