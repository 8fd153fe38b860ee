//! libvirt daemons that share only the programs with the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use drainpipe_libvirt::{Connection, Domain};
use tempfile::TempDir;

/// Long enough for a busy machine; no test waits this long when all is well.
pub(crate) const DEADLINE: Duration = Duration::from_mins(1);

pub(crate) const URI: &str = "qemu:///system";

const DAEMON: &str = "/usr/sbin/libvirtd";
const QEMU: &str = "/usr/bin/qemu-system-x86_64";

/// The directories to which libvirt writes; each is covered by an empty one.
const DIRECTORIES: [&str; 5] =
    ["/run", "/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"];

/// The first process of all namespaces; when it ends, everything in them ends. The only network is loopback, and each
/// daemon has its own files and its own name. libvirt would make its directories at its start if no package had, so
/// they may stay.
const START: &str = r#"
mount -t proc proc /proc
ip link set lo up
mkdir -p $directories
for host in "$1"/*/; do
    unshare --mount --uts sh -euc '
        host=$1
        shift
        hostname "$(basename "$host")"
        for file in hosts passwd group; do mount --bind "$host/$file" "/etc/$file"; done
        for directory; do mount --bind "$host/root$directory" "$directory"; done
        exec "$daemon" --config /etc/libvirt/libvirtd.conf --pid-file /run/libvirtd.pid' \
        sh "$host" $directories >"$host/log" 2>&1 &
done
wait
"#;

/// Some libvirt daemons, on one loopback.
#[derive(Debug)]
pub(crate) struct Daemons {
    directory: TempDir,
    first_process: Child,
}

impl Daemons {
    /// `None` without root or libvirt, which is printed.
    pub(crate) fn start(names: &[&str]) -> Option<Self> {
        if let Some(missing) = missing() {
            eprintln!("SKIPPED: {missing}");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        for name in names {
            write_host(&directory.path().join(name), name, names);
        }
        Some(Self { first_process: start(directory.path()), directory })
    }

    pub(crate) fn socket(&self, name: &str) -> PathBuf {
        self.host(name).join("root/run/libvirt/libvirt-sock")
    }

    fn host(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits until the daemon is up.
    pub(crate) async fn connect(&self, name: &str) -> Connection {
        let end = Instant::now() + DEADLINE;
        loop {
            match Connection::open(&self.socket(name), URI, DEADLINE).await {
                Ok(connection) => return connection,
                Err(error) if Instant::now() > end => panic!("{error}; {}", self.log(name)),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    pub(crate) fn log(&self, name: &str) -> String {
        fs::read_to_string(self.host(name).join("log")).unwrap_or_default()
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for host in fs::read_dir(self.directory.path()).into_iter().flatten().flatten() {
                let name = host.file_name().to_string_lossy().into_owned();
                eprintln!("{name}: {}", self.log(&name));
            }
        }
        // Its child is the first process of its namespace. It ends with this, and so does everything in the namespace.
        drop(self.first_process.kill());
        drop(self.first_process.wait());
    }
}

fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("libvirt daemons of one's own need root; see scripts/as-root".into());
    }
    let missing = [DAEMON, QEMU].into_iter().find(|program| !Path::new(program).exists())?;
    Some(format!("there is no {missing}; install libvirt-daemon-system and qemu-system-x86"))
}

fn write_host(host: &Path, name: &str, all: &[&str]) {
    for directory in DIRECTORIES {
        fs::create_dir_all(format!("{}/root{directory}", host.display())).expect("a directory");
    }
    let write = |path: &str, text: String| fs::write(host.join(path), text).expect("a file");
    write("hosts", format!("127.0.0.1 localhost {}\n", all.join(" ")));
    for (file, text) in drainpipe_lab::libvirt_user_files().expect("they are there") {
        write(file, text);
    }
    let number = all.iter().position(|other| *other == name).expect("one of them");
    let uuid = format!("6f1d1d5e-0000-4000-8000-00000000000{number}");
    write(
        "root/etc/libvirt/libvirtd.conf",
        format!("host_uuid = \"{uuid}\"\nauth_unix_rw = \"none\"\nlog_outputs = \"3:stderr\"\n"),
    );
    write(
        "root/etc/libvirt/qemu.conf",
        "stdio_handler = \"file\"\nsecurity_driver = \"none\"\nuser = \"root\"\ngroup = \"root\"\n\
         dynamic_ownership = 0\nremember_owner = 0\nnamespaces = []\ncgroup_controllers = []\n"
            .into(),
    );
}

fn start(directory: &Path) -> Child {
    // Ends with the thread that starts it, also if that is killed.
    Command::new("setpriv")
        .args([
            "--pdeathsig",
            "KILL",
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--net",
            "--uts",
        ])
        .args(["sh", "-euc", START, "sh"])
        .arg(directory)
        .env("daemon", DAEMON)
        .env("directories", DIRECTORIES.join(" "))
        .stdin(Stdio::null())
        .spawn()
        .expect("util-linux is there")
}

/// A small domain: firmware without a disk to boot.
pub(crate) fn small_domain(name: &str) -> String {
    format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>\
         <os><type arch='x86_64' machine='q35'>hvm</type></os>\
         <devices><emulator>{QEMU}</emulator><controller type='usb' model='none'/><memballoon model='none'/></devices>\
         </domain>"
    )
}

/// How many QEMUs a domain has, whatever their daemons say.
pub(crate) fn count_qemus(domain: &Domain) -> usize {
    let uuid = u128::from_be_bytes(domain.uuid);
    let processes = fs::read_dir("/proc").expect("mounted").flatten();
    let command_lines =
        processes.filter_map(|process| fs::read_to_string(process.path().join("cmdline")).ok());
    command_lines.filter(|line| uuid_of(line) == Some(uuid)).count()
}

/// The value after `-uuid`.
fn uuid_of(command_line: &str) -> Option<u128> {
    let uuid = command_line.split('\0').skip_while(|argument| *argument != "-uuid").nth(1)?;
    u128::from_str_radix(&uuid.replace('-', ""), 16).ok()
}
