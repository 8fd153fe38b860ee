//! The hypervisor of a test's guests. Most tests mean the same for Drainpipe's own VMs and for libvirt's domains, and
//! run with both.

use std::cell::Cell;
use std::thread::LocalKey;

use crate::{options, with_libvirt};

/// The hypervisor of the guests in the test on this thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// QEMU, driven by the agents.
    Qemu,
    Libvirt,
}

// The harness takes a test as a function without arguments, and runs it on one thread. So the thread holds what the
// test runs with.
thread_local! {
    static OF_TEST: Cell<Backend> = const { Cell::new(Backend::Qemu) };
    static HAS_NEWER_QEMU: Cell<bool> = const { Cell::new(false) };
    static HAS_NEWER_LIBVIRT: Cell<bool> = const { Cell::new(false) };
}

/// Runs a test with the newer libvirt in its labs. It must be installed.
pub(crate) fn with_newer_libvirt(test: fn()) {
    with(&HAS_NEWER_LIBVIRT, test);
}

/// Runs a test with a newer QEMU if there is one.
pub(crate) fn with_newer_qemu(test: fn()) {
    with(&HAS_NEWER_QEMU, test);
}

fn with(flag: &'static LocalKey<Cell<bool>>, test: fn()) {
    /// Restores the value, also if the test fails.
    struct Before(&'static LocalKey<Cell<bool>>, bool);
    impl Drop for Before {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _before = Before(flag, flag.replace(true));
    test();
}

/// An argument of `lab up`. If it asks for libvirt, the result names the daemon that the test uses.
pub(crate) fn naming_daemon(argument: &str) -> String {
    let newer = HAS_NEWER_LIBVIRT.get().then(options::newer_libvirt).flatten();
    match with_libvirt::daemon().or(newer) {
        Some(daemon) if argument == "--libvirt" => format!("--libvirt={}", daemon.display()),
        _ => argument.into(),
    }
}

impl Backend {
    /// The backend of the test that runs on this thread.
    pub(crate) fn of_test() -> Self {
        OF_TEST.get()
    }

    /// The further arguments that a lab with these needs.
    pub(crate) fn lab_arguments(self, given: &[&str]) -> Vec<String> {
        let newer = || {
            let qemu = options::other_qemu().filter(|_| !given.contains(&"--qemu"));
            qemu.into_iter().flat_map(|qemu| ["--qemu".into(), qemu])
        };
        match self {
            // QEMU 7.2 loses writes of domains without KVM, so these are refused (docs/decisions/0019).
            Self::Qemu if HAS_NEWER_QEMU.get() || given.contains(&"--libvirt") => newer().collect(),
            Self::Qemu => vec![],
            Self::Libvirt => ["--libvirt".into()].into_iter().chain(newer()).collect(),
        }
    }

    /// Runs a test, and what it starts, with this backend.
    pub(crate) fn run(self, test: fn()) {
        /// Restores the backend for the next test on this thread, also if this one fails.
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
