//! Disks through the real splitter, with QEMU's own programs at both ends: `qemu-nbd` serves the target, `qemu-img` and
//! `qemu-io` are the client.

#![expect(clippy::unwrap_used, reason = "clippy.toml allows it in test functions; these are their helpers")]

mod copies;
mod limited;
mod losses;
mod measure;
mod mirror;
#[path = "../../../storage/tests/disks/noise.rs"]
mod noise;
mod packed;
mod peers;
mod requests;
mod support;
