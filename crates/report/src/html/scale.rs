//! From values to places on an axis.

/// About how many ticks an axis has.
const TICKS: f64 = 4.0;
/// Most ticks an axis has, whatever its numbers.
const TICKS_MAX: usize = 12;

/// An axis that begins at 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scale {
    end: f64,
    step: f64,
}

impl Scale {
    /// Up to the largest of `values`, or to 1 if none is positive.
    pub(super) fn up_to(values: impl IntoIterator<Item = f64>) -> Self {
        let largest = values.into_iter().filter(|value| value.is_finite()).fold(0.0, f64::max);
        let end = if largest > 0.0 { largest } else { 1.0 };
        Self { end, step: round_step(end / TICKS) }
    }

    /// The largest value.
    pub(super) fn end(self) -> f64 {
        self.end
    }

    /// Place of `value`, 0 to 1. What lies outside is moved to the edge.
    pub(super) fn part(self, value: f64) -> f64 {
        let part = (value / self.end).clamp(0.0, 1.0);
        if part.is_nan() { 0.0 } else { part }
    }

    /// Place of `value` as an SVG length.
    pub(super) fn percent(self, value: f64) -> String {
        percent(self.part(value))
    }

    /// Round values, from 0.
    pub(super) fn ticks(self) -> impl Iterator<Item = f64> {
        // A hair beyond the end, because 3 × 0.1 is more than 0.3.
        let end = self.end * (1.0 + 1e-9);
        (0_u32..)
            .map(move |index| f64::from(index) * self.step)
            .take_while(move |tick| *tick <= end)
            .take(TICKS_MAX)
    }

    /// A tick's value divided by `unit`, with as many decimals as the ticks need.
    pub(super) fn tick_label(self, tick: f64, unit: f64) -> String {
        let step = self.step / unit;
        let decimals = (0..3).find(|&decimals| is_whole(step * 10_f64.powi(decimals))).unwrap_or(3);
        format!("{:.*}", usize::try_from(decimals).unwrap_or(0), tick / unit)
    }
}

/// A part of the width as an SVG length.
pub(super) fn percent(part: f64) -> String {
    format!("{:.2}%", part * 100.0)
}

fn is_whole(number: f64) -> bool {
    (number - number.round()).abs() < 1e-6 && number.round() >= 1.0
}

/// The next of 1, 2, 2.5 and 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    let power = 10_f64.powf(step.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|rounded| *rounded >= step * (1.0 - 1e-9))
        .unwrap_or(step)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(end: f64, unit: f64) -> Vec<String> {
        let scale = Scale::up_to([end]);
        scale.ticks().map(|tick| scale.tick_label(tick, unit)).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(2.0, 1.0), ["0.0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(labels(13_900.0, 1e3), ["0", "5", "10"]);
        assert_eq!(labels(41.0, 1.0), ["0", "20", "40"]);
        assert_eq!(labels(10.0, 1.0), ["0.0", "2.5", "5.0", "7.5", "10.0"]);
    }

    #[test]
    fn odd_values_stay_on_the_axis() {
        let scale = Scale::up_to([f64::NAN, -1.0]);
        assert!((scale.end() - 1.0).abs() < f64::EPSILON);
        assert_eq!(scale.percent(f64::NAN), "0.00%");
        assert_eq!(scale.percent(9.0), "100.00%");
        assert_eq!(scale.percent(-9.0), "0.00%");
    }

    proptest! {
        #[test]
        fn there_are_a_few_ticks_on_every_axis(end in 1e-6..1e12_f64) {
            let ticks = Scale::up_to([end]).ticks().count();
            prop_assert!((2..=6).contains(&ticks), "{ticks}");
        }
    }
}
