//! What earlier migrations to a target show about compression there, on a source as busy as it is now.

/// Cores that were free then and now are alike that differ by no more than this, or by this share of the more.
const ALIKE_CORES: f64 = 0.5;
const ALIKE_SHARE: f64 = 0.25;

/// A migration that is said to have been faster or slower than predicted by more than this was disturbed.
const RATIO_MAX: f64 = 10.0;

/// One earlier migration.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Past {
    /// Cores of the source that were free when it began; absent where that was not known.
    pub free_cores: Option<f64>,
    /// Whether it was compressed.
    pub is_compressed: bool,
    /// How much longer it took than was predicted; absent where nothing was, or others shared the links.
    pub slower: Option<f64>,
    /// What packing saved; absent where it was too short to tell.
    pub saved: Option<Saved>,
}

/// What packing has saved while a migration was under way.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Saved {
    /// In Mb/s.
    pub mbps: f64,
    /// Whether cores were the limit.
    pub by_cores: bool,
}

/// What packing saves with so many free cores, in Mb/s: the median, since what else wanted the cores may have been the
/// limit of some, or what shrinks. None where cores never were the limit.
pub fn saved_mbps(past: &[Past], free_cores: Option<f64>) -> Option<f64> {
    let saved: Vec<Saved> = alike(past, free_cores).filter_map(|past| past.saved).collect();
    let is_limited = saved.iter().any(|saved| saved.by_cores);
    median(saved.iter().map(|saved| saved.mbps)).filter(|_| is_limited)
}

/// How much longer than predicted compressed migrations took, beside others; none where none was compressed.
pub fn compressed_slower(past: &[Past], free_cores: Option<f64>) -> Option<f64> {
    let slower = |is_compressed: bool| {
        let of_kind = alike(past, free_cores).filter(|past| past.is_compressed == is_compressed);
        let said =
            of_kind.filter_map(|past| past.slower).filter(|slower| *slower > 0.0 && slower.is_finite());
        median(said.map(|slower| slower.clamp(1.0 / RATIO_MAX, RATIO_MAX)))
    };
    Some(slower(true)? / slower(false).unwrap_or(1.0))
}

/// Whether a migration that began with so many free cores says something of one that begins with so many now.
pub fn is_alike(then: Option<f64>, now: Option<f64>) -> bool {
    let differ = |(then, now): (f64, f64)| (then - now).abs() > ALIKE_CORES.max(ALIKE_SHARE * then.max(now));
    !then.zip(now).is_some_and(differ)
}

fn alike(past: &[Past], free_cores: Option<f64>) -> impl Iterator<Item = &Past> {
    past.iter().filter(move |past| is_alike(past.free_cores, free_cores))
}

/// The middle one, the higher of two.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn saved(free_cores: f64, mbps: f64, by_cores: bool) -> Past {
        Past { free_cores: Some(free_cores), saved: Some(Saved { mbps, by_cores }), ..Past::default() }
    }

    fn took(is_compressed: bool, free_cores: f64, slower: f64) -> Past {
        Past { free_cores: Some(free_cores), is_compressed, slower: Some(slower), saved: None }
    }

    #[test]
    fn one_migration_beside_other_work_does_not_keep_the_next_ones_from_compressing() {
        let past = [saved(8.0, 900.0, false), saved(8.0, 20.0, true), saved(8.0, 880.0, false)];
        assert_eq!(saved_mbps(&past, Some(8.0)), Some(880.0));
        assert_eq!(saved_mbps(&past[..1], Some(8.0)), None, "cores may save more");
        assert_eq!(saved_mbps(&[], None), None);
    }

    #[test]
    fn what_an_idle_host_has_saved_is_not_promised_of_a_busy_one() {
        let past = [saved(8.0, 900.0, true), saved(8.0, 910.0, true), saved(0.2, 30.0, true)];
        assert_eq!(saved_mbps(&past, Some(0.4)), Some(30.0));
        assert_eq!(saved_mbps(&past, Some(7.0)), Some(910.0));
        assert_eq!(saved_mbps(&past, None), Some(900.0));
    }

    #[test]
    fn who_was_slower_than_predicted_is_held_against_the_others() {
        let past = [took(true, 0.5, 2.0), took(false, 0.5, 1.25), took(true, 8.0, 1.0)];
        assert_eq!(compressed_slower(&past, Some(0.4)), Some(1.6));
        assert_eq!(compressed_slower(&past, Some(8.0)), Some(1.0), "the others were on a busy host");
        assert_eq!(compressed_slower(&past[1..2], Some(0.5)), None);
        assert_eq!(compressed_slower(&[took(true, 0.5, f64::NAN)], None), None);
    }

    proptest! {
        #[test]
        fn it_is_within_bounds_whatever_was_recorded(
            past in prop::collection::vec(
                (any::<Option<f64>>(), any::<bool>(), any::<Option<f64>>()),
                0..30,
            ),
            free_cores: Option<f64>,
        ) {
            let past: Vec<Past> = past
                .into_iter()
                .map(|(free_cores, is_compressed, slower)| Past { free_cores, is_compressed, slower, saved: None })
                .collect();
            if let Some(slower) = compressed_slower(&past, free_cores) {
                prop_assert!((1.0 / (RATIO_MAX * RATIO_MAX)..=RATIO_MAX * RATIO_MAX).contains(&slower), "{slower}");
            }
        }
    }
}
