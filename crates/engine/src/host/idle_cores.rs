//! How many threads may pack, so that they take idle cores only.
//!
//! What nobody else uses of the cores is what is idle plus what packing uses itself. That does not depend on how many
//! threads pack, so following it cannot oscillate. If others want a core, they have it after one sample; packing takes
//! it again once two samples in a row show that it is idle. One thread stays: its priority yields to every other
//! thread of its group at once, and it uses the moments that no sample shows. Others that share the cores through a
//! hypervisor below do not see that priority: if they want the cores, no thread stays.
//!
//! If the kernel divides the cores among groups of threads first, such as cgroups, that priority means nothing to VMs
//! in another group, and what packing uses may be what they want. There, packing leaves a part of the cores idle:
//! while some are idle, hardly anybody waits, as far as a sample shows. If none is idle, nobody packs.

/// Time between two samples, in ms. Others that begin to want cores in the middle of one are seen in full by
/// the next: within twice this time.
pub const SAMPLE_EVERY_MS: u64 = 90;

/// Less than this of a core is no idle core: the kernel counts in hundredths of a second.
const LEAST: f64 = 0.1;

/// Idle time is spread over the cores, and a thread is on one at a time. So there may be more threads than full
/// cores of idle time, by so many.
const SPREAD: f64 = 1.0;

/// A thread more needs so much more idle time than one that is there already, in cores,
const MARGIN: f64 = 0.25;
/// in so many samples in a row.
const PATIENCE: u32 = 2;

/// Cores that stay idle where packing does not give way: more than noise is taken for,
const RESERVE: f64 = 0.25;
/// and such a share of all, as a host on which all is wanted is never wholly busy.
const RESERVE_SHARE: f64 = 0.04;
/// If less than this part of the reserve is idle, others want everything.
const FULL_BELOW: f64 = 0.4;

/// Somebody waited for a core. It is only a hint: those who wait are before those who pack in any case,
/// and the migration's own threads wait for each other where cores are few.
const AWAITED_WEIGHT: f64 = 0.2;

/// So much of a core is stolen now and then from any host that is a virtual machine itself.
const THEFT: f64 = 0.25;

/// How the cores on which packing may run were used over some time. In cores: CPU seconds per second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CoresSample {
    /// All of them.
    pub cores: f64,
    /// Used by nobody.
    pub idle: f64,
    /// Used by packing.
    pub packing: f64,
    /// Given to others by a hypervisor below this host.
    pub stolen: f64,
    /// Share of the time in which others than packing waited for a core, 0 to 1; 0 where it is not known.
    pub awaited: f64,
}

impl CoresSample {
    /// What would be idle if nobody packed.
    fn free(self) -> f64 {
        self.idle + self.packing - self.stolen - AWAITED_WEIGHT * self.awaited
    }

    /// What packing leaves idle where it does not give way.
    fn reserve(self) -> f64 {
        RESERVE.max(RESERVE_SHARE * self.cores)
    }

    /// Threads that may compress, and those that surely may, where each leaves its core to whoever wants it.
    fn giving_way(self) -> (usize, usize) {
        let least = usize::from(self.stolen < THEFT);
        let threads = |free: f64| if free < LEAST { least } else { whole((free + SPREAD).ceil()).max(least) };
        (threads(self.free()), threads(self.free() - MARGIN))
    }

    /// The same where it does not: each has a core that is idle otherwise.
    fn not_giving_way(self) -> (usize, usize) {
        // Nobody knows how much of what compressing takes others want.
        if self.idle < FULL_BELOW * self.reserve() {
            return (0, 0);
        }
        let free = self.free() - self.reserve();
        (whole(free), whole(free - self.reserve()))
    }
}

/// How many threads may pack.
#[derive(Debug, Clone)]
pub struct Allowance {
    most: usize,
    gives_way: bool,
    allowed: usize,
    // Samples in a row by which there could be more, and the least number of them.
    rising: u32,
    rising_to: usize,
    // As of the last sample. The kernel counts the theft of a moment as a hundredth of a second, which is a tenth of a
    // core in one sample: so two samples count.
    stolen: f64,
}

impl Allowance {
    /// Up to `most`. `gives_way` says whether a thread that packs leaves its core at once to whoever is to have it: then
    /// all may pack until there is a sample, otherwise none.
    pub fn new(most: usize, gives_way: bool) -> Self {
        let allowed = if gives_way { most } else { 0 };
        Self { most, gives_way, allowed, rising: 0, rising_to: allowed, stolen: 0.0 }
    }

    /// Threads that may pack now.
    pub fn allowed(&self) -> usize {
        self.allowed
    }

    /// Takes the next sample.
    pub fn follow(&mut self, sample: CoresSample) -> usize {
        let before = std::mem::replace(&mut self.stolen, sample.stolen);
        let sample = CoresSample { stolen: f64::midpoint(before, sample.stolen), ..sample };
        let (now, surely) = if self.gives_way { sample.giving_way() } else { sample.not_giving_way() };
        let (now, surely) = (now.min(self.most), surely.min(self.most));
        if now < self.allowed {
            self.allowed = now;
        }
        if surely <= self.allowed {
            self.rising = 0;
            return self.allowed;
        }
        self.rising_to = if self.rising == 0 { surely } else { self.rising_to.min(surely) };
        self.rising += 1;
        if self.rising >= PATIENCE {
            self.allowed = self.rising_to;
            self.rising = 0;
        }
        self.allowed
    }
}

/// This migration's part of the `threads` that may pack for all `all` migrations of a host: it is the `rank`-th of
/// them, from 0.
pub fn share_of(threads: usize, rank: usize, all: usize) -> usize {
    threads.saturating_add(all.saturating_sub(rank.saturating_add(1))) / all.max(1)
}

/// The number of whole cores; 0 for a negative number and for what is not a number.
fn whole(cores: f64) -> usize {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates at 0")]
    let whole = cores as usize;
    whole
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A host on which others use `wanted` of its cores, and those that pack what is left of them.
    fn sample(cores: usize, wanted: f64, packing: usize, noise: f64) -> CoresSample {
        let free = (cores as f64 - wanted).max(0.0);
        let packing = (packing as f64).min(free);
        // Work beyond what the cores can do waits.
        let awaited = (wanted - cores as f64).clamp(0.0, 1.0);
        let idle = (free - packing + noise).max(0.0);
        CoresSample { cores: cores as f64, idle, packing, stolen: 0.0, awaited }
    }

    fn run(allowance: &mut Allowance, cores: usize, wanted: f64, noises: &[f64]) -> Vec<usize> {
        let follow = |noise: &f64| allowance.follow(sample(cores, wanted, allowance.allowed(), *noise));
        noises.iter().map(follow).collect()
    }

    proptest! {
        #[test]
        fn cores_that_others_want_are_theirs_within_200_ms(cores in 1..64_usize, from in 0.0..1.0_f64, begins in 0.0..1.0_f64) {
            let mut allowance = Allowance::new(cores, true);
            run(&mut allowance, cores, cores as f64 * from, &[0.0; 20]);
            // They begin in the middle of a sample, and want all cores from then on.
            let wanted = cores as f64 * (from + (1.0 - from) * (1.0 - begins));
            allowance.follow(sample(cores, wanted, allowance.allowed(), 0.0));
            let all = sample(cores, cores as f64, allowance.allowed(), 0.0);
            prop_assert_eq!(allowance.follow(all), 1, "which gives way");
            prop_assert_eq!(allowance.follow(CoresSample { stolen: cores as f64, ..all }), 0);
            prop_assert!(2 * SAMPLE_EVERY_MS < 200);
        }

        #[test]
        fn who_does_not_give_way_leaves_the_cores_to_others_within_200_ms(cores in 1..64_usize, from in 0.0..1.0_f64) {
            let mut allowance = Allowance::new(cores, false);
            run(&mut allowance, cores, cores as f64 * from, &[0.0; 20]);
            // They want all cores, and packers nevertheless get a part, since the kernel divides them.
            let threads = allowance.allowed() as f64;
            let packing = threads * cores as f64 / (threads + cores as f64);
            // On many cores some moment is idle in any case.
            let idle = 0.012 * cores as f64;
            let shared = CoresSample { cores: cores as f64, idle, packing, ..CoresSample::default() };
            prop_assert_eq!(allowance.follow(shared), 0);
        }

        #[test]
        fn who_does_not_give_way_leaves_a_part_of_a_core_idle(
            cores in 1..64_usize,
            part in 0.0..1.1_f64,
            noises in prop::collection::vec(-0.5..0.5_f64, 200),
        ) {
            let wanted = cores as f64 * part;
            let reserve = CoresSample { cores: cores as f64, ..CoresSample::default() }.reserve();
            let noises: Vec<f64> = noises.into_iter().map(|noise| noise * reserve).collect();
            let allowed = run(&mut Allowance::new(cores, false), cores, wanted, &noises);
            let free = (cores as f64 - wanted).max(0.0);
            let left_idle = |allowed: &usize| *allowed == 0 || *allowed as f64 <= free - reserve / 2.0;
            prop_assert!(allowed.iter().all(left_idle), "{allowed:?} of {free}");
            prop_assert!(*allowed.last().unwrap() as f64 > free - 1.0 - 2.5 * reserve, "{allowed:?} of {free}");
            prop_assert!(allowed.is_sorted(), "it does not swing: {allowed:?}");
        }

        #[test]
        fn several_that_do_not_give_way_share_what_is_idle_and_do_not_swing(
            cores in 1..64_usize,
            part in 0.0..1.1_f64,
            packers in 2..8_usize,
            noises in prop::collection::vec(-0.5..0.5_f64, 100),
        ) {
            let wanted = cores as f64 * part;
            let reserve = CoresSample { cores: cores as f64, ..CoresSample::default() }.reserve();
            let free = (cores as f64 - wanted).max(0.0);
            let mut all = vec![Allowance::new(cores, false); packers];
            let mut threads = vec![0; packers];
            let mut before = 0;
            for noise in noises {
                let seen = sample(cores, wanted, before, noise * reserve);
                for (rank, (threads, allowance)) in threads.iter_mut().zip(&mut all).enumerate() {
                    *threads = share_of(allowance.follow(seen), rank, packers);
                }
                let packing = threads.iter().sum();
                prop_assert!(packing >= before, "{packing} after {before}");
                prop_assert!(packing == 0 || packing as f64 <= free - reserve / 2.0, "{packing} of {free}");
                before = packing;
            }
            prop_assert!(before as f64 > free - 1.0 - 2.5 * reserve, "{before} of {free}");
        }

        #[test]
        fn what_is_idle_is_used_within_a_second_and_little_more(cores in 1..64_usize, part in 0.0..1.0_f64) {
            let mut allowance = Allowance::new(cores, true);
            run(&mut allowance, cores, cores as f64, &[0.0; 3]);
            let wanted = cores as f64 * part;
            let allowed = *run(&mut allowance, cores, wanted, &[0.0; 11]).last().unwrap() as f64;
            let free = cores as f64 - wanted;
            prop_assert!(allowed >= free.floor() - 1.0, "{allowed} of {free}");
            prop_assert!(allowed <= free + 2.0, "{allowed} of {free}");
            prop_assert!(free < LEAST + MARGIN || allowed > 0.0);
        }

        #[test]
        fn a_steady_host_has_a_steady_number(
            cores in 1..64_usize,
            part in 0.0..1.1_f64,
            noises in prop::collection::vec(-0.12..0.12_f64, 200),
        ) {
            let allowed = run(&mut Allowance::new(cores, true), cores, cores as f64 * part, &noises);
            let rises = allowed.windows(2).filter(|pair| pair[0] < pair[1]).count();
            prop_assert!(rises <= 1, "{allowed:?}");
        }

        #[test]
        fn no_sample_breaks_it(
            samples in prop::collection::vec(
                [any::<f64>(); 5].prop_map(|[cores, idle, packing, stolen, awaited]| {
                    CoresSample { cores, idle, packing, stolen, awaited }
                }),
                1..50,
            ),
            most in 0..100_usize,
            gives_way in any::<bool>(),
        ) {
            let mut allowance = Allowance::new(most, gives_way);
            for sample in samples {
                prop_assert!(allowance.follow(sample) <= most);
            }
        }
    }

    #[test]
    fn what_is_stolen_or_awaited_is_not_idle() {
        let busy = CoresSample { cores: 4.0, idle: 0.5, ..CoresSample::default() };
        let allowed = |before, sample| {
            let mut allowance = Allowance::new(4, true);
            allowance.follow(before);
            allowance.follow(sample)
        };
        assert_eq!(allowed(busy, busy), 2);
        let stolen = CoresSample { stolen: 0.5, ..busy };
        assert_eq!(allowed(stolen, stolen), 0);
        let awaited = CoresSample { idle: 0.2, awaited: 1.0, ..busy };
        assert_eq!(allowed(awaited, awaited), 1);
        let full = CoresSample::default();
        assert_eq!(allowed(full, CoresSample { stolen: 0.22, ..full }), 1, "a moment is no theft");
    }
}
