//! Another program replaces the route to the other host.

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;
use rustix::process::Signal;

use crate::Test;
use crate::program::REFUSED;
use crate::scene::{Scene, slow_lab};
use crate::support::eventually;

pub(crate) const TESTS: &[Test] = &[
    (
        "it_is_told_in_flight_and_before_the_next_migration",
        it_is_told_in_flight_and_before_the_next_migration,
    ),
    ("so_it_is_by_ipv6", so_it_is_by_ipv6),
];

/// Another program's route to b's migration address, over one link.
struct OthersRoute {
    family: &'static str,
    address: String,
    gateway: String,
}

impl OthersRoute {
    fn replaces(&self) -> String {
        let Self { family, address, gateway } = self;
        format!("ip {family} route replace {address} via {gateway} dev e0")
    }

    fn is_removed(&self) -> String {
        format!("ip {} route del {}", self.family, self.address)
    }
}

fn it_is_told_in_flight_and_before_the_next_migration() {
    let scene = Scene::in_lab(slow_lab());
    is_told(&scene, |_| OthersRoute {
        family: "-4",
        address: "10.77.255.12".into(),
        gateway: "10.77.1.12".into(),
    });
}

/// The same if the agents have chosen the migration addresses.
fn so_it_is_by_ipv6() {
    let lab = slow_lab();
    for (host, last) in [("a", "11"), ("b", "12")] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, &format!("migration_address = \"10.77.255.{last}\"\n"), "");
        lab.start_agent(host);
    }
    is_told(&Scene::in_lab(lab), |scene| {
        let find = "ip -6 route | awk '/^fd/ { to = $1 } to && /via.* dev e0/ { print to, $3; exit }'";
        let found = on_a(scene, find);
        let (address, gateway) = found.trim().split_once(' ').unwrap_or_else(|| panic!("{found}"));
        OthersRoute { family: "-6", address: address.into(), gateway: gateway.into() }
    });
}

fn is_told(scene: &Scene, others: impl FnOnce(&Scene) -> OthersRoute) {
    let migrating = scene.migrate(&["--option", "multichannel"]);
    eventually("memory is sent", || scene.step() == Some(Step::CopyMemory));
    let others = others(scene);
    eventually("its agent has seen it", || {
        // Once more, since the agent may be about to write weights, and would then replace the new route.
        on_a(scene, &others.replaces());
        scene.lab.agent_log("a").contains("is another program's")
    });
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    drop(migrating.wait());
    let log = scene.lab.agent_log("a");
    let untimed = log.lines().find(|line| line.contains("INFO") && !line.starts_with("20"));
    assert_eq!(untimed, None, "it goes to a file, which adds no times");
    let result = scene.last_result();
    assert_eq!(result.outcome, Outcome::Cancelled, "{result:#?}");
    let finding =
        result.record.findings.iter().find(|finding| finding.code == "route-taken").expect("it is told");
    let of_whom = format!("route of a to {}, the migration address of b", others.address);
    assert!(finding.what.contains(&of_whom), "{finding:#?}");
    assert!(finding.remedy.contains("on a: ip "), "{finding:#?}");
    assert!(finding.remedy.contains(&format!("route del {}", others.address)), "{finding:#?}");

    let migrate = ["migrate", "web", "b", "--option", "multichannel"];
    for arguments in [&migrate[..], &[&migrate[..], &["--dry-run"]].concat()] {
        let refused = scene.lab.drainpipe(arguments);
        assert_eq!(refused.code, REFUSED, "{refused:#?}");
        assert!(refused.stderr.contains(&format!("the route of a to {}", others.address)), "{refused:#?}");
    }
    on_a(scene, &others.is_removed());
    scene.assert_moves("b");
}

#[track_caller]
fn on_a(scene: &Scene, command: &str) -> String {
    scene.lab.exec("a", &["bash", "-c", command]).done()
}
