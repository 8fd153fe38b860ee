//! A libvirt for each host: its own daemon, with its own configuration, state, host name and process ids.
//!
//! ```text
//! unshare                  waits, and takes all below with it
//!   sh                     process 1 of the host's libvirt: adopts and reaps what daemonizes
//!     libvirtd             or virtqemud; ended and started again at will
//!     qemu-system-x86_64   outlives its daemon, as everywhere
//! ```
//!
//! They share the host's network namespace, by which [`Lab::down`](crate::Lab::down) finds them. Their mounts are
//! their own: what libvirt keeps in `/etc`, `/run` and `/var` are directories of the lab's, so that programs outside
//! reach its socket, and QEMU's control sockets, as files:
//!
//! | inside | in the host's directory |
//! |---|---|
//! | `/etc/libvirt` | `libvirt/etc` |
//! | `/run/libvirt` | `libvirt/run` |
//! | `/var/lib/libvirt`, such as `qemu/domain-1-NAME/monitor.sock` | `libvirt/lib` |
//! | `/var/cache/libvirt` | `libvirt/cache` |
//! | `/var/log/libvirt` | `libvirt/log` |
//!
//! The process ids are nested, so that QEMUs that have daemonized are children of the `sh`, and no domain outlives it.
//! libvirt's pid files, such as `run/qemu/NAME.pid`, have inner numbers. From outside, the same process is found by
//! the last number of `NSpid` in `/proc/PID/status`, or among [`Lab::processes`](crate::Lab::processes) by
//! `guest=NAME,` in its command line.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde::Serialize;

use crate::enter;
use crate::error::Error;
use crate::libvirt_daemon::LIBVIRTD;
use crate::processes::{self, NamespaceId};
use crate::spec::{LabSpec, SpecError};
use crate::state::{self, LabLock, namespace_file};
use crate::tools;

/// The programs that a libvirt needs, and the Debian packages that have them.
const TOOLS: [(&str, &str); 4] =
    [("virsh", "libvirt-clients"), ("unshare", "util-linux"), ("nsenter", "util-linux"), ("mount", "mount")];

/// What libvirt has found out about the machine's QEMUs, which takes seconds. libvirt itself sees whether it is still
/// true. It is for all labs with the same QEMU and the same libvirt, and goes with a reboot.
const QEMU_CAPABILITIES: &str = "/run/drainpipe/lab-qemu-capabilities";

/// The QEMU of libvirt's domains.
const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// Its mounts take milliseconds.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// A daemon ends within this if nobody keeps it.
const END_LIMIT: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(2);

/// Lines of a log that an error quotes.
const LAST_WORDS_LINES: usize = 4;

/// Process 1 of a host's libvirt. Its arguments: the directory for it all, the host's name, the directory for what is
/// known of QEMU, the QEMU to be used, the daemon. A QEMU aborts where it finds modules of another, as does a libvirt.
///
/// `/run` is hidden but for Drainpipe's own: no service of the machine's, such as D-Bus, is spoken to. libvirt would make
/// its directories at its start where a package has not; so they may stay. `sh` reaps what it adopts while it waits; process 1 that handles no TERM would ignore it.
const INIT: &str = r#"set -eu
trap 'exit 0' TERM
exec 9</run/drainpipe
mount -t tmpfs -o mode=755 none /run
mkdir -p /run/drainpipe /run/libvirt /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt
mount --no-canonicalize --bind /proc/self/fd/9 /run/drainpipe
exec 9<&-
mount --bind "$3" "$1/cache/qemu/capabilities"
mount --bind "$1/run" /run/libvirt
mount --bind "$1/etc" /etc/libvirt
mount --bind "$1/lib" /var/lib/libvirt
mount --rbind "$1/cache" /var/cache/libvirt
mount --bind "$1/log" /var/log/libvirt
for file in hosts passwd group; do mount --bind "$1/$file" "/etc/$file"; done
if [ /usr/bin/qemu-system-x86_64 != "$4" ]; then
    mount --bind "$4" /usr/bin/qemu-system-x86_64
    for part in lib/x86_64-linux-gnu/qemu share/qemu share/seabios; do
        other=${4%/bin/*}/$part
        if [ -d "$other" ]; then mount --bind "$other" "/usr/$part"; fi
    done
fi
case $5 in */sbin/*)
    for other in "${5%/sbin/*}"/lib/x86_64-linux-gnu/libvirt* "${5%/sbin/*}"/lib/libvirt "${5%/sbin/*}"/share/libvirt; do
        part=${other#"${5%/sbin/*}"}
        if [ -e "/usr$part" ]; then mount --bind "$other" "/usr$part"; fi
    done
esac
echo "$2" >/proc/sys/kernel/hostname
: >"$1/ready"
sleep infinity &
wait
"#;

/// Access is by the permissions of the socket: root's.
const DAEMON_CONF: &str = "\
auth_unix_rw = \"none\"
unix_sock_group = \"root\"
unix_sock_rw_perms = \"0700\"
";

/// Files stay their owners', as all hosts share them; there are no control groups, which would stay behind.
const QEMU_CONF: &str = "\
stdio_handler = \"file\"
security_driver = \"none\"
user = \"root\"
group = \"root\"
dynamic_ownership = 0
remember_owner = 0
namespaces = []
cgroup_controllers = []
";

/// libvirt does not start without this user and group, which it has no use for here: the package that makes them is
/// also the one that would run a libvirt on this machine.
const QEMU_USER: &str = "libvirt-qemu:x:65534:65534::/nonexistent:/usr/sbin/nologin";
const QEMU_GROUP: &str = "libvirt-qemu:x:65534:";

/// What is done to the daemon of a host's libvirt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonChange {
    /// It is asked to end (TERM), and waited for. In the middle of a migration it may refuse.
    Stop,
    /// It is killed.
    Kill,
    /// It is started, if it does not run, and so are a modular libvirt's others.
    Start,
}

impl fmt::Display for DaemonChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop => "stop",
            Self::Kill => "kill",
            Self::Start => "start",
        })
    }
}

/// Finds every program that a lab with libvirt will call, besides those of every lab.
pub(crate) fn check_installed(spec: &LabSpec) -> Result<(), Error> {
    if spec.libvirt_program() == Path::new(LIBVIRTD) {
        tools::check_all_installed(&[(LIBVIRTD, "libvirt-daemon")])?;
    }
    tools::check_all_installed(&TOOLS)
}

/// Checks that `host` has a libvirt.
pub(crate) fn check_host(spec: &LabSpec, host: &str) -> Result<(), SpecError> {
    spec.host_index(host)?;
    let none = || SpecError::NoLibvirt { lab: spec.name.clone(), host: host.to_owned() };
    spec.libvirt.then_some(()).ok_or_else(none)
}

/// Where the libvirt of `host` is reached from outside.
pub(crate) fn socket(spec: &LabSpec, host: &str) -> Result<PathBuf, SpecError> {
    Ok(directory(&spec.name, host).join("run").join(spec.libvirt_daemon_kind()?.socket()))
}

fn directory(lab: &str, host: &str) -> PathBuf {
    state::directory(lab).join(host).join("libvirt")
}

/// Gives every host its libvirt.
pub(crate) fn start_all(spec: &LabSpec, lock: &LabLock) -> Result<(), Error> {
    let began = spec.hosts.iter().map(|host| begin(spec, host, lock)).collect::<Result<Vec<_>, _>>()?;
    for (host, child) in spec.hosts.iter().zip(began) {
        wait_until_ready(spec, host, child)?;
        start(spec, host, lock)?;
    }
    Ok(())
}

/// Starts process 1 of a host's libvirt.
fn begin(spec: &LabSpec, host: &str, lock: &LabLock) -> Result<Child, Error> {
    let own = directory(&spec.name, host);
    write_files(spec, &own)?;
    let qemu = spec.libvirt_qemu.as_deref().unwrap_or(Path::new(QEMU));
    let daemon = spec.libvirt_program();
    let capabilities = capabilities(qemu, daemon);
    create_directory(&capabilities)?;
    let entering = enter::words_without_control_groups(spec, host)?;
    let isolating = "unshare --mount --uts --pid --mount-proc --fork --kill-child sh -c";
    let mut arguments: Vec<&str> = isolating.split(' ').collect();
    let [own_name, capabilities, qemu, daemon] =
        [own.as_path(), &capabilities, qemu, daemon].map(|path| path.display().to_string());
    arguments.extend([INIT, "sh", &own_name, host, &capabilities, &qemu, &daemon]);
    enter::spawn(&spec.namespace(host), &entering, &arguments, &own.join("init.log"), lock)
}

/// libvirt keeps them by the name of the QEMU, which is the same for all.
fn capabilities(qemu: &Path, daemon: &Path) -> PathBuf {
    let name = |path: &Path| path.display().to_string().trim_start_matches('/').replace('/', "-");
    Path::new(QEMU_CAPABILITIES).join(name(daemon)).join(name(qemu))
}

fn write_files(spec: &LabSpec, own: &Path) -> Result<(), Error> {
    for name in ["run", "etc", "lib", "cache/qemu/capabilities", "log/qemu"] {
        create_directory(&own.join(name))?;
    }
    let settings = format!("{DAEMON_CONF}host_uuid = \"{}\"\n", random_uuid()?);
    let kind = spec.libvirt_daemon_kind()?;
    for name in [kind.name()].iter().chain(kind.beside()) {
        write(&own.join("etc").join(name).with_extension("conf"), &settings)?;
    }
    write(&own.join("etc/qemu.conf"), QEMU_CONF)?;
    write(&own.join("hosts"), &hosts_file(spec)?)?;
    for (file, text) in user_files()? {
        write(&own.join(file), &text)?;
    }
    Ok(())
}

/// `passwd` and `group` of this machine, with the user and the group that libvirt does not start without.
pub fn user_files() -> Result<[(&'static str, String); 2], Error> {
    let with = |file, line| -> Result<(&'static str, String), Error> {
        let machines = Path::new("/etc").join(file);
        let text = fs::read_to_string(&machines).map_err(Error::io("read", &machines))?;
        Ok((file, with_entry(&text, line)))
    };
    Ok([with("passwd", QEMU_USER)?, with("group", QEMU_GROUP)?])
}

/// A file such as `/etc/passwd` with this line, unless it has one of that name.
fn with_entry(text: &str, line: &str) -> String {
    let name = |line: &str| line.split(':').next().map(str::to_owned);
    if text.lines().any(|known| name(known) == name(line)) {
        return text.to_owned();
    }
    format!("{}\n{line}\n", text.trim_end())
}

/// Names lead to the management network: what is to go over a link names its address.
fn hosts_file(spec: &LabSpec) -> Result<String, SpecError> {
    let line = |host: &String| Ok(format!("{} {host}\n", spec.management_address(host)?));
    let lines = spec.hosts.iter().map(line).collect::<Result<String, SpecError>>()?;
    Ok(format!("127.0.0.1 localhost\n{lines}"))
}

fn create_directory(path: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(Error::io("create the directory", path))
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(Error::io("write", path))
}

fn random_uuid() -> Result<String, Error> {
    let path = "/proc/sys/kernel/random/uuid";
    Ok(fs::read_to_string(path).map_err(Error::io("read", path))?.trim().to_owned())
}

fn wait_until_ready(spec: &LabSpec, host: &str, mut child: Child) -> Result<(), Error> {
    let own = directory(&spec.name, host);
    let deadline = Instant::now() + READY_LIMIT;
    while !own.join("ready").exists() {
        let ended = child.try_wait().map_err(Error::io("wait for a process of", &own))?.is_some();
        if ended || Instant::now() >= deadline {
            return Err(not_started(host, &own.join("init.log")));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Ends or starts the daemon of a host's libvirt.
pub(crate) fn change(spec: &LabSpec, host: &str, change: DaemonChange, lock: &LabLock) -> Result<(), Error> {
    match change {
        DaemonChange::Stop => end(spec, host, Signal::TERM),
        DaemonChange::Kill => end(spec, host, Signal::KILL),
        DaemonChange::Start => start(spec, host, lock),
    }
}

/// Starts what does not run of a host's libvirt; back when it answers.
fn start(spec: &LabSpec, host: &str, lock: &LabLock) -> Result<(), Error> {
    let kind = spec.libvirt_daemon_kind()?;
    for name in kind.beside() {
        if running(spec, host, name)?.is_none() {
            run(spec, host, &spec.libvirt_program().with_file_name(name), lock)?;
        }
    }
    if daemon(spec, host)?.is_some() {
        return Ok(());
    }
    run(spec, host, spec.libvirt_program(), lock)?;
    let name = kind.name();
    let uri = format!("qemu:///system?socket={}", socket(spec, host)?.display());
    tools::run_to_end(&["virsh", "--quiet", "connect", &uri], lock).map_err(|error| {
        tracing::debug!(host, %error, "{name} does not answer");
        not_started(host, &directory(&spec.name, host).join(format!("log/{name}.log")))
    })
}

/// Runs one of libvirt's daemons on a host. It goes into the background before it has started its drivers, and ends if one of
/// them fails.
fn run(spec: &LabSpec, host: &str, program: &Path, lock: &LabLock) -> Result<(), Error> {
    let first = processes::by_inner_pid(&namespaces(spec, host), 1)?.ok_or_else(|| Error::Incomplete {
        name: spec.name.clone(),
        what: format!("the libvirt of host {host} has lost its first process"),
    })?;
    let entering = enter::on_own_cpu(spec, host)?;
    let entered = format!("nsenter --target {first} --mount --uts --pid --net");
    let pid_file = Path::new("/run/libvirt").join(program.file_name().unwrap_or_default());
    let [program, pid_file] =
        [program, &pid_file.with_extension("pid")].map(|path| path.display().to_string());
    let daemon = [program.as_str(), "--daemon", "--pid-file", &pid_file];
    let words: Vec<&str> =
        entering.iter().map(String::as_str).chain(entered.split(' ')).chain(daemon).collect();
    tools::run_to_end(&words, lock)
}

/// The error for a libvirt that is not there, with the last words of `log`.
fn not_started(host: &str, log: &Path) -> Error {
    let text = fs::read_to_string(log).unwrap_or_default();
    let last: Vec<&str> = text.trim().lines().rev().take(LAST_WORDS_LINES).collect();
    let said = last.into_iter().rev().collect::<Vec<_>>().join("; ");
    Error::LibvirtNotStarted { host: host.to_owned(), said }
}

fn end(spec: &LabSpec, host: &str, signal: Signal) -> Result<(), Error> {
    let Some(pid) = daemon(spec, host)? else { return Ok(()) };
    processes::send(pid, signal, &namespaces(spec, host));
    let deadline = Instant::now() + END_LIMIT;
    while daemon(spec, host)? == Some(pid) {
        if Instant::now() >= deadline {
            return Err(Error::LibvirtRemains { host: host.to_owned(), waited: END_LIMIT });
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// The daemon of a host's libvirt, if it runs.
pub(crate) fn daemon(spec: &LabSpec, host: &str) -> Result<Option<Pid>, Error> {
    running(spec, host, spec.libvirt_daemon_kind()?.name())
}

/// One of its daemons, if it runs. Its file may be that of one that was killed, whose number another process has.
fn running(spec: &LabSpec, host: &str, name: &str) -> Result<Option<Pid>, Error> {
    let file = directory(&spec.name, host).join(format!("run/{name}.pid"));
    let text = fs::read_to_string(file).unwrap_or_default();
    let Ok(inner) = text.trim().parse() else { return Ok(None) };
    let is_daemon = |pid: &Pid| {
        let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        command.trim() == name
    };
    Ok(processes::by_inner_pid(&namespaces(spec, host), inner)?.filter(is_daemon))
}

fn namespaces(spec: &LabSpec, host: &str) -> HashSet<NamespaceId> {
    NamespaceId::of_file(&namespace_file(&spec.namespace(host))).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::LinkSpec;

    #[test]
    fn hosts_find_each_other_by_name() {
        let spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default()]);
        assert_eq!(hosts_file(&spec).unwrap(), "127.0.0.1 localhost\n10.77.0.11 a\n10.77.0.12 b\n");
    }

    #[test]
    fn an_entry_is_added_where_it_is_missing() {
        let known = "root:x:0:0::/root:/bin/sh\nlibvirt-qemu:x:64055:107::/:/bin/false\n";
        assert_eq!(with_entry(known, QEMU_USER), known);
        let others = "root:x:0:0::/root:/bin/sh\nlibvirt-qemu2:x:1:1::/:/bin/false";
        assert_eq!(with_entry(others, QEMU_USER), format!("{others}\n{QEMU_USER}\n"));
    }

    #[test]
    fn a_lab_without_libvirt_says_how_to_make_one() {
        let spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default()]);
        let message = |host| check_host(&spec, host).unwrap_err().to_string();
        assert!(message("a").contains("lab up --libvirt"), "{}", message("a"));
        assert!(message("c").contains("no host \"c\""));
        assert_eq!(check_host(&LabSpec { libvirt: true, ..spec.clone() }, "a"), Ok(()));
    }

    #[test]
    fn a_daemon_is_known_by_its_name_wherever_it_is() {
        let of = |daemon: Option<&str>| {
            let libvirt_daemon = daemon.map(PathBuf::from);
            LabSpec { libvirt: true, libvirt_daemon, ..LabSpec::of_two_hosts("x", vec![LinkSpec::default()]) }
        };
        let sockets = [None, Some("virtqemud"), Some("/x/usr/sbin/libvirtd"), Some("/x/usr/sbin/virtqemud")]
            .map(|daemon| socket(&of(daemon), "a").unwrap().file_name().unwrap().to_owned());
        assert_eq!(sockets, ["libvirt-sock", "virtqemud-sock", "libvirt-sock", "virtqemud-sock"]);
        let message = of(Some("/x/usr/sbin/virtlogd")).validate().unwrap_err().to_string();
        assert!(message.contains("/x/usr/sbin/virtlogd is not one of libvirt's daemons"), "{message}");
    }
}
