//! What a libvirt daemon says, which is trusted and may be wrong.

#![no_main]

use drainpipe_libvirt::fuzzing::{PACKETS_HOLDS_BYTES, packets, packets_seeds};

drainpipe_fuzz::target!(run: packets, seeds: packets_seeds, holds_bytes: PACKETS_HOLDS_BYTES);
