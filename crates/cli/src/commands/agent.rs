//! `drainpipe agent`, the guards and QEMUs that it starts, and the keeper that starts QEMU in its place.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use drainpipe_agent::app;
use drainpipe_agent::app::Ended;
use drainpipe_agent::guard;
use drainpipe_agent::store::config::{Config, Peer, Tls};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Hypervisor;
use drainpipe_hypervisor_libvirt::Libvirt;
use drainpipe_hypervisor_qemu::{Privileges, Qemu, launcher};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

use crate::arguments::{AgentArguments, GuardArguments, LaunchArguments};
use crate::exit::Exit;

pub(crate) async fn run(arguments: &AgentArguments) -> Result<Exit, Problem> {
    log_to_standard_error();
    let config = Config::load(&arguments.config).map_err(Problem::bad_input)?;
    match app::run(config, stop_signal()?).await? {
        Ended::Stopped => Ok(Exit::Done),
        Ended::Doubted => Err(start_anew()),
    }
}

/// In the same process, with the same arguments: as after a crash, nothing of what the agent had in mind is left. Comes
/// back only if that fails.
fn start_anew() -> Problem {
    let mut arguments = std::env::args_os().skip(1);
    let error = Command::new("/proc/self/exe").args(&mut arguments).exec();
    Problem::failed(format!("the journal is no longer believed, and the agent cannot start anew: {error}"))
}

pub(crate) async fn guard(arguments: GuardArguments) -> Result<Exit, Problem> {
    let orders = guard::Orders {
        migration: arguments.migration,
        vm: arguments.vm,
        peer: arguments.peer,
        disks: arguments.disks,
        target: Peer { name: arguments.target, address: arguments.target_address },
        tls: Tls { certificate: arguments.certificate, key: arguments.key, authority: arguments.authority },
        state_directory: arguments.state_directory,
        runtime_directory: arguments.runtime_directory,
    };
    let (runtime_directory, state_directory) =
        (orders.runtime_directory.clone(), orders.state_directory.clone());
    let privileges = Privileges::of_environment();
    let hypervisor: Arc<dyn Hypervisor> = match arguments.daemon {
        Some(socket) => Arc::new(Libvirt::new(runtime_directory, state_directory, socket.into(), privileges)),
        None => Arc::new(Qemu::to_find(runtime_directory, privileges)),
    };
    guard::stand(&orders, hypervisor).await?;
    Ok(Exit::Done)
}

/// Comes back only if that fails, with what to exit with.
pub(crate) fn launch(arguments: &LaunchArguments) -> u8 {
    launcher::become_qemu(&arguments.order, &arguments.arguments)
}

pub(crate) fn keep(arguments: &AgentArguments) -> Result<Exit, Problem> {
    log_to_standard_error();
    let config = Config::load(&arguments.config).map_err(Problem::bad_input)?;
    app::keep(&config, std::io::stdin().as_fd())?;
    Ok(Exit::Done)
}

/// Times and all, but where the journal has its own.
fn log_to_standard_error() {
    let filter = EnvFilter::try_from_env("DRAINPIPE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(crate::output::is_watched());
    if goes_to_the_journal() { log.without_time().init() } else { log.init() }
}

/// Programs that others start have the variable too, and standard errors of their own.
fn goes_to_the_journal() -> bool {
    let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    rustix::fs::fstat(std::io::stderr()).is_ok_and(|own| is_stream(&stream, own.st_dev, own.st_ino))
}

/// systemd writes device and inode of what it connects to its journal (systemd.exec(5)).
fn is_stream(named: &str, device: u64, inode: u64) -> bool {
    named
        .split_once(':')
        .is_some_and(|(of_device, of_inode)| of_device.parse() == Ok(device) && of_inode.parse() == Ok(inode))
}

/// Turns true at SIGTERM or SIGINT.
fn stop_signal() -> Result<watch::Receiver<bool>, Problem> {
    let failed = |error| Problem::failed(format!("cannot watch for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.send_replace(true);
        // Both listeners and connections watch the channel; it lives as long as they do.
        stop.closed().await;
    });
    Ok(stopped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_journal_adds_times_by_itself() {
        assert!(is_stream("8:2049", 8, 2049));
        for elsewhere in ["", "8", "8:2050", "9:2049", "8:x"] {
            assert!(!is_stream(elsewhere, 8, 2049), "{elsewhere}");
        }
    }
}
