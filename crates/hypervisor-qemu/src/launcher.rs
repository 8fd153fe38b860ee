//! A process that becomes QEMU: it gives up what QEMU does not need, and executes it in its own place.
//!
//! It is a separate program, since the threads of one that starts QEMUs cannot each become another user. It gets open
//! what QEMU may use but not open itself, under the numbers that its command line has.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use command_fds::{CommandFdExt, FdMapping};
use nix::sys::signal::{SigSet, Signal};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Gid, Uid, umask};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs, set_thread_gid, set_thread_groups, set_thread_uid,
};
use serde::{Deserialize, Serialize};

use crate::birth::Birth;
use crate::numbers::FIRST;
use crate::user::QemuUser;

/// What it exits with where the program cannot be run.
pub(crate) const CANNOT_RUN: u8 = 126;

/// What it exits with where it cannot become what QEMU is to be.
pub(crate) const CANNOT_BECOME: u8 = 125;

/// Devices that QEMU opens by itself, if their group may.
const DEVICES: [&str; 3] = ["/dev/kvm", "/dev/userfaultfd", "/dev/infiniband/rdma_cm"];

/// How to start a QEMU.
#[derive(Debug, Clone)]
pub struct Launcher {
    /// The program that becomes QEMU, and what it gets before an order.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// The user that QEMU runs as.
    pub user: QemuUser,
    /// The QEMU that it becomes: a path, or a name to look up in `PATH`.
    pub binary: PathBuf,
}

/// A QEMU to start. What it is to have open comes with this, in the order of the numbers that QEMU knows it by: standard
/// input, output and errors first. Behind that is what the process needs to become QEMU: its directory, its pid file, and
/// the control groups that it is to join.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Launch {
    pub(crate) arguments: Vec<OsString>,
    pub(crate) control_groups: u8,
}

/// What a process is to do before it becomes QEMU.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Order {
    binary: PathBuf,
    user: QemuUser,
    /// Numbers of what it has open for that.
    directory: RawFd,
    pid_file: RawFd,
    control_groups: Range<RawFd>,
}

impl Launch {
    /// Starts the process that becomes QEMU. What it has open is its alone from then on.
    pub(crate) fn run(self, descriptors: Vec<OwnedFd>, launcher: &Launcher) -> io::Result<Child> {
        let order = self.order(descriptors.len(), launcher)?;
        let mut command = Command::new(&launcher.program);
        command.args(&launcher.arguments).arg(serde_json::to_string(&order)?).arg("--").args(self.arguments);
        let mut numbered = (0..).zip(descriptors);
        let mut standard = || numbered.next().map(|(_, descriptor)| descriptor).ok_or_else(too_few);
        command.stdin(standard()?).stdout(standard()?).stderr(standard()?);
        let more = numbered.map(|(child_fd, parent_fd)| FdMapping { parent_fd, child_fd }).collect();
        command.fd_mappings(more).map_err(io::Error::other)?;
        // Outlives who starts it: Ctrl-C and a closed terminal reach the foreground's process group only.
        command.process_group(0).spawn()
    }

    fn order(&self, descriptors: usize, launcher: &Launcher) -> io::Result<Order> {
        let end = RawFd::try_from(descriptors).map_err(io::Error::other)?;
        let control_groups = end - RawFd::from(self.control_groups)..end;
        let pid_file = control_groups.start - 1;
        let directory = pid_file - 1;
        if directory < FIRST {
            return Err(too_few());
        }
        Ok(Order {
            binary: launcher.binary.clone(),
            user: launcher.user,
            directory,
            pid_file,
            control_groups,
        })
    }
}

fn too_few() -> io::Error {
    io::Error::other("too few open files came with it")
}

/// Becomes QEMU; comes back only if that fails, with what the process is to exit with.
///
/// For a process that has no other threads.
pub fn become_qemu(order: &str, arguments: &[OsString]) -> u8 {
    let prepared = serde_json::from_str::<Order>(order).map_err(io::Error::from).and_then(|order| {
        prepare(&order)?;
        Ok(order)
    });
    let order = match prepared {
        Ok(order) => order,
        Err(error) => {
            eprintln!("{error}");
            return CANNOT_BECOME;
        }
    };
    let error = Command::new(&order.binary).args(arguments).exec();
    eprintln!("{error}");
    CANNOT_RUN
}

fn prepare(order: &Order) -> io::Result<()> {
    let step = |what: &'static str| {
        move |error: io::Error| io::Error::new(error.kind(), format!("cannot {what}: {error}"))
    };
    // By itself, and before QEMU is there: one that runs is never without.
    fs::write(opened(order.pid_file), Birth::of_this_process()?.to_string())
        .map_err(step("write the process's number"))?;
    std::env::set_current_dir(opened(order.directory)).map_err(step("enter QEMU's directory"))?;
    // While it is root.
    order.control_groups.clone().try_for_each(join).map_err(step("join the agent's control group"))?;
    close(order).map_err(step("close what QEMU is not to have"))?;
    // A process that may enter its directory may connect to QEMU's sockets there.
    umask(Mode::empty());
    block_hang_up().map_err(step("block SIGHUP"))?;
    drop_bounding_set().map_err(step("give up capabilities for good"))?;
    if order.user != QemuUser::own() {
        become_user(order.user).map_err(step("become QEMU's user"))?;
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, none).map_err(io::Error::from).map_err(step("give up capabilities"))?;
    set_no_new_privs(true).map_err(io::Error::from).map_err(step("forbid new privileges"))
}

/// What this process has open under a number.
fn opened(number: RawFd) -> PathBuf {
    format!("/proc/self/fd/{number}").into()
}

/// In both versions 0 is who writes it; see cgroups(7).
fn join(control_group: RawFd) -> io::Result<()> {
    fs::write(opened(control_group), "0")
}

fn close(order: &Order) -> io::Result<()> {
    let mut numbers = [order.directory, order.pid_file].into_iter().chain(order.control_groups.clone());
    Ok(numbers.try_for_each(nix::unistd::close)?)
}

/// Where the agent ends while its QEMU is stopped, the kernel sends the process group that is left without a parent in
/// its session SIGHUP, at which QEMU would end, and SIGCONT (`kill_orphaned_pgrp`). A session of its own would keep it
/// from that too, but also from the agent's autogroup, within which alone `nice` and `SCHED_IDLE` count.
fn block_hang_up() -> io::Result<()> {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGHUP);
    Ok(blocked.thread_block()?)
}

/// Only who has `CAP_SETPCAP` can; who has no capabilities needs not.
fn drop_bounding_set() -> io::Result<()> {
    if !capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        return Ok(());
    }
    for number in 0..u64::BITS {
        match remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << number)) {
            // The kernel knows no more of them.
            Err(Errno::INVAL) => break,
            dropped => dropped?,
        }
    }
    Ok(())
}

fn become_user(user: QemuUser) -> io::Result<()> {
    let mut groups: Vec<Gid> = DEVICES.iter().filter_map(|device| group_of(Path::new(device))).collect();
    groups.dedup();
    set_thread_groups(&groups)?;
    set_thread_gid(Gid::from_raw(user.gid))?;
    Ok(set_thread_uid(Uid::from_raw(user.uid))?)
}

/// The group of a device that its group may use.
fn group_of(device: &Path) -> Option<Gid> {
    let metadata = fs::metadata(device).ok()?;
    let may_use = metadata.mode() & 0o060 == 0o060 && metadata.gid() != 0;
    may_use.then(|| Gid::from_raw(metadata.gid()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_process_needs_comes_behind_what_qemu_has() {
        let launcher = Launcher {
            program: "launch".into(),
            arguments: vec![],
            user: QemuUser::own(),
            binary: "qemu".into(),
        };
        let order = |descriptors, control_groups| {
            let launch = Launch { arguments: vec![], control_groups };
            launch.order(descriptors, &launcher)
        };
        let of_two_groups = order(9, 2).unwrap();
        assert_eq!((of_two_groups.directory, of_two_groups.pid_file), (5, 6));
        assert_eq!(of_two_groups.control_groups, 7..9);
        assert_eq!(order(5, 0).unwrap().directory, FIRST);
        for (descriptors, control_groups) in [(4, 0), (5, 1), (0, 0), (3, u8::MAX)] {
            assert!(order(descriptors, control_groups).is_err(), "{descriptors}, {control_groups}");
        }
    }
}
