//! What other hosts say over the API.

#![no_main]

use drainpipe_agent::fuzzing::{MESSAGES_HOLD_BYTES, messages, messages_seeds};

drainpipe_fuzz::json_target!(run: messages, seeds: messages_seeds, holds_bytes: MESSAGES_HOLD_BYTES);
