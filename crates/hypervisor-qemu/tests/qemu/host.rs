//! Real QEMUs for tests.

use std::path::Path;
use std::time::{Duration, Instant};

use drainpipe_hypervisor::{HypervisorFacts, Role, VmDirectory, VmSpec};
use drainpipe_hypervisor_qemu::{AttachError, Launcher, Privileges, QemuUser, RuntimePaths, Vmm, probe};
use rustix::process::{Pid, Signal, kill_process};

/// Long enough for a busy machine; no test waits this long when all is well.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// QEMU runs as another user, if that needs no more than this machine has.
pub(crate) fn launcher(qemu: &Path) -> Launcher {
    let own = QemuUser::own();
    Launcher {
        program: env!("CARGO_BIN_EXE_drainpipe-launch").into(),
        arguments: vec![],
        user: if own.is_root() { QemuUser::of_lab(qemu) } else { own },
        binary: qemu.to_owned(),
    }
}

/// Every QEMU to test with: the host's, and those that `DRAINPIPE_TEST_QEMU` lists, separated by
/// colons.
pub(crate) async fn qemus() -> Vec<HypervisorFacts> {
    let more = std::env::var("DRAINPIPE_TEST_QEMU").unwrap_or_default();
    let more = more.split(':').filter(|path| !path.is_empty());
    let scratch = tempfile::tempdir().expect("a directory");
    let mut found = Vec::new();
    for binary in std::iter::once("qemu-system-x86_64").chain(more) {
        match probe(&Privileges::own(), &launcher(Path::new(binary)), scratch.path(), DEADLINE).await {
            Ok(facts) => found.push(facts),
            Err(error) => eprintln!("SKIPPED: {error}"),
        }
    }
    found
}

/// An agent's runtime directory, whose VMs are ended with the test, however that ends.
pub(crate) struct Host {
    directory: tempfile::TempDir,
    pub(crate) facts: HypervisorFacts,
}

impl Host {
    pub(crate) fn new(facts: &HypervisorFacts) -> Self {
        Self { directory: tempfile::tempdir().expect("a directory"), facts: facts.clone() }
    }

    pub(crate) fn runtime_directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn paths(&self, spec: &VmSpec) -> RuntimePaths {
        RuntimePaths::new(self.runtime_directory(), &spec.name).expect("a short path")
    }

    pub(crate) async fn start(&self, spec: &VmSpec, role: Role) -> Vmm {
        let resolved = spec.resolve(&self.facts).expect("this host can");
        Vmm::start(
            &Privileges::own(),
            &launcher(&self.facts.binary),
            resolved,
            self.paths(spec),
            b"{}",
            role,
            DEADLINE,
        )
        .await
        .expect("QEMU starts")
    }

    /// Attaches to a VM's QEMU, as a restarted agent does.
    pub(crate) async fn attach(&self, spec: &VmSpec) -> Result<Vmm, AttachError> {
        Vmm::attach(&Privileges::own(), self.paths(spec), DEADLINE).await
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let runtime_directory = self.runtime_directory();
        let clear_all = async || {
            for name in VmDirectory::list(runtime_directory).expect("readable") {
                let paths = RuntimePaths::new(runtime_directory, &name).expect("a short path");
                if let Some(pid) = Vmm::living(&paths).expect("readable").and_then(process_of) {
                    kill_process(pid, Signal::KILL).expect("it lives");
                }
                let end = Instant::now() + DEADLINE;
                while Vmm::clear(&paths).is_err() && Instant::now() < end {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        // A runtime of its own: the test's cannot be waited for in a drop.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.expect("a runtime").block_on(clear_all());
            });
        });
    }
}

/// A small guest: firmware without a disk to boot.
pub(crate) fn small_vm(name: &str) -> VmSpec {
    let text = format!(
        "name = \"{name}\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\naccelerator = \"tcg\"\n"
    );
    VmSpec::from_toml(&text, Path::new("test.toml")).expect("valid")
}

pub(crate) fn process_of(id: u32) -> Option<Pid> {
    i32::try_from(id).ok().and_then(Pid::from_raw)
}
