//! The QEMU that runs a domain, as the kernel knows it.
//!
//! libvirt's own record of it is in a directory that only libvirt sees where it runs in a mount namespace, and has the number
//! that libvirt knows it by. Its command line names the domain's UUID, and it is in the network namespace of its host.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use drainpipe_hypervisor_qemu::{Privileges, Process, ProcessFile};
use uuid::Uuid;

/// How often it is looked for where it must come.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Takes hold of the one of this domain on this host; none where none lives.
pub(crate) fn find(privileges: &Privileges, uuid: Uuid) -> io::Result<Option<Process>> {
    match number(privileges, uuid)? {
        Some(pid) => Process::of_pid(privileges, pid, |command_line| is_of(command_line, uuid)),
        None => Ok(None),
    }
}

/// Its number.
pub(crate) fn number(privileges: &Privileges, uuid: Uuid) -> io::Result<Option<u32>> {
    let own_network = identity(&File::open("/proc/self/ns/net")?)?;
    for entry in fs::read_dir("/proc")? {
        let Ok(entry) = entry else { continue };
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // One that ends meanwhile is not it.
        let is_it =
            fs::read(entry.path().join("cmdline")).is_ok_and(|command_line| is_of(&command_line, uuid));
        if is_it && is_in(privileges, pid, own_network) {
            return Ok(Some(pid));
        }
    }
    Ok(None)
}

/// As [`find`], of one that libvirt says is there.
pub(crate) async fn find_started(
    privileges: &Privileges,
    uuid: Uuid,
    deadline: Duration,
) -> io::Result<Process> {
    let end = Instant::now() + deadline;
    loop {
        match find(privileges, uuid)? {
            Some(process) => return Ok(process),
            None if Instant::now() >= end => {
                let message = "libvirt says that it runs, but no QEMU with its UUID is in this host's network namespace";
                return Err(io::Error::new(io::ErrorKind::NotFound, message));
            }
            None => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

/// The user that it runs as.
pub(crate) fn user(pid: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    effective_user(&status).ok_or_else(|| io::Error::other("the kernel does not report QEMU's user"))
}

fn effective_user(status: &str) -> Option<u32> {
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

fn is_in(privileges: &Privileges, pid: u32, network: (u64, u64)) -> bool {
    let its = privileges.open(ProcessFile::Network, pid).and_then(|file| identity(&file));
    its.is_ok_and(|its| its == network)
}

/// No other file has these numbers.
fn identity(file: &File) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

fn is_of(command_line: &[u8], uuid: Uuid) -> bool {
    let mut arguments = command_line.split(|byte| *byte == 0);
    let is_qemu = arguments.next().is_some_and(|program| program.windows(4).any(|part| part == b"qemu"));
    is_qemu
        && arguments.any(|argument| argument == b"-uuid")
        && arguments.next().is_some_and(|argument| argument == uuid.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_as_its_effective_user() {
        assert_eq!(effective_user("Name:\tqemu\nUid:\t0\t64055\t64055\t64055\n"), Some(64_055));
        assert_eq!(effective_user("Name:\tqemu\n"), None);
    }

    #[test]
    fn it_is_told_by_its_uuid() {
        let uuid = Uuid::from_u128(7);
        let with = |words: &[&str]| words.join("\0").into_bytes();
        let text = uuid.to_string();
        assert!(is_of(
            &with(&["/usr/bin/qemu-system-x86_64", "-name", "guest=web", "-uuid", &text, "-S"]),
            uuid
        ));
        assert!(!is_of(&with(&["/usr/bin/qemu-system-x86_64", "-uuid", &Uuid::nil().to_string()]), uuid));
        assert!(!is_of(&with(&["grep", "-uuid", &text]), uuid));
        assert!(!is_of(&with(&["/usr/bin/qemu-system-x86_64", "-name", &text]), uuid));
        assert!(!is_of(b"", uuid));
    }
}
