//! What is wrong with single links, or worth knowing about them.

use super::Pair;
use super::facts::{BondFacts, CheckFacts, Duplex, LinkCounters, LinkFacts, LinkState};
use crate::finding::code::FindingCode;
use crate::finding::fix::Fix;
use crate::finding::{Finding, Place, on};
use crate::format::mbps;
use crate::host::facts::MigrationLink;
use crate::transfer::encryption;

/// From this speed on, one core cannot take all that arrives.
const FAST_MBPS: u64 = 10_000;

/// Fewer bad packets may be those of a cable being put in.
const BAD_PACKETS_MIN: u64 = 10;

/// Bad packets per packet that cost TCP a noticeable part of its speed.
const BAD_PACKETS_RATIO: f64 = 1e-6;

/// The fewest dropped packets that count: TCP itself causes some for lack of room.
const DROPPED_MIN: u64 = 1_000;
const DROPPED_RATIO: f64 = 1e-3;

const STRICT: u8 = 1;

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let of_host = |facts: &CheckFacts, in_paths: Vec<&str>| -> Vec<Finding> {
        let concerned = |link: &&LinkFacts| !stands_in(facts, link) || in_paths.contains(&link.name.as_str());
        let links = facts.links.iter().filter(|link| link.state != LinkState::Missing);
        links.filter(concerned).flat_map(|link| of_link(pair, facts, link)).collect()
    };
    let of_source = of_host(pair.source, pair.paths.iter().map(|path| path.link.as_str()).collect());
    let of_target = of_host(pair.target, pair.paths.iter().map(|path| path.peer_link.as_str()).collect());
    [of_source, of_target].concat()
}

/// Whether a link is of the management network, and carries migrations only where no other makes a path.
fn stands_in(facts: &CheckFacts, link: &LinkFacts) -> bool {
    facts.host.management_links.iter().any(|other| other.name == link.name)
}

fn of_link(pair: Pair<'_>, facts: &CheckFacts, link: &LinkFacts) -> impl Iterator<Item = Finding> {
    let host = facts.name();
    [
        management(pair, facts, link),
        half_duplex(host, link),
        bad_packets(host, link),
        dropped(host, link),
        link.bond.as_ref().map(|bond| team(host, link, bond)),
        reverse_path_filter(host, link),
        one_queue(facts, link),
        one_queue_in_use(facts, link),
        one_core(facts, link),
    ]
    .into_iter()
    .flatten()
}

fn here(host: &str, link: &LinkFacts) -> [Place; 1] {
    [Place::link(host, &link.name)]
}

fn management(pair: Pair<'_>, facts: &CheckFacts, link: &LinkFacts) -> Option<Finding> {
    if !link.carries_management {
        return None;
    }
    let (host, name) = (facts.name(), &link.name);
    let what = format!("{name} of {host} carries the management network, and migrations too");
    let effect = "a migration fills the link, so the agents and people who are logged in have to wait";
    let in_the_clear = if goes_in_the_clear(pair) {
        "; a VM's memory crosses the management network in the clear, unless encryption is asked for"
    } else {
        ""
    };
    let others: Vec<&MigrationLink> = facts.host.links.iter().filter(|other| other.name != *name).collect();
    let finding = if others.is_empty() {
        Finding::milder(FindingCode::ManagementLink, here(host, link))
            .remedy("give migrations a link of their own")
    } else if !others.iter().any(|other| other.usable) {
        let others: Vec<&str> = others.iter().map(|other| other.name.as_str()).collect();
        Finding::new(FindingCode::ManagementLink, here(host, link)).remedy(format!(
            "repair the host's other migration links, which are all down: {}",
            others.join(", ")
        ))
    } else if stands_in(facts, link) {
        Finding::new(FindingCode::ManagementLink, here(host, link)).remedy(
            "give migrations a link of their own that reaches the other host: its other links make no path",
        )
    } else {
        Finding::new(FindingCode::ManagementLink, here(host, link)).remedy(on(
            host,
            format!("remove [[link]] `{name}` from agent.toml, and systemctl restart drainpipe"),
        ))
    };
    Some(finding.what(what).effect(format!("{effect}{in_the_clear}")))
}

/// What a migration is that does not ask for encryption.
fn goes_in_the_clear(pair: Pair<'_>) -> bool {
    let decided = encryption::decide(&pair.source.host, &pair.target.host, false, pair.paths);
    decided.is_ok_and(|encryption| !encryption.is_encrypted())
}

fn half_duplex(host: &str, link: &LinkFacts) -> Option<Finding> {
    (link.duplex == Some(Duplex::Half)).then(|| {
        Finding::new(FindingCode::HalfDuplex, here(host, link))
            .what(format!("{} of {host} has negotiated half duplex", link.name))
            .effect("data and acknowledgements collide, so only a small part of the speed is left")
            .remedy(on(host, format!("ethtool -s {} autoneg on; and the same at the switch port", link.name)))
    })
}

fn bad_packets(host: &str, link: &LinkFacts) -> Option<Finding> {
    let counters = &link.counters;
    let bad = counters.receive_errors.saturating_add(counters.send_errors);
    let all = counters.received.saturating_add(counters.sent);
    (bad >= BAD_PACKETS_MIN && bad as f64 >= all as f64 * BAD_PACKETS_RATIO).then(|| {
        Finding::new(FindingCode::LinkErrors, here(host, link))
            .what(format!(
                "{} of {host} has counted {bad} bad packets among {all} {}",
                link.name,
                lately(counters)
            ))
            .effect("TCP takes each for congestion and slows down")
            .remedy(format!(
                "change cable or transceiver; on {host}: ethtool -S {} | grep -i err shows which kind",
                link.name
            ))
    })
}

fn lately(counters: &LinkCounters) -> String {
    counters.over_s.map_or("since it exists".into(), |seconds| {
        let minutes = seconds.div_ceil(60).max(1);
        format!("in the last {minutes} min")
    })
}

fn dropped(host: &str, link: &LinkFacts) -> Option<Finding> {
    let counters = &link.counters;
    let dropped = counters.receive_dropped.saturating_add(counters.send_dropped);
    let all = counters.received.saturating_add(counters.sent);
    (dropped >= DROPPED_MIN && dropped as f64 >= all as f64 * DROPPED_RATIO).then(|| {
        Finding::new(FindingCode::LinkDrops, here(host, link))
            .what(format!(
                "{} of {host} has dropped {dropped} packets of {all} {}, for lack of room or because \
                nothing wanted them",
                link.name,
                lately(counters)
            ))
            .effect("if the number grows during a migration, TCP slows down")
            .remedy(on(host, format!("ethtool -G {} rx 4096; ip -s link show {0} watches it", link.name)))
    })
}

/// What each kind of team does to one VM and to several.
fn team(host: &str, link: &LinkFacts, bond: &BondFacts) -> Finding {
    let name = &link.name;
    let hashes_ports = matches!(bond.transmit_hash.as_deref(), Some("layer3+4" | "encap3+4"));
    let what = format!("{name} of {host} is a bond of {} links in mode {}", bond.members, bond.mode);
    let finding = |effect: &str, remedy: String| {
        Finding::milder(FindingCode::BondMode, here(host, link))
            .what(what.clone())
            .effect(effect)
            .remedy(remedy)
    };
    match bond.mode.as_str() {
        "802.3ad" | "balance-xor" if !hashes_ports => Finding::new(FindingCode::BondMode, here(host, link))
            .what(format!(
                "{what}, which hashes no ports ({})",
                bond.transmit_hash.as_deref().unwrap_or("unknown")
            ))
            .effect("all connections between two hosts stay on one member, no matter how many VMs move")
            .remedy(on(host, format!("ip link set dev {name} type bond xmit_hash_policy layer3+4"))),
        "802.3ad" | "balance-xor" => finding(
            "one connection (tcp) stays on one member; multichannel, and several VMs, use all",
            "nothing needs to be done; the switch must also hash ports for what it sends".into(),
        ),
        "active-backup" => finding(
            "one member carries everything, the others wait",
            "for more speed, take the bond apart and give each NIC a [[link]] of its own".into(),
        ),
        "balance-rr" => finding(
            "packets of one connection overtake each other, which TCP takes for loss",
            "take the bond apart and give each NIC a [[link]] of its own".into(),
        ),
        "balance-alb" | "balance-tlb" => finding(
            "the host sends on all members; from one other host it receives on one",
            "for more speed, take the bond apart and give each NIC a [[link]] of its own".into(),
        ),
        _ => finding("the bond counts as one link", "nothing needs to be done".into()),
    }
}

fn reverse_path_filter(host: &str, link: &LinkFacts) -> Option<Finding> {
    let name = &link.name;
    (link.reverse_path_filter == Some(STRICT)).then(|| {
        Finding::new(FindingCode::ReversePathFilter, here(host, link))
            .what(format!("{name} of {host} filters strictly by the reverse path (rp_filter = 1)"))
            .effect(
                "when a path leaves this host's route, the kernel drops what the other host still sends \
                over it, and a multichannel migration stalls",
            )
            .remedy(on(host, format!("sysctl -w net/ipv4/conf/{name}/rp_filter=2 (loose)")))
            .fix(Fix::LooseReversePathFilter { link: name.clone() })
    })
}

fn one_queue(facts: &CheckFacts, link: &LinkFacts) -> Option<Finding> {
    let (host, name) = (facts.name(), &link.name);
    let speed_mbps = facts.migration_link(name)?.speed_mbps?;
    let alone = link.receive_queues == Some(1) && link.receive_steering == Some(false);
    (alone && speed_mbps >= FAST_MBPS && facts.host.cores > 1).then(|| {
        let mask = steering_mask(facts.host.cores);
        Finding::new(FindingCode::OneReceiveQueue, here(host, link))
            .what(format!("{name} of {host} has {} and one receive queue, without RPS", mbps(speed_mbps)))
            .effect("one core handles everything that arrives, and limits the link")
            .remedy(on(
                host,
                format!(
                    "ethtool -L {name} combined {}; or, if it has but one queue: echo {mask} > \
                     /sys/class/net/{name}/queues/rx-0/rps_cpus",
                    facts.host.cores.min(8)
                ),
            ))
    })
}

fn one_queue_in_use(facts: &CheckFacts, link: &LinkFacts) -> Option<Finding> {
    let (host, name) = (facts.name(), &link.name);
    let speed_mbps = facts.migration_link(name)?.speed_mbps?;
    let queues = link.receive_queues.filter(|queues| *queues > 1)?;
    let spreads = link.receive_queues_in_use != Some(1) || link.receive_steering == Some(true);
    (!spreads && speed_mbps >= FAST_MBPS && facts.host.cores > 1).then(|| {
        Finding::new(FindingCode::OneReceiveQueueUsed, here(host, link))
            .what(format!("{name} of {host} has {queues} receive queues and uses only one of them"))
            .effect("one core handles everything that arrives, and limits the link")
            .remedy(on(host, format!("ethtool -X {name} default; ethtool -x {name} shows the table")))
    })
}

/// With one queue there is nothing to spread.
fn one_core(facts: &CheckFacts, link: &LinkFacts) -> Option<Finding> {
    let (host, name) = (facts.name(), &link.name);
    let speed_mbps = facts.migration_link(name)?.speed_mbps?;
    let queues = link.receive_queues.filter(|queues| *queues > 1)?;
    (link.interrupt_cores == Some(1) && speed_mbps >= FAST_MBPS && facts.host.cores > 1).then(|| {
        Finding::new(FindingCode::InterruptsOnOneCore, here(host, link))
            .what(format!("all {queues} receive queues of {name} of {host} interrupt one core"))
            .effect("one core handles everything that arrives, and limits the link")
            .remedy(on(
                host,
                format!(
                    "systemctl enable --now irqbalance; or, for each number N in /sys/class/net/{name}/device/msi_irqs, \
                     echo CORE > /proc/irq/N/smp_affinity_list"
                ),
            ))
    })
}

/// The first 32 cores, which are enough for any NIC of one queue.
fn steering_mask(cores: u32) -> String {
    let mask = u32::MAX >> (32 - cores.clamp(1, 32));
    format!("{mask:x}")
}
