//! The keeper's side: trusts only root, and does two things for it.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::thread;

use rustix::net::sockopt::socket_peercred;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::wire::{self, Reply, Request};
use crate::launcher::{Launch, Launcher};
use crate::reach::{Reached, must_live, parse_pid, proc_path};
use crate::user::QemuUser;

/// Why nobody is served.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    /// Somebody else asks.
    #[error("user {0} asks for a QEMU, and only root may do that")]
    NotRoot(u32),
    /// The connection is no use.
    #[error(
        "cannot use the caller's connection: {0}; drainpipe-keeper.socket starts this program with a \
         connection as its standard input"
    )]
    Connection(#[source] io::Error),
}

/// Does what root asks for over `connection`, until that ends: starts QEMUs by `launcher`, and reaches into them.
pub fn serve(connection: BorrowedFd<'_>, launcher: &Launcher) -> Result<(), KeeperError> {
    let who = socket_peercred(connection).map_err(|error| KeeperError::Connection(error.into()))?;
    if who.uid.as_raw() != 0 {
        return Err(KeeperError::NotRoot(who.uid.as_raw()));
    }
    while let Some((bytes, descriptors)) = wire::receive(connection).map_err(KeeperError::Connection)? {
        let done = serde_json::from_slice(&bytes)
            .map_err(io::Error::from)
            .and_then(|request| perform(request, descriptors, launcher));
        let (reply, descriptors) = match done {
            Ok(Reached { numbers, descriptors }) => (Reply::Done { numbers }, descriptors),
            Err(error) => {
                (Reply::Failed { number: error.raw_os_error(), words: error.to_string() }, Vec::new())
            }
        };
        let bytes = serde_json::to_vec(&reply).map_err(|error| KeeperError::Connection(error.into()))?;
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        wire::send(connection, &bytes, &descriptors).map_err(KeeperError::Connection)?;
    }
    Ok(())
}

fn perform(request: Request, descriptors: Vec<OwnedFd>, launcher: &Launcher) -> io::Result<Reached> {
    match request {
        Request::Launch(launch) => start(launch, descriptors, launcher),
        Request::Reach(reach) => {
            let [pidfd] = <[OwnedFd; 1]>::try_from(descriptors)
                .map_err(|_| io::Error::other("this needs one pidfd"))?;
            let pid = pid_of(&pidfd)?;
            must_be_qemu(pid, launcher.user)?;
            must_live(pidfd.as_fd())?;
            reach.perform(pid, pidfd.as_fd())
        }
    }
}

fn start(launch: Launch, descriptors: Vec<OwnedFd>, launcher: &Launcher) -> io::Result<Reached> {
    let (exit, exit_pipe) = pipe_with(PipeFlags::CLOEXEC)?;
    let child = launch.run(descriptors, launcher)?;
    let pid = Pid::from_child(&child);
    // It is ours to wait for, so that its number is its own until then.
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    thread::Builder::new().name("waits".into()).spawn(move || tell_exit(child, exit_pipe))?;
    Ok(Reached { numbers: vec![pid.as_raw_nonzero().get()], descriptors: vec![pidfd, exit] })
}

/// To whoever still wants to know.
fn tell_exit(mut child: Child, exit_pipe: OwnedFd) {
    if let Ok(status) = child.wait() {
        let _ = fs::File::from(exit_pipe).write_all(&status.into_raw().to_ne_bytes());
    }
}

/// See "pidfd" in `proc_pid_fdinfo(5)`.
fn pid_of(pidfd: &OwnedFd) -> io::Result<Pid> {
    let information = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    let pid = information.lines().find_map(|line| line.strip_prefix("Pid:")).and_then(parse_pid);
    pid.ok_or_else(|| io::Error::other("this is not a pidfd of a running process"))
}

/// libvirt's QEMUs have users of their own. A thief who has taken over an agent reaches into nothing else.
fn must_be_qemu(pid: Pid, user: QemuUser) -> io::Result<()> {
    let is_qemus = fs::metadata(proc_path(pid, ""))?.uid() == user.uid && !user.is_root();
    if is_qemus || is_qemu(&fs::read_link(proc_path(pid, "exe"))?) {
        return Ok(());
    }
    Err(io::Error::other(format!("process {} is not a QEMU", pid.as_raw_nonzero())))
}

fn is_qemu(program: &Path) -> bool {
    let name = program.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b"qemu")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use rustix::process::Signal;
    use serde_json::{Value, json};

    use super::*;

    /// A keeper that is asked by this process; none where that is not root's.
    fn kept() -> Option<OwnedFd> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, keepers) = pair.unwrap();
        let own = QemuUser::own();
        let launcher = Launcher {
            program: "/bin/false".into(),
            arguments: vec![],
            user: QemuUser { uid: 60_999, gid: 60_999 },
            binary: "qemu".into(),
        };
        if !own.is_root() {
            let refused = serve(keepers.as_fd(), &launcher).unwrap_err();
            assert!(matches!(refused, KeeperError::NotRoot(uid) if uid == own.uid), "{refused}");
            eprintln!("SKIPPED: only root has a keeper");
            return None;
        }
        thread::spawn(move || serve(keepers.as_fd(), &launcher));
        Some(ours)
    }

    fn ask(keeper: &OwnedFd, request: &Value, descriptors: &[BorrowedFd<'_>]) -> Reply {
        wire::send(keeper.as_fd(), request.to_string().as_bytes(), descriptors).unwrap();
        let (bytes, _) = wire::receive(keeper.as_fd()).unwrap().expect("an answer");
        serde_json::from_slice(&bytes).unwrap()
    }

    fn refused(reply: Reply) -> String {
        match reply {
            Reply::Failed { words, .. } => words,
            done @ Reply::Done { .. } => panic!("{done:?}"),
        }
    }

    #[test]
    fn what_it_does_not_understand_is_refused_and_the_next_is_heard() {
        let Some(keeper) = kept() else { return };
        let launch = |groups: u64| json!({"launch": {"arguments": [], "control_groups": groups}});
        for (request, descriptors, words) in [
            (json!({"reach": "trace"}), 0, "unknown variant"),
            (json!({"reach": "kill", "more": 1}), 0, ""),
            (json!({"launch": {"arguments": [], "control_groups": 0, "user": 0}}), 0, "unknown field"),
            (json!({"reach": "kill"}), 0, "one pidfd"),
            (json!({"reach": "kill"}), 2, "one pidfd"),
            (json!({"reach": "kill"}), 1, "not a pidfd"),
            (launch(0), 0, "too few"),
            (launch(0), 4, "too few"),
            (launch(255), 5, "too few"),
            (launch(256), 5, "256"),
        ] {
            let file = fs::File::open("/dev/null").unwrap();
            let descriptors = vec![file.as_fd(); descriptors];
            let said = refused(ask(&keeper, &request, &descriptors));
            assert!(said.contains(words), "{request}: {said}");
        }
    }

    #[test]
    fn only_a_qemu_is_reached_into() {
        let Some(keeper) = kept() else { return };
        let directory = tempfile::tempdir().unwrap();
        let qemu = directory.path().join("qemu-of-somebody");
        fs::copy("/bin/sleep", &qemu).unwrap();
        for (program, is_reached) in [(PathBuf::from("/bin/sleep"), false), (qemu, true)] {
            let mut child = Command::new(program).arg("60").spawn().unwrap();
            let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
            let reply = ask(&keeper, &json!({"reach": "kill"}), &[pidfd.as_fd()]);
            if !is_reached {
                assert!(refused(reply).contains("is not a QEMU"));
                assert_eq!(child.try_wait().unwrap(), None);
                child.kill().unwrap();
            }
            assert_eq!(child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
            let reply = ask(&keeper, &json!({"reach": "socket_numbers"}), &[pidfd.as_fd()]);
            assert!(refused(reply).contains("a running process"), "of one that has ended");
        }
    }
}
