//! How long a VM may be paused while the last of its memory is sent.

/// The pause that QEMU may take in this round: when it expects the rest to need no longer, it pauses
/// the VM.
///
/// A VM that changes little never needs a long pause, but with QEMU's default of 300 ms it gets one:
/// QEMU stops as soon as the last 300 ms worth of the first round are left. What is left of the first round says nothing of
/// how fast the VM changes, so there it is the least. Beginning low costs a busy VM a few short rounds. Measured in
/// docs/decisions/0015.
pub fn downtime_limit_ms(rounds: u64) -> u64 {
    match rounds {
        0..=1 => 3,
        2 => 30,
        3 => 60,
        4 => 120,
        _ => 300,
    }
}
