//! What is decided by what a peer answers.

#![no_main]

use drainpipe_engine::fuzzing::{ANSWERS_HOLD_BYTES, answers, answers_seeds};

drainpipe_fuzz::json_target!(run: answers, seeds: answers_seeds, holds_bytes: ANSWERS_HOLD_BYTES);
