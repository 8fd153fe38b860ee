//! What QEMU's CPU models are on this host: which of a model's features a guest would not get.
//!
//! Without being told to enforce them, QEMU leaves features out in silence.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qmp::{QmpClient, QmpError};
use crate::spec::Hardware;

/// Models that are whatever the host is.
const FOLLOW_HOST: [&str; 2] = ["host", "max"];

/// What QEMU lists among a model's CPUID features, and is none: `lmce` is a bit of a machine-check MSR, and
/// no CPU was ever sold with `pcommit`.
const NO_FEATURES: [&str; 2] = ["lmce", "pcommit"];

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
    /// Of a QEMU that knows no model.
    #[cfg(test)]
    pub(crate) fn none(hardware: Hardware) -> Self {
        Self { hardware, lacking: BTreeMap::new(), offered: BTreeMap::new(), dependents: BTreeMap::new() }
    }

    /// Asks a QEMU without a machine.
    pub(crate) async fn ask(
        qmp: &QmpClient,
        hardware: Hardware,
        deadline: Duration,
    ) -> Result<Self, QmpError> {
        let follows_host = if hardware == Hardware::Kvm { "host" } else { "max" };
        let properties = expansion(qmp, follows_host, None, deadline).await?;
        Ok(Self {
            hardware,
            lacking: definitions(qmp, deadline).await?,
            dependents: dependents(qmp, follows_host, &properties, deadline).await?,
            offered: plain_features(properties),
        })
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
    switched.extend(parts().filter_map(|part| Some((plain(part.strip_prefix('+')?), true))));
    switched.extend(parts().filter_map(|part| Some((plain(part.strip_prefix('-')?), false))));
    switched
}

/// A feature in the form `avx=on`, or `avx` alone, which means the same.
fn set(part: &str) -> Option<(String, bool)> {
    let (feature, value) = part.split_once('=').unwrap_or((part, "on"));
    match value {
        "on" | "yes" | "true" | "y" => Some((plain(feature), true)),
        "off" | "no" | "false" | "n" => Some((plain(feature), false)),
        _ => None,
    }
}

async fn definitions(
    qmp: &QmpClient,
    deadline: Duration,
) -> Result<BTreeMap<String, BTreeSet<String>>, QmpError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Definition {
        name: String,
        #[serde(default)]
        unavailable_features: Vec<String>,
    }
    let definitions: Vec<Definition> = qmp.execute("query-cpu-definitions", Value::Null, deadline).await?;
    let lacking = |features: Vec<String>| features.iter().map(|feature| plain(feature)).collect();
    Ok(definitions
        .into_iter()
        .map(|definition| (definition.name, lacking(definition.unavailable_features)))
        .collect())
}

/// Every property of a model, as QEMU spells it; with one feature switched off, if one is named.
async fn expansion(
    qmp: &QmpClient,
    model: &str,
    without: Option<&str>,
    deadline: Duration,
) -> Result<BTreeMap<String, Value>, QmpError> {
    #[derive(Deserialize)]
    struct Expansion {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        props: BTreeMap<String, Value>,
    }
    // The full one has properties that are no features of the CPU, such as `legacy-cache` and `pmu`.
    let off: BTreeMap<&str, bool> = without.into_iter().map(|feature| (feature, false)).collect();
    let arguments = json!({ "type": "static", "model": { "name": model, "props": off } });
    let expansion: Expansion = qmp.execute("query-cpu-model-expansion", arguments, deadline).await?;
    Ok(expansion.model.props)
}

fn plain_features(properties: BTreeMap<String, Value>) -> BTreeMap<String, bool> {
    let features = properties.into_iter().filter(|(name, _)| !NO_FEATURES.contains(&name.as_str()));
    features.filter_map(|(name, value)| Some((plain(&name), value.as_bool()?))).collect()
}

/// What guests lose with each feature that is switched off, as with `vmx` all that begins with `vmx-`. QEMU
/// does not list it, so each feature is switched off once: 0.1 s for the 75 that TCG offers (QEMU 7.2).
async fn dependents(
    qmp: &QmpClient,
    model: &str,
    properties: &BTreeMap<String, Value>,
    deadline: Duration,
) -> Result<BTreeMap<String, BTreeSet<String>>, QmpError> {
    let all = plain_features(properties.clone());
    let mut dependents = BTreeMap::new();
    for name in properties.iter().filter(|(_, value)| **value == Value::Bool(true)).map(|(name, _)| name) {
        let left = match expansion(qmp, model, Some(name), deadline).await {
            Ok(left) => plain_features(left),
            // QEMU has properties that cannot be switched off, and says so.
            Err(QmpError::Command { .. }) => continue,
            Err(error) => return Err(error),
        };
        let is_lost = |feature: &&String| **feature != plain(name) && left.get(*feature) == Some(&false);
        let on = all.iter().filter(|(_, on)| **on).map(|(feature, _)| feature);
        let lost: BTreeSet<String> = on.filter(is_lost).cloned().collect();
        if !lost.is_empty() {
            dependents.insert(plain(name), lost);
        }
    }
    Ok(dependents)
}

/// QEMU writes one feature in up to three ways: `sse4_1`, `sse4.1`, `sse4-1`. Some have a second name, which
/// QEMU takes and does not use itself.
fn plain(feature: &str) -> String {
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
        assert_eq!(plain("sse4.1"), "sse4-1");
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
