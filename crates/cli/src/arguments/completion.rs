//! What a shell completes: it asks this program, which asks an agent for names.

use std::ffi::OsString;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use clap_complete::env::{CompleteEnv, Shells};
use clap_complete::{ArgValueCandidates, CompletionCandidate, Shell};
use drainpipe_api_types::{MigrationView, VmView};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::storage::{DISKS_MAX, DiskName};

use super::Arguments;
use crate::connection::{ConnectionArguments, Fleet};
use crate::migrations;

/// Set by the script that a shell has read: the program is to complete words.
const VARIABLE: &str = "DRAINPIPE_COMPLETE";

/// A person waits for it. Agents give up on a silent host after 2 s.
const DEADLINE: Duration = Duration::from_secs(3);

/// Ended migrations of each host among the candidates for an identifier.
const ENDED_MAX: u32 = 20;

/// Completes what the shell asks for and ends the program, or does nothing if no shell asks.
pub(crate) fn answer_shell() {
    CompleteEnv::with_factory(Arguments::command).var(VARIABLE).complete();
}

/// What a shell reads to ask this program.
pub(crate) fn script(shell: Shell) -> Result<String, Problem> {
    let shells = Shells::builtins();
    let failed = |why: String| Problem::failed(format!("cannot write the script for {shell}: {why}"));
    let shell_script = shells.completer(&shell.to_string()).ok_or_else(|| failed("not known".into()))?;
    let mut script = Vec::new();
    shell_script
        .write_registration(VARIABLE, "drainpipe", "drainpipe", "drainpipe", &mut script)
        .map_err(|error| failed(error.to_string()))?;
    String::from_utf8(script).map_err(|error| failed(error.to_string()))
}

/// Names of hosts.
pub(crate) fn hosts() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        ask(async |fleet| {
            let hosts = fleet.hosts().await?.into_iter();
            Ok(hosts.map(|host| CompletionCandidate::new(host.name)).collect())
        })
    })
}

/// Names of VMs, and where they are.
pub(crate) fn vms() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        ask(async |fleet| {
            let vms = fleet.vms().await?.vms.into_iter();
            let named =
                |vm: VmView| CompletionCandidate::new(vm.name).help(Some(format!("on {}", vm.host).into()));
            Ok(vms.map(named).collect())
        })
    })
}

/// Names of disks: as many as a VM has at most.
pub(crate) fn disks() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        (0..DISKS_MAX)
            .filter_map(DiskName::at)
            .map(|disk| CompletionCandidate::new(disk.to_string()))
            .collect()
    })
}

/// Identifiers of migrations that can be cancelled.
pub(crate) fn running_migrations() -> ArgValueCandidates {
    migrations_where(|view| view.result.is_none())
}

/// Identifiers of migrations.
pub(crate) fn migrations() -> ArgValueCandidates {
    migrations_where(|_| true)
}

fn migrations_where(wanted: fn(&MigrationView) -> bool) -> ArgValueCandidates {
    ArgValueCandidates::new(move || {
        ask(async move |fleet| {
            let found = migrations::of_all_hosts(fleet, ENDED_MAX).await?.migrations;
            let identified = |view: MigrationView| {
                let help = format!("{} from {} to {}", view.vm, view.source, view.target);
                CompletionCandidate::new(view.id).help(Some(help.into()))
            };
            Ok(found.into_iter().filter(wanted).map(identified).collect())
        })
    })
}

/// What the agent says that the words so far name; nothing if it does not answer: a shell has no place for errors.
fn ask(
    question: impl AsyncFnOnce(&Fleet) -> Result<Vec<CompletionCandidate>, Problem>,
) -> Vec<CompletionCandidate> {
    let answer = || {
        let fleet = connection(std::env::args_os())?.fleet().ok()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(async { tokio::time::timeout(DEADLINE, question(&fleet)).await.ok()?.ok() })
    };
    answer().unwrap_or_default()
}

/// How the words so far say to reach an agent; they are those after `--`, and no whole command yet.
fn connection(words: impl Iterator<Item = OsString>) -> Option<ConnectionArguments> {
    let words = words.skip_while(|word| word != "--").skip(1);
    let command = Arguments::command().ignore_errors(true);
    let matches = command.try_get_matches_from(words).ok()?;
    ConnectionArguments::from_arg_matches(&matches).ok()
}
