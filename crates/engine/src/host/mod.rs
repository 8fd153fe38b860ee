//! One host: what it says of itself, what its hypervisor can do, what its VMs may use, and its cores.

pub mod capabilities;
pub mod encryption_policy;
pub mod facts;
mod facts_0_1_0;
pub mod free_cores;
pub mod idle_cores;
pub mod vm_resources;
