//! `drainpipe vms` and `drainpipe vm …`.

use std::path::Path;
use std::time::Duration;

use drainpipe_agent::api::types::{CreateVm, ReclaimRequest, VmState};
use drainpipe_engine::problem::Problem;
use drainpipe_engine::result::MigrationResult;
use drainpipe_hypervisor::spec::VmSpec;

use super::migrate;
use crate::arguments::VmCommand;
use crate::connection::{ConnectionArguments, Fleet};
use crate::exit::Exit;
use crate::{ask, output};

/// The agent waits a minute for a guest to power off.
const STOP_DEADLINE: Duration = Duration::from_secs(85);

/// The agent asks the target once more and undoes the migration, for a minute at most.
const RECLAIM_DEADLINE: Duration = Duration::from_secs(65);

/// QEMU's start, with room.
const START_DEADLINE: Duration = Duration::from_secs(30);

pub(crate) async fn list(connection: &ConnectionArguments, json: bool) -> Result<Exit, Problem> {
    let list = connection.fleet()?.vms().await?;
    if json {
        output::json(&list)?;
    } else {
        let rows = list.vms.iter().map(|vm| {
            let state = match &vm.migration {
                Some(id) => format!("{}, moving ({id})", state_word(vm.state)),
                None if vm.ended.is_some() => "died".into(),
                None => state_word(vm.state).into(),
            };
            vec![
                vm.name.clone(),
                vm.host.clone(),
                state,
                format!("{} MiB", vm.memory_mib),
                vm.vcpus.to_string(),
            ]
        });
        output::table(&["vm", "host", "state", "memory", "vcpus"], rows.collect())?;
        for vm in &list.vms {
            if let Some(how) = &vm.ended {
                let (name, host) = (&vm.name, &vm.host);
                output::remark(&format!(
                    "{name} on {host}: {how}; `drainpipe vm start {name}` boots it anew"
                ));
            }
        }
        for error in &list.errors {
            output::remark(error);
        }
    }
    Ok(Exit::Done)
}

fn state_word(state: VmState) -> &'static str {
    match state {
        VmState::Stopped => "stopped",
        VmState::Running => "running",
        VmState::Paused => "paused",
        VmState::Incoming => "incoming",
        VmState::Unknown => "does not answer",
    }
}

pub(crate) async fn run(connection: &ConnectionArguments, command: VmCommand) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    match command {
        VmCommand::Create { file, host } => {
            let spec = read_spec(&file)?;
            create(&fleet, &spec, host.as_deref()).await?;
            output::remark(&format!("{0} is defined; `drainpipe vm start {0}` boots it", spec.name));
        }
        VmCommand::Start { name, although_unreachable } => {
            start(&fleet, &name, &although_unreachable).await?;
            output::remark(&format!("{name} runs"));
        }
        VmCommand::Stop { name, force } => {
            stop(&fleet, &name, force).await?;
            output::remark(&format!("{name} is off"));
        }
        VmCommand::Reclaim { name, lost, yes } => return reclaim(&fleet, &name, &lost, yes).await,
        VmCommand::Rm { name } => {
            remove(&fleet, &name).await?;
            output::remark(&format!("{name} is removed; its disks are still there"));
        }
    }
    Ok(Exit::Done)
}

fn read_spec(file: &Path) -> Result<VmSpec, Problem> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Problem::bad_input(format!(
            "cannot read {}: {error}; `drainpipe vm create --help` has an example",
            file.display()
        ))
    })?;
    VmSpec::from_toml(&text, file).map_err(Problem::bad_input)
}

pub(crate) async fn create(fleet: &Fleet, spec: &VmSpec, host: Option<&str>) -> Result<(), Problem> {
    let host = match host {
        Some(name) => fleet.host(name).await?,
        None => fleet.entry(),
    };
    host.client().post(&host.path("/v1/vms"), &CreateVm { spec: spec.clone() }).await
}

pub(crate) async fn start(fleet: &Fleet, name: &str, although_unreachable: &[String]) -> Result<(), Problem> {
    let host = fleet.host(&fleet.find_vm(name).await?.host).await?;
    let although = match although_unreachable {
        [] => String::new(),
        hosts => format!("?although_unreachable={}", hosts.join(",")),
    };
    let path = host.path(&format!("/v1/vms/{name}/start{although}"));
    host.client().post_within(&path, &(), START_DEADLINE).await
}

async fn stop(fleet: &Fleet, name: &str, force: bool) -> Result<(), Problem> {
    let host = fleet.host(&fleet.find_vm(name).await?.host).await?;
    let path = host.path(&format!("/v1/vms/{name}/stop?force={force}"));
    host.client().post_within(&path, &(), STOP_DEADLINE).await
}

async fn reclaim(fleet: &Fleet, name: &str, lost: &str, is_agreed: bool) -> Result<Exit, Problem> {
    if !is_agreed {
        ask::is_possible("`vm reclaim`")?;
    }
    let host = fleet.host(&fleet.find_vm(name).await?.host).await?;
    let question = format!(
        "{name} is to be booted anew, and what it has in memory is lost. If it still ran on {lost}, it would run \
         twice on the same disks. Is {lost} powered off for good?"
    );
    if !is_agreed && !ask::confirmed(&question)? {
        output::remark("nothing is changed");
        return Ok(Exit::Cancelled);
    }
    let request = ReclaimRequest { lost: lost.into() };
    let path = host.path(&format!("/v1/vms/{name}/reclaim"));
    let result: MigrationResult = host.client().post_within(&path, &request, RECLAIM_DEADLINE).await?;
    migrate::tell(&result)?;
    Ok(Exit::Done)
}

async fn remove(fleet: &Fleet, name: &str) -> Result<(), Problem> {
    let host = fleet.host(&fleet.find_vm(name).await?.host).await?;
    host.client().delete(&host.path(&format!("/v1/vms/{name}"))).await
}
