//! A machine for each host: a QEMU in the host's namespace, with a kernel of its own.
//!
//! ```text
//!   namespace of a                           namespace of b
//!   ┌──────────────────────────┐             ┌──────────────────────────┐
//!   │ QEMU: machine a          │             │          QEMU: machine b │
//!   │   e0 ── e0-tap ─┐        │             │        ┌─ e0-tap ── e0   │
//!   │               e0-br      │             │      e0-br               │
//!   │                 └── e0 ──┼── veth, tbf ┼── e0 ──┘                 │
//!   └──────────────────────────┘             └──────────────────────────┘
//! ```
//!
//! So a host's namespace is the patch panel of its machine, and all that a lab does to links is done there as for hosts
//! without a machine: rates, losses, black holes, and who is joined to whom. Taps rather than QEMU's own sockets: these
//! cannot be shaped, and break off when one of the two QEMUs ends. What a tap cannot tell a machine is that its cable was
//! pulled; that is told by QEMU ([`follow_carriers`]).
//!
//! Programs are run over a virtio console ([`drainpipe_machine`]). A machine ends with its QEMU, which
//! [`Lab::down`](crate::Lab::down) finds in the namespace.

mod command_line;
mod monitor;

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use drainpipe_machine::client::{self, ExecError, Limits, Streams};
use drainpipe_machine::layout::{PORTS, port_name};
use drainpipe_machine::protocol::Request;

use crate::enter;
use crate::error::Error;
use crate::interfaces::{self, LinkState};
use crate::spec::{LabSpec, MachineSpec, SpecError};
use crate::state::{self, LabLock};
use crate::topology::{cables, configure_host};

/// A machine boots in 6 s without KVM on an idle machine; this is for a busy one with many.
const BOOT_LIMIT: Duration = Duration::from_mins(3);
const BOOT_POLL: Duration = Duration::from_millis(20);

/// What a lab has a machine do takes a second or two.
const OWN_PROGRAMS: Limits =
    Limits { start: Limits::OF_ANY_PROGRAM.start, silence: Some(Duration::from_mins(2)) };

/// What udev does elsewhere: the devices that hypervisors use are there, and for their users. QEMU emulates SVM too, so a VM
/// in a machine without KVM outside boots in 15 s; emulated twice, it had not in 150 s (`bench/results/emulated.md`).
const MAKE_DEVICES: &str = "modprobe --quiet --all tun vhost_net kvm_amd kvm_intel
for device in /dev/net/tun /dev/vhost-net /dev/kvm; do [ ! -e $device ] || chmod a+rw $device; done";

/// How many lines of the console, and of QEMU's output, an error shows.
const LAST_WORDS_LINES: usize = 8;

/// The directory of what belongs to the machine of `host`: its ports, its console, its monitor.
pub(crate) fn directory(lab: &str, host: &str) -> PathBuf {
    state::directory(lab).join(host).join("machine")
}

/// Where the console of the machine of `host` is written.
pub(crate) fn console(lab: &str, host: &str) -> PathBuf {
    directory(lab, host).join(command_line::CONSOLE)
}

/// Finds what the machines boot.
pub(crate) fn check_boot_files(machines: &MachineSpec) -> Result<(), Error> {
    for name in [command_line::KERNEL, command_line::INITRAMFS, command_line::ADDITIONS] {
        let path = machines.boot_files.join(name);
        fs::metadata(&path).map_err(|source| Error::BootFiles { path, source })?;
    }
    Ok(())
}

/// Boots every host's machine, and configures its network.
pub(crate) fn start_all(spec: &LabSpec, machines: &MachineSpec, lock: &LabLock) -> Result<(), Error> {
    let hosts = || spec.hosts.iter().enumerate();
    let began = hosts().map(|(host, _)| begin(spec, machines, host, lock)).collect::<Result<Vec<_>, _>>()?;
    for ((host, name), mut qemu) in hosts().zip(began) {
        wait_until_booted(spec, name, &mut qemu)?;
        configure(spec, host)?;
    }
    Ok(())
}

fn begin(spec: &LabSpec, machines: &MachineSpec, host: usize, lock: &LabLock) -> Result<Child, Error> {
    let name = &spec.hosts[host];
    let directory = directory(&spec.name, name);
    fs::create_dir_all(&directory).map_err(Error::io("create the directory", &directory))?;
    let arguments = command_line::arguments(spec, machines, host, &directory);
    let entering = enter::words_without_control_groups(spec, name)?;
    enter::spawn(&spec.namespace(name), &entering, &arguments, &log(&directory), lock)
}

fn log(directory: &Path) -> PathBuf {
    directory.join("qemu.log")
}

/// A program that can be run is the sign of life.
fn wait_until_booted(spec: &LabSpec, host: &str, qemu: &mut Child) -> Result<(), Error> {
    let directory = directory(&spec.name, host);
    let not_started =
        |why: String| Error::MachineNotStarted { host: host.to_owned(), why, said: last_words(&directory) };
    // Made after all others, which then are there.
    let last_port = directory.join(port_name(PORTS - 1)).with_extension("sock");
    let end = Instant::now() + BOOT_LIMIT;
    while !last_port.exists() {
        let status = qemu.try_wait().map_err(Error::io("wait for the QEMU in", &directory))?;
        if let Some(status) = status {
            return Err(not_started(format!("its QEMU has ended with {status}")));
        }
        if Instant::now() >= end {
            return Err(not_started("its QEMU makes no ports".to_owned()));
        }
        thread::sleep(BOOT_POLL);
    }
    let booted = run(&directory, &["true"], "", Limits { start: BOOT_LIMIT, ..OWN_PROGRAMS });
    booted.map(drop).map_err(|error| not_started(error.to_string()))
}

/// The devices, names and addresses that hosts have.
fn configure(spec: &LabSpec, host: usize) -> Result<(), Error> {
    run_in(spec, &spec.hosts[host], &["sh", "-c", MAKE_DEVICES], "")?;
    let mut lines: Vec<String> = cables(spec)
        .iter()
        .enumerate()
        .map(|(number, name)| format!("link set eth{number} name {name}"))
        .collect();
    lines.extend(configure_host(spec, host));
    run_in(spec, &spec.hosts[host], &["ip", "-batch", "-"], &(lines.join("\n") + "\n")).map(drop)
}

/// Runs a program in the machine of `host`, with this input: what it printed. Fails if the program does.
fn run_in(spec: &LabSpec, host: &str, words: &[&str], input: &str) -> Result<String, Error> {
    let ran = run(&directory(&spec.name, host), words, input, OWN_PROGRAMS);
    let (code, output, errors) = ran.map_err(|source| failed(spec, host, source))?;
    if code == 0 {
        return Ok(output);
    }
    Err(Error::Tool { command: format!("{} on {host}", words.join(" ")), stderr: errors, hint: "" })
}

fn run(
    directory: &Path,
    words: &[&str],
    input: &str,
    limits: Limits,
) -> Result<(i32, String, String), ExecError> {
    let (mut output, mut errors) = (Vec::new(), Vec::new());
    let input = Box::new(Cursor::new(input.to_owned()));
    let streams = Streams { input, output: &mut output, errors: &mut errors };
    let words = words.iter().map(|&word| word.to_owned()).collect();
    let request = Request { words, directory: "/".into() };
    let code = client::run(directory, request, streams, limits)?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim_end().to_owned();
    Ok((code, text(output), text(errors)))
}

/// Runs a program in the machine of `host`, to its end: its exit code, as a shell gives it.
pub(crate) fn exec(
    spec: &LabSpec,
    host: &str,
    words: Vec<String>,
    streams: Streams<'_>,
) -> Result<i32, Error> {
    spec.host_index(host)?;
    if spec.machines.is_none() {
        return Err(SpecError::NoMachine { lab: spec.name.clone() }.into());
    }
    // One that is gone is no reason to run nothing.
    let request = Request { words, directory: env::current_dir().unwrap_or_else(|_| "/".into()) };
    let ran = client::run(&directory(&spec.name, host), request, streams, Limits::OF_ANY_PROGRAM);
    ran.map_err(|source| failed(spec, host, source))
}

fn failed(spec: &LabSpec, host: &str, source: ExecError) -> Error {
    match source {
        ExecError::Refused(why) => Error::NotRun { host: host.to_owned(), why },
        source => {
            let console = console(&spec.name, host);
            Error::Machine { host: host.to_owned(), source, console }
        }
    }
}

/// Makes the carrier of each machine's end of a link what it is in the machine's namespace.
pub(crate) fn follow_carriers(spec: &LabSpec, link: &str) -> Result<(), Error> {
    spec.link_index(link)?;
    for host in &spec.hosts {
        let states = interfaces::states(spec, host)?;
        let is_up = states.get(link).is_some_and(|state| *state == LinkState::Up);
        monitor::set_link(&directory(&spec.name, host), link, is_up)?;
    }
    Ok(())
}

fn last_words(directory: &Path) -> String {
    let end_of = |path: PathBuf| {
        let text = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).replace('\r', "");
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LAST_WORDS_LINES)..].join("\n")
    };
    [log(directory), directory.join(command_line::CONSOLE)].map(end_of).join("\n").trim().to_owned()
}
