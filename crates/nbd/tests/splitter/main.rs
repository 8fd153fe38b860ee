//! Disks through the real splitter, with QEMU's own programs at both ends: `qemu-nbd` serves the target, `qemu-img` and
//! `qemu-io` are the client.

mod copies;
mod losses;
mod peers;
mod requests;
mod support;
