//! What is learnt from earlier migrations to a target, for the plan of the next one.

use drainpipe_engine::drain::sending_ms;
use drainpipe_engine::drain::view::{FoundTransfers, Remembered};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::result::{CompressionUse, MigrationResult};

use crate::agent::Agent;

/// From so many of the last migrations to a target is learnt.
const RESULTS_MAX: u32 = 20;

/// What took less, in ms, was over before the cores had shown what they can do.
const SENT_FOR_MS: f64 = 1_000.0;

/// Where more than this share of the stream went out before a core had the time for it, cores were the limit.
const OVERTAKEN_SHARE: f64 = 0.05;

/// What the last migrations to a target have shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Learnt {
    /// What they were like; none if there was none.
    pub(crate) remembered: Option<Remembered>,
    /// The most that packing has saved, in Mb/s: what else wanted the cores may have been the limit of others, or what
    /// shrinks. None where cores never were the limit. What is not repeated is forgotten with the last of so many
    /// migrations.
    pub(crate) saved_mbps: Option<f64>,
}

/// What migrations to this target by this option have shown.
pub(crate) fn of_target(agent: &Agent, target: &str, option: RequestedOption) -> Result<Learnt, Problem> {
    let mut results = agent.journal.completed_to(target, option, RESULTS_MAX)?;
    // These went over one connection, whatever the option.
    results.retain(|result| !result.post_copy_allowed);
    let saved = |result: &MigrationResult| {
        saved(result.compression?, result.transfer_ms, f64::from(result.others_at_once))
    };
    let saved_mbps = most_saved(results.iter().filter_map(saved));
    let transfers = agent.journal.transfers_found(target, option)?;
    Ok(Learnt { remembered: remembered(&results, transfers), saved_mbps })
}

fn remembered(results: &[MigrationResult], transfers: Option<FoundTransfers>) -> Option<Remembered> {
    let median_of = |value: fn(&MigrationResult) -> f64| median(results.iter().map(value).collect());
    Some(Remembered {
        transfer_mbps: transfer_mbps(&results.iter().map(carried).collect::<Vec<_>>())?,
        setup_ms: median_of(|result| result.setup_ms)?,
        completion_ms: median_of(|result| result.completion_ms)?,
        transfers,
    })
}

/// What packing has saved while a migration was under way, in Mb/s.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Saved {
    mbps: f64,
    /// Whether cores were the limit.
    by_cores: bool,
}

/// Of one that was not long enough, nothing. Those beside it had as much of the cores and of the links.
fn saved(compression: CompressionUse, transfer_ms: f64, others_at_once: f64) -> Option<Saved> {
    let CompressionUse { stream_bytes, compressed_bytes, overtaken_bytes, .. } = compression;
    let sent_for_ms = sending_ms(transfer_ms);
    let saved_bytes = stream_bytes.saturating_sub(compressed_bytes) as f64;
    (sent_for_ms >= SENT_FOR_MS).then(|| Saved {
        mbps: (1.0 + others_at_once) * saved_bytes * 8.0 / 1_000.0 / sent_for_ms,
        by_cores: overtaken_bytes as f64 > OVERTAKEN_SHARE * stream_bytes as f64,
    })
}

/// Whatever was their limit, cores can save what they have saved.
fn most_saved(saved: impl Iterator<Item = Saved>) -> Option<f64> {
    let most = |one: Saved, other: Saved| Saved {
        mbps: one.mbps.max(other.mbps),
        by_cores: one.by_cores || other.by_cores,
    };
    saved.reduce(most).filter(|most| most.by_cores).map(|most| most.mbps)
}

/// What a transfer carried, in Mb/s, and how many others were sending too.
fn carried(result: &MigrationResult) -> (f64, u32) {
    let mbps = result.wire_bytes as f64 * 8.0 / 1_000.0 / sending_ms(result.transfer_ms).max(1.0);
    (mbps, result.others_at_once)
}

/// What one VM's transfer carries that has the links for itself. Where none had, what it would have been had the
/// others sent as much; they may not have been there all the time, so the links bound it.
fn transfer_mbps(carried: &[(f64, u32)]) -> Option<f64> {
    let alone = carried.iter().filter(|(_, others)| *others == 0).map(|(mbps, _)| *mbps);
    let together = carried.iter().map(|(mbps, others)| mbps * (f64::from(*others) + 1.0));
    median(alone.collect()).or_else(|| median(together.collect()))
}

/// The middle one, the lower of two.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_packing_saved_is_of_all_that_were_under_way_and_of_long_ones() {
        let of = |overtaken_bytes| CompressionUse {
            stream_bytes: 1_000_000_000,
            compressed_bytes: 750_000_000,
            overtaken_bytes,
            ..CompressionUse::default()
        };
        let by_cores = Saved { mbps: 1_000.0, by_cores: true };
        assert_eq!(saved(of(400_000_000), 2_140.0, 0.0), Some(by_cores));
        assert_eq!(saved(of(400_000_000), 2_140.0, 3.0), Some(Saved { mbps: 4_000.0, ..by_cores }));
        assert_eq!(saved(of(40_000_000), 2_140.0, 0.0), Some(Saved { by_cores: false, ..by_cores }));
        assert_eq!(saved(of(400_000_000), 640.0, 0.0), None, "too short to tell");
    }

    #[test]
    fn one_migration_beside_other_work_does_not_keep_the_next_ones_from_compressing() {
        let of = |all: &[(f64, bool)]| {
            most_saved(all.iter().map(|(mbps, by_cores)| Saved { mbps: *mbps, by_cores: *by_cores }))
        };
        assert_eq!(of(&[(900.0, false), (20.0, true), (880.0, false)]), Some(900.0));
        assert_eq!(of(&[(20.0, true), (250.0, true)]), Some(250.0));
        assert_eq!(of(&[(900.0, false)]), None, "cores may save more");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn what_was_carried_for_several_at_a_time_tells_of_one_only_where_nothing_else_does() {
        assert_eq!(transfer_mbps(&[(500.0, 0), (1_900.0, 2), (480.0, 0), (520.0, 0)]), Some(500.0));
        assert_eq!(transfer_mbps(&[(900.0, 1), (610.0, 2), (480.0, 3)]), Some(1_830.0));
        assert_eq!(transfer_mbps(&[]), None);
    }

    #[test]
    fn the_median_is_one_of_the_values() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0]), Some(1.0));
        assert_eq!(median(vec![9.0, 1.0, 3.0]), Some(3.0));
    }
}
