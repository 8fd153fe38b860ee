//! libvirt's domains that have snapshots. What libvirt knows about these moves along, and is known again if the domain
//! stays, whatever is killed meanwhile.

use std::collections::BTreeMap;
use std::fs;

use drainpipe_engine::migration::result::Outcome;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::program::CANCELLED;
use crate::scene::{
    MEMORY_MIB, SLOW_MBPS, Scene, cut_off, hold_journal, rejoin, result_of, wait_until_handed_over,
};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("snapshots_go_along", snapshots_go_along),
    ("snapshots_come_back_with_a_domain_that_stays", snapshots_come_back_with_a_domain_that_stays),
    ("agents_are_killed_while_snapshots_go_along", agents_are_killed_while_snapshots_go_along),
];

#[track_caller]
fn scene(mbps: &str) -> Scene {
    let lab = TestLab::up(&["--libvirt", "--link", mbps, "--link", mbps]);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    note_snapshots(&lab);
    Scene::of(lab, guest)
}

/// Tells libvirt of snapshots without data: the first one has two children. libvirt moves no domain with a writable
/// disk unless the disk is on a network file system, which labs lack.
#[track_caller]
fn note_snapshots(lab: &TestLab) {
    let domain = lab.virsh("a", &["dumpxml", "web", "--security-info"]).done();
    for (name, parent, more) in
        [("first", None, None), ("left", Some("first"), None), ("right", Some("first"), Some("--current"))]
    {
        let parent = parent.map_or(String::new(), |name| format!("<parent><name>{name}</name></parent>"));
        let xml = format!(
            "<domainsnapshot><name>{name}</name><state>shutoff</state>{parent}\
             <creationTime>1700000000</creationTime>{domain}</domainsnapshot>"
        );
        let file = lab.write(&format!("{name}.xml"), &xml);
        let create = ["snapshot-create", "web", &file, "--redefine"];
        lab.virsh("a", &[&create[..], more.as_slice()].concat()).done();
    }
}

/// Names and XML of the snapshots that a host's libvirt knows, and which one is current.
#[track_caller]
fn known(lab: &TestLab, host: &str) -> (BTreeMap<String, String>, String) {
    let names = lab.virsh(host, &["snapshot-list", "web", "--name", "--topological"]).done();
    let names = names.split_whitespace().map(str::to_owned);
    let xml = |name: &str| lab.virsh(host, &["snapshot-dumpxml", "web", name, "--security-info"]).done();
    // Children of one parent come in any order.
    let all = names.map(|name| (name.clone(), xml(&name))).collect();
    let current = lab.virsh(host, &["snapshot-current", "web", "--name"]);
    (all, current.stdout.trim().to_owned())
}

/// Fails the test unless this host's libvirt knows the snapshots as they were, and no agent keeps any.
#[track_caller]
fn assert_known(scene: &Scene, host: &str, before: &(BTreeMap<String, String>, String)) {
    eventually("libvirt knows the snapshots", || known(&scene.lab, host).0.len() == before.0.len());
    assert_eq!(&known(&scene.lab, host), before, "on {host}");
    let kept = |host: &&str| {
        let kept = fs::read_dir(scene.lab.directory(host).join("state/snapshots"));
        kept.is_ok_and(|mut kept| kept.next().is_some())
    };
    eventually("no agent keeps them", || !["a", "b"].iter().any(kept));
}

fn snapshots_go_along() {
    let scene = scene("unlimited");
    let lab = &scene.lab;
    let before = known(lab, "a");
    assert_eq!((before.0.len(), before.1.as_str()), (3, "right"), "{before:#?}");
    for (target, source, option) in
        [("b", "a", "multichannel"), ("a", "b", "tcp"), ("b", "a", "multichannel")]
    {
        lab.migrate("web", target, &["--option", option]);
        assert_eq!(lab.domain_state(source, "web"), None);
        assert_known(&scene, target, &before);
    }
    scene.guest.assert_intact();
    // They belong to the target's libvirt.
    lab.virsh("b", &["snapshot-delete", "web", "first", "--children", "--metadata"]).done();
    assert!(known(lab, "b").0.is_empty());
}

fn snapshots_come_back_with_a_domain_that_stays() {
    let scene = scene(SLOW_MBPS);
    let lab = &scene.lab;
    let before = known(lab, "a");
    // Looking makes libvirt forget nothing.
    lab.drainpipe(&["migrate", "web", "b", "--dry-run"]).done();
    assert_known(&scene, "a", &before);
    let migrating = scene.migrate(&[]);
    assert!(known(lab, "a").0.is_empty());
    lab.drainpipe(&["cancel", &scene.id()]).done();
    assert_eq!(migrating.wait().code, CANCELLED);
    assert_known(&scene, "a", &before);
    let migrating = scene.migrate(&[]);
    scene.kill_qemu("b");
    assert_ne!(migrating.wait().code, 0);
    assert_known(&scene, "a", &before);
    scene.assert_moves("b");
    assert_known(&scene, "b", &before);
}

fn agents_are_killed_while_snapshots_go_along() {
    let scene = scene(SLOW_MBPS);
    let lab = &scene.lab;
    let before = known(lab, "a");
    for killed in [&["a"][..], &["b"], &["a", "b"]] {
        let migrating = scene.migrate(&[]);
        kill_guards_and_agents(lab, killed);
        for host in killed {
            lab.start_agent(host);
        }
        drop(migrating.wait());
        assert_known(&scene, "a", &before);
        scene.assert_settled("a");
    }
    // Both agents end after the record, before the target's has been ordered to run the domain: libvirt ends it there.
    let migrating = scene.migrate(&[]);
    let held = hold_journal(lab, "a");
    eventually("all is sent", || lab.qemu_says("a", "web").as_deref() == Some("postmigrate"));
    cut_off(lab, "b");
    held.release();
    wait_until_handed_over(lab);
    lab.stop_agent("a", Signal::KILL);
    lab.stop_agent("b", Signal::KILL);
    drop(migrating.wait());
    rejoin(lab, "b");
    lab.start_agent("b");
    lab.start_agent("a");
    assert_eq!(scene.last_result().outcome, Outcome::Failed);
    assert_known(&scene, "a", &before);
    scene.assert_settled("a");
    scene.set_rates("unlimited");
    for host in ["b", "a"] {
        let moved = lab.drainpipe(&["migrate", "web", host, "--json"]);
        assert_eq!(result_of(&moved).outcome, Outcome::Completed);
        assert_known(&scene, host, &before);
    }
}

/// Nobody lets the domain run until the source's agent restarts.
#[track_caller]
pub(crate) fn kill_guards_and_agents(lab: &TestLab, hosts: &[&str]) {
    for host in hosts {
        for guard in lab.pids(host, &[" guard --migration "]) {
            kill_process(guard, Signal::KILL).unwrap();
        }
        lab.stop_agent(host, Signal::KILL);
    }
}
