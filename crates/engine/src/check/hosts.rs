//! What is wrong with the hosts themselves: versions, clocks, certificates, cores, memory.

use super::Pair;
use super::facts::{CheckFacts, ForeignRoute};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place, on};
use crate::format::{duration, mib_free};
use crate::plan::{NoRdma, no_route};
use crate::protocol::{Speaker, agree};

/// The oldest that is tested.
const QEMU_OLDEST: [u32; 2] = [7, 2];
const KERNEL_OLDEST: [u32; 2] = [5, 15];

/// Clocks further apart than this make logs of two hosts misleading.
const CLOCK_MS_MAX: f64 = 1_000.0;

const DAY_S: i64 = 86_400;
const CERTIFICATE_DAYS_ERROR: i64 = 7;
const CERTIFICATE_DAYS_WARNING: i64 = 30;

/// Few VMs need less.
const MEMORY_LOW_BYTES: u64 = 1 << 30;

/// Where a newer QEMU than that of Debian 12 comes from.
pub(super) const NEWER_QEMU: &str = "Debian 12 has 7.2, its bookworm-backports a newer one";

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (own, other) in [(pair.source, pair.target), (pair.target, pair.source)] {
        findings.extend(unknown_peer(own, other));
        findings.extend(old_qemu(own));
        findings.extend(replaced_qemu(own));
        findings.extend(old_kernel(own));
        findings.extend(certificate(own));
        findings.extend(power(own));
        findings.extend(rdma_alone(own, other));
    }
    if pair.multichannel {
        findings.extend(taken_route(pair.source, pair.target));
        findings.extend(taken_route(pair.target, pair.source));
    }
    if pair.may_use_all {
        findings.extend(migration_addresses(pair));
    }
    findings.extend(rdma_unused(pair));
    findings.extend(older_target(pair));
    findings.extend(agent_versions(pair));
    findings.extend(clock(pair));
    findings.extend(little_memory(pair));
    findings
}

pub(super) fn both(pair: Pair<'_>) -> [Place; 2] {
    [Place::host(pair.source.name()), Place::host(pair.target.name())]
}

pub(super) fn here(facts: &CheckFacts) -> [Place; 1] {
    [Place::host(facts.name())]
}

fn unknown_peer(own: &CheckFacts, other: &CheckFacts) -> Option<Finding> {
    let (host, name) = (own.name(), other.name());
    (!own.peers.iter().any(|peer| peer == name)).then(|| {
        Finding::new(FindingCode::NotAPeer, here(own))
            .what(format!(
                "{host} is in no fleet with {name}, and has no [[peer]] `{name}` in its agent.toml"
            ))
            .effect(format!("{host} refuses migrations from {name}, and sends none there"))
            .remedy(on(
                host,
                format!("let it join (`drainpipe init`), or add [[peer]] with name = \"{name}\" and its address; systemctl restart drainpipe"),
            ))
    })
}

fn old_qemu(facts: &CheckFacts) -> Option<Finding> {
    let version = &facts.host.hypervisor.version;
    let old = numbers(version)? < QEMU_OLDEST;
    old.then(|| {
        Finding::new(FindingCode::QemuOld, here(facts))
            .what(format!("QEMU {version} of {} is older than {}", facts.name(), dotted(QEMU_OLDEST)))
            .effect("it lacks features that migrations rely on, so they fail")
            .remedy(on(facts.name(), "apt install qemu-system-x86 (Debian 12 has 7.2)"))
    })
}

fn replaced_qemu(facts: &CheckFacts) -> Option<Finding> {
    facts.qemu_replaced.then(|| {
        Finding::new(FindingCode::QemuReplaced, here(facts))
            .what(format!(
                "QEMU of {} was replaced since its agent started, which still knows {}",
                facts.name(),
                facts.host.hypervisor.version
            ))
            .effect(
                "the agent judges by what the old QEMU could do: a VM may be refused wrongly, or too late",
            )
            .remedy(on(facts.name(), "systemctl restart drainpipe (VMs keep running)"))
    })
}

fn old_kernel(facts: &CheckFacts) -> Option<Finding> {
    let old = numbers(&facts.kernel)? < KERNEL_OLDEST;
    old.then(|| {
        Finding::new(FindingCode::KernelOld, here(facts))
            .what(format!(
                "Linux {} of {} is older than {}",
                facts.kernel,
                facts.name(),
                dotted(KERNEL_OLDEST)
            ))
            .effect("multichannel is not tested on it")
            .remedy(on(facts.name(), "apt install linux-image-amd64, and reboot"))
    })
}

/// The first two numbers of a version; anything may follow them.
pub(super) fn numbers(version: &str) -> Option<[u32; 2]> {
    let [major, minor, _] = three_numbers(version)?;
    Some([major, minor])
}

/// The first three numbers of a version; the third is 0 where it is missing.
pub(super) fn three_numbers(version: &str) -> Option<[u32; 3]> {
    let mut numbers = version.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    let [major, minor] = [numbers.next()?.ok()?, numbers.next()?.ok()?];
    Some([major, minor, numbers.next().and_then(Result::ok).unwrap_or(0)])
}

pub(super) fn dotted([major, minor]: [u32; 2]) -> String {
    format!("{major}.{minor}")
}

fn older_target(pair: Pair<'_>) -> Option<Finding> {
    let [source, target] = [pair.source, pair.target].map(|facts| &facts.host.hypervisor.version);
    (numbers(target)? < numbers(source)?).then(|| {
        Finding::new(FindingCode::TargetQemuOlder, both(pair))
            .what(format!(
                "{} has QEMU {target}, {} the newer {source}",
                pair.target.name(),
                pair.source.name()
            ))
            .effect(format!(
                "a VM whose machine type is newer than QEMU {target} cannot go to {}",
                pair.target.name()
            ))
            .remedy(format!(
                "give VMs a `machine` that {} has too (qemu-system-x86_64 -machine help); or install QEMU {source} there \
                 ({NEWER_QEMU})",
                pair.target.name()
            ))
    })
}

fn agent_versions(pair: Pair<'_>) -> Option<Finding> {
    let [source, target] = [pair.source, pair.target].map(CheckFacts::release);
    let speakers = [
        Speaker { host: pair.source.name(), release: &source },
        Speaker { host: pair.target.name(), release: &target },
    ];
    let protocol = match agree(speakers[0], speakers[1]) {
        Ok(protocol) => protocol.number(),
        Err(apart) => return Some(apart.finding()),
    };
    (source != target).then(|| {
        Finding::new(FindingCode::AgentsDiffer, both(pair))
            .what(format!(
                "{} runs drainpipe {}, {} drainpipe {}",
                pair.source.name(),
                source.version,
                pair.target.name(),
                target.version
            ))
            .effect(format!(
                "VMs move in both directions, using what both releases know (protocol {protocol})"
            ))
            .remedy(
                "when all VMs are where they should be, install the newer one on both, and systemctl \
                restart drainpipe",
            )
    })
}

fn clock(pair: Pair<'_>) -> Option<Finding> {
    let difference = pair.clock;
    (difference.ahead_ms.abs() - difference.uncertainty_ms > CLOCK_MS_MAX).then(|| {
        let direction = if difference.ahead_ms > 0.0 { "ahead of" } else { "behind" };
        Finding::new(FindingCode::ClocksDiffer, both(pair))
            .what(format!(
                "the clock of {} is {} {direction} that of {}",
                pair.target.name(),
                duration(difference.ahead_ms.abs()),
                pair.source.name()
            ))
            .effect("the logs of the two hosts do not match in time; if the clocks are far apart, \
                certificates count as not valid yet")
            .remedy("on both: timedatectl set-ntp true; chronyc tracking, or timedatectl timesync-status, shows it")
    })
}

/// The host's certificate or its authority's, whichever ends first.
fn certificate(facts: &CheckFacts) -> Option<Finding> {
    let host = facts.name();
    let own_ends_s = facts.certificate_ends_unix_s;
    let authority_ends_s = facts.authority_ends_unix_s.filter(|ends_s| *ends_s <= own_ends_s);
    let left_s = authority_ends_s.unwrap_or(own_ends_s).saturating_sub(facts.clock_unix_ms.div_euclid(1_000));
    let days = left_s.div_euclid(DAY_S);
    if days >= CERTIFICATE_DAYS_WARNING {
        return None;
    }
    let finding = |code| {
        if days < CERTIFICATE_DAYS_ERROR {
            Finding::new(code, here(facts))
        } else {
            Finding::milder(code, here(facts))
        }
    };
    let ends = match days {
        ..0 => "has ended".to_owned(),
        0 => "ends within a day".to_owned(),
        _ => format!("ends in {days} days"),
    };
    Some(if authority_ends_s.is_some() {
        finding(FindingCode::AuthorityEnds)
            .what(format!("the certificate of the authority that {host} trusts {ends}"))
            .effect("from then on, its agent accepts no certificate of a host or an operator")
            .remedy(
                "make a new authority: drainpipe pki init --force; then drainpipe pki host HOST --force for each host \
                 and drainpipe pki operator NAME --force for each operator; copy the files; on each host: systemctl \
                 restart drainpipe",
            )
    } else {
        finding(FindingCode::CertificateEnds)
            .what(format!("the certificate of {host} {ends}"))
            .effect("from then on, no other host and no operator can talk to its agent")
            .remedy(format!(
                "where the authority is: drainpipe pki host {host} --force; copy the files to {host}; systemctl \
                 restart drainpipe"
            ))
    })
}

/// Settings that save power and time lost. Cores that choose their frequency by themselves (`intel_pstate`,
/// `amd_pstate`) call that the governor powersave; there the preference counts.
fn power(facts: &CheckFacts) -> Vec<Finding> {
    let host = facts.name();
    let effect = "cores stay slow while a migration begins, and a fast NIC is not filled";
    let finding = |code, what: String, command: &str| {
        Finding::new(code, here(facts)).what(what).effect(effect).remedy(on(host, command))
    };
    let saves = |value: &&String| matches!(value.as_str(), "power" | "balance_power");
    let governor =
        facts.energy_preferences.is_empty() && facts.governors.iter().any(|one| one == "powersave");
    let governor = governor.then(|| {
        let what = format!("cores of {host} run under the governor powersave");
        finding(FindingCode::GovernorPowersave, what, "cpupower frequency-set -g performance")
    });
    let preference = facts.energy_preferences.iter().find(saves).map(|value| {
        let what = format!("cores of {host} are told to prefer saving energy ({value})");
        let command =
            "echo performance | tee /sys/devices/system/cpu/cpufreq/policy*/energy_performance_preference";
        finding(FindingCode::EnergyPreference, what, command)
    });
    let slow = |profile: &&String| matches!(profile.as_str(), "low-power" | "cool" | "quiet");
    let profile = facts.platform_profile.as_ref().filter(slow).map(|profile| {
        let what = format!("the firmware of {host} has the power profile {profile}");
        finding(FindingCode::PowerProfile, what, "echo performance > /sys/firmware/acpi/platform_profile")
    });
    [governor, preference, profile].into_iter().flatten().collect()
}

fn rdma_alone(own: &CheckFacts, other: &CheckFacts) -> Option<Finding> {
    (!own.host.rdma_devices.is_empty() && other.host.rdma_devices.is_empty()).then(|| {
        Finding::new(FindingCode::RdmaOnOneSide, [Place::host(own.name()), Place::host(other.name())])
            .what(format!(
                "{} has RDMA ({}), {} has none",
                own.name(),
                own.host.rdma_devices.join(", "),
                other.name()
            ))
            .effect("the option direct becomes multichannel")
            .remedy(on(other.name(), "rdma link, to see what the kernel knows; load the NIC's RDMA driver"))
    })
}

/// Why `direct` would not use what both have. Nobody who did not ask for a check wants to know.
fn rdma_unused(pair: Pair<'_>) -> Option<Finding> {
    pair.trials?;
    let memory_bytes = pair.vms.iter().map(|vm| vm.vm.memory_bytes).max().unwrap_or(0);
    let why = NoRdma::for_direct(&pair.source.host, &pair.target.host, memory_bytes)?;
    let finding = Finding::new(FindingCode::RdmaUnused, both(pair)).what(why.to_string());
    Some(finding.effect("the option direct becomes multichannel").remedy(why.remedy()))
}

/// One connection needs none, nor does one path.
fn migration_addresses(pair: Pair<'_>) -> impl Iterator<Item = Finding> {
    let absent = [pair.source, pair.target].map(|own| no_migration_address(pair, own));
    absent
        .into_iter()
        .flatten()
        .chain(equal_migration_addresses(pair))
        .chain(unroutable_migration_addresses(pair))
}

/// One path needs no migration address.
fn no_migration_address(pair: Pair<'_>, own: &CheckFacts) -> Option<Finding> {
    let paths = pair.paths.len();
    let why = own.host.no_migration_address.as_ref();
    let why = why.map_or_else(|| "no migration_address is configured".into(), ToString::to_string);
    (own.host.migration_address.is_none() && paths > 1).then(|| {
        Finding::new(FindingCode::NoMigrationAddress, here(own))
            .what(format!("{} has no address for multichannel: {why}", own.name()))
            .effect(format!("migrations use only one of the {paths} paths"))
            .remedy(on(
                own.name(),
                "set migration_address to a free private address, another on each host; systemctl restart drainpipe",
            ))
    })
}

fn equal_migration_addresses(pair: Pair<'_>) -> Option<Finding> {
    let address = pair.source.host.migration_address?;
    (pair.target.host.migration_address == Some(address)).then(|| {
        Finding::new(FindingCode::MigrationAddressesEqual, both(pair))
            .what(format!("both hosts have the migration_address {address}"))
            .effect("multichannel migrations fail: a host cannot reach another under its own address")
            .remedy(on(
                pair.target.name(),
                "change migration_address in agent.toml; systemctl restart drainpipe",
            ))
    })
}

fn taken_route(own: &CheckFacts, other: &CheckFacts) -> Option<Finding> {
    let address = other.host.migration_address?;
    let route = own.foreign_host_routes.iter().find(|route| route.address == address)?;
    Some(route_taken(own.name(), other.name(), *route))
}

/// A route to the other host's migration address that is not Drainpipe's.
pub fn route_taken(host: &str, peer: &str, route: ForeignRoute) -> Finding {
    let ForeignRoute { address, protocol } = route;
    Finding::new(FindingCode::RouteTaken, [Place::host(host)])
        .what(format!(
            "the route of {host} to {address}, the migration address of {peer}, is another program's (route protocol \
             {protocol})"
        ))
        .effect(format!("what {host} sends to {peer} follows that route, instead of using all paths"))
        .remedy(format!("{}; and stop whatever makes it", on(host, format!("ip route del {address} proto {protocol}"))))
}

/// One path needs no migration address, and what is said above needs no second word.
fn unroutable_migration_addresses(pair: Pair<'_>) -> Option<Finding> {
    let [source, target] = [&pair.source.host, &pair.target.host];
    let said = source.migration_address.is_none()
        || target.migration_address.is_none()
        || source.migration_address == target.migration_address;
    if said || pair.paths.len() < 2 {
        return None;
    }
    let obstacle = no_route(source, target, pair.paths)?;
    Some(
        Finding::new(FindingCode::MigrationAddressesUnroutable, both(pair))
            .what(obstacle.to_string())
            .effect(format!("migrations use only one of the {} paths", pair.paths.len()))
            .remedy(
                "on both: set migration_address in agent.toml to a free private address, both of one IP version; \
                 systemctl restart drainpipe",
            ),
    )
}

/// Where VMs are known, it is said of those that do not fit.
fn little_memory(pair: Pair<'_>) -> Option<Finding> {
    let target = pair.target;
    let free = target.host.memory_available_bytes;
    (pair.vms.is_empty() && free < MEMORY_LOW_BYTES).then(|| {
        Finding::new(FindingCode::TargetMemoryLow, here(target))
            .what(format!("{} has {} of memory free", target.name(), mib_free(free)))
            .effect("larger VMs are refused there")
            .remedy(on(target.name(), "free -m; move other VMs away first"))
    })
}
