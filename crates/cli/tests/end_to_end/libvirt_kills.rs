//! libvirt's domains, and what is killed while they move: agents, libvirt's daemons, QEMUs. One copy runs, always, and it
//! runs on; by QEMU's own word, and by what libvirt of both hosts says.

use rustix::process::Signal;

use crate::Test;
use crate::scene::{GUARDED_SILENCE_MAX, MEMORY_MIB, SLOW_MBPS, Scene, result_of};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("agents_are_killed_while_a_domain_is_copied", agents_are_killed_while_a_domain_is_copied),
    ("the_sources_libvirt_ends_while_a_domain_is_copied", the_sources_libvirt_ends_while_a_domain_is_copied),
];

#[track_caller]
fn scene() -> Scene {
    let lab = TestLab::up(&["--libvirt", "--link", SLOW_MBPS, "--link", SLOW_MBPS]);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    Scene::of(lab, guest)
}

/// What the QEMU of a domain says of its guest, such as `running`.
#[track_caller]
fn qemu_says(lab: &TestLab, host: &str) -> String {
    let answer = lab.virsh(host, &["qemu-monitor-command", "web", r#"{"execute":"query-status"}"#]).done();
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    answer["return"]["status"].as_str().unwrap().to_owned()
}

/// Fails the test unless it runs whole on this host alone, and libvirt of the other knows nothing of it.
#[track_caller]
fn assert_settled(scene: &Scene, host: &str) {
    let other = if host == "a" { "b" } else { "a" };
    scene.assert_settled(host);
    assert_eq!(qemu_says(&scene.lab, host), "running");
    assert_eq!(scene.lab.domain_state(host, "web").as_deref(), Some("running"));
    eventually("libvirt of the other host has forgotten it", || {
        scene.lab.domain_state(other, "web").is_none()
    });
}

fn agents_are_killed_while_a_domain_is_copied() {
    let scene = scene();
    for killed in [&["a"][..], &["b"], &["a", "b"]] {
        let heartbeat = scene.guest.heartbeat();
        let migrating = scene.migrate(&[]);
        for host in killed {
            scene.lab.stop_agent(host, Signal::KILL);
        }
        eventually("no guard is left", || scene.lab.pids("a", &[" guard --migration "]).is_empty());
        scene.guest.assert_answers();
        assert_eq!(qemu_says(&scene.lab, "a"), "running", "{killed:?}");
        for host in killed {
            scene.lab.start_agent(host);
        }
        assert_ne!(migrating.wait().code, 0, "{killed:?}");
        assert_settled(&scene, "a");
        assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{killed:?}: {:?}", heartbeat.statistics());
    }
    scene.assert_moves("b");
}

fn the_sources_libvirt_ends_while_a_domain_is_copied() {
    let scene = scene();
    for ending in ["kill", "stop"] {
        let heartbeat = scene.guest.heartbeat();
        let migrating = scene.migrate(&[]);
        scene.lab.fault(&format!("libvirt-{ending} a"));
        let output = migrating.wait();
        assert_ne!(output.code, 0, "{ending}: {output:#?}");
        eprintln!("{ending}: {:#?}", result_of(&output));
        scene.guest.assert_answers();
        assert!(heartbeat.longest_gap() < GUARDED_SILENCE_MAX, "{ending}: {:?}", heartbeat.statistics());
        scene.lab.fault("libvirt-start a");
        assert_settled(&scene, "a");
    }
    scene.assert_moves("b");
}
