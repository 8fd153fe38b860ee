//! The tags by which the OpenAPI document groups its paths.

/// Tag of hosts.
pub(super) const HOSTS: &str = "hosts";
/// Tag of VMs.
pub(super) const VMS: &str = "vms";
/// Tag of migrations.
pub(super) const MIGRATIONS: &str = "migrations";
/// Tag of emptying a host.
pub(super) const DRAIN: &str = "drain";
/// Tag of who is in the fleet.
pub(super) const FLEET: &str = "fleet";
/// Tag of what only agents say to each other.
pub(super) const BETWEEN_AGENTS: &str = "between-agents";
