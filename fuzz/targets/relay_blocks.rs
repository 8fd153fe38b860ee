//! Blocks that are packed well, whatever is in them.

#![no_main]

use drainpipe_relay::fuzzing::{BLOCKS_HOLDS_BYTES, blocks, blocks_seeds};

drainpipe_fuzz::target!(run: blocks, seeds: blocks_seeds, holds_bytes: BLOCKS_HOLDS_BYTES);
