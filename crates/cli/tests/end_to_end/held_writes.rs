//! VMs that move with their disks in the distribution's QEMU. In QEMU 7.2, writes cannot wait for the target. Instead,
//! they are held back, and released whatever becomes of the migration.

use drainpipe_api_types::PlanView;
use drainpipe_engine::migration::result::Outcome;
use serde_json::json;

use crate::Test;
use crate::copied_disks::{Apart, assert_disks_go};
use crate::support::{TestLab, eventually};
use crate::writing_guests::Writing;

pub(crate) const TESTS: &[Test] = &[
    ("a_vm_that_writes_much_moves_with_its_disks", a_vm_that_writes_much_moves_with_its_disks),
    ("the_agent_dies", the_agent_dies),
    ("a_vm_that_writes_nothing_moves_with_its_disks", a_vm_that_writes_nothing_moves_with_its_disks),
    ("agent_and_guard_die", agent_and_guard_die),
    ("the_targets_agent_dies", the_targets_agent_dies),
    ("the_targets_qemu_dies", the_targets_qemu_dies),
    ("the_agent_dies_once_all_is_there", the_agent_dies_once_all_is_there),
    ("it_is_cancelled", it_is_cancelled),
];

/// Fails the test unless nothing holds back the VM's writes on `a`.
#[track_caller]
fn assert_let_go(writing: &Writing) {
    eventually("its writes are let go", || {
        let devices = writing.apart.monitor().ask("query-block", &json!({}));
        let disks = devices.as_array().unwrap().iter().map(|device| &device["inserted"]);
        disks.clone().count() > 0 && disks.into_iter().all(|disk| disk["iops_wr"] == 0 && disk["bps_wr"] == 0)
    });
}

fn a_vm_that_writes_nothing_moves_with_its_disks() {
    let apart = Apart::mounted(TestLab::fast()).on_any_machine().and_its_vm();
    assert_disks_go(&apart);
}

fn a_vm_that_writes_much_moves_with_its_disks() {
    let writing = Writing::begin_in_any_qemu();
    let copies = writing.apart.copies();
    let arguments: Vec<&str> =
        ["migrate", "web", "b", "--dry-run"].into_iter().chain(copies.iter().map(String::as_str)).collect();
    let plan: PlanView = writing.apart.lab.json(&arguments);
    let output = writing.apart.lab.drainpipe(&arguments).done();
    assert_eq!(output.contains("held back near the end"), plan.holds_writes, "{output}");
    let migrating = writing.copy_until_writes_wait();
    writing.apart.set_links("unlimited");
    writing.assert_ended(migrating, Outcome::Completed);
    let result = writing.apart.last_result();
    let is_told = result.record.events.iter().any(|event| event.what.contains("writes are held back to"));
    assert_eq!(is_told, plan.holds_writes, "{result:#?}");
    writing.assert_nothing_lost();
}

/// Something happens while writes are held back. Fails the test unless the VM stays, may write freely, and has lost
/// nothing.
#[track_caller]
fn assert_stays(happens: fn(&Writing), outcome: Outcome) {
    let writing = Writing::begin_in_any_qemu();
    let migrating = writing.copy_until_writes_wait();
    happens(&writing);
    writing.assert_ended(migrating, outcome);
    assert_let_go(&writing);
    writing.assert_nothing_lost();
}

fn the_agent_dies() {
    assert_stays(|writing| writing.kill_agent("a"), Outcome::Failed);
}

fn agent_and_guard_die() {
    assert_stays(Writing::kill_agent_and_guard, Outcome::Failed);
}

fn the_targets_agent_dies() {
    assert_stays(|writing| writing.kill_agent("b"), Outcome::Failed);
}

fn the_targets_qemu_dies() {
    assert_stays(Writing::kill_target, Outcome::Failed);
}

fn it_is_cancelled() {
    assert_stays(Writing::cancel, Outcome::Cancelled);
}

fn the_agent_dies_once_all_is_there() {
    let writing = Writing::begin_in_any_qemu();
    let migrating = writing.copy_all();
    writing.kill_agent("a");
    writing.assert_ended(migrating, Outcome::Failed);
    assert_let_go(&writing);
    writing.assert_nothing_lost();
}
