//! The hosts of an emulated lab: machines with a kernel of their own.

use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor_qemu::host_lacks_kvm;
use drainpipe_lab::{Lab, MachineSpec, Streams};
use tokio::time::{Instant, sleep};

use super::{problem, unpacked};
use crate::arguments::LabUpArguments;
use crate::exit::Exit;

/// Without KVM, an agent and the QEMU that it asks what it can do take ten times as long as elsewhere.
const AGENT_DEADLINE: Duration = Duration::from_mins(3);
const AGENT_POLL: Duration = Duration::from_millis(200);

/// Starts the words after the first, a file for its output, and leaves it alone.
const DETACH: &str = r#"log=$1; shift; setsid "$@" >>"$log" 2>&1 </dev/null &"#;

/// The machines of the hosts, if they are to be emulated.
pub(super) fn machines(arguments: &LabUpArguments) -> Result<Option<MachineSpec>, Problem> {
    let Some(directory) = &arguments.machines.emulated else { return Ok(None) };
    let wrong = |error: io::Error| {
        Problem::bad_input(format!(
            "--emulated {}: {error}; `scripts/emulated` makes target/emulated, and says where it is",
            directory.display()
        ))
    };
    Ok(Some(MachineSpec {
        qemu: unpacked("--qemu", &arguments.qemu)?.unwrap_or_else(|| arguments.qemu.clone()),
        boot_files: directory.canonicalize().map_err(wrong)?,
        memory_mib: arguments.machines.machine_memory_mib,
        cpus: arguments.machines.machine_cpus,
        kvm: host_lacks_kvm().is_none(),
    }))
}

/// Runs a program in a machine, as its own; its code, as a shell would give it.
pub(super) fn exec(lab: &Lab, host: &str, program: &[String]) -> Result<Exit, Problem> {
    let (mut output, mut errors) = (io::stdout().lock(), io::stderr().lock());
    let streams = Streams { input: Box::new(io::stdin()), output: &mut output, errors: &mut errors };
    let code = lab.exec(host, program.to_vec(), streams).map_err(problem)?;
    std::process::exit(code);
}

/// Starts a daemon in a machine, with its output appended to `log`.
pub(super) fn spawn(lab: &Lab, host: &str, arguments: &[&Path], log: &Path) -> Result<(), Problem> {
    let mut words: Vec<String> = ["sh", "-c", DETACH, "sh"].map(str::to_owned).into();
    words.extend([log].iter().chain(arguments).map(|word| word.display().to_string()));
    run(lab, host, words)
}

/// Waits until the agent in a machine answers, and reaches all others.
pub(super) async fn wait_for_agent(lab: &Lab, host: &str, program: &Path) -> Result<(), Problem> {
    let end = Instant::now() + AGENT_DEADLINE;
    loop {
        let words = vec![program.display().to_string(), "hosts".into()];
        let Err(refusal) = run(lab, host, words) else { return Ok(()) };
        if Instant::now() >= end {
            let log = lab.node_dir(host).map_err(problem)?.join("agent.log");
            let log = std::fs::read_to_string(log).unwrap_or_default();
            return Err(refusal.context(format!("the agent of {host} did not start; its log:\n{log}")));
        }
        sleep(AGENT_POLL).await;
    }
}

/// Fails with what it says if it fails.
fn run(lab: &Lab, host: &str, words: Vec<String>) -> Result<(), Problem> {
    let said = &mut Vec::new();
    let input: Box<dyn Read + Send> = Box::new(io::empty());
    let streams = Streams { input, output: &mut io::sink() as &mut dyn Write, errors: said };
    match lab.exec(host, words, streams).map_err(problem)? {
        0 => Ok(()),
        code => Err(Problem::failed(format!("code {code}: {}", String::from_utf8_lossy(said).trim_end()))),
    }
}
