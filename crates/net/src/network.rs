//! The connection to the kernel.

use ethtool::EthtoolHandle;
use rtnetlink::Handle;

use crate::Error;
use crate::socket_statistics::SocketStatistics;

/// A connection to the network of the namespace in which it was opened.
///
/// Cheap to clone; its task ends with the last clone.
#[derive(Clone, Debug)]
pub struct Network {
    pub(crate) netlink: Handle,
    pub(crate) ethtool: EthtoolHandle,
    pub(crate) sockets: SocketStatistics,
}

impl Network {
    /// Opens a connection to the network of the calling thread's namespace.
    ///
    /// Must be called within a tokio runtime, which carries the connection's task.
    pub fn open() -> Result<Self, Error> {
        let (connection, netlink, _) = rtnetlink::new_connection().map_err(Error::Open)?;
        tokio::spawn(connection);
        let (connection, ethtool, _) = ethtool::new_connection().map_err(Error::Open)?;
        tokio::spawn(connection);
        let sockets = SocketStatistics::open().map_err(Error::Open)?;
        Ok(Self { netlink, ethtool, sockets })
    }
}
