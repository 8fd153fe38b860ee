//! How long a guest stood still while it was to run, as far as its host can tell.
//!
//! A hypervisor that does not answer mostly holds its big lock: its vCPUs need it as soon as they do I/O, and without
//! KVM for much else. Whether they ran nevertheless shows in the CPU time that they used. So the guest stood still
//! where the hypervisor owed an answer and its vCPUs used next to no CPU. An idle guest looks the same: the figure is
//! the longest time that its clients may have waited.

/// The share of the time between two looks: vCPUs that only wake to wait on use less, a guest that works uses more.
const RAN_SHARE: f64 = 0.02;

/// After this time without a look it is not known when the guest ran.
const LOOKS_APART_MAX_MS: f64 = 1000.0;

/// What is seen of a hypervisor and its vCPUs at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VcpuSample {
    /// When.
    pub now_ms: f64,
    /// Since when the hypervisor has owed an answer; absent while it owes none.
    pub mute_since_ms: Option<f64>,
    /// CPU that the vCPUs have used so far.
    pub vcpu_ms: f64,
}

/// Finds the longest time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StandstillMeter {
    last: Option<VcpuSample>,
    still_since_ms: Option<f64>,
    longest_ms: f64,
}

impl StandstillMeter {
    /// Takes a look into account.
    pub fn record(&mut self, look: VcpuSample) {
        let last = self.last.replace(look);
        let Some((last, mute_since_ms)) =
            last.filter(|last| stood_still(last, &look)).zip(look.mute_since_ms)
        else {
            self.still_since_ms = None;
            return;
        };
        let since_ms = self.still_since_ms.unwrap_or(last.now_ms).max(mute_since_ms);
        self.still_since_ms = Some(since_ms);
        self.longest_ms = self.longest_ms.max(look.now_ms - since_ms);
    }

    /// The longest time that the guest stood still.
    pub fn longest_ms(&self) -> f64 {
        self.longest_ms
    }
}

fn stood_still(last: &VcpuSample, look: &VcpuSample) -> bool {
    let passed_ms = look.now_ms - last.now_ms;
    passed_ms <= LOOKS_APART_MAX_MS && look.vcpu_ms - last.vcpu_ms < passed_ms * RAN_SHARE
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The longest of looks 50 ms apart, each of which says whether the hypervisor is mute and what CPU was used.
    fn longest(looks: &[(bool, f64)]) -> f64 {
        let mut meter = StandstillMeter::default();
        let (mut mute_since_ms, mut vcpu_ms, mut now_ms) = (None, 0.0, 0.0);
        for (is_mute, used_ms) in looks {
            mute_since_ms = is_mute.then(|| mute_since_ms.unwrap_or(now_ms - 10.0));
            vcpu_ms += used_ms;
            meter.record(VcpuSample { now_ms, mute_since_ms, vcpu_ms });
            now_ms += 50.0;
        }
        meter.longest_ms()
    }

    #[track_caller]
    fn assert_is(measured_ms: f64, expected_ms: f64) {
        assert!((measured_ms - expected_ms).abs() < 1e-9, "{measured_ms} ms, not {expected_ms}");
    }

    #[test]
    fn a_guest_stands_still_while_its_hypervisor_is_mute_and_it_uses_no_cpu() {
        assert_is(longest(&[(false, 40.0), (true, 0.0), (true, 0.1), (true, 0.0), (false, 40.0)]), 110.0);
    }

    #[test]
    fn one_that_runs_or_whose_hypervisor_answers_does_not() {
        assert_is(longest(&[(true, 40.0); 9]), 0.0);
        assert_is(longest(&[(false, 0.0); 9]), 0.0);
    }

    #[test]
    fn of_two_times_the_longer_one_counts() {
        let (still, runs) = ((true, 0.0), (true, 20.0));
        assert_is(longest(&[runs, still, runs, still, still, still, runs, still]), 150.0);
    }

    #[test]
    fn an_answer_begins_anew() {
        let mut meter = StandstillMeter::default();
        let looks = [(0.0, None), (100.0, Some(20.0)), (200.0, Some(20.0)), (300.0, Some(270.0))];
        for (now_ms, mute_since_ms) in looks {
            meter.record(VcpuSample { now_ms, mute_since_ms, vcpu_ms: 0.0 });
        }
        assert_is(meter.longest_ms(), 180.0);
    }

    #[test]
    fn what_nobody_saw_does_not_count() {
        let mut meter = StandstillMeter::default();
        for now_ms in [0.0, 50.0, 30_000.0, 30_050.0] {
            meter.record(VcpuSample { now_ms, mute_since_ms: Some(10.0), vcpu_ms: 0.0 });
        }
        assert_is(meter.longest_ms(), 50.0);
    }
}
