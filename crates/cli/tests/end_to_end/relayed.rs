//! Compressed migrations: when migrations are compressed, and that the VM stays where it was whatever happens to the
//! relay.

use std::fs;
use std::thread;
use std::time::Duration;

use drainpipe_api_types::PlanView;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_engine::option::{MigrationOption, RequestedOption};
use drainpipe_engine::plan::Spread;
use rustix::process::Signal;

use crate::Test;
use crate::guest::Guest;
use crate::scene::{Scene, result_of, slow_lab};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[
    ("over_one_path", over_one_path),
    ("compression_stays_out_where_the_links_outrun_it", compression_stays_out_where_the_links_outrun_it),
    (
        "packing_keeps_to_its_cpus_and_progress_tells_of_it",
        packing_keeps_to_its_cpus_and_progress_tells_of_it,
    ),
    ("whatever_befalls_the_relay_in_flight", whatever_befalls_the_relay_in_flight),
];

const COMPRESSION: [&str; 2] = ["--option", "compression"];

/// Changes eight bytes of everything that TCP carries in large packets, and fixes the checksums.
const CORRUPT: &str = "table netdev corrupt {
  chain e0 { type filter hook ingress device e0 priority 0; ip protocol tcp ip length > 1000 @th,256,64 set 0x1122334455667788
  }
  chain e1 { type filter hook ingress device e1 priority 0; ip protocol tcp ip length > 1000 @th,256,64 set 0x1122334455667788
  }
}";

fn over_one_path() {
    let lab = TestLab::up(&["--link", "200", "--link", "200"]);
    for (host, last) in [("a", "11"), ("b", "12")] {
        lab.stop_agent(host, Signal::TERM);
        lab.configure(host, &format!("migration_address = \"10.77.255.{last}\"\n"), "");
        lab.exec(host, &["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"]).done();
        lab.configure(host, "[tls]", "[compression]\ncores = 1\n\n[tls]");
        lab.start_agent(host);
    }
    let scene = Scene::in_lab(lab);
    let migrating = scene.migrate(&COMPRESSION);
    assert_eq!(packing_cpus(&scene.lab).len(), 1, "threads that pack");
    let result = result_of(&migrating.wait());
    assert_compressed(&result);
    assert_eq!(result.traffic.paths.len(), 1, "{result:#?}");
    scene.assert_settled("b");
}

/// The CPUs on which each packing thread on host `a` may run.
#[track_caller]
fn packing_cpus(lab: &TestLab) -> Vec<String> {
    let tasks = format!("/proc/{}/task", lab.agent_pid("a").unwrap());
    let packs = |status: &String| status.starts_with("Name:\trelay-pack-");
    let look = || -> Vec<String> {
        let all = fs::read_dir(&tasks).unwrap().flatten();
        // A thread may end meanwhile.
        all.filter_map(|task| fs::read_to_string(task.path().join("status")).ok()).filter(packs).collect()
    };
    eventually("threads pack", || !look().is_empty());
    // The threads start one after the other, and then move to their CPUs.
    thread::sleep(Duration::from_millis(200));
    let cpus = |status: &String| {
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t"));
        line.expect("the kernel tells it").to_owned()
    };
    look().iter().map(cpus).collect()
}

#[track_caller]
fn assert_compressed(result: &MigrationResult) {
    assert_eq!(result.choice.option, MigrationOption::Compression);
    let compression = result.connection_use.compression.expect("it says what it did");
    assert!(compression.lz4_bytes + compression.zstd_bytes > 0, "{compression:?}");
    assert!(compression.compressed_bytes < compression.stream_bytes, "{compression:?}");
    let packed_bytes = compression.lz4_bytes + compression.zstd_bytes + compression.delta_bytes;
    let parts = compression.raw_bytes + packed_bytes;
    assert_eq!(parts, compression.stream_bytes, "{compression:?}");
    assert!(
        compression.cpu_seconds > 0.0 && compression.cpu_seconds < result.host_use.cpu_seconds.source_agent
    );
}

fn compression_stays_out_where_the_links_outrun_it() {
    let lab = TestLab::fast();
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    lab.create(&guest.specification(160, ""), "web");
    let view: PlanView = lab.json(&["migrate", "web", "b", "--dry-run", "--option", "compression"]);
    assert_eq!((view.plan.option(), view.plan.spread()), (MigrationOption::Multichannel, Spread::Routed));
    assert!(!view.plan.is_compressed());
    let reason = view.plan.reason().expect("it says why");
    assert!(reason.contains("not compressed: the paths carry 20.0 Gb/s"), "{reason}");
    lab.drainpipe(&["limit", "a", "1000"]).done();
    let view: PlanView = lab.json(&["migrate", "web", "b", "--dry-run", "--option", "compression"]);
    assert!(view.plan.is_compressed(), "{:?}", view.plan.reason());
}

fn packing_keeps_to_its_cpus_and_progress_tells_of_it() {
    let lab = slow_lab();
    lab.stop_agent("a", Signal::TERM);
    lab.configure("a", "[tls]", "[compression]\ncpus = \"0\"\n\n[tls]");
    lab.start_agent("a");
    let scene = Scene::in_lab(lab);
    let migrating = scene.migrate(&COMPRESSION);
    assert_eq!(packing_cpus(&scene.lab), ["0"]);
    eventually("progress tells it", || {
        let views = scene.lab.migrations("a");
        let progress = views.first().and_then(|view| view.progress.clone());
        let compression = progress.and_then(|progress| progress.compression);
        compression.is_some_and(|compression| compression.ratio > 1.0 && compression.cores > 0.0)
    });
    assert_compressed(&result_of(&migrating.wait()));
    scene.assert_settled("b");
}

fn whatever_befalls_the_relay_in_flight() {
    let scene = Scene::set();
    what_is_no_frame_ends_the_migration(&scene);
    scene.take_back();
    a_compressed_migration_is_cancelled(&scene);
    the_relays_target_agent_is_killed_in_flight(&scene);
    scene.take_back();
    the_relays_source_agent_is_killed_in_flight(&scene);
}

fn the_relays_source_agent_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&COMPRESSION);
    scene.lab.stop_agent("a", Signal::KILL);
    scene.guest.assert_answers();
    // Nobody starts the agent for a while.
    thread::sleep(Duration::from_secs(5));
    scene.guest.assert_intact();
    scene.lab.start_agent("a");
    assert_ne!(migrating.wait().code, 0);
    scene.assert_settled("a");
    // An earlier agent started the VM, so nothing is packed unless a core is idle.
    assert!(scene.lab.migrate("web", "b", &COMPRESSION).connection_use.compression.is_some());
    scene.assert_settled("b");
}

fn the_relays_target_agent_is_killed_in_flight(scene: &Scene) {
    let migrating = scene.migrate(&COMPRESSION);
    scene.lab.stop_agent("b", Signal::KILL);
    let result = result_of(&migrating.wait());
    assert_eq!(result.outcome, Outcome::Failed, "{result:#?}");
    scene.guest.assert_intact();
    scene.lab.start_agent("b");
    scene.assert_settled("a");
    assert_compressed(&scene.lab.migrate("web", "b", &COMPRESSION));
    scene.assert_settled("b");
}

fn a_compressed_migration_is_cancelled(scene: &Scene) {
    for delay_ms in [0, 400] {
        let migrating = scene.migrate(&COMPRESSION);
        thread::sleep(Duration::from_millis(delay_ms));
        migrating.signal(Signal::INT);
        let result = result_of(&migrating.wait());
        assert_eq!((result.outcome, result.failure.error), (Outcome::Cancelled, None));
        scene.assert_settled("a");
    }
}

/// Where guest data is hit before a frame's header, QEMU ends first, since nothing but TCP's checksums and encryption sees to
/// data. That was seen once: then it is tried again.
fn what_is_no_frame_ends_the_migration(scene: &Scene) {
    let tells = |_| {
        let migrating = scene.migrate(&COMPRESSION);
        scene.lab.exec("b", &["nft", CORRUPT]).done();
        let result = result_of(&migrating.wait());
        assert_eq!(result.outcome, Outcome::Failed, "{result:#?}");
        assert_eq!(result.choice.requested_option, RequestedOption::Compression);
        scene.lab.exec("b", &["nft", "delete table netdev corrupt"]).done();
        scene.assert_settled("a");
        let is_told = scene.lab.agent_log("b").contains("the other host sent");
        let error = result.failure.error.as_deref().unwrap();
        let follows = "which follows from it, and is not the reason";
        assert!(!is_told || !error.contains("has ended"), "{follows}: {error}");
        is_told
    };
    let log = || scene.lab.agent_log("b");
    assert!((0..3).any(tells), "the target's agent says what came:\n{}", log());
    assert_compressed(&scene.lab.migrate("web", "b", &COMPRESSION));
    scene.assert_settled("b");
}
