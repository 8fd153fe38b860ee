//! A machine on which more programs want a core than it has cores.

use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::program::Running;

/// The load.
const PROGRAMS: usize = 16;

/// The programs end after this much CPU time if this process is killed: each gets a part of a core.
const CPU_SECONDS_MAX: u64 = 60;

/// The machine on which all labs run. It is busy while at least one of them wants that.
#[derive(Default)]
pub(super) struct Machine(Mutex<Programs>);

#[derive(Default)]
struct Programs {
    wanted_by: usize,
    running: Vec<Running>,
}

/// Keeps the machine busy until it is dropped.
pub(super) struct Busy(Arc<Machine>);

impl Busy {
    pub(super) fn begin(machine: &Arc<Machine>) -> Self {
        let mut programs = machine.programs();
        programs.wanted_by += 1;
        if programs.running.is_empty() {
            // Each has its own session. Otherwise kernels would give all of them together as much as each agent and
            // each QEMU.
            let burn = format!("ulimit -t {CPU_SECONDS_MAX}; while :; do :; done");
            let start = |_| {
                let mut command = Command::new("setsid");
                command.args(["sh", "-c", &burn]);
                Running::start(command)
            };
            programs.running = (0..PROGRAMS).map(start).collect();
        }
        drop(programs);
        Self(Arc::clone(machine))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut programs = self.0.programs();
        programs.wanted_by -= 1;
        if programs.wanted_by == 0 {
            programs.running.clear();
        }
    }
}

impl Machine {
    fn programs(&self) -> MutexGuard<'_, Programs> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
