//! Guests that write to their disks while these move along, remember what was acknowledged, and check all of it.

use std::fs;
use std::time::Duration;

use drainpipe_api_types::VmState;
use drainpipe_engine::migration::result::Outcome;
use drainpipe_guest::block::{BLOCK_BYTES, Block, new_disk};
use drainpipe_guest::client::Control;
use drainpipe_guest::protocol::DiskStatus;
use rustix::process::{Signal, kill_process};

use crate::Test;
use crate::backend::Backend;
use crate::copied_disks::{Apart, disk_names, lab};
use crate::guest::Guest;
use crate::program::Running;
use crate::support::{TestLab, eventually};

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("their_disks_move_whole", their_disks_move_whole),
    ("the_agent_dies_once_all_is_there", the_agent_dies_once_all_is_there),
    ("a_link_is_cut", a_link_is_cut),
    ("the_agent_dies_in_the_copy", the_agent_dies_in_the_copy),
    ("agent_and_guard_die", agent_and_guard_die),
    ("the_targets_agent_dies_in_the_copy", the_targets_agent_dies_in_the_copy),
    ("the_targets_agent_dies_once_all_is_there", the_targets_agent_dies_once_all_is_there),
    ("the_targets_qemu_dies_in_the_copy", the_targets_qemu_dies_in_the_copy),
    ("the_targets_qemu_dies_once_all_is_there", the_targets_qemu_dies_once_all_is_there),
    ("it_is_cancelled_in_the_copy", it_is_cancelled_in_the_copy),
    ("it_is_cancelled_while_writes_wait", it_is_cancelled_while_writes_wait),
    ("the_agent_dies_while_writes_wait", the_agent_dies_while_writes_wait),
    ("it_is_cancelled_once_all_is_there", it_is_cancelled_once_all_is_there),
    ("the_target_is_full", the_target_is_full),
];

/// The size of each disk. Every other MiB begins as a hole.
const DISK_MIB: usize = 32;

/// Enough for the kernel, and 16 MiB more.
const MEMORY_MIB: u64 = 128;

/// More than slow links carry, so that writes have to wait for a copy to end: until they do, QEMU sends 64 KiB for each
/// write of 4 KiB.
pub(crate) const WRITES_PER_S: u32 = 200;

/// The rate in a domain, whose writes never wait: less than slow links carry.
const WRITES_OF_DOMAIN_PER_S: u32 = 20;

fn writes_per_s() -> u32 {
    match Backend::of_test() {
        Backend::Qemu => WRITES_PER_S,
        Backend::Libvirt => WRITES_OF_DOMAIN_PER_S,
    }
}

/// How many writes each part of a test waits for.
const WRITES: u64 = 50;

/// On these links, a copy takes seconds.
const SLOW_MBPS: &str = "40";

/// On these links, the rest of a copy takes long enough for a test to act.
const SLOWER_MBPS: &str = "10";

/// How much of the first disk is copied when something happens to its copy.
const COPIED_MIB: u64 = 20;

/// Room for what the disks take when a copy begins.
const SMALL_MIB: usize = 3 * DISK_MIB;

/// For a guest without KVM that reads all its disks on a busy machine, and for the writes that have to return first.
const DEADLINE: Duration = Duration::from_mins(3);

/// A VM that writes.
pub(crate) struct Writing {
    pub(crate) apart: Apart,
    guest: Guest,
}

impl Writing {
    #[track_caller]
    pub(crate) fn begin() -> Self {
        let contents = [0, 1].map(|disk| new_disk(disk, DISK_MIB));
        Self::of(Apart::under_two_paths_with(lab(), [&contents[0], &contents[1]]))
    }

    /// Uses the distribution's QEMU.
    #[track_caller]
    pub(crate) fn begin_in_any_qemu() -> Self {
        let contents = [0, 1].map(|disk| new_disk(disk, DISK_MIB));
        let apart = Apart::under_two_paths_with(TestLab::fast(), [&contents[0], &contents[1]]);
        Self::of(apart.on_any_machine())
    }

    /// Leaves little room on `b`.
    #[track_caller]
    fn begin_for_small_target() -> Self {
        let contents = [0, 1].map(|disk| new_disk(disk, DISK_MIB));
        Self::of(Apart::mounted_with(lab(), [&contents[0], &contents[1]], SMALL_MIB))
    }

    #[track_caller]
    fn of(apart: Apart) -> Self {
        let guest = apart.boot(MEMORY_MIB);
        let writing = Self { apart, guest };
        writing.write(writes_per_s());
        writing.wait_for_writes();
        writing
    }

    /// Begins to move the VM, and returns when a part of its disks has arrived.
    #[track_caller]
    pub(crate) fn copy(&self) -> Running {
        self.apart.set_links(SLOW_MBPS);
        let migrating = self.apart.begin(COPIED_MIB);
        self.apart.set_links(SLOWER_MBPS);
        migrating
    }

    /// Begins to move the VM, and returns when its writes wait for the target, and some or little of its disks is still
    /// to be copied.
    #[track_caller]
    pub(crate) fn copy_until_writes_wait(&self) -> Running {
        self.apart.set_links(SLOW_MBPS);
        let migrating = self.apart.begin(COPIED_MIB);
        eventually("writes wait, or are held back", || {
            let views = self.apart.lab.migrations("a");
            let progress = views.first().and_then(|view| view.progress.as_ref());
            let mut disks = progress.iter().flat_map(|progress| &progress.disks);
            disks.any(|disk| disk.writes_wait || disk.writes_held)
        });
        self.apart.set_links(SLOWER_MBPS);
        migrating
    }

    /// Begins to move the VM, and returns when all of its disks has arrived, and memory follows.
    #[track_caller]
    pub(crate) fn copy_all(&self) -> Running {
        self.apart.set_links(SLOW_MBPS);
        let migrating = self.apart.begin(COPIED_MIB);
        self.apart.wait_for_memory();
        migrating
    }

    #[track_caller]
    fn control(&self) -> Control {
        eventually("the guest is reached", || self.guest.control().is_some());
        self.guest.control().expect("it was reached just now")
    }

    #[track_caller]
    pub(crate) fn write(&self, writes_per_s: u32) {
        self.control().write(writes_per_s, DEADLINE).unwrap();
    }

    #[track_caller]
    pub(crate) fn written(&self) -> DiskStatus {
        self.control().disks(DEADLINE).unwrap()
    }

    /// Waits until the guest has written more.
    #[track_caller]
    pub(crate) fn wait_for_writes(&self) {
        let wanted = self.written().acknowledged_writes + WRITES;
        eventually("the guest writes", || self.written().acknowledged_writes >= wanted);
    }

    /// The only host on which the VM runs.
    #[track_caller]
    fn settled(&self) -> &'static str {
        let lab = &self.apart.lab;
        eventually("one copy of it runs", || {
            let list = lab.vms();
            list.errors.is_empty() && matches!(&list.vms[..], [vm] if vm.state == VmState::Running)
        });
        let host = ["a", "b"].into_iter().find(|host| lab.vms().vms[0].host == *host).unwrap();
        eventually("no other QEMU is left", || lab.qemu_pid(other_than(host), "web").is_none());
        lab.assert_runs_on("web", host);
        host
    }

    /// Fails the test unless every block contains what was acknowledged. Nothing is written from then on.
    #[track_caller]
    pub(crate) fn assert_intact(&self) {
        let found = self.control().verify_disks(DEADLINE).unwrap();
        let blocks = ((2 * DISK_MIB) << 20) / BLOCK_BYTES;
        assert_eq!((found.blocks, found.wrong, found.failed_writes), (blocks as u64, 0, 0), "{found}");
    }

    /// Fails the test unless one copy of the VM runs, writes on, and has lost nothing; moves, and has lost nothing on
    /// the way; and unless its disks are intact, seen from outside too.
    #[track_caller]
    pub(crate) fn assert_nothing_lost(&self) {
        let host = self.settled();
        self.wait_for_writes();
        self.assert_intact();
        self.apart.set_links("unlimited");
        self.write(writes_per_s());
        let copies = self.apart.copies_to(other_than(host));
        let copies: Vec<&str> = copies.iter().map(String::as_str).collect();
        self.apart.lab.migrate("web", other_than(host), &copies);
        self.wait_for_writes();
        self.assert_intact();
        self.assert_files(other_than(host));
    }

    /// Ends the VM.
    #[track_caller]
    fn assert_files(&self, host: &str) {
        let contents = [0, 1].map(|disk| self.acknowledged(disk));
        self.tell();
        self.apart.end(host);
        self.apart.assert_has(host, disk_names(), [&contents[0], &contents[1]]);
    }

    /// What a disk must contain, according to the guest.
    #[track_caller]
    fn acknowledged(&self, disk: usize) -> Vec<u8> {
        let blocks = self.generations(disk).into_iter().enumerate();
        blocks.flat_map(|(number, generation)| Block { disk, number, generation }.content()).collect()
    }

    /// How often each block of a disk was written, according to the guest.
    #[track_caller]
    pub(crate) fn generations(&self, disk: usize) -> Vec<u32> {
        let mut control = self.control();
        let mut all = Vec::new();
        while all.len() < (DISK_MIB << 20) / BLOCK_BYTES {
            let generations = control.generations(disk, all.len(), DEADLINE).unwrap().0;
            assert!(!generations.is_empty(), "disk {disk} ends at block {}", all.len());
            all.extend(generations);
        }
        all
    }

    fn tell(&self) {
        if std::env::var_os("DRAINPIPE_TEST_TIMES").is_some() {
            eprintln!("{}: {}", self.apart.lab.name(), self.written());
        }
    }

    #[track_caller]
    pub(crate) fn kill_agent(&self, host: &str) {
        self.apart.lab.stop_agent(host, Signal::KILL);
        self.apart.start_agent(host);
    }

    #[track_caller]
    pub(crate) fn kill_agent_and_guard(&self) {
        for guard in self.apart.lab.pids("a", &[" guard --migration "]) {
            kill_process(guard, Signal::KILL).unwrap();
        }
        self.kill_agent("a");
    }

    #[track_caller]
    pub(crate) fn kill_target(&self) {
        kill_process(self.apart.lab.qemu_pid("b", "web").unwrap(), Signal::KILL).unwrap();
    }

    #[track_caller]
    pub(crate) fn cancel(&self) {
        let id = self.apart.lab.migrations("a").remove(0).id;
        self.apart.lab.drainpipe(&["cancel", &id]).done();
    }

    /// Fails the test unless this is how the migration ended.
    #[track_caller]
    pub(crate) fn assert_ended(&self, migrating: Running, outcome: Outcome) {
        let output = migrating.wait();
        let result = self.apart.last_result();
        assert_eq!(result.outcome, outcome, "{result:#?}\n{output:#?}");
    }
}

fn other_than(host: &str) -> &'static str {
    if host == "a" { "b" } else { "a" }
}

fn their_disks_move_whole() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.wait_for_writes();
    writing.apart.set_links("unlimited");
    writing.assert_ended(migrating, Outcome::Completed);
    writing.assert_nothing_lost();
}

fn a_link_is_cut() {
    let writing = Writing::begin();
    let migrating = writing.copy();
    writing.apart.lab.fault("link-down b e0");
    writing.wait_for_writes();
    writing.apart.set_links("unlimited");
    writing.assert_ended(migrating, Outcome::Completed);
    writing.apart.lab.fault("link-up b e0");
    writing.assert_nothing_lost();
}

fn the_agent_dies_in_the_copy() {
    let writing = Writing::begin();
    let migrating = writing.copy();
    writing.kill_agent("a");
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn the_agent_dies_once_all_is_there() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.kill_agent("a");
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn agent_and_guard_die() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.kill_agent_and_guard();
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn the_targets_agent_dies_in_the_copy() {
    let writing = Writing::begin();
    let migrating = writing.copy();
    writing.kill_agent("b");
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn the_targets_agent_dies_once_all_is_there() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.kill_agent("b");
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn the_targets_qemu_dies_in_the_copy() {
    let writing = Writing::begin();
    let migrating = writing.copy();
    writing.kill_target();
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn the_targets_qemu_dies_once_all_is_there() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.kill_target();
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn it_is_cancelled_in_the_copy() {
    let writing = Writing::begin();
    let migrating = writing.copy();
    writing.cancel();
    writing.assert_ended(migrating, Outcome::Cancelled);
    writing.assert_nothing_lost();
}

fn it_is_cancelled_while_writes_wait() {
    let writing = Writing::begin();
    let migrating = writing.copy_until_writes_wait();
    writing.cancel();
    writing.assert_ended(migrating, Outcome::Cancelled);
    writing.assert_nothing_lost();
}

fn the_agent_dies_while_writes_wait() {
    let writing = Writing::begin();
    let migrating = writing.copy_until_writes_wait();
    writing.kill_agent("a");
    writing.assert_ended(migrating, Outcome::Failed);
    writing.assert_nothing_lost();
}

fn it_is_cancelled_once_all_is_there() {
    let writing = Writing::begin();
    let migrating = writing.copy_all();
    writing.cancel();
    writing.assert_ended(migrating, Outcome::Cancelled);
    writing.assert_nothing_lost();
}

fn the_target_is_full() {
    let writing = Writing::begin_for_small_target();
    let migrating = writing.copy();
    let filler = writing.apart.on("b", "filler");
    // It is meant to end in an error.
    let _ = fs::write(&filler, vec![0; SMALL_MIB << 20]);
    writing.apart.set_links(SLOW_MBPS);
    writing.assert_ended(migrating, Outcome::Failed);
    writing.apart.lab.assert_runs_on("web", "a");
    fs::remove_file(filler).unwrap();
    writing.assert_nothing_lost();
}
