//! The way of a program onto a node of a lab.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::control_groups;
use crate::cpus::cpu_of;
use crate::error::Error;
use crate::processes::{self, NamespaceId};
use crate::spec::LabSpec;
use crate::state::{LabLock, namespace_file};

/// `ip netns exec` takes milliseconds to enter a namespace.
const ENTER_LIMIT: Duration = Duration::from_secs(10);
const ENTER_POLL: Duration = Duration::from_millis(1);

/// Becomes its arguments, whose output goes where their errors go.
const INTO_LOG: &str = r#"exec "$@" >&2"#;

/// The words before a program that is to run on `node` (a host, or [`CLIENT`](crate::CLIENT)).
pub(crate) fn words(spec: &LabSpec, node: &str) -> Result<Vec<String>, Error> {
    let mut words = words_without_control_groups(spec, node)?;
    words.extend(control_groups::mounting());
    Ok(words)
}

/// The same, for a program that is to find no control groups.
pub(crate) fn words_without_control_groups(spec: &LabSpec, node: &str) -> Result<Vec<String>, Error> {
    spec.check_node(node)?;
    let mut words = on_own_cpu(spec, node)?;
    words.extend(["ip", "netns", "exec"].map(str::to_owned));
    words.push(spec.namespace(node));
    Ok(words)
}

/// The words before a program that is to run on the CPU of `node`; none if it may run on all.
pub(crate) fn on_own_cpu(spec: &LabSpec, node: &str) -> Result<Vec<String>, Error> {
    let Some(cpu) = cpu_of(spec, node)? else { return Ok(vec![]) };
    Ok(vec!["taskset".to_owned(), "--cpu-list".to_owned(), cpu.to_string()])
}

/// Starts a daemon by way of these words in the network namespace: in a session of its own, with its output appended
/// to `log`. Back once it is inside.
///
/// The lock goes along as standard output until then: if we are killed, the lab stays locked until the daemon is where
/// the next `up` or `down` finds it.
pub(crate) fn spawn<A: AsRef<OsStr>>(
    namespace: &str,
    entering: &[String],
    arguments: &[A],
    log: &Path,
    lock: &LabLock,
) -> Result<Child, Error> {
    let errors =
        OpenOptions::new().create(true).append(true).mode(0o600).open(log).map_err(Error::io("open", log))?;
    // A child of ours leads no process group, so setsid(1), taskset(1), ip(8) and sh(1) replace themselves
    // rather than fork: the pid stays the same all the way to the daemon.
    let mut child = Command::new("setsid")
        .args(entering)
        .args(["sh", "-c", INTO_LOG, "sh"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(lock.as_stdout()?)
        .stderr(errors)
        .spawn()
        .map_err(Error::io("run", "setsid"))?;
    wait_until_inside(&mut child, namespace)?;
    Ok(child)
}

fn wait_until_inside(child: &mut Child, namespace: &str) -> Result<(), Error> {
    let file = namespace_file(namespace);
    let target = HashSet::from_iter(NamespaceId::of_file(&file));
    let pid = Pid::from_child(child);
    let deadline = Instant::now() + ENTER_LIMIT;
    while Instant::now() < deadline {
        let ended = child.try_wait().map_err(Error::io("wait for a process in", &file))?.is_some();
        if ended || processes::is_within(pid, &target) {
            return Ok(());
        }
        thread::sleep(ENTER_POLL);
    }
    child.kill().map_err(Error::io("stop a process on its way into", &file))?;
    let command = format!("ip netns exec {namespace}");
    Err(Error::ToolTimeout { command, limit: ENTER_LIMIT })
}
