//! The connections of a VM that this host's firewall tracks, by the addresses at which the host knows the VM.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Instant;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::spec::MacAddress;
use drainpipe_net::{Neighbour, Tracked, tracked_connections, tracked_count};

use crate::host::network::HostNetwork;

/// Most addresses of one VM. The kernel goes through all that it tracks for each.
pub(crate) const ADDRESSES_MAX: usize = 16;

/// What a look has shown.
#[derive(Debug, PartialEq)]
pub(crate) enum TrackingState {
    /// The kernel tracks no connections.
    NoTracking,
    /// The host has not heard of an address that the VM has.
    NoAddress,
    /// These are the VM's addresses, and what is tracked of them.
    Found(Vec<IpAddr>, Tracked),
}

/// Looks at the connections of a VM with these NICs, until then at most.
pub(crate) async fn look(
    network: &HostNetwork,
    macs: &[MacAddress],
    until: Instant,
) -> Result<TrackingState, Problem> {
    match tracked_count().map_err(Problem::failed)? {
        None => return Ok(TrackingState::NoTracking),
        Some(0) => return Ok(TrackingState::Found(vec![], Tracked { is_whole: true, ..Tracked::default() })),
        Some(_) => {}
    }
    let addresses = addresses_of(&network.neighbours().await?, macs);
    if addresses.is_empty() {
        return Ok(TrackingState::NoAddress);
    }
    let tracked = tracked_connections(&addresses, until).await.map_err(Problem::failed)?;
    Ok(TrackingState::Found(addresses, tracked))
}

/// The addresses that these NICs have answered for. Link-local ones are not unique.
fn addresses_of(neighbours: &[Neighbour], macs: &[MacAddress]) -> Vec<IpAddr> {
    let of_vm = neighbours.iter().filter(|neighbour| is_of(neighbour, macs));
    let addresses: BTreeSet<IpAddr> =
        of_vm.map(|neighbour| neighbour.address).filter(|address| !is_link_local(*address)).collect();
    addresses.into_iter().take(ADDRESSES_MAX).collect()
}

/// Whether it is one of these NICs.
pub(crate) fn is_of(neighbour: &Neighbour, macs: &[MacAddress]) -> bool {
    macs.iter().any(|mac| neighbour.link_address == mac.octets())
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn neighbour(address: &str, last: u8) -> Neighbour {
        Neighbour { address: address.parse().unwrap(), link_address: vec![0x52, 0x54, 0, 0, 0, last] }
    }

    #[test]
    fn the_addresses_are_those_of_the_vms_nics() {
        let neighbours = [
            neighbour("10.0.0.5", 1),
            neighbour("fe80::5", 1),
            neighbour("10.0.0.6", 2),
            neighbour("10.0.0.5", 1),
            neighbour("2001:db8::7", 3),
            Neighbour { link_address: vec![], ..neighbour("10.0.0.8", 1) },
        ];
        let macs = [1, 3].map(|last| format!("52:54:00:00:00:0{last}").parse().unwrap());
        let expected: Vec<IpAddr> = ["10.0.0.5", "2001:db8::7"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(addresses_of(&neighbours, &macs), expected);
        assert_eq!(addresses_of(&neighbours, &[]), Vec::<IpAddr>::new());
    }
}
