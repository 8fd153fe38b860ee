//! Tests with real libvirt daemons, which run in their own namespaces and end with the test.

mod daemons;
mod life;
mod migration;
