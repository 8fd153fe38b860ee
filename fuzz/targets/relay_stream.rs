//! A hostile sender's stream, on its way through the receiver.

#![no_main]

use drainpipe_relay::fuzzing::{STREAM_HOLDS_BYTES, stream, stream_seeds};

drainpipe_fuzz::target!(run: stream, seeds: stream_seeds, holds_bytes: STREAM_HOLDS_BYTES);
