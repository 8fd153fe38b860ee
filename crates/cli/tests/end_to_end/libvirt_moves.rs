//! libvirt's domains, moved by Drainpipe with its own hand-over, over all links, with all that libvirt knows about
//! them.

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::migration::step::Step;
use drainpipe_engine::option::MigrationOption;

use crate::Test;
use crate::program::{CANCELLED, REFUSED};
use crate::scene::{SLOW_MBPS, step};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("a_domain_is_moved_by_its_phases", a_domain_is_moved_by_its_phases),
    (
        "a_transient_domain_that_is_cancelled_is_free_again",
        a_transient_domain_that_is_cancelled_is_free_again,
    ),
];

fn lab() -> TestLab {
    TestLab::up(&["--libvirt", "--link", "unlimited", "--link", "unlimited"])
}

#[track_caller]
pub(crate) fn migrate(lab: &TestLab, target: &str, option: &str) -> MigrationResult {
    let result: MigrationResult = lab.json(&["migrate", "web", target, "--option", option]);
    assert_eq!(result.outcome, Outcome::Completed, "{:?}", result.failure.error);
    result
}

/// Fails the test unless the domain runs here, defined as it was, and the other host's libvirt does not know it.
#[track_caller]
pub(crate) fn assert_moved(lab: &TestLab, source: &str, target: &str) {
    assert_eq!(lab.domain_state(target, "web").as_deref(), Some("running"));
    assert_eq!(lab.domain_state(source, "web"), None);
    let info = lab.virsh(target, &["dominfo", "web"]).done();
    for (key, value) in [("Persistent", "yes"), ("Autostart", "enable")] {
        let is_said = info
            .lines()
            .any(|line| line.split_once(':').is_some_and(|(name, said)| name == key && said.trim() == value));
        assert!(is_said, "{key} is {value}:\n{info}");
    }
    eventually("it is in the list of the host that has it", || {
        let vms = lab.vms().vms;
        vms.iter().map(|vm| (vm.name.as_str(), vm.host.as_str())).eq([("web", target)])
    });
}

pub(crate) fn a_domain_is_moved_by_its_phases() {
    let lab = lab();
    let guest = lab.start_domain("a", "web", 160, "");
    lab.virsh("a", &["autostart", "web"]).done();
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    lab.drainpipe(&["vm", "stop", "web"]).refused(REFUSED, &["virsh shutdown web"]);
    migrate(&lab, "b", "tcp");
    assert_moved(&lab, "a", "b");
    guest.assert_intact();
    let result = migrate(&lab, "a", "multichannel");
    assert_eq!(result.choice.option, MigrationOption::Multichannel);
    assert!(
        result.traffic.paths.len() == 2 && result.traffic.paths.iter().all(|path| path.bytes > 0),
        "{:?}",
        result.traffic.paths
    );
    assert_moved(&lab, "b", "a");
    guest.assert_intact();
}

/// A domain without a persistent definition moves without one, and returns so. A cancelled migration leaves nothing in
/// libvirt.
fn a_transient_domain_that_is_cancelled_is_free_again() {
    let lab = TestLab::up(&["--libvirt", "--link", SLOW_MBPS]);
    let guest = lab.start_domain("a", "web", 160, "");
    lab.virsh("a", &["undefine", "web"]).done();
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    let migrating = lab.start(&["migrate", "web", "b", "--option", "tcp"]);
    eventually("memory is copied", || {
        step(&lab.migrations("a")).is_some_and(|step| step >= Step::CopyMemory)
    });
    let id = lab.migrations("a").remove(0).id;
    lab.drainpipe(&["cancel", &id]).done();
    migrating.wait().refused(CANCELLED, &["cancelled"]);
    assert_eq!(lab.domain_state("a", "web").as_deref(), Some("running"));
    assert_eq!(lab.domain_state("b", "web"), None);
    // Nobody may change a domain while libvirt moves it.
    lab.virsh("a", &["suspend", "web"]).done();
    lab.virsh("a", &["resume", "web"]).done();
    lab.json::<MigrationResult>(&["migrate", "web", "b", "--option", "tcp"]);
    guest.assert_intact();
    lab.virsh("b", &["destroy", "web"]).done();
    assert_eq!(lab.domain_state("b", "web"), None, "it is transient there too");
    eventually("it is in no list any more", || lab.vms().vms.is_empty());
}
