//! What is wrong with the paths: links that find no partner, and what does not get through.

use super::Pair;
use super::facts::{CheckFacts, LinkState};
use super::trial::PathTrial;
use crate::finding::code::FindingCode;
use crate::finding::{ANY_FIREWALL, Finding, Place, let_in, on};
use crate::host::facts::MigrationLink;
use crate::paths::path::Path;

mod capacity;
mod mtu;
mod negotiated;

/// Packets lost of a few dozen that say more than chance.
const LOST_MIN: u32 = 2;

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let mut findings = unusable_links(pair.source, pair.target);
    findings.extend(unusable_links(pair.target, pair.source));
    let paths = pair.paths;
    if paths.is_empty() {
        findings.push(no_path(pair));
    } else if pair.trials.is_some() {
        // A plan leaves out paths that its option cannot use.
        findings.extend(links_without_partner(pair));
    }
    findings.extend(paths.iter().filter_map(|path| mtu::differs(pair, path)));
    let some_path_works = pair.trials().iter().any(|trial| trial.connection_error.is_none());
    for trial in pair.trials() {
        findings.extend(reachability(pair, trial, some_path_works));
        findings.extend(mtu::does_not_pass(pair, trial));
        findings.extend(loss(pair, trial));
    }
    findings.extend(capacity::check(pair));
    findings.extend(negotiated::check(pair));
    findings
}

/// Both ends of a path.
fn ends(pair: Pair<'_>, path: &Path) -> [Place; 2] {
    [Place::link(pair.source.name(), &path.link), Place::link(pair.target.name(), &path.peer_link)]
}

fn unusable_links(own: &CheckFacts, other: &CheckFacts) -> Vec<Finding> {
    let unusable = own.host.links.iter().filter(|link| !link.usable);
    unusable.filter_map(|link| unusable_link(own, link, other)).collect()
}

fn unusable_link(own: &CheckFacts, link: &MigrationLink, other: &CheckFacts) -> Option<Finding> {
    let (host, name) = (own.name(), link.name.as_str());
    let finding = |code| {
        Finding::new(code, [Place::link(host, name)])
            .effect("migrations do not use this link, and fail if no other is left")
    };
    match own.link(name)?.state {
        LinkState::Missing => {
            Some(finding(FindingCode::LinkMissing).what(format!("{host} has no interface {name}")).remedy(
                on(host, format!("correct [[link]] `{name}` in agent.toml; `ip link` lists the interfaces")),
            ))
        }
        LinkState::Down => Some(
            finding(FindingCode::LinkDown)
                .what(format!("{name} of {host} is switched off"))
                .remedy(on(host, format!("ip link set dev {name} up"))),
        ),
        // Said already of the end that is switched off.
        LinkState::NoCarrier if partner_is_off(link, other) => None,
        LinkState::NoCarrier => Some(
            finding(FindingCode::LinkNoCarrier)
                .what(format!(
                    "{name} of {host} has no carrier: nothing answers at the other end of the cable"
                ))
                .remedy(format!(
                    "look at the cable and the switch port; on {host}: ethtool {name} | grep 'Link detected'"
                )),
        ),
        LinkState::Up => None,
    }
}

fn partner_is_off(link: &MigrationLink, other: &CheckFacts) -> bool {
    let shares_subnet = |partner: &MigrationLink| {
        partner.addresses.iter().any(|theirs| link.addresses.iter().any(|own| own.trunc() == theirs.trunc()))
    };
    let off = |partner: &MigrationLink| {
        other.link(&partner.name).is_some_and(|facts| facts.state == LinkState::Down)
    };
    other.host.links.iter().any(|partner| off(partner) && shares_subnet(partner))
}

fn no_path(pair: Pair<'_>) -> Finding {
    let (source, target) = (pair.source.name(), pair.target.name());
    Finding::new(FindingCode::NoPath, [Place::host(source), Place::host(target)])
        .what(format!(
            "no migration link of {source} ({}) reaches one of {target} ({})",
            in_words(&pair.source.host.links),
            in_words(&pair.target.host.links)
        ))
        .effect("every migration is refused")
        .remedy(format!(
            "look at cables and at the switch ports' VLANs; give both ends addresses in one subnet: ip address add \
             ADDRESS/24 dev LINK; or, for links without addresses, let their link-local addresses find each other; {}; {}; \
             {ANY_FIREWALL}",
            let_all_through(pair.source),
            let_all_through(pair.target)
        ))
}

fn in_words(links: &[MigrationLink]) -> String {
    if links.is_empty() {
        return "none is configured".into();
    }
    links.iter().map(link_in_words).collect::<Vec<_>>().join("; ")
}

fn link_in_words(link: &MigrationLink) -> String {
    let addresses: Vec<String> = link.addresses.iter().map(ToString::to_string).collect();
    let state = if link.usable { "" } else { ", not usable" };
    let addresses = if addresses.is_empty() { "without address".into() } else { addresses.join(", ") };
    format!("{} {addresses}{state}", link.name)
}

/// Links that work and yet stand in no path, at both ends: they were meant for each other.
fn links_without_partner(pair: Pair<'_>) -> Option<Finding> {
    let paths = pair.paths;
    let without = |facts: &CheckFacts, in_paths: Vec<&str>| -> Vec<MigrationLink> {
        let taken: Vec<&str> =
            in_paths.into_iter().filter_map(|name| Some(facts.host.link(name)?.card())).collect();
        let links = facts.host.links.iter();
        links.filter(|link| link.usable && !taken.contains(&link.card())).cloned().collect()
    };
    let source = without(pair.source, paths.iter().map(|path| path.link.as_str()).collect());
    let target = without(pair.target, paths.iter().map(|path| path.peer_link.as_str()).collect());
    if source.is_empty() || target.is_empty() {
        return None;
    }
    let places = |facts: &CheckFacts, links: &[MigrationLink]| -> Vec<Place> {
        links.iter().map(|link| Place::link(facts.name(), &link.name)).collect()
    };
    let finding = Finding::new(
        FindingCode::SubnetMismatch,
        [places(pair.source, &source), places(pair.target, &target)].concat(),
    );
    Some(
        finding
            .what(format!(
                "{} of {} and {} of {} are up, but in no common subnet, and do not answer each other over link-local addresses",
                in_words(&source),
                pair.source.name(),
                in_words(&target),
                pair.target.name()
            ))
            .effect("migrations do not use these links")
            .remedy(
                "give both ends addresses in one subnet, with one prefix length, and their switch ports one \
                 VLAN: ip address replace ADDRESS/24 dev LINK",
            ),
    )
}

/// What gets through, and in which direction. A TCP connection needs both, and so does a migration.
fn reachability(pair: Pair<'_>, trial: &PathTrial, some_path_works: bool) -> Option<Finding> {
    let (source, target) = (pair.source.name(), pair.target.name());
    let path = &trial.path;
    let (forward, backward) = (trial.forward.passes(), trial.backward.passes());
    let Some(error) = &trial.connection_error else {
        return (!forward || !backward).then(|| udp_blocked(pair, trial));
    };
    let finding = |code| {
        if some_path_works {
            Finding::milder(code, ends(pair, &trial.path)).effect("migrations do not use this path")
        } else {
            Finding::new(code, ends(pair, &trial.path)).effect("no path is left: every migration fails")
        }
    };
    let one_way = |from: &str, from_link: &str, to: &CheckFacts, to_link: &str| {
        let receiver = to.name();
        finding(FindingCode::PathOneWay)
            .what(format!(
                "what {receiver} sends over {to_link} reaches {from}, but nothing from {from_link} of {from} reaches it"
            ))
            .remedy(format!(
                "look at the cable's fibres and at the switch ports' VLANs; or, if a firewall of {receiver} \
                drops it (nft list ruleset), let it in; {}; {ANY_FIREWALL}",
                let_through(to, to_link, BOTH)
            ))
    };
    Some(match (forward, backward) {
        (true, true) => finding(FindingCode::TcpBlocked)
            .what(format!(
                "packets pass both ways between {path}, but no TCP connection to {target}: {error}"
            ))
            .remedy(format!("{}; {ANY_FIREWALL}", let_through(pair.target, &path.peer_link, TCP))),
        (true, false) => one_way(target, &path.peer_link, pair.source, &path.link),
        (false, true) => one_way(source, &path.link, pair.target, &path.peer_link),
        (false, false) => finding(FindingCode::PathSilent)
            .what(format!(
                "{} of {source} and {} of {target} are up, but nothing passes between {} and {}",
                path.link, path.peer_link, path.address, path.peer_address
            ))
            .remedy(format!(
                "look at the cable and at the switch ports' VLANs; if `ping -I {} {}` on {source} gets an \
                answer, look at the firewalls; {}; {}; {ANY_FIREWALL}",
                path.link,
                path.peer_address,
                let_through(pair.source, &path.link, BOTH),
                let_through(pair.target, &path.peer_link, BOTH)
            )),
    })
}

/// The rule is missing where they do not arrive.
fn udp_blocked(pair: Pair<'_>, trial: &PathTrial) -> Finding {
    let path = &trial.path;
    let (source, target) = (pair.source.name(), pair.target.name());
    let into_target =
        (!trial.forward.passes()).then(|| (target, let_through(pair.target, &path.peer_link, UDP)));
    let into_source = (!trial.backward.passes()).then(|| (source, let_through(pair.source, &path.link, UDP)));
    let (receivers, rules): (Vec<&str>, Vec<String>) = into_target.into_iter().chain(into_source).unzip();
    Finding::new(FindingCode::UdpBlocked, ends(pair, &trial.path))
        .what(format!("TCP connects over {path}, but datagrams do not arrive at {}", receivers.join(" and ")))
        .effect(
            "the path's MTU cannot be tested, and a multichannel migration cannot watch the path: if it dies \
             in flight, the migration stalls",
        )
        .remedy(format!("{}; {ANY_FIREWALL}", rules.join("; ")))
}

const TCP: &str = "tcp dport";
const UDP: &str = "udp dport";
/// Migrations need the one, the trials and the watch of their paths the other.
const BOTH: &str = "meta l4proto { tcp, udp } th dport";

/// The command that opens a host's migration ports on a link.
fn let_through(facts: &CheckFacts, link: &str, ports: &str) -> String {
    let [first, last] = facts.migration_ports;
    let_in(facts.name(), format!("iifname \"{link}\" {ports} {first}-{last}"))
}

/// The same for whatever link it may be.
fn let_all_through(facts: &CheckFacts) -> String {
    let [first, last] = facts.migration_ports;
    let_in(facts.name(), format!("{BOTH} {first}-{last}"))
}

fn loss(pair: Pair<'_>, trial: &PathTrial) -> Vec<Finding> {
    let directions = [
        (&trial.forward, pair.source.name(), pair.target.name()),
        (&trial.backward, pair.target.name(), pair.source.name()),
    ];
    let lossy = directions
        .into_iter()
        .filter(|(packets, ..)| packets.sent - packets.arrived.min(packets.sent) >= LOST_MIN);
    lossy
        .map(|(packets, from, to)| {
            let lost = packets.sent - packets.arrived;
            Finding::new(FindingCode::PathLosesPackets, ends(pair, &trial.path))
                .what(format!(
                    "{lost} of {} packets from {from} to {to} over {} were lost",
                    packets.sent, trial.path
                ))
                .effect("TCP takes loss for congestion: a few percent cost most of the path's speed")
                .remedy(format!(
                    "look at cable, transceiver and switch port; on {to}: ethtool -S {}",
                    if to == pair.target.name() { &trial.path.peer_link } else { &trial.path.link }
                ))
        })
        .collect()
}
