//! `drainpipe disk`.

use drainpipe_api_types::LeftDisk;
use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;
use drainpipe_storage::measured::MovedBy;
use drainpipe_storage::method::Method;
use drainpipe_storage::{CopyRequest, CreateRequest, DiskError, DiskResult, copy, create};

use crate::arguments::DiskCommand;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::follow;
use crate::output;

pub(crate) async fn run(
    connection: &ConnectionArguments,
    command: DiskCommand,
    json: bool,
) -> Result<Exit, Problem> {
    let is_watched = !json;
    let ended = match command {
        DiskCommand::Create { path, size, preallocate, force } => {
            let request = CreateRequest {
                target: path,
                size_bytes: size,
                is_preallocated: preallocate,
                is_forced: force,
            };
            follow::disk(is_watched, move |task| create(&request, task)).await?
        }
        DiskCommand::Left { host, remove } => return left(connection, &host, remove, json).await,
        DiskCommand::Copy { source, target, force, method } => {
            let request = CopyRequest { source, target, is_forced: force, method };
            follow::disk(is_watched, move |task| copy(&request, task)).await?
        }
    };
    match ended {
        Ok(result) => tell(&result, json),
        Err(DiskError::Problem(problem)) => Err(problem),
        Err(DiskError::Cancelled) => {
            output::remark(
                "cancelled; a file that was being written is gone, a device holds part of the disk",
            );
            Ok(Exit::Cancelled)
        }
    }
}

async fn left(
    connection: &ConnectionArguments,
    name: &str,
    remove: bool,
    json: bool,
) -> Result<Exit, Problem> {
    let host = connection.fleet()?.host(name).await?;
    let disks: Vec<LeftDisk> = if remove {
        host.client().post(&host.path("/v1/disks/left/remove"), &()).await?
    } else {
        host.client().get(&host.path("/v1/disks/left")).await?
    };
    if json {
        output::json(&disks)?;
        return Ok(Exit::Done);
    }
    let line = |disk: &LeftDisk| {
        let LeftDisk { path, vm, target, left_at, kept_until, is_device, .. } = disk;
        let what = match kept_until {
            None if *target == name => {
                format!("of {vm}, which has used another disk on {target} since {left_at}")
            }
            None => format!("of {vm}, which went to {target} at {left_at}"),
            Some(until) => format!(
                "part of {vm}, whose copy from {target} was interrupted at {left_at}; the next copy continues from it \
                 until {until}"
            ),
        };
        let end = match (remove, is_device) {
            (false, false) => "",
            (false, true) => "; a block device, under its own name",
            (true, false) => ": removed",
            (true, true) => ": forgotten; the block device stays as it is",
        };
        format!("{path}  {what}{end}\n")
    };
    output::print(&disks.iter().map(line).collect::<String>())?;
    Ok(Exit::Done)
}

fn tell(result: &DiskResult, json: bool) -> Result<Exit, Problem> {
    if json {
        output::json(result)?;
    } else {
        output::print(&describe(result))?;
    }
    Ok(Exit::Done)
}

fn describe(result: &DiskResult) -> String {
    let (target, took) = (result.target.display(), format::duration(result.seconds * 1e3));
    let size = format::bytes(result.disk_bytes as f64);
    let what = match &result.source {
        Some(source) => format!("{} is copied to {target}", source.display()),
        None => format!("{target} is made"),
    };
    let data = match result.source {
        Some(_) => format!(", {} of it data", format::bytes(result.data_bytes as f64)),
        None => String::new(),
    };
    let unable = result.unable.iter().map(|one| format!("  not by {}: {}\n", one.method, one.why));
    let unable = unable.collect::<Vec<_>>().concat();
    let (method, through) = (result.method.words(), describe_traffic(result));
    format!("{what} in {took}: {size}{data}\n  by {method}\n  {through}\n{unable}")
}

fn describe_traffic(result: &DiskResult) -> String {
    let host = &result.host;
    let bytes = |bytes: u64| format::bytes(bytes as f64);
    let (read, written) = (bytes(host.host_read_bytes), bytes(host.host_written_bytes));
    let amount = match result.source {
        Some(_) => format!("{read} read and {written} written"),
        None => format!("{written} written"),
    };
    let who = match result.moved_by {
        _ if result.method == Method::Sparse => "there were no bytes to move",
        MovedBy::Storage => "the storage did it",
        MovedBy::Host => "the bytes went through this host",
    };
    format!("{who}: {amount} here ({})", host.measured_by.words())
}
