//! What QEMU reports about its CPU models on this host.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drainpipe_hypervisor::Hardware;
use drainpipe_hypervisor::cpu_models::{CpuModels, canonical_feature};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::qmp::{QmpClient, QmpError};

/// What QEMU lists among a model's CPUID features, and is none: `lmce` is a bit of a machine-check MSR, and
/// no CPU was ever sold with `pcommit`.
const NO_FEATURES: [&str; 2] = ["lmce", "pcommit"];

/// Asks a QEMU without a machine.
pub(crate) async fn ask(
    qmp: &QmpClient,
    hardware: Hardware,
    deadline: Duration,
) -> Result<CpuModels, QmpError> {
    let follows_host = if hardware == Hardware::Kvm { "host" } else { "max" };
    let properties = expansion(qmp, follows_host, None, deadline).await?;
    let lacking = definitions(qmp, deadline).await?;
    let dependents = dependents(qmp, follows_host, &properties, deadline).await?;
    Ok(CpuModels::new(hardware, lacking, plain_features(properties), dependents))
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
    let lacking = |features: Vec<String>| features.iter().map(|feature| canonical_feature(feature)).collect();
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
    features.filter_map(|(name, value)| Some((canonical_feature(&name), value.as_bool()?))).collect()
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
        let is_lost =
            |feature: &&String| **feature != canonical_feature(name) && left.get(*feature) == Some(&false);
        let on = all.iter().filter(|(_, on)| **on).map(|(feature, _)| feature);
        let lost: BTreeSet<String> = on.filter(is_lost).cloned().collect();
        if !lost.is_empty() {
            dependents.insert(canonical_feature(name), lost);
        }
    }
    Ok(dependents)
}
