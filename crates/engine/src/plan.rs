//! The plan of one migration: which option, over which paths, with how many connections. An
//! immutable value, shown by `--dry-run`; who carries it out decides nothing.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use crate::encryption::{self, Encryption};
use crate::facts::{HostFacts, HypervisorVersion};
use crate::option::{MigrationOption, RequestedOption};
use crate::path::{Path, Reach, carries_route, find_paths};
use crate::relayed::{Compressible, NOTHING_SHRINKS, RelayMeans, Verdict};
use crate::standby::mark_standby;

/// Connections of a multichannel migration. The kernel places each on a path by its ports; with 16
/// on two equal paths all land on one with a chance of 2^-15. QEMU gives pages to whichever channel
/// is free, so an uneven placement costs nothing as long as no path stays empty.
pub const MULTICHANNEL_CONNECTIONS: u8 = 16;

/// What a core of each host carries encrypted, in Mb/s. A single connection has one thread that seals and one that
/// opens, so it carries little more. 7.06 Gb/s was the least of nine migrations over a link without a limit, each host on
/// a core of its own (`bench/README.md`, and docs/decisions/0036).
const CORE_ENCRYPTS_MBPS: u64 = 7_000;

/// How one migration will be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// What was asked for.
    pub requested_option: RequestedOption,
    /// What will be used.
    pub option: MigrationOption,
    /// Why `option` is not what was asked for, or why `auto` chose it.
    pub reason: Option<String>,
    /// Paths that will carry the migration. With [`Spread::InTurn`] only one does: the first that
    /// connects.
    pub paths: Vec<Path>,
    /// How the connections use the paths.
    pub spread: Spread,
    /// Connections for memory besides QEMU's main one; absent for a single stream.
    pub multifd_channels: Option<u8>,
    /// Whether a relay on either host packs the connections, as far as that makes them faster.
    #[serde(default)]
    pub is_compressed: bool,
    /// Whether the connections are encrypted, and why: by that relay, or with post-copy by the hypervisor.
    #[serde(default)]
    pub encryption: Encryption,
    /// Whether the VM may run on the target before all its memory is there, where it does not converge. From then on
    /// until the rest has followed, it needs both hosts.
    #[serde(default)]
    pub post_copy: bool,
}

/// What a caller asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Request {
    /// How memory shall travel.
    pub option: RequestedOption,
    /// Whether it shall be encrypted, whatever the hosts say.
    pub encrypt: bool,
    /// Whether the VM may run on the target before all its memory is there.
    pub post_copy: bool,
    /// What the VM's memory is to codecs, where it was looked at. Where not, nobody's memory is compressed without
    /// being asked for.
    pub memory: Option<Compressible>,
    /// The share of it that holds nothing but zeros, where it was looked at.
    pub zero_share: Option<f64>,
    /// What packing has saved between the two hosts, in Mb/s; absent where cores never were the limit.
    pub saved_mbps: Option<f64>,
    /// How much longer than predicted compressed migrations took, beside others; absent where none was.
    pub compressed_slower: Option<f64>,
}

impl From<RequestedOption> for Request {
    fn from(option: RequestedOption) -> Self {
        Self { option, ..Self::default() }
    }
}

/// How connections use paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// The first path that connects carries everything.
    InTurn,
    /// All paths carry, by a weighted multipath route between the hosts' migration addresses.
    Routed,
}

/// Why there can be no plan.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PlanError {
    /// No link of the one reaches a link of the other.
    #[error(
        "no path from {source_host} ({source_links}) to {target_host} ({target_links}): no two links are in \
         one subnet, and none answered over IPv6 link-local addresses; are the cables in, the switch ports in \
         one VLAN, the migration ports open for UDP in both firewalls? Or give both ends addresses in one subnet"
    )]
    NoPath {
        /// Name of the source.
        source_host: String,
        /// Its links, in words.
        source_links: String,
        /// Name of the target.
        target_host: String,
        /// Its links, in words.
        target_links: String,
    },
    /// Links share subnets, but nothing gets through.
    #[error(
        "nothing gets through from {source_host} to {target_host}: {tried}; \
         are the cables in, the switch ports in one VLAN, the migration ports open in both firewalls? \
         drainpipe check {source_host} {target_host} says which rule is missing"
    )]
    NothingGetsThrough {
        /// Name of the source.
        source_host: String,
        /// Name of the target.
        target_host: String,
        /// Each path and why it was given up.
        tried: String,
    },
    /// Post-copy takes one connection.
    #[error(
        "post-copy goes over one connection, both ways, which {option} does not: ask for the option tcp or auto with it"
    )]
    NoPostCopy {
        /// What was asked for with it.
        option: RequestedOption,
    },
    /// It shall be encrypted, and may not.
    #[error(
        "encryption was asked for, and is off on {host}: set encryption to \"allowed\" or \"required\" in its \
         agent.toml, or do not ask for it"
    )]
    EncryptionOff {
        /// Name of the host.
        host: String,
    },
}

/// What trying a path has shown: nothing against it, or why it cannot be used.
pub type PathTrial = Result<(), String>;

impl Plan {
    /// The same plan, its paths seen from the other end.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self { paths: self.paths.iter().map(Path::reversed).collect(), ..self.clone() }
    }

    /// Whether a relay stands on either host between QEMU and the network.
    pub fn is_relayed(&self) -> bool {
        self.is_compressed || (self.encryption.is_encrypted && !self.is_encrypted_by_hypervisor())
    }

    /// Whether the hypervisor encrypts it, by its own TLS. With post-copy the VM is lost if a part of its memory is, and a
    /// relay would end with its agent.
    pub fn is_encrypted_by_hypervisor(&self) -> bool {
        self.encryption.is_encrypted && self.post_copy
    }

    /// The paths that carry at once.
    pub fn carrying(&self) -> impl Iterator<Item = &Path> {
        let most = if self.spread == Spread::InTurn { 1 } else { self.paths.len() };
        self.paths.iter().filter(|path| !path.is_standby).take(most)
    }

    /// What they carry together, in Mb/s; absent where a speed is not known.
    pub fn carried_mbps(&self) -> Option<u64> {
        self.carrying().map(|path| path.speed_mbps).sum()
    }

    /// What is left of the plan once each of its paths has been tried; `trials` in their order.
    pub fn narrow(
        self,
        trials: &[PathTrial],
        source_host: &str,
        target_host: &str,
    ) -> Result<Self, PlanError> {
        let failed: Vec<String> = self
            .paths
            .iter()
            .zip(trials)
            .filter_map(|(path, trial)| Some(format!("{path}: {}", trial.as_ref().err()?)))
            .collect();
        let mut paths: Vec<Path> = self
            .paths
            .into_iter()
            .zip(trials)
            .filter_map(|(path, trial)| trial.is_ok().then_some(path))
            .collect();
        if paths.is_empty() {
            return Err(PlanError::NothingGetsThrough {
                source_host: source_host.into(),
                target_host: target_host.into(),
                tried: failed.join(", "),
            });
        }
        if self.spread == Spread::InTurn {
            paths.truncate(1);
        }
        if paths.iter().all(|path| path.is_standby) {
            for path in &mut paths {
                path.is_standby = false;
            }
        }
        let left_out = (!failed.is_empty()).then(|| format!("left out {}", failed.join(", ")));
        let reason = join_all([self.reason, left_out]);
        Ok(Self { reason, paths, ..self })
    }
}

/// Said where compression was asked for and no prediction is possible.
const SPEED_UNKNOWN: &str = "whether a relay outruns the paths cannot be told, since a speed is not known: set \
                             speed_mbps of the [[link]] in agent.toml";

/// Makes the plan for a migration between two hosts. `reaches` is what trying the
/// [`links_to_try`](crate::path::links_to_try) has shown.
pub fn plan(
    source: &HostFacts,
    target: &HostFacts,
    request: impl Into<Request>,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<Plan, PlanError> {
    let request = request.into();
    if request.post_copy {
        return over_one_connection(source, target, request, reaches, memory_bytes);
    }
    let Request { option: requested, encrypt, .. } = request;
    let paths = find_paths(source, target, requested, reaches);
    if paths.is_empty() {
        return Err(PlanError::NoPath {
            source_host: source.name.clone(),
            source_links: describe_links(source),
            target_host: target.name.clone(),
            target_links: describe_links(target),
        });
    }
    let unroutable = routing_obstacle(source, target, &paths);
    let (mut routable, others) = split_by_route(source, paths.clone());
    let usable = if unroutable.is_none() { routable.len() } else { paths.len() };
    let (option, reason) = choose(requested, usable, rdma_obstacle(source, target), unroutable.as_deref());
    let carrying = if unroutable.is_none() { &routable[..] } else { &paths[..1] };
    let covered = if unroutable.is_none() { &routable } else { &paths };
    // Where it cannot be as it was asked for, there is no plan; see below.
    let is_encrypted = encryption::decide(source, target, encrypt, covered).is_ok_and(|it| it.is_encrypted);
    let means = RelayMeans::of(source, target, carrying.iter(), is_encrypted, &request);
    let no_packing = packing_obstacle(source);
    let (option, reason) =
        weigh_compression(request, means, no_packing, option, reason, unroutable.is_none());
    let management = over_management(source, target, &paths);
    let mut plan = arrange(requested, option, join_all([reason, management]), paths, unroutable.is_none());
    if plan.spread == Spread::Routed {
        let standby = mark_standby(&mut routable, memory_bytes);
        let reason = join_all([plan.reason, left_out(&others), standby]);
        plan = Plan { reason, paths: routable, ..plan };
    }
    let decided = encryption::decide(source, target, encrypt, &plan.paths);
    let encryption = decided.map_err(|host| PlanError::EncryptionOff { host })?;
    Ok(encrypt_on_several_cores(Plan { encryption, ..plan }))
}

/// QEMU 10.0 refuses post-copy together with multifd, and 7.2 does not say what comes of it.
fn over_one_connection(
    source: &HostFacts,
    target: &HostFacts,
    request: Request,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<Plan, PlanError> {
    let requested_option = request.option;
    if !matches!(requested_option, RequestedOption::Tcp | RequestedOption::Auto) {
        return Err(PlanError::NoPostCopy { option: requested_option });
    }
    let tcp = Request { option: RequestedOption::Tcp, post_copy: false, ..request };
    let made = plan(source, target, tcp, reaches, memory_bytes)?;
    let why = "over one connection, which post-copy needs both ways of";
    let reason = join_all([Some(why.into()), made.reason]);
    Ok(Plan { requested_option, reason, post_copy: true, ..made })
}

/// Where one connection would be encrypted that a path may outrun, several share that path, unless one was asked for.
/// They need no more than the one does: neither a route nor migration addresses, which a network may not let through.
fn encrypt_on_several_cores(plan: Plan) -> Plan {
    let is_one_connection =
        plan.requested_option != RequestedOption::Tcp && plan.option == MigrationOption::Tcp;
    let is_outrun = |path: &Path| path.speed_mbps.is_none_or(|speed_mbps| speed_mbps > CORE_ENCRYPTS_MBPS);
    let Some(path) = plan.paths.iter().find(|path| is_outrun(path)) else { return plan };
    if !is_one_connection || !plan.encryption.is_encrypted {
        return plan;
    }
    let core_gbps = CORE_ENCRYPTS_MBPS as f64 / 1e3;
    let than = match path.speed_mbps {
        Some(speed_mbps) => format!("fewer than the {:.1} of {path}", speed_mbps as f64 / 1e3),
        None => format!("and the speed of {path} is not known"),
    };
    let why = format!(
        "{MULTICHANNEL_CONNECTIONS} connections share it, since a core of each host encrypts some {core_gbps:.0} Gb/s, \
         {than}"
    );
    let reason = join_all([plan.reason, Some(why)]);
    let multifd_channels = Some(MULTICHANNEL_CONNECTIONS);
    Plan { option: MigrationOption::Multichannel, reason, multifd_channels, ..plan }
}

/// Those that a route between the migration addresses can go over, and the others.
fn split_by_route(source: &HostFacts, paths: Vec<Path>) -> (Vec<Path>, Vec<Path>) {
    let Some(address) = source.migration_address else { return (vec![], paths) };
    paths.into_iter().partition(|path| carries_route(path, address))
}

fn no_route(address: IpAddr, paths: &[Path]) -> Option<String> {
    let routable = paths.iter().any(|path| carries_route(path, address));
    (!routable).then(|| format!(
        "no path has IPv6, as the migration address {address} needs; give both hosts a private IPv4 address as \
         migration_address"
    ))
}

fn left_out(paths: &[Path]) -> Option<String> {
    let names: Vec<String> = paths.iter().map(ToString::to_string).collect();
    (!names.is_empty())
        .then(|| format!("left out {}: without IPv6, which the migration addresses need", names.join(", ")))
}

fn over_management(source: &HostFacts, target: &HostFacts, paths: &[Path]) -> Option<String> {
    let is_management =
        |host: &HostFacts, name: &str| host.management_links.iter().any(|link| link.name == name);
    let uses =
        paths.iter().any(|path| is_management(source, &path.link) || is_management(target, &path.peer_link));
    uses.then(|| "over the management network: no other link makes a path".into())
}

fn choose(
    requested: RequestedOption,
    paths: usize,
    no_rdma: String,
    unroutable: Option<&str>,
) -> (MigrationOption, Option<String>) {
    let multichannel_or_tcp = |because: String, otherwise: &str| match unroutable {
        None => (MigrationOption::Multichannel, because),
        Some(obstacle) => (MigrationOption::Tcp, join(&because, &format!("{otherwise}: {obstacle}"))),
    };
    let (impossible, over_one) = ("multichannel is not possible", "over one path");
    let one_path = unroutable.map(|obstacle| format!("{over_one}: {obstacle}"));
    let (option, reason) = match requested {
        RequestedOption::Tcp => return (MigrationOption::Tcp, None),
        RequestedOption::Compression => return (MigrationOption::Compression, one_path),
        RequestedOption::QemuZstd1 => return (MigrationOption::QemuZstd1, one_path),
        RequestedOption::QemuZstd3 => return (MigrationOption::QemuZstd3, one_path),
        RequestedOption::Multichannel => multichannel_or_tcp(String::new(), impossible),
        RequestedOption::Direct => multichannel_or_tcp(no_rdma, impossible),
        // It may have several connections all the same, to encrypt on several cores.
        RequestedOption::Auto if paths > 1 => {
            multichannel_or_tcp(format!("{paths} paths, {no_rdma}"), over_one)
        }
        RequestedOption::Auto => (MigrationOption::Tcp, format!("one path only, {no_rdma}")),
    };
    (option, (!reason.is_empty()).then_some(reason))
}

/// Compression only where it can make a migration faster; and unasked for where it does so for certain.
fn weigh_compression(
    request: Request,
    means: Option<RelayMeans>,
    no_packing: Option<String>,
    option: MigrationOption,
    reason: Option<String>,
    is_routable: bool,
) -> (MigrationOption, Option<String>) {
    let because = |why: String| join_all([reason.clone(), Some(why)]);
    let native = if is_routable { MigrationOption::Multichannel } else { MigrationOption::Tcp };
    if let (RequestedOption::Compression, Some(why)) = (request.option, no_packing) {
        return (native, because(why));
    }
    let Some(means) = means else {
        // What the paths carry is not known.
        return match request.memory {
            Some(memory) if request.option == RequestedOption::Compression && !memory.shrinks() => {
                (native, because(NOTHING_SHRINKS.into()))
            }
            _ if request.option == RequestedOption::Compression => (option, because(SPEED_UNKNOWN.into())),
            _ => (option, reason),
        };
    };
    match means.verdict(request.memory) {
        Verdict::Compressed { .. } if means.is_asked_for => (option, reason),
        Verdict::Compressed { wire_share } => {
            let why = format!("compressed: takes {:.0} % of the time, as predicted", wire_share * 100.0);
            (MigrationOption::Compression, because(why))
        }
        verdict if means.is_asked_for => (native, because(means.why_not(verdict))),
        _ => (option, reason),
    }
}

/// Why nothing on this host may pack.
fn packing_obstacle(source: &HostFacts) -> Option<String> {
    let since = source.no_packing.map(|why| format!(", since {why}")).unwrap_or_default();
    (source.packing_cores == Some(0))
        .then(|| format!("not compressed: no core of the source may pack{since}"))
}

fn arrange(
    requested_option: RequestedOption,
    option: MigrationOption,
    reason: Option<String>,
    paths: Vec<Path>,
    routable: bool,
) -> Plan {
    let (spread, multifd_channels) = match option {
        MigrationOption::Tcp => (Spread::InTurn, None),
        _ if !routable => (Spread::InTurn, Some(MULTICHANNEL_CONNECTIONS)),
        _ => (Spread::Routed, Some(MULTICHANNEL_CONNECTIONS)),
    };
    let is_compressed = option == MigrationOption::Compression;
    let encryption = Encryption::default();
    Plan {
        requested_option,
        option,
        reason,
        paths,
        spread,
        multifd_channels,
        is_compressed,
        encryption,
        post_copy: false,
    }
}

/// Why nothing can be routed between the hosts' migration addresses over these paths.
pub(crate) fn routing_obstacle(source: &HostFacts, target: &HostFacts, paths: &[Path]) -> Option<String> {
    let (Some(own), Some(peer)) = (source.migration_address, target.migration_address) else {
        let without = [source, target].into_iter().filter(|host| host.migration_address.is_none());
        let words: Vec<String> = without.map(without_migration_address).collect();
        return Some(words.join(", "));
    };
    if own == peer {
        return Some(format!(
            "{} and {} have the same migration address {own}; set migration_address on one to another one",
            source.name, target.name
        ));
    }
    if own.is_ipv4() != peer.is_ipv4() {
        return Some(format!(
            "the migration addresses of {} ({own}) and {} ({peer}) are of different IP versions; set \
             migration_address to the same version on both, or on neither",
            source.name, target.name
        ));
    }
    in_a_subnet(own, target).or_else(|| in_a_subnet(peer, source)).or_else(|| no_route(own, paths))
}

fn without_migration_address(host: &HostFacts) -> String {
    match &host.no_migration_address {
        Some(why) => format!("on {} {why}; set it to a free private address in its agent.toml", host.name),
        None => format!("no migration_address is configured on {}", host.name),
    }
}

/// A route to the address would take away what is meant for that subnet.
fn in_a_subnet(address: IpAddr, host: &HostFacts) -> Option<String> {
    let nets = host.links.iter().chain(&host.management_links).flat_map(|link| &link.addresses);
    let net = nets.filter(|net| net.contains(&address)).min_by_key(|net| net.trunc())?;
    Some(format!(
        "the migration address {address} is within {} of {}; set migration_address to a free private one",
        net.trunc(),
        host.name
    ))
}

/// Why RDMA cannot be used, in the same words whichever host is the source.
fn rdma_obstacle(source: &HostFacts, target: &HostFacts) -> String {
    let mut hosts = [source, target];
    hosts.sort_by(|one, other| one.name.cmp(&other.name));
    let without: Vec<&str> =
        hosts.iter().filter(|host| host.rdma_devices.is_empty()).map(|host| host.name.as_str()).collect();
    if !without.is_empty() {
        return format!("no RDMA device on {}", without.join(" and "));
    }
    match hosts.iter().find(|host| !host.hypervisor.rdma) {
        Some(host) => {
            let HypervisorVersion { name, version, .. } = &host.hypervisor;
            format!("{name} {version} on {} is built without RDMA", host.name)
        }
        None => "both hosts have RDMA, which this version of Drainpipe does not use yet".into(),
    }
}

fn join_all<const N: usize>(reasons: [Option<String>; N]) -> Option<String> {
    let joined = reasons.into_iter().flatten().reduce(|one, other| join(&one, &other));
    joined.filter(|joined| !joined.is_empty())
}

fn join(one: &str, other: &str) -> String {
    if one.is_empty() { other.into() } else { format!("{one}; {other}") }
}

fn describe_links(host: &HostFacts) -> String {
    if host.links.is_empty() {
        return "no links fit for migrations".into();
    }
    let links: Vec<String> = host
        .links
        .iter()
        .map(|link| {
            let addresses: Vec<String> = link.addresses.iter().map(ToString::to_string).collect();
            let state = if link.usable { "" } else { " down" };
            format!("{}{state} {}", link.name, addresses.join(" "))
        })
        .collect();
    links.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encryption::EncryptionPolicy;
    use crate::facts::{MigrationLink, NoMigrationAddress, NoPacking};

    const GIB: u64 = 1 << 30;

    fn host(name: &str, last: u8, links: u8) -> HostFacts {
        HostFacts {
            name: name.into(),
            cores: 2,
            idle_cores: None,
            vm_cores: 0.0,
            packing_cores: None,
            no_packing: None,
            memory_available_bytes: 1 << 34,
            huge_pages_available: vec![],
            links: (0..links)
                .map(|index| MigrationLink {
                    name: format!("e{index}"),
                    addresses: vec![format!("10.77.{}.{last}/24", index + 1).parse().unwrap()],
                    speed_mbps: Some(1000),
                    mtu: 1500,
                    usable: true,
                    is_trusted: true,
                    card: None,
                })
                .collect(),
            management_links: vec![],
            encryption: EncryptionPolicy::Required,
            migration_address: Some(format!("10.77.200.{last}").parse().unwrap()),
            bandwidth_limit_mbps: None,
            no_migration_address: None,
            rdma_devices: vec![],
            hypervisor: HypervisorVersion { name: "QEMU".into(), version: "7.2.22".into(), rdma: true },
        }
    }

    #[test]
    fn auto_takes_multichannel_over_two_paths_and_tcp_over_one() {
        let two = plan(&host("a", 1, 2), &host("b", 2, 2), RequestedOption::Auto, &[], GIB).unwrap();
        assert_eq!(two.option, MigrationOption::Multichannel);
        assert_eq!(two.spread, Spread::Routed);
        assert_eq!(two.paths.len(), 2);
        let one = plan(&host("a", 1, 1), &host("b", 2, 2), RequestedOption::Auto, &[], GIB).unwrap();
        assert_eq!(one.option, MigrationOption::Tcp);
        assert!(one.reason.unwrap().contains("one path only"));
    }

    #[test]
    fn post_copy_goes_over_one_connection_and_says_so() {
        let request = |option| Request { post_copy: true, encrypt: true, ..Request::from(option) };
        let plan_of = |option| plan(&host("a", 1, 2), &host("b", 2, 2), request(option), &[], GIB);
        for option in [RequestedOption::Auto, RequestedOption::Tcp] {
            let plan = plan_of(option).unwrap();
            assert!(plan.post_copy && plan.is_encrypted_by_hypervisor() && !plan.is_relayed());
            assert_eq!((plan.requested_option, plan.option), (option, MigrationOption::Tcp));
            assert_eq!((plan.spread, plan.multifd_channels), (Spread::InTurn, None));
            assert!(plan.reason.unwrap().starts_with("over one connection"));
        }
        let error = plan_of(RequestedOption::Multichannel).unwrap_err().to_string();
        assert!(error.contains("which multichannel does not"), "{error}");
    }

    #[test]
    fn what_may_be_faster_than_one_connection_is_encrypted_by_several() {
        let pair = |links: u8, speed_mbps| {
            [("a", 1), ("b", 2)].map(|(name, last)| {
                let mut host = host(name, last, links);
                for link in &mut host.links {
                    (link.speed_mbps, link.is_trusted) = (speed_mbps, false);
                }
                host
            })
        };
        let auto = |[a, b]: &[HostFacts; 2]| plan(a, b, RequestedOption::Auto, &[], GIB).unwrap();
        let several = (MigrationOption::Multichannel, Spread::InTurn, Some(MULTICHANNEL_CONNECTIONS));
        let one = (MigrationOption::Tcp, Spread::InTurn, None);
        let how = |plan: &Plan| (plan.option, plan.spread, plan.multifd_channels);
        for (speed_mbps, expected, words) in [
            (Some(25_000), several, "encrypts some 7 Gb/s, fewer than the 25.0 of e0–e0"),
            (None, several, "and the speed of e0–e0 is not known"),
            (Some(CORE_ENCRYPTS_MBPS), one, "one path only, no RDMA device on a and b"),
        ] {
            let plan = auto(&pair(1, speed_mbps));
            assert!(plan.encryption.is_encrypted);
            assert_eq!(how(&plan), expected, "{speed_mbps:?}");
            let reason = plan.reason.unwrap();
            assert!(reason.starts_with("one path only") && reason.ends_with(words), "{reason}");
        }
        // Of several paths that nothing can be routed over, too.
        let [a, b] = pair(2, Some(25_000));
        let unroutable_pair = [HostFacts { migration_address: None, ..a }, b];
        let unroutable = auto(&unroutable_pair);
        assert_eq!(how(&unroutable), several);
        let reason = unroutable.reason.as_ref().unwrap();
        assert!(
            reason.contains("2 paths") && reason.contains("over one path: no migration_address"),
            "{reason}"
        );
        let narrowed = unroutable.narrow(&[Err("no answer".to_owned()), Ok(())], "a", "b").unwrap();
        assert_eq!((how(&narrowed), narrowed.paths.len()), (several, 1));
        for option in [RequestedOption::Multichannel, RequestedOption::Compression, RequestedOption::Direct] {
            let [a, b] = &unroutable_pair;
            let asked = Request { memory: Some(Compressible { share: 0.0, left: 1.0 }), ..option.into() };
            assert_eq!(how(&plan(a, b, asked, &[], GIB).unwrap()), several, "{option}");
        }
        // In the clear one connection is enough, and who asks for one gets it.
        let [mut a, mut b] = pair(1, Some(25_000));
        let asked = plan(&a, &b, RequestedOption::Tcp, &[], GIB).unwrap();
        assert_eq!((how(&asked), asked.reason), (one, None));
        (a.links[0].is_trusted, b.links[0].is_trusted) = (true, true);
        assert_eq!(how(&auto(&[a, b])), one);
    }

    #[test]
    fn compression_stays_out_where_the_paths_outrun_it_and_a_limit_of_either_host_slows_them() {
        let fast = |name, last| {
            let mut host = host(name, last, 2);
            for link in &mut host.links {
                link.speed_mbps = Some(5000);
            }
            host
        };
        let option = |source: &HostFacts, target: &HostFacts| {
            plan(source, target, RequestedOption::Compression, &[], GIB).unwrap()
        };
        let (a, b) = (fast("a", 1), fast("b", 2));
        let out = option(&a, &b);
        assert_eq!((out.option, out.is_compressed), (MigrationOption::Multichannel, false));
        assert!(out.reason.unwrap().contains("the paths carry 10.0 Gb/s"));
        for (limit_mbps, is_compressed) in [(1000, true), (7000, true), (8000, false), (20_000, false)] {
            let limited =
                |host: &HostFacts| HostFacts { bandwidth_limit_mbps: Some(limit_mbps), ..host.clone() };
            for plan in [option(&limited(&a), &b), option(&a, &limited(&b))] {
                assert_eq!(plan.is_compressed, is_compressed, "{limit_mbps}: {:?}", plan.reason);
            }
        }
    }

    #[test]
    fn auto_compresses_what_is_known_to_shrink_where_cores_are_idle() {
        let auto = |memory, idle_cores| {
            let host = |name, last, links| HostFacts { idle_cores, ..host(name, last, links) };
            let request = Request { memory, ..RequestedOption::Auto.into() };
            [1, 2].map(|links| plan(&host("a", 1, links), &host("b", 2, 2), request, &[], GIB).unwrap())
        };
        let text = Some(Compressible { share: 0.5, left: 0.3 });
        for plan in auto(text, Some(2.0)) {
            assert!(plan.is_compressed && plan.spread == Spread::Routed, "{plan:?}");
            assert!(plan.reason.unwrap().contains("compressed: takes 65 % of the time"));
        }
        let random = Some(Compressible { share: 0.02, left: 0.9 });
        let no_gain =
            [auto(text, Some(0.2)), auto(text, None), auto(None, Some(2.0)), auto(random, Some(2.0))];
        for plan in no_gain.into_iter().flatten() {
            assert!(!plan.is_compressed && !plan.reason.unwrap().contains("compressed"));
        }
    }

    #[test]
    fn what_does_not_shrink_is_not_compressed_whoever_asks() {
        let random = Some(Compressible { share: 0.0, left: 1.0 });
        let request = Request { memory: random, ..RequestedOption::Compression.into() };
        let plan_of =
            |source: &HostFacts, target: &HostFacts| plan(source, target, request, &[], GIB).unwrap();
        let plan = plan_of(&host("a", 1, 2), &host("b", 2, 2));
        assert_eq!((plan.option, plan.is_compressed), (MigrationOption::Multichannel, false));
        assert_eq!(plan.reason.unwrap(), "not compressed: hardly any of the memory shrinks");
        // Nor over one path, nor where it is not known what the paths carry.
        let one_path = HostFacts { migration_address: None, ..host("b", 2, 2) };
        let plan = plan_of(&host("a", 1, 2), &one_path);
        assert_eq!((plan.option, plan.is_compressed), (MigrationOption::Tcp, false));
        let reason = plan.reason.unwrap();
        assert!(reason.contains("over one path") && reason.contains("hardly any"), "{reason}");
        let mut unknown = host("a", 1, 2);
        unknown.links.iter_mut().for_each(|link| link.speed_mbps = None);
        let mut other = host("b", 2, 2);
        other.links.iter_mut().for_each(|link| link.speed_mbps = None);
        assert!(!plan_of(&unknown, &other).is_compressed);
        // Of what shrinks it is told that nobody knows whether it pays.
        let plan = super::plan(&unknown, &other, RequestedOption::Compression, &[], GIB).unwrap();
        assert!(plan.is_compressed && plan.reason.unwrap().contains("set speed_mbps"));
    }

    #[test]
    fn where_nothing_packs_memory_goes_as_it_is_whether_or_not_a_speed_is_known() {
        let (mut a, mut b) = (host("a", 1, 2), host("b", 2, 2));
        (a.packing_cores, a.no_packing) = (Some(0), Some(NoPacking::CpusLost));
        for speed_mbps in [Some(1_000), None] {
            for link in a.links.iter_mut().chain(&mut b.links) {
                link.speed_mbps = speed_mbps;
            }
            let asked = plan(&a, &b, RequestedOption::Compression, &[], GIB).unwrap();
            assert_eq!((asked.option, asked.is_compressed), (MigrationOption::Multichannel, false));
            let reason = asked.reason.unwrap();
            let words =
                "not compressed: no core of the source may pack, since the agent may not run any more on any";
            assert!(reason.starts_with(words), "{reason}");
            let auto = plan(&a, &b, RequestedOption::Auto, &[], GIB).unwrap();
            assert_eq!(auto.reason.unwrap(), "2 paths, no RDMA device on a and b");
            // What the target packs does not matter.
            let back = plan(&b, &a, RequestedOption::Compression, &[], GIB).unwrap();
            assert!(back.is_compressed, "{:?}", back.reason);
        }
    }

    #[test]
    fn direct_without_rdma_falls_back_and_says_on_which_host() {
        let mut b = host("b", 2, 2);
        b.rdma_devices = vec!["mlx5_0".into()];
        let plan = plan(&host("a", 1, 2), &b, RequestedOption::Direct, &[], GIB).unwrap();
        assert_eq!(plan.option, MigrationOption::Multichannel);
        assert_eq!(plan.reason.unwrap(), "no RDMA device on a");
    }

    #[test]
    fn multichannel_without_a_migration_address_falls_back_to_tcp() {
        let mut b = host("b", 2, 2);
        b.migration_address = None;
        let plan = plan(&host("a", 1, 2), &b, RequestedOption::Multichannel, &[], GIB).unwrap();
        assert_eq!(plan.option, MigrationOption::Tcp);
        assert!(plan.reason.unwrap().contains("no migration_address is configured on b"));
    }

    fn with_ipv6(name: &str, last: u8) -> HostFacts {
        let mut host = host(name, last, 2);
        host.migration_address = Some(format!("fd00::{last}").parse().unwrap());
        for link in &mut host.links {
            link.addresses.push(format!("fe80::{last}/64").parse().unwrap());
        }
        host
    }

    fn reach(link: &str) -> Reach {
        Reach { link: link.into(), peer_link: link.into() }
    }

    #[test]
    fn ipv6_routes_go_over_the_paths_that_have_it_and_the_others_are_named() {
        let (a, b) = (with_ipv6("a", 1), with_ipv6("b", 2));
        let asked = RequestedOption::Multichannel;
        let both = plan(&a, &b, asked, &[reach("e0"), reach("e1")], GIB).unwrap();
        assert_eq!((both.paths.len(), both.reason), (2, None));
        let one = plan(&a, &b, asked, &[reach("e1")], GIB).unwrap();
        assert_eq!((one.paths.len(), one.paths[0].link.as_str()), (1, "e1"));
        assert!(one.reason.unwrap().contains("left out e0–e0: without IPv6"));
        let none = plan(&a, &b, asked, &[], GIB).unwrap();
        assert_eq!((none.option, none.paths.len()), (MigrationOption::Tcp, 2));
        assert!(none.reason.unwrap().contains("give both hosts a private IPv4 address"));
        let auto = plan(&a, &b, RequestedOption::Auto, &[reach("e0"), reach("e1")], GIB).unwrap();
        assert_eq!(auto.option, MigrationOption::Multichannel);
    }

    #[test]
    fn migration_addresses_that_cannot_be_routed_are_explained() {
        let reason = |change: fn(&mut HostFacts)| {
            let mut b = host("b", 2, 2);
            change(&mut b);
            let plan = plan(&host("a", 1, 2), &b, RequestedOption::Multichannel, &[], GIB).unwrap();
            assert_eq!(plan.option, MigrationOption::Tcp);
            plan.reason.unwrap()
        };
        for (change, words) in [
            (
                (|b| b.migration_address = Some("10.77.200.1".parse().unwrap())) as fn(&mut HostFacts),
                "the same",
            ),
            (|b| b.migration_address = Some("fd00::2".parse().unwrap()), "different IP versions"),
            (|b| b.migration_address = Some("10.77.1.9".parse().unwrap()), "within 10.77.1.0/24 of a"),
            (
                |b| (b.migration_address, b.no_migration_address) = (None, Some(NoMigrationAddress::Ipv6Off)),
                "on b IPv6 is off, and no migration_address is configured; set it",
            ),
        ] {
            let reason = reason(change);
            assert!(reason.contains(words), "{reason}");
        }
    }

    #[test]
    fn the_management_network_is_named_where_nothing_else_is_left() {
        let mut a = host("a", 1, 1);
        a.management_links = std::mem::take(&mut a.links);
        let plan = plan(&a, &host("b", 2, 1), RequestedOption::Tcp, &[], GIB).unwrap();
        assert!(plan.reason.unwrap().contains("over the management network"));
    }

    #[test]
    fn what_was_asked_for_and_is_possible_needs_no_reason() {
        for requested in [RequestedOption::Tcp, RequestedOption::Compression, RequestedOption::Multichannel] {
            let plan = plan(&host("a", 1, 2), &host("b", 2, 2), requested, &[], GIB).unwrap();
            assert_eq!(plan.reason, None, "{requested:?}");
        }
    }

    #[test]
    fn a_path_that_does_not_answer_is_left_out_with_its_reason() {
        let made = |requested| plan(&host("a", 1, 2), &host("b", 2, 2), requested, &[], GIB).unwrap();
        let trials = [Err("no answer".to_owned()), Ok(())];
        let routed = made(RequestedOption::Multichannel).narrow(&trials, "a", "b").unwrap();
        assert_eq!(routed.paths.len(), 1);
        assert_eq!(routed.reason.unwrap(), "left out e0–e0: no answer");
        let in_turn = made(RequestedOption::Tcp).narrow(&trials, "a", "b").unwrap();
        assert_eq!(in_turn.paths[0].link, "e1");
        let in_turn = made(RequestedOption::Tcp).narrow(&[Ok(()), Ok(())], "a", "b").unwrap();
        assert_eq!((in_turn.paths.len(), in_turn.reason), (1, None));
        let none = [Err("no answer".to_owned()), Err("refused".to_owned())];
        let error = made(RequestedOption::Auto).narrow(&none, "a", "b").unwrap_err().to_string();
        assert!(error.contains("e0–e0: no answer, e1–e1: refused"), "{error}");
    }

    #[test]
    fn a_path_that_costs_more_than_it_brings_is_on_standby_and_carries_alone() {
        let mut a = host("a", 1, 2);
        a.links[1].speed_mbps = Some(10);
        let made = plan(&a, &host("b", 2, 2), RequestedOption::Multichannel, &[], GIB).unwrap();
        assert_eq!(made.paths.iter().map(|path| path.is_standby).collect::<Vec<_>>(), [false, true]);
        assert!(made.reason.as_ref().unwrap().starts_with("e1–e1 is on standby"), "{:?}", made.reason);
        let alone = made.narrow(&[Err("no answer".to_owned()), Ok(())], "a", "b").unwrap();
        assert_eq!((alone.paths.len(), alone.paths[0].is_standby), (1, false));
    }

    #[test]
    fn encryption_needs_a_relay_and_no_other_option() {
        let (mut a, b) = (host("a", 1, 2), host("b", 2, 2));
        let clear = plan(&a, &b, RequestedOption::Tcp, &[], GIB).unwrap();
        assert!(!clear.is_relayed(), "{:?}", clear.encryption);
        let asked = Request { encrypt: true, ..RequestedOption::Tcp.into() };
        let encrypted = plan(&a, &b, asked, &[], GIB).unwrap();
        assert_eq!((encrypted.is_relayed(), encrypted.is_compressed), (true, false));
        assert_eq!((encrypted.option, encrypted.paths), (clear.option, clear.paths));
        a.encryption = EncryptionPolicy::Off;
        let error = plan(&a, &b, asked, &[], GIB).unwrap_err();
        assert_eq!(error, PlanError::EncryptionOff { host: "a".into() });
    }

    #[test]
    fn no_path_names_both_ends() {
        let error = plan(&host("a", 1, 0), &host("b", 2, 2), RequestedOption::Tcp, &[], GIB).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("no links fit for migrations") && text.contains("10.77.1.2/24"), "{text}");
    }
}
