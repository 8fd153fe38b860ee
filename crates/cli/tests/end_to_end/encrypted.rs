//! Encrypted migrations: when migrations are encrypted, and that nothing of QEMU's stream shows on the links.

use drainpipe_api_types::PlanView;
use drainpipe_engine::migration::result::{EncryptionUse, MigrationResult, Outcome};
use drainpipe_engine::option::MigrationOption;
use rustix::process::Signal;

use crate::Test;
use crate::bad_luck::runs_on_without_its_agent;
use crate::captured::{Capture, KnownPages, assert_seen, assert_unseen};
use crate::path_loss::goes_on_without_e1;
use crate::program::{REFUSED, Running};
use crate::scene::{MEMORY_MIB, Scene, result_of};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("encrypted_unless_both_hosts_say_otherwise", encrypted_unless_both_hosts_say_otherwise),
    ("auto_encrypts_on_several_cores_over_one_link", auto_encrypts_on_several_cores_over_one_link),
    ("whatever_befalls_them_in_flight", whatever_befalls_them_in_flight),
];

/// Counts TCP segments to migration ports that begin as QEMU's stream or a packet of its multifd channels does,
/// and those that begin as TLS does. TCP's header is 32 bytes long with its timestamps.
const LOOK: &str = "table inet look {
  counter clear {}
  counter tls {}
  chain arriving { type filter hook prerouting priority 0;
    tcp dport 49152-49215 @th,256,32 { 0x5145564d, 0x11223344 } counter name clear
    tcp dport 49152-49215 @th,256,24 0x160301 counter name tls
  }
}";

/// How many segments a counter of the table `look` has counted.
#[track_caller]
pub(crate) fn seen(lab: &TestLab, host: &str, counter: &str) -> u64 {
    let printed = lab.exec(host, &["nft", "list", "counter", "inet", "look", counter]).done();
    let mut words = printed.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).and_then(|packets| packets.parse().ok()).unwrap_or_else(|| panic!("{printed}"))
}

#[track_caller]
fn encryption(result: MigrationResult) -> EncryptionUse {
    result.connection_use.encryption.expect("the result says it")
}

#[track_caller]
pub(crate) fn assert_encrypted(result: MigrationResult) {
    let used = encryption(result);
    assert!(used.is_encrypted, "{used:?}");
    assert_eq!(used.protocol.as_deref(), Some("TLS 1.3"));
    assert!(used.cipher_suite.as_ref().is_some_and(|suite| suite.starts_with("TLS_")), "{used:?}");
}

/// There may be more segments than connections, since TCP may send one again.
#[track_caller]
fn assert_nothing_clear_came(lab: &TestLab, host: &str) {
    let (clear, tls) = (seen(lab, host, "clear"), seen(lab, host, "tls"));
    assert!(clear == 0 && tls >= 17, "{clear} of QEMU, {tls} of TLS on 17 connections");
}

fn turn_off(lab: &TestLab, host: &str) {
    lab.stop_agent(host, Signal::TERM);
    lab.configure(host, "migration_address", "encryption = \"off\"\nmigration_address");
    lab.start_agent(host);
}

fn encrypted_unless_both_hosts_say_otherwise() {
    let lab = TestLab::up(&["--link", "1000", "--link", "1000", "--untrusted"]);
    for host in ["a", "b"] {
        lab.exec(host, &["nft", LOOK]).done();
    }
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let before = lab.network();
    let known = KnownPages::of(MEMORY_MIB);
    let capture = Capture::begin(&lab, &["a", "b"]);
    let result = lab.migrate("web", "b", &["--option", "multichannel"]);
    assert_unseen(&result, &capture.end(&known));
    assert_encrypted(result);
    assert_nothing_clear_came(&lab, "b");
    let result = lab.migrate("web", "a", &["--option", "compression"]);
    assert!(result.connection_use.compression.is_some(), "as far as cores are idle");
    assert_encrypted(result);
    assert_nothing_clear_came(&lab, "a");
    guest.assert_intact();
    lab.assert_network_as(&before);

    turn_off(&lab, "a");
    let view: PlanView = lab.json(&["migrate", "web", "b", "--dry-run"]);
    let planned = view.plan.encryption();
    assert!(planned.is_encrypted() && planned.why().starts_with("b requires it"), "{planned:?}");
    turn_off(&lab, "b");
    let asked = lab.drainpipe(&["migrate", "web", "b", "--encrypt"]);
    asked.refused(REFUSED, &["encryption was asked for, and is off on a"]);
    let capture = Capture::begin(&lab, &["a", "b"]);
    let used = encryption(lab.migrate("web", "b", &["--option", "tcp"]));
    assert_seen(&known, &capture.end(&known));
    assert_eq!((used.is_encrypted, used.protocol, used.cipher_suite), (false, None, None));
    assert!(seen(&lab, "b", "clear") > 0, "QEMU's stream is known when it is seen");
    guest.assert_intact();
}

fn auto_encrypts_on_several_cores_over_one_link() {
    let lab = TestLab::up(&["--link", "unlimited", "--untrusted"]);
    lab.exec("b", &["nft", LOOK]).done();
    let guest = lab.start_guest("web", 160, "");
    let result = lab.migrate("web", "b", &[]);
    assert_eq!((result.choice.option, result.traffic.paths.len()), (MigrationOption::Multichannel, 1));
    let reason = result.choice.fallback_reason.as_deref().unwrap();
    assert!(reason.starts_with("one path only") && reason.contains("16 connections share it"), "{reason}");
    assert_encrypted(result);
    assert_nothing_clear_came(&lab, "b");
    guest.assert_intact();
    let asked = lab.migrate("web", "a", &["--option", "tcp"]);
    assert_eq!((asked.choice.option, asked.choice.fallback_reason.as_deref()), (MigrationOption::Tcp, None));
    assert_encrypted(asked);
    guest.assert_intact();
}

/// The agents carry what they watch, and everything that they carry ends with them. One guest goes through all cases.
fn whatever_befalls_them_in_flight() {
    let scene = Scene::in_lab(TestLab::up(&["--link", "40", "--link", "40", "--untrusted"]));
    scene.lab.exec("b", &["nft", LOOK]).done();
    let tls = || seen(&scene.lab, "b", "tls");
    for befalls in [is_cancelled, runs_on_without_its_agent, the_target_agent_is_killed] {
        let before = tls();
        let migrating = scene.migrate(&[]);
        // An agent that is killed just as it accepts one of QEMU's connections takes that along: its guard does not
        // hold it yet, and QEMU 7.2 may wait for itself (docs/decisions/0040).
        eventually("all 17 connections have begun TLS", || tls() - before >= 17);
        befalls(&scene, migrating);
        scene.assert_settled("a");
    }
    let before = tls();
    assert_encrypted(goes_on_without_e1(&scene, "blackhole b e1", "heal b e1"));
    assert!(tls() - before >= 17, "{} of TLS on 17 connections", tls() - before);
    assert_nothing_clear_came(&scene.lab, "b");
}

fn is_cancelled(scene: &Scene, migrating: Running) {
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Cancelled);
}

fn the_target_agent_is_killed(scene: &Scene, migrating: Running) {
    scene.lab.stop_agent("b", Signal::KILL);
    let output = migrating.wait();
    assert_eq!(result_of(&output).outcome, Outcome::Failed, "{output:#?}");
    scene.guest.assert_intact();
    scene.lab.start_agent("b");
}
