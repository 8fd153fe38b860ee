//! Step 2: may this VM come?

use std::collections::BTreeMap;
use std::sync::Arc;

use drainpipe_engine::migration::target::permit::{Asked, PermitRefusal, may_come};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::protocol::Protocol;
use drainpipe_hypervisor::spec::VmSpec;

use super::disks;
use super::vm::IncomingVm;
use super::{Incoming, insert_locked, name_taken, refused_here};
use crate::peers::release::agree_with;
use crate::store::lock::lock;
use drainpipe_api_types::{IncomingPermit, IncomingRequest};

/// A VM on its way holds no place any more when its source has not been heard of for this long, though it was
/// asked. In ms.
const HOLDS_PLACE_MS: f64 = 30_000.0;

/// Step 2: may this VM come?
pub(crate) async fn permit(
    incoming: &Arc<Incoming>,
    source: &str,
    request: IncomingRequest,
) -> Result<IncomingPermit, Problem> {
    incoming.host.check_not_stopping()?;
    if incoming.peers.get(source).is_none() {
        return Err(Problem::refused(format!(
            "{} does not know {source}: let it join (`drainpipe init`), or add a [[peer]] to its agent.toml",
            incoming.host.name()
        )));
    }
    let protocol = agree_with(incoming.host.name(), source, &request.release.clone().unwrap_or_default())?;
    check_described(&request)?;
    request.spec.check_host(incoming.vms.facts()).map_err(|error| refused_here(incoming, &error))?;
    incoming.files.check_usable(request.spec.spec(), &request.disks).await?;
    disks::check(incoming, source, &request).await?;
    enter(incoming, source, request, protocol)
}

fn enter(
    incoming: &Arc<Incoming>,
    source: &str,
    request: IncomingRequest,
    protocol: Protocol,
) -> Result<IncomingPermit, Problem> {
    let name = request.definition.name.to_string();
    // Held until it is entered, so that two hosts cannot both send a VM of that name, and so that a drain
    // that begins meanwhile finds it.
    let mut entries = lock(&incoming.entries.by_id);
    incoming.check_cordon(Some(source))?;
    let asked = Asked {
        is_here: incoming.vms.contains(&name),
        is_coming: entries.values().any(|other| other.definition.name.as_str() == name),
        is_recorded: incoming.journal.incoming_state(&request.id)?.is_some(),
    };
    may_come(asked).map_err(|why| refusal(incoming, &request, why))?;
    if request.may_wait {
        check_apart(incoming, &entries, &request.definition)?;
        if let Some(why) = busy(incoming, &entries, source) {
            return Ok(IncomingPermit::Busy(why));
        }
    }
    if !incoming.journal.begin_incoming(&request.id, source, &request.definition)? {
        return Err(refusal(incoming, &request, PermitRefusal::WasHereBefore));
    }
    incoming.transfer.first_sessions.begin_step(None);
    let entry = IncomingVm::permitted(source, request, protocol);
    insert_locked(incoming, &mut entries, entry);
    Ok(IncomingPermit::Granted)
}

fn refusal(incoming: &Incoming, request: &IncomingRequest, why: PermitRefusal) -> Problem {
    match why {
        PermitRefusal::NameTaken => name_taken(incoming, request.definition.name.as_str()),
        PermitRefusal::WasHereBefore => {
            Problem::new(why.kind(), format!("migration {} has been here before", request.id))
        }
    }
}

/// Refuses a VM that is described as one that cannot be, or as two: it is built by its specification here, and booted
/// again by its definition later.
pub(crate) fn check_described(request: &IncomingRequest) -> Result<(), Problem> {
    let IncomingRequest { spec, definition, .. } = request;
    definition.validate().map_err(Problem::bad_input)?;
    if spec.spec().name != definition.name {
        return Err(Problem::bad_input("the specification and the definition name different VMs"));
    }
    match spec.difference(definition) {
        None => Ok(()),
        Some(key) => Err(Problem::bad_input(format!(
            "the specification and the definition of VM {} differ in `{key}`: its host would mistake one VM \
            for the other",
            definition.name
        ))),
    }
}

/// A drain's plan keeps VMs of one `apart` group on different hosts, but does not know what other drains bring
/// meanwhile: the one that comes later plans again. A single migration is somebody's own decision.
fn check_apart(
    incoming: &Incoming,
    entries: &BTreeMap<String, Arc<IncomingVm>>,
    definition: &VmSpec,
) -> Result<(), Problem> {
    let present = incoming.vms.present();
    let here = present.iter().map(|vm| &vm.definition);
    let beside = here.chain(entries.values().map(|entry| &entry.definition)).find_map(|other| {
        let group = other.placement.apart.intersection(&definition.placement.apart).next()?;
        Some((&other.name, group))
    });
    let Some((other, group)) = beside else { return Ok(()) };
    let (name, host) = (&definition.name, incoming.host.name());
    Err(Problem::refused(format!(
        "VM {name} must be apart from {other}, by the group {group}, and that is on {host} or on its way there"
    )))
}

/// Why no further VM of this source may come for now, if so: this host takes so many at a time, of all hosts that
/// are drained to it.
fn busy(incoming: &Incoming, entries: &BTreeMap<String, Arc<IncomingVm>>, source: &str) -> Option<String> {
    let mut on_way = BTreeMap::<String, usize>::new();
    let holds_place =
        |entry: &&Arc<IncomingVm>| !entry.is_adopted(&incoming.vms) && entry.silent_for_ms() < HOLDS_PLACE_MS;
    for entry in entries.values().filter(holds_place) {
        *on_way.entry(entry.source.clone()).or_default() += 1;
    }
    let limit = incoming.host.config.drain.inbound;
    let now_ms = incoming.entries.clock.elapsed().as_secs_f64() * 1_000.0;
    if lock(&incoming.entries.places).admits(now_ms, limit, &on_way, source) {
        return None;
    }
    let of_each: Vec<String> =
        on_way.iter().map(|(source, count)| format!("{count} from {source}")).collect();
    let host = incoming.host.name();
    let of_each = if of_each.is_empty() { "others have waited longer".into() } else { of_each.join(", ") };
    Some(format!(
        "{host} accepts {limit} VMs at a time from hosts that are being drained; on their way: {of_each}"
    ))
}
