//! How much of the cores a session gets.
//!
//! If no control group divides the cores, the kernel divides them among sessions before it looks at the `nice` of
//! their threads; see "The autogroup feature" in sched(7). A session has a `nice` of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// `nice` of a session that goes first: it has nine times the weight of another one, as of threads (`go_first`).
const FIRST: i32 = -10;

/// `nice` of any other.
pub(crate) const ORDINARY: i32 = 0;

/// Has the session of this process go first, unless somebody gave it a `nice` of his own. Whether it does from now on;
/// never where the kernel does not group threads by session. Needs `CAP_SYS_NICE`, or `RLIMIT_NICE` of 30.
pub(crate) fn raise(pid: u32) -> io::Result<bool> {
    renice(&autogroup(pid), ORDINARY, FIRST)
}

/// Ends that, whoever began it. May be repeated, also when the process has ended.
pub(crate) fn lower(pid: u32) -> io::Result<bool> {
    renice(&autogroup(pid), FIRST, ORDINARY)
}

fn autogroup(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join("autogroup")
}

fn renice(file: &Path, from: i32, to: i32) -> io::Result<bool> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        text => text?,
    };
    let is_to_change = nice_of(&text) == Some(from);
    if is_to_change {
        fs::write(file, to.to_string())?;
    }
    Ok(is_to_change)
}

/// As `/autogroup-77 nice 0`.
fn nice_of(text: &str) -> Option<i32> {
    text.trim().rsplit_once(" nice ")?.1.parse().ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::process::{Child, Command, Stdio};
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// A process that is a session of its own until it is dropped.
    pub(crate) struct OwnSession(Child);

    impl OwnSession {
        /// None where the kernel does not group threads by session.
        pub(crate) fn begin() -> Option<Self> {
            let of = |pid| fs::read_to_string(autogroup(pid)).unwrap_or_default();
            let outer = of(std::process::id());
            if nice_of(&outer).is_none() {
                eprintln!("SKIPPED: the kernel does not group threads by session");
                return None;
            }
            let child = Command::new("setsid").arg("cat").stdin(Stdio::piped()).spawn().unwrap();
            while of(child.id()) == outer {
                thread::sleep(Duration::from_millis(1));
            }
            Some(Self(child))
        }

        pub(crate) fn pid(&self) -> u32 {
            self.0.id()
        }

        pub(crate) fn nice(&self) -> Option<i32> {
            nice_of(&fs::read_to_string(autogroup(self.pid())).unwrap())
        }
    }

    impl Drop for OwnSession {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    #[test]
    fn only_what_the_agent_has_changed_is_changed_back() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("autogroup");
        let after = |text: &str, from, to| {
            fs::write(&file, text).unwrap();
            (renice(&file, from, to).unwrap(), fs::read_to_string(&file).unwrap())
        };
        assert_eq!(after("/autogroup-77 nice 0\n", ORDINARY, FIRST), (true, "-10".into()));
        assert_eq!(after("/autogroup-77 nice -10\n", FIRST, ORDINARY), (true, "0".into()));
        for text in ["/autogroup-77 nice 5\n", "/autogroup-77 nice -10\n", "", "/autogroup-77 nice x"] {
            assert_eq!(after(text, ORDINARY, FIRST), (false, text.into()));
        }
        let none = directory.path().join("none");
        assert!(!renice(&none, ORDINARY, FIRST).unwrap(), "another kernel, or it has ended");
    }

    #[test]
    fn the_kernel_takes_it() {
        let Some(session) = OwnSession::begin() else { return };
        match raise(session.pid()) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                eprintln!("SKIPPED: nobody goes first without CAP_SYS_NICE");
            }
            raised => {
                assert!(raised.unwrap());
                assert_eq!(session.nice(), Some(FIRST));
                // Without CAP_SYS_ADMIN it takes ten changes a second.
                thread::sleep(Duration::from_millis(110));
                assert!(lower(session.pid()).unwrap());
                assert_eq!(session.nice(), Some(ORDINARY));
            }
        }
    }
}
