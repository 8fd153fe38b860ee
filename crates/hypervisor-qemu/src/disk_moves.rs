//! The disks of a QEMU, moved on this host while the guest runs: a mirror to a node beside the disk's own.
//!
//! ```text
//! begin        add-fd, blockdev-add (file, then format), blockdev-mirror
//! go_on        blockdev-reopen: the guest's discards count again
//! synchronise  block-job-change (write-blocking)
//! hold         block-job-complete of a job that does not finalize itself: QEMU holds the guest's requests
//! switch       job-finalize: the device has the new node
//! tidy         blockdev-del of the old nodes, remove-fd
//! ```
//!
//! A disk's first nodes are called `disk0` and `disk0-file`; after a move they are called by that, `disk0-1c0ffee1` and
//! `disk0-1c0ffee1-file`. So QEMU itself says by which move a device has what it has.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_hypervisor::spec::{Disk, DiskFormat};
use drainpipe_hypervisor::{DiskCopies, DiskMoves, MoveName, MoveState, VmError, VmErrorKind, export_name};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::warn;

use crate::command_line::disk_nodes;
use crate::disks::{
    HELD_BYTES_PER_S, Job, SYNCHRONISES_SINCE, UNLIMITED, all_jobs, execute, node_of, until, wait,
};
use crate::handed::open_disk;
use crate::qmp::QmpError;
use crate::vmm::Vmm;

/// QEMU's name for the state of a job that has done everything but its last act, for which it waits.
const PENDING: &str = "pending";

/// The first characters of a move's identifier, enough to tell it from others of one disk. A node's name has at most 31
/// characters.
const ID_CHARACTERS: usize = 8;

/// What comes before the number of a set of descriptors in a path.
const FD_SETS: &str = "/dev/fdset/";

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct FdSet {
    fdset_id: i32,
}

/// A node, as QEMU tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Node {
    #[serde(default)]
    node_name: String,
    file: String,
}

fn node_name(name: MoveName<'_>) -> String {
    let id: String = name.id.chars().take(ID_CHARACTERS).collect();
    format!("{}-{id}", export_name(name.disk))
}

fn job_name(name: MoveName<'_>) -> String {
    format!("move-{}", node_name(name))
}

fn file_name(node: &str) -> String {
    format!("{node}-file")
}

#[async_trait]
impl DiskMoves for Vmm {
    fn check(&self) -> Result<(), VmError> {
        if !self.holds_writes() {
            return Ok(());
        }
        Err(VmError::new(
            VmErrorKind::Refused,
            format!(
                "the VM runs in QEMU {}, and moving a disk on its host needs QEMU {}.{} or newer: install \
                that, and start the VM again",
                self.version(),
                SYNCHRONISES_SINCE.major,
                SYNCHRONISES_SINCE.minor
            ),
        ))
    }

    async fn begin(&self, name: MoveName<'_>, to: &Disk, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        let old = node_of(self, name.disk, until(end)).await?;
        let (opened, is_device) = open(to.path.clone()).await?;
        let set = self.qmp().execute_with("add-fd", Value::Null, opened.into(), until(end)).await;
        let FdSet { fdset_id } = set.map_err(VmError::from)?;
        let node = node_name(name);
        let names = [file_name(&node), node.clone()];
        let [file, _] = disk_nodes(&names, &format!("{FD_SETS}{fdset_id}"), to, is_device);
        execute(self, "blockdev-add", file, until(end)).await?;
        execute(self, "blockdev-add", over_file(&node, to.format, Discards::Ignored), until(end)).await?;
        let mirror = json!({
            "job-id": job_name(name), "device": old, "target": node, "sync": "full", "copy-mode": "background",
            "speed": HELD_BYTES_PER_S, "auto-finalize": false, "auto-dismiss": false,
        });
        execute(self, "blockdev-mirror", mirror, until(end)).await?;
        self.go_on(name, to, until(end)).await
    }

    async fn go_on(&self, name: MoveName<'_>, to: &Disk, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        // Until it says how much there is to do, writes of the guest are lost unless discards are ignored, as in a copy to
        // another host. From then on none is lost, and without discards a copy would take more room than the disk does.
        while copying(self, name, until(end)).await?.len == 0 {
            wait(end, "begin to copy the disk").await?;
        }
        let options = json!({ "options": [over_file(&node_name(name), to.format, Discards::PassedOn)] });
        execute(self, "blockdev-reopen", options, until(end)).await?;
        let fast = json!({ "device": job_name(name), "speed": UNLIMITED });
        Ok(execute(self, "block-job-set-speed", fast, until(end)).await?)
    }

    async fn state(&self, name: MoveName<'_>, deadline: Duration) -> Result<MoveState, VmError> {
        let end = Instant::now() + deadline;
        match job(self, name, until(end)).await? {
            Some(job) if job.status == PENDING => Ok(MoveState::Held),
            Some(job) if !job.has_ended() => {
                let Job { offset: copied_bytes, len: total_bytes, ready: is_ready, .. } = job;
                let is_synchronised = job.actively_synced;
                Ok(MoveState::Copying { copied_bytes, total_bytes, is_ready, is_synchronised })
            }
            ended => {
                if has_switched(self, name, until(end)).await? {
                    return Ok(MoveState::Switched);
                }
                let failure = ended.and_then(|job| job.failure());
                Ok(failure.map_or(MoveState::None, |error| MoveState::Failed(error.to_string())))
            }
        }
    }

    async fn synchronise(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError> {
        let change = json!({ "id": job_name(name), "type": "mirror", "copy-mode": "write-blocking" });
        Ok(execute(self, "block-job-change", change, deadline).await?)
    }

    async fn hold(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        execute(self, "block-job-complete", json!({ "device": job_name(name) }), until(end)).await?;
        while copying(self, name, until(end)).await?.status != PENDING {
            wait(end, "have both disks the same").await?;
        }
        Ok(())
    }

    async fn switch(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        execute(self, "job-finalize", json!({ "id": job_name(name) }), until(end)).await?;
        await_end(self, name, end).await?;
        if has_switched(self, name, until(end)).await? {
            return Ok(());
        }
        let failed = job(self, name, until(end)).await?.and_then(|job| job.failure());
        Err(failed.unwrap_or_else(|| VmError::failed("QEMU continues with the old disk")))
    }

    async fn abandon(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        if job(self, name, until(end)).await?.is_some_and(|job| !job.has_ended()) {
            let at_once = json!({ "device": job_name(name), "force": true });
            match execute(self, "block-job-cancel", at_once, until(end)).await {
                // It may have ended by itself since.
                Ok(()) | Err(QmpError::Command { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.tidy(name, until(end)).await
    }

    async fn tidy(&self, name: MoveName<'_>, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        await_end(self, name, end).await?;
        if job(self, name, until(end)).await?.is_some() {
            execute(self, "job-dismiss", json!({ "id": job_name(name) }), until(end)).await?;
        }
        let used = node_of(self, name.disk, until(end)).await?;
        let names: Vec<String> =
            nodes(self, until(end)).await?.into_iter().map(|node| node.node_name).collect();
        for node in unused(&names, name.disk, &used) {
            match execute(self, "blockdev-del", json!({ "node-name": node }), until(end)).await {
                // It costs an open file, and that is no reason to lose a VM.
                Err(error @ QmpError::Command { .. }) => {
                    warn!(node, %error, "QEMU keeps what it no longer needs");
                }
                deleted => deleted?,
            }
        }
        close_unused(self, end).await
    }

    fn note(&self, disk: usize, path: &Path) -> Result<(), VmError> {
        let places = [(disk, path.to_owned())].into();
        let noted = self.respecify(self.spec().with_disks_at(&places));
        noted.map_err(|error| VmError::failed(format!("cannot write the VM's specification: {error}")))
    }
}

/// What becomes of a discard in a node.
#[derive(Debug, Clone, Copy)]
enum Discards {
    Ignored,
    PassedOn,
}

/// The node of a disk, over that of its file.
fn over_file(node: &str, format: DiskFormat, discards: Discards) -> Value {
    let names = [file_name(node), node.to_owned()];
    let disk = Disk { path: PathBuf::new(), format, read_only: false };
    let [_, mut over] = disk_nodes(&names, "", &disk, false);
    if matches!(discards, Discards::Ignored) {
        over["discard"] = json!("ignore");
    }
    over
}

/// Storage that hangs must hold up nobody else.
async fn open(path: PathBuf) -> Result<(File, bool), VmError> {
    let shown = path.display().to_string();
    let open = move || -> io::Result<(File, bool)> {
        let opened = open_disk(&path, false)?;
        let is_device = opened.metadata()?.file_type().is_block_device();
        Ok((opened, is_device))
    };
    let opened = tokio::task::spawn_blocking(open).await.map_err(VmError::failed)?;
    opened.map_err(|error| VmError::failed(format!("cannot open {shown}: {error}")))
}

async fn job(vmm: &Vmm, name: MoveName<'_>, deadline: Duration) -> Result<Option<Job>, VmError> {
    let jobs = all_jobs(vmm, deadline).await?;
    Ok(jobs.into_iter().find(|job| job.device == job_name(name)))
}

/// The job, which must be under way.
async fn copying(vmm: &Vmm, name: MoveName<'_>, deadline: Duration) -> Result<Job, VmError> {
    let job = job(vmm, name, deadline).await?;
    let job = job.ok_or_else(|| VmError::failed("QEMU no longer copies the disk"))?;
    job.failure().map_or(Ok(job), Err)
}

async fn await_end(vmm: &Vmm, name: MoveName<'_>, end: Instant) -> Result<(), VmError> {
    while job(vmm, name, until(end)).await?.is_some_and(|job| !job.has_ended()) {
        wait(end, "end the copy of the disk").await?;
    }
    Ok(())
}

async fn has_switched(vmm: &Vmm, name: MoveName<'_>, deadline: Duration) -> Result<bool, VmError> {
    Ok(node_of(vmm, name.disk, deadline).await? == node_name(name))
}

async fn nodes(vmm: &Vmm, deadline: Duration) -> Result<Vec<Node>, QmpError> {
    vmm.qmp().execute("query-named-block-nodes", json!({ "flat": true }), deadline).await
}

/// A disk's nodes beside that which its device has, each before what it stands on.
fn unused<'a>(names: &'a [String], disk: usize, used: &str) -> Vec<&'a str> {
    let (first, file) = (export_name(disk), file_name(used));
    let is_of_disk = |name: &&str| {
        let rest = name.strip_prefix(&first);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-')) && *name != used && *name != file
    };
    let mut unused: Vec<&str> = names.iter().map(String::as_str).filter(is_of_disk).collect();
    unused.sort_by_key(|name| name.ends_with("-file"));
    unused
}

/// Closes what no node has open any more: QEMU does not do so by itself.
async fn close_unused(vmm: &Vmm, end: Instant) -> Result<(), VmError> {
    let nodes = nodes(vmm, until(end)).await?;
    let used: BTreeSet<i32> = nodes.iter().filter_map(|node| fd_set(&node.file)).collect();
    let sets: Vec<FdSet> = vmm.qmp().execute("query-fdsets", Value::Null, until(end)).await?;
    for FdSet { fdset_id } in sets.iter().filter(|set| !used.contains(&set.fdset_id)) {
        match execute(vmm, "remove-fd", json!({ "fdset-id": fdset_id }), until(end)).await {
            // It is gone with its last descriptor.
            Ok(()) | Err(QmpError::Command { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn fd_set(path: &str) -> Option<i32> {
    path.strip_prefix(FD_SETS)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_does_not_have_is_let_go_of_from_the_top() {
        let names =
            ["disk1", "disk1-file", "disk1-0a-file", "disk1-0a", "disk10", "disk10-file", "copy1", ""];
        let names: Vec<String> = names.map(String::from).into();
        assert_eq!(unused(&names, 1, "disk1-0a"), ["disk1", "disk1-file"]);
        assert_eq!(unused(&names, 1, "disk1"), ["disk1-0a", "disk1-0a-file"]);
    }

    #[test]
    fn names_are_short_enough_for_nodes() {
        let name = MoveName { disk: 7, id: "0195f2d0-aaaa-bbbb-cccc-dddddddddddd" };
        assert_eq!(file_name(&node_name(name)), "disk7-0195f2d0-file");
        assert!(file_name(&node_name(MoveName { disk: 25, ..name })).len() <= 31);
    }

    #[test]
    fn only_the_set_of_a_path_is_one() {
        assert_eq!(fd_set("/dev/fdset/12"), Some(12));
        assert_eq!(fd_set("/dev/fdset/x"), None);
        assert_eq!(fd_set("/disks/12"), None);
    }
}
