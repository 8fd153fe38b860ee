//! Speeds of links, by ethtool's netlink family (Linux 5.6 and later).

use std::collections::HashMap;

use ethtool::{EthtoolAttr, EthtoolError, EthtoolHandle, EthtoolHeader, EthtoolLinkModeAttr};
use futures_util::TryStreamExt;
use rustix::io::Errno;

use crate::network::{BUSY_PAUSE, within_deadline};

/// `SPEED_UNKNOWN` of linux/ethtool.h: no carrier, or the driver has no notion of speed.
const SPEED_UNKNOWN: u32 = u32::MAX;

/// Speeds in Mb/s by link index, of those links whose driver knows one.
///
/// Empty when the kernel has no ethtool family: a speed is advice, never a reason to fail.
pub(crate) async fn speeds_mbps(ethtool: EthtoolHandle) -> HashMap<u32, u64> {
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

async fn read_speeds(mut ethtool: EthtoolHandle) -> Result<HashMap<u32, u64>, EthtoolError> {
    let messages = loop {
        let answers = ethtool.link_mode().get(None).execute().await?;
        match answers.try_collect::<Vec<_>>().await {
            Err(error) if is_busy(&error) => tokio::time::sleep(BUSY_PAUSE).await,
            messages => break messages?,
        }
    };
    Ok(messages.iter().filter_map(|message| index_and_speed(&message.payload.nlas)).collect())
}

fn is_busy(error: &EthtoolError) -> bool {
    matches!(
        error,
        EthtoolError::NetlinkError(message)
            if Errno::from_io_error(&message.to_io()) == Some(Errno::BUSY)
    )
}

fn index_and_speed(attributes: &[EthtoolAttr]) -> Option<(u32, u64)> {
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
    let speed = link_modes().find_map(|attribute| match attribute {
        EthtoolLinkModeAttr::Speed(speed) => Some(*speed),
        _ => None,
    })?;
    (speed != SPEED_UNKNOWN && speed != 0).then_some((index, u64::from(speed)))
}
