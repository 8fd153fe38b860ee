//! Kernel settings of the network, below `/proc/sys/net`.
//!
//! procfs shows the settings of the reading thread's network namespace, so these calls are plain
//! blocking ones: handed to a pool they might land in another namespace. They take microseconds.

use std::io;
use std::path::PathBuf;

use crate::error::Error;
use crate::undo::{Before, Undo};

/// Whether this host can have IPv6 addresses of its own: the kernel knows IPv6, and it is on for `lo`.
pub fn has_ipv6() -> Result<bool, Error> {
    match read("net.ipv6.conf.lo.disable_ipv6") {
        Ok(disabled) => Ok(disabled == "0"),
        Err(Error::SysctlMissing { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

pub(crate) fn observe(key: &str) -> Result<Before, Error> {
    Ok(Before::Sysctl { value: read(key)? })
}

pub(crate) fn apply(key: &str, value: &str) -> Result<(), Error> {
    if read(key)? == value {
        return Ok(());
    }
    write(key, value)
}

pub(crate) fn restore(key: &str, ours: &str, before: &str) -> Result<Undo, Error> {
    let now = match read(key) {
        // A link's settings go with the link.
        Err(Error::SysctlMissing { .. }) => return Ok(Undo::NothingToDo),
        now => now?,
    };
    if now == before {
        return Ok(Undo::NothingToDo);
    }
    if now != ours {
        return Ok(Undo::LeftAlone(format!("{key} is now {now:?}, which is not what was set ({ours:?})")));
    }
    write(key, before)?;
    Ok(Undo::Undone)
}

pub(crate) fn read(key: &str) -> Result<String, Error> {
    std::fs::read_to_string(path(key)?)
        .map(|value| value.trim_end().to_owned())
        .map_err(|source| failure(key, format!("read {key}"), source))
}

fn write(key: &str, value: &str) -> Result<(), Error> {
    std::fs::write(path(key)?, value)
        .map_err(|source| failure(key, format!("set {key} to {value:?}"), source))
}

fn failure(key: &str, operation: String, source: io::Error) -> Error {
    match source.kind() {
        io::ErrorKind::NotFound => Error::SysctlMissing { key: key.to_owned() },
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            Error::NotPermitted { operation }
        }
        _ => Error::Sysctl { operation, source },
    }
}

/// The file of a setting. As in sysctl(8), a slash in a key stands for a dot in a name.
fn path(key: &str) -> Result<PathBuf, Error> {
    let parts: Vec<String> = key.split('.').map(|part| part.replace('/', ".")).collect();
    let valid = |part: &String| !matches!(part.as_str(), "" | "." | "..") && !part.contains(['\0', '\n']);
    if parts.len() < 3 || parts[0] != "net" || !parts.iter().all(valid) {
        return Err(Error::InvalidSysctl(key.to_owned()));
    }
    Ok(PathBuf::from("/proc/sys").join(parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_files_below_proc_sys_net() {
        assert_eq!(
            path("net.ipv4.conf.eth0/100.forwarding").unwrap(),
            PathBuf::from("/proc/sys/net/ipv4/conf/eth0.100/forwarding")
        );
        for hostile in [
            "",
            "net",
            "net.ipv4",
            "kernel.core_pattern.x",
            "net.//.//.kernel.core_pattern",
            "net..ipv4",
            "/etc/passwd",
            "net.ipv4.conf\n.x",
        ] {
            assert!(matches!(path(hostile), Err(Error::InvalidSysctl(_))), "{hostile:?}");
        }
    }

    #[test]
    fn a_setting_the_kernel_lacks_is_named() {
        let error = observe("net.ipv4.no_such_setting").unwrap_err();
        assert!(matches!(&error, Error::SysctlMissing { key } if key == "net.ipv4.no_such_setting"));
    }
}
