//! PID 1 of the lab's guest, and its only user program.
//!
//! Whatever goes wrong is said on the console and ends with the VM powered off: a PID 1 that exits
//! panics its kernel.

use std::fmt;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use drainpipe_guest::dirtier::PAGES_PER_MIB;
use drainpipe_guest::memory::Memory;
use drainpipe_guest::parameters::{ParameterError, Parameters};
use drainpipe_guest::protocol::{CONTROL_PORT, HEARTBEAT_PORT};
use drainpipe_guest::service::{Guest, WORK_NICE, serve_control, serve_heartbeat};
use rustix::process::setpriority_process;
use rustix::system::{RebootCommand, reboot};

mod boot;
mod disks;
mod network;

/// For the answer to `poweroff`, and the console's last line, to get out.
const LAST_WORDS: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
enum GuestError {
    #[error("{0}")]
    Boot(#[from] boot::BootError),
    #[error("kernel command line: {0}")]
    Parameters(#[from] ParameterError),
    #[error("{0}")]
    Network(#[from] network::NetworkError),
    #[error("{0}")]
    Disks(#[from] disks::DisksError),
    #[error("cannot start a service: {0}")]
    Service(#[from] std::io::Error),
}

fn main() -> ExitCode {
    if std::process::id() != 1 {
        say("this is PID 1 of the lab's guest; `drainpipe-guest-image` packs it for a VM");
        return ExitCode::from(2);
    }
    match thread::spawn(run).join() {
        Ok(Ok(())) => say("powering off, as asked"),
        Ok(Err(error)) => say(&format_args!("{error}; powering off")),
        Err(_) => say("stopped by a defect of its own, see above; powering off"),
    }
    thread::sleep(LAST_WORDS);
    if let Err(error) = network::take_down() {
        say(&error);
    }
    let error = reboot(RebootCommand::PowerOff);
    say(&format_args!("cannot power off: {error:?}; stop the VM from its host"));
    loop {
        thread::park();
    }
}

fn run() -> Result<(), GuestError> {
    boot::mount_proc()?;
    let parameters = Parameters::parse(&boot::command_line()?)?;
    let fill_mib = parameters.fill_mib(boot::available_mib()?)?;
    boot::load_modules(parameters.disks > 0)?;
    network::configure(parameters.address)?;
    let pages = usize::try_from(fill_mib * PAGES_PER_MIB).expect("it fits into memory");
    let memory = Memory::reserve(pages, parameters.mix, parameters.seed).rewriting(parameters.rewrite_words);
    let guest = Guest::new(memory, parameters.dirtying);
    let guest = Arc::new(match parameters.disks {
        0 => guest,
        disks => guest.writing(disks::writers(disks)?),
    });
    start_services(&guest)?;
    let seed = parameters.seed;
    let worker = Arc::clone(&guest);
    spawn("work", move || work(&worker, seed))?;
    guest.wait_for_power_off();
    Ok(())
}

fn start_services(guest: &Arc<Guest>) -> std::io::Result<()> {
    let heartbeat = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, HEARTBEAT_PORT))?;
    let control = TcpListener::bind((Ipv4Addr::UNSPECIFIED, CONTROL_PORT))?;
    spawn("heartbeat", move || serve_heartbeat(&heartbeat))?;
    let guest = Arc::clone(guest);
    spawn("control", move || serve_control(&control, &guest))
}

fn work(guest: &Guest, seed: u64) {
    // PID 1 is root: this is not refused.
    let _ = setpriority_process(None, WORK_NICE);
    guest.memory.fill();
    say(&format_args!("ready, {} pages", guest.memory.pages()));
    guest.dirtier.run(&guest.memory, seed);
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

fn say(message: &(impl fmt::Display + ?Sized)) {
    // Without a console there is nobody to tell.
    let _ = writeln!(std::io::stdout(), "drainpipe-guest: {message}");
}
