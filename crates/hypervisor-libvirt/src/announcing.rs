//! Announces a domain's guest to the network.
//!
//! The target's QEMU does so as soon as everything has arrived, and libvirt has no call for it. So Drainpipe itself
//! announces a domain that continues at its source after that, or that runs at its target long after.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_hypervisor::VmError;
use drainpipe_hypervisor::spec::{MacAddress, VmName};
use drainpipe_libvirt::XmlFlags;
use drainpipe_net::{Announced, Network};
use futures_util::future::join_all;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::domain::{DomainDescription, Interface};
use crate::errors::failed;

/// Each is announced by a port of its own, for as long as that takes.
const INTERFACES_MAX: usize = 16;

/// Announces each interface of a domain that runs here. What went wrong is logged: the domain runs all the same.
pub(crate) async fn announce(daemon: Arc<Daemon>, vm: VmName, uuid: Uuid, deadline: Duration) {
    if let Err(error) = try_to_announce(&daemon, &vm, uuid, deadline).await {
        tracing::warn!(%vm, %error, "could not announce to the network where the domain runs");
    }
}

async fn try_to_announce(
    daemon: &Daemon,
    vm: &VmName,
    uuid: Uuid,
    deadline: Duration,
) -> Result<(), VmError> {
    let connection = daemon.shared(deadline).await.map_err(failed)?;
    let domain = connection.domain_by_uuid(*uuid.as_bytes(), deadline).await.map_err(failed)?;
    let xml = connection.xml(&domain, XmlFlags::default(), deadline).await.map_err(failed)?;
    let description = DomainDescription::parse(&xml).map_err(VmError::failed)?;
    let network = Network::open().map_err(VmError::failed)?;
    let ends = ends(&description.devices.interfaces);
    join_all(ends.iter().map(|(tap, mac)| announce_at(&network, vm, tap, *mac))).await;
    Ok(())
}

async fn announce_at(network: &Network, vm: &VmName, tap: &str, mac: MacAddress) {
    match network.announce(tap, mac.octets()).await {
        Ok(Announced::ToAll) => tracing::debug!(%vm, tap, "announced to the network where the domain runs"),
        Ok(Announced::ToBridge) => {
            tracing::info!(%vm, tap, "its bridge separates VLANs: the switches behind it learn when the \
                guest sends something");
        }
        Ok(Announced::ToNobody) => {
            tracing::info!(%vm, tap, "it is not on a bridge of the kernel's: the network learns when the \
                guest sends something");
        }
        Err(error) => {
            tracing::warn!(%vm, tap, %error, "could not announce to the network where the domain runs");
        }
    }
}

/// The host's end of each interface, and the guest's address.
fn ends(interfaces: &[Interface]) -> Vec<(&str, MacAddress)> {
    let ends = interfaces.iter().filter_map(|interface| Some((interface.target.as_deref()?, interface.mac?)));
    ends.take(INTERFACES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces(xml: &str) -> Vec<Interface> {
        let domain = format!(
            "<domain type='kvm'><name>web</name><uuid>7f3c1f8e-0a57-4c0e-9f0a-0f5a3d1f6c11</uuid>
             <memory unit='MiB'>64</memory><vcpu>1</vcpu><devices>{xml}</devices></domain>"
        );
        DomainDescription::parse(&domain).unwrap().devices.interfaces
    }

    #[test]
    fn each_interface_with_an_end_at_this_host_is_told_of() {
        let interfaces = interfaces(
            "<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/><target dev='vnet0'/></interface>
             <interface type='network'><mac address='52:54:00:00:00:02'/><source network='default' bridge='virbr0'/>
               <target dev='vnet1'/></interface>
             <interface type='user'><mac address='52:54:00:00:00:03'/></interface>
             <interface type='bridge'><source bridge='br0'/><target dev='vnet3'/></interface>",
        );
        let mac = |text: &str| text.parse().unwrap();
        let expected = [("vnet0", mac("52:54:00:00:00:01")), ("vnet1", mac("52:54:00:00:00:02"))];
        assert_eq!(ends(&interfaces), expected);
    }

    #[test]
    fn no_more_are_told_of_than_16() {
        let one =
            "<interface type='bridge'><mac address='52:54:00:00:00:01'/><target dev='vnet0'/></interface>";
        assert_eq!(ends(&interfaces(&one.repeat(20))).len(), 16);
    }
}
