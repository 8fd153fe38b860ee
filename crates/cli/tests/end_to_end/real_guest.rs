//! A real guest: Debian with systemd and a database (`scripts/guest-debian`), moved by all options while clients use
//! it. Every acknowledged commit must be there, and the clients must notice nothing.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, mem, thread};

use drainpipe_api_types::VmState;
use drainpipe_engine::migration::result::MigrationResult;
use drainpipe_guest::parameters::KERNEL_OPTIONS;
use rustix::process::Signal;

use crate::Test;
use crate::backend::Backend;
use crate::device_disks::Loop;
use crate::domains::{domain_that_boots, with_devices};
use crate::guest::NEWER_MACHINE;
use crate::options::other_qemu;
use crate::program::{Output, Running};
use crate::support::{TestLab, eventually};
use crate::whole;

/// Tests that need a newer QEMU, and what `scripts/guest-debian` makes.
pub(crate) const TESTS: &[Test] = &[("no_acknowledged_commit_is_lost", no_acknowledged_commit_is_lost)];

/// A way to move the guest.
struct GuestMove {
    arguments: &'static [&'static str],
    /// The speed of each link meanwhile.
    mbps: &'static str,
    /// Whether its disk moves along, to the other one of two places.
    takes_disk: bool,
    /// Whether libvirt's domains can move this way.
    suits_domains: bool,
}

const BRISK: GuestMove = GuestMove { arguments: &[], mbps: "500", takes_disk: false, suits_domains: true };

const fn by(arguments: &'static [&'static str]) -> GuestMove {
    GuestMove { arguments, ..BRISK }
}

/// Links so slow that memory changes as fast as it is sent.
const fn in_parts(arguments: &'static [&'static str]) -> GuestMove {
    GuestMove { arguments, mbps: "60", suits_domains: false, ..BRISK }
}

/// The short form uses the first two.
const WAYS: [GuestMove; 10] = [
    by(&["--option", "multichannel"]),
    by(&["--option", "compression", "--encrypt"]),
    by(&["--option", "tcp"]),
    in_parts(&["--post-copy"]),
    by(&["--option", "multichannel", "--encrypt"]),
    by(&["--option", "compression"]),
    in_parts(&["--post-copy", "--encrypt"]),
    by(&["--option", "tcp", "--encrypt"]),
    GuestMove { takes_disk: true, suits_domains: false, ..by(&["--option", "multichannel"]) },
    by(&["--option", "auto"]),
];

const MOVES: usize = 20;
const MOVES_OF_SHORT_FORM: usize = 2;

const MEMORY_MIB: u64 = 320;
const CLIENTS: u32 = 4;

/// For a whole operating system without KVM, on a machine that runs other tests too; alone, it takes 12 s.
const BOOT_DEADLINE: Duration = Duration::from_mins(10);

/// For commands that read all of the database, and for a shutdown.
const DEADLINE: Duration = Duration::from_mins(5);

/// pgbench's own transaction, which also stores the client's number for it.
const TRANSACTION: &str = "\\set number :number + 1
\\set aid random(1, 100000)
\\set tid random(1, 10)
\\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = 1;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (:tid, 1, :aid, :delta, CURRENT_TIMESTAMP);
INSERT INTO acknowledged VALUES (:client_id, :number);
END;
";

/// The number of transactions, and whether all of them add up to the same everywhere.
const SUMS: &str = "SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts)
    AND sum(delta) = (SELECT sum(tbalance) FROM pgbench_tellers)
    AND sum(delta) = (SELECT sum(bbalance) FROM pgbench_branches) FROM pgbench_history";

/// The kernel logs this once if its virtual CPU had to wait for a core, as it does without KVM.
const OF_A_BUSY_HOST: &str = "hrtimer: interrupt took";

/// What this machine lacks for the test.
pub(crate) fn missing() -> Option<String> {
    let built = files().join("built");
    let absent = (!built.exists())
        .then(|| format!("{} is missing: run scripts/as-root scripts/guest-debian", built.display()));
    let tools = ["e2fsck", "debugfs"].into_iter();
    absent.or_else(|| {
        let tool = tools.into_iter().find(|tool| Command::new(tool).arg("-V").output().is_err())?;
        Some(format!("{tool} is not installed: run scripts/setup e2fsprogs"))
    })
}

fn files() -> PathBuf {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest-debian");
    directory.canonicalize().unwrap_or(directory)
}

fn no_acknowledged_commit_is_lost() {
    let mut debian = Debian::boot();
    let at_boot = debian.complaints();
    let mut load = Load::begin(&debian);
    let mut moves = Vec::new();
    let is_possible = |way: &&GuestMove| way.suits_domains || Backend::of_test() == Backend::Qemu;
    let ways = WAYS.iter().filter(is_possible);
    // Each way there, and later back.
    let ways = ways.clone().chain(ways.rev()).cycle();
    let wanted = if whole::is_wanted() { MOVES } else { MOVES_OF_SHORT_FORM };
    for (way, host) in ways.zip(["b", "a"].into_iter().cycle()).take(wanted) {
        moves.push(debian.go(way, host));
        if !load.goes_on(&debian) {
            break;
        }
    }
    let acknowledged = load.end();
    if whole::is_wanted() {
        for moved in &moves {
            moved.tell(&acknowledged);
        }
        eprintln!("{} commits were acknowledged", acknowledged.len());
    }
    debian.assert_has_all(&acknowledged);
    debian.assert_clean_since(&at_boot);
    debian.shut_down();
    debian.assert_disk_is_clean();
}

/// A Debian guest that runs.
struct Debian {
    lab: TestLab,
    address: Ipv4Addr,
    host: &'static str,
    /// The present and the other place of its disk.
    disk: PathBuf,
    other_disk: PathBuf,
    /// A device over the disk, for libvirt, which refuses files on a file system that it does not know to be shared.
    device: Option<Loop>,
}

impl Debian {
    #[track_caller]
    fn boot() -> Self {
        let qemu = other_qemu().expect("this test runs only where there is one");
        let lab = TestLab::up(&["--link", BRISK.mbps, "--link", BRISK.mbps, "--qemu", &qemu]);
        let [disk, other_disk] = ["disk.raw", "other.raw"].map(|name| lab.files().join(name));
        let copy = ["--sparse=always", "--reflink=auto"];
        let copied = Command::new("cp").args(copy).arg(files().join("disk.img")).arg(&disk).status();
        assert!(copied.unwrap().success());
        let device = (Backend::of_test() == Backend::Libvirt).then(|| Loop::over(&disk));
        let debian = Self { address: lab.guest_address(), lab, host: "a", disk, other_disk, device };
        debian.start();
        let end = Instant::now() + BOOT_DEADLINE;
        while debian.try_query("SELECT 1").code != 0 {
            assert!(Instant::now() < end, "its database does not answer within {BOOT_DEADLINE:?}");
            thread::sleep(Duration::from_millis(500));
        }
        debian.run("systemctl is-system-running --wait");
        debian
    }

    #[track_caller]
    fn start(&self) {
        let boots = ["vmlinux", "initramfs.img"].map(|name| files().join(name));
        let line = self.kernel_command_line();
        if let Some(device) = &self.device {
            let xml = domain_that_boots("web", self.address, MEMORY_MIB, &boots, &line);
            self.lab.define_and_start("a", "web", &with_devices(&xml, &device_xml(device.path())));
            return self.lab.wait_for_domain("web");
        }
        let [kernel, initramfs] = boots.each_ref().map(|file| file.display());
        let specification = format!(
            "name = \"web\"\nmemory_mib = {MEMORY_MIB}\nvcpus = 1\nmachine = \"{NEWER_MACHINE}\"\n\
             accelerator = \"tcg\"\nkernel = \"{kernel}\"\ninitramfs = \"{initramfs}\"\n\
             kernel_command_line = \"{line}\"\n\n\
             [[disk]]\npath = \"{disk}\"\nformat = \"raw\"\n\n[[nic]]\nbridge = \"guests\"\n",
            disk = self.disk.display(),
        );
        self.lab.create(&specification, "web");
        self.lab.drainpipe(&["vm", "start", "web"]).done();
    }

    /// Like that of the lab's small guests, except for the watchdog: lockups are to show.
    fn kernel_command_line(&self) -> String {
        format!(
            "{} root=/dev/vda rw rootfstype=ext4 ip={}:::255.255.255.0:guest::off",
            KERNEL_OPTIONS.replace("nowatchdog ", ""),
            self.address
        )
    }

    /// A program of the database's, from the guest's own files, which runs where its clients are.
    fn program(&self, name: &str) -> Command {
        let root = files().join("root");
        let libraries = root.join("usr/lib/x86_64-linux-gnu");
        let mut versions = fs::read_dir(root.join("usr/lib/postgresql")).unwrap();
        let version = versions.next().expect("the guest has one").unwrap().path();
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.lab.namespace("client").display()))
            .arg(libraries.join("ld-linux-x86-64.so.2"))
            .arg("--library-path")
            .arg(&libraries)
            .arg(version.join("bin").join(name))
            .env("PGHOST", self.address.to_string())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres")
            .env("PGCONNECT_TIMEOUT", "20");
        command
    }

    #[track_caller]
    fn try_query(&self, query: &str) -> Output {
        let mut psql = self.program("psql");
        psql.args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--field-separator= "]);
        psql.args(["--set=ON_ERROR_STOP=1", "--command", query]);
        Running::start(psql).wait_for(DEADLINE)
    }

    /// The rows of its answer, a line each.
    #[track_caller]
    fn query(&self, query: &str) -> Vec<String> {
        self.try_query(query).done().lines().map(str::to_owned).collect()
    }

    /// What a program prints in the guest.
    #[track_caller]
    fn run(&self, program: &str) -> Vec<String> {
        self.query(&format!(
            "CREATE TEMPORARY TABLE said (line text); \
             COPY said FROM PROGRAM '{program}' (FORMAT csv, DELIMITER E'\\x01', QUOTE E'\\x02'); \
             SELECT line FROM said"
        ))
    }

    /// Moves the guest to the other host.
    #[track_caller]
    fn go(&mut self, way: &GuestMove, host: &'static str) -> Move {
        for link in ["e0", "e1"] {
            self.lab.fault(&format!("rate {link} {}", way.mbps));
        }
        let place = format!("--disk=vda={}", self.other_disk.display());
        let mut arguments = way.arguments.to_vec();
        arguments.extend(way.takes_disk.then_some(place.as_str()));
        let began = SystemTime::now();
        let result = self.lab.migrate("web", host, &arguments);
        let ended = SystemTime::now();
        if way.takes_disk {
            mem::swap(&mut self.disk, &mut self.other_disk);
        }
        self.host = host;
        Move { way: way.arguments.join(" "), takes_disk: way.takes_disk, result, began, ended }
    }

    /// Fails the test unless all of these commits are in its database, and no others.
    #[track_caller]
    fn assert_has_all(&self, acknowledged: &[Commit]) {
        let commits: BTreeSet<_> = acknowledged.iter().map(|commit| (commit.client, commit.number)).collect();
        let rows = self.query("SELECT client, number FROM acknowledged");
        let there: BTreeSet<_> =
            rows.iter().map(|row| numbers(row)).map(|[client, number]| (client, number)).collect();
        assert_eq!((commits.len(), there.len()), (acknowledged.len(), rows.len()), "one is there twice");
        let lost: Vec<_> = commits.difference(&there).collect();
        let invented: Vec<_> = there.difference(&commits).collect();
        assert!(lost.is_empty() && invented.is_empty(), "lost: {lost:?}; not acknowledged: {invented:?}");
        assert_eq!(self.query(SUMS), [format!("{} t", commits.len())]);
        let mut check = self.program("pg_amcheck");
        check.args(["--database=postgres", "--heapallindexed"]);
        Running::start(check).wait_for(DEADLINE).done();
    }

    /// The warnings of its kernel, its services and its database.
    #[track_caller]
    fn complaints(&self) -> BTreeSet<String> {
        let all = [
            "dmesg --level emerg,alert,crit,err,warn",
            "journalctl --boot --priority err",
            "grep -E \"ERROR:|FATAL:|PANIC:|WARNING:\" -r /var/log/postgresql || test $? = 1",
        ];
        let lines = all.into_iter().flat_map(|program| self.run(program));
        lines.filter(|line| !line.contains(OF_A_BUSY_HOST)).collect()
    }

    /// Fails the test if it warns of more than it did after its boot: on a busy machine without KVM, its kernel finds
    /// clocks that disagree.
    #[track_caller]
    fn assert_clean_since(&self, boot: &BTreeSet<String>) {
        let now = self.complaints();
        let new: Vec<_> = now.difference(boot).collect();
        assert!(new.is_empty(), "{new:#?}");
        // This fails if a service has failed.
        self.run("systemctl is-system-running");
    }

    #[track_caller]
    fn shut_down(&self) {
        match Backend::of_test() {
            Backend::Qemu => {
                self.lab
                    .drainpipe(&["vm", "stop", "web", "--agent", &self.lab.agent_socket(self.host)])
                    .done();
            }
            Backend::Libvirt => drop(self.lab.virsh(self.host, &["shutdown", "web"]).done()),
        }
        let end = Instant::now() + DEADLINE;
        while self.lab.vms().vms[0].state != VmState::Stopped {
            assert!(Instant::now() < end, "it has not shut down within {DEADLINE:?}");
            thread::sleep(Duration::from_millis(200));
        }
    }

    #[track_caller]
    fn assert_disk_is_clean(&self) {
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).arg(&self.disk);
            Running::start(command).wait_for(DEADLINE).done();
        };
        run("e2fsck", &["-f", "-n"]);
        let database = self.lab.files().join("database");
        fs::create_dir(&database).unwrap();
        run("debugfs", &["-R", &format!("rdump /var/lib/postgresql {}", database.display())]);
        let mut versions = fs::read_dir(database.join("postgresql")).unwrap();
        let cluster = versions.next().expect("it has one").unwrap().path().join("main");
        let mut check = self.program("pg_checksums");
        check.arg("--check").arg("--pgdata").arg(cluster);
        Running::start(check).wait_for(DEADLINE).done();
    }
}

/// The XML of a domain's disk.
fn device_xml(path: &str) -> String {
    format!(
        "<disk type='block' device='disk'><driver name='qemu' type='raw' cache='none'/><source dev='{path}'/>\
         <target dev='vda' bus='virtio'/></disk>"
    )
}

/// A transaction that a client was told is committed.
struct Commit {
    client: u64,
    number: u64,
    at: Duration,
}

/// Clients that use the database.
struct Load {
    pgbench: Running,
    directory: PathBuf,
}

impl Load {
    #[track_caller]
    fn begin(debian: &Debian) -> Self {
        let transaction = debian.lab.write("transaction.sql", TRANSACTION);
        let directory = debian.lab.files().join("acknowledged");
        fs::create_dir(&directory).unwrap();
        let mut pgbench = debian.program("pgbench");
        pgbench
            .args(["--no-vacuum", "--define=number=0", "--file", &transaction])
            .arg(format!("--client={CLIENTS}"))
            // It runs until it is ended.
            .arg("--time=86400")
            .arg("--log")
            .arg(format!("--log-prefix={}", directory.join("log").display()));
        let mut load = Self { pgbench: Running::start(pgbench), directory };
        load.goes_on(debian);
        load
    }

    /// Waits until more is committed; false if the clients have ended, which [`Self::end`] reports.
    #[track_caller]
    fn goes_on(&mut self, debian: &Debian) -> bool {
        // If an answer does not arrive in time on a busy machine, the question is repeated: pgbench says whether a
        // client saw an error.
        let committed = || {
            let answer = debian.try_query("SELECT count(*) FROM acknowledged");
            (answer.code == 0).then(|| numbers::<1>(answer.stdout.trim_end())[0])
        };
        let mut before = None;
        eventually("the clients work on", || {
            before = before.or_else(committed);
            self.pgbench.has_ended() || before.is_some_and(|before| committed() > Some(before))
        });
        !self.pgbench.has_ended()
    }

    /// Ends the clients, which must have seen no errors. Returns what was acknowledged, in the order of its time.
    #[track_caller]
    fn end(mut self) -> Vec<Commit> {
        if !self.pgbench.has_ended() {
            // As at the end of its time: each client's last transaction is acknowledged.
            self.pgbench.signal(Signal::ALARM);
        }
        let output = self.pgbench.wait_for(DEADLINE).done();
        assert!(output.contains("number of failed transactions: 0 (0.000%)"), "{output}");
        let logs = fs::read_dir(self.directory).unwrap().map(|entry| entry.unwrap().path());
        let lines = logs.map(|log| fs::read_to_string(log).unwrap()).collect::<String>();
        let mut commits: Vec<Commit> = lines.lines().map(commit).collect();
        commits.sort_by_key(|commit| commit.at);
        commits
    }
}

/// The commit in a line of pgbench's log.
#[track_caller]
fn commit(line: &str) -> Commit {
    let [client, number, _time_us, _script, seconds, us] = numbers(line);
    Commit { client, number, at: Duration::from_secs(seconds) + Duration::from_micros(us) }
}

#[track_caller]
fn numbers<const COUNT: usize>(line: &str) -> [u64; COUNT] {
    let numbers: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("not {COUNT} numbers: {line}"))
}

/// A move that was made.
struct Move {
    way: String,
    takes_disk: bool,
    result: MigrationResult,
    began: SystemTime,
    ended: SystemTime,
}

impl Move {
    fn tell(&self, acknowledged: &[Commit]) {
        let result = &self.result;
        let disk = if self.takes_disk { " with its disk" } else { "" };
        let in_parts =
            result.times.post_copy_ms.map(|ms| format!(", the rest in {ms:.0} ms")).unwrap_or_default();
        eprintln!(
            "{} to {} by {}{disk}: {:.1} s, paused for {:.0} ms{in_parts}; at most {} ms without an acknowledged commit",
            result.source,
            result.target,
            self.way,
            result.times.total_ms / 1000.0,
            result.silence.downtime_ms.unwrap_or_default(),
            self.longest_silence(acknowledged).as_millis(),
        );
    }

    /// The longest time without an acknowledged commit that began or ended during the move.
    fn longest_silence(&self, acknowledged: &[Commit]) -> Duration {
        let [began, ended] = [self.began, self.ended].map(|at| at.duration_since(UNIX_EPOCH).unwrap());
        let neighbours = acknowledged.windows(2).map(|pair| [pair[0].at, pair[1].at]);
        let near = neighbours.filter(|[before, after]| *after > began && *before < ended);
        near.map(|[before, after]| after.saturating_sub(before)).max().unwrap_or_default()
    }
}
