//! Neighbours: the machines at the other ends of links.

use std::net::IpAddr;
use std::time::Duration;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use tokio::time::Instant;

use crate::Error;
use crate::network::Network;
use crate::request::{collect, execute};

const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// A machine on a link of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Where the link's packets to it go, such as an Ethernet address.
    pub link_address: Vec<u8>,
}

impl Neighbour {
    fn of(message: &NeighbourMessage) -> Option<Self> {
        use NeighbourState::{Delay, Permanent, Probe, Reachable, Stale};
        let link_address = message.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(address) => Some(address.clone()),
            _ => None,
        })?;
        let is_known = matches!(message.header.state, Reachable | Stale | Delay | Probe | Permanent);
        let address = address_of(message)?;
        is_known.then_some(Self { address, link_address })
    }
}

impl Network {
    /// Makes the kernel find the hardware address of `gateway` on `link`, and waits for it until
    /// `deadline`.
    ///
    /// A first packet to an unknown neighbour waits in the kernel, it is not lost: it costs less
    /// than a millisecond. The reason to ask beforehand is what happens without an answer: each
    /// connection that the hash puts on that path fails, or hangs for 3 s. And a packet that
    /// carries the migration address makes the kernel ask in the name of that address; a peer
    /// that filters by reverse path (`rp_filter=1`) ignores the question until it has its own
    /// route back. Here the kernel asks in the name of the link's own address.
    ///
    /// A neighbour that was heard of lately counts as found.
    pub async fn wait_neighbour(&self, link: &str, gateway: IpAddr, deadline: Duration) -> Result<(), Error> {
        let index = self.index_of_up_link(link).await?;
        let start = Instant::now();
        self.solicit(index, link, gateway).await?;
        loop {
            match self.neighbour_state(index, gateway).await? {
                Some(
                    NeighbourState::Reachable
                    | NeighbourState::Stale
                    | NeighbourState::Delay
                    | NeighbourState::Probe
                    | NeighbourState::Permanent
                    | NeighbourState::Noarp,
                ) => return Ok(()),
                // The kernel gives up after three unanswered questions, a second apart.
                Some(NeighbourState::Failed) => break,
                _ if start.elapsed() >= deadline => break,
                _ => tokio::time::sleep(POLL_INTERVAL).await,
            }
        }
        Err(Error::NeighbourUnreachable {
            gateway,
            link: link.to_owned(),
            waited_ms: start.elapsed().as_millis(),
        })
    }

    /// `NTF_USE` starts resolution just as a packet would.
    async fn solicit(&self, index: u32, link: &str, gateway: IpAddr) -> Result<(), Error> {
        let request = self
            .netlink
            .neighbours()
            .add(index, gateway)
            .replace()
            .state(NeighbourState::None)
            .flags(NeighbourFlags::Use);
        execute(&format!("resolve neighbour {gateway} on link {link}"), request.execute()).await
    }

    /// The machines that this host has heard of on its links, but for those that have not answered it lately.
    pub async fn neighbours(&self) -> Result<Vec<Neighbour>, Error> {
        let mut neighbours = vec![];
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let request = || self.netlink.neighbours().get().set_address_family(family).execute();
            let messages = collect("list the neighbours", request).await?;
            neighbours.extend(messages.iter().filter_map(Neighbour::of));
        }
        Ok(neighbours)
    }

    async fn neighbour_state(&self, index: u32, address: IpAddr) -> Result<Option<NeighbourState>, Error> {
        let family = match address {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        };
        let request = || self.netlink.neighbours().get().set_address_family(family).execute();
        let neighbours = collect("list the neighbours", request).await?;
        Ok(neighbours
            .iter()
            .find(|neighbour| neighbour.header.ifindex == index && address_of(neighbour) == Some(address))
            .map(|neighbour| neighbour.header.state))
    }
}

fn address_of(neighbour: &NeighbourMessage) -> Option<IpAddr> {
    neighbour.attributes.iter().find_map(|attribute| match attribute {
        NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => Some(IpAddr::V4(*address)),
        NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => Some(IpAddr::V6(*address)),
        _ => None,
    })
}
