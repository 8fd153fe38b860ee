//! Speeds of links, by ethtool's netlink family (Linux 5.6 and later).

use std::collections::HashMap;

use ethtool::{EthtoolAttr, EthtoolError, EthtoolHandle, EthtoolHeader, EthtoolLinkModeAttr};
use futures_util::TryStreamExt;
use rustix::io::Errno;

use crate::request::{BUSY_PAUSE, within_deadline};

/// `SPEED_UNKNOWN` of linux/ethtool.h: no carrier, or the driver has no notion of speed.
const SPEED_UNKNOWN: u32 = u32::MAX;

/// What the driver of a link knows of its speed, in Mb/s.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Speeds {
    pub(crate) now_mbps: Option<u64>,
    /// The fastest of the modes that it supports.
    pub(crate) most_mbps: Option<u64>,
}

/// Speeds by link index.
///
/// Empty when the kernel has no ethtool family: a speed is advice, never a reason to fail.
pub(crate) async fn speeds(ethtool: EthtoolHandle) -> HashMap<u32, Speeds> {
    match within_deadline("read the speeds of the links", read_speeds(ethtool)).await {
        Ok(Ok(speeds)) => speeds,
        Ok(Err(error)) => {
            tracing::debug!(%error, "speeds of links are unknown");
            HashMap::new()
        }
        Err(error) => {
            tracing::debug!(%error, "speeds of links are unknown");
            HashMap::new()
        }
    }
}

async fn read_speeds(mut ethtool: EthtoolHandle) -> Result<HashMap<u32, Speeds>, EthtoolError> {
    let messages = loop {
        let answers = ethtool.link_mode().get(None).execute().await?;
        match answers.try_collect::<Vec<_>>().await {
            Err(error) if is_busy(&error) => tokio::time::sleep(BUSY_PAUSE).await,
            messages => break messages?,
        }
    };
    Ok(messages.iter().filter_map(|message| index_and_speeds(&message.payload.nlas)).collect())
}

fn is_busy(error: &EthtoolError) -> bool {
    matches!(
        error,
        EthtoolError::NetlinkError(message)
            if Errno::from_io_error(&message.to_io()) == Some(Errno::BUSY)
    )
}

fn index_and_speeds(attributes: &[EthtoolAttr]) -> Option<(u32, Speeds)> {
    let link_modes = || {
        attributes.iter().filter_map(|attribute| match attribute {
            EthtoolAttr::LinkMode(link_mode) => Some(link_mode),
            _ => None,
        })
    };
    let index = link_modes().find_map(|attribute| match attribute {
        EthtoolLinkModeAttr::Header(header) => header.iter().find_map(|part| match part {
            EthtoolHeader::DevIndex(index) => Some(*index),
            _ => None,
        }),
        _ => None,
    })?;
    let now_mbps = link_modes().find_map(|attribute| match attribute {
        EthtoolLinkModeAttr::Speed(speed) if *speed != SPEED_UNKNOWN && *speed != 0 => {
            Some(u64::from(*speed))
        }
        _ => None,
    });
    let most_mbps = link_modes()
        .filter_map(|attribute| match attribute {
            EthtoolLinkModeAttr::Ours(modes) => modes.iter().filter_map(|mode| speed_of_mode(mode)).max(),
            _ => None,
        })
        .max();
    Some((index, Speeds { now_mbps, most_mbps }))
}

/// As the kernel calls its modes (`link_mode_names` in its `net/ethtool/common.c`), such as `1000baseT/Full`.
/// Others are no speeds: `Autoneg`, `TP`.
fn speed_of_mode(mode: &str) -> Option<u64> {
    mode.split_once("base")?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_as_the_kernel_writes_them() {
        let modes = ["10baseT/Half", "2500baseX/Full", "100000baseLR4_ER4/Full", "Autoneg", "FIBRE", "base"];
        let speeds: Vec<u64> = modes.iter().filter_map(|mode| speed_of_mode(mode)).collect();
        assert_eq!(speeds, [10, 2_500, 100_000]);
    }
}
