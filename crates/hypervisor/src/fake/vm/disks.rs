//! The disks of a VM in memory: files that exist, and that nobody copies.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use async_trait::async_trait;
use drainpipe_engine::storage::DiskCopy;

use super::FakeVm;
use crate::disk_moves::{DiskMoves, MoveName, MoveState};
use crate::disks::{CopyState, CopyTo, DiskCopies, OpenDisk};
use crate::error::VmError;
use crate::fake::faults::Act;
use crate::fake::lock;
use crate::spec::Disk;

/// The disk that moves, or has moved.
#[derive(Debug, Default)]
pub(super) struct FakeMove {
    begun: Mutex<Option<Begun>>,
    is_held_up: Mutex<bool>,
    noted: Mutex<Option<PathBuf>>,
}

#[derive(Debug, Clone)]
struct Begun {
    id: String,
    state: MoveState,
}

impl FakeMove {
    fn state(&self, name: MoveName<'_>) -> MoveState {
        let begun = lock(&self.begun).clone();
        begun.filter(|begun| begun.id == name.id).map_or(MoveState::None, |begun| begun.state)
    }

    fn set(&self, name: MoveName<'_>, state: MoveState) {
        *lock(&self.begun) = Some(Begun { id: name.id.into(), state });
    }

    fn copying(&self, is_synchronised: bool) -> MoveState {
        let is_ready = !*lock(&self.is_held_up);
        MoveState::Copying { copied_bytes: 1, total_bytes: 2, is_ready, is_synchronised }
    }
}

impl FakeVm {
    /// From now on, a copy of one of its disks to another place on its host does not finish.
    pub fn holds_up_disk_moves(&self) {
        *lock(&self.disk_move.is_held_up) = true;
    }

    /// The copy that was held up fails.
    pub fn disk_move_fails(&self, why: &str) {
        if let Some(begun) = &mut *lock(&self.disk_move.begun) {
            begun.state = MoveState::Failed(why.into());
        }
    }

    /// The state of the last move.
    pub fn disk_move_state(&self) -> Option<MoveState> {
        lock(&self.disk_move.begun).as_ref().map(|begun| begun.state.clone())
    }

    /// The path of the moved disk in its specification.
    pub fn noted_disk(&self) -> Option<PathBuf> {
        lock(&self.disk_move.noted).clone()
    }
}

#[async_trait]
impl DiskMoves for FakeVm {
    fn check(&self) -> Result<(), VmError> {
        self.does(Act::CheckDiskMove, || Ok(()))
    }

    async fn begin(&self, name: MoveName<'_>, _to: &Disk, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::BeginDiskMove, || {
            self.disk_move.set(name, self.disk_move.copying(false));
            Ok(())
        })
    }

    async fn go_on(&self, name: MoveName<'_>, to: &Disk, deadline: Duration) -> Result<(), VmError> {
        DiskMoves::begin(self, name, to, deadline).await
    }

    async fn state(&self, name: MoveName<'_>, _deadline: Duration) -> Result<MoveState, VmError> {
        self.does(Act::DiskMoveState, || Ok(self.disk_move.state(name)))
    }

    async fn synchronise(&self, name: MoveName<'_>, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::SynchroniseDiskMove, || {
            self.disk_move.set(name, self.disk_move.copying(true));
            Ok(())
        })
    }

    async fn hold(&self, name: MoveName<'_>, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::HoldWrites, || {
            self.disk_move.set(name, MoveState::Held);
            Ok(())
        })
    }

    async fn switch(&self, name: MoveName<'_>, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::SwitchDisk, || match self.disk_move.state(name) {
            MoveState::Held => {
                self.disk_move.set(name, MoveState::Switched);
                Ok(())
            }
            other => Err(VmError::failed(format!("its writes are not held, it is {other:?}"))),
        })
    }

    async fn abandon(&self, name: MoveName<'_>, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::AbandonDiskMove, || {
            if self.disk_move.state(name) == MoveState::Switched {
                return Err(VmError::failed("it has the new disk"));
            }
            self.disk_move.set(name, MoveState::None);
            Ok(())
        })
    }

    async fn tidy(&self, _name: MoveName<'_>, _deadline: Duration) -> Result<(), VmError> {
        self.does(Act::TidyDiskMove, || Ok(()))
    }

    fn note(&self, _disk: usize, path: &Path) -> Result<(), VmError> {
        *lock(&self.disk_move.noted) = Some(path.into());
        Ok(())
    }
}

#[async_trait]
impl DiskCopies for FakeVm {
    async fn disks(&self, _deadline: Duration) -> Result<Vec<OpenDisk>, VmError> {
        self.disk_files().iter().map(look).collect()
    }

    fn check(&self, _copies: &[DiskCopy]) -> Result<(), VmError> {
        Ok(())
    }

    async fn start(&self, _copies: &[CopyTo], _deadline: Duration) -> Result<(), VmError> {
        Err(VmError::failed("a fake VM copies no disks"))
    }

    async fn states(&self, _deadline: Duration) -> Result<Vec<CopyState>, VmError> {
        Ok(vec![])
    }

    async fn synchronise(&self, _deadline: Duration) -> Result<(), VmError> {
        Ok(())
    }

    async fn end(&self, _disks: &[usize], _deadline: Duration) -> Result<(), VmError> {
        Ok(())
    }

    async fn abandon(&self, _deadline: Duration) -> Result<(), VmError> {
        Ok(())
    }
}

fn look(disk: &Disk) -> Result<OpenDisk, VmError> {
    fs::metadata(&disk.path).map(|metadata| OpenDisk::raw_file(&metadata)).map_err(VmError::failed)
}
