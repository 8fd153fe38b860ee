//! Paths that are lost and return in mid-flight: the migration continues over the rest, says so, and undoes everything.

use std::thread;
use std::time::{Duration, Instant};

use drainpipe_api_types::{HostStatus, VmList};
use drainpipe_engine::migration::result::{MigrationResult, Outcome, PathState};
use drainpipe_engine::plan::MULTICHANNEL_CONNECTIONS;
use drainpipe_guest::protocol::Dirtying;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::encrypted::seen;
use crate::guest::Guest;
use crate::options;
use crate::scene::{Scene, assert_failed, result_of, slow_lab};
use crate::shared_paths::{NEVER_DONE, wait_for_news};
use crate::support::{TestLab, eventually};
use crate::switch_over_faults::{heal, silence};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    ("a_link_goes_down_or_loses_packets", a_link_goes_down_or_loses_packets),
    ("a_link_falls_silent", a_link_falls_silent),
    ("a_link_drops_large_packets", a_link_drops_large_packets),
    (
        "a_link_returns_flaps_and_is_lost_under_strict_reverse_path_filters",
        a_link_returns_flaps_and_is_lost_under_strict_reverse_path_filters,
    ),
    ("a_link_that_is_made_again_is_used_again", a_link_that_is_made_again_is_used_again),
    ("a_standby_link_carries_when_no_other_does", a_standby_link_carries_when_no_other_does),
    ("all_links_are_lost_for_five_seconds", all_links_are_lost_for_five_seconds),
    ("all_links_are_silent_for_longer_than_the_bound", all_links_are_silent_for_longer_than_the_bound),
    ("the_target_agent_stands_still_for_a_while", the_target_agent_stands_still_for_a_while),
];

/// Longer than the sockets can hold hellos for: 277, one each 50 ms. Also longer than either agent waits for an answer.
const STANDS_STILL: Duration = Duration::from_secs(30);

/// Longer than the agents take to notice, and shorter than the flight.
const FAULT_LASTS: Duration = Duration::from_secs(2);

fn a_link_goes_down_or_loses_packets() {
    let scene = Scene::set();
    // At the source.
    loses_e1_alone(&scene, "b", "link-down a e1", "link-up a e1");
    if whole::is_wanted() {
        // At the target.
        loses_e1_alone(&scene, "a", "link-down a e1", "link-up a e1");
        loses_e1_alone(&scene, "b", "loss b e1 20", "heal b e1");
    }
    a_link_that_loses_packets_carries_when_the_other_is_switched_off(&scene);
}

/// The guest moves back.
fn a_link_that_loses_packets_carries_when_the_other_is_switched_off(scene: &Scene) {
    let is_routed = |link: &str| is_routed(&scene.lab, "b", link);
    let migrating = scene.migrate_to("a", &[]);
    scene.lab.fault("loss a e1 20");
    eventually("the route goes over e0 alone", || is_routed("e0") && !is_routed("e1"));
    scene.lab.fault("link-down b e0");
    eventually("the route goes over e1 alone", || is_routed("e1") && !is_routed("e0"));
    scene.lab.fault("link-up b e0");
    scene.lab.fault("heal a e1");
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    scene.assert_settled("a");
}

/// Whether a host's route to the other one uses this link too.
#[track_caller]
fn is_routed(lab: &TestLab, host: &str, link: &str) -> bool {
    let routes = "ip route show proto 215; ip -6 route show proto 215";
    lab.exec(host, &["bash", "-c", routes]).done().contains(&format!("dev {link}"))
}

fn a_link_falls_silent() {
    let scene = Scene::set();
    // Towards the source.
    loses_e1_alone(&scene, "b", "blackhole b e1 send", "heal b e1");
    // Towards the target.
    loses_e1_alone(&scene, "a", "blackhole a e1 receive", "heal a e1");
    if whole::is_wanted() {
        // In both directions.
        loses_e1_alone(&scene, "b", "blackhole b e1", "heal b e1");
    }
}

/// Small packets pass, hellos among them.
fn a_link_drops_large_packets() {
    let scene = Scene::set();
    as_soon_as_it_has_been_tried(&scene);
    // Only the memory's large packets are dropped.
    loses_e1_alone(&scene, "a", "blackhole-above a e1 1400 receive", "heal a e1");
    if whole::is_wanted() {
        loses_e1_alone(&scene, "b", "blackhole-above b e1 1400", "heal b e1");
    }
}

/// The fault begins before any large hello can have come through.
fn as_soon_as_it_has_been_tried(scene: &Scene) {
    let migrating = scene.migrate_to("b", &[]);
    eventually("the route goes over e1 too", || is_routed(&scene.lab, "a", "e1"));
    scene.lab.fault("blackhole-above b e1 1400");
    let result = result_of(&migrating.wait());
    scene.lab.fault("heal b e1");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!([turns(&result, "e0"), turns(&result, "e1")], [vec![], vec![PathState::Out]], "{result:#?}");
    let why = "path e1–e1 is out: small packets come through and large ones do not";
    assert!(result.record.events.iter().any(|event| event.what.contains(why)), "{result:#?}");
    scene.assert_settled("b");
}

#[track_caller]
fn loses_e1_alone(scene: &Scene, target: &str, fault: &str, cure: &str) {
    let result = goes_on_without_e1_to(scene, target, fault, cure);
    assert_eq!(turns(&result, "e0"), [], "{fault}: {result:#?}");
}

/// Migrates the guest to `b`, which does not need e1 for that.
#[track_caller]
pub(crate) fn goes_on_without_e1(scene: &Scene, fault: &str, cure: &str) -> MigrationResult {
    goes_on_without_e1_to(scene, "b", fault, cure)
}

#[track_caller]
fn goes_on_without_e1_to(scene: &Scene, target: &str, fault: &str, cure: &str) -> MigrationResult {
    let migrating = scene.migrate_to(target, &[]);
    // What begins in flight: both ends have heard hellos by then.
    let source = if target == "a" { "b" } else { "a" };
    eventually("it has been on its way for a second", || {
        let migrations = scene.lab.migrations(source);
        migrations
            .iter()
            .filter_map(|view| view.progress.as_ref())
            .any(|progress| progress.elapsed_ms > 1_000.0)
    });
    scene.lab.fault(fault);
    let result = result_of(&migrating.wait());
    scene.lab.fault(cure);
    assert_eq!(result.outcome, Outcome::Completed, "{fault}: {result:#?}");
    assert_eq!(turns(&result, "e1").first(), Some(&PathState::Out), "{fault}: {result:#?}");
    scene.assert_settled(target);
    result
}

fn a_link_returns_flaps_and_is_lost_under_strict_reverse_path_filters() {
    let scene = Scene::set();
    a_link_that_returns_is_used_again(&scene);
    a_link_that_flaps(&scene);
    a_link_is_lost_under_strict_reverse_path_filters(&scene);
}

fn a_link_that_returns_is_used_again(scene: &Scene) {
    let migrating = scene.migrate(&[]);
    scene.lab.fault("blackhole a e1");
    thread::sleep(FAULT_LASTS);
    scene.lab.fault("heal a e1");
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e1"), [PathState::Out, PathState::Back], "{result:#?}");
    // One of the connections carries no memory.
    let connections: Option<u64> = result.traffic.paths.iter().map(|path| path.connections).sum();
    assert_eq!(connections, Some(u64::from(MULTICHANNEL_CONNECTIONS.get()) + 1), "{result:#?}");
    scene.assert_settled("b");
}

/// At the target, while the guest moves back.
fn a_link_that_flaps(scene: &Scene) {
    let migrating = scene.migrate_to("a", &[]);
    for _ in 0..3 {
        for fault in ["link-down a e1", "link-up a e1"] {
            scene.lab.fault(fault);
            thread::sleep(Duration::from_secs(1));
        }
    }
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e1").first(), Some(&PathState::Out), "{result:#?}");
    assert_eq!(turns(&result, "e0"), [], "{result:#?}");
    scene.assert_settled("a");
}

fn a_link_is_lost_under_strict_reverse_path_filters(scene: &Scene) {
    for host in ["a", "b"] {
        let strict = "sysctl -qw net.ipv4.conf.all.rp_filter=1 net.ipv4.conf.e0.rp_filter=1 \
                      net.ipv4.conf.e1.rp_filter=1";
        scene.lab.exec(host, &["bash", "-c", strict]).done();
    }
    goes_on_without_e1(scene, "blackhole b e1", "heal b e1");
}

fn a_link_that_is_made_again_is_used_again() {
    makes_e1_again(&Scene::set());
}

/// In mid-flight, as when the link's driver is loaded again: the kernel sees another link of the same name.
#[track_caller]
pub(crate) fn makes_e1_again(scene: &Scene) {
    let lab = &scene.lab;
    scene.guest.set_dirty(NEVER_DONE);
    let migrating = scene.migrate(&[]);
    delete_e1_and_make_it_again(lab);
    wait_for_news(lab, "path e1–e1 is back");
    for host in ["a", "b"] {
        eventually("the route goes over both", || ["e0", "e1"].iter().all(|link| is_routed(lab, host, link)));
        let settings = "cat /proc/sys/net/ipv[46]/conf/e1/ignore_routes_with_linkdown";
        let set = lab.exec(host, &["bash", "-c", settings]).done();
        assert!(set.contains('1'), "{host}: {set}");
    }
    scene.guest.set_dirty(Dirtying::IDLE);
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(turns(&result, "e0"), [], "{result:#?}");
    assert_eq!(turns(&result, "e1"), [PathState::Out, PathState::Back], "{result:#?}");
    scene.assert_settled("b");
}

/// Prints what makes a new e1 like this one.
const AS_IT_IS: &str = r"
    ip -oneline link show e1 |
        sed -E 's|.* mtu ([0-9]+) .* link/ether ([^ ]+) .*|ip link set e1 mtu \1 address \2 up|'
    ip -4 -oneline address show e1 | sed -E 's|.* inet ([^ ]+) .*|ip address add \1 broadcast + dev e1|'";

/// Makes the link again as it was, once neither host counts on it.
#[track_caller]
fn delete_e1_and_make_it_again(lab: &TestLab) {
    let run = |host: &str, script: &str| lab.exec(host, &["bash", "-ec", script]).done();
    let as_they_were = ["a", "b"].map(|host| run(host, AS_IT_IS));
    // Both hosts' ends go with either one.
    run("a", "ip link delete e1");
    wait_for_news(lab, "path e1–e1 is out");
    let other = lab.namespace("b");
    let other = other.file_name().unwrap().to_str().unwrap();
    run("a", &format!("ip link add e1 type veth peer name e1 netns {other}"));
    let rate_mbps = lab.lab().spec().links[1].rate_mbps.expect("its links are slow");
    lab.fault(&format!("rate e1 {rate_mbps}"));
    for (host, as_it_was) in ["a", "b"].iter().zip(&as_they_were) {
        run(host, as_it_was);
    }
}

/// The link would bring less than it may cost.
fn a_standby_link_carries_when_no_other_does() {
    let scene = Scene::in_lab(TestLab::up(&["--link", "200", "--link", "40"]));
    let migrating = scene.migrate(&[]);
    scene.lab.fault("link-down a e0");
    let result = result_of(&migrating.wait());
    scene.lab.fault("link-up a e0");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    let [e0, e1] = &result.traffic.paths[..] else { panic!("{result:#?}") };
    assert!(!e0.is_standby && e1.is_standby && e1.share > 0.3, "{result:#?}");
    assert!(
        result.record.events.iter().any(|event| event.what.contains("e1–e1 is on standby")),
        "{result:#?}"
    );
    scene.assert_settled("b");
}

/// Needs a machine type since 8.1: with older ones, the slowest path slows all of them down.
pub(crate) fn a_link_that_becomes_slow_gets_a_smaller_share() {
    let qemu = options::other_qemu().expect("the test runs only where there is one");
    let lab = TestLab::up(&["--link", "60", "--link", "60", "--qemu", &qemu]);
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    lab.create(&Guest::on_newer_machine(&guest.specification(160, "")), "web");
    lab.drainpipe(&["vm", "start", "web"]).done();
    guest.wait_until_ready();
    let scene = Scene::of(lab, guest);
    let migrating = scene.migrate(&[]);
    scene.lab.fault("rate e1 6");
    let result = result_of(&migrating.wait());
    scene.lab.fault("rate e1 60");
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    // How its queue fills decides which of the two happens.
    let e1 = result.traffic.paths.iter().find(|path| path.link == "e1").unwrap();
    let first = e1.turns.first().map(|turn| turn.state);
    assert!(matches!(first, Some(PathState::Weighted | PathState::Out)), "{result:#?}");
    scene.assert_settled("b");
}

/// Counts a migration's TCP segments that leave over the management network.
const LOOK: &str = "table inet look {
  counter elsewhere {}
  chain leaving { type filter hook output priority 0;
    oifname mgmt tcp dport 49152-49215 counter name elsewhere
    oifname mgmt tcp sport 49152-49215 counter name elsewhere
  }
}";

/// The migration takes no other way meanwhile, though the hosts have one.
fn all_links_are_lost_for_five_seconds() {
    let lab = slow_lab();
    for (host, other) in [("a", "b"), ("b", "a")] {
        let gateway = lab.agent_address(other).ip().to_string();
        lab.exec(host, &["ip", "route", "add", "default", "via", &gateway]).done();
        lab.exec(host, &["nft", LOOK]).done();
    }
    let scene = Scene::in_lab(lab);
    goes_on_after_five_seconds(&scene, "b", "blackhole a");
    // The kernel removes the route with the last of its links.
    goes_on_after_five_seconds(&scene, "a", "link-down b");
}

/// The source loses all links.
#[track_caller]
fn goes_on_after_five_seconds(scene: &Scene, target: &str, fault: &str) {
    let migrating = scene.migrate_to(target, &[]);
    let source = if target == "a" { "b" } else { "a" };
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("{fault} {link}"));
    }
    thread::sleep(Duration::from_secs(5));
    for link in ["e0", "e1"] {
        scene.lab.fault(&format!("heal {source} {link}"));
    }
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{fault}: {result:#?}");
    assert_eq!(["a", "b"].map(|host| seen(&scene.lab, host, "elsewhere")), [0, 0], "{fault}: {result:#?}");
    assert!(result.traffic.elsewhere.is_empty(), "{fault}: {result:#?}");
    scene.assert_settled(target);
}

fn all_links_are_silent_for_longer_than_the_bound() {
    let scene = Scene::set();
    for_longer_than_the_migration_may_take(&scene);
    for_longer_than_nothing_may_arrive(&scene);
    heal(&scene);
    scene.assert_moves("b");
}

fn for_longer_than_the_migration_may_take(scene: &Scene) {
    let migrating = scene.migrate(&["--deadline", "10"]);
    silence(scene);
    // The migration is over before the links are back.
    assert_failed(&migrating.wait(), "not over within 10 s");
    heal(scene);
    scene.assert_settled("a");
}

fn for_longer_than_nothing_may_arrive(scene: &Scene) {
    scene.lab.stop_agent("a", Signal::TERM);
    scene.lab.configure("a", "[tls]", "[limits]\nstall_s = 5\n\n[tls]");
    scene.lab.start_agent("a");
    let migrating = scene.migrate(&[]);
    silence(scene);
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Failed, "{result:#?}");
    let error = result.failure.error.as_deref().unwrap_or_default();
    // The path that fails first is out, and everything waits on the other one.
    for words in ["nothing has arrived for 5 s over ", "e0–e0", "e1–e1"] {
        assert!(error.contains(words), "{result:#?}");
    }
    // The agents report and tidy up while the links are still dead: they reach each other over another network.
    scene.assert_settled("a");
    let to_the_target = "( dport >= :49152 and dport <= :49215 )";
    let unsent = scene.lab.exec("a", &["ss", "-Htn", "state", "fin-wait-1", to_the_target]).done();
    assert_eq!(unsent, "", "what was not sent waits for a way");
}

fn the_target_agent_stands_still_for_a_while() {
    // In flight for longer than the agent is frozen. With links this slow, the lab's queues alone may delay hellos for
    // longer than the watch tolerates, so that paths may turn; the engine's tests look at that.
    let scene = Scene::in_lab(TestLab::up(&["--link", "8", "--link", "8"]));
    let migrating = scene.migrate(&[]);
    let agent = scene.lab.agent_pid("b").expect("it runs");
    kill_process(agent, Signal::STOP).unwrap();
    let stopped_at = Instant::now();
    lists_are_without_host_b(&scene);
    thread::sleep(STANDS_STILL.saturating_sub(stopped_at.elapsed()));
    kill_process(agent, Signal::CONT).unwrap();
    scene.set_rates("unlimited");
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert!(result.times.total_ms > STANDS_STILL.as_secs_f64() * 1_000.0, "{result:#?}");
    scene.assert_settled("b");
}

/// Both lists arrive while the agent is frozen, and say that it does not answer.
fn lists_are_without_host_b(scene: &Scene) {
    let hosts: Vec<HostStatus> = scene.lab.incomplete_json(&["hosts"]);
    let answered: Vec<bool> = hosts.iter().map(|host| host.host.is_some()).collect();
    assert_eq!(answered, [true, false], "{hosts:#?}");
    let why = hosts[1].error.as_deref().unwrap_or_default();
    assert!(why.contains("the agent of b") && why.contains("no answer in time"), "{why}");
    let vms: VmList = scene.lab.incomplete_json(&["vms"]);
    assert_eq!(vms.hosts_not_asked, ["b"]);
    assert!(vms.vms.iter().any(|vm| vm.name == "web" && vm.host == "a"), "{vms:#?}");
    assert!(vms.errors.len() == 1 && vms.errors[0].contains("the agent of b"), "{vms:#?}");
}

/// When a link was out, or not watched. Times when it only carried less, as on a busy machine, are left out.
pub(crate) fn turns(result: &MigrationResult, link: &str) -> Vec<PathState> {
    let of_link = result.traffic.paths.iter().filter(|path| path.link == link);
    let states = of_link.flat_map(|path| &path.turns).map(|turn| turn.state);
    states.filter(|state| *state != PathState::Weighted).collect()
}
