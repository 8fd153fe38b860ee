//! Announces to a network where a guest is, in the guest's place.
//!
//! A guest that continues elsewhere may have nothing to send, while the bridge here and the switches behind it have
//! learnt its old place.
//!
//! - The bridge is told at which port the guest is, as if it had heard it there.
//! - The switches learn from frames with the guest's address. A packet socket on the bridge would need `CAP_NET_RAW`. So they
//!   come in by a port of Drainpipe's own, at which the bridge learns nothing: a tap, which is there for as long as it takes,
//!   and which the kernel removes with its owner.

use std::time::Duration;

use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{
    AfSpecBridge, BridgeVlanInfoFlags, InfoBridge, InfoData, InfoKind, LinkAttribute, LinkExtentMask,
    LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{NeighbourFlags, NeighbourState};
use rtnetlink::{LinkBridgePort, LinkBridgeVlan, LinkUnspec};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use crate::Error;
use crate::link::{find, master_of, name_of};
use crate::network::Network;
use crate::rarp;
use crate::request::{collect, execute};

/// Between one time and the next, after the first: as QEMU does. One frame may be lost, or come before a switch is ready,
/// or before what the other host still sends.
const AGAIN_AFTER_MS: [u64; 4] = [50, 150, 250, 350];

/// The kernel puts a number in its place.
const PORT_NAME: &str = "announce%d";

const ETHERNET_MTU: u32 = 1500;

/// What has learnt where a guest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announced {
    /// The bridge, and all that is behind it.
    ToAll,
    /// The bridge alone: it keeps VLANs apart, and frames without a tag have no VLAN at the guest's port.
    ToBridge,
    /// Nobody: its tap is no port of a bridge of the kernel's, but of Open vSwitch, or of none.
    ToNobody,
}

/// The part of a bridge's network in which frames are that a guest sends without a tag.
#[derive(Debug, Clone, Copy)]
enum Segment {
    Whole,
    Vlan(u16),
}

impl Network {
    /// Tells the bridge of the tap, and the switches behind it, that the guest with this address is there. Takes 0.8 s, and
    /// ends with an error when the tap goes meanwhile.
    pub async fn announce(&self, tap: &str, mac: [u8; 6]) -> Result<Announced, Error> {
        let tap = self.link_message(tap).await?;
        let Some(bridge) = self.bridge_of(&tap).await? else { return Ok(Announced::ToNobody) };
        self.learn(&tap, mac).await?;
        let Some(segment) = self.segment(&bridge, &tap).await? else { return Ok(Announced::ToBridge) };
        let port = self.join(&bridge, segment, mac).await?;
        send(&port, mac)?;
        for pause_ms in AGAIN_AFTER_MS {
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            self.learn(&tap, mac).await?;
            send(&port, mac)?;
        }
        Ok(Announced::ToAll)
    }

    async fn bridge_of(&self, tap: &LinkMessage) -> Result<Option<LinkMessage>, Error> {
        let Some(index) = master_of(tap) else { return Ok(None) };
        let operation = format!("read what {} is joined to", name_of(tap));
        let request = || self.netlink.link().get().match_index(index).execute();
        let masters = collect(&operation, request).await?;
        Ok(masters.into_iter().find(is_bridge))
    }

    /// `NTF_USE` is as if a frame had come: what libvirt or an operator has fixed stays fixed.
    async fn learn(&self, tap: &LinkMessage, mac: [u8; 6]) -> Result<(), Error> {
        let request = self
            .netlink
            .neighbours()
            .add_bridge(tap.header.index, &mac)
            .replace()
            .state(NeighbourState::Reachable)
            .flags(NeighbourFlags::Use | NeighbourFlags::Controller);
        let operation = format!("make the bridge find a guest at {}", name_of(tap));
        execute(&operation, request.execute()).await
    }

    async fn segment(&self, bridge: &LinkMessage, tap: &LinkMessage) -> Result<Option<Segment>, Error> {
        if keeps_vlans_apart(bridge) {
            Ok(self.untagged_vlan(tap).await?.map(Segment::Vlan))
        } else {
            Ok(Some(Segment::Whole))
        }
    }

    async fn untagged_vlan(&self, port: &LinkMessage) -> Result<Option<u16>, Error> {
        let request = || {
            let get = self.netlink.link().get();
            get.set_filter_mask(AddressFamily::Bridge, vec![LinkExtentMask::Brvlan]).execute()
        };
        let ports = collect(&format!("read the VLANs of {}", name_of(port)), request).await?;
        Ok(ports.iter().find(|link| link.header.index == port.header.index).and_then(untagged_vlan_of))
    }

    async fn join(&self, bridge: &LinkMessage, segment: Segment, mac: [u8; 6]) -> Result<SyncDevice, Error> {
        let tap = DeviceBuilder::new().name(PORT_NAME).layer(Layer::L2).inherit_enable_state().build_sync();
        let tap = tap.map_err(Error::Tap)?;
        let index = tap.if_index().map_err(Error::Tap)?;
        let operation = format!("join a tap to the bridge {}", name_of(bridge));
        let joining = LinkUnspec::new_with_index(index)
            .controller(bridge.header.index)
            .address(port_address(mac).to_vec())
            .mtu(mtu(bridge))
            .build();
        execute(&operation, self.netlink.link().set(joining).execute()).await?;
        // Before it is up: the guest is never learned here.
        let deaf = LinkBridgePort::new(index).learning(false).build();
        execute(&operation, self.netlink.link().set_port(deaf).execute()).await?;
        if let Segment::Vlan(vlan) = segment {
            let as_guests = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
            let joining = LinkBridgeVlan::new(index).vlan(vlan, as_guests).build();
            execute(&operation, self.netlink.link().set(joining).execute()).await?;
        }
        let up = LinkUnspec::new_with_index(index).up().build();
        execute(&operation, self.netlink.link().set(up).execute()).await?;
        Ok(tap)
    }
}

fn send(port: &SyncDevice, mac: [u8; 6]) -> Result<(), Error> {
    port.send(&rarp::announcement(mac)).map(drop).map_err(Error::Tap)
}

fn is_bridge(link: &LinkMessage) -> bool {
    info(link).any(|info| matches!(info, LinkInfo::Kind(InfoKind::Bridge)))
}

fn keeps_vlans_apart(bridge: &LinkMessage) -> bool {
    info(bridge).any(|info| match info {
        LinkInfo::Data(InfoData::Bridge(settings)) => settings.contains(&InfoBridge::VlanFiltering(true)),
        _ => false,
    })
}

fn info(link: &LinkMessage) -> impl Iterator<Item = &LinkInfo> {
    link.attributes
        .iter()
        .filter_map(|attribute| match attribute {
            LinkAttribute::LinkInfo(info) => Some(info),
            _ => None,
        })
        .flatten()
}

fn untagged_vlan_of(port: &LinkMessage) -> Option<u16> {
    let vlans = port.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::AfSpecBridge(vlans) => Some(vlans),
        _ => None,
    });
    vlans.flatten().find_map(|vlan| match vlan {
        AfSpecBridge::VlanInfo(vlan) if vlan.flags.contains(BridgeVlanInfoFlags::Pvid) => Some(vlan.vid),
        _ => None,
    })
}

/// A bridge without an address of its own takes the lowest of its ports': `fe` keeps this from ever being the lowest.
/// libvirt and Drainpipe give the guest's tap the guest's address with `fe`, so the next byte differs.
fn port_address(mac: [u8; 6]) -> [u8; 6] {
    let [_, second, rest @ ..] = mac;
    let [third, fourth, fifth, sixth] = rest;
    [0xfe, !second, third, fourth, fifth, sixth]
}

/// A bridge of jumbo frames would fall to the tap's 1500 bytes.
fn mtu(bridge: &LinkMessage) -> u32 {
    let mtu = find(bridge, |attribute| match attribute {
        LinkAttribute::Mtu(bytes) => Some(*bytes),
        _ => None,
    });
    mtu.unwrap_or(ETHERNET_MTU)
}
