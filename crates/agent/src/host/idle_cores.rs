//! Cores that are left to migrations, as they were before migrations took some of them.

use std::sync::Mutex;

use drainpipe_engine::host::free_cores::{CoresLook, FreeCores};

use crate::store::lock::lock;

/// What the last looks have shown.
#[derive(Debug, Default)]
pub(crate) struct IdleCores(Mutex<FreeCores>);

impl IdleCores {
    /// The idle cores among those on which the agent may run, whether they may pack or only pass on, plus those that
    /// migrations use. None until they were counted.
    pub(crate) fn known(&self) -> Option<f64> {
        lock(&self.0).free()
    }

    /// What one thread more gets of a core there; none until it was counted.
    pub(crate) fn share(&self) -> Option<f64> {
        lock(&self.0).share()
    }

    /// Takes a look into account.
    pub(crate) fn look(&self, look: CoresLook) {
        lock(&self.0).look(look);
    }

    /// The agent may run on other cores now, about which nothing is known.
    pub(crate) fn forget(&self) {
        *lock(&self.0) = FreeCores::default();
    }
}
