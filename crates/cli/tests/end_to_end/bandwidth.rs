//! Limits on what migrations take of the links: from the hosts' configuration and set by hand during a migration, at
//! either end, and shared by several migrations.

use std::time::Duration;

use drainpipe_api_types::BandwidthView;
use drainpipe_engine::bandwidth::BandwidthSetting;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::link_rate::LinkRate;
use crate::program::{BAD_INPUT, Running};
use crate::scene::result_of;
use crate::support::{TestLab, eventually};
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    (
        "each_option_keeps_a_configured_limit_and_two_vms_share_the_targets",
        each_option_keeps_a_configured_limit_and_two_vms_share_the_targets,
    ),
    ("no_second_has_more_than_the_limit", no_second_has_more_than_the_limit),
    ("a_limit_outlives_the_agent_and_makes_sense", a_limit_outlives_the_agent_and_makes_sense),
];

const MEMORY_MIB: u64 = 160;

/// Links that carry far more than the limits, with a queue that counts.
const LINKS: &[&str] = &["--link", "5000", "--link", "5000"];

const LIMIT_MBPS: u64 = 200;

/// A limit at which QEMU's multifd would send four times as much.
const SMALL_LIMIT_MBPS: u64 = 80;

/// What is not over by then continues without a limit, and is no longer watched.
const WATCHED_MAX: Duration = Duration::from_secs(8);
const WATCHED_IN_FLIGHT: Duration = Duration::from_secs(4);

fn each_option_keeps_a_configured_limit_and_two_vms_share_the_targets() {
    let lab = TestLab::up(LINKS);
    let web = lab.start_guest("web", MEMORY_MIB, "");
    a_configured_limit_is_kept_by_each_option(&lab, &web);
    lab.drainpipe(&["limit", "a", "off"]).done();
    let db = lab.start_guest("db", MEMORY_MIB, "");
    a_limit_of_the_target_is_shared_and_changed_in_flight(&lab, &[web, db]);
}

fn a_configured_limit_is_kept_by_each_option(lab: &TestLab, guest: &Guest) {
    // The limit is that of a window that covers all day, below the general one.
    let bandwidth = format!(
        "[bandwidth]\nmbps = 9000\n\n[[bandwidth.window]]\nmbps = {LIMIT_MBPS}\nfrom = \"00:00\"\nuntil = \"00:00\"\n\n[tls]"
    );
    lab.configure("a", "[tls]", &bandwidth);
    lab.stop_agent("a", Signal::TERM);
    lab.start_agent("a");
    for &option in whole::first_or_all(1, &["multichannel", "tcp", "compression"]) {
        let result = lab.migrate("web", "b", &["--option", option]);
        assert!(result.memory.throughput_gbps * 1000.0 < LIMIT_MBPS as f64 * 1.1, "{option}: {result:#?}");
        assert!(says(&result, &format!("limited to {LIMIT_MBPS} Mb/s")), "{result:#?}");
        guest.assert_intact();
        lab.migrate("web", "a", &["--option", option]);
    }
}

fn a_limit_of_the_target_is_shared_and_changed_in_flight(lab: &TestLab, guests: &[Guest; 2]) {
    // Together, they stay in flight for half a minute if nothing changes.
    let agent_of_b = lab.agent_socket("b");
    lab.drainpipe(&["limit", "b", "40", "--agent", &agent_of_b]).done();
    let rate = LinkRate::watch(lab, "a");
    let mut migrating: [Running; 2] =
        ["web", "db"].map(|vm| lab.start(&["migrate", vm, "b", "--option", "multichannel", "--json"]));
    let rate = rate.until(WATCHED_IN_FLIGHT, || migrating.iter_mut().any(Running::has_ended));
    assert_keeps_to(40, &rate, "two VMs, of which one makes room for the other");
    eventually("each has half of it", || {
        let views = lab.migrations("a");
        let limits = views.iter().filter_map(|view| view.progress.as_ref()?.limit_mbps);
        limits.collect::<Vec<_>>() == [20, 20]
    });
    let view: BandwidthView = lab.json(&["limit", "b", "off", "--agent", &agent_of_b]);
    assert_eq!((view.setting, view.limit_mbps), (BandwidthSetting::Unlimited, None));
    for migrating in migrating {
        let result: MigrationResult = result_of(&migrating.wait());
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        assert!(says(&result, "no bandwidth limit any longer"), "{result:#?}");
    }
    for guest in guests {
        guest.assert_intact();
    }
}

fn no_second_has_more_than_the_limit() {
    let lab = TestLab::up(LINKS);
    let guest = lab.start_guest("web", MEMORY_MIB, "");
    let options: [&[&str]; _] =
        [&["multichannel"], &["tcp"], &["compression"], &["multichannel", "--encrypt"]];
    for &option in whole::first_or_all(3, &options) {
        lab.drainpipe(&["limit", "a", &SMALL_LIMIT_MBPS.to_string()]).done();
        let rate = LinkRate::watch(&lab, "a");
        let migrate = ["migrate", "web", "b", "--json", "--option"];
        let mut migrating = lab.start(&[&migrate, option].concat());
        let rate = rate.until(WATCHED_MAX, || migrating.has_ended());
        assert_keeps_to(SMALL_LIMIT_MBPS, &rate, &option.join(" "));
        lab.drainpipe(&["limit", "a", "off"]).done();
        let result: MigrationResult = result_of(&migrating.wait());
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        guest.assert_intact();
        lab.migrate("web", "a", &["--option", "tcp"]);
    }
    a_limit_in_flight_holds_too(&lab);
    a_limit_of_disks_leaves_memory_alone(&lab);
    guest.assert_intact();
}

fn a_limit_in_flight_holds_too(lab: &TestLab) {
    let packet_size = || lab.exec("a", &["sysctl", "-n", "net.ipv4.tcp_tso_rtt_log"]).stdout;
    let packet_size_before = packet_size();
    // At this speed they are still in flight.
    lab.drainpipe(&["limit", "a", "40"]).done();
    let mut migrating = lab.start(&["migrate", "web", "b", "--option", "multichannel", "--json"]);
    let limited_to = |mbps| {
        eventually("it keeps to its limit", || {
            let views = lab.migrations("a");
            views
                .iter()
                .any(|view| view.progress.as_ref().is_some_and(|progress| progress.limit_mbps == Some(mbps)))
        });
    };
    limited_to(40);
    lab.drainpipe(&["limit", "a", "20"]).done();
    limited_to(20);
    let rate = LinkRate::watch(lab, "a").until(WATCHED_IN_FLIGHT, || migrating.has_ended());
    assert_keeps_to(20, &rate, "in flight");
    // Linux before 5.18 has no such setting.
    let is_there = !packet_size_before.is_empty();
    assert!(!is_there || packet_size().trim() == "0", "many connections send small packets");
    lab.drainpipe(&["limit", "a", "off"]).done();
    let result: MigrationResult = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    assert_eq!(packet_size(), packet_size_before, "it is put back");
}

fn a_limit_of_disks_leaves_memory_alone(lab: &TestLab) {
    // At this speed, memory would take 20 minutes.
    lab.drainpipe(&["limit", "b", "1", "--storage", "--agent", &lab.agent_socket("b")]).done();
    let view: BandwidthView = lab.json(&["limit", "b", "--agent", &lab.agent_socket("b")]);
    assert_eq!((view.limit_mbps, view.storage.limit_mbps), (None, Some(1)));
    let result = lab.migrate("web", "a", &["--option", "multichannel"]);
    assert!(!says(&result, "limited to"), "{result:#?}");
}

#[track_caller]
pub(crate) fn assert_keeps_to(limit_mbps: u64, rate: &LinkRate, what: &str) {
    let most_mbps = rate.most_in_a_second_mbps();
    assert!(most_mbps > 0.0, "{what}: it was in flight for a second at least");
    assert!(most_mbps <= limit_mbps as f64 * 1.05, "{what}: {most_mbps:.1} Mb/s of {limit_mbps}");
}

fn a_limit_outlives_the_agent_and_makes_sense() {
    let lab = TestLab::fast();
    let shown = lab.drainpipe(&["limit", "a"]).done();
    assert!(shown.contains("no limit (by its agent.toml)"), "{shown}");
    lab.drainpipe(&["limit", "a", "500"]).done();
    lab.stop_agent("a", Signal::KILL);
    lab.start_agent("a");
    lab.drainpipe(&["limit", "a", "20", "--storage"]).done();
    let view: BandwidthView = lab.json(&["limit", "a"]);
    assert_eq!((view.setting, view.limit_mbps), (BandwidthSetting::Mbps(500), Some(500)));
    assert_eq!((view.storage.setting, view.storage.limit_mbps), (BandwidthSetting::Mbps(20), Some(20)));
    let shown = lab.drainpipe(&["limit", "a"]).done();
    assert!(shown.contains("at most 500 Mb/s") && shown.contains("disks within that: at most 20"), "{shown}");
    for wrong in ["0", "fast", "1.5"] {
        lab.drainpipe(&["limit", "a", wrong]).refused(BAD_INPUT, &["a number of Mb/s above 0"]);
    }
    let view: BandwidthView = lab.json(&["limit", "a", "configured"]);
    assert_eq!((view.limit_mbps, view.storage.limit_mbps), (None, Some(20)), "each by itself");
}

pub(crate) fn says(result: &MigrationResult, words: &str) -> bool {
    result.record.events.iter().any(|event| event.what.contains(words))
}
