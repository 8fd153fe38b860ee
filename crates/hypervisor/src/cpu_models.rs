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

/// No CPU was ever sold with it, and newer QEMUs have dropped it.
const NEVER_SOLD: &str = "pcommit";

/// The CPU models on one host, under one accelerator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuModels {
    /// What would run the guest.
    pub hardware: Hardware,
    /// The models that QEMU knows by name, with the features that guests do not get.
    lacking: BTreeMap<String, BTreeSet<String>>,
    /// Each feature that QEMU knows, and whether guests get it.
    offered: BTreeMap<String, bool>,
}

/// One model on one host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelFeatures {
    /// Whether QEMU knows the model.
    pub known: bool,
    /// Features of the model that guests do not get.
    pub lacking: BTreeSet<String>,
    /// For models that follow the host: each feature that QEMU knows, and whether guests get it.
    pub offered: BTreeMap<String, bool>,
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

    /// A model as specifications have it: features may follow, as in `EPYC,+x2apic,avx=on`.
    pub fn features_of(&self, model: &str) -> ModelFeatures {
        let mut parts = model.split(',');
        let name = parts.next().unwrap_or_default();
        let wanted = parts.filter_map(|part| part.strip_prefix('+').or_else(|| part.strip_suffix("=on")));
        let not_offered = wanted.map(plain).filter(|feature| self.offered.get(feature) == Some(&false));
        let mut features = if FOLLOW_HOST.contains(&name) {
            ModelFeatures { known: true, offered: self.offered.clone(), ..ModelFeatures::default() }
        } else {
            let lacking = self.lacking.get(name);
            ModelFeatures {
                known: lacking.is_some(),
                lacking: lacking.cloned().unwrap_or_default(),
                ..ModelFeatures::default()
            }
        };
        features.lacking.extend(not_offered);
        features
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
    let arguments = json!({ "type": "full", "model": { "name": model } });
    let expansion: Expansion = qmp.execute("query-cpu-model-expansion", arguments, deadline).await?;
    let properties = expansion.model.props.into_iter();
    Ok(properties
        // What begins with `x-` is how QEMU builds the CPU, not what the guest sees of it.
        .filter(|(name, _)| !name.starts_with("x-") && name != NEVER_SOLD)
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
            offered: [("avx".to_owned(), true), ("sse4-1".to_owned(), false)].into(),
        }
    }

    #[test]
    fn a_model_lacks_its_own_features_and_those_that_were_added() {
        let lacking = |model| models().features_of(model).lacking.into_iter().collect::<Vec<_>>();
        assert_eq!(lacking("qemu64,+avx"), [""; 0]);
        assert_eq!(lacking("EPYC,+sse4_1,avx=on,foo=bar"), ["sse4-1", "x2apic"]);
        assert_eq!(lacking("max,sse4.1=on"), ["sse4-1"]);
    }

    #[test]
    fn only_what_follows_the_host_offers_what_the_host_has() {
        assert_eq!(models().features_of("host").offered, models().offered);
        assert!(models().features_of("EPYC").offered.is_empty());
        assert!(!models().features_of("Z80").known);
    }
}
