//! Ports of the migration range: for QEMU, trials and the watch, one after the other.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use drainpipe_engine::problem::Problem;

use crate::agent::Agent;

/// Where the next search begins.
#[derive(Debug, Default)]
pub(crate) struct MigrationPorts {
    next: AtomicU16,
}

impl MigrationPorts {
    /// The configured ports, beginning behind the one that was tried last: a port that has just been
    /// closed may not be free at once.
    fn in_turn(&self, agent: &Agent) -> impl Iterator<Item = u16> + use<> {
        let ports: Vec<u16> = agent.config.migration_ports.ports().collect();
        let first = usize::from(self.next.fetch_add(1, Ordering::Relaxed)) % ports.len();
        let count = ports.len();
        (0..count).map(move |offset| ports[(first + offset) % count])
    }
}

/// Takes a port of the range: the first of which `attempt` does not say, by `None`, that it is taken.
pub(crate) async fn take<T, Attempt>(
    agent: &Agent,
    mut attempt: impl FnMut(u16) -> Attempt,
) -> Result<T, Problem>
where
    Attempt: Future<Output = Result<Option<T>, Problem>>,
{
    for port in agent.ports.in_turn(agent) {
        if let Some(taken) = attempt(port).await? {
            return Ok(taken);
        }
    }
    Err(Problem::failed(format!(
        "all migration ports of {} are taken: widen `migration_ports` in its agent.toml",
        agent.name()
    )))
}

/// What `bind` made; none if the port is somebody else's.
pub(crate) fn unless_in_use<T>(bound: io::Result<T>) -> io::Result<Option<T>> {
    match bound {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
        bound => bound.map(Some),
    }
}
