//! Disks that move to another place on their host while their VMs run.

use std::fs;
use std::thread;
use std::time::Duration;

use drainpipe_api_types::{DiskMoveOutcome, DiskMoveView, LeftDisk};
use drainpipe_guest::block::{BLOCK_BYTES, Block};
use drainpipe_guest::writers::WRITERS_PER_DISK;
use drainpipe_hypervisor::spec::VmSpec;
use rusqlite::{Connection, params};
use rustix::process::{Signal, kill_process};
use serde_json::json;

use crate::Test;
use crate::check_vms::start_vm;
use crate::copied_disks::{Apart, content, lab};
use crate::drain::ask;
use crate::program::{CANCELLED, FAILED, REFUSED};
use crate::scene::journal;
use crate::support::{TestLab, eventually};
use crate::writing_guests::{WRITES_PER_S, Writing};

pub(crate) const TESTS: &[Test] =
    &[("a_qemu_that_is_too_old_moves_no_disks", a_qemu_that_is_too_old_moves_no_disks)];

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("a_disk_moves_while_its_guest_writes", a_disk_moves_while_its_guest_writes),
    ("whoever_dies_the_vm_has_all_that_was_written", whoever_dies_the_vm_has_all_that_was_written),
    ("what_is_refused_cancelled_or_fails_leaves_nothing", what_is_refused_cancelled_or_fails_leaves_nothing),
];

/// How often a cancel that comes too late is tried again.
const TRIES_MAX: usize = 10;

/// Delays the record for longer than a test needs to end the agent meanwhile.
const SLOW_RECORD: &str = "CREATE TRIGGER slow BEFORE UPDATE OF recorded ON disk_moves BEGIN \
    SELECT count(*) FROM (WITH RECURSIVE numbers(n) AS \
    (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 10000000000) SELECT n FROM numbers); END";
const NO_RECORD: &str = "CREATE TRIGGER never BEFORE UPDATE OF recorded ON disk_moves BEGIN \
    SELECT RAISE(ABORT, 'of this test'); END";

#[track_caller]
fn move_disk(apart: &Apart, disk: &str, name: &str) -> DiskMoveView {
    let moved: DiskMoveView = apart.lab.json(&["vm", "move-disk", "web", disk, &apart.path("a", name)]);
    let result = moved.result.clone().expect("it is over");
    assert_eq!(result.outcome, DiskMoveOutcome::Completed, "{moved:#?}");
    moved
}

/// The paths of the disks in the VM's definition.
#[track_caller]
fn places(lab: &TestLab) -> Vec<String> {
    let definition: VmSpec = ask(lab, "a", "/v1/vms/web/definition", None).unwrap();
    definition.disks.iter().map(|disk| disk.path.display().to_string()).collect()
}

#[track_caller]
fn view(lab: &TestLab) -> Option<DiskMoveView> {
    ask(lab, "a", "/v1/vms/web/disk-move", None).ok()
}

#[track_caller]
fn wait_until_settled(lab: &TestLab) {
    eventually("the move is settled", || {
        let journal = Connection::open(journal(lab, "a")).unwrap();
        journal.query_row("SELECT count(*) FROM disk_moves", [], |row| row.get::<_, u32>(0)) == Ok(0)
    });
}

fn a_disk_moves_while_its_guest_writes() {
    let writing = Writing::begin();
    let apart = &writing.apart;
    let lab = &apart.lab;
    let moved = move_disk(apart, "vda", "moved.raw");
    assert!(moved.progress.is_some_and(|progress| progress.is_ready), "{moved:#?}");
    move_disk(apart, "vdb", "moved.qcow2");
    assert_eq!(places(lab), [apart.path("a", "moved.raw"), apart.path("a", "moved.qcow2")]);
    writing.wait_for_writes();
    writing.assert_intact();
    let left: Vec<LeftDisk> = lab.json(&["disk", "left", "a"]);
    assert!(left.iter().all(|disk| disk.path.contains(".moved-") && disk.target == "a"), "{left:#?}");
    assert_eq!(left.len(), 2);
    lab.drainpipe(&["disk", "left", "a", "--remove"]).done();
    assert_eq!(apart.names("a"), ["moved.qcow2", "moved.raw"]);

    // Another agent, which knows of the move only from the runtime directory; and once more.
    writing.kill_agent("a");
    writing.write(WRITES_PER_S);
    move_disk(apart, "vda", "again.raw");
    writing.wait_for_writes();
    writing.assert_intact();

    // Both hosts see these files; afterwards, the disks are copied.
    writing.write(WRITES_PER_S);
    lab.migrate("web", "b", &[]);
    writing.wait_for_writes();
    let copies = apart.copies_to("a");
    lab.migrate("web", "a", &copies.iter().map(String::as_str).collect::<Vec<_>>());
    move_disk(apart, "vdb", "last.qcow2");
    lab.migrate("web", "b", &["--disk", &format!("vdb={}", apart.path("b", "web.qcow2"))]);
    writing.wait_for_writes();
    writing.assert_intact();
}

/// A move that holds the guest's writes, and whose agent then ends.
#[track_caller]
fn end_agent_in_hold(writing: &Writing, name: &str) {
    let lab = &writing.apart.lab;
    let connection = Connection::open(journal(lab, "a")).unwrap();
    connection.execute_batch(SLOW_RECORD).unwrap();
    drop(connection);
    let mut moving = lab.start(&["vm", "move-disk", "web", "vda", &writing.apart.path("a", name)]);
    let mut monitor = writing.apart.monitor();
    eventually("QEMU holds the guest's writes", || {
        assert!(!moving.has_ended(), "it does not wait for the record");
        monitor.ask("query-block-jobs", &json!({})).to_string().contains("\"status\":\"pending\"")
    });
    lab.stop_agent("a", Signal::KILL);
    let connection = Connection::open(journal(lab, "a")).unwrap();
    connection.execute_batch("DROP TRIGGER slow").unwrap();
}

/// Makes the journal what it is when the agent ends right after the record.
#[track_caller]
fn record(lab: &TestLab, from: &str, to: &str) {
    let connection = Connection::open(journal(lab, "a")).unwrap();
    let recorded = connection
        .execute("UPDATE vms SET spec = replace(spec, ?1, ?2) WHERE name = 'web'", params![from, to])
        .unwrap();
    assert_eq!(recorded, 1);
    assert_eq!(connection.execute("UPDATE disk_moves SET recorded = 1", []).unwrap(), 1);
}

fn whoever_dies_the_vm_has_all_that_was_written() {
    let writing = Writing::begin();
    let apart = &writing.apart;
    let lab = &apart.lab;
    let path = |name: &str| apart.path("a", name);

    // Before the record, the VM has the old disk.
    end_agent_in_hold(&writing, "one.raw");
    lab.start_agent("a");
    wait_until_settled(lab);
    writing.wait_for_writes();
    writing.assert_intact();
    assert_eq!(places(lab)[0], path("web.raw"));
    assert_eq!(apart.names("a"), ["web.qcow2", "web.raw"]);

    // After it, the new one.
    writing.write(WRITES_PER_S);
    end_agent_in_hold(&writing, "two.raw");
    record(lab, &path("web.raw"), &path("two.raw"));
    lab.start_agent("a");
    wait_until_settled(lab);
    writing.wait_for_writes();
    writing.assert_intact();
    assert_eq!(places(lab)[0], path("two.raw"));
    assert_eq!(view(lab).unwrap().result.unwrap().outcome, DiskMoveOutcome::Completed);

    // Wherever the copy is interrupted, the VM has one of the two.
    writing.write(WRITES_PER_S);
    let mut now = "two.raw".to_owned();
    for (number, after_ms) in [0, 150, 400].into_iter().enumerate() {
        let next = format!("any{number}.raw");
        let moving = lab.start(&["vm", "move-disk", "web", "vda", &path(&next)]);
        eventually("it has begun", || view(lab).is_some_and(|view| view.to == path(&next)));
        thread::sleep(Duration::from_millis(after_ms));
        writing.kill_agent("a");
        wait_until_settled(lab);
        drop(moving.wait());
        writing.wait_for_writes();
        let place = places(lab).remove(0);
        assert!([path(&now), path(&next)].contains(&place), "{place}");
        assert_eq!(apart.names("a").contains(&next), place == path(&next));
        place.rsplit('/').next().unwrap().clone_into(&mut now);
    }
    writing.assert_intact();

    // The VM's process ends too: the disk that the definition names has everything that was acknowledged.
    writing.write(WRITES_PER_S);
    writing.wait_for_writes();
    end_agent_in_hold(&writing, "last.raw");
    record(lab, &path(&now), &path("last.raw"));
    let generations = writing.generations(0);
    kill_process(lab.qemu_pid("a", "web").unwrap(), Signal::KILL).unwrap();
    lab.start_agent("a");
    wait_until_settled(lab);
    assert_eq!(places(lab)[0], path("last.raw"));
    assert_has(&fs::read(path("last.raw")).unwrap(), &generations);
}

/// Fails the test unless a disk has everything that was acknowledged. It may also have each writer's last write, if the
/// guest did not hear of that.
#[track_caller]
fn assert_has(disk: &[u8], generations: &[u32]) {
    let blocks = disk.chunks(BLOCK_BYTES).zip(generations).enumerate();
    let has = |number, generation, bytes: &[u8]| Block { disk: 0, number, generation }.content() == bytes;
    let differing = blocks.filter(|(number, (bytes, generation))| !has(*number, **generation, bytes));
    let differing: Vec<_> =
        differing.map(|(number, (bytes, generation))| (number, has(number, generation + 1, bytes))).collect();
    let are_last_writes = differing.len() <= WRITERS_PER_DISK && differing.iter().all(|(_, by_one)| *by_one);
    assert!(are_last_writes, "blocks that differ, and whether by one write: {differing:?}");
}

/// Makes a copy take long, unless it is over before.
#[track_caller]
fn slow_down(apart: &Apart) {
    let mut monitor = apart.monitor();
    eventually("it copies slowly, or is over", || {
        let jobs = monitor.ask("query-block-jobs", &json!({}));
        let copying = jobs.as_array().into_iter().flatten().find(|job| job["speed"] == json!(0));
        let is_slow = copying.is_some_and(|job| {
            let slow = json!({ "device": job["device"], "speed": 1 << 16 });
            monitor.try_ask("block-job-set-speed", &slow).is_ok()
        });
        is_slow || view(&apart.lab).is_some_and(|view| view.result.is_some())
    });
}

fn what_is_refused_cancelled_or_fails_leaves_nothing() {
    let apart = Apart::under_two_paths(lab());
    let lab = &apart.lab;
    let path = |name: &str| apart.path("a", name);
    let refused = |disk: &str, to: &str, words: &[&str]| {
        lab.drainpipe(&["vm", "move-disk", "web", disk, to]).refused(REFUSED, words);
    };
    refused("vdc", &path("x.raw"), &["no disk vdc"]);
    refused("vda", &path("web.raw"), &["is already at"]);
    refused("vda", &path("web.qcow2"), &["it exists already"]);
    refused("vda", &path("../x.raw"), &["is not in a directory"]);
    refused("vda", "/dev/x", &["block devices"]);

    // If it is not recorded, it is not done.
    let connection = Connection::open(journal(lab, "a")).unwrap();
    connection.execute_batch(NO_RECORD).unwrap();
    let failed = lab.drainpipe(&["vm", "move-disk", "web", "vda", &path("x.raw")]);
    failed.refused(FAILED, &["not moved", "of this test"]);
    connection.execute_batch("DROP TRIGGER never").unwrap();
    drop(connection);
    assert_eq!(apart.names("a"), ["web.qcow2", "web.raw"]);

    let mut names = ["web.raw".to_owned(), "web.qcow2".to_owned()];
    let is_cancelled = (0..TRIES_MAX).any(|number| {
        let name = format!("cancelled{number}.raw");
        let moving = lab.start(&["vm", "move-disk", "web", "vda", &path(&name)]);
        eventually("it has begun", || view(lab).is_some_and(|view| view.to == path(&name)));
        slow_down(&apart);
        let _may_be_too_late = lab.drainpipe(&["vm", "move-disk", "web", "--cancel"]);
        let output = moving.wait();
        if output.code == CANCELLED {
            assert!(!apart.names("a").contains(&name), "{output:#?}");
            return true;
        }
        output.done();
        names[0] = name;
        false
    });
    assert!(is_cancelled, "each cancel came too late");

    move_disk(&apart, "vdb", "moved.qcow2");
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    apart.assert_has("a", [&names[0], "moved.qcow2"], [&content(7), &content(8)]);
    lab.drainpipe(&["vm", "move-disk", "web", "vda", &path("x.raw")]).refused(REFUSED, &["does not run"]);
}

fn a_qemu_that_is_too_old_moves_no_disks() {
    let lab = TestLab::fast();
    let disk = start_vm(&lab, "web", "pc-q35-7.2", "");
    let moved = lab.drainpipe(&["vm", "move-disk", "web", "vda", &format!("{disk}.moved")]);
    // The machine's own QEMU may be a newer one.
    if moved.code != 0 {
        moved.refused(REFUSED, &["needs QEMU 8.2 or newer", "start the VM again"]);
        assert!(!fs::exists(format!("{disk}.moved")).unwrap());
    }
}
