//! Datagrams of the watch of paths, and of a check.

#![no_main]

use drainpipe_agent::fuzzing::{DATAGRAMS_HOLD_BYTES, datagrams, datagrams_seeds};

drainpipe_fuzz::target!(run: datagrams, seeds: datagrams_seeds, holds_bytes: DATAGRAMS_HOLD_BYTES);
