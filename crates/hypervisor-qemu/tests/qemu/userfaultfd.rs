//! Permission for QEMUs of any user to fetch pages, as post-copy does.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};

/// QEMU 7.2 depends on what the kernel gives all programs.
const SETTING: &str = "/proc/sys/vm/unprivileged_userfaultfd";

/// Whoever has locked this file needs the setting. The file contains the value from before.
const NEEDED: &str = "/run/drainpipe-tests-userfaultfd";

/// Permission for as long as this lives, for all tests that run on this machine at a time: the last one takes it back.
/// `None` inside if the kernel lets nobody decide, or has no such setting.
pub(crate) struct Allowed(Option<File>);

impl Allowed {
    pub(crate) fn begin() -> Self {
        Self(Self::try_begin().ok())
    }

    fn try_begin() -> std::io::Result<File> {
        let mut needed = File::options().create(true).truncate(false).read(true).write(true).open(NEEDED)?;
        if needed.try_lock().is_ok() {
            let before = fs::read(SETTING)?;
            needed.set_len(0)?;
            needed.write_all(&before)?;
        }
        needed.lock_shared()?;
        fs::write(SETTING, "1")?;
        Ok(needed)
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        let Some(needed) = &mut self.0 else { return };
        let is_last = needed.unlock().is_ok() && needed.try_lock().is_ok();
        let mut before = Vec::new();
        if is_last && needed.rewind().is_ok() && needed.read_to_end(&mut before).is_ok() {
            fs::write(SETTING, before).expect("what was written can be written again");
        }
    }
}
