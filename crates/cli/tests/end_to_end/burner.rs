//! Programs that keep a core busy.

use std::process::{Child, Command, Stdio};

/// In a session of its own, as another user's is. It ends when it is dropped.
pub(crate) struct Burner(Child);

impl Burner {
    pub(crate) fn start() -> Self {
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
