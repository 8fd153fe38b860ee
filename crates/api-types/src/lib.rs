//! What travels over the API, besides the engine's own values.

mod disk_moves;
mod drains;
mod fleet;
pub mod fleet_list;

use std::collections::BTreeMap;

use drainpipe_engine::bandwidth::{BandwidthSetting, LimitChange, Limited};
use drainpipe_engine::finding::Finding;
use drainpipe_engine::finding::fix::Fix;
use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::journal::{GENERATION_MAX, JournalMark, JournalStanding};
use drainpipe_engine::migration::progress::Progress;
use drainpipe_engine::migration::result::MigrationResult;
pub use drainpipe_engine::migration::target::IncomingView;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::path_record::PathRecord;
use drainpipe_engine::plan::Plan;
use drainpipe_engine::protocol::{Protocols, Release};
use drainpipe_engine::storage::{DiskCopy, DiskName};
use drainpipe_engine::tracked::TrackedConnection;
use drainpipe_engine::transfer::throttle::THROTTLE_PERCENT_MAX;
use drainpipe_hypervisor::spec::{Placement, ResolvedSpec, VmName, VmSpec};
use drainpipe_hypervisor::{Manager, Parcel, TlsKey};
use drainpipe_identity::check_name;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

pub use self::disk_moves::{DiskMoveOutcome, DiskMoveResult, DiskMoveView, MoveDiskRequest};
pub use self::drains::{
    DrainKind, DrainPlanView, DrainRequest, DrainView, PLAN_DEADLINE, ResumeRequest, TRANSFERS_MAX,
    plan_warnings,
};
pub use self::fleet::{
    DepartureRequest, FleetView, JoinAnswer, JoinRequest, MemberView, RevocationRequest, RevokedView,
    SignedList, TokenRequest, TokenView,
};
pub use self::fleet::{FleetNews, RenewalAnswer, RenewalRequest};

/// Longest deadline that a migration may be given, in seconds.
pub const DEADLINE_S_MAX: u32 = 24 * 60 * 60;

/// A host, as its agent describes it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// What migrations need to know.
    pub facts: HostFacts,
    /// Version of the agent.
    pub agent_version: String,
    /// The protocols that it speaks with other agents. Two hosts that share none do not migrate.
    #[serde(default)]
    pub protocols: Protocols,
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu_model: String,
    /// All of the host's memory.
    pub memory_bytes: u64,
    /// What runs guests here: `kvm` or `tcg`.
    pub accelerator: String,
    /// Whether VMs are kept from coming here and from being started here: it is drained, or was.
    #[serde(default)]
    pub cordoned: bool,
    /// The host whose VMs may come here all the same: the two change places.
    #[serde(default)]
    pub swap_with: Option<String>,
    /// The other hosts that this one's configuration names.
    pub peers: Vec<PeerView>,
    /// The paths to each of them, as far as they have been tried since the agent was started.
    #[serde(default)]
    pub paths: Vec<PathsView>,
}

impl HostView {
    /// The release that its agent is of.
    pub fn release(&self) -> Release {
        Release { version: self.agent_version.clone(), protocols: self.protocols }
    }
}

/// The paths to another host, as they were when they were last tried while no migration was under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PathsView {
    /// The other host.
    pub peer: String,
    /// When (RFC 3339).
    pub tried_at: String,
    /// Each path.
    pub paths: Vec<PathRecord>,
}

/// Where another host's agent is to be found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PeerView {
    /// Its name.
    pub name: String,
    /// Address and port.
    pub address: String,
}

/// A host in the list of all.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Address and port of its agent.
    pub address: String,
    /// What it says; absent when it does not answer.
    pub host: Option<HostView>,
    /// Why it does not answer.
    pub error: Option<String>,
}

/// Which VMs are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Those of the host that is asked.
    #[default]
    Local,
    /// Those of its peers too.
    All,
}

/// VMs, and the hosts that could not be asked.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct VmList {
    /// The VMs, by name.
    pub vms: Vec<VmView>,
    /// What kept other hosts' VMs out of the list.
    pub errors: Vec<String>,
    /// The hosts that could not be asked: their VMs are missing, one for each of `errors`.
    #[serde(default)]
    pub hosts_not_asked: Vec<String>,
}

/// One VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// The host that holds it.
    pub host: String,
    /// What it is doing.
    pub state: VmState,
    /// Its memory.
    pub memory_mib: u64,
    /// Size of the huge pages that hold it, in MiB, if any do.
    #[serde(default)]
    pub huge_page_mib: Option<u64>,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// The migration under way, if any.
    pub migration: Option<String>,
    /// How its QEMU has died, if it did and the VM was not started since; absent of one that was stopped.
    #[serde(default)]
    pub ended: Option<String>,
    /// Where a drain may put it.
    #[serde(default)]
    pub placement: Placement,
    /// The owner of the VM, if that is not Drainpipe.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manager: Option<Manager>,
    /// Why it cannot be moved to any host, where that is known without asking one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unmovable: Option<String>,
    /// Where the test guest answers heartbeats, if this is one.
    pub heartbeat: Option<String>,
    /// Where the test guest takes commands, if this is one.
    pub control: Option<String>,
}

/// What a VM is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Defined, no process.
    Stopped,
    /// Its vCPUs run.
    Running,
    /// It has a process, but its vCPUs do not run.
    Paused,
    /// On its way here; it runs elsewhere.
    Incoming,
    /// Its process does not answer; or a newer Drainpipe knows what it is doing, and this one does not.
    #[serde(other)]
    Unknown,
}

/// A request to make a VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Its specification.
    pub spec: VmSpec,
}

/// A request to give a VM back to this host that was handed over to one which is lost.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimRequest {
    /// The host that the VM was handed over to. It is lost with all that ran there.
    #[serde(deserialize_with = "host_name")]
    #[schema(max_length = 253)]
    pub lost: String,
}

/// A request to move a VM.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MigrateRequest {
    /// The VM.
    #[serde(deserialize_with = "vm_name")]
    #[schema(value_type = VmName)]
    pub vm: String,
    /// The host it is to run on.
    #[serde(deserialize_with = "host_name")]
    #[schema(max_length = 253)]
    pub target: String,
    /// How.
    #[serde(default)]
    pub option: RequestedOption,
    /// Whether to encrypt it even where the hosts do not require that.
    #[serde(default)]
    pub encrypt: bool,
    /// Whether the VM may run on the target before all its memory is there, if that gets dirty as fast as it is sent.
    /// From then until the rest has followed, the VM is lost if either host is.
    #[serde(default)]
    pub post_copy: bool,
    /// Whether disks that the target does not see are copied there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_storage: bool,
    /// The paths on the target to which single disks go, by the disks' names (`vda`): each is copied there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = BTreeMap<String, String>)]
    pub disks: BTreeMap<DiskName, String>,
    /// Seconds after which it is undone unless it is over: up to a day.
    #[serde(default, deserialize_with = "deadline_s")]
    #[schema(minimum = 1, maximum = 86_400)]
    pub deadline_s: Option<u32>,
    /// Share of their time, in percent, for which its CPUs may be held back at most if its memory gets dirty
    /// too fast, 0 for never; as the source's configuration says if absent.
    #[serde(default, deserialize_with = "throttle_max_percent")]
    #[schema(minimum = 0, maximum = 99)]
    pub throttle_max_percent: Option<u8>,
}

impl MigrateRequest {
    /// One that asks for nothing else.
    pub fn plain(vm: impl Into<String>, target: impl Into<String>, option: RequestedOption) -> Self {
        Self {
            vm: vm.into(),
            target: target.into(),
            option,
            encrypt: false,
            post_copy: false,
            copy_storage: false,
            disks: BTreeMap::new(),
            deadline_s: None,
            throttle_max_percent: None,
        }
    }
}

/// A request to check everything between this host and another.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckRequest {
    /// The host to which VMs would go.
    #[serde(deserialize_with = "host_name")]
    #[schema(max_length = 253)]
    pub target: String,
    /// The running VM that would go there; all that run if absent.
    #[serde(default)]
    pub vm: Option<VmName>,
}

/// A request to mend settings of the host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FixRequest {
    /// What a check's findings have as `fix`; at most 64.
    #[schema(max_items = 64)]
    pub fixes: Vec<Fix>,
}

/// A setting that `check --fix` has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandingFix {
    /// As `sysctl` names it; dots within a link's name are slashes.
    pub setting: String,
    /// What it was.
    pub before: String,
    /// What it was set to.
    pub value: String,
    /// The present value; absent if it is gone, for example together with its link.
    pub now: Option<String>,
}

/// How much of this host's links migrations may take, in each direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BandwidthView {
    /// The host.
    pub host: String,
    /// What was set while the agent ran.
    pub setting: BandwidthSetting,
    /// Mb/s that hold now; absent for no limit.
    pub limit_mbps: Option<u64>,
    /// What holds later, within a day, the first first.
    #[serde(default)]
    pub later: Vec<LimitChange>,
    /// What disks may take of that.
    #[serde(default)]
    pub storage: StorageLimitView,
}

/// How much of a host's links disks may take, in each direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StorageLimitView {
    /// What was set while the agent ran.
    pub setting: BandwidthSetting,
    /// Mb/s that hold now, beside the limit for all; absent for no limit of their own.
    pub limit_mbps: Option<u64>,
    /// What holds later, within a day, the first first.
    #[serde(default)]
    pub later: Vec<LimitChange>,
}

/// A request to limit it otherwise.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BandwidthRequest {
    /// What holds from now on, until it is set again.
    pub setting: BandwidthSetting,
    /// For what; all that migrations send, if absent.
    #[serde(default, skip_serializing_if = "Limited::is_all")]
    pub limited: Limited,
}

/// Between agents: what the target grants one migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BandwidthShare {
    /// Mb/s of its links; absent for all that they have.
    pub mbps: Option<u64>,
}

/// A plan and nothing done.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PlanView {
    /// The VM.
    pub vm: String,
    /// Where it is.
    pub source: String,
    /// Where it would go.
    pub target: String,
    /// How.
    pub plan: Plan,
    /// Predicted, if it began now, rests, and waits for no turn; absent where too little is known. In ms.
    #[serde(default)]
    pub predicted_total_ms: Option<f64>,
    /// The most that it may take where cores are busy; absent where none are.
    #[serde(default)]
    pub predicted_most_ms: Option<f64>,
    /// What makes that uncertain: busy cores, by host.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Mb/s that the limits of both hosts leave it now, in each direction; absent for no limit.
    #[serde(default)]
    pub bandwidth_limit_mbps: Option<u64>,
    /// The same for copies of its disks; absent where these have no limit of their own.
    #[serde(default)]
    pub storage_limit_mbps: Option<u64>,
    /// Whether what it writes to disks that are copied is held back near the end: its hypervisor cannot have these writes wait
    /// for the target.
    #[serde(default)]
    pub holds_writes: bool,
    /// What is wrong, or would keep it from going; not what needs a trial of the paths.
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// One migration: under way, or over.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MigrationView {
    /// Its identifier on the source.
    pub id: String,
    /// The VM.
    pub vm: String,
    /// Where it came from; that host's agent runs the migration.
    pub source: String,
    /// Where it goes.
    pub target: String,
    /// When it began (RFC 3339); absent when it is over, as `result` has it then.
    #[serde(default)]
    pub started_at: Option<String>,
    /// The option that was asked for; absent when it is over.
    #[serde(default)]
    pub requested_option: Option<RequestedOption>,
    /// How far it has come; absent when it is over.
    pub progress: Option<Progress>,
    /// How it ended; absent while it is under way.
    pub result: Option<MigrationResult>,
    /// Why nothing goes on for now, in words for people: the agent has restarted, and the VM's QEMU does not answer.
    #[serde(default)]
    pub waits_for: Option<String>,
}

/// Step 2, between agents: may this VM come?
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct IncomingRequest {
    /// Identifier of the migration.
    #[serde(deserialize_with = "migration_id")]
    #[schema(format = "uuid")]
    pub id: String,
    /// What the VM is, with every value given; the target builds exactly this.
    #[schema(value_type = VmSpec)]
    pub spec: ResolvedSpec,
    /// As its owner wrote it; kept for the next start.
    pub definition: VmSpec,
    /// Whether the source waits and asks again while this host takes no more VMs at a time: those of drains do.
    #[serde(default)]
    pub may_wait: bool,
    /// Cores that the VM took recently, 0 or more: what it will want at the target, until that has counted itself.
    /// Absent while that is not known.
    #[serde(default)]
    #[schema(minimum = 0)]
    pub cores_taken: Option<f64>,
    /// The disks that are copied; they are not here yet, and the specification and the definition name where they will be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 8)]
    pub disks: Vec<DiskCopy>,
    /// The source's release; 0.1.0 does not say, and does not take a request that does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Release>,
}

/// Between agents: what the target says to a VM that is to come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum IncomingPermit {
    /// It may.
    Granted,
    /// Not yet, for this reason: the source asks again.
    // Its name in 0.1.0.
    #[serde(rename = "crowded")]
    Busy(String),
}

/// Step 5, between agents: listen.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ConnectionRequest {
    /// The plan, its paths seen from the target.
    pub plan: Plan,
    /// The source's address for routed multichannel.
    #[schema(value_type = Option<String>)]
    pub migration_address: Option<std::net::IpAddr>,
    /// For routed multichannel: where the source watches the paths.
    pub watch: Option<WatchEnd>,
    /// What the source's hypervisor hands over to the target's, if anything.
    #[serde(default, skip_serializing_if = "Parcel::is_empty")]
    pub parcel: Parcel,
    /// How long the slowest of the paths takes there and back, in microseconds, where the source knows. 0.1.0 does not
    /// say, and does not take a request that does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u32>,
    /// To connect again: the number of the source's attempt, higher than those of its earlier ones. 0.1.0 does not number
    /// them, and does not take a request that does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u64>,
}

/// What an end needs to know of the other one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WatchEnd {
    /// What each datagram to this end carries; another one after each start of the agent.
    #[schema(value_type = String, format = "uuid")]
    pub token: Uuid,
    /// The paths, in the order of the plan; none of one that cannot be watched from here now, as its link is
    /// down and has lost its address.
    pub paths: Vec<Option<PathEnd>>,
}

/// One path's end of a watch.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PathEnd {
    /// UDP port.
    pub port: u16,
    /// Whether hellos of this end are known to have come through to the other one before.
    pub was_heard: bool,
}

/// Between agents: the source hears nothing more of the target's watch of the paths.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WatchRequest {
    /// The paths, seen from the target.
    pub paths: Vec<Path>,
    /// The source's address for routed multichannel.
    #[schema(value_type = String)]
    pub migration_address: std::net::IpAddr,
    /// Where the source watches the paths.
    pub watch: WatchEnd,
}

/// Where the target listens.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Endpoint {
    /// Address of the target.
    #[schema(value_type = String)]
    pub address: std::net::IpAddr,
    /// Port on it.
    pub port: u16,
    /// For routed multichannel: where the target watches the paths.
    pub watch: Option<WatchEnd>,
    /// For a migration through a relay: what that of the source says on each connection, so that nobody else gets to the
    /// VM.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub relay_token: Option<uuid::Uuid>,
    /// For a compressed migration: copies of pages that the target keeps for the source to refer to, at most, in
    /// MiB.
    #[serde(default)]
    pub relay_page_cache_mib: u32,
    /// For an encrypted post-copy: the key with which QEMU encrypts, 64 hexadecimal digits.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub tls_key: Option<TlsKey>,
    /// What the target's hypervisor hands over to the source's, if anything.
    #[serde(default, skip_serializing_if = "Parcel::is_empty")]
    pub parcel: Parcel,
    /// Where copies of disks are taken, if any are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DiskEndpoint>,
}

/// Where the target takes copies of disks, at the address where it listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskEndpoint {
    /// Port.
    pub port: u16,
    /// What the source says on each connection, so that nobody else gets to the disks.
    #[schema(value_type = String, format = "uuid")]
    pub token: Uuid,
    /// Those that the target has in part already, from an attempt that was interrupted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub begun: Vec<DiskName>,
    /// Those that go to devices, which hold what somebody had there: all of these must be written.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub overwritten: Vec<DiskName>,
    /// Whether it takes data that are packed.
    #[serde(default)]
    pub unpacks: bool,
}

/// A disk of a VM that has left with a copy of it or goes on with one, or what is there of a copy that was interrupted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeftDisk {
    /// Where it is now.
    pub path: String,
    /// Where it was.
    pub was: String,
    /// The VM.
    pub vm: String,
    /// The host to which that went, or where it stayed when a copy was interrupted. Of a disk that moved on its own host, that.
    pub target: String,
    /// When (RFC 3339).
    pub left_at: String,
    /// For an interrupted copy: until when it is kept, so that the next one can continue from it (RFC 3339).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<String>,
    /// Whether it is a block device, which stays as it is, under its name.
    #[serde(default)]
    pub is_device: bool,
}

/// What the source's journal says about a hand-over, for a target that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandOverView {
    /// Not yet; it may come.
    Pending,
    /// The VM is the target's.
    HandedOver,
    /// It stays the source's.
    Refused,
    /// The journal has no such migration, or no more.
    Unknown,
}

/// Between agents: what a host says about its journal, to hear what it has said before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Hearing {
    /// How far it is now; absent where it only asks.
    #[serde(default, rename = "told", deserialize_with = "bounded_standing")]
    pub standing: Option<JournalStanding>,
}

/// Between agents: the last that a host has said about its journal before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeardMark {
    /// Absent if it has said nothing.
    pub heard: Option<JournalMark>,
}

/// Between agents: whether a host has a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmHolding {
    /// How it has it; absent if it does not.
    pub holding: Option<Holding>,
}

/// How a host has a VM that another one is to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Holding {
    /// Its QEMU lives there.
    Lives,
    /// It is on its way there.
    Comes,
    /// It is on its way from there to a third host.
    Leaves,
    /// The host that asks has handed it over, and it is stopped there.
    HandedOver,
}

/// A host's journal, and whether it is believed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JournalView {
    /// The host.
    pub host: String,
    /// Where it lies.
    pub file: String,
    /// Which it is, and how far; absent if it cannot be read.
    pub mark: Option<JournalMark>,
    /// Why it is not believed; none if it is.
    pub doubts: Vec<String>,
    /// While it is not: the VMs whose QEMUs live on the host.
    pub live: Vec<LiveVm>,
    /// While it is not: what other hosts are moving here, or may have moved.
    pub coming: Vec<MigrationView>,
    /// While it is not: what kept other hosts from saying so.
    pub silent: Vec<String>,
}

/// A VM that lives on a host whose journal is not believed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LiveVm {
    /// Its name.
    pub vm: String,
    /// Whether its guest runs; absent if its QEMU does not say.
    pub runs: Option<bool>,
    /// What it is once the journal is adopted, in words for people.
    pub will_be: String,
}

/// Steps 7 and 8, between agents: what the source's firewall tracks of the VM, since the last message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TrackedRequest {
    /// The VM's addresses, as the source knows them.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<std::net::IpAddr>,
    /// Those of them that were sent before and have ended, or are sent again: to be deleted first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub ended: Vec<TrackedConnection>,
    /// Its connections.
    #[schema(value_type = Vec<Object>)]
    pub connections: Vec<TrackedConnection>,
}

/// How many of them the target's firewall tracks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrackedTaken {
    /// So many.
    pub taken: u64,
    /// Those that it does not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    pub left_out: Vec<TrackedConnection>,
    /// Why not all.
    #[serde(default)]
    pub why: Option<String>,
}

/// What the target used, at the end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TargetUse {
    /// CPU seconds of its QEMU.
    pub vmm_cpu_seconds: f64,
    /// CPU seconds of its agent since the migration began.
    pub agent_cpu_seconds: f64,
}

fn vm_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    VmName::deserialize(deserializer).map(String::from)
}

fn host_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let name = String::deserialize(deserializer)?;
    check_host_name(&name)?;
    Ok(name)
}

fn check_host_name<E: Error>(name: &str) -> Result<(), E> {
    check_name(name).map_err(|error| E::custom(format!("`{}`: {error}", name.escape_default())))
}

/// In the one form in which the journal has it: it becomes a key there, and a part of paths.
fn migration_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Uuid::deserialize(deserializer).map(|id| id.to_string())
}

fn bounded_standing<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<JournalStanding>, D::Error> {
    let standing = Option::<JournalStanding>::deserialize(deserializer)?;
    if standing.as_ref().is_some_and(|standing| standing.mark.generation > GENERATION_MAX) {
        return Err(D::Error::custom(format!("told.mark.generation: 0 to {GENERATION_MAX} is allowed")));
    }
    Ok(standing)
}

fn throttle_max_percent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u8>, D::Error> {
    let percent = Option::<u8>::deserialize(deserializer)?;
    if percent.is_some_and(|percent| percent > THROTTLE_PERCENT_MAX) {
        return Err(D::Error::custom(format!(
            "throttle_max_percent: 0 to {THROTTLE_PERCENT_MAX} is allowed"
        )));
    }
    Ok(percent)
}

fn deadline_s<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let seconds = Option::<u32>::deserialize(deserializer)?;
    if seconds.is_some_and(|seconds| !(1..=DEADLINE_S_MAX).contains(&seconds)) {
        return Err(D::Error::custom(format!("deadline_s: 1 to {DEADLINE_S_MAX} is allowed")));
    }
    Ok(seconds)
}
