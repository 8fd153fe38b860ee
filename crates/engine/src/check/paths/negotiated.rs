//! Links that run slower than they should: than their cards can, or than their hosts' configurations say.

use crate::check::Pair;
use crate::check::facts::CheckFacts;
use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place, on};
use crate::format::mbps;

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let of_path = pair.paths.iter().flat_map(|path| {
        [slow_link(pair.source, &path.link), slow_link(pair.target, &path.peer_link)].into_iter().flatten()
    });
    of_path.collect()
}

fn slow_link(facts: &CheckFacts, name: &str) -> Option<Finding> {
    let speeds = facts.link(name)?;
    let runs_at = speeds.driver_speed_mbps?;
    let (host, place) = (facts.name(), [Place::link(facts.name(), name)]);
    let look = on(host, format!("ethtool {name}; and look at cable, transceiver and switch port"));
    let configured = facts.migration_link(name)?.speed_mbps.filter(|configured| *configured > runs_at);
    if let Some(configured) = configured {
        return Some(
            Finding::new(FindingCode::SpeedBelowConfigured, place)
                .what(format!("{name} of {host} runs at {}, and agent.toml says {configured}", mbps(runs_at)))
                .effect("it gets a larger share of a migration than it can carry, and the other links wait for it")
                .remedy(format!("{look}; or correct speed_mbps of [[link]] `{name}` in agent.toml")),
        );
    }
    speeds.card_speed_mbps.filter(|most| *most > runs_at).map(|most| {
        Finding::new(FindingCode::SpeedBelowCard, place)
            .what(format!("{name} of {host} runs at {}, and its card can do {most}", mbps(runs_at)))
            .effect(format!("the path carries at most {}", mbps(runs_at)))
            .remedy(look)
    })
}
