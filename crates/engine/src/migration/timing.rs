//! How long the executors of a migration wait, and how often they ask: agents, guards, and their stand-ins in the
//! simulation.

use std::time::Duration;

/// How long QEMU may take to start or to end. It takes 0.1 s; a loaded host is slower.
pub const QEMU_DEADLINE: Duration = Duration::from_secs(20);

/// How long it may take to start a QEMU that first fills so much memory, as one does whose memory is in huge pages or
/// allocated beforehand. Pages of 4 KiB were filled at 0.28 GiB/s on two cores that were six times overbooked, at 4 and
/// more where they were idle.
pub const fn fills_within(memory_bytes: u64) -> Duration {
    QEMU_DEADLINE.saturating_add(Duration::from_secs(4 * (memory_bytes >> 30)))
}

/// How long a QMP command may take that QEMU answers at once, and a target to do what it does at once.
pub const QMP_DEADLINE: Duration = Duration::from_secs(5);

/// How long QEMU may take for an answer while the VM stands still and its transfer is to be stopped. After that it is
/// taken to wait for its target.
pub const MUTE_AFTER: Duration = Duration::from_secs(2);

/// The same for a guard, once its agent has ended with the last bytes of the paused VM still to send.
pub const MUTE_FOR_GUARD_AFTER: Duration = Duration::from_secs(1);

/// How often a target that takes no more VMs at a time is asked for a place. Well within the time after which it
/// forgets who waits.
pub const ASK_FOR_PLACE_EVERY: Duration = Duration::from_millis(500);

/// How long the VM may stand still while the rest is sent. Past this the links have failed, and it
/// runs on on the source.
pub const SWITCH_OVER_DEADLINE: Duration = Duration::from_secs(15);

/// How long the target may hold back its answer to whether all is there. It is asked again and again,
/// so that the VM does not stand still for long when the target's agent has gone.
pub const RECEIVED_WAIT: Duration = Duration::from_secs(1);

/// How much longer than that the target looks. Its source waits for the answer 3 s longer than it has asked for, and the VM
/// may stand still.
pub const RECEIVED_LOOK_MAX: Duration = Duration::from_secs(1);

/// How long the end of the copies of disks may take. The VM stands still meanwhile.
pub const DISKS_END_WITHIN: Duration = Duration::from_secs(10);

/// Between two questions to a target that did not answer, or at once.
pub const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Between two rounds of questions about a hand-over whose outcome is not known.
pub const IN_DOUBT_PAUSE: Duration = Duration::from_secs(5);
