//! How a fake hypervisor's connections keep a limit: by the kernel if possible, and otherwise by the hypervisor
//! itself.

use drainpipe_hypervisor::SourceVm;
use drainpipe_hypervisor::fake::{Act, FakeVm, Fault};

use super::*;
use crate::test_host::{NOBODY, TestHost, definition};

const LIMIT_MBPS: u64 = 800;

/// A VM that is about to send.
struct Sender {
    host: TestHost,
    vm: Arc<FakeVm>,
}

impl Sender {
    fn new() -> Self {
        let host = TestHost::new();
        let vm = host.runs_by_others(&definition("web"));
        Self { host, vm }
    }

    /// A pacer over this many connections, within the limit.
    fn pacer(&self, connections: usize) -> Pacer {
        let vmm: Arc<dyn Machine> = Arc::clone(&self.vm) as _;
        let pacer = Pacer::new(vmm, NOBODY, connections);
        pacer.set(Some(LIMIT_MBPS));
        pacer
    }

    /// Orders the VM to send, as its migration does.
    fn begin(&self, pacer: &Pacer) -> Pacing {
        self.host.block_on(async {
            self.vm.set_bandwidth(pacer.hypervisor_begins_with_mbps(), QMP_DEADLINE).await.unwrap();
            pacer.begin()
        })
    }

    fn until(&self, what: impl Fn(&FakeVm) -> bool) {
        self.host.block_on(async {
            while !what(&self.vm) {
                sleep(Duration::from_millis(1)).await;
            }
        });
    }

    /// Whether each of this many connections is paced, and all of them together are within this limit.
    fn are_within(vm: &FakeVm, connections: usize, mbps: u64) -> bool {
        let paces = vm.paces();
        let bytes_per_s = paces.iter().fold(0_u64, |sum, pace| sum.saturating_add(pace.bytes_per_s));
        // The kernel sends less than it may (`pacing`), so its limit may be a little higher.
        let most = mbps * BYTES_PER_S_OF_MBPS * 3 / 2;
        paces.len() == connections && bytes_per_s <= most
    }
}

#[test]
fn nothing_goes_unpaced_before_all_connections_are_found() {
    let sender = Sender::new();
    let pacer = sender.pacer(2);
    assert_eq!(pacer.hypervisor_begins_with_mbps(), Some(0));
    let _pacing = sender.begin(&pacer);
    sender.until(|vm| Sender::are_within(vm, 1, LIMIT_MBPS));
    assert_eq!(sender.vm.bandwidth_mbps(), Some(0), "one is not there yet");
    sender.vm.has_connections(2);
    sender.until(|vm| vm.bandwidth_mbps().is_none());
    assert!(Sender::are_within(&sender.vm, 2, LIMIT_MBPS));
}

#[test]
fn a_limit_that_changes_while_a_vm_moves_is_kept_and_ends() {
    let sender = Sender::new();
    let pacer = sender.pacer(1);
    let _pacing = sender.begin(&pacer);
    sender.until(|vm| vm.bandwidth_mbps().is_none());
    pacer.set(Some(LIMIT_MBPS / 8));
    sender.until(|vm| Sender::are_within(vm, 1, LIMIT_MBPS / 8));
    pacer.set(None);
    sender.until(|vm| vm.paces() == [Pace::NONE]);
    pacer.set(Some(LIMIT_MBPS));
    sender.until(|vm| Sender::are_within(vm, 1, LIMIT_MBPS));
}

#[test]
fn a_limit_that_is_lifted_leaves_nothing_on_the_connections() {
    let sender = Sender::new();
    let pacer = sender.pacer(1);
    let pacing = sender.begin(&pacer);
    sender.until(|vm| Sender::are_within(vm, 1, LIMIT_MBPS));
    sender.host.block_on(async { pacing.lift() });
    sender.until(|vm| vm.paces() == [Pace::NONE]);
}

#[test]
fn where_not_all_connections_are_found_the_hypervisor_keeps_the_limit() {
    let sender = Sender::new();
    let pacer = sender.pacer(4);
    let _pacing = sender.begin(&pacer);
    sender.until(|vm| vm.bandwidth_mbps() == Some(LIMIT_MBPS));
}

#[test]
fn where_its_connections_are_not_ours_the_hypervisor_keeps_the_limit() {
    let sender = Sender::new();
    sender.vm.keeps_connections_to_itself();
    let pacer = sender.pacer(1);
    let _pacing = sender.begin(&pacer);
    sender.until(|vm| vm.bandwidth_mbps() == Some(LIMIT_MBPS));
    pacer.set(Some(LIMIT_MBPS / 2));
    sender.until(|vm| vm.bandwidth_mbps() == Some(LIMIT_MBPS / 2));
}

#[test]
fn a_limit_that_is_left_to_the_hypervisor_is_told_until_it_has_heard() {
    let sender = Sender::new();
    let pacer = sender.pacer(1).left_to_hypervisor();
    assert_eq!(pacer.hypervisor_begins_with_mbps(), Some(LIMIT_MBPS));
    let pacing = sender.begin(&pacer);
    sender.vm.fails_once(Act::SetBandwidth, Fault::Mute);
    pacer.set(Some(LIMIT_MBPS / 2));
    sender.until(|vm| vm.bandwidth_mbps() == Some(LIMIT_MBPS / 2));
    sender.host.block_on(async { pacing.lift() });
    assert_eq!(sender.vm.paces(), [], "its connections are left alone");
}
