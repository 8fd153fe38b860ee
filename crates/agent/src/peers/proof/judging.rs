//! When the agent starts: journal, witnesses and running QEMUs are compared, before anything is done on the journal's
//! word.

use drainpipe_engine::journal::{Doubt, JournalFile, Testimony, Witness, doubts};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Hypervisor;
use drainpipe_hypervisor::spec::VmName;
use drainpipe_identity::Identity;
use futures_util::future::join_all;

use super::telling::hear;
use crate::peers::client::ApiClient;
use crate::store::config::Config;
use crate::store::fleet::known_peers;
use crate::store::journal::{Journal, RuntimeWitness, look};
use crate::vms::beside::Beside;

/// What was found.
#[derive(Debug)]
pub(crate) struct Judged {
    /// The journal.
    pub(crate) file: JournalFile,
    /// What others know of it.
    pub(crate) testimonies: Vec<Testimony>,
    /// VMs whose QEMUs live here.
    pub(crate) lives: Vec<VmName>,
    /// Why the journal is not to be believed; none if it is.
    pub(crate) doubts: Vec<Doubt>,
}

/// Looks at all there is. The other hosts are asked where the host itself has no witness, as after it booted, or where
/// somebody wants to know.
pub(crate) async fn judge(
    config: &Config,
    hypervisor: &dyn Hypervisor,
    identity: &Identity,
    asks_all: bool,
) -> Result<Judged, Problem> {
    let file = look(&config.state_directory)?;
    let witness = RuntimeWitness::in_directory(&config.runtime_directory).read().map_err(|error| {
        Problem::failed(format!(
            "the runtime directory does not say what it knows of the journal: {error}; remove that file if you are sure \
             that the journal is whole"
        ))
    })?;
    let mut testimonies: Vec<Testimony> = witness
        .into_iter()
        .map(|witnessed| Testimony { by: Witness::RuntimeDirectory, heard: witnessed.mark })
        .collect();
    if testimonies.is_empty() || asks_all {
        testimonies.extend(ask_all(config, identity).await?);
    }
    let lives = living(config, hypervisor)?;
    let recorded = match &file {
        JournalFile::Sound(_) => recorded(config)?,
        _ => vec![],
    };
    let unrecorded: Vec<String> =
        lives.iter().map(VmName::to_string).filter(|vm| !recorded.contains(vm)).collect();
    let doubts = doubts(&file, &testimonies, &unrecorded);
    Ok(Judged { file, testimonies, lives, doubts })
}

fn recorded(config: &Config) -> Result<Vec<String>, Problem> {
    Ok(Journal::open(&config.state_directory, &config.runtime_directory)?.recorded_vms()?)
}

/// The VMs whose QEMUs live here. Of another manager's, those that came or are to leave: what the others are, it says itself.
fn living(config: &Config, hypervisor: &dyn Hypervisor) -> Result<Vec<VmName>, Problem> {
    let failed = |error: &dyn std::fmt::Display| {
        Problem::failed(format!("cannot look at {}: {error}", config.runtime_directory.display()))
    };
    let mut lives = vec![];
    for name in hypervisor.with_files().map_err(|error| failed(&error))? {
        if hypervisor.living(&name).map_err(|error| failed(&error))?.is_some() && is_ours(hypervisor, &name) {
            lives.push(name);
        }
    }
    Ok(lives)
}

/// Whether the journal alone says whose a VM is.
fn is_ours(hypervisor: &dyn Hypervisor, vm: &VmName) -> bool {
    if !hypervisor.specification(vm).is_ok_and(|spec| spec.spec().is_defined_elsewhere()) {
        return true;
    }
    let beside = hypervisor.directory(vm).ok().and_then(|directory| Beside::read(&directory));
    beside.is_some_and(|beside| beside.concerns_others())
}

async fn ask_all(config: &Config, identity: &Identity) -> Result<Vec<Testimony>, Problem> {
    let mut clients = vec![];
    for peer in known_peers(config, identity)? {
        clients.push((peer.name.clone(), ApiClient::over_tls(&peer.name, peer.address, identity)?));
    }
    let asked = clients.iter().map(|(name, client)| async move {
        // A host that does not answer knows nothing for now; it hears of this as soon as it does.
        let heard = hear(client, None).await.ok().flatten()?;
        Some(Testimony { by: Witness::Peer(name.clone()), heard })
    });
    Ok(join_all(asked).await.into_iter().flatten().collect())
}
