//! A hostile source's stream, on its way to the disk.

#![no_main]

use drainpipe_nbd::fuzzing::{QUESTIONS_HOLDS_BYTES, questions, questions_seeds};

drainpipe_fuzz::target!(run: questions, seeds: questions_seeds, holds_bytes: QUESTIONS_HOLDS_BYTES);
