//! The links of a host: network cards, bonds, bridges, taps and the like.

use std::collections::HashMap;

use ipnet::IpNet;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVlan, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::network::Network;
use crate::request::collect;
use crate::{Error, speed};

/// `IFNAMSIZ` less the terminating zero.
const NAME_BYTES_MAX: usize = 15;

/// A link and its state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// The kernel's number of the link, unique in its namespace.
    pub index: u32,
    /// The name, as `ip link` shows it.
    pub name: String,
    /// What kind of link it is.
    pub kind: LinkKind,
    /// Largest packet in bytes, without the link's own header.
    pub mtu: u32,
    /// Whether it is switched on (`ip link set … up`).
    pub up: bool,
    /// Whether something answers at the other end of the cable.
    pub carrier: bool,
    /// Speed in Mb/s, if the driver knows one. Virtual drivers name constants: veth 10000,
    /// tap 10; a shaper in front of the link is not seen here.
    pub speed_mbps: Option<u64>,
    /// The fastest that the card can do, in Mb/s, if the driver lists what it can.
    pub card_speed_mbps: Option<u64>,
    /// Addresses with their prefix lengths; without those that nothing can be sent from, as the kernel
    /// still looks for duplicates of them or has found one.
    pub addresses: Vec<IpNet>,
    /// The bridge or bond that this link is a member of.
    pub master: Option<String>,
    /// Which VLAN of which link it is, if it is one of a link in this namespace.
    pub vlan: Option<Vlan>,
    /// Traffic since the link exists.
    pub counters: LinkCounters,
}

/// A VLAN of a link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vlan {
    /// The link by which its packets go.
    pub link: String,
    /// Its number.
    pub id: u16,
}

/// What kind of link it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// A network card, real or given to this machine by a hypervisor.
    Physical,
    /// One end of a virtual cable.
    Veth,
    /// A software switch.
    Bridge,
    /// A team of links.
    Bond,
    /// One VLAN of another link.
    Vlan,
    /// The host's end of a guest's network card.
    Tap,
    /// `lo`.
    Loopback,
    /// Another kind, by the kernel's name for it.
    Other(String),
}

/// Traffic of a link since it exists, as the kernel counts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// Name of the link.
    pub name: String,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Packets sent.
    pub tx_packets: u64,
    /// Bad packets received.
    pub rx_errors: u64,
    /// Packets that could not be sent.
    pub tx_errors: u64,
    /// Packets dropped on arrival for lack of room.
    pub rx_dropped: u64,
    /// Packets dropped before sending for lack of room.
    pub tx_dropped: u64,
}

impl Network {
    /// Every link of this namespace, in the kernel's order.
    pub async fn links(&self) -> Result<Vec<Link>, Error> {
        let links = collect("list the links", || self.netlink.link().get().execute()).await?;
        let addresses = self.address_messages().await?;
        let speeds = speed::speeds(self.ethtool.clone()).await;
        let names: HashMap<u32, String> =
            links.iter().map(|link| (link.header.index, name_of(link))).collect();
        Ok(links
            .iter()
            .map(|message| Link {
                speed_mbps: speeds.get(&message.header.index).and_then(|speeds| speeds.now_mbps),
                card_speed_mbps: speeds.get(&message.header.index).and_then(|speeds| speeds.most_mbps),
                addresses: addresses_of(message.header.index, &addresses),
                master: master_of(message).and_then(|index| names.get(&index).cloned()),
                vlan: vlan_of(message, &names),
                ..link_from(message)
            })
            .collect())
    }

    /// The traffic of the named links, in the order asked for, without those that are gone.
    ///
    /// Costs about 20 µs a link, so it can be called many times a second.
    pub async fn counters(&self, links: &[&str]) -> Result<Vec<LinkCounters>, Error> {
        let mut counters = Vec::with_capacity(links.len());
        for link in links {
            match self.link_message(link).await {
                Ok(message) => counters.push(counters_of(&message)),
                Err(Error::UnknownLink(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(counters)
    }

    pub(crate) async fn link_message(&self, name: &str) -> Result<LinkMessage, Error> {
        let unknown = || Error::UnknownLink(name.to_owned());
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(unknown());
        }
        let request = || self.netlink.link().get().match_name(name).execute();
        match collect(&format!("read link {name}"), request).await {
            Ok(messages) => messages.into_iter().next().ok_or_else(unknown),
            Err(error) if error.errno() == Some(Errno::NODEV) => Err(unknown()),
            Err(error) => Err(error),
        }
    }

    /// The index of a link that is up.
    pub(crate) async fn index_of_up_link(&self, name: &str) -> Result<u32, Error> {
        let message = self.link_message(name).await?;
        if message.header.flags.contains(LinkFlags::Up) {
            Ok(message.header.index)
        } else {
            Err(Error::LinkDown { link: name.to_owned() })
        }
    }

    /// Whether the link is switched on (`ip link set up`).
    pub async fn is_up(&self, name: &str) -> Result<bool, Error> {
        match self.index_of_up_link(name).await {
            Ok(_) => Ok(true),
            Err(Error::LinkDown { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn link_names(&self) -> Result<HashMap<u32, String>, Error> {
        let links = collect("list the links", || self.netlink.link().get().execute()).await?;
        Ok(links.iter().map(|link| (link.header.index, name_of(link))).collect())
    }

    pub(crate) async fn address_messages(&self) -> Result<Vec<AddressMessage>, Error> {
        collect("list the addresses", || self.netlink.address().get().execute()).await
    }
}

fn link_from(message: &LinkMessage) -> Link {
    Link {
        index: message.header.index,
        name: name_of(message),
        kind: kind_of(message),
        mtu: find(message, |attribute| match attribute {
            LinkAttribute::Mtu(mtu) => Some(*mtu),
            _ => None,
        })
        .unwrap_or_default(),
        up: message.header.flags.contains(LinkFlags::Up),
        carrier: find(message, |attribute| match attribute {
            LinkAttribute::Carrier(carrier) => Some(*carrier != 0),
            _ => None,
        })
        .unwrap_or_default(),
        speed_mbps: None,
        card_speed_mbps: None,
        addresses: Vec::new(),
        master: None,
        vlan: None,
        counters: counters_of(message),
    }
}

pub(crate) fn find<T>(message: &LinkMessage, pick: impl Fn(&LinkAttribute) -> Option<T>) -> Option<T> {
    message.attributes.iter().find_map(pick)
}

pub(crate) fn name_of(message: &LinkMessage) -> String {
    find(message, |attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })
    .unwrap_or_default()
}

pub(crate) fn master_of(message: &LinkMessage) -> Option<u32> {
    find(message, |attribute| match attribute {
        LinkAttribute::Controller(index) => Some(*index),
        _ => None,
    })
}

/// The lower link's index may be one of another namespace, and then means another link here.
fn vlan_of(message: &LinkMessage, names: &HashMap<u32, String>) -> Option<Vlan> {
    let is_elsewhere = |attribute: &LinkAttribute| matches!(attribute, LinkAttribute::LinkNetNsId(_));
    if message.attributes.iter().any(is_elsewhere) {
        return None;
    }
    let lower = find(message, |attribute| match attribute {
        LinkAttribute::Link(index) => names.get(index).cloned(),
        _ => None,
    });
    let id = find(message, |attribute| match attribute {
        LinkAttribute::LinkInfo(info) => info.iter().find_map(|info| match info {
            LinkInfo::Data(InfoData::Vlan(data)) => data.iter().find_map(|data| match data {
                InfoVlan::Id(id) => Some(*id),
                _ => None,
            }),
            _ => None,
        }),
        _ => None,
    });
    Some(Vlan { link: lower?, id: id? })
}

fn kind_of(message: &LinkMessage) -> LinkKind {
    let driver = find(message, |attribute| match attribute {
        LinkAttribute::LinkInfo(info) => info.iter().find_map(|info| match info {
            LinkInfo::Kind(kind) => Some(kind.clone()),
            _ => None,
        }),
        _ => None,
    });
    let layer = message.header.link_layer_type;
    match driver {
        Some(InfoKind::Veth) => LinkKind::Veth,
        Some(InfoKind::Bridge) => LinkKind::Bridge,
        Some(InfoKind::Bond) => LinkKind::Bond,
        Some(InfoKind::Vlan) => LinkKind::Vlan,
        // One driver makes taps (Ethernet) and tuns (no link layer).
        Some(InfoKind::Tun) if layer == LinkLayerType::Ether => LinkKind::Tap,
        Some(other) => LinkKind::Other(other.to_string()),
        None if message.header.flags.contains(LinkFlags::Loopback) => LinkKind::Loopback,
        // Only drivers of software links announce a kind.
        None if matches!(layer, LinkLayerType::Ether | LinkLayerType::Infiniband) => LinkKind::Physical,
        None => LinkKind::Other(layer.to_string().to_lowercase()),
    }
}

fn counters_of(message: &LinkMessage) -> LinkCounters {
    let stats = find(message, |attribute| match attribute {
        LinkAttribute::Stats64(stats) => Some(*stats),
        _ => None,
    })
    .unwrap_or_default();
    LinkCounters {
        name: name_of(message),
        rx_bytes: stats.rx_bytes,
        tx_bytes: stats.tx_bytes,
        rx_packets: stats.rx_packets,
        tx_packets: stats.tx_packets,
        rx_errors: stats.rx_errors,
        tx_errors: stats.tx_errors,
        rx_dropped: stats.rx_dropped,
        tx_dropped: stats.tx_dropped,
    }
}

fn addresses_of(link_index: u32, messages: &[AddressMessage]) -> Vec<IpNet> {
    let of_link = messages.iter().filter(|message| message.header.index == link_index);
    of_link.filter(|message| can_send(message)).filter_map(address_of).collect()
}

fn can_send(message: &AddressMessage) -> bool {
    let flags = message.header.flags;
    let optimistic = flags.contains(AddressHeaderFlags::Optimistic);
    !flags.contains(AddressHeaderFlags::Dadfailed)
        && (optimistic || !flags.contains(AddressHeaderFlags::Tentative))
}

/// The host's own address in `message`.
///
/// On a point-to-point link `IFA_ADDRESS` is the peer's address and `IFA_LOCAL` the host's;
/// IPv6 has only the former elsewhere.
pub(crate) fn address_of(message: &AddressMessage) -> Option<IpNet> {
    let local = message.attributes.iter().find_map(|attribute| match attribute {
        AddressAttribute::Local(address) => Some(*address),
        _ => None,
    });
    let address = local.or_else(|| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Address(address) => Some(*address),
            _ => None,
        })
    })?;
    IpNet::new(address, message.header.prefix_len).ok()
}
