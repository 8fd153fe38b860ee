//! A small Linux guest, and its service as a client sees it.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_guest::client::{Control, Heartbeat};
use drainpipe_guest::parameters::KERNEL_OPTIONS;
use drainpipe_guest::protocol::{CONTROL_PORT, Dirtying, HEARTBEAT_PORT, Status, Verification};

use crate::support::eventually;

/// For a boot without KVM on a machine that runs other tests too; alone, it takes 4 s.
const BOOT_DEADLINE: Duration = Duration::from_mins(2);

/// Long enough on a busy machine for a lost packet, which the kernel sends again after 1 s.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

const DEADLINE: Duration = Duration::from_secs(30);

/// A guest without KVM that answers each millisecond does nothing else; and only silences of seconds matter.
const BEAT: Duration = Duration::from_millis(50);

/// The memory that is not filled. With less, it would not suffice for the kernel and its file system, and the guest
/// would power off.
pub(crate) const UNFILLED_MIB: u64 = 112;

/// The machine type that every QEMU in the tests has.
pub(crate) const MACHINE: &str = "pc-q35-7.2";

/// Since this version multifd's channels do not wait for each other; only newer QEMUs have it.
pub(crate) const NEWER_MACHINE: &str = "pc-q35-8.2";

/// What the memory contains.
pub(crate) const MIX: &str = "random:60,text:30,zero:10";

/// A guest of a lab.
pub(crate) struct Guest {
    pub(crate) name: String,
    address: Ipv4Addr,
    namespace: PathBuf,
}

impl Guest {
    /// A guest whose services answer at `address` in the client's `namespace`.
    pub(crate) fn new(name: &str, address: Ipv4Addr, namespace: PathBuf) -> Self {
        Self { name: name.into(), address, namespace }
    }

    /// The address of its services.
    pub(crate) fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Its specification, with all but 112 MiB of its memory filled.
    pub(crate) fn specification(&self, memory_mib: u64, kernel_parameters: &str) -> String {
        let [kernel, initramfs] = image();
        format!(
            "name = \"{name}\"\nmemory_mib = {memory_mib}\nvcpus = 1\nmachine = \"{MACHINE}\"\n\
             accelerator = \"tcg\"\nkernel = \"{kernel}\"\ninitramfs = \"{initramfs}\"\n\
             kernel_command_line = \"{line}\"\n\n\
             [[nic]]\nbridge = \"guests\"\n\n\
             [guest]\nheartbeat = \"{address}:{HEARTBEAT_PORT}\"\ncontrol = \"{address}:{CONTROL_PORT}\"\n",
            name = self.name,
            address = self.address,
            kernel = kernel.display(),
            initramfs = initramfs.display(),
            line = self.kernel_command_line(memory_mib, kernel_parameters),
        )
    }

    /// The command line of its kernel, with all but 112 MiB of its memory filled.
    pub(crate) fn kernel_command_line(&self, memory_mib: u64, kernel_parameters: &str) -> String {
        format!(
            "{KERNEL_OPTIONS} drainpipe.address={address}/24 drainpipe.memory_mib={filled_mib} \
             drainpipe.mix={MIX} {kernel_parameters}",
            address = self.address,
            // A domain that runs only firmware may have less.
            filled_mib = memory_mib.saturating_sub(UNFILLED_MIB),
        )
    }

    /// The same specification with a machine type in which multifd's channels do not wait for each other.
    pub(crate) fn on_newer_machine(specification: &str) -> String {
        specification.replace(MACHINE, NEWER_MACHINE)
    }

    /// A connection to its control service, which survives migrations.
    pub(crate) fn control(&self) -> Option<Control> {
        let address = SocketAddr::from((self.address, CONTROL_PORT));
        Control::connect(address, Some(&self.namespace), CONNECT_DEADLINE).ok()
    }

    /// Waits until its memory is filled and its services answer.
    #[track_caller]
    pub(crate) fn wait_until_ready(&self) {
        let second = Duration::from_secs(1);
        let end = Instant::now() + BOOT_DEADLINE;
        let ready = |mut control: Control| control.status(second).is_ok_and(|status| status.is_ready());
        while !self.control().is_some_and(ready) {
            assert!(Instant::now() < end, "guest {} is not ready within {BOOT_DEADLINE:?}", self.name);
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Makes the guest rewrite its memory like this from now on.
    #[track_caller]
    pub(crate) fn set_dirty(&self, dirtying: Dirtying) -> Status {
        let mut control = self.control().expect("the guest's control service answers");
        control.set_dirty(dirtying, DEADLINE).expect("the guest takes it")
    }

    /// Checks every page of the guest's memory.
    #[track_caller]
    pub(crate) fn verify(&self) -> Verification {
        let mut control = self.control().expect("the guest's control service answers");
        control.verify(DEADLINE).expect("the guest checks its memory")
    }

    /// Fails the test unless the guest runs, and every page is as it was written.
    #[track_caller]
    pub(crate) fn assert_intact(&self) {
        self.assert_answers();
        let found = self.verify();
        assert!(found.pages > 0 && found.bad == 0, "{}: bad pages: {found}", self.name);
    }

    /// Sends packets until it is dropped, often enough to see silences of half a second and more.
    pub(crate) fn heartbeat(&self) -> Heartbeat {
        self.heartbeat_every(BEAT)
    }

    /// The same with another interval, such as a longer one for many guests at a time.
    pub(crate) fn heartbeat_every(&self, interval: Duration) -> Heartbeat {
        let address = SocketAddr::from((self.address, HEARTBEAT_PORT));
        Heartbeat::start_every(interval, address, Some(&self.namespace))
            .expect("the client's namespace is there")
    }

    /// Fails the test unless its vCPU runs and its network is connected.
    #[track_caller]
    pub(crate) fn assert_answers(&self) {
        let heartbeat = self.heartbeat();
        eventually("the guest answers", || heartbeat.statistics().answered > 0);
    }
}

/// The guest's kernel and initramfs, which `scripts/guest` makes.
pub(crate) fn image() -> [PathBuf; 2] {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let directory = directory.canonicalize().unwrap_or(directory);
    ["vmlinux", "initramfs.img"].map(|file| directory.join(file))
}
