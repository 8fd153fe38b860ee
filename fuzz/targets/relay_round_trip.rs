//! A guest's memory, from the program through sender and receiver to the program.

#![no_main]

use drainpipe_relay::fuzzing::{ROUND_TRIP_HOLDS_BYTES, round_trip, round_trip_seeds};

drainpipe_fuzz::target!(run: round_trip, seeds: round_trip_seeds, holds_bytes: ROUND_TRIP_HOLDS_BYTES);
