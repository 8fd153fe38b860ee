//! The disks that move with a domain: libvirt copies them in `Perform`, before memory, from QEMU to QEMU through the
//! agents.
//!
//! ```text
//!   source                                   target
//!   names: those of QEMU's drives            (Prepare: QEMU takes them at a socket that only the agent reaches)
//!   start: where they go                     open: their names
//!   (Perform: mirrors, until all are ready; memory; the pause; the mirrors end; the rest)
//!   end: Perform is over                     close: nothing
//!                                            (Finish: QEMU takes no more, which is seen before the guest runs)
//! ```

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::storage::DiskCopy;
use drainpipe_hypervisor::spec::DiskFormat;
use drainpipe_hypervisor::{
    Address, CopyState, CopyTo, DiskCopies, DiskExports, OpenDisk, VmError, VmErrorKind,
};
use drainpipe_libvirt::{BlockJob, CapabilitiesOf, JobStatsOf, XmlFlags};
use tokio::net::UnixStream;

use super::{DomainVm, lock};
use crate::domain::{Disk, DomainDescription, emulator_of};
use crate::errors::failed;
use crate::images;

/// A disk that goes with its domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CopiedDisk {
    /// Which of the specification's.
    disk: usize,
    /// As the guest, and libvirt, call it.
    target: String,
    /// As QEMU's drive, and so what is offered of it, is called.
    name: String,
}

/// What is known of the copies of a domain that leaves.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    disks: Vec<CopiedDisk>,
    to: Option<SocketAddr>,
    states: Vec<CopyState>,
    // All of each disk was there.
    memory_follows: bool,
}

/// Checks that nothing takes a copy's connections any more: whatever libvirt says, no disk has two writers.
pub(super) async fn check_closed(socket: &Path) -> Result<(), VmError> {
    match UnixStream::connect(socket).await {
        Ok(_open) => Err(VmError::failed("libvirt has left the domain's disks open for its source")),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(()),
        Err(error) => Err(VmError::failed(format!(
            "it is not known whether libvirt has closed the domain's disks to its source: {error}"
        ))),
    }
}

impl Copies {
    pub(super) fn of(disks: Vec<CopiedDisk>) -> Self {
        let begun = |of: &CopiedDisk| CopyState {
            disk: of.disk,
            copied_bytes: 0,
            total_bytes: 0,
            is_ready: false,
            is_synchronised: false,
        };
        let states = disks.iter().map(begun).collect();
        Self { disks, states, ..Self::default() }
    }

    pub(super) fn to(&self) -> Option<SocketAddr> {
        self.to
    }

    /// Once memory is sent, libvirt counts no more of the disks.
    fn memory_follows(&mut self) {
        self.memory_follows = true;
        for state in &mut self.states {
            state.copied_bytes = state.total_bytes;
            state.is_ready = true;
        }
    }

    fn saw(&mut self, disk: usize, job: BlockJob) {
        let BlockJob { done_bytes, total_bytes } = job;
        let Some(state) = self.states.iter_mut().find(|state| state.disk == disk) else { return };
        // libvirt says less than all until it is ready.
        let is_ready = state.is_ready || total_bytes > 0 && done_bytes == total_bytes;
        *state = CopyState { copied_bytes: done_bytes, total_bytes, is_ready, ..*state };
    }
}

pub(super) fn targets(disks: &[CopiedDisk]) -> Vec<String> {
    disks.iter().map(|disk| disk.target.clone()).collect()
}

pub(super) fn drives(disks: &[CopiedDisk]) -> Vec<String> {
    disks.iter().map(|disk| disk.name.clone()).collect()
}

impl DomainVm {
    async fn description(&self, deadline: Duration) -> Result<DomainDescription, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let xml = connection.xml(&domain, XmlFlags::default(), deadline).await.map_err(failed)?;
        DomainDescription::parse(&xml).map_err(VmError::failed)
    }

    /// What libvirt and QEMU call these disks of the specification.
    pub(super) async fn copied(
        &self,
        disks: &[usize],
        deadline: Duration,
    ) -> Result<Vec<CopiedDisk>, VmError> {
        if disks.is_empty() {
            return Ok(vec![]);
        }
        let description = self.description(deadline).await?;
        disks.iter().map(|disk| self.copied_disk(*disk, &description)).collect()
    }

    /// What a description says of this disk of the specification.
    fn described<'a>(&self, disk: usize, description: &'a DomainDescription) -> Option<&'a Disk> {
        let path = self.spec.spec().disks.get(disk)?.path.as_path();
        description.devices.disks.iter().find(|of| of.source.path() == Some(path))
    }

    fn copied_disk(&self, disk: usize, description: &DomainDescription) -> Result<CopiedDisk, VmError> {
        let alias = self.described(disk, description).and_then(|of| Some((of, of.alias.as_ref()?)));
        let (of, alias) = alias.ok_or_else(|| {
            let path = self.spec.spec().disks.get(disk).map(|disk| disk.path.as_path());
            let which = path.unwrap_or(Path::new("that is to be copied")).display();
            VmError::failed(format!("libvirt no longer reports on the domain's disk {which}"))
        })?;
        Ok(CopiedDisk { disk, target: of.target.clone(), name: format!("drive-{alias}") })
    }

    /// Whether it has the emulator whose version libvirt tells.
    async fn has_usual_emulator(&self, deadline: Duration) -> Result<bool, VmError> {
        let (connection, _) = self.domain(deadline).await?;
        let usual = connection.domain_capabilities_xml(CapabilitiesOf::default(), deadline).await;
        let own = self.description(deadline).await?.machine.emulator;
        Ok(own.is_some() && own == emulator_of(&usual.map_err(failed)?))
    }

    async fn memory_follows(&self, deadline: Duration) -> Result<bool, VmError> {
        let (connection, domain) = self.asked(deadline).await?;
        let job = connection.job_stats(&domain, JobStatsOf::UnderWay, deadline).await.map_err(failed)?;
        Ok(job.memory.total_bytes.is_some_and(|bytes| bytes > 0))
    }

    /// Takes in how far each is.
    async fn look_at_copies(&self, deadline: Duration) -> Result<(), VmError> {
        let (disks, was_seen) = {
            let copies = lock(&self.leaving.copies);
            (copies.disks.clone(), copies.memory_follows)
        };
        if was_seen {
            return Ok(());
        }
        if self.memory_follows(deadline).await? {
            lock(&self.leaving.copies).memory_follows();
            return Ok(());
        }
        let (connection, domain) = self.asked(deadline).await?;
        for CopiedDisk { disk, target, .. } in disks {
            // There is none yet, or memory is sent since just now.
            if let Some(job) = connection.block_job(&domain, &target, deadline).await.map_err(failed)? {
                lock(&self.leaving.copies).saw(disk, job);
            }
        }
        Ok(())
    }
}

#[async_trait]
impl DiskCopies for DomainVm {
    async fn disks(&self, deadline: Duration) -> Result<Vec<OpenDisk>, VmError> {
        let (connection, domain) = self.domain(deadline).await?;
        let has_snapshots = connection.snapshot_count(&domain, deadline).await.map_err(failed)? > 0;
        let has_images = self.spec.spec().disks.iter().any(|disk| disk.format == DiskFormat::Qcow2);
        let qemu = images::Qemu {
            version: self.version,
            is_of_version: !has_images || self.has_usual_emulator(deadline).await?,
            pid: self.process().map(|process| process.pid()),
        };
        let disks = self.spec.spec().disks.iter();
        Ok(disks.map(|disk| images::open_disk(disk, &qemu, has_snapshots)).collect())
    }

    fn check(&self, copies: &[DiskCopy]) -> Result<(), VmError> {
        let moved = copies.iter().find(|copy| copy.to != copy.from);
        moved.map_or(Ok(()), |copy| {
            Err(VmError::new(
                VmErrorKind::Refused,
                format!(
                    "{} of the domain {} would go from {} to {}: the disks of a domain keep their paths, which its XML names",
                    copy.disk,
                    self.spec.spec().name,
                    copy.from,
                    copy.to
                ),
            ))
        })
    }

    fn go_along(&self) -> bool {
        true
    }

    async fn names(&self, disks: &[usize], deadline: Duration) -> Result<Option<Vec<String>>, VmError> {
        let copied = self.copied(disks, deadline).await?;
        Ok(Some(copied.into_iter().map(|disk| disk.name).collect()))
    }

    /// `Perform` does.
    async fn start(&self, copies: &[CopyTo], _deadline: Duration) -> Result<(), VmError> {
        let to = copies.first().map(|copy| &copy.address);
        let Some(Address::Tcp(to)) = to else {
            return Err(VmError::failed("copies of a domain's disks need an address"));
        };
        lock(&self.leaving.copies).to = Some(*to);
        Ok(())
    }

    async fn states(&self, deadline: Duration) -> Result<Vec<CopyState>, VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        if let Some(error) = leaving.failure() {
            return Err(error);
        }
        if leaving.has_sent() {
            lock(&self.leaving.copies).memory_follows();
        } else if leaving.is_performing() {
            self.look_at_copies(deadline).await?;
        }
        Ok(lock(&self.leaving.copies).states.clone())
    }

    async fn synchronise(&self, _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("libvirt cannot make a domain's writes wait for its target"))
    }

    /// libvirt ends them in the pause, before it sends the last of memory.
    async fn end(&self, _disks: &[usize], deadline: Duration) -> Result<(), VmError> {
        let leaving = self.leaving().ok_or_else(|| VmError::failed("libvirt was not asked to begin"))?;
        leaving.sent(deadline).await.map(drop)
    }

    /// They end with the transfer.
    async fn abandon(&self, _deadline: Duration) -> Result<(), VmError> {
        Ok(())
    }
}

#[async_trait]
impl DiskExports for DomainVm {
    /// They are since `Prepare`. libvirt is not asked: since some release after 9.0 it keeps who asks for the XML of a domain
    /// that comes waiting until all is there.
    async fn open(&self, disks: &[usize], _deadline: Duration) -> Result<Vec<String>, VmError> {
        let coming = self.coming().ok_or_else(|| VmError::failed("nothing was prepared for it here"))?;
        let agreed =
            disks.iter().map(|disk| Some(self.described(*disk, coming.description())?.target.as_str()));
        if !agreed.eq(coming.disks().iter().map(|disk| Some(disk.as_str()))) {
            return Err(VmError::failed("the other host's libvirt would copy other disks than agreed"));
        }
        Ok(coming.drives().to_vec())
    }

    /// Until `Finish` nobody but this agent reaches them, and after it nobody.
    async fn close(&self, _deadline: Duration) -> Result<(), VmError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies() -> Copies {
        let disk = |disk, target: &str| CopiedDisk { disk, target: target.into(), name: String::new() };
        Copies::of(vec![disk(0, "vda"), disk(2, "sdb")])
    }

    #[test]
    fn a_copy_that_was_whole_stays_ready_though_its_guest_writes() {
        let mut copies = copies();
        let ready = |copies: &Copies| copies.states.iter().map(|state| state.is_ready).collect::<Vec<_>>();
        copies.saw(2, BlockJob { done_bytes: 0, total_bytes: 0 });
        assert_eq!(ready(&copies), [false, false], "it has not begun");
        copies.saw(2, BlockJob { done_bytes: 100, total_bytes: 100 });
        copies.saw(2, BlockJob { done_bytes: 150, total_bytes: 160 });
        assert_eq!(ready(&copies), [false, true]);
        assert_eq!((copies.states[1].copied_bytes, copies.states[1].total_bytes), (150, 160));
        copies.memory_follows();
        assert_eq!(ready(&copies), [true, true]);
        assert_eq!(copies.states[1].copied_bytes, 160);
    }
}
