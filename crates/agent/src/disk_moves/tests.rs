//! Disks that move on a fake hypervisor: which of two disks a VM has, and what is left of the other one, whatever
//! happens.

use std::fs;
use std::path::PathBuf;

use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::fake::{Act, FakeVm, Fault};
use drainpipe_hypervisor::spec::{Disk, DiskFormat, VmSpec};
use drainpipe_hypervisor::{Exit, MoveState, Vm};

use super::*;
use crate::incoming::left_disks;
use crate::test_host::{Life, TestHost, definition};

/// A host whose VM `web` runs, with one disk.
struct Moved {
    host: TestHost,
    life: Life,
    vm: Arc<FakeVm>,
    old: PathBuf,
    new: PathBuf,
}

impl Moved {
    fn new() -> Self {
        let host = TestHost::new();
        let (old, new) = (host.disk_path("old.raw"), host.disk_path("new.raw"));
        fs::write(&old, vec![7; 1 << 20]).unwrap();
        let life = host.start();
        let vms = &life.parts.vms;
        let disks = vec![Disk { path: old.clone(), format: DiskFormat::Raw, read_only: false }];
        vms.create(VmSpec { disks, ..definition("web") }).unwrap();
        life.block_on(vms.start("web", async |_| Ok(()))).unwrap();
        let vm = host.vm("web");
        Self { host, life, vm, old, new }
    }

    fn begin(&self) -> Result<DiskMoveView, Problem> {
        self.begin_to(&self.new)
    }

    fn begin_to(&self, to: &Path) -> Result<DiskMoveView, Problem> {
        let request = MoveDiskRequest { disk: DiskName::at(0).unwrap(), to: to.to_str().unwrap().into() };
        self.life.block_on(begin(&self.life.parts.disk_moves, "web", &request))
    }

    /// The agent's next run.
    fn again(self) -> Self {
        drop(self.life);
        let life = self.host.start();
        Self { life, ..self }
    }

    /// Waits for the move's end.
    fn ended(&self) -> DiskMoveResult {
        self.until(|moves| moves.view("web").ok()?.result)
    }

    fn until<T>(&self, is_there: impl Fn(&DiskMoves) -> Option<T>) -> T {
        self.life.block_on(async {
            loop {
                if let Some(there) = is_there(&self.life.parts.disk_moves) {
                    return there;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
    }

    /// Waits until the disk is copied, without an end of the move.
    fn is_copied(&self) {
        self.until(|_| matches!(self.vm.disk_move_state()?, MoveState::Copying { .. }).then_some(()));
    }

    /// Asserts that the VM has this disk, also in the journal, that no move is under way, and that the VM may be
    /// changed again.
    fn has(&self, path: &Path) {
        let vms = &self.life.parts.vms;
        // The end is reported a moment before the VM is free.
        let claimed = self.until(|_| vms.claim("web", Claim::Changing).ok());
        assert_eq!(claimed.definition.disks[0].path, path);
        assert_eq!(self.life.parts.journal.vms().unwrap()[0].disks[0].path, path);
        assert!(self.life.parts.journal.disk_moves().unwrap().is_empty());
    }

    /// Asserts that everything is as if nothing had been requested.
    fn is_as_before(&self) {
        self.has(&self.old);
        assert!(!self.new.exists());
        assert_eq!(fs::read(&self.old).unwrap(), vec![7; 1 << 20]);
        assert!(left_disks(&self.life.parts.incoming).unwrap().is_empty());
    }

    /// Asserts that the VM has the new disk, and that the old one is kept under another name.
    fn has_moved(&self) {
        self.has(&self.new);
        assert!(self.new.exists() && !self.old.exists());
        let left = left_disks(&self.life.parts.incoming).unwrap();
        assert_eq!(left.len(), 1);
        assert_eq!(Path::new(&left[0].was), self.old);
        assert_eq!(fs::read(&left[0].path).unwrap(), vec![7; 1 << 20]);
    }
}

fn refused<T: std::fmt::Debug>(done: Result<T, Problem>, kind: ProblemKind, says: &str) {
    let problem = done.unwrap_err();
    assert_eq!(problem.kind, kind, "{problem}");
    assert!(problem.message.contains(says), "{problem}");
}

#[test]
fn a_disk_moves_and_the_old_one_is_kept() {
    let moved = Moved::new();
    moved.begin().unwrap();
    let result = moved.ended();
    assert_eq!((result.outcome, &result.error), (DiskMoveOutcome::Completed, &None));
    moved.has_moved();
    let left = left_disks(&moved.life.parts.incoming).unwrap();
    assert_eq!(result.left.as_ref(), Some(&left[0].path));
    assert_eq!(moved.vm.noted_disk(), Some(moved.new.clone()));
    assert_eq!(moved.vm.disk_move_state(), Some(MoveState::Switched));
    moved.again().has_moved();
}

#[test]
fn what_is_refused_leaves_nothing() {
    let moved = Moved::new();
    refused(moved.begin_to(&moved.old), ProblemKind::Refused, "is already at");
    let elsewhere = moved.old.with_file_name("no/such/place.raw");
    moved.begin_to(&elsewhere).unwrap_err();
    moved.begin_to(Path::new("/etc/web.raw")).unwrap_err();
    moved.vm.fails_once(Act::CheckDiskMove, Fault::Refused);
    refused(moved.begin(), ProblemKind::Refused, "refused");
    fs::write(&moved.new, "somebody else's").unwrap();
    let taken = moved.begin().err().or_else(|| moved.ended().error).unwrap();
    assert!(taken.message.contains(moved.new.to_str().unwrap()), "{taken}");
    assert_eq!(fs::read_to_string(&moved.new).unwrap(), "somebody else's");
    fs::remove_file(&moved.new).unwrap();
    moved.is_as_before();
    assert!(moved.vm.acts().iter().all(|act| *act == Act::AbandonDiskMove), "{:?}", moved.vm.acts());
    moved.life.block_on(moved.life.parts.vms.stop("web", true)).unwrap();
    refused(moved.begin(), ProblemKind::Conflict, "does not run");
    moved.is_as_before();
}

#[test]
fn a_move_that_fails_leaves_the_vm_with_its_disk() {
    for act in [Act::BeginDiskMove, Act::SynchroniseDiskMove, Act::HoldWrites] {
        let moved = Moved::new();
        moved.vm.fails_once(act, Fault::Fails);
        moved.begin().unwrap();
        let result = moved.ended();
        assert_eq!(result.outcome, DiskMoveOutcome::Failed, "{act:?}");
        assert!(result.error.unwrap().message.contains(&format!("{act:?}")));
        moved.is_as_before();
    }
}

#[test]
fn a_copy_that_fails_by_itself_says_why() {
    let moved = Moved::new();
    moved.vm.holds_up_disk_moves();
    moved.begin().unwrap();
    moved.is_copied();
    moved.vm.disk_move_fails("no space left on device");
    let result = moved.ended();
    assert_eq!(result.outcome, DiskMoveOutcome::Failed);
    assert!(result.error.unwrap().message.contains("no space left on device"));
    moved.is_as_before();
}

#[test]
fn a_move_is_cancelled_and_nothing_else_is_done_to_the_vm_meanwhile() {
    let moved = Moved::new();
    moved.vm.holds_up_disk_moves();
    moved.begin().unwrap();
    moved.is_copied();
    refused(moved.begin(), ProblemKind::Conflict, "--cancel");
    let stopped = moved.life.block_on(moved.life.parts.vms.stop("web", true));
    refused(stopped, ProblemKind::Conflict, "--cancel");
    moved.life.parts.disk_moves.cancel("web").unwrap();
    assert_eq!(moved.ended().outcome, DiskMoveOutcome::Cancelled);
    moved.is_as_before();
    refused(moved.life.parts.disk_moves.cancel("web"), ProblemKind::Conflict, "is no longer being moved");
    refused(moved.life.parts.disk_moves.cancel("db"), ProblemKind::NotFound, "no disk move of VM db");
}

#[test]
fn a_vm_that_ends_meanwhile_has_its_disk() {
    let moved = Moved::new();
    moved.vm.holds_up_disk_moves();
    moved.begin().unwrap();
    moved.is_copied();
    moved.vm.ends(Exit::Signal(9));
    let result = moved.ended();
    assert_eq!(result.outcome, DiskMoveOutcome::Failed);
    assert!(result.error.unwrap().message.contains("its QEMU on here has ended"));
    moved.is_as_before();
}

#[test]
fn an_agent_that_comes_later_goes_on_with_the_copy() {
    let moved = Moved::new();
    moved.vm.holds_up_disk_moves();
    moved.begin().unwrap();
    moved.is_copied();
    let moved = moved.again();
    refused(moved.life.parts.vms.claim("web", Claim::Changing), ProblemKind::Conflict, "--cancel");
    moved.life.parts.disk_moves.cancel("web").unwrap();
    assert_eq!(moved.ended().outcome, DiskMoveOutcome::Cancelled);
    moved.is_as_before();
}

#[test]
fn the_record_decides_where_nobody_hears_that_it_was_done() {
    for act in [Act::HoldWrites, Act::SwitchDisk] {
        let moved = Moved::new();
        moved.vm.fails_once(act, Fault::MuteAndDone);
        moved.begin().unwrap();
        let result = moved.ended();
        if act == Act::HoldWrites {
            assert_eq!(result.outcome, DiskMoveOutcome::Failed);
            moved.is_as_before();
        } else {
            assert_eq!(result.outcome, DiskMoveOutcome::Completed);
            moved.has_moved();
        }
    }
}

#[test]
fn after_the_record_the_vm_has_the_new_disk_whoever_ends() {
    let moved = Moved::new();
    // The guest's writes stay held until the agent's next run.
    moved.vm.fails(Act::SwitchDisk, Fault::Mute);
    moved.begin().unwrap();
    moved.until(|_| {
        let open = moved.life.parts.journal.disk_moves().unwrap();
        open.first().is_some_and(|one| one.is_recorded).then_some(())
    });
    let (old, new) = (moved.old.clone(), moved.new.clone());
    assert!(old.exists() && new.exists());
    let moved = moved.again();
    moved.vm.succeeds(Act::SwitchDisk);
    assert_eq!(moved.ended().outcome, DiskMoveOutcome::Completed);
    moved.has_moved();
}

#[test]
fn a_vm_that_ended_before_the_switch_boots_from_the_new_disk() {
    let moved = Moved::new();
    moved.vm.fails(Act::SwitchDisk, Fault::Ends);
    moved.begin().unwrap();
    assert_eq!(
        moved.ended().outcome,
        DiskMoveOutcome::Completed,
        "it has all that was confirmed to the guest"
    );
    moved.has_moved();
    moved.life.block_on(moved.life.parts.vms.start("web", async |_| Ok(()))).unwrap();
    assert_eq!(moved.host.vm("web").spec().spec().disks[0].path, moved.new);
}
