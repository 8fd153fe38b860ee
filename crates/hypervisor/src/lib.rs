//! QEMU driven directly: VM specification, QMP client, processes.
