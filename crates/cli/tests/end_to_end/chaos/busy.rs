//! A machine whose cores are wanted by more programs than it has cores for.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::program::Running;

/// A load of so much.
const PROGRAMS: usize = 16;

/// They end by then, should this process be killed: they get a part of a core each.
const CPU_SECONDS_MAX: u64 = 60;

/// All labs of this process are on one machine: it is as busy when several of them want it to be.
static SHARED: Mutex<Programs> = Mutex::new(Programs { wanted_by: 0, running: vec![] });

struct Programs {
    wanted_by: usize,
    running: Vec<Running>,
}

/// Keeps the machine busy until it is dropped.
pub(super) struct Busy(());

impl Busy {
    pub(super) fn begin() -> Self {
        let mut shared = shared();
        shared.wanted_by += 1;
        if shared.running.is_empty() {
            // In sessions of their own, or kernels would give all of them together what they give each agent and each QEMU.
            let burn = format!("ulimit -t {CPU_SECONDS_MAX}; while :; do :; done");
            let start = |_| {
                let mut command = Command::new("setsid");
                command.args(["sh", "-c", &burn]);
                Running::start(command)
            };
            shared.running = (0..PROGRAMS).map(start).collect();
        }
        Self(())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut shared = shared();
        shared.wanted_by -= 1;
        if shared.wanted_by == 0 {
            shared.running.clear();
        }
    }
}

fn shared() -> MutexGuard<'static, Programs> {
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}
