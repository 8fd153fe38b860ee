//! The first process of an emulated machine, and the server of its ports.
//!
//! Whatever goes wrong is said on the console and ends with the machine powered off: a first process that exits panics its
//! kernel.

use std::fmt;
use std::io::Write;
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, WaitOptions, wait};
use rustix::system::{RebootCommand, reboot};

mod boot;
mod ports;
mod session;

/// The argument with which the first process starts its server.
const SERVE: &str = "serve";

/// For the console's last line to get out.
const LAST_WORDS: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some(SERVE) => {
            say(&ports::serve());
            ExitCode::FAILURE
        }
        _ if std::process::id() == 1 => first_process(),
        _ => {
            say("this is the first process of an emulated machine; `drainpipe lab up --emulated` boots one");
            ExitCode::from(2)
        }
    }
}

fn first_process() -> ! {
    match boot::machine().and_then(|()| start_server()) {
        Ok(server) => reap_until_end_of(Pid::from_child(&server)),
        Err(error) => say(&format_args!("{error}; powering off")),
    }
    thread::sleep(LAST_WORDS);
    let error = reboot(RebootCommand::PowerOff);
    say(&format_args!("cannot power off: {error:?}"));
    loop {
        thread::park();
    }
}

/// A process of its own: here, what programs have left behind is waited for, and there, programs are.
fn start_server() -> Result<Child, boot::BootError> {
    Command::new("/proc/self/exe").arg(SERVE).spawn().map_err(boot::BootError::Server)
}

fn reap_until_end_of(server: Pid) {
    say("ready");
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, _))) if pid != server => {}
            ended => {
                say(&format_args!("the server of its ports has ended ({ended:?}); powering off"));
                return;
            }
        }
    }
}

fn say(message: &(impl fmt::Display + ?Sized)) {
    // Without a console there is nobody to tell.
    let _ = writeln!(std::io::stdout(), "drainpipe-machine: {message}");
}
