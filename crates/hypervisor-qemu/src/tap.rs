//! Joining a VM's tap devices to the host's bridges, in the network namespace of this process.

use futures_util::TryStreamExt;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::{Handle, LinkUnspec};

use crate::command_line::tap_name;
use drainpipe_hypervisor::spec::{MacAddress, ResolvedSpec};

/// Why a NIC of a VM has no network.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel's netlink interface cannot be reached.
    #[error("cannot open a netlink socket: {0}")]
    Netlink(#[source] std::io::Error),
    /// The bridge or the tap is not there.
    #[error(
        "there is no network interface `{name}`: {source}; create the bridge that `nic.{nic_index}` names"
    )]
    Missing {
        /// The interface looked for.
        name: String,
        /// Index of the NIC in the specification.
        nic_index: usize,
        /// What the kernel said.
        source: rtnetlink::Error,
    },
    /// The tap cannot join.
    #[error(
        "cannot join `{tap}` to `{bridge}`: {source}; is `{bridge}` a bridge, and has the agent CAP_NET_ADMIN?"
    )]
    Join {
        /// The tap device.
        tap: String,
        /// What it should join.
        bridge: String,
        /// What the kernel said.
        source: rtnetlink::Error,
    },
}

/// Joins the taps that QEMU made for this VM to their bridges and takes them up.
pub(crate) async fn attach_all(spec: &ResolvedSpec) -> Result<(), TapError> {
    if spec.macs().is_empty() {
        return Ok(());
    }
    let (connection, handle, _) = rtnetlink::new_connection().map_err(TapError::Netlink)?;
    let connection = tokio::spawn(connection);
    let joined = attach_each(&handle, spec).await;
    connection.abort();
    joined
}

async fn attach_each(handle: &Handle, spec: &ResolvedSpec) -> Result<(), TapError> {
    let nics = spec.spec().nics.iter().zip(spec.macs());
    for (nic_index, (nic, mac)) in nics.enumerate() {
        let tap = tap_name(&spec.spec().name, nic_index);
        let bridge_link = find(handle, &nic.bridge, nic_index).await?;
        let tap_link = find(handle, &tap, nic_index).await?;
        let message = LinkUnspec::new_with_index(tap_link.header.index)
            .controller(bridge_link.header.index)
            .address(tap_address(*mac))
            .mtu(mtu(&bridge_link))
            .up()
            .build();
        handle.link().set(message).execute().await.map_err(|source| TapError::Join {
            tap,
            bridge: nic.bridge.clone(),
            source,
        })?;
    }
    Ok(())
}

async fn find(handle: &Handle, name: &str, nic_index: usize) -> Result<LinkMessage, TapError> {
    let missing = |source| TapError::Missing { name: name.to_owned(), nic_index, source };
    let mut links = handle.link().get().match_name(name.to_owned()).execute();
    links.try_next().await.map_err(missing)?.ok_or_else(|| missing(rtnetlink::Error::RequestFailed))
}

/// A bridge without an address of its own takes the lowest of its ports', and changes it when that
/// port goes: `fe` at the start keeps a tap from ever being the lowest.
fn tap_address(mac: MacAddress) -> Vec<u8> {
    let mut octets = mac.octets();
    octets[0] = 0xfe;
    octets.to_vec()
}

/// A bridge of jumbo frames would fall to the tap's 1500 bytes.
fn mtu(bridge: &LinkMessage) -> u32 {
    let mtu = bridge.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Mtu(bytes) => Some(*bytes),
        _ => None,
    });
    mtu.unwrap_or(1500)
}
