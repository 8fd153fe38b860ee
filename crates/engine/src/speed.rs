//! What the paths of a migration in flight really carry, where that is far from what they should.
//!
//! A link may fall to a lower speed, or others may use it. Its channels then hold back what was given to
//! them: 8 channels of a path of 100 Mb/s hold seconds of it, and the VM stands still until they are
//! empty. So such a path gets a share of the route that fits what it carries.

/// The time over which a path's rate is taken, in ms.
pub const READ_EVERY_MS: f64 = 1_000.0;

/// A path that carries less than this part of its speed is slow; more than by chance: with old machine
/// types a path with few channels carries half of its speed.
const SLOW: f64 = 0.3;

/// A path that carries this part of its speed is at its limit, so that the slow one is not slow for want
/// of memory to send.
const AT_ITS_LIMIT: f64 = 0.8;

/// A path that carries less, in Mb/s, has no channel: only hellos and the like.
const CARRIES_MBPS: f64 = 1.0;

/// Readings in a row that must say the same.
const CONFIRMATIONS: u8 = 2;

/// Watches what each path carries.
#[derive(Debug)]
pub struct SpeedWatch {
    nominal_mbps: Vec<Option<u64>>,
    assumed_mbps: Vec<Option<u64>>,
    last: Option<(f64, Vec<u64>)>,
    slow_for: Vec<u8>,
}

impl SpeedWatch {
    /// Paths with these speeds, where they are known.
    pub fn new(nominal_mbps: Vec<Option<u64>>) -> Self {
        let slow_for = vec![0; nominal_mbps.len()];
        Self { assumed_mbps: nominal_mbps.clone(), nominal_mbps, last: None, slow_for }
    }

    /// Takes the bytes sent on each path so far, and whether it is in use. Returns the paths whose speed is to be taken for another
    /// one from now on, with that speed.
    ///
    /// A slow path is taken for what it carries. It counts as before once it carries so much more that it
    /// must have recovered.
    pub fn record(&mut self, now_ms: f64, sent_bytes: &[u64], in_use: &[bool]) -> Vec<(usize, u64)> {
        let last = self.last.replace((now_ms, sent_bytes.to_vec()));
        let Some((last_ms, last_bytes)) = last else { return vec![] };
        let elapsed_ms = now_ms - last_ms;
        if elapsed_ms <= 0.0 || sent_bytes.len() != self.nominal_mbps.len() {
            return vec![];
        }
        let rates_mbps: Vec<f64> = sent_bytes
            .iter()
            .zip(&last_bytes)
            .map(|(now, last)| now.saturating_sub(*last) as f64 * 8.0 / 1_000.0 / elapsed_ms)
            .collect();
        let others_at_limit = self.any_at_limit(&rates_mbps);
        let mut changed = vec![];
        for (path, (rate_mbps, in_use)) in rates_mbps.iter().zip(in_use).enumerate() {
            if !in_use {
                self.slow_for[path] = 0;
            } else if let Some(mbps) = self.judge(path, *rate_mbps, others_at_limit) {
                changed.push((path, mbps));
            }
        }
        changed
    }

    fn any_at_limit(&self, rates_mbps: &[f64]) -> bool {
        let mut parts = rates_mbps.iter().zip(&self.nominal_mbps);
        parts.any(|(rate, nominal)| nominal.is_some_and(|nominal| *rate >= nominal as f64 * AT_ITS_LIMIT))
    }

    fn judge(&mut self, path: usize, rate_mbps: f64, others_at_limit: bool) -> Option<u64> {
        let (nominal, assumed) = (self.nominal_mbps[path]?, self.assumed_mbps[path]?);
        if assumed < nominal {
            // A path of which so little is expected has few channels, and each of them sends what it can.
            let recovered = rate_mbps >= nominal as f64 * SLOW;
            return recovered.then(|| self.assume(path, nominal));
        }
        let is_slow = others_at_limit && rate_mbps >= CARRIES_MBPS && rate_mbps < nominal as f64 * SLOW;
        self.slow_for[path] = if is_slow { self.slow_for[path] + 1 } else { 0 };
        (self.slow_for[path] >= CONFIRMATIONS).then(|| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to nominal")]
            let carried = (rate_mbps.round() as u64).clamp(1, nominal);
            self.assume(path, carried)
        })
    }

    fn assume(&mut self, path: usize, mbps: u64) -> u64 {
        self.slow_for[path] = 0;
        self.assumed_mbps[path] = Some(mbps);
        mbps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many seconds in which the paths carry these rates.
    fn run(
        watch: &mut SpeedWatch,
        state: &mut (f64, Vec<u64>),
        seconds: u32,
        mbps: &[u64],
    ) -> Vec<(usize, u64)> {
        let mut said = vec![];
        for _ in 0..seconds {
            said.extend(watch.record(state.0, &state.1, &[true, true]));
            state.0 += READ_EVERY_MS;
            state.1 = state.1.iter().zip(mbps).map(|(bytes, mbps)| bytes + mbps * 125_000).collect();
        }
        said.extend(watch.record(state.0, &state.1, &[true, true]));
        said
    }

    fn start() -> (SpeedWatch, (f64, Vec<u64>)) {
        (SpeedWatch::new(vec![Some(1000), Some(1000)]), (0.0, vec![0, 0]))
    }

    #[test]
    fn a_path_that_became_slow_is_taken_for_what_it_carries_and_recovers() {
        let (mut watch, mut state) = start();
        assert_eq!(run(&mut watch, &mut state, 5, &[950, 950]), []);
        assert_eq!(run(&mut watch, &mut state, 3, &[950, 95]), [(1, 95)]);
        assert_eq!(run(&mut watch, &mut state, 3, &[950, 90]), []);
        assert_eq!(run(&mut watch, &mut state, 2, &[950, 900]), [(1, 1000)]);
    }

    #[test]
    fn little_to_send_is_not_taken_for_slow_paths() {
        let (mut watch, mut state) = start();
        assert_eq!(run(&mut watch, &mut state, 10, &[100, 20]), []);
        assert_eq!(run(&mut watch, &mut state, 10, &[0, 0]), []);
    }

    #[test]
    fn a_path_with_few_channels_is_not_taken_for_slow() {
        let (mut watch, mut state) = start();
        assert_eq!(run(&mut watch, &mut state, 10, &[950, 500]), []);
    }

    #[test]
    fn a_path_that_is_out_is_not_judged() {
        let (mut watch, mut sent) = start();
        for second in 0..10 {
            let changed = watch.record(f64::from(second) * READ_EVERY_MS, &sent.1, &[true, false]);
            assert_eq!(changed, []);
            sent.1 = vec![sent.1[0] + 950 * 125_000, sent.1[1] + 125_000];
        }
    }

    #[test]
    fn a_path_without_channels_is_not_taken_for_slow() {
        let mut watch = SpeedWatch::new(vec![Some(5000), Some(100)]);
        let mut sent = vec![0_u64, 0];
        for second in 0..10 {
            assert_eq!(watch.record(f64::from(second) * READ_EVERY_MS, &sent, &[true, true]), []);
            sent = vec![sent[0] + 4900 * 125_000, sent[1] + 2_500];
        }
    }

    #[test]
    fn one_slow_second_says_nothing() {
        let (mut watch, mut state) = start();
        for _ in 0..5 {
            assert_eq!(run(&mut watch, &mut state, 1, &[950, 95]), []);
            assert_eq!(run(&mut watch, &mut state, 2, &[950, 950]), []);
        }
    }

    #[test]
    fn paths_of_unknown_speed_are_left_alone() {
        let mut watch = SpeedWatch::new(vec![Some(1000), None]);
        assert_eq!(run(&mut watch, &mut (0.0, vec![0, 0]), 10, &[950, 5]), []);
    }
}
