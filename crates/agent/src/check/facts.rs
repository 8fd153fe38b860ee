//! What a host reports about itself to a check.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Instant;

use drainpipe_engine::check::facts::{CheckFacts, ForeignRoute, LIST_MAX, LinkFacts, LinkState};
use drainpipe_engine::check::trial::ClockDifference;
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Link, LinkKind, RdmaDevice};
use futures_util::future::join_all;
use jiff::Timestamp;

use super::Checks;
use super::sysfs::SysfsLink;
use crate::peers::client::ApiClient;
use crate::peers::release::{NoAnswer, ask_host};

/// What another host says of itself, and how far its clock is from this one's.
pub(super) async fn ask(
    checks: &Checks,
    peer: &ApiClient,
    name: &str,
) -> Result<(CheckFacts, ClockDifference), NoAnswer> {
    let before_ms = Timestamp::now().as_millisecond();
    let (facts, _): (CheckFacts, _) = ask_host(checks.host.name(), peer, name, "/v1/check/facts").await?;
    let after_ms = Timestamp::now().as_millisecond();
    facts.plausible(name).map_err(Problem::refused)?;
    let clock = ClockDifference::measured(before_ms, facts.clock_unix_ms, after_ms);
    Ok((facts, clock))
}

/// Reads them, as they are now.
pub(crate) async fn read(checks: &Checks) -> Result<CheckFacts, Problem> {
    let view = checks.host_view().await?;
    let kernel_links = checks.network.links().await.map_err(Problem::failed)?;
    let lately = checks.recent.look(Instant::now(), &kernel_links);
    let management =
        checks.host.network.management_addresses(&checks.host.config, &checks.host.peers()).await;
    let rdma_devices = drainpipe_net::rdma_devices().map_err(Problem::failed)?;
    let every_link = view.facts.links.iter().chain(&view.facts.management_links);
    let links = every_link.map(|wanted| async {
        match kernel_links.iter().find(|link| link.name == wanted.name) {
            Some(link) => LinkFacts {
                receive_queues_in_use: receive_queues_in_use(checks, link).await,
                rdma_device: RdmaDevice::of_link(&link.name, &rdma_devices).map(|device| device.name.clone()),
                is_speed_configured: is_speed_configured(checks, &link.name),
                counters: lately.get(&link.index).copied().unwrap_or_default(),
                ..link_facts(link, &management)
            },
            None => LinkFacts { name: wanted.name.clone(), ..LinkFacts::default() },
        }
    });
    let links = join_all(links).await;
    let ports = checks.host.config.migration_ports.ports();
    let mut foreign_routes = checks.host.network.foreign_host_routes().await?;
    foreign_routes.truncate(LIST_MAX);
    let foreign_route = |(address, protocol)| ForeignRoute { address, protocol };
    Ok(CheckFacts {
        foreign_host_routes: foreign_routes.into_iter().map(foreign_route).collect(),
        links,
        host: view.facts,
        agent_version: view.agent_version,
        protocols: view.protocols,
        kernel: view.kernel,
        migration_ports: [*ports.start(), *ports.end()],
        peers: checks.host.peers().into_iter().map(|peer| peer.name).collect(),
        clock_unix_ms: Timestamp::now().as_millisecond(),
        certificate_ends_unix_s: checks.peers.identity.not_after().as_second(),
        authority_ends_unix_s: Some(checks.peers.identity.authority_not_after().as_second()),
        qemu_replaced: checks.vms.facts().is_outdated(),
        libvirt_version: (checks.manager_version)(),
        huge_pages: huge_pages(),
        governors: of_cores("scaling_governor"),
        energy_preferences: of_cores("energy_performance_preference"),
        platform_profile: platform_profile(),
        tcp_receive_bytes: buffer_bytes("/proc/sys/net/ipv4/tcp_rmem"),
        tcp_send_bytes: buffer_bytes("/proc/sys/net/ipv4/tcp_wmem"),
    })
}

async fn receive_queues_in_use(checks: &Checks, link: &Link) -> Option<u32> {
    let queues = checks.network.receive_queues_in_use(&link.name).await?;
    u32::try_from(queues).ok()
}

fn is_speed_configured(checks: &Checks, link: &str) -> bool {
    let mut configured = checks.host.config.links.iter();
    configured.any(|configured| configured.name == link && configured.speed_mbps.is_some())
}

fn link_facts(link: &Link, management: &[IpAddr]) -> LinkFacts {
    let sysfs = SysfsLink::of(&link.name, link.index);
    // Links made of software have queues in name only: what arrives is taken by the core that sent it.
    let card = sysfs.as_ref().filter(|_| link.kind == LinkKind::Physical);
    let queues = card.and_then(SysfsLink::receive_queues);
    LinkFacts {
        name: link.name.clone(),
        state: match (link.up, link.carrier) {
            (false, _) => LinkState::Down,
            (true, false) => LinkState::NoCarrier,
            (true, true) => LinkState::Up,
        },
        carries_management: link.addresses.iter().any(|net| management.contains(&net.addr())),
        duplex: sysfs.as_ref().and_then(SysfsLink::duplex),
        driver_speed_mbps: link.speed_mbps,
        card_speed_mbps: link.card_speed_mbps,
        receive_queues: queues.map(|(count, _)| count),
        receive_steering: queues.map(|(_, steered)| steered),
        interrupt_cores: card.and_then(|card| card.interrupt_cores(Path::new("/proc/irq"))),
        bond: sysfs.as_ref().and_then(SysfsLink::bond),
        reverse_path_filter: reverse_path_filter(&link.name),
        ..LinkFacts::default()
    }
}

/// The kernel takes the greater of what holds for all links and for this one.
fn reverse_path_filter(link: &str) -> Option<u8> {
    let value = |of: &str| -> Option<u8> {
        fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{of}/rp_filter")).ok()?.trim().parse().ok()
    };
    Some(value("all")?.max(value(link)?))
}

/// The three numbers of a TCP buffer's setting.
fn buffer_bytes(setting: &str) -> Option<[u64; 3]> {
    let text = fs::read_to_string(setting).ok()?;
    let numbers: Option<Vec<u64>> = text.split_whitespace().map(|number| number.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// The kernel puts brackets around what holds: `always [madvise] never`.
fn huge_pages() -> Option<String> {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// The firmware's power profile, where the kernel can set it.
fn platform_profile() -> Option<String> {
    Some(fs::read_to_string("/sys/firmware/acpi/platform_profile").ok()?.trim().to_owned())
}

/// The values that a setting of the cores' frequency has, each once.
fn of_cores(setting: &str) -> Vec<String> {
    let policies = fs::read_dir("/sys/devices/system/cpu/cpufreq").into_iter().flatten().flatten();
    let used: BTreeSet<String> = policies
        .filter_map(|policy| fs::read_to_string(policy.path().join(setting)).ok())
        .map(|value| value.trim().to_owned())
        .collect();
    used.into_iter().collect()
}
