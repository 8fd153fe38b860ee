//! What the paths of a migration in flight really carry, if that is far from what they should.
//!
//! A link may fall to a lower speed, or others may use it. Its channels then hold back what was given to them: 8
//! channels of a path of 100 Mb/s hold seconds of its traffic, and the VM stands still until they are empty. So such a
//! path gets a share of the route that matches what it carries.

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

/// Watches what each path carries from this host.
#[derive(Debug, Default)]
pub struct SpeedWatch {
    paths: Vec<PathSpeed>,
    last_ms: Option<f64>,
}

#[derive(Debug)]
struct PathSpeed {
    nominal_mbps: Option<u64>,
    assumed_mbps: Option<u64>,
    // A path that came after the last reading has none.
    last_bytes: Option<u64>,
    slow_for: u8,
}

impl PathSpeed {
    fn rate_mbps(&mut self, sent_bytes: u64, elapsed_ms: f64) -> Option<f64> {
        let last_bytes = self.last_bytes.replace(sent_bytes)?;
        Some(sent_bytes.saturating_sub(last_bytes) as f64 * 8.0 / 1_000.0 / elapsed_ms)
    }

    fn is_at_limit(&self, rate_mbps: f64) -> bool {
        self.nominal_mbps.is_some_and(|nominal| rate_mbps >= nominal as f64 * AT_ITS_LIMIT)
    }

    fn judge(&mut self, rate_mbps: f64, others_at_limit: bool) -> Option<u64> {
        let (nominal, assumed) = (self.nominal_mbps?, self.assumed_mbps?);
        if assumed < nominal {
            // A path that so little is expected of has few channels, and each of them sends what it can.
            let recovered = rate_mbps >= nominal as f64 * SLOW;
            return recovered.then(|| self.assume(nominal));
        }
        let is_slow = others_at_limit && rate_mbps >= CARRIES_MBPS && rate_mbps < nominal as f64 * SLOW;
        self.slow_for = if is_slow { self.slow_for + 1 } else { 0 };
        (self.slow_for >= CONFIRMATIONS).then(|| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to nominal")]
            let carried = (rate_mbps.round() as u64).clamp(1, nominal);
            self.assume(carried)
        })
    }

    fn assume(&mut self, mbps: u64) -> u64 {
        self.slow_for = 0;
        self.assumed_mbps = Some(mbps);
        mbps
    }
}

impl SpeedWatch {
    /// One path more, with this speed, where it is known.
    pub fn add(&mut self, nominal_mbps: Option<u64>) {
        let path = PathSpeed { nominal_mbps, assumed_mbps: nominal_mbps, last_bytes: None, slow_for: 0 };
        self.paths.push(path);
    }

    /// Watches a path no more. Those behind it move up.
    pub fn remove(&mut self, path: usize) {
        if path < self.paths.len() {
            self.paths.remove(path);
        }
    }

    /// Nothing is sent from here for now: what was slow counts as before, and the next reading is the first.
    pub fn forget(&mut self) {
        self.last_ms = None;
        for path in &mut self.paths {
            *path = PathSpeed { assumed_mbps: path.nominal_mbps, last_bytes: None, slow_for: 0, ..*path };
        }
    }

    /// What a path is to be taken for.
    pub fn mbps(&self, path: usize) -> Option<u64> {
        self.paths.get(path)?.assumed_mbps
    }

    /// Whether a path is taken for a slower one than it should be.
    pub fn is_slow(&self, path: usize) -> bool {
        self.paths.get(path).is_some_and(|path| path.assumed_mbps < path.nominal_mbps)
    }

    /// Takes the bytes sent on each path so far, and whether it is in use. Returns the paths whose speed is
    /// to be taken for another one from now on, with that speed.
    ///
    /// A slow path is taken for what it carries. It counts as before once it carries so much more that it
    /// must have recovered.
    pub fn record(&mut self, now_ms: f64, sent_bytes: &[u64], in_use: &[bool]) -> Vec<(usize, u64)> {
        let elapsed_ms = now_ms - self.last_ms.replace(now_ms).unwrap_or(now_ms);
        let readings = self.paths.iter_mut().zip(sent_bytes);
        let rates_mbps: Vec<Option<f64>> =
            readings.map(|(path, bytes)| path.rate_mbps(*bytes, elapsed_ms)).collect();
        if elapsed_ms <= 0.0 || sent_bytes.len() != self.paths.len() {
            return vec![];
        }
        let mut both = self.paths.iter().zip(&rates_mbps);
        let others_at_limit = both.any(|(path, rate)| rate.is_some_and(|rate| path.is_at_limit(rate)));
        let mut changed = vec![];
        let each = self.paths.iter_mut().zip(rates_mbps).zip(in_use).enumerate();
        for (index, ((path, rate_mbps), in_use)) in each {
            match rate_mbps.filter(|_| *in_use) {
                None => path.slow_for = 0,
                Some(rate) => {
                    changed.extend(path.judge(rate, others_at_limit).map(|mbps| (index, mbps)));
                }
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch_of(nominal_mbps: &[Option<u64>]) -> SpeedWatch {
        let mut watch = SpeedWatch::default();
        for mbps in nominal_mbps {
            watch.add(*mbps);
        }
        watch
    }

    /// Runs for so many seconds, in which the paths carry these rates.
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
        (watch_of(&[Some(1000), Some(1000)]), (0.0, vec![0, 0]))
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
        let mut watch = watch_of(&[Some(5000), Some(100)]);
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
        let mut watch = watch_of(&[Some(1000), None]);
        assert_eq!(run(&mut watch, &mut (0.0, vec![0, 0]), 10, &[950, 5]), []);
    }

    #[test]
    fn a_path_that_comes_later_is_judged_from_then_on_and_others_are_not_disturbed() {
        let (mut watch, mut state) = start();
        assert_eq!(run(&mut watch, &mut state, 3, &[950, 95]), [(1, 95)]);
        watch.add(Some(1000));
        // Its counter was already running.
        let mut sent = [state.1.clone(), vec![1 << 40]].concat();
        for _ in 0..3 {
            state.0 += READ_EVERY_MS;
            sent = vec![sent[0] + 950 * 125_000, sent[1] + 95 * 125_000, sent[2] + 950 * 125_000];
            assert_eq!(watch.record(state.0, &sent, &[true; 3]), []);
        }
        assert_eq!((watch.mbps(1), watch.is_slow(1), watch.mbps(2)), (Some(95), true, Some(1000)));
        watch.remove(0);
        assert_eq!((watch.mbps(0), watch.mbps(1)), (Some(95), Some(1000)));
        watch.forget();
        assert_eq!(watch.mbps(0), Some(1000));
    }
}
