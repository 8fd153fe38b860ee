//! Watches whether the VM does anything while its memory is sent: its QEMU may not answer for seconds.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::migration::standstill::{StandstillMeter, VcpuSample};
use drainpipe_hypervisor::{Machine, VcpuTime};
use tracing::warn;

use crate::store::lock::lock;
use crate::vms::QMP_DEADLINE;

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Looks until it is dropped. That QEMU is mute shows only while somebody asks it something, as whoever follows the
/// transfer does.
#[derive(Debug)]
pub(super) struct StandstillWatch {
    meter: Arc<Mutex<StandstillMeter>>,
    task: tokio::task::JoinHandle<()>,
}

impl StandstillWatch {
    /// None where the kernel does not tell what CPU a thread has used.
    pub(super) async fn start(vmm: &Arc<dyn Machine>) -> Option<Self> {
        let vcpus = vmm.vcpu_time(QMP_DEADLINE).await.map_err(|error| error.to_string());
        let vcpus = vcpus.and_then(|vcpus| match vcpus.used() {
            Ok(_) => Ok(vcpus),
            Err(error) => Err(error.to_string()),
        });
        let vcpus = vcpus
            .inspect_err(|error| warn!(error, "it is not known whether the VM stands still in flight"))
            .ok()?;
        let meter = Arc::new(Mutex::new(StandstillMeter::default()));
        let task = tokio::spawn(watch(Arc::clone(vmm), vcpus, Arc::clone(&meter)));
        Some(Self { meter, task })
    }

    pub(super) fn longest_ms(&self) -> f64 {
        lock(&self.meter).longest_ms()
    }
}

impl Drop for StandstillWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn watch(vmm: Arc<dyn Machine>, vcpus: Box<dyn VcpuTime>, meter: Arc<Mutex<StandstillMeter>>) {
    let began = Instant::now();
    let ms = |time: Duration| time.as_secs_f64() * 1000.0;
    // When it has ended, there is nothing more to see.
    while let Ok(used) = vcpus.used() {
        let look = VcpuSample {
            now_ms: ms(began.elapsed()),
            mute_since_ms: vmm.owes_answer_since().map(|since| ms(since.saturating_duration_since(began))),
            vcpu_ms: ms(used),
        };
        lock(&meter).record(look);
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
