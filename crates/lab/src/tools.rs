//! The one way in which the lab calls `ip`, `tc` and `nft`.
//!
//! They are called rather than netlink spoken, because their users know them: an error shows the
//! command and what it said, and the same command can be typed by hand.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::de::DeserializeOwned;

use crate::error::Error;
use crate::state::LabLock;

/// Any of these commands takes milliseconds; only a machine in trouble takes this long.
const COMMAND_LIMIT: Duration = Duration::from_secs(30);

/// The programs and the Debian packages that have them.
const TOOLS: [(&str, &str); 5] = [
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("nft", "nftables"),
    ("setsid", "util-linux"),
    ("taskset", "util-linux"),
];

/// What a program says when the kernel lacks something, and what to do about it.
const HINTS: [(&str, &str); 4] = [
    ("Unknown device type", ": the kernel lacks veth or bridge; try `modprobe veth bridge`"),
    ("qdisc kind is unknown", ": the kernel lacks tbf; try `modprobe sch_tbf`"),
    (
        "Could not process rule",
        ": the kernel may lack nftables' netdev ingress hook; try `modprobe nf_tables`",
    ),
    (
        "Operation not permitted",
        ": a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN (--privileged) to hold a lab",
    ),
];

/// Commands for one program in one namespace, run as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    /// Which program reads the lines.
    pub(crate) program: Program,
    /// The namespace in which they act; `None` is the one we are in.
    pub(crate) namespace: Option<String>,
    /// One command per line, without the program's name.
    pub(crate) lines: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Program {
    Ip,
    Tc,
    /// One transaction.
    Nft,
    /// The same, but only checked: finds out what the kernel can do.
    NftCheck,
}

impl Batch {
    pub(crate) fn new(program: Program, namespace: &str, lines: Vec<String>) -> Self {
        Self { program, namespace: Some(namespace.to_owned()), lines }
    }

    fn arguments(&self) -> Vec<&str> {
        let namespace = self.namespace.as_deref();
        match self.program {
            Program::Ip => inside(namespace, "ip", "-batch"),
            Program::Tc => inside(namespace, "tc", "-batch"),
            Program::Nft | Program::NftCheck => {
                let enter = namespace.map(|name| vec!["ip", "netns", "exec", name]);
                let mut arguments = enter.unwrap_or_default();
                arguments.push("nft");
                if self.program == Program::NftCheck {
                    arguments.push("--check");
                }
                arguments.push("-f");
                arguments
            }
        }
    }

    /// Runs the batch, from a file in the lab's state directory.
    ///
    /// The lock goes along as standard output: if we are killed, the lab stays locked until the
    /// command that we started has ended too, so it never works against the next `up` or `down`.
    /// Standard input would not do, as `ip` and `tc` close it to read the batch in its place.
    pub(crate) fn run(&self, lock: &LabLock) -> Result<(), Error> {
        if self.lines.is_empty() {
            return Ok(());
        }
        let script = self.write_script(lock)?;
        let mut arguments = self.arguments();
        let script_name = script.display().to_string();
        arguments.push(&script_name);
        let output = run(&arguments, lock.as_stdout()?)?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        let (said, line) = without_line_number(&stderr);
        let command = match line.and_then(|number| self.lines.get(number)) {
            Some(line) => format!("{} {line}", arguments[..arguments.len() - 2].join(" ")),
            None => arguments.join(" "),
        };
        Err(failure(command, said))
    }

    fn write_script(&self, lock: &LabLock) -> Result<PathBuf, Error> {
        let node = self.namespace.as_deref().unwrap_or("namespaces");
        let path = lock.directory().join(format!("{node}.{:?}", self.program).to_lowercase());
        let mut text = self.lines.join("\n");
        text.push('\n');
        fs::write(&path, text).map_err(Error::io("write", &path))?;
        Ok(path)
    }
}

/// Runs `ip` or `tc` with `-json` in a namespace and reads what it prints.
pub(crate) fn query<T: DeserializeOwned>(
    namespace: &str,
    program: &'static str,
    query: &[&str],
) -> Result<T, Error> {
    let mut arguments = inside(Some(namespace), program, "-json");
    arguments.extend(query);
    read_json(&arguments)
}

/// Runs `nft --json` in a namespace and reads what it prints.
pub(crate) fn query_nft<T: DeserializeOwned>(namespace: &str, query: &[&str]) -> Result<T, Error> {
    let mut arguments = vec!["ip", "netns", "exec", namespace, "nft", "--json"];
    arguments.extend(query);
    read_json(&arguments)
}

/// Finds every program that each lab will call.
pub(crate) fn check_installed() -> Result<(), Error> {
    check_all_installed(&TOOLS)
}

/// Finds these programs, of these packages.
pub(crate) fn check_all_installed(tools: &[(&'static str, &'static str)]) -> Result<(), Error> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    for &(tool, package) in tools {
        if !std::env::split_paths(&path).any(|directory| directory.join(tool).is_file()) {
            return Err(Error::ToolMissing { tool, package });
        }
    }
    Ok(())
}

fn inside<'a>(namespace: Option<&'a str>, program: &'a str, option: &'a str) -> Vec<&'a str> {
    let mut arguments = vec![program];
    if let Some(namespace) = namespace {
        arguments.extend(["-n", namespace]);
    }
    arguments.push(option);
    arguments
}

/// Runs a command that prints nothing, to its end. The lock goes along as its standard output, as in [`Batch::run`].
pub(crate) fn run_to_end(arguments: &[&str], lock: &LabLock) -> Result<(), Error> {
    let output = run(arguments, lock.as_stdout()?)?;
    if output.status.success() {
        return Ok(());
    }
    Err(failure(arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

fn read_json<T: DeserializeOwned>(arguments: &[&str]) -> Result<T, Error> {
    let output = run(arguments, Stdio::piped())?;
    let command = arguments.join(" ");
    if !output.status.success() {
        return Err(failure(command, String::from_utf8_lossy(&output.stderr).trim()));
    }
    serde_json::from_slice(&output.stdout).map_err(|source| Error::ToolOutput { command, source })
}

fn run(arguments: &[&str], stdout: Stdio) -> Result<Output, Error> {
    let program = arguments[0];
    let could_not = |action| Error::io(action, program);
    let child = Command::new(program)
        .args(&arguments[1..])
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(stdout)
        .stderr(Stdio::piped())
        .spawn()
        .map_err(could_not("run"))?;
    let pid = Pid::from_child(&child);
    let handle = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    if let Ok(output) = receiver.recv_timeout(COMMAND_LIMIT) {
        return output.map_err(could_not("wait for"));
    }
    pidfd_send_signal(handle.map_err(could_not("stop"))?, Signal::KILL)
        .map_err(io::Error::from)
        .map_err(could_not("stop"))?;
    Err(Error::ToolTimeout { command: arguments.join(" "), limit: COMMAND_LIMIT })
}

fn failure(command: String, stderr: &str) -> Error {
    let hint = HINTS.iter().find(|(said, _)| stderr.contains(said)).map_or("", |(_, hint)| hint);
    Error::Tool { command, stderr: stderr.to_owned(), hint }
}

/// What `ip` and `tc` say of a batch: the error, and the index of the line that they name after
/// it as `Command failed FILE:NUMBER`.
fn without_line_number(stderr: &str) -> (&str, Option<usize>) {
    let Some((said, place)) = stderr.rsplit_once("Command failed ") else { return (stderr.trim(), None) };
    let number = place.trim().rsplit_once(':').and_then(|(_, number)| number.parse::<usize>().ok());
    (said.trim(), number.and_then(|number| number.checked_sub(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_failed_line_of_a_batch_is_found() {
        let stderr = "Cannot find device \"nosuch\"\nCommand failed /run/x.ip:2\n";
        assert_eq!(without_line_number(stderr), ("Cannot find device \"nosuch\"", Some(1)));
        assert_eq!(without_line_number("Object \"x\" is unknown\n"), ("Object \"x\" is unknown", None));
        assert_eq!(without_line_number("Command failed -:0"), ("", None));
    }

    #[test]
    fn a_lack_of_the_kernel_is_explained() {
        let error = failure("tc".to_owned(), "Error: Specified qdisc kind is unknown.");
        assert!(error.to_string().contains("modprobe sch_tbf"), "{error}");
    }
}
