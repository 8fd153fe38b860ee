//! TLS records of a peer that knows the keys, and of one that does not.

#![no_main]

use drainpipe_relay::fuzzing::{RECORDS_HOLDS_BYTES, records, records_seeds};

drainpipe_fuzz::target!(run: records, seeds: records_seeds, holds_bytes: RECORDS_HOLDS_BYTES);
