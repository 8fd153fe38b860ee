//! Test hosts on one machine: network namespaces, shaped links, faults.
