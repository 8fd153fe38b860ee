//! The lab's emulated machines, seen from inside: their first process, and how programs are run in them.
//!
//! An emulated machine boots a distribution's kernel with an initramfs that holds one program, `drainpipe-machine`. It
//! makes a root of the lab's machine, read-only by way of 9p, and of memory for what is written, and then runs programs
//! that it is asked for over ports of a virtio console. These need no network: what is done to a machine's links never
//! cuts off who does it.
//!
//! * [`frames`] and [`protocol`]: what travels over a port;
//! * [`client`]: how a program is run in a machine, from outside;
//! * [`layout`]: what the lab and the machine must agree on.

pub mod client;
pub mod frames;
pub mod layout;
pub mod protocol;
