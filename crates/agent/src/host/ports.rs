//! Ports of the migration range: for QEMU, tests and the watch, one after the other.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use drainpipe_engine::problem::Problem;

use crate::store::config::PortRange;

/// The migration range of a host.
#[derive(Debug)]
pub(crate) struct MigrationPorts {
    host: String,
    range: PortRange,
    // Where the next search begins.
    next: AtomicU16,
}

impl MigrationPorts {
    /// Those that are configured for `host`.
    pub(crate) fn new(host: &str, range: PortRange) -> Self {
        Self { host: host.into(), range, next: AtomicU16::default() }
    }

    /// The configured ports, beginning behind the one that was tried last: a port that has just been
    /// closed may not be free at once.
    fn in_turn(&self) -> impl Iterator<Item = u16> + use<> {
        let ports: Vec<u16> = self.range.ports().collect();
        let first = usize::from(self.next.fetch_add(1, Ordering::Relaxed)) % ports.len();
        let count = ports.len();
        (0..count).map(move |offset| ports[(first + offset) % count])
    }

    /// Takes the first port of the range that `attempt` does not report as taken, by `None`.
    pub(crate) async fn take<T, Attempt>(&self, mut attempt: impl FnMut(u16) -> Attempt) -> Result<T, Problem>
    where
        Attempt: Future<Output = Result<Option<T>, Problem>>,
    {
        for port in self.in_turn() {
            if let Some(taken) = attempt(port).await? {
                return Ok(taken);
            }
        }
        Err(Problem::failed(format!(
            "all migration ports of {} are taken: widen `migration_ports` in its agent.toml",
            self.host
        )))
    }
}

/// What `bind` made; none if the port is somebody else's.
pub(crate) fn unless_in_use<T>(bound: io::Result<T>) -> io::Result<Option<T>> {
    match bound {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        bound => bound.map(Some),
    }
}
