//! Moves a VM there and back by each option, watches its guest, and checks its memory each time.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use drainpipe_api_types::{HostView, MigrateRequest, PlanView, VmView};
use drainpipe_engine::format;
use drainpipe_engine::migration::result::{EncryptionUse, MigrationResult, Outcome, Verified};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::problem::Problem;
use drainpipe_guest::client::{Control, ControlError, Heartbeat};
use drainpipe_guest::dirtier::PAGES_PER_MIB;
use drainpipe_report::{BenchReport, Conditions, GuestConditions, HostConditions, LinkConditions};
use jiff::Timestamp;

use crate::connection::Fleet;
use crate::follow::{self, Followed};
use crate::output;

/// How long the guest may take to check its memory: 1 s a GiB under TCG, with room for 64 GiB.
const VERIFY_DEADLINE: Duration = Duration::from_mins(2);

/// How long the guest may take to answer its control port; most of it is for a busy host.
const CONTROL_DEADLINE: Duration = Duration::from_secs(30);

/// How long the heartbeat is watched before the first migration, to know the guest's own silences.
const BASELINE: Duration = Duration::from_secs(1);

/// What is to be measured.
pub(crate) struct Bench {
    pub(crate) vm: String,
    pub(crate) host: String,
    pub(crate) options: Vec<RequestedOption>,
    pub(crate) repeat: u32,
    /// Also where the hosts do not require it.
    pub(crate) encrypt: bool,
    pub(crate) content: Option<String>,
    pub(crate) client_namespace: Option<PathBuf>,
    /// Each so often the guest is asked for a sign of life.
    pub(crate) heartbeat: Duration,
    /// A person watches.
    pub(crate) watched: bool,
}

fn encryption_note(results: &[MigrationResult]) -> Option<String> {
    let mut used = results.iter().filter_map(|result| result.connection_use.encryption.as_ref());
    let EncryptionUse { protocol, cipher_suite, .. } = used.find(|used| used.cipher_suite.is_some())?;
    Some(format!("encrypted by {}, {}", protocol.as_ref()?, cipher_suite.as_ref()?))
}

/// The guest, if it is one that answers.
struct Watch {
    heartbeat: SocketAddr,
    beats_every: Duration,
    control: SocketAddr,
    namespace: Option<PathBuf>,
}

impl Watch {
    /// Only for as long as it is needed: a guest short of CPU, as on a busy host without KVM, is so
    /// occupied with a packet each millisecond that it answers nothing else.
    fn heartbeat(&self) -> Result<Heartbeat, Problem> {
        Heartbeat::start_every(self.beats_every, self.heartbeat, self.namespace.as_deref())
            .map_err(|error| Problem::failed(format!("cannot watch the guest: {error}")))
    }
}

impl Bench {
    /// Runs it. A migration that does not complete ends it, and the report has what was measured.
    pub(crate) async fn run(&self, fleet: &Fleet) -> Result<BenchReport, Problem> {
        let vm = fleet.find_vm(&self.vm).await?;
        let watch = self.watch(&vm)?;
        let mut report = BenchReport { conditions: self.conditions(fleet, &vm).await?, results: vec![] };
        if let Some(watch) = &watch {
            report.conditions.notes.extend(at_rest(watch).await?);
        } else {
            let note = "the VM's specification has no [guest]: silences and memory were not checked";
            report.conditions.notes.push(note.into());
        }
        let journeys = (0..self.repeat)
            .flat_map(|_| &self.options)
            .flat_map(|option| [(*option, self.host.as_str()), (*option, vm.host.as_str())]);
        for (option, target) in journeys {
            let result = self.journey(fleet, watch.as_ref(), option, target).await?;
            let completed = result.outcome == Outcome::Completed;
            report.results.push(result);
            if !completed {
                break;
            }
        }
        report.conditions.notes.extend(encryption_note(&report.results));
        Ok(report)
    }

    fn watch(&self, vm: &VmView) -> Result<Option<Watch>, Problem> {
        let (Some(heartbeat), Some(control)) = (&vm.heartbeat, &vm.control) else { return Ok(None) };
        let address = |text: &str| {
            text.parse::<SocketAddr>()
                .map_err(|_| Problem::failed(format!("the agent gives {text} as an address")))
        };
        Ok(Some(Watch {
            heartbeat: address(heartbeat)?,
            beats_every: self.heartbeat,
            control: address(control)?,
            namespace: self.client_namespace.clone(),
        }))
    }

    async fn journey(
        &self,
        fleet: &Fleet,
        watch: Option<&Watch>,
        option: RequestedOption,
        target: &str,
    ) -> Result<MigrationResult, Problem> {
        let before = match watch {
            Some(watch) => Some(rewritten(watch).await?),
            None => None,
        };
        let heartbeat = watch.map(Watch::heartbeat).transpose()?;
        let plain = MigrateRequest::plain(&self.vm, target, option);
        let request = MigrateRequest { encrypt: self.encrypt, ..plain };
        let mut result = match follow::migrate(fleet, &request, self.watched).await? {
            Followed::Over(result) => result,
            Followed::LostSight(problem) => return Err(problem),
        };
        result.silence.guest_gap_ms = heartbeat.map(|heartbeat| heartbeat.stop().longest_gap_ms);
        if let (Some(watch), Some(before)) = (watch, before)
            && result.outcome == Outcome::Completed
        {
            result.memory.guest_rewritten_mib_per_s = Some(rewritten(watch).await?.mib_per_s_since(&before));
            result.record.verified = Some(verify(watch).await?);
        }
        if self.watched {
            output::remark(&one_line(&result));
        }
        Ok(result)
    }

    async fn conditions(&self, fleet: &Fleet, vm: &VmView) -> Result<Conditions, Problem> {
        let hosts = fleet.hosts().await?;
        let host = |name: &str| {
            let found = hosts.iter().find(|host| host.name == name);
            found.and_then(|host| host.host.as_ref()).ok_or_else(|| {
                Problem::not_found(format!("no host {name} answers; `drainpipe hosts` lists them"))
            })
        };
        let (source, target) = (host(&vm.host)?, host(&self.host)?);
        Ok(Conditions {
            drainpipe_version: env!("CARGO_PKG_VERSION").into(),
            date: Timestamp::now().to_string(),
            hosts: vec![host_conditions(source), host_conditions(target)],
            links: self.link_conditions(fleet, source, target).await?,
            guest: GuestConditions {
                memory_mib: vm.memory_mib,
                vcpus: vm.vcpus,
                content: self.content.clone(),
                dirty_mib_per_s: None,
                dirty_percent: None,
                rewrite_bytes: None,
            },
            page_cache_mib: None,
            repeats: self.repeat,
            options: self.options.clone(),
            notes: vec![],
        })
    }

    /// The paths that a migration by all links would take.
    async fn link_conditions(
        &self,
        fleet: &Fleet,
        source: &HostView,
        target: &HostView,
    ) -> Result<Vec<LinkConditions>, Problem> {
        let request = MigrateRequest::plain(&self.vm, &self.host, RequestedOption::Multichannel);
        let host = fleet.host(&source.facts.name).await?;
        let view: PlanView = host.client().post(&host.path("/v1/migrations/plan"), &request).await?;
        let mtu = |view: &HostView, name: &str| view.facts.link(name).map_or(0, |link| link.mtu);
        let conditions = Vec::from(view.plan.paths).into_iter().map(|path| LinkConditions {
            mtu: mtu(source, &path.link).min(mtu(target, &path.peer_link)),
            speed_mbps: path.speed_mbps,
            name: path.link,
            peer_link: path.peer_link,
        });
        Ok(conditions.collect())
    }
}

/// What the guest is like while it is not moved.
async fn at_rest(watch: &Watch) -> Result<[String; 2], Problem> {
    let before = rewritten(watch).await?;
    let heartbeat = watch.heartbeat()?;
    tokio::time::sleep(BASELINE).await;
    let silence = heartbeat.stop().longest_gap_ms;
    let rate = rewritten(watch).await?.mib_per_s_since(&before);
    let beats_every = watch.beats_every.as_millis();
    Ok([
        format!(
            "longest silence of the guest at rest, asked each {beats_every} ms: {}",
            format::duration(silence)
        ),
        format!("rewritten by the guest at rest: {}/s", format::bytes(rate * format::MIB)),
    ])
}

/// How many pages the guest has rewritten, and when it said so.
struct Rewritten {
    pages: u64,
    at: Instant,
}

impl Rewritten {
    fn mib_per_s_since(&self, before: &Self) -> f64 {
        let pages = self.pages.saturating_sub(before.pages);
        pages as f64 / PAGES_PER_MIB as f64 / (self.at - before.at).as_secs_f64()
    }
}

async fn rewritten(watch: &Watch) -> Result<Rewritten, Problem> {
    let status = ask(watch, |control| control.status(CONTROL_DEADLINE)).await?;
    Ok(Rewritten { pages: status.rewritten_pages, at: Instant::now() })
}

async fn verify(watch: &Watch) -> Result<Verified, Problem> {
    let verification = ask(watch, |control| control.verify(VERIFY_DEADLINE)).await?;
    Ok(Verified { pages: verification.pages, bad: verification.bad })
}

/// What the guest answers to one question.
async fn ask<T: Send + 'static>(
    watch: &Watch,
    question: fn(&mut Control) -> Result<T, ControlError>,
) -> Result<T, Problem> {
    let (address, namespace) = (watch.control, watch.namespace.clone());
    let asked = tokio::task::spawn_blocking(move || {
        Control::connect(address, namespace.as_deref(), CONTROL_DEADLINE)
            .and_then(|mut control| question(&mut control))
    });
    asked
        .await
        .map_err(|error| Problem::failed(format!("asking the guest stopped: {error}")))?
        .map_err(|error| Problem::failed(format!("cannot ask the guest: {error}")))
}

fn host_conditions(view: &HostView) -> HostConditions {
    HostConditions {
        name: view.facts.name.clone(),
        kernel: view.kernel.clone(),
        cpu_model: view.cpu_model.clone(),
        cores: view.facts.cores,
        memory_bytes: view.memory_bytes,
        hypervisor_version: view.facts.hypervisor.version.clone(),
        accelerator: view.accelerator.clone(),
    }
}

fn one_line(result: &MigrationResult) -> String {
    let journey =
        format!("{:<12} {} → {}", result.choice.requested_option.to_string(), result.source, result.target);
    if result.outcome != Outcome::Completed {
        return format!("{journey}  {}", result.failure.error.as_deref().unwrap_or("cancelled"));
    }
    let memory = result.record.verified.map_or(String::new(), |verified| match verified.bad {
        0 => format!(", {} pages intact", verified.pages),
        bad => format!(", {bad} of {} pages BAD", verified.pages),
    });
    let gap = result
        .silence
        .guest_gap_ms
        .map_or(String::new(), |gap| format!(", guest silent {}", format::duration(gap)));
    format!(
        "{journey}  {:>7}  {}{gap}{memory}",
        format::duration(result.times.total_ms),
        format::rate(result.memory.throughput_gbps)
    )
}
