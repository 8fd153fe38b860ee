//! A VM that is paused, or has just arrived, gets its host's cores first for a moment.
//!
//! Its guest is silent and has to catch up; the others are not. On a busy host, its last bytes and its vCPUs would
//! wait for the others, and for running transfers: docs/decisions/0048. And all of them would wait for the host's work
//! in other sessions: 60. So would each step of a migration before its memory is sent: 106.

use std::collections::BTreeSet;
use std::io;
use std::process;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drainpipe_hypervisor::{Machine, Vm};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, warn};

use crate::store::lock::lock;
use crate::vms::Vms;
use crate::vms::session_weight;

/// Without KVM a guest takes 0.1 s of CPU until it answers again.
const CATCHES_UP_FOR: Duration = Duration::from_secs(1);

/// For so long the session of a VM goes before others, from its pause on and once more from where it runs. Whatever it
/// waits for after that is no core.
const SESSION_FIRST_FOR: Duration = Duration::from_secs(1);

/// For so long the agent's session does, from each step before memory is sent on: docs/decisions/0106.
const STEP_FIRST_FOR: Duration = Duration::from_secs(2);

/// For so long both do from where memory is sent. Small VMs are over by then; larger ones have their turns with others.
const SENDING_FIRST_FOR: Duration = Duration::from_secs(10);

/// The sessions that go before others: those of a VM and of the agent, whose relay it may need.
#[derive(Debug)]
pub(crate) struct FirstSessions {
    lease: Arc<Mutex<Option<Lease>>>,
    vms: Arc<Vms>,
}

#[derive(Debug)]
struct Lease {
    until: Instant,
    processes: BTreeSet<u32>,
}

impl FirstSessions {
    /// None yet, on a host that has these VMs.
    pub(crate) fn new(vms: &Arc<Vms>) -> Self {
        Self { lease: Arc::default(), vms: Arc::clone(vms) }
    }

    /// Lets a VM go first. What cannot be had is done without.
    pub(crate) fn begin(&self, vmm: &dyn Machine) {
        let vm = &vmm.spec().spec().name;
        if let Err(error) = vmm.go_first() {
            debug!(%vm, %error, "cannot get priority");
        }
        if let Err(error) = self.raise([vmm.pid(), process::id()].into(), SESSION_FIRST_FOR) {
            debug!(%vm, %error, "its session cannot get priority");
        }
    }

    /// Lets the agent take a step before others' work, with the QEMU on which it depends, where there is one. On busy cores
    /// it would wait for one at each of hundreds of wakeups.
    pub(crate) fn begin_step(&self, vmm: Option<&dyn Machine>) {
        self.begin_for(vmm, STEP_FIRST_FOR);
    }

    /// The same for the beginning of memory.
    pub(crate) fn begin_sending(&self, vmm: &dyn Machine) {
        self.begin_for(Some(vmm), SENDING_FIRST_FOR);
    }

    fn begin_for(&self, vmm: Option<&dyn Machine>, for_so_long: Duration) {
        let processes = vmm.map(Vm::pid).into_iter().chain([process::id()]).collect();
        if let Err(error) = self.raise(processes, for_so_long) {
            debug!(%error, "the agent's session cannot get priority");
        }
    }

    fn raise(&self, processes: BTreeSet<u32>, for_so_long: Duration) -> io::Result<()> {
        let until = Instant::now() + for_so_long;
        let mut lease = lock(&self.lease);
        let raised: Vec<io::Result<bool>> = processes.iter().map(|pid| session_weight::raise(*pid)).collect();
        if let Some(lease) = lease.as_mut() {
            lease.extend(until, processes);
        } else if raised.iter().any(|raised| matches!(raised, Ok(true))) {
            *lease = Some(Lease { until, processes });
            tokio::spawn(end_sessions(Arc::clone(&self.lease), Arc::clone(&self.vms)));
        }
        raised.into_iter().collect::<io::Result<Vec<bool>>>().map(drop)
    }
}

impl Lease {
    /// For these too, and no shorter for any.
    fn extend(&mut self, until: Instant, processes: BTreeSet<u32>) {
        self.until = self.until.max(until);
        self.processes.extend(processes);
    }
}

/// With the agent it ends, though nobody waits for that any more.
impl Drop for FirstSessions {
    fn drop(&mut self) {
        end_lease(&mut lock(&self.lease), || others_in_session(&self.vms));
    }
}

async fn end_sessions(lease: Arc<Mutex<Option<Lease>>>, vms: Arc<Vms>) {
    while let Some(until) = end_of_lease(&lease, || others_in_session(&vms)) {
        sleep_until(until).await;
    }
}

/// Until when it holds still; ends it if that is over.
fn end_of_lease(lease: &Mutex<Option<Lease>>, others: impl FnOnce() -> Vec<u32>) -> Option<Instant> {
    let mut lease = lock(lease);
    let until = lease.as_ref()?.until;
    if Instant::now() < until {
        return Some(until);
    }
    end_lease(&mut lease, others);
    None
}

fn end_lease(lease: &mut Option<Lease>, others: impl FnOnce() -> Vec<u32>) {
    let Some(lease) = lease.take() else { return };
    lease.processes.into_iter().chain(others()).for_each(lower_session);
}

/// If a QEMU has ended by then, its session may hold other processes.
fn others_in_session(vms: &Vms) -> Vec<u32> {
    vms.all_running().iter().map(|vmm| vmm.pid()).collect()
}

fn lower_session(pid: u32) {
    if let Err(error) = session_weight::lower(pid) {
        warn!(pid, %error, "its session still has priority over others: `echo 0 > /proc/{pid}/autogroup` ends that");
    }
}

/// Ends that as soon as its guest, which runs again, has caught up.
pub(crate) fn end_soon(vmm: &Arc<dyn Machine>) {
    let vmm = Arc::clone(vmm);
    tokio::spawn(async move {
        sleep(CATCHES_UP_FOR).await;
        end(&*vmm);
    });
}

/// Ends what an agent before this one has begun and not ended.
pub(crate) fn end_all(vms: &Vms) {
    lower_session(process::id());
    for vmm in vms.all_running() {
        end(&*vmm);
        lower_session(vmm.pid());
    }
}

/// Ends that.
pub(crate) fn end(vmm: &dyn Machine) {
    if let Err(error) = vmm.take_turns() {
        debug!(vm = %vmm.spec().spec().name, %error, "may still have priority");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vms::session_weight::ORDINARY;
    use crate::vms::session_weight::tests::OwnSession;

    #[test]
    fn a_vms_pause_shortens_no_lease_of_another_ones_step() {
        let now = Instant::now();
        let mut lease = Lease { until: now + STEP_FIRST_FOR, processes: [1].into() };
        lease.extend(now + SESSION_FIRST_FOR, [2].into());
        assert_eq!((lease.until, lease.processes.len()), (now + STEP_FIRST_FOR, 2));
        lease.extend(now + 2 * STEP_FIRST_FOR, [2].into());
        assert_eq!(lease.until, now + 2 * STEP_FIRST_FOR);
    }

    #[test]
    fn a_lease_ends_by_itself_for_all_sessions_that_had_it() {
        let Some(sessions) = OwnSession::begin().zip(OwnSession::begin()) else { return };
        let (one, other) = (sessions.0.pid(), sessions.1.pid());
        for pid in [one, other] {
            if session_weight::raise(pid).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
            {
                eprintln!("SKIPPED: nobody goes first without CAP_SYS_NICE");
                return;
            }
        }
        let now = Instant::now();
        let lease = |until| Mutex::new(Some(Lease { until, processes: [one].into() }));
        let holds = lease(now + CATCHES_UP_FOR);
        assert_eq!(end_of_lease(&holds, || panic!("it holds still")), Some(now + CATCHES_UP_FOR));
        assert_ne!(sessions.0.nice(), Some(ORDINARY));
        let is_over = lease(now);
        assert_eq!(end_of_lease(&is_over, || vec![other]), None);
        assert_eq!((sessions.0.nice(), sessions.1.nice()), (Some(ORDINARY), Some(ORDINARY)));
        assert!(lock(&is_over).is_none());
    }
}
