//! A hostile target's answers to requests that are under way.

#![no_main]

use drainpipe_nbd::fuzzing::{ANSWERS_HOLDS_BYTES, answers, answers_seeds};

drainpipe_fuzz::target!(run: answers, seeds: answers_seeds, holds_bytes: ANSWERS_HOLDS_BYTES);
