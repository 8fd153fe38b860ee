//! A libvirt domain as a peer describes it.

#![no_main]

use drainpipe_hypervisor_libvirt::fuzzing::{DOMAIN_HOLDS_BYTES, domain, domain_seeds};

drainpipe_fuzz::target!(run: domain, seeds: domain_seeds, holds_bytes: DOMAIN_HOLDS_BYTES);
