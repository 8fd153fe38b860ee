//! What a QEMU says, which a guest may have taken over.

#![no_main]

use drainpipe_hypervisor_qemu::fuzzing::{QMP_HOLDS_BYTES, qmp, qmp_seeds};

drainpipe_fuzz::target!(run: qmp, seeds: qmp_seeds, holds_bytes: QMP_HOLDS_BYTES);
