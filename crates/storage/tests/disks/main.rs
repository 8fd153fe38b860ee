//! Disks made and copied for real: on whatever file system the tests are on, and, with root and the programs that make
//! them, on file systems of their own in a mount namespace of their own.

#![expect(clippy::unwrap_used, reason = "clippy.toml allows it in test functions; these are their helpers")]

mod copies;
mod creations;
mod devices;
mod file_systems;
mod mounted;
mod noise;
mod support;
mod with_qemu;
