//! How a plan is made: which transfer, over which paths.

use std::num::NonZeroU8;

use super::compression::weigh;
use super::rdma::NoRdma;
use super::route::{NoRoute, no_route};
use super::{Packing, Parallel, Paths, Plan, PlanError, Reason, Request, Spread, Transfer, ZstdLevel};
use crate::encryption;
use crate::facts::HostFacts;
use crate::option::RequestedOption;
use crate::path::{Path, Reach, carries_route, find_paths};
use crate::relayed::RelayMeans;
use crate::standby::mark_standby;

/// Connections of a multichannel migration. The kernel places each on a path by its ports; with 16
/// on two equal paths all land on one with a chance of 2^-15. QEMU gives pages to whichever channel
/// is free, so an uneven placement costs nothing as long as no path stays empty.
pub const MULTICHANNEL_CONNECTIONS: NonZeroU8 = NonZeroU8::new(16).expect("it is not 0");

/// What a core of each host carries encrypted, in Mb/s. A single connection has one thread that seals and one that
/// opens, so it carries little more. 7.06 Gb/s was the least of nine migrations over a link without a limit, each host on
/// a core of its own (`bench/README.md`, and docs/decisions/0036).
pub(super) const CORE_ENCRYPTS_MBPS: u64 = 7_000;

const ONE_CONNECTION: Transfer = Transfer::OneConnection { post_copy: false };

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
        return with_post_copy(source, target, request, reaches, memory_bytes);
    }
    let found = find_paths(source, target, request.option, reaches);
    if found.is_empty() {
        return Err(PlanError::no_path(source, target));
    }
    let over_management = over_management(source, target, &found);
    let routed = Routed::over(source, target, &found);
    let (transfer, mut reasons) = choose(source, target, &request, &found, &routed);
    reasons.extend(over_management);
    let paths = match routed {
        Ok(routed) if transfer.spread() == Spread::Routed => routed.with_standby(memory_bytes, &mut reasons),
        _ => found,
    };
    let decided = encryption::decide(source, target, request.encrypt, &paths);
    let encryption = decided.map_err(|host| PlanError::EncryptionOff { host })?;
    let paths = Paths::try_from(paths).map_err(|_| PlanError::no_path(source, target))?;
    let plan = Plan { requested_option: request.option, transfer, encryption, paths, reasons };
    Ok(encrypt_on_several_cores(plan))
}

/// By the first path that answers.
fn with_post_copy(
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
    let mut made = plan(source, target, tcp, reaches, memory_bytes)?;
    made.reasons.insert(0, Reason::PostCopy);
    Ok(Plan { requested_option, transfer: Transfer::OneConnection { post_copy: true }, ..made })
}

/// Paths that a route between the migration addresses can go over.
struct Routed {
    paths: Vec<Path>,
    /// It cannot go over these.
    others: Vec<Path>,
}

impl Routed {
    fn over(source: &HostFacts, target: &HostFacts, found: &[Path]) -> Result<Self, NoRoute> {
        if let Some(why) = no_route(source, target, found) {
            return Err(why);
        }
        let is_routable = |path: &Path| source.migration_address.is_some_and(|own| carries_route(path, own));
        let (paths, others) = found.iter().cloned().partition(is_routable);
        Ok(Self { paths, others })
    }

    fn with_standby(mut self, memory_bytes: u64, reasons: &mut Vec<Reason>) -> Vec<Path> {
        if !self.others.is_empty() {
            reasons.push(Reason::WithoutIpv6(self.others.iter().map(ToString::to_string).collect()));
        }
        reasons.extend(mark_standby(&mut self.paths, memory_bytes));
        self.paths
    }
}

/// How memory travels, and why so.
fn choose(
    source: &HostFacts,
    target: &HostFacts,
    request: &Request,
    found: &[Path],
    routed: &Result<Routed, NoRoute>,
) -> (Transfer, Vec<Reason>) {
    let usable = routed.as_ref().map_or(found, |routed| &routed.paths);
    let no_rdma = NoRdma::between(source, target);
    let spread = if routed.is_ok() { Spread::Routed } else { Spread::InTurn };
    let no_route = routed.as_ref().err();
    let (as_it_is, mut reasons) =
        choose_uncompressed(request.option, usable.len(), spread, no_rdma, no_route);
    // Where it cannot be as it was asked for, there is no plan.
    let encryption = encryption::decide(source, target, request.encrypt, usable);
    let is_encrypted = encryption.is_ok_and(|encryption| encryption.is_encrypted);
    let means = RelayMeans::of(source, target, spread.carrying(usable), is_encrypted, request);
    let (is_compressed, why) = weigh(request, source, means);
    reasons.extend(why);
    (if is_compressed { parallel(spread, Some(Packing::ByRelay)) } else { as_it_is }, reasons)
}

/// How memory travels where no relay packs it; `paths` are those that could carry.
fn choose_uncompressed(
    requested: RequestedOption,
    paths: usize,
    spread: Spread,
    no_rdma: NoRdma,
    no_route: Option<&NoRoute>,
) -> (Transfer, Vec<Reason>) {
    let over_one_path = no_route.cloned().map(Reason::OverOnePath);
    let no_multichannel = no_route.cloned().map(Reason::NoMultichannel);
    let multichannel = if no_route.is_none() { parallel(Spread::Routed, None) } else { ONE_CONNECTION };
    let packed = |level| parallel(spread, Some(Packing::ByHypervisor(level)));
    let (transfer, reasons) = match requested {
        RequestedOption::Tcp => (ONE_CONNECTION, [None, None]),
        RequestedOption::Compression => (multichannel, [over_one_path, None]),
        RequestedOption::QemuZstd1 => (packed(ZstdLevel::One), [over_one_path, None]),
        RequestedOption::QemuZstd3 => (packed(ZstdLevel::Three), [over_one_path, None]),
        RequestedOption::Multichannel => (multichannel, [no_multichannel, None]),
        RequestedOption::Direct => (multichannel, [Some(Reason::NoRdma(no_rdma)), no_multichannel]),
        // It may have several connections all the same, to encrypt on several cores.
        RequestedOption::Auto if paths > 1 => {
            (multichannel, [Some(Reason::SeveralPaths { paths, no_rdma }), over_one_path])
        }
        RequestedOption::Auto => (ONE_CONNECTION, [Some(Reason::OnePath { no_rdma }), None]),
    };
    (transfer, reasons.into_iter().flatten().collect())
}

fn parallel(spread: Spread, packing: Option<Packing>) -> Transfer {
    Transfer::Parallel(Parallel { channels: MULTICHANNEL_CONNECTIONS, spread, packing })
}

/// Where one connection would be encrypted that a path may outrun, several share that path, unless one was asked for.
/// They need no more than the one does: neither a route nor migration addresses, which a network may not let through.
fn encrypt_on_several_cores(mut plan: Plan) -> Plan {
    let may_be_several = plan.requested_option != RequestedOption::Tcp && plan.transfer == ONE_CONNECTION;
    if !may_be_several || !plan.encryption.is_encrypted {
        return plan;
    }
    let is_outrun = |path: &&Path| path.speed_mbps.is_none_or(|speed_mbps| speed_mbps > CORE_ENCRYPTS_MBPS);
    let Some(path) = plan.paths.iter().find(is_outrun) else { return plan };
    plan.reasons.push(Reason::SeveralEncrypt { path: path.to_string(), speed_mbps: path.speed_mbps });
    Plan { transfer: parallel(Spread::InTurn, None), ..plan }
}

fn over_management(source: &HostFacts, target: &HostFacts, paths: &[Path]) -> Option<Reason> {
    let is_management =
        |host: &HostFacts, name: &str| host.management_links.iter().any(|link| link.name == name);
    let uses =
        paths.iter().any(|path| is_management(source, &path.link) || is_management(target, &path.peer_link));
    uses.then_some(Reason::OverManagement)
}
