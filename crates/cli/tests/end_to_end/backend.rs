//! Which hypervisor has the guests of a test: most tests mean the same with Drainpipe's own VMs and with libvirt's domains, and
//! run with both.

use std::cell::Cell;

use crate::options;

/// What has the guests of the test on this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// QEMU, driven by the agents.
    Qemu,
    Libvirt,
}

thread_local! {
    static OF_TEST: Cell<Backend> = const { Cell::new(Backend::Qemu) };
    static HAS_NEWER_QEMU: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with a newer QEMU if there is one.
pub(crate) fn with_newer_qemu(test: fn()) {
    /// Also when this one fails.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            HAS_NEWER_QEMU.set(self.0);
        }
    }
    let _before = Before(HAS_NEWER_QEMU.replace(true));
    test();
}

impl Backend {
    /// Of the test that runs on this thread.
    pub(crate) fn of_test() -> Self {
        OF_TEST.get()
    }

    /// What a lab with these arguments needs beside them.
    pub(crate) fn lab_arguments(self, given: &[&str]) -> Vec<String> {
        let newer = || {
            let qemu = options::other_qemu().filter(|_| !given.contains(&"--qemu"));
            qemu.into_iter().flat_map(|qemu| ["--qemu".into(), qemu])
        };
        match self {
            // QEMU 7.2 loses writes of domains without KVM, which are refused (docs/decisions/0019).
            Self::Qemu if HAS_NEWER_QEMU.get() || given.contains(&"--libvirt") => newer().collect(),
            Self::Qemu => vec![],
            Self::Libvirt => ["--libvirt".into()].into_iter().chain(newer()).collect(),
        }
    }

    /// Runs a test, and what it starts, with this.
    pub(crate) fn run(self, test: fn()) {
        /// Also for the next test on this thread, when this one fails.
        struct Before(Backend);
        impl Drop for Before {
            fn drop(&mut self) {
                OF_TEST.set(self.0);
            }
        }
        let _before = Before(OF_TEST.replace(self));
        test();
    }
}
