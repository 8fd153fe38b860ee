//! Programs that keep a core busy.

use std::fs;
use std::process::{Child, Command, Stdio};

/// A program in its own session, as another user's would be. It ends when it is dropped.
pub(crate) struct Burner(Child);

impl Burner {
    pub(crate) fn start() -> Self {
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
        Self(command.spawn().unwrap())
    }

    /// How long it has run on a core, by the kernel's count (`proc_pid_schedstat` in the kernel).
    pub(crate) fn ran_s(&self) -> f64 {
        let counts = fs::read_to_string(format!("/proc/{}/schedstat", self.0.id())).expect("it runs");
        let ran_ns = counts.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok());
        ran_ns.expect("its first number is nanoseconds") / 1e9
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
