//! How a plan is made: which transfer, over which paths.

use std::num::NonZeroU8;

use super::compression::weigh;
use super::draft::{Draft, Packer, Shape};
use super::incapable::Incapable;
use super::rdma::{self, NoRdma};
use super::route::{NoRoute, no_route};
use super::spreading::NotSpread;
use super::standby::mark_standby;
use super::{NoPostCopy, Paths, Plan, PlanError, PlanRequest, Reason, Spread, Transfer, ZstdLevel};
use crate::host::facts::HostFacts;
use crate::option::RequestedOption;
use crate::paths::path::{Path, Reach, carries_route, find_paths};
use crate::transfer::encryption;

/// Connections of a multichannel migration. The kernel places each on a path by its ports; with 16
/// on two equal paths all land on one with a chance of 2^-15. QEMU gives pages to whichever channel
/// is free, so an uneven placement costs nothing as long as no path stays empty.
pub const MULTICHANNEL_CONNECTIONS: NonZeroU8 = NonZeroU8::new(16).expect("it is not 0");

/// What a core of each host carries encrypted, in Mb/s. A single connection has one thread that seals and one that
/// opens, so it carries little more. 7.06 Gb/s was the least of nine migrations over a link without a limit, each host on
/// a core of its own (`bench/encryption.md`, and docs/decisions/0036).
pub(super) const CORE_ENCRYPTS_MBPS: u64 = 7_000;

/// Makes the plan for a migration between two hosts. `reaches` is what trying the
/// [`links_to_try`](crate::paths::path::links_to_try) has shown.
pub fn plan(
    source: &HostFacts,
    target: &HostFacts,
    request: impl Into<PlanRequest>,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<Plan, PlanError> {
    let request = request.into();
    if let Some(hypervisor) = Incapable::to_leave_the_hand_over_to_agents(source, target) {
        return Err(PlanError::HypervisorCommits(hypervisor));
    }
    if let Some(direct) = by_rdma(source, target, &request, reaches, memory_bytes) {
        return Ok(direct);
    }
    let by_request = if request.post_copy { with_post_copy } else { without_post_copy };
    by_request(source, target, request, reaches, memory_bytes)?.finish(source, target)
}

fn without_post_copy(
    source: &HostFacts,
    target: &HostFacts,
    request: PlanRequest,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<Draft, PlanError> {
    let found = find_paths(source, target, request.option, reaches);
    if found.is_empty() {
        return Err(PlanError::no_path(source, target));
    }
    let over_management = over_management(source, target, &found);
    let routed = Routed::over(source, target, &found);
    let no_rdma = NoRdma::between(source, target, &request, reaches, memory_bytes);
    let (shape, mut reasons) = choose(source, target, &request, &found, &routed, no_rdma);
    reasons.extend(over_management);
    let paths = match routed {
        Ok(routed) if shape.spread() == Spread::Routed => routed.with_standby(memory_bytes, &mut reasons),
        _ => found,
    };
    let decided = encryption::decide(source, target, request.encrypt, &paths);
    let encryption = decided.map_err(|host| PlanError::EncryptionOff { host })?;
    let paths = Paths::try_from(paths).map_err(|_| PlanError::no_path(source, target))?;
    let draft = Draft { requested_option: request.option, shape, encryption, paths, reasons };
    Ok(encrypt_on_several_cores(draft, Incapable::to_send_in_parallel(source, target)))
}

/// Where that is asked for and possible.
fn by_rdma(
    source: &HostFacts,
    target: &HostFacts,
    request: &PlanRequest,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Option<Plan> {
    if request.option != RequestedOption::Direct || request.post_copy {
        return None;
    }
    let (paths, why_clear) = rdma::paths(source, target, request, reaches, memory_bytes).ok()?;
    let reasons = over_management(source, target, &paths).into_iter().collect();
    Some(Plan {
        requested_option: request.option,
        transfer: Transfer::Rdma(why_clear),
        paths,
        disks: vec![],
        reasons,
    })
}

/// By the first path that answers.
fn with_post_copy(
    source: &HostFacts,
    target: &HostFacts,
    request: PlanRequest,
    reaches: &[Reach],
    memory_bytes: u64,
) -> Result<Draft, PlanError> {
    let requested_option = request.option;
    if !matches!(requested_option, RequestedOption::Tcp | RequestedOption::Auto) {
        return Err(PlanError::NoPostCopy { option: requested_option });
    }
    let tcp = PlanRequest { option: RequestedOption::Tcp, post_copy: false, ..request };
    let mut draft = without_post_copy(source, target, tcp, reaches, memory_bytes)?;
    if let Some(why) = NoPostCopy::between(source, target, draft.encryption.is_encrypted()) {
        return Err(PlanError::PostCopyImpossible(why));
    }
    draft.reasons.insert(0, Reason::PostCopy);
    Ok(Draft { requested_option, shape: Shape::PostCopy, ..draft })
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
    request: &PlanRequest,
    found: &[Path],
    routed: &Result<Routed, NoRoute>,
    no_rdma: NoRdma,
) -> (Shape, Vec<Reason>) {
    let usable = routed.as_ref().map_or(found, |routed| &routed.paths);
    let spread = if routed.is_ok() { Spread::Routed } else { Spread::InTurn };
    // Where it cannot be as it was asked for, there is no plan.
    let encryption = encryption::decide(source, target, request.encrypt, usable);
    let is_encrypted = encryption.is_ok_and(|encryption| encryption.is_encrypted());
    let means = request.relay_means(source, target, spread.carrying(usable), is_encrypted);
    let (is_compressed, why_packed) = weigh(request, source, target, means);
    let by_hypervisors = NotSpread::by_hypervisors(source, target, is_compressed || is_encrypted);
    let not_spread = routed.as_ref().err().cloned().map(NotSpread::NoRoute).or(by_hypervisors);
    let uncompressed = Uncompressed {
        requested: request.option,
        paths: usable.len(),
        no_rdma,
        not_spread,
        not_parallel: Incapable::to_send_in_parallel(source, target).is_some(),
        not_packed: Incapable::among([source, target], |can| can.packs),
    };
    let (as_it_is, mut reasons) = uncompressed.choose();
    reasons.extend(why_packed);
    let compressed = Shape::Parallel { spread, packer: Some(Packer::Relay) };
    (if is_compressed { compressed } else { as_it_is }, reasons)
}

/// What decides how memory travels where no relay packs it.
struct Uncompressed {
    requested: RequestedOption,
    /// How many paths could carry.
    paths: usize,
    no_rdma: NoRdma,
    /// Why not over all of them.
    not_spread: Option<NotSpread>,
    /// Whether not over several connections either.
    not_parallel: bool,
    /// The hypervisor that packs nothing.
    not_packed: Option<Incapable>,
}

impl Uncompressed {
    fn choose(self) -> (Shape, Vec<Reason>) {
        let Self { requested, paths, no_rdma, not_spread, .. } = &self;
        let over_one_path = not_spread.clone().map(Reason::OverOnePath);
        let no_multichannel = not_spread.clone().map(Reason::NoMultichannel);
        let several = Shape::Parallel { spread: Spread::Routed, packer: None };
        let multichannel = if not_spread.is_none() { several } else { Shape::OneConnection };
        let no_rdma = no_rdma.clone();
        let (shape, reasons) = match requested {
            RequestedOption::Tcp => (Shape::OneConnection, [None, None]),
            RequestedOption::Compression => (multichannel, [over_one_path, None]),
            RequestedOption::QemuZstd1 => self.packed(ZstdLevel::One),
            RequestedOption::QemuZstd3 => self.packed(ZstdLevel::Three),
            RequestedOption::Multichannel => (multichannel, [no_multichannel, None]),
            RequestedOption::Direct => (multichannel, [Some(Reason::NoRdma(no_rdma)), no_multichannel]),
            // It may have several connections all the same, to encrypt on several cores.
            RequestedOption::Auto if *paths > 1 => {
                let several_paths = Reason::SeveralPaths { paths: *paths, no_rdma };
                (multichannel, [Some(several_paths), over_one_path])
            }
            RequestedOption::Auto => (Shape::OneConnection, [Some(Reason::OnePath { no_rdma }), None]),
        };
        (shape, reasons.into_iter().flatten().collect())
    }

    /// By the hypervisor, as far as it can.
    fn packed(&self, level: ZstdLevel) -> (Shape, [Option<Reason>; 2]) {
        let spread = if self.not_spread.is_none() { Spread::Routed } else { Spread::InTurn };
        let packer = self.not_packed.is_none().then_some(Packer::Hypervisor(level));
        let shape = if self.not_parallel { Shape::OneConnection } else { Shape::Parallel { spread, packer } };
        let over_one_path = self.not_spread.clone().map(Reason::OverOnePath);
        (shape, [over_one_path, self.not_packed.clone().map(Reason::NotPackedByHypervisor)])
    }
}

/// Where one connection would be encrypted that a path may outrun, several share that path, unless one was asked for.
/// They need no more than the one does: neither a route nor migration addresses, which a network may not let through.
fn encrypt_on_several_cores(mut draft: Draft, makes_one: Option<Incapable>) -> Draft {
    let may_be_several =
        draft.requested_option != RequestedOption::Tcp && draft.shape == Shape::OneConnection;
    if !may_be_several || !draft.encryption.is_encrypted() {
        return draft;
    }
    let is_outrun = |path: &&Path| path.speed_mbps.is_none_or(|speed_mbps| speed_mbps > CORE_ENCRYPTS_MBPS);
    let Some(path) = draft.paths.iter().find(is_outrun) else { return draft };
    if let Some(hypervisor) = makes_one {
        draft.reasons.push(Reason::OneEncrypts { path: path.to_string(), hypervisor });
        return draft;
    }
    draft.reasons.push(Reason::SeveralEncrypt { path: path.to_string(), speed_mbps: path.speed_mbps });
    Draft { shape: Shape::Parallel { spread: Spread::InTurn, packer: None }, ..draft }
}

fn over_management(source: &HostFacts, target: &HostFacts, paths: &[Path]) -> Option<Reason> {
    let is_management =
        |host: &HostFacts, name: &str| host.management_links.iter().any(|link| link.name == name);
    let uses =
        paths.iter().any(|path| is_management(source, &path.link) || is_management(target, &path.peer_link));
    uses.then_some(Reason::OverManagement)
}
