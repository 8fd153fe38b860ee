//! How many threads pack, by the idle cores.

use std::sync::PoisonError;

use drainpipe_engine::host::idle_cores::Allowance;

use super::Pool;
use crate::figures::PackingTime;
use crate::host_cpu::HostCpu;
use crate::sender::controller::{STEER_EVERY, may_pack};
use crate::sockets::lock;

/// Steers until all is over.
pub(super) fn run(pool: &Pool) {
    let settings = &pool.settings;
    let this = settings.concurrent.begin();
    let mut host = HostCpu::new(settings.cpus.clone());
    let mut allowance = Allowance::new(settings.cores, settings.gives_way);
    while let Some(packing) = wait(pool) {
        if let Some(sample) = host.sample(packing) {
            pool.allow(may_pack(&mut allowance, sample, &this, settings.gives_way));
        }
    }
}

/// What packing took meanwhile; none once all is over.
fn wait(pool: &Pool) -> Option<PackingTime> {
    let waited = pool.steer.wait_timeout_while(lock(&pool.inner), STEER_EVERY, |inner| !inner.is_closed);
    let (mut inner, _) = waited.unwrap_or_else(PoisonError::into_inner);
    (!inner.is_closed).then(|| std::mem::take(&mut inner.packing))
}
