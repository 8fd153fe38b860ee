use std::io;
use std::path::PathBuf;
use std::time::Duration;

use drainpipe_engine::format::bound;

/// Why a QMP command has no result.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// The socket cannot be reached: QEMU is gone, or never was.
    #[error("cannot connect to QEMU's control socket {path}: {source}; is this QEMU running?")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The connection ended, so whether the command took effect is unknown.
    #[error("QEMU closed its control socket while `{command}` was waiting for an answer")]
    Closed {
        /// The command that was waiting.
        command: String,
    },
    /// No answer in time. The command may still take effect.
    #[error(
        "QEMU did not answer `{command}` within {}: it hangs, or another client holds its control socket",
        bound(*deadline)
    )]
    Deadline {
        /// The command that was waiting.
        command: String,
        /// How long it waited.
        deadline: Duration,
    },
    /// QEMU refused the command.
    #[error("QEMU refused `{command}`: {desc} ({class})")]
    Command {
        /// The refused command.
        command: String,
        /// QEMU's error class, mostly `GenericError`.
        class: String,
        /// QEMU's message.
        desc: String,
    },
    /// What came back is not QMP, or not the answer this command has.
    #[error("not a valid QMP answer to `{command}`: {detail}")]
    Malformed {
        /// The command that was waiting.
        command: String,
        /// What is wrong with the answer.
        detail: String,
    },
}
