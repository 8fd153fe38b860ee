//! A VM as a peer describes it.

#![no_main]

use drainpipe_hypervisor_qemu::fuzzing::{SPEC_HOLDS_BYTES, spec, spec_seeds};

drainpipe_fuzz::json_target!(run: spec, seeds: spec_seeds, holds_bytes: SPEC_HOLDS_BYTES);
