//! Whom QEMU runs as.

use nix::unistd::User;
use rustix::process::{getegid, geteuid};
use serde::{Deserialize, Serialize};

/// The user of QEMU where none is named.
pub const DEFAULT_USER: &str = "drainpipe-qemu";

/// Whom QEMU runs as.
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
        "there is no user {name}, whom QEMU is to run as: make it by `systemd-sysusers` with Drainpipe's \
         packaging/sysusers.conf, or by `useradd --system --no-create-home --shell /usr/sbin/nologin {name}`, or name \
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

    /// Whom this process runs as.
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
    fn users_have_names_or_numbers() {
        assert_eq!(QemuUser::find("root").unwrap(), QemuUser { uid: 0, gid: 0 });
        assert_eq!(QemuUser::find("60999").unwrap(), QemuUser { uid: 60999, gid: 60999 });
        let error = QemuUser::find("no-such-user").unwrap_err();
        assert!(error.to_string().contains("useradd --system"), "{error}");
    }
}
