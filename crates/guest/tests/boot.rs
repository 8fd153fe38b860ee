//! The guest in a real QEMU, reached through a tap.
//!
//! Needs root, QEMU, and the image that `scripts/guest` makes.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_guest::client::{Control, Heartbeat};
use drainpipe_guest::dirtier::PAGES_PER_MIB;
use drainpipe_guest::parameters::KERNEL_OPTIONS;
use drainpipe_guest::protocol::{CONTROL_PORT, Dirtying, HEARTBEAT_PORT, Verification};

/// TCG on a machine that runs other tests, too:
/// beside four busy loops the guest takes eight times as long as on a quiet machine.
const DEADLINE: Duration = Duration::from_mins(3);

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

/// The namespace has no name: it ends with QEMU, and QEMU with the test, even if that is killed.
const LAUNCH: &str = "ip tuntap add tap0 mode tap \
    && ip address add 10.0.0.1/24 dev tap0 \
    && ip link set tap0 up \
    && exec setpriv --pdeathsig KILL qemu-system-x86_64 \"$@\"";

struct Machine {
    qemu: Child,
    console: Receiver<String>,
}

impl Machine {
    fn boot(kernel: &Path, initramfs: &Path, parameters: &str) -> Self {
        let mut qemu = Command::new("unshare")
            .args(["--net", "sh", "-c", LAUNCH, "sh"])
            .args(["-accel", "tcg", "-machine", "q35", "-m", "256", "-no-reboot"])
            .args(["-nodefaults", "-display", "none", "-serial", "stdio"])
            .args(["-netdev", "tap,id=net0,ifname=tap0,script=no,downscript=no"])
            .args(["-device", "virtio-net-pci,netdev=net0,romfile="])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", &format!("{KERNEL_OPTIONS} {parameters}")])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let console = lines(qemu.stdout.take().unwrap());
        Self { qemu, console }
    }

    fn network_namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.qemu.id()).into()
    }

    /// The guest's next line, without those of its kernel.
    fn says(&self) -> String {
        let end = Instant::now() + DEADLINE;
        loop {
            let patience = end.saturating_duration_since(Instant::now());
            let line = self.console.recv_timeout(patience).expect("the guest says something");
            if let Some((_, message)) = line.split_once("drainpipe-guest: ") {
                return message.trim_end().to_owned();
            }
        }
    }

    fn expect_power_off(&mut self) {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.qemu.try_wait().unwrap() {
                Some(status) => return assert!(status.success(), "{status}"),
                None if Instant::now() < end => thread::sleep(Duration::from_millis(50)),
                None => panic!("the VM did not power off within {DEADLINE:?}"),
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn lines(console: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let lines = BufReader::new(console).split(b'\n').map_while(Result::ok);
        for line in lines {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// The kernel and the initramfs, or why this test cannot run here.
fn image() -> Result<(PathBuf, PathBuf), &'static str> {
    let artefacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let (kernel, initramfs) = (artefacts.join("vmlinux"), artefacts.join("initramfs.img"));
    if !rustix::process::geteuid().is_root() {
        return Err("needs root for a network namespace and a tap");
    }
    if !kernel.exists() || !initramfs.exists() {
        return Err("there is no guest image; run scripts/guest");
    }
    match Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) if status.success() => Ok((kernel, initramfs)),
        _ => Err("there is no qemu-system-x86_64; run scripts/setup"),
    }
}

fn boot(parameters: &str) -> Option<Machine> {
    match image() {
        Ok((kernel, initramfs)) => Some(Machine::boot(&kernel, &initramfs, parameters)),
        Err(why) => {
            eprintln!("SKIPPED: {why}");
            None
        }
    }
}

#[test]
fn a_guest_boots_answers_and_checks_its_memory() {
    let Some(mut machine) = boot(
        "drainpipe.address=10.0.0.2/24 drainpipe.memory_mib=64 \
         drainpipe.mix=zero:20,text:30,random:40,shared:10 drainpipe.dirty_mib_per_s=4",
    ) else {
        return;
    };
    let pages = 64 * PAGES_PER_MIB;
    assert_eq!(machine.says(), format!("ready, {pages} pages"));

    let namespace = machine.network_namespace();
    let heartbeat = Heartbeat::start(SocketAddr::from((GUEST, HEARTBEAT_PORT)), Some(&namespace)).unwrap();
    let address = SocketAddr::from((GUEST, CONTROL_PORT));
    let mut control = Control::connect(address, Some(&namespace), DEADLINE).unwrap();
    assert_eq!(control.verify(DEADLINE).unwrap(), Verification { pages, bad: 0, first_bad: None });
    let end = Instant::now() + DEADLINE;
    while heartbeat.statistics().answered < 100 || control.status(DEADLINE).unwrap().rewritten_pages == 0 {
        assert!(Instant::now() < end, "heartbeats are answered, and pages rewritten");
        thread::sleep(Duration::from_millis(50));
    }

    control.set_dirty(Dirtying::IDLE, DEADLINE).unwrap();
    control.corrupt(77, DEADLINE).unwrap();
    let found = control.verify(DEADLINE).unwrap();
    assert_eq!((found.bad, found.first_bad.map(|bad| bad.page)), (1, Some(77)));
    control.power_off(DEADLINE).unwrap();
    machine.expect_power_off();
    let statistics = heartbeat.stop();
    assert!(statistics.answered <= statistics.sent);
}

#[test]
fn a_guest_that_cannot_do_what_is_asked_says_so_and_powers_off() {
    let Some(mut machine) = boot("drainpipe.address=10.0.0.2/24 drainpipe.memory_mib=4096") else {
        return;
    };
    let said = machine.says();
    assert!(said.contains("drainpipe.memory_mib=4096 does not fit"), "{said}");
    assert!(said.ends_with("powering off"), "{said}");
    machine.expect_power_off();
}
