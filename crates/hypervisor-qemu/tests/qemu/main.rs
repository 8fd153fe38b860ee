//! Tests with real QEMUs: the host's, and those that `DRAINPIPE_TEST_QEMU` lists.

mod control_socket;
mod host;
mod life;
mod memory_sample;
mod migration;
mod network;
mod post_copy;
mod userfaultfd;
