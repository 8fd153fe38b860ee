//! The CPU models on this host: which of a model's features a guest would not get.
//!
//! Unless it is ordered to enforce them, QEMU leaves features out in silence.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::hardware::Hardware;

/// Models that are whatever the host is.
const FOLLOW_HOST: [&str; 2] = ["host", "max"];

/// Second names of features, and the first ones (`x86_cpu_initfn` in QEMU's `target/i386/cpu.c`).
const SECOND_NAMES: [(&str, &str); 5] =
    [("sse3", "pni"), ("pclmuldq", "pclmulqdq"), ("xd", "nx"), ("ffxsr", "fxsr-opt"), ("i64", "lm")];

/// The CPU models on one host, under one accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModels {
    /// What would run the guest.
    pub hardware: Hardware,
    /// The models that QEMU knows by name, with the features that guests do not get.
    lacking: BTreeMap<String, BTreeSet<String>>,
    /// Each feature that QEMU has a name for, and whether guests get it.
    offered: BTreeMap<String, bool>,
    /// For each feature without which QEMU gives guests some other ones neither, these.
    dependents: BTreeMap<String, BTreeSet<String>>,
}

/// One model on one host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelFeatures {
    /// Whether QEMU knows the model.
    pub known: bool,
    /// Features of the model that guests do not get; for models that follow the host, all that guests do
    /// not get. Not those that the specification itself switches off, but those that go with these here.
    pub lacking: BTreeSet<String>,
    /// Each feature that QEMU has a name for.
    pub named: BTreeSet<String>,
}

impl CpuModels {
    /// The models of a QEMU that knows none.
    #[cfg(any(test, feature = "fake"))]
    pub(crate) fn none(hardware: Hardware) -> Self {
        Self { hardware, lacking: BTreeMap::new(), offered: BTreeMap::new(), dependents: BTreeMap::new() }
    }

    /// What a hypervisor says of itself: for each model that it knows by name, the features that guests do not get; for each
    /// feature that it has a name for, whether guests get it; and those that go with a feature which is switched off.
    /// Features have their [canonical](canonical_feature) names.
    pub fn new(
        hardware: Hardware,
        lacking: BTreeMap<String, BTreeSet<String>>,
        offered: BTreeMap<String, bool>,
        dependents: BTreeMap<String, BTreeSet<String>>,
    ) -> Self {
        Self { hardware, lacking, offered, dependents }
    }

    /// Whether QEMU knows a model, as specifications have it; also where it lists none.
    pub fn knows(&self, model: &str) -> bool {
        self.lacking.is_empty() || self.features_of(model).known
    }

    /// A model as specifications have it: features may follow, as in `EPYC,+x2apic,avx=off`.
    pub fn features_of(&self, model: &str) -> ModelFeatures {
        let (name, features) = model.split_once(',').unwrap_or((model, ""));
        let of_model = self.lacked_by(name);
        let known = of_model.is_some();
        let mut lacking = of_model.unwrap_or_default();
        let switched = switched(features);
        let (on, off): (Vec<_>, Vec<_>) = switched.iter().partition(|(_, on)| **on);
        let not_offered = on.into_iter().filter(|(feature, _)| self.offered.get(*feature) == Some(&false));
        lacking.extend(not_offered.map(|(feature, _)| feature.clone()));
        for (feature, _) in off {
            lacking.extend(self.dependents.get(feature).into_iter().flatten().cloned());
        }
        lacking.retain(|feature| switched.get(feature) != Some(&false));
        ModelFeatures { known, lacking, named: self.offered.keys().cloned().collect() }
    }

    /// What guests do not get of a model by itself; none if QEMU does not know it.
    fn lacked_by(&self, name: &str) -> Option<BTreeSet<String>> {
        if FOLLOW_HOST.contains(&name) {
            let absent = self.offered.iter().filter(|(_, offered)| !**offered);
            return Some(absent.map(|(feature, _)| feature.clone()).collect());
        }
        self.lacking.get(name).cloned()
    }
}

/// The features that a specification itself switches on or off. As in QEMU, `-` has the last word and `+`
/// the last but one, wherever they stand.
fn switched(features: &str) -> BTreeMap<String, bool> {
    let parts = || features.split(',');
    let mut switched: BTreeMap<String, bool> = BTreeMap::new();
    switched.extend(parts().filter_map(set));
    switched.extend(parts().filter_map(|part| Some((canonical_feature(part.strip_prefix('+')?), true))));
    switched.extend(parts().filter_map(|part| Some((canonical_feature(part.strip_prefix('-')?), false))));
    switched
}

/// A feature in the form `avx=on`, or `avx` alone, which means the same.
fn set(part: &str) -> Option<(String, bool)> {
    let (feature, value) = part.split_once('=').unwrap_or((part, "on"));
    match value {
        "on" | "yes" | "true" | "y" => Some((canonical_feature(feature), true)),
        "off" | "no" | "false" | "n" => Some((canonical_feature(feature), false)),
        _ => None,
    }
}

/// QEMU writes one feature in up to three ways: `sse4_1`, `sse4.1`, `sse4-1`. Some have a second name, which
/// QEMU takes and does not use itself.
pub fn canonical_feature(feature: &str) -> String {
    let plain = feature.replace(['_', '.'], "-");
    let second_name = SECOND_NAMES.iter().find(|(second, _)| *second == plain);
    second_name.map_or(plain, |(_, first)| (*first).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models() -> CpuModels {
        let lacking = ["x2apic".to_owned()].into();
        CpuModels {
            hardware: Hardware::Tcg,
            lacking: [("qemu64".to_owned(), BTreeSet::new()), ("EPYC".to_owned(), lacking)].into(),
            offered: [("avx", true), ("sse4-1", false), ("x2apic", false)]
                .map(|(name, offered)| (name.to_owned(), offered))
                .into(),
            dependents: [("avx".to_owned(), ["avx2", "vaes"].map(str::to_owned).into())].into(),
        }
    }

    fn lacking(model: &str) -> Vec<String> {
        models().features_of(model).lacking.into_iter().collect()
    }

    #[test]
    fn a_model_lacks_its_own_features_and_those_that_were_added() {
        assert_eq!(lacking("qemu64,+avx"), [""; 0]);
        assert_eq!(lacking("EPYC,+sse4_1,avx=on,foo=bar"), ["sse4-1", "x2apic"]);
        assert_eq!(lacking("qemu64,sse4.1"), ["sse4-1"]);
        assert_eq!(lacking("max"), ["sse4-1", "x2apic"]);
    }

    #[test]
    fn what_is_switched_off_is_not_lacking() {
        assert_eq!(lacking("EPYC,-x2apic"), [""; 0]);
        assert_eq!(lacking("EPYC,x2apic=off"), [""; 0]);
        assert_eq!(lacking("host,-sse4_1"), ["x2apic"]);
        assert_eq!(lacking("host,sse4.1=no"), ["x2apic"]);
    }

    #[test]
    fn what_goes_with_a_feature_that_is_switched_off_is_lacking() {
        assert_eq!(lacking("qemu64,-avx"), ["avx2", "vaes"]);
        assert_eq!(lacking("qemu64,avx=off,-vaes"), ["avx2"]);
    }

    #[test]
    fn a_feature_is_known_by_its_second_name_too() {
        for (second, first) in SECOND_NAMES {
            assert_eq!(switched(&format!("-{second}")).get(first), Some(&false));
        }
        assert_eq!(canonical_feature("sse4.1"), "sse4-1");
    }

    #[test]
    fn a_minus_beats_a_plus_and_a_plus_beats_a_value() {
        assert_eq!(lacking("EPYC,-x2apic,+x2apic,x2apic=on"), [""; 0]);
        assert_eq!(lacking("EPYC,+x2apic,x2apic=off"), ["x2apic"]);
        assert_eq!(lacking("EPYC,x2apic=off,x2apic=on"), ["x2apic"]);
    }

    #[test]
    fn every_known_feature_is_named_whatever_the_model() {
        assert!(!models().features_of("Z80").known);
        for model in ["host", "EPYC", "EPYC,-avx"] {
            let features = models().features_of(model);
            assert!(features.known);
            assert!(features.named.iter().eq(models().offered.keys()), "{features:?}");
        }
    }
}
