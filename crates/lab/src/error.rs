//! Why a lab could not be made, changed or removed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use drainpipe_machine::client::ExecError;
use thiserror::Error;

use crate::spec::SpecError;

/// Why a lab could not be made, changed or removed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The specification, or a name given for something in it, is not valid.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// Namespaces need root.
    #[error("labs are made of network namespaces, which need root: run the command with sudo")]
    NotRoot,
    /// A program that the lab calls is not installed.
    #[error("{tool} was not found in PATH: install the package {package}")]
    ToolMissing {
        /// The program.
        tool: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// A program that the lab called failed.
    #[error("`{command}` failed: {stderr}{hint}")]
    Tool {
        /// The command as one would type it.
        command: String,
        /// What the program said.
        stderr: String,
        /// What to do about it, if it is a known lack of the machine.
        hint: &'static str,
    },
    /// A program that the lab called did not come back.
    #[error("`{command}` did not end within {} s and was killed: is the machine overloaded?", .limit.as_secs())]
    ToolTimeout {
        /// The command line.
        command: String,
        /// How long it was given.
        limit: Duration,
    },
    /// A program's output was not what its version should print.
    #[error(
        "`{command}` printed something unexpected: {source}; iproute2 >= 5.10 and nftables >= 1.0 are needed"
    )]
    ToolOutput {
        /// The command line.
        command: String,
        /// Why it could not be read.
        source: serde_json::Error,
    },
    /// A lab of that name is up.
    #[error(
        "lab {name} is up already: use it, remove it with `drainpipe lab down {name}`, or choose another name"
    )]
    AlreadyUp {
        /// The lab's name.
        name: String,
    },
    /// No lab of that name is up.
    #[error("no lab {name} is up; {}", existing_labs(.existing))]
    NoSuchLab {
        /// The name asked for.
        name: String,
        /// The labs that are up.
        existing: Vec<String>,
    },
    /// The lab was half made, half removed, or lost a namespace.
    #[error(
        "lab {name} is incomplete ({what}): remove the rest with `drainpipe lab down {name}`, then make it again"
    )]
    Incomplete {
        /// The lab's name.
        name: String,
        /// What is missing.
        what: String,
    },
    /// Another process is making, changing or removing this lab.
    #[error("another process has been changing lab {name} for {} s: wait for it to end, then try again", .waited.as_secs())]
    Busy {
        /// The lab's name.
        name: String,
        /// How long we waited for it.
        waited: Duration,
    },
    /// Processes in the lab survived SIGKILL.
    #[error(
        "processes {pids:?} in lab {name} do not end, even killed: see what they wait for in /proc/PID/stack, then run `drainpipe lab down {name}` again"
    )]
    ProcessesRemain {
        /// The lab's name.
        name: String,
        /// Their process ids.
        pids: Vec<i32>,
    },
    /// A host's libvirt, or the namespaces that it lives in, did not come about.
    #[error(
        "the libvirt of host {host} did not start: {said}; a container needs CAP_SYS_ADMIN (--privileged) to hold one"
    )]
    LibvirtNotStarted {
        /// The host's name.
        host: String,
        /// What was said about it.
        said: String,
    },
    /// A daemon of libvirt's outlives the signal that should end it.
    #[error(
        "the libvirt of host {host} has not ended in {} s: in the middle of a migration it may not; \
         `drainpipe lab fault LAB libvirt-kill {host}` kills it", .waited.as_secs()
    )]
    LibvirtRemains {
        /// The host's name.
        host: String,
        /// How long we waited for it.
        waited: Duration,
    },
    /// What emulated machines boot is not there.
    #[error("cannot find {}: {source}; `scripts/emulated` makes what emulated machines boot", .path.display())]
    BootFiles {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A machine did not boot.
    #[error("the machine of host {host} did not boot: {why}; last it said:\n{said}")]
    MachineNotStarted {
        /// The host's name.
        host: String,
        /// What was waited for.
        why: String,
        /// The last lines of its QEMU, and of its console.
        said: String,
    },
    /// A program could not be run in a machine, or was lost with it.
    #[error("the machine of host {host}: {source}; its console is in {}", .console.display())]
    Machine {
        /// The host's name.
        host: String,
        /// What happened.
        source: ExecError,
        /// The file.
        console: PathBuf,
    },
    /// A machine has no such program.
    #[error("on host {host}: {why}")]
    NotRun {
        /// The host's name.
        host: String,
        /// What the machine says.
        why: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The lab's record is not one that this version wrote.
    #[error("cannot read the lab's record {}: {source}; remove the lab with `drainpipe lab down`", .path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// Why not.
        source: serde_json::Error,
    },
}

impl Error {
    /// For `map_err`: names the file and what was attempted on it.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

fn existing_labs(existing: &[String]) -> String {
    if existing.is_empty() {
        "there are no labs: make one with `drainpipe lab up`".to_owned()
    } else {
        format!("the labs that are up: {}", existing.join(", "))
    }
}
