//! The user that QEMU runs as.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::User;
use rustix::process::{getegid, geteuid};
use serde::{Deserialize, Serialize};

/// No user of any host: between those of systemd's dynamic users and those of containers.
const NOBODY: u32 = 60_999;

/// The user that QEMU runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuUser {
    /// Number of the user.
    pub uid: u32,
    /// Number of its group.
    pub gid: u32,
}

/// Why QEMU has no user.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// There is none of this name.
    #[error(
        "there is no user {name}, as which QEMU should run: create it with `systemd-sysusers` and Drainpipe's \
         packaging/sysusers.conf, or with `useradd --system --no-create-home --shell /usr/sbin/nologin {name}`, or name \
         another one as [qemu] user"
    )]
    Unknown {
        /// Its name.
        name: String,
    },
    /// The database of users cannot be read.
    #[error("cannot look up the user {name}: {source}")]
    LookUp {
        /// Its name.
        name: String,
        /// Why.
        source: std::io::Error,
    },
}

impl QemuUser {
    /// The user of this name or number, which has a group of the same number if it is not in the database.
    pub fn find(name: &str) -> Result<Self, UserError> {
        if let Ok(number) = name.parse() {
            let known = User::from_uid(nix::unistd::Uid::from_raw(number)).ok().flatten();
            return Ok(Self { uid: number, gid: known.map_or(number, |user| user.gid.as_raw()) });
        }
        let found = User::from_name(name)
            .map_err(|error| UserError::LookUp { name: name.into(), source: error.into() })?;
        let user = found.ok_or_else(|| UserError::Unknown { name: name.into() })?;
        Ok(Self { uid: user.uid.as_raw(), gid: user.gid.as_raw() })
    }

    /// The user that the QEMU of a lab runs as: this host's `nobody`, who needs no more than the agent hands over. Where
    /// nobody may reach its program, as in a home directory that is closed to others, whoever has called `sudo`; else root.
    pub fn of_lab(binary: &Path) -> Self {
        let number = |name| std::env::var(name).ok().and_then(|value| value.parse().ok());
        let caller = number("SUDO_UID").zip(number("SUDO_GID")).map(|(uid, gid)| Self { uid, gid });
        let users = [Some(Self { uid: NOBODY, gid: NOBODY }), caller];
        let reaches = |user: &Self| user.reaches(binary);
        users.into_iter().flatten().find(reaches).unwrap_or(Self { uid: 0, gid: 0 })
    }

    /// If the program is looked for in `PATH`, or is not there, its start says so.
    fn reaches(self, binary: &Path) -> bool {
        let is_in_path = binary.components().count() == 1;
        let Some(binary) = binary.canonicalize().ok().filter(|_| !is_in_path) else { return true };
        binary.ancestors().all(|file| fs::metadata(file).is_ok_and(|metadata| self.may_execute(&metadata)))
    }

    fn may_execute(self, file: &Metadata) -> bool {
        let bit = match self {
            Self { uid, .. } if uid == file.uid() => 0o100,
            Self { gid, .. } if gid == file.gid() => 0o010,
            Self { .. } => 0o001,
        };
        file.mode() & bit != 0
    }

    /// The user that this process runs as.
    pub fn own() -> Self {
        Self { uid: geteuid().as_raw(), gid: getegid().as_raw() }
    }

    /// Whether the files of the system are its own.
    pub fn is_root(self) -> bool {
        self.uid == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_enter_a_directory_reaches_no_program_in_it() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("qemu");
        fs::write(&program, "").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let nobody = QemuUser { uid: NOBODY, gid: NOBODY };
        for (mode, reaches) in [(0o700, false), (0o711, true)] {
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(nobody.reaches(&program), reaches, "{mode:o}");
            assert!(QemuUser::own().reaches(&program));
            assert_eq!(QemuUser::of_lab(&program) == nobody, reaches);
        }
        assert!(nobody.reaches(Path::new("qemu-system-x86_64")));
    }

    #[test]
    fn users_have_names_or_numbers() {
        assert_eq!(QemuUser::find("root").unwrap(), QemuUser { uid: 0, gid: 0 });
        assert_eq!(QemuUser::find("60999").unwrap(), QemuUser { uid: 60999, gid: 60999 });
        let error = QemuUser::find("no-such-user").unwrap_err();
        assert!(error.to_string().contains("useradd --system"), "{error}");
    }
}
