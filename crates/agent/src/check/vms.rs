//! What this host says about VMs: about its own that may leave, and about others' that may come.

use std::collections::BTreeSet;
use std::path::Path;

use drainpipe_engine::check::vm::{
    CpuFeatures, DiskPlace, DiskRoom, FileNotAllowed, FilePurpose, FileState, Obstacle, VmCheck, VmFacts,
    VmFile, VmFit,
};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{ResolveError, ResolvedSpec};
use drainpipe_hypervisor::{Demands, Machine, Need};
use drainpipe_net::{Link, LinkKind};
use futures_util::future::{join_all, try_join_all};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Checks, needs};
use crate::incoming::promised_disk_bytes;
use crate::peers::client::ApiClient;
use crate::vms::QMP_DEADLINE;
use crate::vms::vm_files::FileAtPath;

/// VMs in one request. A specification is at most some 10 kB, a request 1 MiB.
const VMS_MAX: usize = 32;

/// A question about VMs that may come.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmsRequest {
    /// What each of them is; at most 32.
    #[schema(value_type = Vec<drainpipe_hypervisor::VmSpec>, max_items = 32)]
    specs: Vec<ResolvedSpec>,
    /// What else each of them needs, in the same order; none where none needs anything.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Vec<Object>>, max_items = 32)]
    needs: Vec<Vec<Need>>,
}

impl VmsRequest {
    fn new(specs: Vec<ResolvedSpec>, needs: Vec<Vec<Need>>) -> Self {
        // Older releases know no such key.
        let needs = if needs.iter().all(Vec::is_empty) { vec![] } else { needs };
        Self { specs, needs }
    }

    fn needs_of(&self, index: usize) -> &[Need] {
        self.needs.get(index).map_or(&[], Vec::as_slice)
    }
}

/// How VMs of another host could come.
pub(crate) async fn fits(checks: &Checks, request: &VmsRequest) -> Result<Vec<VmFit>, Problem> {
    if request.specs.len() > VMS_MAX {
        return Err(Problem::bad_input(format!("at most {VMS_MAX} VMs in one request")));
    }
    let links = checks.network.links().await.map_err(Problem::failed)?;
    let each = (0..).zip(&request.specs);
    try_join_all(each.map(|(index, spec)| fit(checks, spec, request.needs_of(index), &links))).await
}

async fn fit(checks: &Checks, spec: &ResolvedSpec, needs: &[Need], links: &[Link]) -> Result<VmFit, Problem> {
    let lacking = needs::lacking(checks, needs, links).await?;
    let looks = looks(checks, spec).await;
    let refused = looks.iter().enumerate().filter_map(|(index, (.., look))| match look {
        FileAtPath::NotAllowed(why) => Some(FileNotAllowed { index, why: why.clone() }),
        _ => None,
    });
    let disk_places = disk_places(checks, &looks);
    Ok(VmFit {
        disk_rooms: disk_rooms(checks, &looks, &disk_places).await,
        disk_places,
        lacking,
        missing_bridges: missing_bridges(spec, links),
        bridges_not_allowed: checks.files.bridges_not_allowed(spec.spec()),
        name_taken: checks.vms.is_there(spec.spec().name.as_str()),
        obstacle: obstacle(checks, spec),
        cpu: cpu_features(checks, spec),
        files_not_allowed: refused.collect(),
        files: looks.into_iter().map(|(.., look)| state(look)).collect(),
    })
}

/// Each once, of those that NICs of the VM join.
fn missing_bridges(spec: &ResolvedSpec, links: &[Link]) -> Vec<String> {
    let is_there = |bridge: &str| {
        let is_bridge = |link: &&Link| matches!(link.kind, LinkKind::Bridge | LinkKind::Other(_));
        links.iter().filter(is_bridge).any(|link| link.name == bridge)
    };
    let wanted: BTreeSet<&str> = spec.spec().nics.iter().map(|nic| nic.bridge.as_str()).collect();
    wanted.into_iter().filter(|bridge| !is_there(bridge)).map(str::to_owned).collect()
}

fn obstacle(checks: &Checks, spec: &ResolvedSpec) -> Option<Obstacle> {
    let hypervisor = checks.vms.facts();
    match spec.check_host(hypervisor).err()? {
        ResolveError::UnknownMachine { machine, .. } => {
            let newest = hypervisor.newest_like(machine.as_str()).map(str::to_owned);
            Some(Obstacle::MachineUnknown { newest })
        }
        ResolveError::NoKvm { .. } => Some(Obstacle::NoKvm),
        ResolveError::LosesWrites { .. } => Some(Obstacle::LosesWrites),
        // Nothing that is open or out of range becomes a `ResolvedSpec`.
        // A CPU that is not known is described by what it has and lacks.
        ResolveError::Invalid(_)
        | ResolveError::Unresolved { .. }
        | ResolveError::TestGuestTooSmall { .. }
        | ResolveError::UnknownCpuModel { .. } => None,
    }
}

fn cpu_features(checks: &Checks, spec: &ResolvedSpec) -> Option<CpuFeatures> {
    // Otherwise they are its owner's to say.
    let models = &checks.vms.facts().cpu_models;
    (!spec.spec().is_built_elsewhere() && models.hardware == spec.hardware()).then(|| {
        let features = models.features_of(&spec.spec().cpu_model);
        CpuFeatures { known: features.known, lacking: features.lacking, named: features.named }
    })
}

/// What is at each path that QEMU opens for a VM.
async fn looks<'a>(checks: &Checks, spec: &'a ResolvedSpec) -> Vec<(&'a Path, FilePurpose, FileAtPath)> {
    let spec = spec.spec();
    let boot = spec.kernel.iter().chain(&spec.initramfs).map(|path| (path, FilePurpose::Boot, None));
    let disks = spec.disks.iter().map(|disk| {
        let purpose = if disk.read_only { FilePurpose::ReadOnlyDisk } else { FilePurpose::Disk };
        (&disk.path, purpose, Some(disk.format))
    });
    let looks = boot.chain(disks).map(async |(path, purpose, format)| {
        (path.as_path(), purpose, checks.files.look(path, format).await)
    });
    join_all(looks).await
}

/// Where this host wants disks that VMs have elsewhere, and have nothing or may have nothing under those paths here.
fn disk_places(checks: &Checks, looks: &[(&Path, FilePurpose, FileAtPath)]) -> Vec<DiskPlace> {
    let disks = looks.iter().enumerate().filter(|(_, (_, purpose, look))| {
        *purpose == FilePurpose::Disk && matches!(look, FileAtPath::Missing | FileAtPath::NotAllowed(_))
    });
    let place = |(index, (path, ..)): (usize, &(&Path, FilePurpose, FileAtPath))| {
        let path = checks.host.config.disks.places.of(path)?.to_str()?.to_owned();
        Some(DiskPlace { index, path })
    };
    disks.filter_map(place).collect()
}

/// What is free where disks would be made that are not here, if they were copied.
async fn disk_rooms(
    checks: &Checks,
    looks: &[(&Path, FilePurpose, FileAtPath)],
    places: &[DiskPlace],
) -> Vec<DiskRoom> {
    let place_of =
        |index| places.iter().find(|place| place.index == index).map(|place| Path::new(&place.path));
    let missing = looks.iter().enumerate().filter_map(|(index, (path, purpose, look))| {
        let is_missing = *look == FileAtPath::Missing && *purpose == FilePurpose::Disk;
        Some((index, place_of(index).or(is_missing.then_some(path))?))
    });
    let rooms = missing.map(async |(index, path)| {
        let room = checks.files.room(path, promised_disk_bytes(&checks.incoming)).await?;
        Some(DiskRoom { index, device: room.device, free_bytes: room.free_bytes })
    });
    join_all(rooms).await.into_iter().flatten().collect()
}

fn state(look: FileAtPath) -> FileState {
    match look {
        FileAtPath::Present(identity) => FileState::Present(identity),
        FileAtPath::Silent => FileState::Silent,
        // An agent of an older version knows of no others.
        FileAtPath::Missing | FileAtPath::NotAllowed(_) => FileState::Missing,
    }
}

async fn files(checks: &Checks, spec: &ResolvedSpec) -> Vec<VmFile> {
    let looks = looks(checks, spec).await.into_iter();
    looks
        .map(|(path, purpose, look)| VmFile { path: path.display().to_string(), purpose, state: state(look) })
        .collect()
}

/// A running VM of this host.
async fn describe(checks: &Checks, vmm: &dyn Machine, demands: Demands) -> VmFacts {
    let spec = vmm.spec();
    VmFacts {
        name: spec.spec().name.to_string(),
        memory_bytes: spec.memory_kib() << 10,
        padding_bytes: spec.spec().memory_padding_kib.unwrap_or(0) << 10,
        huge_page_mib: spec.spec().huge_page_mib,
        machine: spec.spec().machine.to_string(),
        cpu_model: spec.spec().cpu_model.clone(),
        qemu_version: vmm.version().to_string(),
        cpu: cpu_features(checks, spec),
        files: files(checks, spec).await,
        obstacles: demands.obstacles,
        doubts: demands.doubts,
        needs: demands.needs.iter().map(Need::notice).collect(),
    }
}

/// What this host and `peer`, the host `target`, say of running VMs of this one.
pub(crate) async fn ask(
    checks: &Checks,
    peer: &ApiClient,
    target: &str,
    running: &[impl AsRef<dyn Machine>],
) -> Result<Vec<VmCheck>, Problem> {
    let mut checked = Vec::with_capacity(running.len());
    for some in running.chunks(VMS_MAX) {
        let specs = some.iter().map(|vmm| vmm.as_ref().spec().clone()).collect();
        let demands = try_join_all(some.iter().map(|vmm| vmm.as_ref().demands(QMP_DEADLINE))).await;
        let demands = demands.map_err(Problem::failed)?;
        let needs = demands.iter().map(|demands| demands.needs.clone()).collect();
        let request = VmsRequest::new(specs, needs);
        let asked = peer.post::<Vec<VmFit>>("/v1/check/vms", &request);
        let described =
            join_all(some.iter().zip(demands).map(|(vmm, demands)| describe(checks, vmm.as_ref(), demands)));
        let (fits, facts) = tokio::join!(asked, described);
        let fits = fits?;
        if fits.len() != facts.len() {
            return Err(Problem::refused(format!("{target} answers about other VMs than requested")));
        }
        for (vm, fit) in facts.into_iter().zip(fits) {
            fit.plausible(target, vm.files.len(), vm.needs.len()).map_err(Problem::refused)?;
            checked.push(VmCheck { vm, fit });
        }
    }
    Ok(checked)
}
