//! An operator makes a host continue whose journal is not believed: what runs is recorded again, and what others know
//! about the old journal then applies to the new one.

use std::time::Duration;

use drainpipe_engine::journal::{Doubt, JournalFile, JournalMark, replacement};
use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::{VmName, VmSpec};
use drainpipe_hypervisor::{Hypervisor, Role, RunState};
use drainpipe_identity::Identity;
use futures_util::future::join_all;
use jiff::Timestamp;
use tracing::info;
use uuid::Uuid;

use super::judging::{Judged, judge};
use super::telling::{ANSWER_DEADLINE, note_adopted};
use crate::peers::client::ApiClient;
use crate::store::config::Config;
use crate::store::fleet::known_peers;
use crate::store::journal::{Adopted, Journal, set_aside};
use crate::vms::beside::{Beside, RecordedMigration};
use drainpipe_api_types::{JournalView, LiveVm, MigrationView};

/// How long a QEMU may take to say what it does: somebody waits, and one that is mute is taken as it is.
const QEMU_ANSWERS_WITHIN: Duration = Duration::from_secs(2);

/// What is here, and what would become of it.
struct FoundVms {
    judged: Judged,
    live: Vec<Live>,
    coming: Vec<MigrationView>,
    silent: Vec<String>,
}

struct Live {
    vm: VmName,
    will_be: Adopted,
    runs: Option<bool>,
}

/// What an operator is shown before it is decided.
pub(crate) async fn view(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    identity: &Identity,
) -> Result<JournalView, Problem> {
    Ok(in_view(config, &find(config, hypervisor, identity).await?))
}

/// Goes on with what is here; tells what has become of it.
pub(crate) async fn adopt(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    identity: &Identity,
) -> Result<JournalView, Problem> {
    let found = find(config, hypervisor, identity).await?;
    let Judged { file, testimonies, lives, doubts } = &found.judged;
    if doubts.is_empty() {
        return Err(nothing_to_adopt(config));
    }
    let standing = match file {
        JournalFile::Sound(standing) => Some(standing),
        _ => None,
    };
    // One of another host, or of another time of this one, says nothing of what is here.
    let is_another = doubts.iter().any(|doubt| matches!(doubt, Doubt::Another(_)));
    if standing.is_none() || is_another {
        let aside = set_aside(&config.state_directory, Timestamp::now())?;
        info!(to = %aside.display(), "the old journal is set aside");
    }
    let replacement = replacement(standing, testimonies, Uuid::new_v4().simple().to_string());
    let journal = Journal::open(&config.state_directory, &config.runtime_directory)?;
    let adopted: Vec<Adopted> = found.live.iter().map(|live| live.will_be.clone()).collect();
    let lives: Vec<String> = lives.iter().map(VmName::to_string).collect();
    journal.adopt(&replacement, &adopted, &lives)?;
    note_adopted(&replacement);
    Ok(in_view(config, &found))
}

/// A journal that is believed stays.
pub(crate) fn nothing_to_adopt(config: &Config) -> Problem {
    Problem::conflict(format!("the journal of {} is believed: there is nothing to adopt", config.name))
}

async fn find(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    identity: &Identity,
) -> Result<FoundVms, Problem> {
    let judged = judge(config, hypervisor, identity, true).await?;
    let (coming, silent) = coming(config, identity).await?;
    let live = join_all(judged.lives.iter().map(|vm| look_at(hypervisor, vm, &coming))).await;
    let live = live.into_iter().collect::<Result<_, _>>()?;
    Ok(FoundVms { judged, live, coming, silent })
}

/// What the other hosts are moving here, and who does not say.
async fn coming(config: &Config, identity: &Identity) -> Result<(Vec<MigrationView>, Vec<String>), Problem> {
    let mut clients = vec![];
    for peer in known_peers(config, identity)? {
        clients.push((peer.name.clone(), ApiClient::over_tls(&peer.name, peer.address, identity)?));
    }
    let asked = clients
        .iter()
        .map(|(_, client)| client.get_within::<Vec<MigrationView>>("/v1/migrations", ANSWER_DEADLINE));
    let (mut coming, mut silent) = (vec![], vec![]);
    for ((name, _), answer) in clients.iter().zip(join_all(asked).await) {
        match answer {
            Ok(views) => coming.extend(views.into_iter().filter(|view| is_coming(view, name, &config.name))),
            Err(problem) => silent.push(problem.message),
        }
    }
    Ok((coming, silent))
}

fn is_coming(view: &MigrationView, source: &str, here: &str) -> bool {
    let is_open = view.result.as_ref().is_none_or(|result| result.outcome == Outcome::InDoubt);
    is_open && view.source == source && view.target == here
}

async fn look_at(
    hypervisor: &dyn Hypervisor,
    vm: &VmName,
    coming: &[MigrationView],
) -> Result<Live, Problem> {
    let beside = Beside::read(&hypervisor.directory(vm).map_err(Problem::refused)?);
    let (mut runs, mut role) = (None, None);
    if let Ok(vmm) = hypervisor.attach(vm, QEMU_ANSWERS_WITHIN).await {
        let state = vmm.run_state(QEMU_ANSWERS_WITHIN).await;
        (runs, role) = (state.ok().map(|state| state == RunState::Running), vmm.role().ok());
    }
    // A Drainpipe before this one has put nothing beside it.
    let beside = match beside {
        Some(beside) => beside,
        None => {
            reported_by_others(hypervisor.specification(vm).map_err(Problem::failed)?.spec(), role, coming)
        }
    };
    Ok(Live { vm: vm.clone(), will_be: judge_one(beside, runs == Some(true)), runs })
}

fn reported_by_others(spec: &VmSpec, role: Option<Role>, coming: &[MigrationView]) -> Beside {
    let own = coming.iter().find(|view| view.vm == spec.name.as_str() && role == Some(Role::Incoming));
    let incoming = own.map(|view| RecordedMigration { id: view.id.clone(), host: view.source.clone() });
    Beside { incoming, ..Beside::of(spec.clone()) }
}

/// What its record is to be. A guest that runs has not left; one that does not may have.
fn judge_one(Beside { definition: spec, incoming, has_run, outgoing }: Beside, runs: bool) -> Adopted {
    match (outgoing, incoming) {
        (Some(RecordedMigration { id, host: target }), _) if runs => Adopted::Stays { id, target, spec },
        (Some(RecordedMigration { id, host: target }), _) => Adopted::Leaving { id, target, spec },
        (None, Some(RecordedMigration { id, host: source })) if runs || has_run => {
            Adopted::Arrived { id, source, spec }
        }
        (None, Some(RecordedMigration { id, host: source })) => Adopted::Waiting { id, source, spec },
        (None, None) => Adopted::Here(spec),
    }
}

fn in_view(config: &Config, found: &FoundVms) -> JournalView {
    let mark: Option<JournalMark> = match &found.judged.file {
        JournalFile::Sound(standing) => Some(standing.mark.clone()),
        _ => None,
    };
    let live = found.live.iter().map(|live| LiveVm {
        vm: live.vm.to_string(),
        runs: live.runs,
        will_be: in_words(&live.will_be),
    });
    JournalView {
        host: config.name.clone(),
        file: crate::store::journal::file_of(&config.state_directory).display().to_string(),
        mark,
        doubts: found.judged.doubts.iter().map(Doubt::to_string).collect(),
        live: live.collect(),
        coming: found.coming.clone(),
        silent: found.silent.clone(),
    }
}

fn in_words(adopted: &Adopted) -> String {
    match adopted {
        Adopted::Here(_) => "a VM of this host, as before".into(),
        Adopted::Waiting { source, .. } => {
            format!("on its way here from {source}, which says whether it runs here")
        }
        Adopted::Arrived { source, .. } => format!("a VM of this host, which came from {source}"),
        Adopted::Leaving { target, .. } => {
            format!("on its way to {target}, which says whether it runs there")
        }
        Adopted::Stays { target, .. } => format!("a VM of this host; its migration to {target} is undone"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_run_may_be_elsewhere_and_what_runs_is_here() {
        let spec =
            serde_json::json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
        let definition: VmSpec = serde_json::from_value(spec).unwrap();
        let way = |host: &str| Some(RecordedMigration { id: "1".into(), host: host.into() });
        let beside = |incoming, outgoing| Beside { incoming, outgoing, ..Beside::of(definition.clone()) };
        assert!(matches!(judge_one(beside(None, None), false), Adopted::Here(_)));
        assert!(matches!(judge_one(beside(way("a"), None), false), Adopted::Waiting { .. }));
        assert!(matches!(judge_one(beside(way("a"), None), true), Adopted::Arrived { .. }));
        let paused_since = Beside { has_run: true, ..beside(way("a"), None) };
        assert!(matches!(judge_one(paused_since, false), Adopted::Arrived { .. }));
        assert!(matches!(judge_one(beside(way("a"), way("c")), false), Adopted::Leaving { .. }));
        assert!(matches!(judge_one(beside(None, way("c")), true), Adopted::Stays { .. }));
    }
}
