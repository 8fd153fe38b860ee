//! How large TCP makes the packets of a slow connection.

use crate::{Change, Error};

/// Over a way of less than 0.5 ms, TCP makes packets of 64 KiB however slow the pace of their connection is, since Linux 5.18
/// (`tcp_tso_autosize`). After such a packet the connection waits for as long as the pace asks: at 20 KB/s for 3 s, whatever
/// pace it is given meanwhile.
pub(crate) const KEY: &str = "net.ipv4.tcp_tso_rtt_log";

/// By the pace alone: what goes in 1 ms, two segments at least.
pub(crate) const BY_PACE: &str = "0";

/// Packets as small as the pace of their connection is slow, of IPv4 and IPv6; none where this kernel has no others.
pub fn packets_by_pace() -> Result<Option<Change>, Error> {
    match crate::sysctl::read(KEY) {
        Ok(_) => Ok(Some(Change::Sysctl { key: KEY.to_owned(), value: BY_PACE.to_owned() })),
        Err(Error::SysctlMissing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
