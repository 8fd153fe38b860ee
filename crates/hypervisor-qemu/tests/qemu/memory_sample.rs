//! A guest's memory, as seen from outside.

use drainpipe_hypervisor::{MemorySample, Role, VmSpec};
use drainpipe_hypervisor_qemu::{SampleError, Vmm};
use tokio::time::Instant;

use crate::host::{DEADLINE, Host, qemus, small_vm};
use crate::migration::{vm_with_content, wait_for_content};

/// Where the kernel of [`vm_with_content`] starts, in its file and in its segment.
const ENTRY: usize = 0x268;
const FLAT_SEGMENT: usize = 0x300;

/// Changes a byte in each page from 4 to 36 MiB, for ever. Real mode reaches these pages through a segment without
/// limit.
const DIRTIER: [u8; 52] = [
    0xfa, // cli
    0x0f, 0x01, 0x16, 0x00, 0x03, // lgdt [FLAT_SEGMENT]
    0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0, // protected mode on
    0xbb, 0x08, 0x00, 0x8e, 0xc3, // es = 8
    0x24, 0xfe, 0x0f, 0x22, 0xc0, // and off
    0x66, 0xbf, 0x00, 0x00, 0x40, 0x00, // edi = 4 MiB
    0x67, 0x26, 0xfe, 0x07, // inc byte es:[edi]
    0x66, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // edi += 4096
    0x66, 0x81, 0xff, 0x00, 0x00, 0x40, 0x02, // edi - 36 MiB
    0x72, 0xec, // below: next page
    0xeb, 0xe4, // else: again
];

const DESCRIPTORS: [u8; 32] = [
    0x0f, 0, 0x10, 0x03, 0x01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // limit; address of what follows
    0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0x92, 0xcf, 0, // none; data, 4 GiB
];

/// Replaces the kernel of [`vm_with_content`] by the [`DIRTIER`].
pub(crate) fn have_it_write(spec: &VmSpec) {
    let kernel = spec.kernel.as_ref().expect("it has one");
    let mut image = std::fs::read(kernel).expect("readable");
    image[ENTRY..ENTRY + DIRTIER.len()].copy_from_slice(&DIRTIER);
    image[FLAT_SEGMENT..FLAT_SEGMENT + DESCRIPTORS.len()].copy_from_slice(&DESCRIPTORS);
    std::fs::write(kernel, image).expect("writable");
}

async fn sample(vmm: &Vmm) -> MemorySample {
    when_not_too_slow(|| vmm.sample_memory()).await
}

/// The result of a look, which may be too slow for some time on a busy host.
async fn when_not_too_slow<T, F: Future<Output = Result<T, SampleError>>>(look: impl Fn() -> F) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match look().await {
            Err(SampleError::TooSlow { .. }) if Instant::now() < end => {}
            seen => return seen.expect("QEMU runs"),
        }
    }
}

#[tokio::test]
async fn memory_that_no_guest_has_used_is_zero_and_does_not_change() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&small_vm("unused"), Role::Fresh).await;
        let sample = sample(&vmm).await;
        eprintln!("QEMU {}: {sample:?}", facts.version);
        assert!(sample.zero_share > 0.95 && sample.zero_share <= 1.0, "{sample:?}");
        // The firmware's stack changes all the time.
        assert!(sample.dirty_bytes_per_s.min(sample.dirty_set_bytes) <= 2 << 20, "{sample:?}");
    }
}

#[tokio::test]
async fn content_and_its_changes_are_seen() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let content = tempfile::tempdir().expect("a directory");
        let spec = vm_with_content("content", content.path());
        let vmm = host.start(&spec, Role::Fresh).await;
        wait_for_content(&vmm).await;
        let began = Instant::now();
        let sample = sample(&vmm).await;
        eprintln!("QEMU {}: {sample:?} in {:?}", facts.version, began.elapsed());
        assert_eq!(sample.contents.bytes().len(), 2 << 20, "there is more than that");
        let (zero_share, contents) = when_not_too_slow(|| vmm.sample_contents()).await;
        assert_eq!(contents.bytes().len(), 2 << 20);
        assert!((zero_share - 0.48).abs() < 0.1, "by fewer pages: {zero_share}");
        // 32 of 64 MiB, and what the firmware left.
        assert!((sample.zero_share - 0.48).abs() < 0.04, "{sample:?}");
        // The firmware's stack changes all the time.
        assert!(sample.dirty_bytes_per_s.min(sample.dirty_set_bytes) <= 2 << 20, "{sample:?}");
        vmm.destroy(DEADLINE).await.expect("ends");

        have_it_write(&spec);
        let vmm = host.start(&spec, Role::Fresh).await;
        wait_until_dirty(&vmm).await;
    }
}

/// Waits until each page of 32 MiB changes many times a second. While the guest boots, others do.
async fn wait_until_dirty(vmm: &Vmm) {
    let end = Instant::now() + DEADLINE;
    loop {
        let sample = sample(vmm).await;
        eprintln!("QEMU {}: {sample:?}", vmm.version());
        // Each changes many times between two looks.
        if (28..=36).contains(&(sample.dirty_set_bytes >> 20)) && sample.dirty_bytes_per_s >> 20 > 200 {
            return;
        }
        assert!(Instant::now() < end, "32 MiB that change all the time are expected: {sample:?}");
    }
}

#[tokio::test]
async fn of_a_qemu_that_has_ended_nothing_is_said() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&small_vm("ended"), Role::Fresh).await;
        vmm.destroy(DEADLINE).await.expect("ends");
        let error = vmm.sample_memory().await.expect_err("it has ended");
        assert!(matches!(error, SampleError::Process { .. }), "{error}");
    }
}
