//! Labs on the real kernel: every test makes its own, and removes it even if it fails.

#![expect(clippy::unwrap_used, reason = "a helper that cannot go on fails its test")]

mod faults;
mod libvirt;
mod lifecycle;
mod links;
mod support;
