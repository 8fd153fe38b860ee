//! Against real libvirt daemons, which run in namespaces of their own and end with the test.

mod daemons;
mod life;
mod migration;
