//! Where a domain's QEMU and the agent connect, if a migration goes through the agent: `drainpipe/` beside libvirt's
//! socket.
//!
//! QEMU runs as another user, which is known only once libvirt has started it, and `AppArmor` may confine it. So QEMU
//! makes its socket in a directory that is open to all, whose name nobody else knows, and which is closed as soon as
//! the socket is there; and the socket has a name that libvirt lets a QEMU of this domain use (docs/decisions/0073).

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use drainpipe_hypervisor::ResolvedSpec;
use uuid::Uuid;

/// `sun_path` of `unix(7)` has 108 bytes, the last one NUL.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// What the name of a socket has before that of the domain, so that libvirt's profile of the domain allows it
/// (`/run/libvirt/**/*.tunnelmigrate.dest.NAME`, for a use of libvirt's own that is never at the same time).
const ALLOWED: &str = "tunnelmigrate.dest";

/// Anybody may make files in it, and nobody may list it or remove another's.
const OPEN: u32 = 0o1733;

/// A process that knows its name may reach what is in it.
const PASSABLE: u32 = 0o711;

/// The agent's.
const CLOSED: u32 = 0o700;

/// The directory of one domain. Removed with this.
#[derive(Debug)]
pub(crate) struct Meeting {
    path: PathBuf,
    // It also begins the names of all that earlier agents made for this domain.
    prefix: String,
    domain: String,
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // There is none, mostly.
        drop(fs::remove_dir_all(&self.path));
    }
}

impl Meeting {
    /// For a domain of the libvirt that answers at `socket`. Makes nothing.
    pub(crate) fn beside(socket: &Path, spec: &ResolvedSpec) -> Self {
        let prefix = short(spec.uuid());
        let unknown = short(Uuid::new_v4());
        let all = socket.parent().unwrap_or(Path::new("/")).join("drainpipe");
        Self { path: all.join(format!("{prefix}{unknown}")), prefix, domain: spec.spec().name.to_string() }
    }

    /// Where QEMU finds the agent.
    pub(crate) fn outgoing(&self) -> PathBuf {
        self.socket("o")
    }

    /// Where the agent finds QEMU.
    pub(crate) fn incoming(&self) -> PathBuf {
        self.socket("i")
    }

    /// Where the agent finds QEMU to copy disks to it.
    pub(crate) fn disks(&self) -> PathBuf {
        self.socket("d")
    }

    /// What does not fit, below another directory than libvirt's usual one, goes without what `AppArmor` asks for.
    fn socket(&self, which: &str) -> PathBuf {
        let allowed = self.path.join(format!("{which}.{ALLOWED}.{}", self.domain));
        let fits = allowed.as_os_str().len() <= SOCKET_PATH_BYTES_MAX;
        if fits { allowed } else { self.path.join(which) }
    }

    /// For QEMU to find the agent.
    pub(crate) fn make(&self) -> io::Result<()> {
        self.make_as(PASSABLE)
    }

    /// For QEMU to make its socket.
    pub(crate) fn open(&self) -> io::Result<()> {
        self.make_as(OPEN)
    }

    /// QEMU has made its socket.
    pub(crate) fn close(&self) -> io::Result<()> {
        fs::set_permissions(&self.path, Permissions::from_mode(CLOSED))
    }

    fn make_as(&self, mode: u32) -> io::Result<()> {
        let all = self.path.parent().expect("it is below the directory of all");
        if !all.is_dir() {
            DirBuilder::new().recursive(true).mode(PASSABLE).create(all)?;
        }
        // Whatever the agent's umask is.
        fs::set_permissions(all, Permissions::from_mode(PASSABLE))?;
        self.remove_earlier(all)?;
        if !self.path.is_dir() {
            DirBuilder::new().mode(CLOSED).create(&self.path)?;
        }
        fs::set_permissions(&self.path, Permissions::from_mode(mode))
    }

    /// Those of agents that were killed.
    fn remove_earlier(&self, all: &Path) -> io::Result<()> {
        for entry in fs::read_dir(all)?.flatten() {
            let is_earlier = entry.file_name().to_string_lossy().starts_with(&self.prefix);
            if is_earlier && entry.path() != self.path {
                drop(fs::remove_dir_all(entry.path()));
            }
        }
        Ok(())
    }
}

/// Half of a directory's name: with two, the socket of a domain with the longest name that a VM may have fits below
/// `/run/libvirt`.
fn short(uuid: Uuid) -> String {
    const LETTERS: u32 = 6;
    let (random, ..) = uuid.as_fields();
    let letter = |place| char::from_digit((random >> (5 * place)) & 31, 32).expect("it is below 32");
    (0..LETTERS).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use drainpipe_hypervisor::spec::VmName;

    use super::*;

    fn meeting(all: &Path, domain: &str) -> Meeting {
        let path = all.join("drainpipe/000000712345");
        Meeting { path, prefix: "000000".into(), domain: domain.into() }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn it_is_open_to_others_until_qemu_has_its_socket() {
        let all = tempfile::tempdir().unwrap();
        let meeting = meeting(all.path(), "web");
        meeting.open().unwrap();
        assert_eq!((mode(&meeting.path), mode(meeting.path.parent().unwrap())), (OPEN, PASSABLE));
        fs::write(meeting.incoming(), "").unwrap();
        meeting.close().unwrap();
        assert_eq!(mode(&meeting.path), CLOSED);
        let path = meeting.path.clone();
        drop(meeting);
        assert!(!path.exists());
    }

    #[test]
    fn what_an_agent_that_was_killed_has_left_goes_with_the_next_one() {
        let all = tempfile::tempdir().unwrap();
        let (meeting, others) = (meeting(all.path(), "web"), all.path().join("drainpipe/000001712345"));
        let earlier = all.path().join("drainpipe/000000754321");
        for path in [&earlier, &others] {
            fs::create_dir_all(path).unwrap();
        }
        meeting.make().unwrap();
        assert_eq!((earlier.exists(), others.exists(), mode(&meeting.path)), (false, true, PASSABLE));
    }

    #[test]
    fn sockets_have_names_that_apparmor_allows_as_far_as_they_fit() {
        let at = |run: &str, domain: &str| meeting(Path::new(run), domain).incoming();
        let expected = "/run/libvirt/drainpipe/000000712345/i.tunnelmigrate.dest.web";
        assert_eq!(at("/run/libvirt", "web"), PathBuf::from(expected));
        let [longest, too_long] = [50, 51].map(|letters| "x".repeat(letters));
        assert!(longest.parse::<VmName>().is_ok() && too_long.parse::<VmName>().is_err());
        let fitting = at("/run/libvirt", &longest);
        assert!(fitting.ends_with(format!("i.tunnelmigrate.dest.{longest}")), "{}", fitting.display());
        assert_eq!(
            at("/somewhere/else", &longest),
            PathBuf::from("/somewhere/else/drainpipe/000000712345/i")
        );
    }

    #[test]
    fn directories_have_short_names_that_nobody_can_guess() {
        let of = |first: u32| short(Uuid::from_fields(first, 0, 0, &[0; 8]));
        assert_eq!([of(0), of(31), of(32), of(u32::MAX)], ["000000", "v00000", "010000", "vvvvvv"]);
    }
}
