//! The recognition of multifd's packets.

#![no_main]

use drainpipe_relay::fuzzing::{MULTIFD_HOLDS_BYTES, multifd, multifd_seeds};

drainpipe_fuzz::target!(run: multifd, seeds: multifd_seeds, holds_bytes: MULTIFD_HOLDS_BYTES);
