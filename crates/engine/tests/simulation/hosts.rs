//! The two hosts as the real planner sees them, and the rules for a plan between them (I6).

use drainpipe_engine::host::capabilities::Capabilities;
use drainpipe_engine::host::encryption_policy::EncryptionPolicy;
use drainpipe_engine::host::facts::{HostFacts, HypervisorVersion, MigrationLink};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::path_record::TrialOutcome;
use drainpipe_engine::plan::{Plan, PlanRequest, plan};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::transfer::encryption::refuses_clear;

use crate::fixtures;
use crate::random::Random;

const LINKS_MAX: u64 = 3;
const MEMORY_BYTES: u64 = 1 << 30;

/// The options with which post-copy may be requested.
const OVER_ONE_CONNECTION: [RequestedOption; 2] = [RequestedOption::Auto, RequestedOption::Tcp];

/// Two hosts and what is asked of a migration between them.
pub(crate) struct Hosts {
    source: HostFacts,
    target: HostFacts,
    request: PlanRequest,
}

impl Hosts {
    pub(crate) fn draw(random: &mut Random) -> Self {
        let links = 1 + random.below(LINKS_MAX);
        let post_copy = random.chance(30);
        let options = if post_copy { &OVER_ONE_CONNECTION[..] } else { &RequestedOption::ALL[..] };
        let option = options[random.index(options.len())];
        Self {
            source: host("a", 1, links, random),
            target: host("b", 2, links, random),
            request: PlanRequest { encrypt: random.chance(40), post_copy, ..option.into() },
        }
    }

    /// Both hosts as they are for a VM that is a domain of libvirt.
    pub(crate) fn with_libvirt(mut self) -> Self {
        for host in [&mut self.source, &mut self.target] {
            host.hypervisor.capabilities = Capabilities {
                pauses_before_switchover: false,
                zero_pages_in_parallel: false,
                packs: false,
                keeps_limit: false,
                post_copy: None,
                ..Capabilities::ALL
            };
        }
        self.request.post_copy = false;
        self
    }

    pub(crate) fn plan(&self) -> Result<Plan, Problem> {
        plan(&self.source, &self.target, self.request, &[], MEMORY_BYTES).map_err(Problem::refused)
    }

    pub(crate) fn allow_post_copy(&self) -> bool {
        self.request.post_copy
    }

    /// The rest of the plan after its paths were tried, some of which may let nothing through.
    pub(crate) fn try_paths(&self, plan: Plan, dead: impl FnMut(&Path) -> bool) -> Result<Plan, Problem> {
        let dead: Vec<bool> = plan.paths.iter().map(dead).collect();
        let trials: Vec<TrialOutcome> =
            dead.iter().map(|dead| if *dead { Err("it is silent".into()) } else { Ok(()) }).collect();
        plan.narrow(&trials, &self.source.name, &self.target.name).map_err(Problem::failed)
    }

    /// Whether the target accepts the plan by its own judgement.
    pub(crate) fn target_takes(&self, plan: &Plan) -> bool {
        let paths: Vec<Path> = plan.paths.iter().map(Path::reversed).collect();
        plan.is_encrypted() || refuses_clear(&self.target, &paths).is_none()
    }

    /// What is wrong with a plan by which memory is sent. The planner, which is what is tested here, has no say in it.
    pub(crate) fn breach(&self, used: &Plan, announced: Option<&Plan>) -> Option<String> {
        if announced != Some(used) {
            return Some("I6: what is told is not what is done".into());
        }
        if self.must_encrypt(used) && !(used.relay().is_some() || used.is_encrypted_by_hypervisor()) {
            return Some("I6: memory goes in the clear".into());
        }
        let asked_for = self.request.option.named();
        if asked_for.is_some_and(|option| option != used.option()) && used.reasons.is_empty() {
            return Some("I6: a fallback is not reported".into());
        }
        None
    }

    fn must_encrypt(&self, plan: &Plan) -> bool {
        let hosts = [&self.source, &self.target];
        let requires = hosts.iter().any(|host| host.encryption == EncryptionPolicy::Required);
        let trusts =
            |host: &HostFacts, name: &str| host.links.iter().any(|link| link.name == name && link.is_trusted);
        let is_trusted =
            |path: &Path| trusts(&self.source, &path.link) && trusts(&self.target, &path.peer_link);
        self.request.encrypt || requires && !plan.paths.iter().all(is_trusted)
    }
}

fn host(name: &str, last: u8, links: u64, random: &mut Random) -> HostFacts {
    let policies = [EncryptionPolicy::Required, EncryptionPolicy::Allowed, EncryptionPolicy::Allowed];
    let host = fixtures::host(name);
    let migration_address = random.chance(80).then(|| [10, 77, 200, last].into());
    HostFacts {
        memory_available_bytes: 16 * MEMORY_BYTES,
        links: (0..links).map(|index| link(index, last, random)).collect(),
        encryption: policies[random.index(policies.len())],
        migration_address,
        hypervisor: HypervisorVersion {
            version: "10.0.2".into(),
            capabilities: Capabilities::ALL,
            ..host.hypervisor
        },
        ..host
    }
}

fn link(index: u64, last: u8, random: &mut Random) -> MigrationLink {
    MigrationLink {
        addresses: vec![format!("10.77.{index}.{last}/24").parse().expect("an address and its prefix")],
        speed_mbps: Some(1000),
        is_trusted: random.chance(50),
        ..fixtures::link(&format!("e{index}"))
    }
}
