//! What a qcow2 image names.

#![no_main]

use drainpipe_hypervisor::qcow2::fuzzing::{IMAGE_HOLDS_BYTES, image, image_seeds};

drainpipe_fuzz::target!(run: image, seeds: image_seeds, holds_bytes: IMAGE_HOLDS_BYTES);
