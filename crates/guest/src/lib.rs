//! The lab's guest: known memory, known dirtying, a heartbeat; and its client.
//!
//! A migration is measured on a guest whose every page is known in advance. This crate has three
//! parts:
//!
//! * what runs in the guest: [`parameters`] from the kernel command line, [`memory`] filled with a
//!   [`mix`] of [`page`] contents, a [`dirtier`], the two network [`service`]s, and, if it has disks for them, [`writers`]
//!   of known [`block`]s;
//! * the [`protocol`] between guest and host;
//! * what runs on the host: the [`client`] and the builder of the guest's initramfs, [`image`].
//!
//! The program `drainpipe-guest` is PID 1 of the guest and its only user program;
//! `drainpipe-guest-image` packs it into an initramfs.

pub mod block;
pub mod client;
pub mod dirtier;
pub mod image;
pub mod memory;
pub mod mix;
pub mod page;
pub mod parameters;
pub mod protocol;
pub mod service;
pub mod writers;
