//! Many migrations as a few numbers: median and spread for each option.

use drainpipe_engine::migration::result::{CpuSeconds, MigrationResult, Outcome, Verified};
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use serde::Serialize;

const BYTES_PER_GIB: f64 = (1_u64 << 30) as f64;

/// Median and extremes of one quantity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value, or the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Summarises all `values` that are numbers; none if there are none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let upper = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[upper - 1], sorted[upper])
        } else {
            sorted[upper]
        };
        Some(Self { median, min, max })
    }
}

/// All migrations for which the same was asked and that used the same option.
///
/// The quantities are those of completed migrations; where none completed, there are none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OptionSummary {
    /// What was asked for.
    pub requested: RequestedOption,
    /// What was used.
    pub option: MigrationOption,
    /// Why that was used, each reason once.
    pub fallback_reasons: Vec<String>,
    /// How many migrations completed.
    pub completed: usize,
    /// How many did not: failed, cancelled or in doubt.
    pub failed: usize,
    /// The completed migration, as an index into the results, whose total time is the median, or
    /// the next longer one. It stands for the others where only one can be shown.
    pub median_run: Option<usize>,
    /// From the request to the end of clean-up.
    pub total_ms: Option<Spread>,
    /// Steps 1 to 5.
    pub setup_ms: Option<Spread>,
    /// Steps 6 to 8.
    pub transfer_ms: Option<Spread>,
    /// Steps 9 and 10.
    pub completion_ms: Option<Spread>,
    /// Pause of the VM, as the hosts see it.
    // Its name in 0.1.0.
    #[serde(rename = "blackout_ms")]
    pub downtime_ms: Option<Spread>,
    /// Pause of the VM, as a client of the guest sees it.
    pub guest_gap_ms: Option<Spread>,
    /// Bytes on the wire over the time of the transfer.
    pub throughput_gbps: Option<Spread>,
    /// Bytes on the wire.
    pub wire_bytes: Option<Spread>,
    /// CPU of both hypervisors and both agents, per GiB of the VM's memory.
    pub cpu_seconds_per_gib: Option<Spread>,
    /// How many times as fast as `tcp` in the same results: median total time of `tcp` over that of
    /// this option.
    pub speed_against_tcp: Option<f64>,
    /// Median throughput over that of `tcp` in the same results.
    pub throughput_against_tcp: Option<f64>,
    /// How many completed migrations the guest checked its memory after.
    pub verified_runs: usize,
    /// What the guest found, over all of them.
    pub verified: Verified,
}

impl OptionSummary {
    /// "multichannel", or "direct → multichannel" where something else was used than asked for.
    pub fn label(&self) -> String {
        let (requested, option) = (self.requested.to_string(), self.option.to_string());
        if requested == option { option } else { format!("{requested} → {option}") }
    }
}

/// Summarises migrations by option, in the order in which the options first appear.
pub fn summarise(results: &[MigrationResult]) -> Vec<OptionSummary> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, result) in results.iter().enumerate() {
        let key = |result: &MigrationResult| (result.choice.requested_option, result.choice.option);
        match groups.iter_mut().find(|group| key(&results[group[0]]) == key(result)) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    let mut summaries: Vec<_> = groups.iter().map(|group| summarise_group(results, group)).collect();
    compare_with_tcp(&mut summaries);
    summaries
}

fn summarise_group(results: &[MigrationResult], group: &[usize]) -> OptionSummary {
    let completed: Vec<usize> =
        group.iter().copied().filter(|&index| results[index].outcome == Outcome::Completed).collect();
    let runs = || completed.iter().map(|&index| &results[index]);
    let spread = |quantity: fn(&MigrationResult) -> f64| Spread::of(runs().map(quantity));
    let checks = || runs().filter_map(|run| run.record.verified);
    let first = &results[group[0]];
    OptionSummary {
        requested: first.choice.requested_option,
        option: first.choice.option,
        fallback_reasons: fallback_reasons(results, group),
        completed: completed.len(),
        failed: group.len() - completed.len(),
        median_run: median_run(results, &completed),
        total_ms: spread(|run| run.times.total_ms),
        setup_ms: spread(|run| run.times.setup_ms),
        transfer_ms: spread(|run| run.times.transfer_ms),
        completion_ms: spread(|run| run.times.completion_ms),
        downtime_ms: Spread::of(runs().filter_map(|run| run.silence.downtime_ms)),
        guest_gap_ms: Spread::of(runs().filter_map(|run| run.silence.guest_gap_ms)),
        throughput_gbps: spread(|run| run.memory.throughput_gbps),
        wire_bytes: spread(|run| run.memory.wire_bytes as f64),
        cpu_seconds_per_gib: spread(|run| cpu_total(&run.host_use.cpu_seconds) / gib(run)),
        speed_against_tcp: None,
        throughput_against_tcp: None,
        verified_runs: checks().count(),
        verified: Verified {
            pages: checks().map(|check| check.pages).fold(0, u64::saturating_add),
            bad: checks().map(|check| check.bad).fold(0, u64::saturating_add),
        },
    }
}

fn fallback_reasons(results: &[MigrationResult], group: &[usize]) -> Vec<String> {
    let mut reasons: Vec<String> = Vec::new();
    for reason in group.iter().filter_map(|&index| results[index].choice.fallback_reason.as_ref()) {
        if !reasons.contains(reason) {
            reasons.push(reason.clone());
        }
    }
    reasons
}

fn median_run(results: &[MigrationResult], completed: &[usize]) -> Option<usize> {
    let mut sorted = completed.to_vec();
    sorted.sort_by(|&left, &right| results[left].times.total_ms.total_cmp(&results[right].times.total_ms));
    sorted.get(sorted.len() / 2).copied()
}

/// CPU of all that took part.
pub(crate) fn cpu_total(cpu: &CpuSeconds) -> f64 {
    cpu.source_vmm + cpu.source_agent + cpu.target_vmm + cpu.target_agent
}

/// Memory of the VM in GiB.
pub(crate) fn gib(run: &MigrationResult) -> f64 {
    run.memory.memory_bytes as f64 / BYTES_PER_GIB
}

fn compare_with_tcp(summaries: &mut [OptionSummary]) {
    let asked_for_tcp = |summary: &&OptionSummary| summary.requested == RequestedOption::Tcp;
    let Some(tcp) = summaries.iter().find(asked_for_tcp) else { return };
    let (tcp_total, tcp_throughput) = (tcp.total_ms, tcp.throughput_gbps);
    for summary in summaries {
        summary.speed_against_tcp = ratio(tcp_total, summary.total_ms);
        summary.throughput_against_tcp = ratio(summary.throughput_gbps, tcp_throughput);
    }
}

fn ratio(numerator: Option<Spread>, denominator: Option<Spread>) -> Option<f64> {
    let ratio = numerator?.median / denominator?.median;
    ratio.is_finite().then_some(ratio)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sample::{completed, failed};

    #[test]
    fn an_odd_number_has_a_middle() {
        let spread = Spread::of([3.0, 1.0, 2.0]);
        assert_eq!(spread, Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
    }

    #[test]
    fn an_even_number_has_two() {
        let spread = Spread::of([4.0, 1.0, 3.0, 2.0]);
        assert_eq!(spread, Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }

    #[test]
    fn what_is_no_number_is_left_out() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([f64::NAN]), None);
        let spread = Spread::of([f64::NAN, 1.0, f64::INFINITY]);
        assert_eq!(spread, Some(Spread { median: 1.0, min: 1.0, max: 1.0 }));
    }

    #[test]
    fn nothing_gives_nothing() {
        assert_eq!(summarise(&[]), []);
    }

    #[test]
    fn failures_are_counted_and_not_measured() {
        let option = RequestedOption::Tcp;
        let results = [completed(option, 2_000.0), failed(option), completed(option, 1_000.0)];
        let summaries = summarise(&results);
        assert_eq!(summaries.len(), 1);
        let tcp = &summaries[0];
        assert_eq!((tcp.completed, tcp.failed), (2, 1));
        assert_eq!(tcp.total_ms, Some(Spread { median: 1_500.0, min: 1_000.0, max: 2_000.0 }));
        assert_eq!(tcp.median_run, Some(0));
    }

    #[test]
    fn an_option_that_never_completed_has_no_numbers() {
        let summaries =
            summarise(&[failed(RequestedOption::Tcp), completed(RequestedOption::Multichannel, 1.0)]);
        assert_eq!(summaries[0].total_ms, None);
        assert_eq!(summaries[0].median_run, None);
        assert_eq!(summaries[1].speed_against_tcp, None);
    }

    #[test]
    fn options_are_compared_with_tcp() {
        let results =
            [completed(RequestedOption::Tcp, 13_000.0), completed(RequestedOption::Multichannel, 6_500.0)];
        let summaries = summarise(&results);
        assert_eq!(summaries[0].speed_against_tcp, Some(1.0));
        assert_eq!(summaries[1].speed_against_tcp, Some(2.0));
    }

    #[test]
    fn a_fallback_is_a_row_of_its_own() {
        let mut fallback = completed(RequestedOption::Direct, 2_000.0);
        fallback.choice.option = MigrationOption::Multichannel;
        fallback.choice.fallback_reason = Some("no RDMA device on b".to_owned());
        let results = [completed(RequestedOption::Multichannel, 2_000.0), fallback.clone(), fallback];
        let summaries = summarise(&results);
        let labels: Vec<_> = summaries.iter().map(OptionSummary::label).collect();
        assert_eq!(labels, ["multichannel", "direct → multichannel"]);
        assert_eq!(summaries[1].fallback_reasons, ["no RDMA device on b"]);
    }

    #[test]
    fn checks_of_the_guest_are_added_up() {
        let mut bad = completed(RequestedOption::Tcp, 1.0);
        bad.record.verified = Some(Verified { pages: 100, bad: 3 });
        let mut unchecked = completed(RequestedOption::Tcp, 1.0);
        unchecked.record.verified = None;
        let summaries = summarise(&[bad.clone(), bad, unchecked]);
        assert_eq!(summaries[0].verified_runs, 2);
        assert_eq!(summaries[0].verified, Verified { pages: 200, bad: 6 });
    }

    proptest! {
        #[test]
        fn the_median_splits_the_values(values in proptest::collection::vec(0.0..1e9_f64, 1..40)) {
            let spread = Spread::of(values.iter().copied()).expect("there are values");
            let below = values.iter().filter(|&&value| value < spread.median).count();
            let above = values.iter().filter(|&&value| value > spread.median).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
            prop_assert!(spread.min <= spread.median && spread.median <= spread.max);
        }
    }
}
