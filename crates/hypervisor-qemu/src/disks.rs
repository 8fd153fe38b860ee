//! The disks of a QEMU, copied to another QEMU while the guest runs: a mirror here, an NBD server there.
//!
//! ```text
//!   source                                   target
//!                                            open: nbd-server-start, block-export-add
//!   start: blockdev-add (nbd), blockdev-mirror ──►
//!   synchronise: block-job-change (write-blocking; ready or not), until all are actively synced
//!   (pre-switchover: guest stopped)
//!   end: block-job-cancel of a mirror that is ready, which ends it whole
//!                                            close: nbd-server-stop
//! ```
//!
//! Before 8.2 no write waits for the target. Instead of `synchronise`, the device's writes are limited by `block_set_io_throttle`:
//! above the node that the mirror reads, so that neither the mirror nor what the guest reads is any slower (measured, 7.2).
//!
//! From 8.0 to 10.2.1 QEMU's mirror loses writes of the guest while it starts, unless the node that it writes to is told to
//! ignore discards: measured, 0 of 1,000 starts lost any then, and 190 of 1,000 without (docs/decisions/0082).
//!
//! A copy is never cut by `yank`: that may be the end of the VM (docs/decisions/0090).

use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::storage::{DiskCopy, DiskImage, WriteLimit};
use drainpipe_hypervisor::{
    Address, CopyState, CopyTo, DiskCopies, DiskExports, OpenDisk, Version, VmError, VmErrorKind, export_name,
};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::command_line::device_name;
use crate::qmp::QmpError;
use crate::vmm::Vmm;

/// How the jobs, and the nodes that they write to, are called.
const COPY: &str = "copy";

/// The first that takes `block-job-change`.
pub(crate) const SYNCHRONISES_SINCE: Version = Version { major: 8, minor: 2, micro: 0 };

/// The group of all devices whose writes are held back: their limit is one for all of them. QEMU itself remembers by it who has
/// set the limit.
const HELD_GROUP: &str = "copies";

/// As much as QEMU takes for a limit. With none at all it would wait for all that copies have in flight.
const NO_LIMIT_BYTES_PER_S: u64 = 1_000_000_000_000_000;

/// Between two looks at jobs.
const POLL_EVERY: Duration = Duration::from_millis(5);

/// So slow is each copy until all have begun: as the next one begins, QEMU waits for what the others have in flight, and the
/// guest with it. Over 40 Mb/s that took 11 s.
pub(crate) const HELD_BYTES_PER_S: u64 = 64 << 10;

/// QEMU's speed of a job that nothing holds back: limits are kept on the way to the target.
pub(crate) const UNLIMITED: u64 = 0;

/// Connections to a target's disks.
const CONNECTIONS_MAX: u32 = 256;

/// What QEMU calls a job that has ended and is not forgotten yet.
const CONCLUDED: &str = "concluded";

/// A job, as QEMU tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Job {
    pub(crate) device: String,
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) ready: bool,
    pub(crate) status: String,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    pub(crate) actively_synced: bool,
}

impl Job {
    /// Which disk it copies; none if it is not one of ours.
    fn disk(&self) -> Option<usize> {
        self.device.strip_prefix(COPY)?.parse().ok()
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.status == CONCLUDED
    }

    /// Why it does not go on.
    pub(crate) fn failure(&self) -> Option<VmError> {
        let error = self.error.as_ref().filter(|_| self.has_ended())?;
        Some(VmError::failed(format!("the copy of {} has failed: QEMU says `{error}`", self.device)))
    }
}

/// A device with a disk, as QEMU tells it.
#[derive(Debug, Deserialize)]
struct Device {
    #[serde(default)]
    qdev: String,
    inserted: Option<Inserted>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Inserted {
    node_name: String,
    /// The throttle group of a device whose requests are limited.
    #[serde(default)]
    group: Option<String>,
}

impl Device {
    /// By the name that the command line gives it.
    fn is_of(&self, disk: usize) -> bool {
        self.qdev.split('/').any(|part| part == device_name(disk))
    }

    fn group(&self) -> Option<&str> {
        self.inserted.as_ref()?.group.as_deref()
    }

    fn is_held(&self) -> bool {
        self.group() == Some(HELD_GROUP)
    }
}

/// A node, as QEMU tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Node {
    #[serde(default)]
    node_name: String,
    image: Image,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Image {
    format: String,
    virtual_size: u64,
    #[serde(default)]
    actual_size: u64,
    #[serde(default)]
    cluster_size: Option<u64>,
    #[serde(default)]
    backing_filename: Option<String>,
    #[serde(default)]
    format_specific: Option<Specific>,
}

#[derive(Debug, Deserialize)]
struct Specific {
    #[serde(default)]
    data: Value,
}

impl TryFrom<Image> for OpenDisk {
    type Error = VmError;

    fn try_from(image: Image) -> Result<Self, VmError> {
        let kind = match (image.format.as_str(), image.cluster_size) {
            ("raw", _) => DiskImage::Raw,
            ("qcow2", Some(cluster_bytes)) => DiskImage::Qcow2 { cluster_bytes },
            (other, _) => {
                return Err(VmError::failed(format!("QEMU reports too little about a {other} image")));
            }
        };
        let has_data_file =
            image.format_specific.is_some_and(|specific| specific.data.get("data-file").is_some());
        Ok(Self {
            image: kind,
            size_bytes: image.virtual_size,
            allocated_bytes: image.actual_size,
            has_backing: image.backing_filename.is_some(),
            has_data_file,
            obstacle: None,
        })
    }
}

#[async_trait]
impl DiskCopies for Vmm {
    async fn disks(&self, deadline: Duration) -> Result<Vec<OpenDisk>, VmError> {
        let end = Instant::now() + deadline;
        let mut nodes = nodes(self, until(end)).await?;
        let mut disks = vec![];
        for disk in 0..self.spec().spec().disks.len() {
            let name = node_of(self, disk, until(end)).await?;
            let found = nodes.iter().position(|node| node.node_name == name);
            let missing = || VmError::failed(format!("QEMU has no node {name}"));
            disks.push(OpenDisk::try_from(nodes.swap_remove(found.ok_or_else(missing)?).image)?);
        }
        Ok(disks)
    }

    fn check(&self, _copies: &[DiskCopy]) -> Result<(), VmError> {
        Ok(())
    }

    async fn start(&self, copies: &[CopyTo], deadline: Duration) -> Result<(), VmError> {
        // All of them first: while QEMU connects, it does nothing else.
        for CopyTo { disk, address, name } in copies {
            let node = json!({
                "driver": "nbd", "node-name": copy_name(*disk), "server": server(address), "export": name,
                // What keeps the guest's first writes: see above.
                "discard": "ignore",
            });
            execute(self, "blockdev-add", node, deadline).await?;
        }
        for CopyTo { disk, .. } in copies {
            let copy = copy_name(*disk);
            let own = node_of(self, *disk, deadline).await?;
            let mirror = json!({
                "job-id": copy, "device": own, "target": copy, "sync": "full",
                "copy-mode": "background", "speed": HELD_BYTES_PER_S, "auto-dismiss": false,
            });
            execute(self, "blockdev-mirror", mirror, deadline).await?;
        }
        for job in jobs(self, deadline).await? {
            let fast = json!({ "device": job.device, "speed": UNLIMITED });
            execute(self, "block-job-set-speed", fast, deadline).await?;
        }
        Ok(())
    }

    async fn states(&self, deadline: Duration) -> Result<Vec<CopyState>, VmError> {
        let jobs = jobs(self, deadline).await?;
        if let Some(failure) = jobs.iter().find_map(Job::failure) {
            return Err(failure);
        }
        let state = |job: &Job| {
            Some(CopyState {
                disk: job.disk()?,
                copied_bytes: job.offset,
                total_bytes: job.len,
                is_ready: job.ready,
                is_synchronised: job.actively_synced,
            })
        };
        Ok(jobs.iter().filter_map(state).collect())
    }

    async fn synchronise(&self, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        for job in jobs(self, until(end)).await? {
            job.failure().map_or(Ok(()), Err)?;
            let change = json!({ "id": job.device, "type": "mirror", "copy-mode": "write-blocking" });
            execute(self, "block-job-change", change, until(end)).await?;
        }
        Ok(())
    }

    fn holds_writes(&self) -> bool {
        self.version() < SYNCHRONISES_SINCE
    }

    async fn hold_writes(
        &self,
        disks: &[usize],
        limit: WriteLimit,
        deadline: Duration,
    ) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        let devices = devices(self, until(end)).await?;
        for disk in disks {
            let device = devices.iter().find(|device| device.is_of(*disk)).ok_or_else(|| no_device(*disk))?;
            if device.group().is_some_and(|group| group != HELD_GROUP) {
                return Err(VmError::new(
                    VmErrorKind::Refused,
                    format!(
                        "{} has limits that somebody has set by QMP, which Drainpipe does not change, so it \
                        cannot hold its writes back: remove them with `block_set_io_throttle`",
                        export_name(*disk)
                    ),
                ));
            }
            set_write_limit(self, device, limit.bytes_per_s, limit.writes_per_s, until(end)).await?;
        }
        Ok(())
    }

    async fn let_writes_go(&self, deadline: Duration) -> Result<(), VmError> {
        limit_held_writes(self, NO_LIMIT_BYTES_PER_S, deadline).await
    }

    async fn end(&self, disks: &[usize], deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        let under_way = jobs(self, until(end)).await?;
        for disk in disks {
            let job = under_way.iter().find(|job| job.disk() == Some(*disk) && job.ready);
            let job = job.ok_or_else(|| VmError::failed(format!("{} is not copied", export_name(*disk))))?;
            job.failure().map_or(Ok(()), Err)?;
            let whole = json!({ "device": job.device, "force": false });
            execute(self, "block-job-cancel", whole, until(end)).await?;
        }
        await_end(self, end).await?;
        if let Some(failure) = jobs(self, until(end)).await?.iter().find_map(Job::failure) {
            return Err(failure);
        }
        forget(self, end).await
    }

    async fn abandon(&self, deadline: Duration) -> Result<(), VmError> {
        let end = Instant::now() + deadline;
        let are_let_go = self.let_writes_go(until(end)).await;
        for job in jobs(self, until(end)).await?.iter().filter(|job| !job.has_ended()) {
            let at_once = json!({ "device": job.device, "force": true });
            match execute(self, "block-job-cancel", at_once, until(end)).await {
                // It may have ended by itself since.
                Ok(()) | Err(QmpError::Command { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        await_end(self, end).await?;
        forget(self, end).await?;
        are_let_go?;
        // Nothing is in flight any more that QEMU would wait for.
        limit_held_writes(self, 0, until(end)).await
    }
}

#[async_trait]
impl DiskExports for Vmm {
    async fn open(&self, disks: &[usize], deadline: Duration) -> Result<Vec<String>, VmError> {
        let path = self.paths().incoming_disks().of_hypervisor;
        let address = json!({ "type": "unix", "data": { "path": path } });
        let start = json!({ "addr": address, "max-connections": CONNECTIONS_MAX });
        execute(self, "nbd-server-start", start, deadline).await?;
        for disk in disks {
            let name = export_name(*disk);
            let export = json!({
                "type": "nbd", "id": name, "node-name": name, "name": name, "writable": true,
            });
            execute(self, "block-export-add", export, deadline).await?;
        }
        Ok(disks.iter().copied().map(export_name).collect())
    }

    async fn close(&self, deadline: Duration) -> Result<(), VmError> {
        match execute(self, "nbd-server-stop", Value::Null, deadline).await {
            Err(QmpError::Command { desc, .. }) if desc.contains("not running") => Ok(()),
            stopped => Ok(stopped?),
        }
    }
}

fn copy_name(disk: usize) -> String {
    format!("{COPY}{disk}")
}

fn server(address: &Address) -> Value {
    match address {
        Address::Tcp(address) => {
            json!({ "type": "inet", "host": address.ip().to_string(), "port": address.port().to_string() })
        }
        Address::Unix(path) => json!({ "type": "unix", "path": path }),
    }
}

/// Waits until none of our jobs goes on.
async fn await_end(vmm: &Vmm, end: Instant) -> Result<(), VmError> {
    while !jobs(vmm, until(end)).await?.iter().all(Job::has_ended) {
        wait(end, "end the copies of its disks").await?;
    }
    Ok(())
}

pub(crate) async fn wait(end: Instant, what: &str) -> Result<(), VmError> {
    if Instant::now() >= end {
        return Err(VmError::new(VmErrorKind::Failed, format!("QEMU did not {what} in time")));
    }
    sleep(POLL_EVERY).await;
    Ok(())
}

/// Has QEMU forget the jobs that have ended, and what they wrote to.
async fn forget(vmm: &Vmm, end: Instant) -> Result<(), VmError> {
    for job in jobs(vmm, until(end)).await? {
        execute(vmm, "job-dismiss", json!({ "id": job.device }), until(end)).await?;
    }
    let is_copy =
        |node: &Node| node.node_name.strip_prefix(COPY).is_some_and(|number| number.parse::<usize>().is_ok());
    for node in nodes(vmm, until(end)).await?.iter().filter(|node| is_copy(node)) {
        execute(vmm, "blockdev-del", json!({ "node-name": node.node_name }), until(end)).await?;
    }
    Ok(())
}

/// What is left of one deadline for all commands together.
pub(crate) fn until(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

/// Those that copy disks.
async fn jobs(vmm: &Vmm, deadline: Duration) -> Result<Vec<Job>, QmpError> {
    let jobs = all_jobs(vmm, deadline).await?;
    Ok(jobs.into_iter().filter(|job| job.disk().is_some()).collect())
}

/// All of them.
pub(crate) async fn all_jobs(vmm: &Vmm, deadline: Duration) -> Result<Vec<Job>, QmpError> {
    vmm.qmp().execute("query-block-jobs", Value::Null, deadline).await
}

/// Sets the limit of the devices whose writes are held back; 0 for none.
async fn limit_held_writes(vmm: &Vmm, bytes_per_s: u64, deadline: Duration) -> Result<(), VmError> {
    let end = Instant::now() + deadline;
    for device in devices(vmm, until(end)).await?.iter().filter(|device| device.is_held()) {
        set_write_limit(vmm, device, bytes_per_s, 0, until(end)).await?;
    }
    Ok(())
}

/// 0 for no limit.
async fn set_write_limit(
    vmm: &Vmm,
    device: &Device,
    bytes_per_s: u64,
    writes_per_s: u64,
    deadline: Duration,
) -> Result<(), QmpError> {
    let limit = json!({
        "id": device.qdev, "group": HELD_GROUP, "bps_wr": bytes_per_s, "iops_wr": writes_per_s,
        "bps": 0, "bps_rd": 0, "iops": 0, "iops_rd": 0,
    });
    execute(vmm, "block_set_io_throttle", limit, deadline).await
}

async fn devices(vmm: &Vmm, deadline: Duration) -> Result<Vec<Device>, QmpError> {
    vmm.qmp().execute("query-block", Value::Null, deadline).await
}

fn no_device(disk: usize) -> VmError {
    VmError::failed(format!("QEMU has no device for {}", export_name(disk)))
}

/// The node that a disk's device has: that of its name, unless the disk has moved since.
pub(crate) async fn node_of(vmm: &Vmm, disk: usize, deadline: Duration) -> Result<String, VmError> {
    let used = devices(vmm, deadline).await?.into_iter().find(|device| device.is_of(disk));
    let inserted = used.and_then(|device| device.inserted).ok_or_else(|| no_device(disk))?;
    Ok(inserted.node_name)
}

async fn nodes(vmm: &Vmm, deadline: Duration) -> Result<Vec<Node>, QmpError> {
    vmm.qmp().execute("query-named-block-nodes", json!({ "flat": true }), deadline).await
}

pub(crate) async fn execute(
    vmm: &Vmm,
    command: &str,
    arguments: Value,
    deadline: Duration,
) -> Result<(), QmpError> {
    vmm.qmp().execute::<IgnoredAny>(command, arguments, deadline).await.map(drop)
}
