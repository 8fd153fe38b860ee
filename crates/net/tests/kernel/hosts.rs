//! Two hosts in network namespaces, joined by two virtual cables.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Whether this process may make namespaces; prints loudly if not.
pub(crate) fn may_make_namespaces() -> bool {
    let may = rustix::process::geteuid().is_root();
    if !may {
        eprintln!("SKIPPED: making network namespaces needs root");
    }
    may
}

/// A network namespace that ends when this is dropped.
pub(crate) struct Namespace {
    name: String,
}

impl Namespace {
    pub(crate) fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("drn-net-{}-{number}", std::process::id());
        command("ip", &["netns", "add", &name]);
        let namespace = Self { name };
        // Duplicate address detection would leave addresses unusable for a second.
        namespace.sysctl("net.ipv6.conf.default.accept_dad", "0");
        namespace.ip("link set lo up");
        namespace
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` with these arguments in the namespace.
    pub(crate) fn ip(&self, arguments: &str) -> String {
        let mut all = vec!["-n", &self.name];
        all.extend(arguments.split_whitespace());
        command("ip", &all)
    }

    /// Like [`Namespace::ip`], for what not every kernel can do. Returns whether it could.
    pub(crate) fn may_ip(&self, arguments: &str) -> bool {
        let ip = Command::new("ip").args(["-n", &self.name]).args(arguments.split_whitespace()).output();
        ip.expect("ip(8) of iproute2").status.success()
    }

    /// Runs nft(8); returns whether the kernel could do that.
    pub(crate) fn may_nft(&self, commands: &str) -> bool {
        let nft = Command::new("ip").args(["netns", "exec", &self.name, "nft", commands]).output();
        nft.is_ok_and(|output| output.status.success())
    }

    /// Makes the kernel know the machine with this address.
    pub(crate) fn ping(&self, address: &str) {
        self.exec(&["ping", "-c1", "-W5", address]);
    }

    pub(crate) fn sysctl(&self, key: &str, value: &str) {
        self.exec(&["sysctl", "-q", "-w", &format!("{key}={value}")]);
    }

    pub(crate) fn read_sysctl(&self, key: &str) -> String {
        self.exec(&["sysctl", "-n", key]).trim().to_owned()
    }

    fn exec(&self, arguments: &[&str]) -> String {
        let mut all = vec!["netns", "exec", &self.name];
        all.extend(arguments);
        command("ip", &all)
    }

    /// Runs `body`, and everything that it starts, on a thread of its own in the namespace.
    pub(crate) fn enter<T: Send>(&self, body: impl FnOnce() -> T + Send) -> T {
        let namespace = std::fs::File::open(self.path()).unwrap();
        thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(
                    std::os::fd::AsFd::as_fd(&namespace),
                    Some(LinkNameSpaceType::Network),
                )
                .unwrap();
                body()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Like [`Namespace::enter`], with a runtime.
    pub(crate) fn run<T: Send, F: Future<Output = T>>(&self, body: impl FnOnce() -> F + Send) -> T {
        self.enter(|| {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap()
                .block_on(async { body().await })
        })
    }

    /// Everything that the tests may change, as text.
    pub(crate) fn state(&self) -> String {
        let mut state = self.ip("-j addr show");
        state.push_str(&self.ip("-j -d -4 route show table all"));
        state.push_str(&self.ip("-j -d -6 route show table all"));
        state.push_str(&self.exec(&["sysctl", "-a", "-r", "linkdown|multipath_hash_policy"]));
        state
    }

    fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "delete", &self.name]).status();
    }
}

/// Two hosts whose links `p0` and `p1` are joined: 10.9.0.1 and 10.9.0.2, 10.9.1.1 and 10.9.1.2;
/// link-local `fe80::1` and `fe80::2` on each.
pub(crate) struct TwoHosts {
    pub(crate) left: Namespace,
    pub(crate) right: Namespace,
}

impl TwoHosts {
    pub(crate) fn new() -> Self {
        let (left, right) = (Namespace::new(), Namespace::new());
        for link in 0..2 {
            left.ip(&format!("link add p{link} type veth peer name p{link} netns {}", right.name));
            for (host, number) in [(&left, 1), (&right, 2)] {
                host.ip(&format!("link set p{link} addrgenmode none"));
                host.ip(&format!("addr add 10.9.{link}.{number}/24 dev p{link}"));
                host.ip(&format!("addr add fe80::{number}/64 dev p{link}"));
                host.ip(&format!("link set p{link} up"));
            }
        }
        let hosts = Self { left, right };
        hosts.wait_until(|hosts| {
            [&hosts.left, &hosts.right].iter().all(|host| {
                host.ip("-o link show up").matches("state UP").count() == 2
                    && !host.ip("-6 addr show").contains("tentative")
            })
        });
        hosts
    }

    /// Waits for the kernel: it acts on a carrier that came or went up to a second later.
    pub(crate) fn wait_until(&self, condition: impl Fn(&Self) -> bool) {
        for _ in 0..300 {
            if condition(self) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the links did not come to the state waited for");
    }
}

fn command(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
