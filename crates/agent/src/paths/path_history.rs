//! Experience from earlier migrations to a target, for the plan of the next one.

use drainpipe_engine::drain::view::{FoundTransfers, PathHistory};
use drainpipe_engine::estimate::experience::{self, Past, Saved};
use drainpipe_engine::estimate::sending::sending_ms;
use drainpipe_engine::migration::result::{CompressionUse, MigrationResult};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;

use crate::store::journal::Journal;

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
    pub(crate) path_history: Option<PathHistory>,
    /// What packing has saved while this host was as busy as it is now, in Mb/s. None where cores never were the limit.
    /// What is not repeated is forgotten with the last of so many migrations.
    pub(crate) saved_mbps: Option<f64>,
    /// How much longer than predicted compressed ones took then, beside others; none where none was compressed.
    pub(crate) compressed_slower: Option<f64>,
}

/// What migrations to this target by this option have shown, where so many cores of this host are free now.
pub(crate) fn of_target(
    journal: &Journal,
    free_cores: Option<f64>,
    target: &str,
    option: RequestedOption,
) -> Result<Learnt, Problem> {
    let mut results = journal.completed_to(target, option, RESULTS_MAX)?;
    // These went over one connection, whatever the option.
    results.retain(|result| !result.choice.post_copy_allowed);
    let past = results.iter().map(past).collect::<Vec<_>>();
    let transfers = journal.transfers_found(target, option)?;
    Ok(Learnt {
        path_history: path_history(&alike(results, free_cores), transfers),
        saved_mbps: experience::saved_mbps(&past, free_cores),
        compressed_slower: experience::compressed_slower(&past, free_cores),
    })
}

fn past(result: &MigrationResult) -> Past {
    let took_ms = result.times.total_ms - result.times.held_ms;
    let is_alone = result.host_use.others_at_once == 0;
    // The option has no influence on copies of disks.
    let shows_option = is_alone && result.copied.disks.is_empty();
    let of_others = f64::from(result.host_use.others_at_once);
    Past {
        free_cores: result.host_use.free_cores,
        is_compressed: result.connection_use.compression.is_some(),
        slower: result
            .times
            .predicted_total_ms
            .filter(|_| shows_option)
            .map(|predicted_ms| took_ms / predicted_ms),
        saved: result
            .connection_use
            .compression
            .and_then(|packed| saved(packed, result.times.transfer_ms, of_others)),
    }
}

/// Those that began while this host was as busy as it is now; all, if none did.
fn alike(results: Vec<MigrationResult>, free_cores: Option<f64>) -> Vec<MigrationResult> {
    let is_alike = |result: &MigrationResult| experience::is_alike(result.host_use.free_cores, free_cores);
    let (alike, others): (Vec<_>, Vec<_>) = results.into_iter().partition(is_alike);
    if alike.is_empty() { others } else { alike }
}

fn path_history(results: &[MigrationResult], transfers: Option<FoundTransfers>) -> Option<PathHistory> {
    let median_of = |value: fn(&MigrationResult) -> f64| median(results.iter().map(value).collect());
    Some(PathHistory {
        transfer_mbps: transfer_mbps(&results.iter().map(carried).collect::<Vec<_>>())?,
        setup_ms: median_of(|result| result.times.setup_ms)?,
        completion_ms: median_of(|result| result.times.completion_ms)?,
        transfers,
        disk_mbps: median(results.iter().filter_map(|result| result.copied.mbps()).collect()),
    })
}

/// Nothing if the migration was too short. The others beside it had as much of the cores and links.
fn saved(compression: CompressionUse, transfer_ms: f64, others_at_once: f64) -> Option<Saved> {
    let CompressionUse { stream_bytes, compressed_bytes, overtaken_bytes, .. } = compression;
    let sent_for_ms = sending_ms(transfer_ms);
    let saved_bytes = stream_bytes.saturating_sub(compressed_bytes) as f64;
    (sent_for_ms >= SENT_FOR_MS).then(|| Saved {
        mbps: (1.0 + others_at_once) * saved_bytes * 8.0 / 1_000.0 / sent_for_ms,
        by_cores: overtaken_bytes as f64 > OVERTAKEN_SHARE * stream_bytes as f64,
    })
}

/// What a transfer carried, in Mb/s, and how many others were sending too.
fn carried(result: &MigrationResult) -> (f64, u32) {
    let mbps =
        result.memory.wire_bytes as f64 * 8.0 / 1_000.0 / sending_ms(result.times.transfer_ms).max(1.0);
    (mbps, result.host_use.others_at_once)
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
