//! The files that VMs name: whether VMs may use them on this host, and what is there.
//!
//! ```text
//! opening   from a path to a descriptor, through nothing but what is allowed
//! images    the files that an image has QEMU open
//! identity  what tells one disk from another
//! ```
//!
//! The storage may be gone, and then a look at it does not return. So each look is a thread's own
//! affair, with a deadline, and there is one at a time of each path that hangs.

mod identity;
mod images;
mod opening;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::check::vm::FileIdentity;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::vm_resources::{NotAllowed, VmResources};
use drainpipe_hypervisor::spec::{DiskFormat, VmSpec};
use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use self::opening::Unusable;
use crate::config::Config;
use crate::lock::lock;

/// How long storage may take to say what is at a path; a migration waits for it.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);

/// Looks at once, those included that never return. Each is a thread; tokio has 512.
const LOOKS_MAX: usize = 128;

/// What is at a path that a VM names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Look {
    /// Something that VMs may use.
    Present(FileIdentity),
    /// Nothing, or nothing that can be looked at.
    Missing,
    /// The storage has not answered in time.
    Silent,
    /// VMs may not use it.
    NotAllowed(NotAllowed),
}

/// What VMs may use, and never: the agent's own files.
#[derive(Debug)]
struct Rules {
    resources: VmResources,
    // Closing some of these would also take away the locks that SQLite has on its journal.
    own: Vec<PathBuf>,
}

/// Looks at files that VMs name.
#[derive(Debug)]
pub(crate) struct VmFiles {
    host: String,
    rules: Arc<Rules>,
    looks: Arc<Semaphore>,
    since: Arc<Mutex<HashMap<PathBuf, Instant>>>,
}

impl VmFiles {
    /// Those of the host that is configured so.
    pub(crate) fn new(config: &Config) -> Self {
        let own = [&config.state_directory, &config.runtime_directory, &config.tls.key];
        let own = own.into_iter().cloned().collect();
        let rules = Arc::new(Rules { resources: config.vms.clone(), own });
        let looks = Arc::new(Semaphore::new(LOOKS_MAX));
        Self { host: config.name.clone(), rules, looks, since: Arc::default() }
    }

    /// What is at a path. Of a disk that is an image, also whether VMs may use what that names.
    pub(crate) async fn look(&self, path: &Path, format: Option<DiskFormat>) -> Look {
        // No thread for what is decided without a look.
        if let Err(why) = self.rules.resources.place(path) {
            return Look::NotAllowed(why);
        }
        let hangs = lock(&self.since).get(path).is_some_and(|since| since.elapsed() > LOOK_DEADLINE);
        if hangs {
            return Look::Silent;
        }
        timeout(LOOK_DEADLINE, self.look_unbounded(path, format)).await.unwrap_or(Look::Silent)
    }

    async fn look_unbounded(&self, path: &Path, format: Option<DiskFormat>) -> Look {
        let permit = Arc::clone(&self.looks).acquire_owned().await;
        let (path, rules, since) = (path.to_owned(), Arc::clone(&self.rules), Arc::clone(&self.since));
        let look = spawn_blocking(move || {
            lock(&since).insert(path.clone(), Instant::now());
            let found = examine(&rules, &path, format);
            lock(&since).remove(&path);
            drop(permit);
            found
        });
        look.await.unwrap_or(Look::Missing)
    }

    /// Refuses a VM that names what VMs may not use here. Its files may be missing.
    pub(crate) async fn check_allowed(&self, spec: &VmSpec) -> Result<(), Problem> {
        self.check_bridges(spec)?;
        self.looked_at(spec).await.map(drop)
    }

    /// Refuses a VM that names what VMs may not use here, or that is not here.
    pub(crate) async fn check_usable(&self, spec: &VmSpec) -> Result<(), Problem> {
        self.check_bridges(spec)?;
        match self.looked_at(spec).await?.into_iter().find(|(_, look)| matches!(look, Look::Missing)) {
            None => Ok(()),
            Some((path, _)) => Err(Problem::refused(format!(
                "VM {} cannot run on {host}: there is no {path}, or the agent cannot look there. All hosts must have it \
                 under the same path",
                spec.name,
                path = path.display(),
                host = self.host
            ))),
        }
    }

    fn check_bridges(&self, spec: &VmSpec) -> Result<(), Problem> {
        match self.bridges_not_allowed(spec).first() {
            None => Ok(()),
            Some(bridge) => Err(Problem::refused(format!(
                "VM {} may not join the bridge {bridge} on {host}: add it to `bridges` of [vms] in agent.toml of {host} and \
                 restart the agent there, if VMs may join it",
                spec.name,
                host = self.host
            ))),
        }
    }

    /// Those that NICs of a VM join, and may not.
    pub(crate) fn bridges_not_allowed(&self, spec: &VmSpec) -> Vec<String> {
        let bridges = spec.nics.iter().map(|nic| &nic.bridge);
        bridges.filter(|bridge| !self.rules.resources.allows_bridge(bridge)).cloned().collect()
    }

    async fn looked_at<'a>(&self, spec: &'a VmSpec) -> Result<Vec<(&'a Path, Look)>, Problem> {
        let (name, host) = (&spec.name, &self.host);
        let looks = files(spec).map(async |(path, format)| (path, self.look(path, format).await));
        let looks = join_all(looks).await;
        for (path, look) in &looks {
            let path = path.display();
            match look {
                Look::Present(_) | Look::Missing => {}
                Look::NotAllowed(why) => {
                    let (what, cure) = (why.what(host), why.cure(host));
                    return Err(Problem::refused(format!("{path} of VM {name} {what}: {cure}")));
                }
                Look::Silent => {
                    return Err(Problem::refused(format!(
                        "the storage with {path} of VM {name} does not answer on {host}: look at its server and network"
                    )));
                }
            }
        }
        Ok(looks)
    }
}

/// Those that QEMU opens for a VM, and of which format a disk is.
fn files(spec: &VmSpec) -> impl Iterator<Item = (&Path, Option<DiskFormat>)> {
    let boot = spec.kernel.iter().chain(&spec.initramfs).map(|path| (path.as_path(), None));
    boot.chain(spec.disks.iter().map(|disk| (disk.path.as_path(), Some(disk.format))))
}

fn examine(rules: &Rules, path: &Path, format: Option<DiskFormat>) -> Look {
    let found = opening::find(rules, path).and_then(|file| {
        if format == Some(DiskFormat::Qcow2) {
            images::check(rules, path, &file)?;
        }
        Ok(file)
    });
    match found {
        Ok(file) => Look::Present(identity::identify(&file)),
        Err(Unusable::Missing) => Look::Missing,
        Err(Unusable::NotAllowed(why)) => Look::NotAllowed(why),
    }
}

#[cfg(test)]
mod tests;
