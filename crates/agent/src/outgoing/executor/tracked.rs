//! Steps 7, 8 and 10: the VM's connections go to the target's firewall, and this host's deletes them.

use drainpipe_engine::migration::result::TrackedUse;
use drainpipe_hypervisor::spec::MacAddress;

use super::Executor;
use crate::outgoing::tracked::{Gone, OnWay, Taker, forget};

impl Executor {
    /// While its memory goes; none where there is nothing to send or nobody to take it.
    pub(super) fn send_tracked(&self) -> Option<OnWay> {
        let macs = self.tracked_macs()?;
        self.agreed.protocol.filter(|protocol| protocol.takes_tracked_connections())?;
        let client = self.peer().ok()?;
        let taker = Taker { client, path: self.incoming("tracked"), host: self.running.target.clone() };
        Some(OnWay::begin(&self.outgoing, macs, taker))
    }

    /// The VM is the target's.
    pub(super) async fn forget_tracked(&mut self) {
        let Some(macs) = self.tracked_macs() else { return };
        let listed = self.tracked.gone.as_mut().and_then(|gone| gone.listed.take());
        forget(&self.outgoing, &macs, listed).await;
    }

    pub(super) fn tracked_use(&self) -> Option<TrackedUse> {
        self.tracked.gone.as_ref().and_then(|Gone { tracked_use, .. }| tracked_use.clone())
    }

    /// The MAC addresses of its NICs; none if there are none, or if connections stay. If the definition leaves one
    /// open, only QEMU knows it.
    fn tracked_macs(&self) -> Option<Vec<MacAddress>> {
        let macs: Vec<MacAddress> = match &self.claimed.vmm {
            Some(vmm) => vmm.spec().macs().to_vec(),
            None => self.claimed.definition.nics.iter().filter_map(|nic| nic.mac).collect(),
        };
        (self.outgoing.host.config.vms.conntrack && !macs.is_empty()).then_some(macs)
    }
}
