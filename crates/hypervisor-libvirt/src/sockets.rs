//! At which of libvirt's sockets its daemon answers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Where daemons that have QEMU's domains answer, the preferred one first: `virtqemud`, and `libvirtd` or what stands in
/// for it, `virtproxyd`. A host with `virtproxyd` has `virtqemud` behind it.
const USUAL: [&str; 2] = ["/run/libvirt/virtqemud-sock", "/run/libvirt/libvirt-sock"];

/// Sockets, one of which is the daemon's: the first at which somebody listens. It is the same from then on, for all that have
/// a clone of this, whatever ends or comes: another one that answers while the daemon is gone is none that has its domains.
#[derive(Debug, Clone)]
pub struct Sockets {
    candidates: Vec<PathBuf>,
    found: Arc<OnceLock<PathBuf>>,
}

impl Default for Sockets {
    fn default() -> Self {
        Self::of(USUAL.map(PathBuf::from).to_vec())
    }
}

impl From<PathBuf> for Sockets {
    fn from(only: PathBuf) -> Self {
        Self::of(vec![only])
    }
}

impl Sockets {
    fn of(candidates: Vec<PathBuf>) -> Self {
        Self { candidates, found: Arc::default() }
    }

    /// The daemon's. Where nobody has listened yet, the one that is at least there, or else the last.
    pub fn path(&self) -> &Path {
        if let Some(found) = self.found.get() {
            return found;
        }
        if let Some(alive) = self.candidates.iter().find(|path| is_alive(path)) {
            return self.found.get_or_init(|| alive.clone());
        }
        let there = self.candidates.iter().find(|path| path.exists());
        there.or(self.candidates.last()).expect("there is at least one candidate")
    }
}

/// Whether somebody listens. A daemon that is so busy that it takes no more connections does.
fn is_alive(path: &Path) -> bool {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let connected = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use tempfile::TempDir;

    use super::*;

    fn in_directory(directory: &TempDir) -> (Sockets, [PathBuf; 2]) {
        let paths = ["virtqemud-sock", "libvirt-sock"].map(|name| directory.path().join(name));
        (Sockets::of(paths.to_vec()), paths)
    }

    #[test]
    fn one_that_nobody_listens_at_is_passed_over() {
        let directory = TempDir::new().unwrap();
        let (sockets, [modular, monolithic]) = in_directory(&directory);
        assert_eq!(sockets.path(), monolithic, "none is there");
        drop(UnixListener::bind(&modular).unwrap());
        assert_eq!(sockets.path(), modular, "it is there at least");
        let _listening = UnixListener::bind(&monolithic).unwrap();
        assert_eq!(sockets.path(), monolithic);
    }

    #[test]
    fn of_two_that_are_alive_it_is_the_modular_daemons_and_stays_so() {
        let directory = TempDir::new().unwrap();
        let (sockets, [modular, monolithic]) = in_directory(&directory);
        let [first, _other] = [&modular, &monolithic].map(|path| UnixListener::bind(path).unwrap());
        assert_eq!(sockets.clone().path(), modular);
        drop(first);
        assert_eq!(sockets.path(), modular, "the other is not the daemon of its domains");
    }
}
