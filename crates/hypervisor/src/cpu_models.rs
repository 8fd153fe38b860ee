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

/// The CPU models on one host, under one accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModels {
    /// What would run the guest.
    pub hardware: Hardware,
    /// The models that QEMU knows by name, with the features that guests do not get.
    lacking: BTreeMap<String, BTreeSet<String>>,
    /// Each feature that QEMU has a name for, and whether guests get it.
    offered: BTreeMap<String, bool>,
}

/// One model on one host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelFeatures {
    /// Whether QEMU knows the model.
    pub known: bool,
    /// Features of the model that guests do not get; for models that follow the host, all that guests do
    /// not get. Not those that the specification itself switches off.
    pub lacking: BTreeSet<String>,
    /// Each feature that QEMU has a name for.
    pub named: BTreeSet<String>,
}

impl CpuModels {
    /// Of a QEMU that knows no model.
    #[cfg(test)]
    pub(crate) fn none(hardware: Hardware) -> Self {
        Self { hardware, lacking: BTreeMap::new(), offered: BTreeMap::new() }
    }

    /// Asks a QEMU without a machine.
    pub(crate) async fn ask(
        qmp: &QmpClient,
        hardware: Hardware,
        deadline: Duration,
    ) -> Result<Self, QmpError> {
        let follows_host = if hardware == Hardware::Kvm { "host" } else { "max" };
        Ok(Self {
            hardware,
            lacking: definitions(qmp, deadline).await?,
            offered: expansion(qmp, follows_host, deadline).await?,
        })
    }

    /// A model as specifications have it: features may follow, as in `EPYC,+x2apic,avx=off`.
    pub fn features_of(&self, model: &str) -> ModelFeatures {
        let (name, features) = model.split_once(',').unwrap_or((model, ""));
        let of_model = self.lacked_by(name);
        let known = of_model.is_some();
        let mut lacking = of_model.unwrap_or_default();
        for (feature, on) in switched(features) {
            if !on {
                lacking.remove(&feature);
            } else if self.offered.get(&feature) == Some(&false) {
                lacking.insert(feature);
            }
        }
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

async fn expansion(
    qmp: &QmpClient,
    model: &str,
    deadline: Duration,
) -> Result<BTreeMap<String, bool>, QmpError> {
    #[derive(Deserialize)]
    struct Expansion {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        props: BTreeMap<String, Value>,
    }
    // The full one has properties that are no features of the CPU, such as `legacy-cache` and `pmu`.
    let arguments = json!({ "type": "static", "model": { "name": model } });
    let expansion: Expansion = qmp.execute("query-cpu-model-expansion", arguments, deadline).await?;
    let properties = expansion.model.props.into_iter();
    Ok(properties
        .filter(|(name, _)| !NO_FEATURES.contains(&name.as_str()))
        .filter_map(|(name, value)| Some((plain(&name), value.as_bool()?)))
        .collect())
}

/// QEMU writes one feature in up to three ways: `sse4_1`, `sse4.1`, `sse4-1`.
fn plain(feature: &str) -> String {
    feature.replace(['_', '.'], "-")
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
        assert_eq!(lacking("host,sse4.1=no,-avx"), ["x2apic"]);
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
