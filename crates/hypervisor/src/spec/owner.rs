//! What another manager of VMs reserves to itself for the VMs that it owns.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{VmName, VmSpec};

/// The owner of VMs that no other manager owns, and its program.
const DRAINPIPE: &str = "drainpipe";

/// The owner of a VM that Drainpipe has not defined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Manager {
    /// It is a domain.
    Libvirt,
}

/// What only a VM's owner does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnersAct {
    /// Says what it is.
    Define,
    /// Boots its guest.
    Start,
    /// Has its guest power off.
    ShutDown,
    /// Ends it, whatever its guest does.
    Destroy,
    /// Forgets it.
    Undefine,
    /// Has one of its disks somewhere else on its host.
    MoveDisk,
}

impl VmSpec {
    /// Whether its owner, which is not Drainpipe, defines, starts and ends it, and says which VMs there are.
    pub fn is_defined_elsewhere(&self) -> bool {
        self.manager.is_some()
    }

    /// Whether its owner, which is not Drainpipe, builds its machine: chooses its slots, knows its CPU, and says whether a
    /// host can run it.
    pub fn is_built_elsewhere(&self) -> bool {
        self.manager.is_some()
    }

    /// Why Drainpipe does not do this to it, and what does; `None` where Drainpipe does it.
    pub fn left_to_owner(&self, act: OwnersAct) -> Option<String> {
        self.manager.map(|manager| manager.keeps(act, &self.name))
    }

    /// The owner, if that is not Drainpipe, and how to give the VM another name.
    pub(crate) fn renamed_by_owner(&self) -> Option<(Manager, String)> {
        self.manager.map(|manager| (manager, manager.renaming(&self.name)))
    }

    /// The command that boots it.
    pub fn start_command(&self) -> String {
        Manager::start_command(self.manager, self.name.as_str())
    }
}

impl Manager {
    /// The name of a VM's owner, which is Drainpipe where there is no other.
    pub fn owner_name(owner: Option<Self>) -> String {
        owner.map_or_else(|| DRAINPIPE.into(), |manager| manager.to_string())
    }

    /// The command that boots a VM of this owner.
    pub fn start_command(owner: Option<Self>, vm: &str) -> String {
        match owner {
            None => format!("{DRAINPIPE} vm start {vm}"),
            Some(manager) => manager.command(OwnersAct::Start, vm),
        }
    }

    /// What gives one of its VMs another name.
    fn renaming(self, vm: &VmName) -> String {
        match self {
            Self::Libvirt => format!("`virsh domrename {vm} NEW` while the domain is off"),
        }
    }

    fn keeps(self, act: OwnersAct, vm: &VmName) -> String {
        let Self::Libvirt = self;
        let which = match act {
            OwnersAct::MoveDisk => "which moves its disks itself",
            _ => "which alone defines, starts and ends it",
        };
        format!("{vm} is a domain of libvirt, {which}: `{}`", self.command(act, vm.as_str()))
    }

    fn command(self, act: OwnersAct, vm: &str) -> String {
        let Self::Libvirt = self;
        match act {
            OwnersAct::Define => format!("virsh define {vm}"),
            OwnersAct::Start => format!("virsh start {vm}"),
            OwnersAct::ShutDown => format!("virsh shutdown {vm}"),
            OwnersAct::Destroy => format!("virsh destroy {vm}"),
            OwnersAct::Undefine => format!("virsh undefine {vm}"),
            OwnersAct::MoveDisk => format!("virsh blockcopy {vm} DISK PATH --pivot"),
        }
    }
}

impl fmt::Display for Manager {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Libvirt => formatter.write_str("libvirt"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn owned_by(manager: Option<Manager>) -> VmSpec {
        let toml = "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-10.0\"\n";
        VmSpec { manager, ..VmSpec::from_toml(toml, Path::new("web.toml")).unwrap() }
    }

    #[test]
    fn a_domain_is_left_to_libvirt_by_a_command_that_can_be_typed() {
        let domain = owned_by(Some(Manager::Libvirt));
        assert_eq!(
            domain.left_to_owner(OwnersAct::ShutDown).as_deref(),
            Some("web is a domain of libvirt, which alone defines, starts and ends it: `virsh shutdown web`")
        );
        let moved = domain.left_to_owner(OwnersAct::MoveDisk).unwrap();
        assert!(
            moved.ends_with("which moves its disks itself: `virsh blockcopy web DISK PATH --pivot`"),
            "{moved}"
        );
        assert_eq!(domain.start_command(), "virsh start web");
        assert_eq!(Manager::owner_name(domain.manager), "libvirt");
    }

    #[test]
    fn of_its_own_vms_drainpipe_leaves_nothing_to_others() {
        let own = owned_by(None);
        assert_eq!(own.left_to_owner(OwnersAct::Destroy), None);
        assert_eq!(own.start_command(), "drainpipe vm start web");
        assert_eq!(Manager::owner_name(own.manager), "drainpipe");
        assert!(!own.is_defined_elsewhere() && !own.is_built_elsewhere());
    }
}
