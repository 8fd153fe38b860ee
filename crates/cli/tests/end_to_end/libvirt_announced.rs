//! libvirt's domains that return to their source after all of them was at the target. The network finds them there
//! again, although their guests send nothing.

use std::process::Command;

use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::keeper::give_keeper;
use crate::libvirt_kills::hold_until_all_is_there;
use crate::libvirt_snapshots::kill_guards_and_agents;
use crate::scene::{MEMORY_MIB, SLOW_MBPS, Scene};
use crate::support::{TestLab, eventually};
use crate::whole;

pub(crate) const TESTS: &[Test] =
    &[("the_network_finds_a_domain_that_went_back", the_network_finds_a_domain_that_went_back)];

/// The agent announces it, or the guard, or, in the whole form, the agent when it starts again.
fn the_network_finds_a_domain_that_went_back() {
    let scene = silent_scene();
    // This needs no more rights than the agent's unit leaves, if that can be tested on this machine.
    let _has_all_otherwise = give_keeper(&scene.lab, "a");
    goes_back(&scene, || scene.kill_qemu("b"), || {});
    goes_back(&scene, || scene.lab.stop_agent("a", Signal::KILL), || {});
    scene.lab.start_agent("a");
    scene.assert_settled("a");
    if !whole::is_wanted() {
        return;
    }
    goes_back(
        &scene,
        || {
            kill_guards_and_agents(&scene.lab, &["a"]);
            // Without anybody who could act, it stays where it is.
            scene.kill_qemu("b");
        },
        || scene.lab.start_agent("a"),
    );
    scene.assert_settled("a");
}

/// A scene whose guest sends nothing unasked. With IPv6, its kernel would look for routers now and then.
#[track_caller]
fn silent_scene() -> Scene {
    let lab = TestLab::up(&["--libvirt", "--link", SLOW_MBPS, "--link", SLOW_MBPS]);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "ipv6.disable=1");
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    Scene::of(lab, guest)
}

/// A failure before the record, and what is done about it.
#[track_caller]
fn goes_back(scene: &Scene, go_wrong: impl FnOnce(), start_again: impl FnOnce()) {
    let (migrating, held) = hold_until_all_is_there(scene);
    go_wrong();
    let places = Places::of(&scene.guest);
    // The target's QEMU may have announced it this way.
    replace(scene, "a", &places.mac, "uplink");
    replace(scene, "switch", &places.mac, "g-b");
    held.release();
    start_again();
    drop(migrating.wait());
    eventually("its bridge finds it at its tap", || {
        place(scene, "a", &places.mac).as_ref() == Some(&places.tap)
    });
    eventually("the switch finds it at its host's port", || {
        place(scene, "switch", &places.mac).as_deref() == Some("g-a")
    });
    eventually("it runs on", || scene.lab.qemu_says("a", "web").as_deref() == Some("running"));
    eventually("no port is left of it", || !ports(scene, "a").contains("announce"));
    scene.guest.assert_answers();
}

struct Places {
    mac: String,
    tap: String,
}

impl Places {
    fn of(guest: &Guest) -> Self {
        let [.., last] = guest.address().octets();
        Self { mac: format!("52:54:00:d0:00:{last:02x}"), tap: format!("domain{last}") }
    }
}

/// Makes the bridge of a host, or the switch, believe that the guest is at another port.
#[track_caller]
fn replace(scene: &Scene, node: &str, mac: &str, port: &str) {
    bridge(scene, node, &["fdb", "replace", mac, "dev", port, "master", "dynamic"]);
    assert_eq!(place(scene, node, mac).as_deref(), Some(port));
}

/// The port at which a bridge finds the guest.
#[track_caller]
fn place(scene: &Scene, node: &str, mac: &str) -> Option<String> {
    let all = bridge(scene, node, &["fdb", "show", "br", drainpipe_lab::GUEST_BRIDGE]);
    let of_guest = all.lines().find_map(|line| line.strip_prefix(mac)?.trim().strip_prefix("dev "));
    of_guest.and_then(|rest| rest.split(' ').next()).map(str::to_owned)
}

#[track_caller]
fn ports(scene: &Scene, node: &str) -> String {
    bridge(scene, node, &["link", "show"])
}

#[track_caller]
fn bridge(scene: &Scene, node: &str, arguments: &[&str]) -> String {
    let namespace = format!("drainpipe-{}-{node}", scene.lab.name());
    let output = Command::new("bridge").args(["-n", &namespace]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
