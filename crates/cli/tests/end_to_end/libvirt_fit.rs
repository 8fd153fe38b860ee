//! libvirt's domains as users have them: with names of their own, on libvirt's networks, and with what keeps them on
//! their host, which is reported before anything is sent.

use drainpipe_api_types::DrainView;
use drainpipe_engine::drain::status::DrainState;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::domains::DISTRIBUTIONS_QEMU;
use crate::program::{FAILED, REFUSED};
use crate::support::{TestLab, eventually};
use crate::with_libvirt;

pub(crate) const TESTS: &[Test] = &[
    ("domains_are_drained_beside_own_vms_and_come_back", domains_are_drained_beside_own_vms_and_come_back),
    (
        "a_domain_with_the_name_of_an_own_vm_is_told_and_stays",
        a_domain_with_the_name_of_an_own_vm_is_told_and_stays,
    ),
    ("what_cannot_move_is_told_before_anything_is_sent", what_cannot_move_is_told_before_anything_is_sent),
];

/// Tells libvirt of a snapshot of a domain whose memory is in a file that only its host has.
#[track_caller]
fn note_snapshot(lab: &TestLab, host: &str, domain: &str) {
    let xml = lab.virsh(host, &["dumpxml", domain]).done();
    let snapshot = lab.write(
        "snapshot.xml",
        &format!(
            "<domainsnapshot><name>before-update</name><state>running</state>\
             <memory snapshot='external' file='/var/lib/libvirt/before-update'/><creationTime>1700000000</creationTime>{xml}</domainsnapshot>"
        ),
    );
    lab.virsh(host, &["snapshot-create", domain, &snapshot, "--redefine"]).done();
}

fn lab() -> TestLab {
    TestLab::up(&["--libvirt", "--link", "unlimited", "--link", "unlimited"])
}

#[track_caller]
fn wait_until_listed(lab: &TestLab, names: &[&str]) {
    eventually("the agents have seen all", || {
        let vms = lab.vms().vms;
        names.iter().all(|name| vms.iter().any(|vm| vm.name == *name))
    });
}

/// Fails the test unless libvirt and the agents have the domain on this host alone.
#[track_caller]
fn assert_only_on(lab: &TestLab, name: &str, host: &str) {
    let other = if host == "a" { "b" } else { "a" };
    assert_eq!(lab.domain_state(host, name).as_deref(), Some("running"), "{name} on {host}");
    assert_eq!(lab.domain_state(other, name), None, "{name} on {other}");
    eventually("it is listed where it is", || {
        let vms = lab.vms().vms;
        vms.iter().filter(|vm| vm.name == name).map(|vm| vm.host.as_str()).eq([host])
    });
}

fn domains_are_drained_beside_own_vms_and_come_back() {
    let lab = lab();
    let names = ["Web_01", "DB.prod"];
    let guests = names.map(|name| lab.start_domain("a", name, 160, ""));
    let own = lab.start_guest("own", 160, "");
    wait_until_listed(&lab, &names);
    let listed = lab.drainpipe(&["vms"]).done();
    assert!(listed.contains("libvirt") && listed.contains("drainpipe"), "{listed}");

    lab.drainpipe(&["drain", "a", "--yes"]).done();
    for name in names {
        assert_only_on(&lab, name, "b");
    }
    lab.assert_runs_on("own", "b");
    lab.drainpipe(&["resume", "a", "--failback"]).done();
    for name in names {
        assert_only_on(&lab, name, "a");
    }
    lab.assert_runs_on("own", "a");
    guests.iter().chain([&own]).for_each(|guest| guest.assert_intact());

    let placement = "<placement><stays>licence bound to this host</stays></placement>";
    let metadata =
        ["metadata", "Web_01", "urn:drainpipe:placement:1", "--key", "drainpipe", "--live", "--config"];
    lab.virsh("a", &[&metadata[..], &["--set", placement]].concat()).done();
    eventually("the agent has seen where it may be", || {
        lab.drainpipe(&["drain", "a", "--dry-run"]).stdout.contains("licence bound to this host")
    });
}

pub(crate) fn a_domain_of_which_qemu_loses_writes_stays() {
    let lab = TestLab::up(&["--libvirt", "--link", "unlimited", "--qemu", DISTRIBUTIONS_QEMU]);
    lab.start_small_domain("web", 160, "");
    let why = "loses writes of such guests";
    lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["VM web", why, "KVM"]);
    assert_eq!(lab.domain_state("a", "web").as_deref(), Some("running"));
}

fn what_cannot_move_is_told_before_anything_is_sent() {
    let lab = lab();
    lab.start_domain("a", "web", 160, "");
    lab.start_domain("a", "my vm", 160, "");
    note_snapshot(&lab, "a", "web");
    wait_until_listed(&lab, &["web", "my vm"]);

    let why = "the snapshot before-update has data outside of the domain's disks";
    lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["VM web", why, "virsh snapshot-delete"]);
    lab.drainpipe(&["migrate", "web", "b", "--dry-run"]).refused(REFUSED, &[why]);
    let checked = lab.drainpipe(&["check", "a", "b"]);
    assert!(checked.code != 0 && checked.stdout.contains(why), "{checked:#?}");
    lab.drainpipe(&["migrate", "my vm", "b"])
        .refused(REFUSED, &["`my vm` is not a VM name", "virsh domrename"]);
    eventually("the list says it too", || {
        let vms = lab.drainpipe(&["vms"]);
        vms.stderr.contains(why) && vms.stderr.contains("my vm on a cannot move")
    });

    let drained = lab.drainpipe(&["drain", "a", "--yes"]);
    assert_eq!(drained.code, FAILED, "{drained:#?}");
    for words in [why, "`my vm` is not a VM name"] {
        assert!(drained.stdout.contains(words), "{words} in {drained:#?}");
    }
    let status: DrainView = lab.json(&["drain", "status", "a"]);
    assert_eq!(status.status.map(|status| status.state), Some(DrainState::Incomplete));
    lab.drainpipe(&["resume", "a"]).done();
    lab.virsh("a", &["snapshot-delete", "web", "before-update", "--metadata"]).done();
    on_a_network_that_the_target_lacks(&lab);
}

fn on_a_network_that_the_target_lacks(lab: &TestLab) {
    let network = format!(
        "<network><name>front</name><forward mode='bridge'/><bridge name='{}'/></network>",
        drainpipe_lab::GUEST_BRIDGE
    );
    let network = lab.write("front.xml", &network);
    let start_network = |host| {
        lab.virsh(host, &["net-define", &network]).done();
        lab.virsh(host, &["net-start", "front"]).done();
    };
    start_network("a");
    let on_network = |xml: String| {
        xml.replace("<interface type='bridge'>", "<interface type='network'>").replace(
            &format!("<source bridge='{}'/>", drainpipe_lab::GUEST_BRIDGE),
            "<source network='front'/>",
        )
    };
    let guest = lab.start_domain_as("a", "mail", 160, on_network);
    wait_until_listed(lab, &["mail"]);
    let words = ["b lacks what VM mail needs", "libvirt network front", "virsh net-start front"];
    lab.drainpipe(&["migrate", "mail", "b"]).refused(REFUSED, &words);
    start_network("b");
    lab.drainpipe(&["migrate", "mail", "b"]).done();
    assert_only_on(lab, "mail", "b");
    guest.assert_intact();
    if with_libvirt::is_modular() {
        where_the_networks_daemon_ends(lab);
    }
}

/// The network is reported missing as long as its daemon is gone, and no longer.
fn where_the_networks_daemon_ends(lab: &TestLab) {
    let asked = || lab.drainpipe(&["migrate", "mail", "a", "--dry-run"]);
    asked().done();
    for daemon in lab.pids("a", &["virtnetworkd"]) {
        kill_process(daemon, Signal::TERM).unwrap();
    }
    let missed = ["a lacks what VM mail needs", "libvirt network front"];
    eventually("it is missed", || missed.iter().all(|words| asked().stderr.contains(words)));
    let checked = lab.drainpipe(&["check", "b", "a"]);
    assert!(checked.stdout.contains(missed[0]), "{checked:#?}");
    lab.fault("libvirt-start a");
    asked().done();
}

/// Commands mean Drainpipe's own VM, and nobody considers the host empty.
fn a_domain_with_the_name_of_an_own_vm_is_told_and_stays() {
    let lab = lab();
    let own = lab.start_guest("web", 160, "");
    lab.start_domain("a", "web", 160, "");
    let listed = || lab.drainpipe(&["vms"]).done();
    eventually("both are listed", || listed().contains("web (libvirt)"));
    let output = lab.drainpipe(&["drain", "a", "--yes"]);
    assert_eq!(output.code, FAILED, "{output:#?}");
    let drained: DrainView = lab.json(&["drain", "status", "a"]);
    let status = drained.status.unwrap();
    assert_eq!(status.state, DrainState::Incomplete);
    let why = status.stays.iter().find(|stay| stay.vm == "web (libvirt)").map(|stay| stay.why.to_string());
    assert!(why.is_some_and(|why| why.contains("virsh domrename web")), "{status:#?}");
    own.assert_intact();
    assert_eq!(lab.domain_state("a", "web").as_deref(), Some("running"));
    assert!(lab.vms().vms.iter().any(|vm| vm.name == "web" && vm.host == "b"));
}
