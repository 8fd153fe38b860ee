//! What travels about emptying a host and bringing back what left it.

use drainpipe_engine::drain::plan::DrainPlan;
use drainpipe_engine::drain::status::DrainStatus;
use drainpipe_engine::finding::Finding;
use drainpipe_engine::option::RequestedOption;
use std::time::Duration;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::{check_host_name, deadline_s, throttle_max_percent};

/// Most hosts that a request may name.
const TARGETS_MAX: usize = 256;

/// How long the answer to `POST /v1/drain` and to its plan may take: all hosts are looked at, and the memory
/// of all VMs.
pub const PLAN_DEADLINE: Duration = Duration::from_mins(1);

/// Most VMs that one host ever has on the links at a time.
pub const TRANSFERS_MAX: u8 = 8;

/// A request to empty the host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is asked for by itself")]
pub struct DrainRequest {
    /// The hosts that may take its VMs; all that it knows if empty.
    #[serde(default, deserialize_with = "host_names")]
    #[schema(max_items = 256)]
    pub to: Vec<String>,
    /// The one host that takes its VMs and whose own VMs may come here meanwhile: the two change places. Not with
    /// `to`.
    #[serde(default, deserialize_with = "swap_with")]
    #[schema(max_length = 253)]
    pub swap_with: Option<String>,
    /// Seconds after which nothing new is begun, and what is not on the links yet is given up: up to a
    /// day.
    #[serde(default, deserialize_with = "deadline_s")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub deadline_s: Option<u32>,
    /// How each VM is moved.
    #[serde(default)]
    pub option: RequestedOption,
    /// VMs at most on the links at a time; as found best if absent.
    #[serde(default, deserialize_with = "transfers")]
    #[schema(minimum = 1, maximum = 8)]
    pub transfers: Option<u8>,
    /// Share of their time, in percent, for which the CPUs of a VM may be held back at most whose memory gets
    /// dirty too fast, 0 for never; as the host's configuration says if absent.
    #[serde(default, deserialize_with = "throttle_max_percent")]
    #[schema(minimum = 0, maximum = 99)]
    pub throttle_max_percent: Option<u8>,
    /// Whether to encrypt each VM on its way even where the hosts do not require that.
    #[serde(default)]
    pub encrypt: bool,
    /// Whether VMs whose memory gets dirty faster than the links carry it may run on their targets before all of it is
    /// there. From then until the rest has followed, such a VM is lost if either host is.
    #[serde(default)]
    pub post_copy: bool,
    /// Whether VMs go with copies of the disks that their targets do not see.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_storage: bool,
    /// Whether VMs whose disks are copied go before the others, and not after them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disks_first: bool,
}

/// How a host would be emptied, and nothing done.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainPlanView {
    /// Which VM goes where, in which order, and which stay.
    pub plan: DrainPlan,
    /// What an independent check of the plan has found. A plan of which it finds anything is not
    /// carried out.
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// What a person should know of a plan before it begins: of single VMs, then of the whole.
pub fn plan_warnings(plan: &DrainPlan) -> impl Iterator<Item = String> {
    let mut warnings: Vec<(&str, Vec<&str>)> = Vec::new();
    for (vm, warning) in plan.moves.iter().filter_map(|one| Some((one.vm.as_str(), one.warning.as_deref()?)))
    {
        match warnings.iter_mut().find(|(known, _)| *known == warning) {
            Some((_, vms)) => vms.push(vm),
            None => warnings.push((warning, vec![vm])),
        }
    }
    let of_vms = warnings.into_iter().map(|(warning, vms)| format!("{}: {warning}", vms.join(", ")));
    of_vms.collect::<Vec<_>>().into_iter().chain(plan.warnings.iter().cloned())
}

/// Whether a host takes VMs, and how far it has been emptied, or filled again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DrainView {
    /// The host.
    pub host: String,
    /// Whether VMs are kept from coming to it and from being started on it.
    pub cordoned: bool,
    /// The host whose VMs may come to it all the same: the two change places.
    #[serde(default)]
    pub swap_with: Option<String>,
    /// What is under way, or was last; absent if it was never drained. So are the next five.
    pub kind: Option<DrainKind>,
    /// Its identifier.
    pub id: Option<String>,
    /// When it began, RFC 3339, by the host's clock.
    pub started_at: Option<String>,
    /// When it ended; absent while it is under way.
    pub ended_at: Option<String>,
    /// What was asked for; of the way back, how VMs are moved. Absent also if an older Drainpipe began it.
    #[serde(default)]
    pub request: Option<DrainRequest>,
    /// How far it has come.
    pub status: Option<DrainStatus>,
}

/// Which way the VMs go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DrainKind {
    /// Away from the host.
    Drain,
    /// Back to it.
    Failback,
}

/// A request to let VMs come to the host again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ResumeRequest {
    /// Whether to bring back what the last drain has moved away and what still is where it went.
    #[serde(default)]
    pub failback: bool,
    /// For what comes back, as in a drain; as the drain had it if absent, and if it had none as the
    /// configuration of the host that a VM comes from says.
    #[serde(default, deserialize_with = "throttle_max_percent")]
    #[schema(minimum = 0, maximum = 99)]
    pub throttle_max_percent: Option<u8>,
    /// Whether to encrypt what comes back even where the hosts do not require that. It is encrypted in any case if the
    /// drain was to be.
    #[serde(default)]
    pub encrypt: bool,
}

fn host_names<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let names = Vec::<String>::deserialize(deserializer)?;
    if names.len() > TARGETS_MAX {
        return Err(D::Error::custom(format!("to: at most {TARGETS_MAX} hosts")));
    }
    for (index, name) in names.iter().enumerate() {
        check_host_name(name)?;
        if names[..index].contains(name) {
            return Err(D::Error::custom(format!("to: {name} is named twice")));
        }
    }
    Ok(names)
}

fn swap_with<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    let name = Option::<String>::deserialize(deserializer)?;
    name.iter().try_for_each(|name| check_host_name(name))?;
    Ok(name)
}

fn transfers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    let transfers = Option::<u8>::deserialize(deserializer)?;
    if transfers.is_some_and(|transfers| !(1..=TRANSFERS_MAX).contains(&transfers)) {
        return Err(D::Error::custom(format!("transfers: 1 to {TRANSFERS_MAX} is allowed")));
    }
    Ok(transfers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DrainRequest, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn nothing_need_be_said() {
        assert_eq!(read("{}").unwrap(), DrainRequest::default());
        let request = read(r#"{"to": ["b", "c"], "deadline_s": 60, "transfers": 8}"#).unwrap();
        assert_eq!((request.to.len(), request.deadline_s, request.transfers), (2, Some(60), Some(8)));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, word) in [
            (r#"{"to": ["b", "b"]}"#, "twice"),
            (r#"{"to": ["../b"]}"#, "name"),
            (r#"{"swap_with": "../b"}"#, "name"),
            (r#"{"transfers": 0}"#, "1 to 8"),
            (r#"{"transfers": 9}"#, "1 to 8"),
            (r#"{"deadline_s": 0}"#, "deadline_s"),
            (r#"{"throttle_max_percent": 100}"#, "0 to 99"),
            (r#"{"too": []}"#, "unknown field"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let resume = serde_json::from_str::<ResumeRequest>(r#"{"throttle_max_percent": 100}"#);
        assert!(resume.unwrap_err().to_string().contains("0 to 99"));
    }

    #[test]
    fn warnings_of_vms_name_them() {
        let text = r#"{
            "host": "a", "stays": [], "transfers": 1, "predicted_ms": 1, "warnings": ["no reserve"],
            "moves": [{
                "vm": "web", "target": "b", "memory_bytes": 1, "predicted_bytes": 1, "predicted_transfer_ms": 1,
                "predicted_shared_ms": 1, "warning": "it may not converge"
            }]
        }"#;
        let plan: DrainPlan = serde_json::from_str(text).unwrap();
        let warnings: Vec<String> = plan_warnings(&plan).collect();
        assert_eq!(warnings, ["web: it may not converge", "no reserve"]);
    }

    #[test]
    fn the_same_warning_of_many_vms_is_one_line() {
        let moves: Vec<String> = (1..=13)
            .map(|number| {
                let warning = if number == 7 { "another one" } else { "the same" };
                format!(
                    r#"{{
                        "vm": "w{number}", "target": "b", "memory_bytes": 1, "predicted_bytes": 1,
                        "predicted_transfer_ms": 1, "predicted_shared_ms": 1, "warning": "{warning}"
                    }}"#
                )
            })
            .collect();
        let text = format!(
            r#"{{"host": "a", "stays": [], "transfers": 1, "predicted_ms": 1, "warnings": [], "moves": [{}]}}"#,
            moves.join(",")
        );
        let plan: DrainPlan = serde_json::from_str(&text).unwrap();
        let warnings: Vec<String> = plan_warnings(&plan).collect();
        let same = "w1, w2, w3, w4, w5, w6, w8, w9, w10, w11, w12, w13: the same";
        assert_eq!(warnings, [same, "w7: another one"]);
    }
}
