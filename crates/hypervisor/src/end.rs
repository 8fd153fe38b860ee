//! How a VM ends here.

use std::fmt;

/// `SIGKILL`, which the kernel sends too when memory runs out.
const KILL: i32 = 9;

/// How a VM's process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// It exited by itself.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
    /// It ended, but another process started it, which alone learns how.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(0) => formatter.write_str("exit code 0, as when its guest powers off"),
            Self::Code(code) => write!(formatter, "exit code {code}"),
            Self::Signal(KILL) => write!(
                formatter,
                "signal {KILL}; if the kernel sent it for lack of memory, `journalctl --dmesg` says so"
            ),
            Self::Signal(signal) => write!(formatter, "signal {signal}"),
            Self::Unknown => formatter.write_str("unknown cause"),
        }
    }
}

/// The end of a VM's process that nobody holds.
#[derive(Debug, Clone)]
pub struct End {
    /// How it ended.
    pub exit: Exit,
    /// The end of what it wrote, if its files are there still.
    pub log_tail: String,
}
