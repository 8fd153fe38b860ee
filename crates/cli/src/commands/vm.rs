//! `drainpipe vms` and `drainpipe vm …`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use drainpipe_api_types::{CreateVm, MigrationView, MoveDiskRequest, ReclaimRequest, VmState, VmView};
use drainpipe_engine::format::mib;
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Manager;
use drainpipe_hypervisor::spec::{DiskFormat, GroupName, Placement, VmSpec};
use serde::Serialize;

use super::history;
use super::{migrate, move_disk};
use crate::arguments::{MoveDiskArguments, VmCommand};
use crate::connection::{ConnectionArguments, Fleet};
use crate::exit::Exit;
use crate::migrations::{self, FoundMigrations};
use crate::{ask, output};

/// The agent waits a minute for a guest to power off.
const STOP_DEADLINE: Duration = Duration::from_secs(85);

/// The agent asks the target once more and undoes the migration, for a minute at most.
const RECLAIM_DEADLINE: Duration = Duration::from_secs(65);

/// Migrations that `vm show` shows, and among how many of each host it looks for them.
const MIGRATIONS_SHOWN: usize = 10;
const MIGRATIONS_LOOKED_AT: u32 = 200;

/// QEMU's start, with room.
const START_DEADLINE: Duration = Duration::from_secs(30);

pub(crate) async fn list(connection: &ConnectionArguments, json: bool) -> Result<Exit, Problem> {
    let list = connection.fleet()?.vms().await?;
    if json {
        output::json(&list)?;
    } else {
        tabulate(&list.vms)?;
        for remark in list.vms.iter().flat_map(|vm| how_it_ended(vm).into_iter().chain(why_it_stays(vm))) {
            output::remark(&remark);
        }
        for error in &list.errors {
            output::remark(error);
        }
        if !list.hosts_not_asked.is_empty() {
            output::remark(&format!(
                "not asked, so their VMs are missing: {}",
                list.hosts_not_asked.join(", ")
            ));
        }
    }
    Ok(Exit::of_list(list.errors.len()))
}

/// The owners are a column of their own where they are not all Drainpipe.
fn tabulate(vms: &[VmView]) -> Result<(), Problem> {
    let owner = |vm: &VmView| Manager::owner_name(vm.manager);
    let tells_owners = vms.iter().any(|vm| owner(vm) != Manager::owner_name(None));
    let rows = vms.iter().map(|vm| {
        let memory = mib(vm.memory_mib);
        let row = [vm.name.clone(), vm.host.clone(), describe_state(vm), memory, vm.vcpus.to_string()];
        row.into_iter().chain(tells_owners.then(|| owner(vm))).collect()
    });
    let titles = ["vm", "host", "state", "memory", "vcpus", "of"];
    let columns = if tells_owners { titles.len() } else { titles.len() - 1 };
    output::table(&titles[..columns], rows.collect())
}

/// Why a VM cannot be moved, wherever to.
fn why_it_stays(vm: &VmView) -> Option<String> {
    Some(format!("{} on {} cannot move: {}", vm.name, vm.host, vm.unmovable.as_ref()?))
}

/// One VM, for scripts.
#[derive(Serialize)]
struct ShownVm {
    #[serde(flatten)]
    vm: VmView,
    /// As its owner wrote it.
    spec: VmSpec,
    /// Those that it made, the newest first.
    migrations: Vec<MigrationView>,
    /// Hosts that could not be asked for more of them.
    hosts_not_asked: Vec<String>,
}

async fn show(fleet: &Fleet, name: &str, json: bool) -> Result<Exit, Problem> {
    let vm = fleet.find_vm(name).await?;
    let host = fleet.host(&vm.host).await?;
    let spec: VmSpec = host.client().get(&host.path(&format!("/v1/vms/{name}/definition"))).await?;
    let FoundMigrations { mut migrations, silent } =
        migrations::of_all_hosts(fleet, MIGRATIONS_LOOKED_AT).await?;
    migrations.retain(|view| view.vm == name);
    migrations.truncate(MIGRATIONS_SHOWN);
    let hosts_not_asked = silent.iter().map(|(host, _)| host.clone()).collect();
    let shown = ShownVm { vm, spec, migrations, hosts_not_asked };
    if json {
        output::json(&shown)?;
    } else {
        output::print(&describe(&shown)?)?;
        if !shown.migrations.is_empty() {
            output::print("\n")?;
            history::table(&shown.migrations)?;
        }
        for (host, error) in &silent {
            output::remark(&format!("{host}: {error}"));
        }
    }
    Ok(Exit::of_list(silent.len()))
}

fn describe(shown: &ShownVm) -> Result<String, Problem> {
    let ShownVm { vm, spec, .. } = shown;
    let mut lines = vec![format!("{} on {}: {}", vm.name, vm.host, describe_state(vm))];
    lines.extend(how_it_ended(vm));
    lines.extend(why_it_stays(vm));
    lines.extend(spec.disks.iter().map(|disk| {
        let read_only = if disk.read_only { ", read-only" } else { "" };
        let format = if disk.format == DiskFormat::Raw { "raw" } else { "qcow2" };
        let path = disk.path.display();
        format!("disk {path} ({format}{read_only}), on {} and each host it goes to", vm.host)
    }));
    lines.extend(describe_placement(&spec.placement));
    let spec = toml::to_string(spec)
        .map_err(|error| Problem::failed(format!("cannot write its specification as TOML: {error}")))?;
    Ok(format!("{}\n\n{spec}", lines.join("\n")))
}

fn describe_placement(placement: &Placement) -> impl Iterator<Item = String> {
    let Placement { stays, apart, together } = placement;
    let of = |how: &str, groups: &BTreeSet<GroupName>| {
        let names: Vec<String> = groups.iter().map(ToString::to_string).collect();
        (!names.is_empty()).then(|| format!("a drain keeps it {how} VMs of: {}", names.join(", ")))
    };
    let stays = stays.as_ref().map(|why| format!("a drain leaves it where it is: {why}"));
    [stays, of("apart from", apart), of("together with", together)].into_iter().flatten()
}

fn describe_state(vm: &VmView) -> String {
    match &vm.migration {
        Some(id) => format!("{}, moving ({id})", state_word(vm.state)),
        None if vm.ended.is_some() => "died".into(),
        None => state_word(vm.state).into(),
    }
}

/// Why a VM has died, and what to do.
fn how_it_ended(vm: &VmView) -> Option<String> {
    let (name, host, how) = (&vm.name, &vm.host, vm.ended.as_ref()?);
    Some(format!("{name} on {host}: {how}; `drainpipe vm start {name}` boots it again"))
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

pub(crate) async fn run(
    connection: &ConnectionArguments,
    command: VmCommand,
    json: bool,
) -> Result<Exit, Problem> {
    let fleet = connection.fleet()?;
    match command {
        VmCommand::Create { file, host } => {
            let spec = read_spec(&file)?;
            create(&fleet, &spec, host.as_deref()).await?;
            output::remark(&format!("{0} is defined; `drainpipe vm start {0}` boots it", spec.name));
        }
        VmCommand::Show { name } => return show(&fleet, &name, json).await,
        VmCommand::Start { name, although_unreachable } => {
            start(&fleet, &name, &although_unreachable).await?;
            output::remark(&format!("{name} runs"));
        }
        VmCommand::Stop { name, force } => {
            stop(&fleet, &name, force).await?;
            output::remark(&format!("{name} is off"));
        }
        VmCommand::MoveDisk(MoveDiskArguments { name, disk, path, .. }) => {
            return match disk.zip(path) {
                Some((disk, to)) => move_disk::run(&fleet, &name, &MoveDiskRequest { disk, to }, json).await,
                None => move_disk::cancel(&fleet, &name, json).await,
            };
        }
        VmCommand::Reclaim { name, lost, yes } => return reclaim(&fleet, &name, &lost, yes).await,
        VmCommand::Rm { name } => {
            let has_disks = remove(&fleet, &name).await?;
            let disks = if has_disks { "; its disks are still there" } else { "" };
            output::remark(&format!("{name} is removed{disks}"));
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
    let host = fleet.host(&fleet.find_stopped_vm(name).await?.host).await?;
    let although = match although_unreachable {
        [] => String::new(),
        hosts => format!("?although_unreachable={}", hosts.join(",")),
    };
    let path = host.path(&format!("/v1/vms/{name}/start{although}"));
    host.client().post_within(&path, &(), START_DEADLINE).await
}

async fn stop(fleet: &Fleet, name: &str, force: bool) -> Result<(), Problem> {
    let host = fleet.host(&fleet.find_running_vm(name).await?.host).await?;
    let path = host.path(&format!("/v1/vms/{name}/stop?force={force}"));
    host.client().post_within(&path, &(), STOP_DEADLINE).await
}

async fn reclaim(fleet: &Fleet, name: &str, lost: &str, is_agreed: bool) -> Result<Exit, Problem> {
    if !is_agreed {
        ask::is_possible("`vm reclaim`")?;
    }
    let host = fleet.host(&fleet.find_vm(name).await?.host).await?;
    let question = format!(
        "{name} will be booted again, and what it has in memory is lost. If it still ran on {lost}, it would run \
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

/// Says whether it had disks.
async fn remove(fleet: &Fleet, name: &str) -> Result<bool, Problem> {
    let host = fleet.host(&fleet.find_stopped_vm(name).await?.host).await?;
    let spec: VmSpec = host.client().get(&host.path(&format!("/v1/vms/{name}/definition"))).await?;
    host.client().delete::<()>(&host.path(&format!("/v1/vms/{name}"))).await?;
    Ok(!spec.disks.is_empty())
}
