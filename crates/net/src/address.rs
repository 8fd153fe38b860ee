//! Addresses of links.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::address::{AddressHeaderFlags, AddressMessage};
use rtnetlink::AddressMessageBuilder;
use rustix::io::Errno;

use crate::error::Error;
use crate::link::address_of;
use crate::network::Network;
use crate::request::execute;
use crate::undo::{Before, Undo};

/// The link that belongs to the host itself.
pub(crate) const LOOPBACK: &str = "lo";

impl Network {
    /// The subnet that `address` belongs to on this host: that of a link's address, or a route's
    /// destination; none if it is free to be given to `lo`, or is there already.
    ///
    /// Default routes and Drainpipe's own do not count.
    pub async fn subnet_of(&self, address: IpAddr) -> Result<Option<IpNet>, Error> {
        let loopback = self.link_message(LOOPBACK).await?.header.index;
        let of_links = self.address_messages().await?;
        let of_links = of_links.iter().filter(|message| message.header.index != loopback);
        let of_link = of_links.filter_map(address_of).find(|net| net.contains(&address));
        match of_link {
            Some(net) => Ok(Some(net.trunc())),
            None => self.routed_subnet_of(address).await,
        }
    }

    pub(crate) async fn observe_address(&self, link: &str, address: IpNet) -> Result<Before, Error> {
        self.index_of_up_link(link).await?;
        match self.holder_of(address).await? {
            None => Ok(Before::Absent),
            Some((holder, existing)) if holder == link && existing == address => Ok(Before::Address),
            Some((holder, existing)) => Err(Error::AddressInUse { address, existing, link: holder }),
        }
    }

    pub(crate) async fn apply_address(&self, link: &str, address: IpNet) -> Result<(), Error> {
        if self.observe_address(link, address).await? == Before::Address {
            return Ok(());
        }
        let index = self.index_of_up_link(link).await?;
        let mut request = self.netlink.address().add(index, address.addr(), address.prefix_len());
        // Even on `lo` an IPv6 address is tentative for a moment if duplicates are looked for,
        // and no route may have it as its source meanwhile (seen with Linux 6.18).
        request.message_mut().header.flags = AddressHeaderFlags::Nodad;
        execute(&format!("add address {address} to link {link}"), request.execute()).await
    }

    pub(crate) async fn remove_address(&self, link: &str, address: IpNet) -> Result<Undo, Error> {
        match self.holder_of(address).await? {
            None => return Ok(Undo::NothingToDo),
            Some((holder, existing)) if holder != link || existing != address => {
                return Ok(Undo::LeftAlone(format!("the address is now {existing} on link {holder}")));
            }
            Some(_) => {}
        }
        let index = self.link_message(link).await?.header.index;
        let request = self.netlink.address().del(address_message(index, address));
        let operation = format!("remove address {address} from link {link}");
        match execute(&operation, request.execute()).await {
            Ok(()) => Ok(Undo::Undone),
            Err(error) if error.errno() == Some(Errno::ADDRNOTAVAIL) => Ok(Undo::NothingToDo),
            Err(error) => Err(error),
        }
    }

    /// The link that has this address, whatever the prefix length, and how it has it.
    ///
    /// The very same address and prefix length on one link is preferred: IPv4 allows one address
    /// with several prefix lengths.
    pub(crate) async fn holder_of(&self, address: IpNet) -> Result<Option<(String, IpNet)>, Error> {
        let mut holders: Vec<(u32, IpNet)> = self
            .address_messages()
            .await?
            .iter()
            .filter_map(|message| Some((message.header.index, address_of(message)?)))
            .filter(|(_, existing)| existing.addr() == address.addr())
            .collect();
        holders.sort_by_key(|(_, existing)| *existing != address);
        let Some((index, existing)) = holders.first() else {
            return Ok(None);
        };
        let names = self.link_names().await?;
        Ok(names.get(index).map(|name| (name.clone(), *existing)))
    }
}

fn address_message(index: u32, address: IpNet) -> AddressMessage {
    match address.addr() {
        IpAddr::V4(ip) => {
            AddressMessageBuilder::<Ipv4Addr>::new().index(index).address(ip, address.prefix_len()).build()
        }
        IpAddr::V6(ip) => {
            AddressMessageBuilder::<Ipv6Addr>::new().index(index).address(ip, address.prefix_len()).build()
        }
    }
}
