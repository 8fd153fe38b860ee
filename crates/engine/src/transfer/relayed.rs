//! What a relay will make of a transfer, by what memory holds, what the paths carry and which cores are idle;
//! and whether that pays.
//!
//! A relay sends what the wire takes, and packs what the cores have time for. Of so many bytes of memory per
//! second, those that the wire cannot take as they are must be saved:
//!
//! ```text
//! memory − packed × (1 − left) = wire
//! memory × passing + packed × packing = idle cores of the source
//! memory × passing + packed × unpacking = idle cores of the target
//! packed ≤ memory × share that shrinks
//! packed × packing ≤ cores on which the source may pack
//! ```
//!
//! If the transfer is encrypted, each byte on the wire is sealed and opened as well. Memory that is not packed then
//! goes through a relay, too: so the cost of passing it on is no reason against packing, as both pay it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::host::facts::HostFacts;
use crate::paths::path::Path;

/// Core-seconds that a byte takes on either host to get through QEMU and a relay that packs nothing: twice what was
/// measured of plain reading and writing, 2 for each GiB. docs/decisions/0045, says where this and the next two
/// are from.
const PASSING_S: f64 = 2.0 / (1_u64 << 30) as f64;

/// Core-seconds to pack a byte, with all that is tried and done in vain: 5 for each 1000 MB.
const PACKING_S: f64 = 5e-9;

/// Core-seconds to unpack one.
const UNPACKING_S: f64 = 1e-9;

/// Core-seconds to seal a byte that goes out, and to open it; 0.16 and 0.14 for each GiB, see docs/decisions/0036.
const SEALING_S: f64 = 0.16 / (1_u64 << 30) as f64;
const OPENING_S: f64 = 0.14 / (1_u64 << 30) as f64;

/// Memory that is sent in more than this share of the time is not worth a relay, where nobody asked for one: what
/// was predicted may be wrong by as much.
const PAYS_BELOW: f64 = 0.9;

/// Where less than this of the bytes could be saved, a relay costs more than it brings: the time is about that of
/// memory as it is, and the CPU of both hosts twice as much (`bench/compression-random.md`).
const LEAST_SAVED: f64 = 0.08;

/// And where it carries less than this more than the paths.
const LEAST_GAIN: f64 = 0.03;

/// What a sample of memory shows to codecs, zeros left out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Compressible {
    /// Share of it that shrinks; 0 to 1.
    pub share: f64,
    /// What is left of that when it is packed; 0 to 1.
    pub left: f64,
}

impl Compressible {
    /// For memory that could not be sampled, or for which only changes are sent: as if it were all text.
    const UNKNOWN: Self = Self { share: 1.0, left: 1.0 / 3.0 };

    /// Within its ranges, whoever said it.
    fn bounded(self) -> Self {
        let bounded = |value: f64| if value.is_finite() { value.clamp(0.0, 1.0) } else { 1.0 };
        Self { share: bounded(self.share), left: bounded(self.left) }
    }

    /// Whether packing saves anything worth having.
    pub fn shrinks(self) -> bool {
        self.bounded().saved() >= LEAST_SAVED
    }

    /// Share of the bytes that are left when all of it is packed.
    pub(crate) fn wire_share(self) -> f64 {
        1.0 - self.bounded().saved()
    }

    /// Share of the bytes that packing all of it saves.
    fn saved(self) -> f64 {
        self.share * (1.0 - self.left)
    }
}

/// What a relay between two hosts has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RelayMeans {
    /// Whether compression was asked for by its name: then it need not bring much.
    pub is_asked_for: bool,
    /// Whether it encrypts, and so is there in any case.
    pub is_encrypted: bool,
    /// What the paths carry, in Mb/s.
    pub wire_mbps: f64,
    /// Cores of the source: the idle ones, or those that its VMs leave where compression was asked for.
    pub source_cores: f64,
    /// Cores of the target, likewise.
    pub target_cores: f64,
    /// The source's cores on which it may pack, by its configuration.
    pub packing_cores: f64,
    /// What earlier transfers between the two have saved, in Mb/s; absent where cores never were the limit.
    pub saved_mbps: Option<f64>,
    /// How much longer than predicted compressed ones took, beside others; absent where none was.
    #[serde(default)]
    pub compressed_slower: Option<f64>,
}

/// Whether a transfer is compressed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// Memory goes in this share of the time that it would take as it is, and takes this share of the bytes; below 1.
    Compressed {
        /// That share.
        wire_share: f64,
    },
    /// The relay would be slower than the paths, or hardly faster.
    Outruns,
    /// Hardly anything of the memory shrinks.
    NothingShrinks,
    /// It would bring too little for nobody having asked for it.
    TooLittle,
}

impl RelayMeans {
    /// What two hosts have, over these paths, before anything was learnt of earlier transfers; none where it is not known
    /// what the paths carry. A limit of either host makes the paths as slow as it is: one that is lifted while the transfer
    /// goes on leaves a relay that is no faster than it can copy.
    pub fn of<'a>(
        source: &HostFacts,
        target: &HostFacts,
        paths: impl Iterator<Item = &'a Path>,
        is_encrypted: bool,
        is_asked_for: bool,
    ) -> Option<Self> {
        let speeds: Option<Vec<u64>> = paths.map(|path| path.speed_mbps).collect();
        let speed_mbps = speeds?.into_iter().fold(0, u64::saturating_add);
        let limit_mbps = source.limits_to(target).all_mbps;
        let wire_mbps = limit_mbps.into_iter().chain([speed_mbps]).min().filter(|mbps| *mbps > 0)? as f64;
        let cores = |host: &HostFacts| {
            let all = f64::from(host.cores.max(1));
            // An operator who asks for compression wants it beside a compiler too: compressing takes no more than is
            // idle. But passing the stream on does, and a VM that needs the cores would pay for it.
            // Without such a request, cores that nobody has counted yet promise nothing.
            let (left, unknown) =
                if is_asked_for { (Some(all - host.vm_cores), all) } else { (host.idle_cores, 0.0) };
            left.filter(|left| left.is_finite()).map_or(unknown, |left| left.clamp(0.0, all))
        };
        let (source_cores, target_cores) = (cores(source), cores(target));
        let packing_cores = f64::from(source.packing_cores.unwrap_or(source.cores));
        Some(Self {
            is_asked_for,
            is_encrypted,
            wire_mbps,
            source_cores,
            target_cores,
            packing_cores,
            saved_mbps: None,
            compressed_slower: None,
        })
    }

    /// Whether memory like this is to be compressed. Where it could not be looked at, or may go as what changes of it,
    /// only who asks for it has it compressed.
    pub fn verdict(self, memory: Option<Compressible>) -> Verdict {
        let memory = match memory {
            Some(memory) => memory.bounded(),
            None if self.is_asked_for => Compressible::UNKNOWN,
            None => return Verdict::TooLittle,
        };
        let gain = self.carried(memory) / self.carried_as_it_is();
        let wire_share = 1.0 / gain.min(self.carried_before()).max(1.0);
        // Not faster than predicted, though others may have been by chance.
        let slower =
            self.compressed_slower.filter(|slower| slower.is_finite()).map_or(1.0, |slower| slower.max(1.0));
        match () {
            () if !memory.shrinks() => Verdict::NothingShrinks,
            // Nor where that is no number.
            () if !(1.0 + LEAST_GAIN..).contains(&gain) => Verdict::Outruns,
            () if !self.is_asked_for && wire_share * slower > PAYS_BELOW => Verdict::TooLittle,
            () => Verdict::Compressed { wire_share },
        }
    }

    /// Memory that a relay carries while the wire would carry one byte of it as it is.
    fn carried(self, memory: Compressible) -> f64 {
        let wire = self.wire_mbps * 125_000.0;
        let saved_of_packed = 1.0 - memory.left;
        let if_all_is_packed = 1.0 / (1.0 - memory.saved()).max(f64::MIN_POSITIVE);
        let by_cores = |cores: f64, packing_s: f64, encryption_s: f64| {
            let alone = cores / ((PASSING_S + encryption_s) * wire);
            // How much must be compressed for each byte above what the wire takes.
            let packed = packing_s / saved_of_packed.max(f64::MIN_POSITIVE);
            if alone < 1.0 { alone } else { (cores / wire - encryption_s + packed) / (PASSING_S + packed) }
        };
        let (sealing_s, opening_s) = self.encryption_s();
        let source = by_cores(self.source_cores, PACKING_S, sealing_s);
        let target = by_cores(self.target_cores, UNPACKING_S, opening_s);
        let by_packing = 1.0 + self.packing_cores / PACKING_S * saved_of_packed / wire;
        if_all_is_packed.min(source).min(target).min(by_packing)
    }

    /// The same of memory that is not packed: 1, or less where encryption is more than the cores can do.
    fn carried_as_it_is(self) -> f64 {
        if !self.is_encrypted {
            return 1.0;
        }
        let by_cores = |cores: f64, encryption_s: f64| {
            let alone = cores / ((PASSING_S + encryption_s) * self.wire_mbps * 125_000.0);
            // Whoever has none: the relay takes them from others then, packing or not.
            alone.clamp(f64::MIN_POSITIVE, 1.0)
        };
        let (sealing_s, opening_s) = self.encryption_s();
        by_cores(self.source_cores, sealing_s).min(by_cores(self.target_cores, opening_s))
    }

    /// Core-seconds for a byte on the wire, of the source and of the target.
    fn encryption_s(self) -> (f64, f64) {
        if self.is_encrypted { (SEALING_S, OPENING_S) } else { (0.0, 0.0) }
    }

    /// The same, by what cores have saved before.
    fn carried_before(self) -> f64 {
        let saved = self.saved_mbps.filter(|mbps| mbps.is_finite());
        saved.map_or(f64::INFINITY, |saved_mbps| 1.0 + saved_mbps / self.wire_mbps)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;

    const TEXT: Compressible = Compressible { share: 1.0, left: 0.33 };
    const OS_LIKE: Compressible = Compressible { share: 0.5, left: 0.33 };
    const RANDOM: Compressible = Compressible { share: 0.0, left: 1.0 };

    const ASKED_FOR: bool = true;
    const UNASKED: bool = false;

    fn means(wire_mbps: f64, cores: f64) -> RelayMeans {
        RelayMeans {
            is_asked_for: true,
            is_encrypted: false,
            wire_mbps,
            source_cores: cores,
            target_cores: cores,
            packing_cores: f64::INFINITY,
            saved_mbps: None,
            compressed_slower: None,
        }
    }

    fn host(cores: u32, idle_cores: Option<f64>, vm_cores: f64) -> HostFacts {
        HostFacts { cores, idle_cores, vm_cores, ..fixtures::host("a") }
    }

    /// Over two paths of 1 Gb/s.
    fn between(source: &HostFacts, target: &HostFacts, is_asked_for: bool) -> RelayMeans {
        let path = Path { speed_mbps: Some(1_000), ..fixtures::path("e0") };
        RelayMeans::of(source, target, [&path, &path].into_iter(), false, is_asked_for).unwrap()
    }

    fn unasked(means: RelayMeans) -> RelayMeans {
        RelayMeans { is_asked_for: false, ..means }
    }

    fn share(means: RelayMeans, memory: Compressible) -> f64 {
        match means.verdict(Some(memory)) {
            Verdict::Compressed { wire_share } => wire_share,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn with_cores_enough_all_that_shrinks_is_packed() {
        assert!((share(means(1_000.0, 8.0), TEXT) - 0.33).abs() < 1e-9);
        assert!((share(means(1_000.0, 8.0), OS_LIKE) - 0.665).abs() < 1e-9);
    }

    #[test]
    fn with_few_cores_what_they_save_adds_to_the_wire() {
        let half_a_core = share(means(1_000.0, 0.5), TEXT);
        assert!((0.75..0.85).contains(&half_a_core), "{half_a_core}");
        assert!(share(means(1_000.0, 1.0), TEXT) < half_a_core);
        let unpacking = RelayMeans { target_cores: 0.4, ..means(1_000.0, 8.0) };
        assert!(share(unpacking, TEXT) > 0.4, "the target has to keep up");
    }

    #[test]
    fn what_was_slower_than_its_alternative_is_not_chosen_again() {
        let auto = |compressed_slower| {
            unasked(RelayMeans { compressed_slower, ..means(1_000.0, 8.0) }).verdict(Some(OS_LIKE))
        };
        assert!(matches!(auto(None), Verdict::Compressed { .. }));
        assert_eq!(auto(Some(1.5 / 0.72)), Verdict::TooLittle);
        // Neither luck nor what is no number changes anything.
        assert_eq!((auto(Some(0.1)), auto(Some(f64::NAN))), (auto(None), auto(None)));
        let asked = RelayMeans { compressed_slower: Some(9.0), ..means(1_000.0, 8.0) };
        assert!(matches!(asked.verdict(Some(OS_LIKE)), Verdict::Compressed { .. }), "it was asked for");
    }

    #[test]
    fn a_limit_of_cores_bounds_what_is_packed() {
        let one_core = RelayMeans { packing_cores: 1.0, ..means(10_000.0, 64.0) };
        assert!((share(means(10_000.0, 64.0), TEXT) - 0.33).abs() < 1e-9);
        // 200 MB/s are compressed, which saves 134, beside 1250 MB/s.
        assert!((share(one_core, TEXT) - 1_250.0 / 1_384.0).abs() < 1e-9);
        let none = RelayMeans { packing_cores: 0.0, ..means(1_000.0, 1.0) };
        assert_eq!(none.verdict(Some(TEXT)), Verdict::Outruns);
        let source = HostFacts { packing_cores: Some(1), ..host(64, None, 0.0) };
        assert!((between(&source, &source, ASKED_FOR).packing_cores - 1.0).abs() < 1e-9);
    }

    #[test]
    fn few_cores_that_pack_do_not_keep_idle_ones_from_passing_the_stream_on() {
        let two_of_64 = HostFacts { packing_cores: Some(2), ..host(64, Some(64.0), 0.0) };
        let auto = between(&two_of_64, &two_of_64, UNASKED);
        let over_10_gbps = RelayMeans { wire_mbps: 10_000.0, ..auto };
        // 400 MB/s are compressed, which saves 268, beside 1250 MB/s.
        assert!((share(over_10_gbps, TEXT) - 1_250.0 / 1_518.0).abs() < 1e-9);
        let two = HostFacts { idle_cores: Some(2.0), ..two_of_64 };
        let two_idle = RelayMeans { wire_mbps: 10_000.0, ..between(&two, &two, UNASKED) };
        assert_eq!(two_idle.verdict(Some(TEXT)), Verdict::Outruns, "two cores could not pass all of it on");
    }

    #[test]
    fn a_relay_stays_out_where_the_paths_are_faster_or_nothing_shrinks() {
        assert_eq!(means(40_000.0, 4.0).verdict(Some(TEXT)), Verdict::Outruns);
        assert_eq!(means(1_000.0, 0.0).verdict(Some(TEXT)), Verdict::Outruns);
        assert_eq!(means(1_000.0, 4.0).verdict(Some(RANDOM)), Verdict::NothingShrinks);
    }

    #[test]
    fn auto_reckons_with_no_core_that_was_not_counted_and_who_asks_with_all() {
        let (counted, unknown) = (host(8, Some(8.0), 0.0), host(8, None, 0.0));
        let verdict = |source: &HostFacts, target: &HostFacts, option| {
            between(source, target, option).verdict(Some(OS_LIKE))
        };
        let (auto, asked) = (UNASKED, ASKED_FOR);
        assert!(matches!(verdict(&counted, &counted, auto), Verdict::Compressed { .. }));
        for (source, target) in [(&unknown, &counted), (&counted, &unknown)] {
            assert!(!matches!(verdict(source, target, auto), Verdict::Compressed { .. }));
            assert!(matches!(verdict(source, target, asked), Verdict::Compressed { .. }));
        }
    }

    #[test]
    fn what_cores_have_saved_before_bounds_what_they_will() {
        let before = RelayMeans { saved_mbps: Some(250.0), ..means(1_000.0, 8.0) };
        assert!((share(before, TEXT) - 0.8).abs() < 1e-9);
        assert_eq!(
            unasked(RelayMeans { saved_mbps: Some(60.0), ..before }).verdict(Some(TEXT)),
            Verdict::TooLittle
        );
    }

    #[test]
    fn what_brings_little_is_done_only_where_it_was_asked_for() {
        let fast = means(5_000.0, 1.5);
        assert_eq!(unasked(fast).verdict(Some(TEXT)), Verdict::TooLittle);
        assert!(share(fast, TEXT) < 1.0);
    }

    #[test]
    fn vms_that_need_all_cores_keep_a_relay_out_and_a_busy_host_does_not() {
        let verdict = |source: &HostFacts, target: &HostFacts| {
            between(source, target, ASKED_FOR).verdict(Some(OS_LIKE))
        };
        let (free, compiles, needed) =
            (host(1, Some(1.0), 0.0), host(1, Some(0.0), 0.1), host(1, Some(1.0), 0.97));
        assert!(matches!(verdict(&free, &free), Verdict::Compressed { .. }));
        assert!(matches!(verdict(&compiles, &compiles), Verdict::Compressed { .. }));
        assert_eq!(verdict(&needed, &free), Verdict::Outruns);
        assert_eq!(verdict(&free, &needed), Verdict::Outruns);
        let beside_one_vm = host(2, Some(0.0), 1.0);
        assert!(matches!(verdict(&beside_one_vm, &beside_one_vm), Verdict::Compressed { .. }));
    }

    fn encrypted(means: RelayMeans) -> RelayMeans {
        RelayMeans { is_encrypted: true, ..means }
    }

    #[test]
    fn encryption_takes_of_the_cores_what_goes_out_costs() {
        // 10 Gb/s are 1.16 GiB/s: 0.19 cores to seal them. 4 cores have 1.67 left from passing that on in the clear.
        let (clear, sealed) = (means(10_000.0, 4.0), encrypted(means(10_000.0, 4.0)));
        let (in_the_clear, encrypted) = (1.0 / share(clear, TEXT), 1.0 / share(sealed, TEXT));
        let packed_s = PACKING_S / 0.67;
        let less = SEALING_S / (PASSING_S + packed_s);
        assert!((in_the_clear - encrypted - less).abs() < 1e-9, "{in_the_clear} {encrypted}");
        assert!(encrypted > 1.1 && less > 0.01);
    }

    #[test]
    fn with_cores_enough_encryption_changes_nothing() {
        assert!((share(encrypted(means(1_000.0, 8.0)), TEXT) - 0.33).abs() < 1e-9);
    }

    #[test]
    fn where_encryption_takes_all_cores_packing_brings_nothing() {
        for cores in [0.0, 0.2, 2.0] {
            let few = encrypted(means(10_000.0, cores));
            assert_eq!(few.verdict(Some(TEXT)), Verdict::Outruns, "{cores}");
            assert_eq!(unasked(few).verdict(Some(TEXT)), Verdict::Outruns, "{cores}");
        }
        let target = RelayMeans { target_cores: 0.0, ..encrypted(means(1_000.0, 8.0)) };
        assert_eq!(target.verdict(Some(TEXT)), Verdict::Outruns, "the target cannot open more than it does");
    }

    #[test]
    fn memory_that_nobody_has_seen_is_compressed_for_who_asks() {
        assert!(matches!(means(1_000.0, 4.0).verdict(None), Verdict::Compressed { .. }));
        assert_eq!(unasked(means(1_000.0, 4.0)).verdict(None), Verdict::TooLittle);
    }

    proptest! {
        #[test]
        fn a_share_is_one_whatever_was_said(
            wire_mbps in 1.0_f64..1e6,
            source_cores in 0.0_f64..256.0,
            target_cores in 0.0_f64..256.0,
            packing_cores in prop_oneof![Just(f64::INFINITY), 0.0_f64..256.0],
            share in prop_oneof![Just(f64::NAN), -1.0_f64..2.0],
            left in prop_oneof![Just(f64::NAN), -1.0_f64..2.0],
            saved_mbps in prop_oneof![Just(None), Just(Some(f64::NAN)), (-1.0_f64..1e6).prop_map(Some)],
            is_encrypted: bool,
        ) {
            let means = RelayMeans {
                is_encrypted,
                source_cores,
                target_cores,
                packing_cores,
                saved_mbps,
                ..means(wire_mbps, 1.0)
            };
            if let Verdict::Compressed { wire_share } = means.verdict(Some(Compressible { share, left })) {
                prop_assert!(wire_share > 0.0 && wire_share <= 1.0, "{}", wire_share);
            }
        }

        #[test]
        fn who_asks_has_the_cores_that_vms_leave_and_who_does_not_the_idle_ones(
            cores in 0_u32..256,
            idle in prop_oneof![Just(None), Just(Some(f64::NAN)), (-1.0_f64..300.0).prop_map(Some)],
            vms in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), -1.0_f64..300.0],
        ) {
            let means_for = |idle_cores, vm_cores, option| {
                let host = host(cores, idle_cores, vm_cores);
                between(&host, &host, option)
            };
            let all = f64::from(cores.max(1));
            let (asked, auto) = (ASKED_FOR, UNASKED);
            for option in [asked, auto] {
                prop_assert!((0.0..=all).contains(&means_for(idle, vms, option).source_cores));
            }
            prop_assert_eq!(means_for(idle, vms, asked), means_for(None, vms, asked));
            prop_assert_eq!(means_for(idle, f64::NAN, asked), means_for(idle, 0.0, asked));
            prop_assert_eq!(means_for(idle, vms, auto), means_for(idle, 0.0, auto));
        }

        #[test]
        fn more_cores_never_make_it_slower(
            wire_mbps in 1.0_f64..1e5,
            cores in 0.0_f64..64.0,
            more in 0.0_f64..64.0,
            is_encrypted: bool,
        ) {
            let carried = |cores| RelayMeans { is_encrypted, ..means(wire_mbps, cores) }.carried(OS_LIKE);
            prop_assert!(carried(cores + more) >= carried(cores) * (1.0 - 1e-9));
        }

        #[test]
        fn encryption_makes_nothing_faster(wire_mbps in 1.0_f64..1e5, cores in 0.0_f64..64.0) {
            let clear = means(wire_mbps, cores);
            let (sealed, carried) = (encrypted(clear).carried(OS_LIKE), clear.carried(OS_LIKE));
            prop_assert!(sealed <= carried * (1.0 + 1e-9));
            // Packing never makes it slower than memory as it is, as it takes idle time only.
            prop_assert!(sealed >= encrypted(clear).carried_as_it_is() * (1.0 - 1e-9));
        }
    }
}
