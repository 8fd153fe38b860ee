//! What a local NBD client sends, and a server answers.

#![no_main]

use drainpipe_nbd::fuzzing::{CLIENT_HOLDS_BYTES, client, client_seeds};

drainpipe_fuzz::target!(run: client, seeds: client_seeds, holds_bytes: CLIENT_HOLDS_BYTES);
