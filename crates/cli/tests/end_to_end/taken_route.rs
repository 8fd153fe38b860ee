//! Another program replaces the route to the other host.

use drainpipe_engine::migration::result::Outcome;
use drainpipe_engine::migration::step::Step;

use crate::Test;
use crate::program::REFUSED;
use crate::scene::{Scene, slow_lab};
use crate::support::eventually;

pub(crate) const TESTS: &[Test] = &[(
    "it_is_told_in_flight_and_before_the_next_migration",
    it_is_told_in_flight_and_before_the_next_migration,
)];

/// The migration address of host b in a lab.
const ADDRESS_OF_B: &str = "10.77.255.12";

fn it_is_told_in_flight_and_before_the_next_migration() {
    let scene = Scene::in_lab(slow_lab());
    let migrating = scene.migrate(&["--option", "multichannel"]);
    eventually("memory is sent", || scene.step() == Some(Step::CopyMemory));
    eventually("its agent has seen it", || {
        // Again, as the agent may be about to write weights, which replaces what has come in that moment.
        on_a(&scene, &format!("ip route replace {ADDRESS_OF_B} via 10.77.1.12 dev e0"));
        scene.lab.agent_log("a").contains("is another program's")
    });
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    drop(migrating.wait());
    let log = scene.lab.agent_log("a");
    let untimed = log.lines().find(|line| line.contains("INFO") && !line.starts_with("20"));
    assert_eq!(untimed, None, "it goes to a file, which adds no times");
    let result = scene.last_result();
    assert_eq!(result.outcome, Outcome::Cancelled, "{result:#?}");
    let told = result.findings.iter().find(|finding| finding.code == "route-taken").expect("it is told");
    assert!(told.what.contains("route of a to 10.77.255.12, the migration address of b"), "{told:#?}");
    assert!(told.remedy.contains("on a: ip route del"), "{told:#?}");

    let migrate = ["migrate", "web", "b", "--option", "multichannel"];
    for arguments in [&migrate[..], &[&migrate[..], &["--dry-run"]].concat()] {
        let refused = scene.lab.drainpipe(arguments);
        assert_eq!(refused.code, REFUSED, "{refused:#?}");
        assert!(refused.stderr.contains("the route of a to 10.77.255.12"), "{refused:#?}");
    }
    on_a(&scene, &format!("ip route del {ADDRESS_OF_B}"));
    scene.assert_moves("b");
}

#[track_caller]
fn on_a(scene: &Scene, command: &str) {
    scene.lab.exec("a", &["bash", "-c", command]).done();
}
