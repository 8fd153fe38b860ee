//! How long a guest may be silent: what is promised to users, and what a busy machine adds.
//!
//! These, and how long an operator waits beside a flood (`flooded.rs`), are the only upper bounds on elapsed time that
//! tests assert: there, the time itself is the promise. All other tests count, or check what comes before what, and a
//! deadline only ends a wait that hangs. `chaos/scenarios.rs` has the promises for single faults, derived from the same
//! constants of the agent.

use std::time::Duration;

/// For a guest that is not paused.
pub(crate) const RUNNING_SILENCE_MAX: Duration = Duration::from_secs(2);

/// For a guest that is not paused in a drain, or only for its last bytes.
pub(crate) const DRAINED_SILENCE_MAX: Duration = Duration::from_secs(3);

/// For a throttled guest.
pub(crate) const THROTTLED_SILENCE_MAX: Duration = Duration::from_secs(4);

/// For a guest whose agent is gone: 3 s until the guard acts.
pub(crate) const GUARDED_SILENCE_MAX: Duration = Duration::from_secs(8);

/// The same while the target's agent does not answer: 4 s more.
pub(crate) const UNANSWERED_SILENCE_MAX: Duration = Duration::from_secs(10);

/// For a guest whose last bytes do not arrive: 15 s until the source gives up, and what its QEMU needs.
pub(crate) const CUT_SILENCE_MAX: Duration = Duration::from_secs(22);
