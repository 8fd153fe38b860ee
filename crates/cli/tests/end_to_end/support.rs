//! A lab for one test: made, used and removed by the real program.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{io, process, thread};

use drainpipe_api_types::{HostView, MigrationView, VmList, VmState, VmView};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_hypervisor_qemu::QemuUser;
use drainpipe_lab::Lab;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::backend::{self, Backend};
use crate::drain::ask;
use crate::guest::Guest;
use crate::options;
use crate::program::{DRAINPIPE, FAILED, Output, Running, command, command_of, drainpipe};

/// Long enough, even on a very busy machine, for anything that should happen at once. It detects a hang; it promises
/// nothing.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// A name that no other test, and no other run, uses.
pub(crate) fn unique_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("e2e-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A lab with its agents, with the hosts `a` and `b` by default. It goes down with the test, however that ends.
pub(crate) struct TestLab {
    name: String,
    files: TempDir,
    guests: AtomicU8,
}

impl TestLab {
    /// Two links that are as fast as the machine.
    #[track_caller]
    pub(crate) fn fast() -> Self {
        Self::up(&["--link", "unlimited", "--link", "unlimited"])
    }

    /// Two links on which a guest of 160 MiB is in flight for a second. On a busy machine, the agents may have to wait
    /// that long for a core before they spread QEMU's connections over both.
    #[track_caller]
    pub(crate) fn brisk() -> Self {
        Self::up(&["--link", "500", "--link", "500"])
    }

    /// Two links on which a guest of 160 MiB is in flight for about ten seconds.
    #[track_caller]
    pub(crate) fn slow() -> Self {
        Self::up(&["--link", "20", "--link", "20"])
    }

    /// A lab with these arguments of `drainpipe lab up`.
    #[track_caller]
    pub(crate) fn up(arguments: &[&str]) -> Self {
        Self::up_by(DRAINPIPE, arguments)
    }

    /// A lab made by this program, whose agents are this program too.
    #[track_caller]
    pub(crate) fn up_by(program: &str, arguments: &[&str]) -> Self {
        let name = unique_name();
        let lab = Self { name, files: TempDir::new().unwrap(), guests: AtomicU8::new(0) };
        // QEMU's user must be able to run a program that stands in for QEMU.
        fs::set_permissions(lab.files.path(), fs::Permissions::from_mode(0o711)).unwrap();
        let backend = Backend::of_test().lab_arguments(arguments);
        let backend: Vec<&str> = backend.iter().map(String::as_str).collect();
        let words = [&["lab", "up", &lab.name], &backend[..], arguments].concat();
        let words: Vec<String> = words.into_iter().map(backend::naming_daemon).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Running::start(command_of(program, &words)).wait().done();
        lab
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Its hosts.
    pub(crate) fn hosts(&self) -> Vec<String> {
        Lab::open(&self.name).map(|lab| lab.spec().hosts.clone()).unwrap_or_default()
    }

    /// A directory for the test's own files, removed with the lab.
    pub(crate) fn files(&self) -> &Path {
        self.files.path()
    }

    /// The lab's directory for a host or for `client`: `agent.toml`, `agent.log`, `agent.sock`, `pki/`, `state/`,
    /// `run/`.
    pub(crate) fn directory(&self, node: &str) -> PathBuf {
        Path::new("/run/drainpipe/lab").join(&self.name).join(node)
    }

    pub(crate) fn namespace(&self, node: &str) -> PathBuf {
        PathBuf::from(format!("/run/netns/drainpipe-{}-{node}", self.name))
    }

    /// Runs the program; it asks the agent of host `a`.
    #[track_caller]
    pub(crate) fn drainpipe(&self, arguments: &[&str]) -> Output {
        self.start(arguments).wait()
    }

    /// Like [`Self::drainpipe`], without waiting for its end.
    #[track_caller]
    pub(crate) fn start(&self, arguments: &[&str]) -> Running {
        let mut command = command(arguments);
        command.env("DRAINPIPE_AGENT", self.directory("a").join("agent.sock"));
        Running::start(command)
    }

    /// What the program prints with `--json`.
    #[track_caller]
    pub(crate) fn json<T: DeserializeOwned>(&self, arguments: &[&str]) -> T {
        let printed = self.drainpipe(&[arguments, &["--json"]].concat()).done();
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{arguments:?}: {error}\n{printed}"))
    }

    /// Like [`Self::json`], for a list that some host could not be asked for: the exit code says so.
    #[track_caller]
    pub(crate) fn incomplete_json<T: DeserializeOwned>(&self, arguments: &[&str]) -> T {
        let output = self.drainpipe(&[arguments, &["--json"]].concat());
        assert_eq!(output.code, FAILED, "{output:#?}");
        serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:#?}"))
    }

    pub(crate) fn lab(&self) -> Lab {
        Lab::open(&self.name).unwrap()
    }

    /// Runs a program on a host or on `client`.
    #[track_caller]
    pub(crate) fn exec(&self, node: &str, program: &[&str]) -> Output {
        drainpipe(&[&["lab", "exec", &self.name, node, "--"], program].concat())
    }

    #[track_caller]
    pub(crate) fn fault(&self, words: &str) {
        let words: Vec<&str> = words.split(' ').collect();
        drainpipe(&[&["lab", "fault", &self.name], words.as_slice()].concat()).done();
    }

    /// Moves a VM, which must succeed, and says what it took.
    #[track_caller]
    pub(crate) fn migrate(&self, vm: &str, host: &str, arguments: &[&str]) -> MigrationResult {
        let result: MigrationResult = self.json(&[&["migrate", vm, host], arguments].concat());
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        self.assert_runs_on(vm, host);
        result
    }

    /// Fails the test unless the VM runs on this host, and nothing of it is left on any other.
    #[track_caller]
    pub(crate) fn assert_runs_on(&self, vm: &str, host: &str) {
        let found = self.answering(vm);
        assert_eq!((found.host.as_str(), found.state), (host, VmState::Running), "{found:#?}");
        let hosts = self.hosts();
        let with_qemu = hosts.iter().filter(|host| self.qemu_pid(host, vm).is_some());
        assert_eq!(with_qemu.collect::<Vec<_>>(), [host], "hosts on which the VM has a QEMU");
    }

    /// A VM, once its QEMU answers. On a busy machine, that may take longer than the lists wait for it.
    #[track_caller]
    fn answering(&self, vm: &str) -> VmView {
        let end = Instant::now() + PATIENCE;
        loop {
            let list = self.vms();
            let found: Vec<_> = list.vms.iter().filter(|view| view.name == vm).collect();
            let [found] = found[..] else { panic!("one VM {vm} is expected: {list:#?}") };
            if found.state != VmState::Unknown {
                return found.clone();
            }
            if Instant::now() > end {
                let qemu =
                    self.qemu_pid(&found.host, vm).map(|pid| threads(&pid.as_raw_nonzero().to_string()));
                panic!("its QEMU does not answer: {found:#?}; its threads: {}", qemu.unwrap_or_default());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Boots a guest on host `a`, with all but 112 MiB of its memory filled, and returns when it is ready. 160 MiB
    /// suffice for most tests.
    #[track_caller]
    pub(crate) fn start_guest(&self, name: &str, memory_mib: u64, kernel_parameters: &str) -> Guest {
        if Backend::of_test() == Backend::Libvirt {
            let guest = self.start_domain("a", name, memory_mib, kernel_parameters);
            self.wait_for_domain(name);
            return guest;
        }
        let guest = Guest::new(name, self.guest_address(), self.namespace("client"));
        self.create(&guest.specification(memory_mib, kernel_parameters), name);
        self.drainpipe(&["vm", "start", name]).done();
        guest.wait_until_ready();
        guest
    }

    /// Boots a VM that is off, as its owner would.
    #[track_caller]
    pub(crate) fn start_again(&self, host: &str, name: &str) {
        match Backend::of_test() {
            Backend::Qemu => {
                self.drainpipe(&["vm", "start", name, "--agent", &self.agent_socket(host)]).done();
            }
            Backend::Libvirt => drop(self.virsh(host, &["start", name]).done()),
        }
    }

    /// Defines a VM on host `a`.
    #[track_caller]
    pub(crate) fn create(&self, specification: &str, name: &str) {
        let file = self.write(&format!("{name}.toml"), specification);
        self.drainpipe(&["vm", "create", &file]).done();
    }

    /// Writes a file for the test, and returns its path.
    #[track_caller]
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let file = self.files().join(name);
        fs::write(&file, text).unwrap();
        file.to_str().expect("temporary directories have plain names").to_owned()
    }

    /// An address in the guest network that no other guest of this lab has.
    pub(crate) fn guest_address(&self) -> std::net::Ipv4Addr {
        let number = self.guests.fetch_add(1, Ordering::Relaxed);
        let address = drainpipe_lab::GUEST_NETWORK.hosts().nth(9 + usize::from(number));
        address.expect("no test has so many guests")
    }

    /// The address of a host's agent.
    pub(crate) fn agent_address(&self, host: &str) -> SocketAddr {
        let address = self.lab().spec().management_address(host).unwrap();
        SocketAddr::from((address, drainpipe_agent::store::config::DEFAULT_PORT))
    }

    pub(crate) fn agent_socket(&self, host: &str) -> String {
        self.directory(host).join("agent.sock").display().to_string()
    }

    pub(crate) fn agent_log(&self, host: &str) -> String {
        fs::read_to_string(self.directory(host).join("agent.log")).unwrap_or_default()
    }

    /// The process of a host's agent, if it runs.
    #[track_caller]
    pub(crate) fn agent_pid(&self, host: &str) -> Option<Pid> {
        let found = self.pids(host, &[" agent --config "]);
        // Its children have its command line until they execute another program, and lower numbers if these have begun
        // again.
        found.iter().copied().find(|pid| parent(*pid).is_none_or(|parent| !found.contains(&parent)))
    }

    /// The QEMU of a VM on a host, if it runs.
    #[track_caller]
    pub(crate) fn qemu_pid(&self, host: &str, vm: &str) -> Option<Pid> {
        self.pids(host, &["qemu", &format!("guest={vm},")]).first().copied()
    }

    /// Processes on a host whose command lines contain all these words.
    #[track_caller]
    pub(crate) fn pids(&self, host: &str, words: &[&str]) -> Vec<Pid> {
        let processes = self.lab().processes(host).unwrap().into_iter();
        let found = processes.filter(|process| words.iter().all(|word| process.command.contains(word)));
        found.map(|process| Pid::from_raw(process.pid).expect("the kernel named it")).collect()
    }

    /// Ends a host's agent with this signal, and returns when it is gone.
    #[track_caller]
    pub(crate) fn stop_agent(&self, host: &str, signal: Signal) {
        let pid = self.agent_pid(host).expect("the agent runs");
        let agent = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        kill_process(pid, signal).unwrap();
        // The process file becomes readable when the kernel has also sent what the agent's end causes, such as a QEMU's
        // stop.
        let has_ended =
            || poll(&mut [PollFd::new(&agent, PollFlags::IN)], Some(&Timespec::default())) == Ok(1);
        eventually("the agent ends", has_ended);
    }

    /// Starts a host's agent again, and returns when it answers.
    #[track_caller]
    pub(crate) fn start_agent(&self, host: &str) {
        self.start_agent_by(host, &[DRAINPIPE]);
    }

    /// Like [`Self::start_agent`], but run by the program that these words name.
    #[track_caller]
    pub(crate) fn start_agent_by(&self, host: &str, words: &[&str]) {
        self.spawn_agent(host, words);
        self.wait_for_agent(host);
    }

    /// Like [`Self::start_agent_by`], without waiting for the agent's answer.
    #[track_caller]
    pub(crate) fn spawn_agent(&self, host: &str, words: &[&str]) {
        let [config, log] = ["agent.toml", "agent.log"].map(|file| self.directory(host).join(file));
        let program = [words, &["agent", "--config", config.to_str().unwrap()]].concat();
        let mut child = self.lab().spawn(host, &program, &log).unwrap();
        // It ends with the lab at the latest.
        thread::spawn(move || child.wait());
    }

    /// Waits until a host's agent answers.
    #[track_caller]
    pub(crate) fn wait_for_agent(&self, host: &str) {
        eventually("the agent answers", || ask::<HostView>(self, host, "/v1/host", None).is_ok());
    }

    /// All VMs of all hosts, as host `a` lists them, without starting the program: for questions that are repeated.
    #[track_caller]
    pub(crate) fn vms(&self) -> VmList {
        ask(self, "a", "/v1/vms?scope=all", None).unwrap()
    }

    /// The migrations that a host's agent knows, newest first, without starting the program.
    #[track_caller]
    pub(crate) fn migrations(&self, host: &str) -> Vec<MigrationView> {
        ask(self, host, "/v1/migrations", None).unwrap()
    }

    /// Starts a host's agent, which was stopped before and must refuse to start.
    #[track_caller]
    pub(crate) fn refused_agent(&self, host: &str) -> Output {
        let config = self.directory(host).join("agent.toml");
        self.exec(host, &[DRAINPIPE, "agent", "--config", config.to_str().unwrap()])
    }

    /// Changes a host's agent.toml. The agent reads it when it restarts.
    #[track_caller]
    pub(crate) fn configure(&self, host: &str, from: &str, to: &str) {
        let file = self.directory(host).join("agent.toml");
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "`{from}` is not in\n{text}");
        fs::write(&file, text.replace(from, to)).unwrap();
    }

    /// The parts of the hosts' network that migrations may change, to be compared before and after.
    #[track_caller]
    pub(crate) fn network(&self) -> [HostNetwork; 2] {
        ["a", "b"].map(|host| HostNetwork::read(self, host))
    }

    /// The sockets that are bound to ports of the migration range, a line each.
    #[track_caller]
    pub(crate) fn migration_ports(&self, host: &str) -> String {
        let filter = "( sport >= :49152 and sport <= :49215 )";
        self.exec(host, &["ss", "-Htuln", filter]).done()
    }

    /// Fails the test unless the hosts' network is what it was.
    #[track_caller]
    pub(crate) fn assert_network_as(&self, before: &[HostNetwork; 2]) {
        for (now, before) in self.network().iter().zip(before) {
            let (new, gone) = (now.lines_not_in(before), before.lines_not_in(now));
            assert!(new.is_empty() && gone.is_empty(), "left behind: {new:#?}; missing: {gone:#?}");
        }
    }
}

impl TestLab {
    /// Prints the last output of the QEMUs and consoles of a host's domains, if it has libvirt.
    fn print_logs_of_domains(&self, host: &str) {
        let files = fs::read_dir(self.directory(host).join("libvirt/log/qemu"));
        for file in files.into_iter().flatten().flatten() {
            self.print_end(host, &file.path());
        }
    }

    /// Prints the last that the kernel of a host said, if the host is an emulated machine.
    fn print_console(&self, host: &str) {
        let console = self.directory(host).join("machine/console.log");
        if console.exists() {
            self.print_end(host, &console);
        }
    }

    fn print_end(&self, host: &str, file: &Path) {
        let said = fs::read(file).unwrap_or_default();
        let last = String::from_utf8_lossy(&said[said.len().saturating_sub(LOG_SHOWN_BYTES)..]);
        eprintln!("{} on {host} in {} ends with:\n{last}", file.display(), self.name);
    }
}

impl Drop for TestLab {
    fn drop(&mut self) {
        if thread::panicking() {
            for host in self.hosts() {
                eprintln!("the log of agent {host} in {}:\n{}", self.name, self.agent_log(&host));
                self.print_logs_of_domains(&host);
                self.print_console(&host);
            }
        }
        let down = drainpipe(&["lab", "down", &self.name]);
        assert!(down.code == 0 || thread::panicking(), "{} is not removed: {down:#?}", self.name);
    }
}

/// How much of each domain's log, and of each machine's console, is shown when a test has failed.
const LOG_SHOWN_BYTES: usize = 3000;

/// The process that started this one, unless it has ended.
fn parent(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    Pid::from_raw(parent.trim().parse().ok()?)
}

/// What each thread of a process waits for, according to the kernel.
pub(crate) fn threads(pid: &str) -> String {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return String::new() };
    let lines = tasks.filter_map(Result::ok).map(|task| {
        let path = task.path();
        format!("{} {} {}\n", read(path.join("comm")), read(path.join("wchan")), read(path.join("stack")))
    });
    lines.collect()
}

/// Waits until `condition` holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "{what}: not within {PATIENCE:?}");
        // Many conditions ask agents, which are built without optimisation.
        thread::sleep(Duration::from_millis(50));
    }
}

/// The parts of a host's network that migrations may change, a line each: addresses, routes, settings. Only links that
/// migrations use are included, since guests' taps come and go with the guests; and without their numbers, since a link
/// that is made again gets another one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HostNetwork(Vec<String>);

impl HostNetwork {
    #[track_caller]
    fn read(lab: &TestLab, host: &str) -> Self {
        let printed = lab.exec(host, &["bash", "-c", NETWORK]).done();
        // The kernel itself manages link-local and multicast addresses, and they settle after a while.
        let kernels = |line: &&str| line.contains("fe80:") || line.contains("ff00:");
        let lines = printed.lines().filter(|line| !kernels(line) || line.contains("proto 215"));
        Self(lines.map(|line| format!("{host}: {}", line.trim_end())).collect())
    }

    fn lines_not_in(&self, other: &Self) -> Vec<&str> {
        self.0.iter().filter(|line| !other.0.contains(line)).map(String::as_str).collect()
    }
}

/// As few programs as possible, since many tests wait until the network is as it was.
const NETWORK: &str = "of_links() { for link in lo mgmt e0 e1; do echo $1 dev $link; done; }; \
    of_links 'address show' | ip -oneline -force -batch - | cut -d: -f2-; \
    { of_links 'route show table all'; echo rule; echo route show table all proto 215; } | ip -6 -force -batch -; \
    { echo rule; echo route show table all; } | ip -4 -force -batch -; \
    grep . /proc/sys/net/ipv[46]/fib_multipath_hash_policy \
    /proc/sys/net/ipv[46]/conf/{all,default,e0,e1}/ignore_routes_with_linkdown";

/// The speed of each link of [`lab_for_measuring`]: 1000, or what `DRAINPIPE_MEASURE_LINKS_MBPS` says.
pub(crate) fn measured_links_mbps() -> u32 {
    std::env::var("DRAINPIPE_MEASURE_LINKS_MBPS").map_or(1000, |mbps| mbps.parse().expect("a number"))
}

/// Two links, and the newer QEMU if there is one. With `DRAINPIPE_MEASURE_OWN_CPUS=1` each host has a core of its own.
pub(crate) fn lab_for_measuring() -> TestLab {
    let mbps = measured_links_mbps().to_string();
    let mut up = vec!["--link", &mbps, "--link", &mbps];
    let qemu = options::other_qemu();
    if let Some(qemu) = &qemu {
        up.extend(["--qemu", qemu]);
    }
    if std::env::var_os("DRAINPIPE_MEASURE_ENCRYPTED").is_some() {
        up.push("--untrusted");
    }
    if std::env::var_os("DRAINPIPE_MEASURE_OWN_CPUS").is_some() {
        up.push("--own-cpus");
    }
    TestLab::up(&up)
}

/// Gives a directory to the user as which a QEMU runs in a lab, so that a program in it that stands in for QEMU may
/// write there.
pub(crate) fn give_to_user_of(qemu: &str, directory: &Path) -> io::Result<()> {
    let QemuUser { uid, gid } = QemuUser::of_lab(Path::new(qemu));
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))?;
    chown(directory, Some(uid), Some(gid))
}
