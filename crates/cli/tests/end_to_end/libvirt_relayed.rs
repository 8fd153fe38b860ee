//! libvirt's domains, moved through the agents: encrypted, compressed, or both.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::option::MigrationOption;
use rustix::process::Signal;

use crate::Test;
use crate::captured::{Capture, KnownPages, assert_unseen};
use crate::encrypted::assert_encrypted;
use crate::guest::Guest;
use crate::libvirt_moves::{assert_moved, migrate};
use crate::link_rate::LinkRate;
use crate::options;
use crate::program::Running;
use crate::scene::{assert_failed, result_of};
use crate::silences::GUARDED_SILENCE_MAX;
use crate::support::{TestLab, eventually};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    ("a_domain_is_moved_encrypted", a_domain_is_moved_encrypted),
    ("a_domain_is_moved_compressed_and_within_limits", a_domain_is_moved_compressed_and_within_limits),
    ("a_domain_of_another_user_is_moved_encrypted", a_domain_of_another_user_is_moved_encrypted),
    ("a_relayed_domain_runs_on_without_an_agent", a_relayed_domain_runs_on_without_an_agent),
];

const MEMORY_MIB: u64 = 160;

const LIMIT_MBPS: u64 = 200;

/// A domain of [`MEMORY_MIB`] on host `a` that its agent has seen.
#[track_caller]
fn start(lab: &TestLab) -> Guest {
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    lab.virsh("a", &["autostart", "web"]).done();
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    guest
}

/// With QEMU 7.2, and with the newer one if there is one: they identify connections differently.
fn a_domain_is_moved_encrypted() {
    moved_encrypted(whole::first_or_all(2, &["multichannel", "compression", "tcp", "auto"]), &[]);
    if let Some(qemu) = options::other_qemu() {
        moved_encrypted(whole::first_or_all(1, &["tcp", "multichannel"]), &["--qemu", &qemu]);
    }
}

fn moved_encrypted(options: &[&str], up: &[&str]) {
    let links = ["--libvirt", "--untrusted", "--link", "1000", "--link", "1000"];
    let lab = TestLab::up(&[&links[..], up].concat());
    let guest = start(&lab);
    let known = KnownPages::of(MEMORY_MIB);
    let ways = [("a", "b"), ("b", "a")].into_iter().cycle();
    for (option, (source, target)) in options.iter().zip(ways) {
        let capture = Capture::begin(&lab, &["a", "b"]);
        let result = migrate(&lab, target, option);
        assert_unseen(&result, &capture.end(&known));
        assert_eq!(
            result.connection_use.compression.is_some(),
            *option == "compression",
            "{option}: {result:#?}"
        );
        if *option == "auto" {
            // Nobody has sampled its memory.
            let reason = result.choice.fallback_reason.as_deref().unwrap_or_default();
            assert!(reason.starts_with("2 paths"), "{reason}");
            assert_eq!(result.choice.option, MigrationOption::Multichannel);
        }
        assert_encrypted(result);
        assert_moved(&lab, source, target);
        guest.assert_intact();
    }
}

fn a_domain_is_moved_compressed_and_within_limits() {
    let lab = TestLab::up(&["--libvirt", "--link", "1000", "--link", "1000"]);
    let guest = start(&lab);
    let result = migrate(&lab, "b", "compression");
    assert_eq!(result.choice.option, MigrationOption::Compression);
    // As far as cores are idle.
    let compression = result.connection_use.compression.expect("it says what was compressed");
    assert!(compression.stream_bytes > 0, "{compression:?}");
    assert_moved(&lab, "a", "b");
    guest.assert_intact();
    migrate(&lab, "a", "compression");
    guest.assert_intact();
    for option in whole::first_or_all(1, &["multichannel", "tcp", "compression"]) {
        keeps_to_a_limit(&lab, option);
        guest.assert_intact();
    }
}

fn keeps_to_a_limit(lab: &TestLab, option: &str) {
    lab.drainpipe(&["limit", "a", &LIMIT_MBPS.to_string()]).done();
    let rate = LinkRate::watch(lab, "a");
    let mut migrating = lab.start(&["migrate", "web", "b", "--json", "--option", option]);
    let rate = rate.until(Duration::from_mins(1), || migrating.has_ended());
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Completed);
    let most_mbps = rate.most_in_a_second_mbps();
    assert!(most_mbps > 0.0 && most_mbps < LIMIT_MBPS as f64 * 1.1, "{option}: {most_mbps:.1} Mb/s");
    lab.drainpipe(&["limit", "a", "off"]).done();
    migrate(lab, "a", "multichannel");
}

/// As on real hosts, QEMU's user may reach hardly anything.
fn a_domain_of_another_user_is_moved_encrypted() {
    let lab = TestLab::up(&["--libvirt", "--untrusted", "--link", "1000", "--link", "1000"]);
    let passable: Vec<Passable> =
        ["a", "b"].iter().flat_map(|host| run_by_another_user(&lab, host)).collect();
    let guest = start(&lab);
    for (option, source, target) in [("tcp", "a", "b"), ("multichannel", "b", "a")] {
        let process = format!("/proc/{}", lab.qemu_pid(source, "web").unwrap().as_raw_nonzero());
        assert_ne!(fs::metadata(process).unwrap().uid(), 0, "QEMU is not root's");
        assert_encrypted(migrate(&lab, target, option));
        assert_moved(&lab, source, target);
        guest.assert_intact();
    }
    drop(passable);
}

/// From now on, the host's libvirt runs QEMU as another user. Directories that it shares with that user become
/// passable.
#[track_caller]
fn run_by_another_user(lab: &TestLab, host: &str) -> Vec<Passable> {
    let own = lab.directory(host).join("libvirt");
    let file = own.join("etc/qemu.conf");
    let text = fs::read_to_string(&file).unwrap();
    let text = text.replace("\"root\"", "\"libvirt-qemu\"");
    fs::write(&file, text.replace("dynamic_ownership = 0", "dynamic_ownership = 1")).unwrap();
    let above = own.ancestors().take_while(|path| *path != Path::new("/run")).map(Path::to_owned);
    let passable =
        above.chain(["run", "lib", "cache"].map(|name| own.join(name))).filter_map(Passable::new).collect();
    lab.fault(&format!("libvirt-kill {host}"));
    lab.fault(&format!("libvirt-start {host}"));
    passable
}

/// A directory that other users may pass, as long as this exists.
struct Passable(PathBuf, fs::Permissions);

impl Passable {
    /// `None` if they may pass anyway.
    #[track_caller]
    fn new(path: PathBuf) -> Option<Self> {
        let before = fs::metadata(&path).unwrap().permissions();
        let passable = before.mode() | 0o11;
        fs::set_permissions(&path, fs::Permissions::from_mode(passable)).unwrap();
        (passable != before.mode()).then_some(Self(path, before))
    }
}

impl Drop for Passable {
    fn drop(&mut self) {
        // It may be gone with the lab.
        drop(fs::set_permissions(&self.0, self.1.clone()));
    }
}

/// The relay ends with its agent. The guard holds QEMU's ends of the connections, and lets it run on.
fn a_relayed_domain_runs_on_without_an_agent() {
    let lab = TestLab::up(&["--libvirt", "--untrusted", "--link", "40", "--link", "40"]);
    let guest = start(&lab);
    for (option, host) in [("multichannel", "a"), ("tcp", "b")] {
        let migrating = begin(&lab, option);
        let heartbeat = guest.heartbeat();
        lab.stop_agent(host, Signal::KILL);
        thread::sleep(Duration::from_secs(5));
        guest.assert_intact();
        assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{:?}", heartbeat.statistics());
        lab.start_agent(host);
        assert_failed(&migrating.wait(), "");
        assert_eq!(lab.domain_state("a", "web").as_deref(), Some("running"));
        eventually("the other host has discarded it", || lab.domain_state("b", "web").is_none());
        guest.assert_intact();
    }
}

/// Returns when memory is on its way.
fn begin(lab: &TestLab, option: &str) -> Running {
    let migrating = lab.start(&["migrate", "web", "b", "--json", "--option", option]);
    eventually("memory is on its way", || {
        let views = lab.migrations("a");
        views.iter().any(|view| view.progress.as_ref().is_some_and(|progress| progress.sent_bytes > 4 << 20))
    });
    migrating
}
