//! What a lab consists of.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::addresses::{self, MAX_HOSTS, MAX_LINKS};
use crate::libvirt_daemon::{DaemonKind, LIBVIRTD};
use crate::names::{self, CLIENT, SWITCH};

/// The MTU of Ethernet without jumbo frames.
pub const DEFAULT_MTU_BYTES: u32 = 1500;

/// Below this the kernel takes IPv6 off an interface (RFC 8200, section 5).
const MIN_MTU_BYTES: u32 = 1280;
/// veth's own maximum.
const MAX_MTU_BYTES: u32 = 65_535;
const MAX_RATE_MBPS: u64 = 100_000;
/// Below this the kernel, the overlay and an agent are short of memory.
const MIN_MACHINE_MIB: u32 = 512;
/// Slots of the machine's root bus that its other devices leave, but for two: see [`crate::emulated`].
pub(crate) const MAX_MACHINE_LINKS: usize = 12;
const MAX_LAB_NAME_CHARS: usize = 32;
const MAX_HOST_NAME_CHARS: usize = 10;

/// A lab to be made: its hosts, and the links between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LabSpec {
    /// Lower-case letters, digits and inner hyphens; at most 32 characters.
    pub name: String,
    /// Two or more names of lower-case letters and digits, at most 10 characters each.
    pub hosts: Vec<String>,
    /// Link `i` joins all hosts and is called `e<i>` on each of them.
    pub links: Vec<LinkSpec>,
    /// Which addresses the hosts have on the links.
    #[serde(default)]
    pub link_addresses: LinkAddresses,
    /// Whether the programs of each host run on a CPU of its own, and of no other host.
    #[serde(default)]
    pub own_cpus: bool,
    /// Whether each host runs a libvirt of its own. It lets its QEMUs run on all CPUs, also of a host that has its own,
    /// where the domain does not say otherwise.
    ///
    /// Left out where it is not so: a release before it reads the record of such a lab.
    #[serde(default, skip_serializing_if = "is_false")]
    pub libvirt: bool,
    /// The program that these libvirts find in place of the distribution's QEMU, with the modules and the firmware of
    /// the directory that it was unpacked to; an absolute path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt_qemu: Option<PathBuf>,
    /// The daemon of these libvirts, `libvirtd` or `virtqemud`: a name in PATH, or an absolute path, with the libraries of the
    /// directory that it was unpacked to. None is the distribution's `libvirtd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libvirt_daemon: Option<PathBuf>,
    /// What the hosts are emulated by. None: they are this machine's own namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machines: Option<MachineSpec>,
}

/// How the machines of an emulated lab are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSpec {
    /// The QEMU that they run in: a name in PATH, or an absolute path.
    pub qemu: PathBuf,
    /// The directory with `vmlinux`, `initramfs.img` and `additions/`, as `scripts/emulated` makes it; an absolute path.
    pub boot_files: PathBuf,
    /// The memory of each, in MiB. What is written to its root is in it too.
    pub memory_mib: u32,
    /// The CPUs of each.
    pub cpus: u8,
    /// Whether they have this machine's KVM.
    pub kvm: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands over a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// Which addresses hosts have on the links between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkAddresses {
    /// An IPv4 address, and no IPv6.
    Ipv4,
    /// Nothing but the IPv6 link-local address that the kernel gives.
    LinkLocal,
    /// Both.
    #[default]
    Both,
}

impl LinkAddresses {
    /// Whether links have IPv4 addresses.
    pub fn has_ipv4(self) -> bool {
        self != Self::LinkLocal
    }
}

/// One link between all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSpec {
    /// What every end can send, counted in Ethernet frames, in megabits per second; `None` is as
    /// fast as the machine can.
    pub rate_mbps: Option<u64>,
    /// Largest packet in bytes, without the Ethernet header.
    pub mtu_bytes: u32,
}

/// What is wrong with a [`LabSpec`], or with a name that should be in one.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SpecError {
    /// The lab's name would not make valid namespace names.
    #[error(
        "lab name {0:?} is not valid: use 1 to {MAX_LAB_NAME_CHARS} lower-case letters, digits and \
         hyphens, with a letter or digit first and last"
    )]
    LabName(String),
    /// The host's name would not make valid namespace and interface names.
    #[error(
        "host name {0:?} is not valid: use 1 to {MAX_HOST_NAME_CHARS} lower-case letters and \
         digits, with a letter first; {CLIENT:?} and {SWITCH:?} are taken"
    )]
    HostName(String),
    /// Two hosts of one name.
    #[error("host {0:?} is named twice: give every host a name of its own")]
    HostTwice(String),
    /// Too few or too many hosts.
    #[error("a lab has 2 to {MAX_HOSTS} hosts, not {0}")]
    HostCount(usize),
    /// Too few or too many links.
    #[error("a lab has 1 to {MAX_LINKS} links between its hosts, not {0}")]
    LinkCount(usize),
    /// The rate is zero or too high.
    #[error("rate of {rate_mbps} Mb/s on link {link} is out of range: choose 1 to {MAX_RATE_MBPS} Mb/s")]
    Rate {
        /// The link's name.
        link: String,
        /// The rate asked for.
        rate_mbps: u64,
    },
    /// The MTU would break IPv6 or exceed what veth carries.
    #[error(
        "MTU of {mtu_bytes} bytes on link {link} is out of range: choose {MIN_MTU_BYTES} to \
         {MAX_MTU_BYTES} bytes"
    )]
    Mtu {
        /// The link's name.
        link: String,
        /// The MTU asked for.
        mtu_bytes: u32,
    },
    /// More links than a machine has slots for.
    #[error("emulated machines have 1 to {MAX_MACHINE_LINKS} links, not {0}")]
    MachineLinkCount(usize),
    /// Too little or too much memory for a machine.
    #[error("an emulated machine needs at least {MIN_MACHINE_MIB} MiB of memory, not {0}")]
    MachineMemory(u32),
    /// A machine without a CPU.
    #[error("an emulated machine needs at least 1 CPU")]
    MachineCpus,
    /// libvirt's daemons of a lab share this machine's kernel.
    #[error("the lab does not start libvirt in emulated machines: start it in them")]
    MachineLibvirt,
    /// What is asked of a host is another thing on an emulated machine.
    #[error("host {host} of lab {lab} is an emulated machine: {instead}")]
    IsMachine {
        /// The lab's name.
        lab: String,
        /// The host's name.
        host: String,
        /// What does it there.
        instead: &'static str,
    },
    /// The lab's hosts are not emulated.
    #[error("the hosts of lab {lab} are not emulated: make a lab with `drainpipe lab up --emulated`")]
    NoMachine {
        /// The lab's name.
        lab: String,
    },
    /// There is no CPU for each host.
    #[error("giving each of {hosts} hosts its own CPU needs as many CPUs, and this program may use {cpus}")]
    Cpus {
        /// How many hosts there are.
        hosts: usize,
        /// How many CPUs this program may use.
        cpus: usize,
    },
    /// No host of that name in this lab.
    #[error("lab {lab} has no host {host:?}: its hosts are {}, and there is {CLIENT}", .hosts.join(", "))]
    NoSuchHost {
        /// The lab's name.
        lab: String,
        /// The name asked for.
        host: String,
        /// The names that exist.
        hosts: Vec<String>,
    },
    /// The lab's hosts have no libvirt.
    #[error("host {host} of lab {lab} has no libvirt: make a lab with `drainpipe lab up --libvirt`")]
    NoLibvirt {
        /// The lab's name.
        lab: String,
        /// The host's name.
        host: String,
    },
    /// The program is none of libvirt's daemons that have QEMU's domains.
    #[error("{} is not one of libvirt's daemons for QEMU: name `libvirtd` or `virtqemud`, or the path of \
        either", .0.display())]
    LibvirtDaemon(PathBuf),
    /// No link of that name in this lab.
    #[error("lab {lab} has no link {link:?}: its links are {}", .links.join(", "))]
    NoSuchLink {
        /// The lab's name.
        lab: String,
        /// The name asked for.
        link: String,
        /// The names that exist.
        links: Vec<String>,
    },
}

impl Default for LinkSpec {
    fn default() -> Self {
        Self { rate_mbps: None, mtu_bytes: DEFAULT_MTU_BYTES }
    }
}

impl LabSpec {
    /// A lab of the hosts `a` and `b`.
    pub fn of_two_hosts(name: impl Into<String>, links: Vec<LinkSpec>) -> Self {
        let hosts = vec!["a".to_owned(), "b".to_owned()];
        Self {
            name: name.into(),
            hosts,
            links,
            link_addresses: LinkAddresses::default(),
            own_cpus: false,
            libvirt: false,
            libvirt_qemu: None,
            libvirt_daemon: None,
            machines: None,
        }
    }

    /// Checks names, counts and ranges.
    pub fn validate(&self) -> Result<(), SpecError> {
        check_lab_name(&self.name)?;
        if !(2..=MAX_HOSTS).contains(&self.hosts.len()) {
            return Err(SpecError::HostCount(self.hosts.len()));
        }
        if !(1..=MAX_LINKS).contains(&self.links.len()) {
            return Err(SpecError::LinkCount(self.links.len()));
        }
        self.libvirt_daemon_kind()?;
        let mut seen = HashSet::new();
        for host in &self.hosts {
            check_host_name(host)?;
            if !seen.insert(host) {
                return Err(SpecError::HostTwice(host.clone()));
            }
        }
        for (link, spec) in self.link_names().iter().zip(&self.links) {
            check_rate(link, spec.rate_mbps)?;
            check_mtu(link, spec.mtu_bytes)?;
        }
        self.machines.as_ref().map_or(Ok(()), |machines| self.check_machines(machines))
    }

    /// What the daemon is that has QEMU's domains.
    pub(crate) fn libvirt_daemon_kind(&self) -> Result<DaemonKind, SpecError> {
        let program = self.libvirt_program();
        DaemonKind::of(program).ok_or_else(|| SpecError::LibvirtDaemon(program.into()))
    }

    pub(crate) fn libvirt_program(&self) -> &Path {
        self.libvirt_daemon.as_deref().unwrap_or(Path::new(LIBVIRTD))
    }

    fn check_machines(&self, machines: &MachineSpec) -> Result<(), SpecError> {
        match machines {
            _ if self.libvirt => Err(SpecError::MachineLibvirt),
            _ if self.links.len() > MAX_MACHINE_LINKS => Err(SpecError::MachineLinkCount(self.links.len())),
            MachineSpec { memory_mib: ..MIN_MACHINE_MIB, .. } => {
                Err(SpecError::MachineMemory(machines.memory_mib))
            }
            MachineSpec { cpus: 0, .. } => Err(SpecError::MachineCpus),
            _ => Ok(()),
        }
    }

    /// Whether `node` is an emulated machine; the client never is.
    pub fn is_machine(&self, node: &str) -> bool {
        self.machines.is_some() && node != CLIENT
    }

    /// The links' interface names, the same on every host: `e0`, `e1`, …
    pub fn link_names(&self) -> Vec<String> {
        (0..self.links.len()).map(names::link).collect()
    }

    /// The address of `host` on [`MANAGEMENT_NETWORK`](crate::MANAGEMENT_NETWORK).
    pub fn management_address(&self, host: &str) -> Result<Ipv4Addr, SpecError> {
        Ok(addresses::management_address(self.host_index(host)?))
    }

    /// The IPv4 address of `host` on `link`, where the links have some.
    pub fn link_address(&self, host: &str, link: &str) -> Result<Ipv4Addr, SpecError> {
        Ok(addresses::link_address(self.link_index(link)?, self.host_index(host)?))
    }

    /// The network of `link`.
    pub fn link_network(&self, link: &str) -> Result<Ipv4Net, SpecError> {
        Ok(addresses::link_network(self.link_index(link)?))
    }

    pub(crate) fn host_index(&self, host: &str) -> Result<usize, SpecError> {
        self.hosts.iter().position(|known| known == host).ok_or_else(|| SpecError::NoSuchHost {
            lab: self.name.clone(),
            host: host.to_owned(),
            hosts: self.hosts.clone(),
        })
    }

    pub(crate) fn link_index(&self, link: &str) -> Result<usize, SpecError> {
        let links = self.link_names();
        links.iter().position(|known| known == link).ok_or_else(|| SpecError::NoSuchLink {
            lab: self.name.clone(),
            link: link.to_owned(),
            links,
        })
    }

    /// Every namespace of the lab: its hosts, the client and the switch.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &str> {
        self.hosts.iter().map(String::as_str).chain([CLIENT, SWITCH])
    }

    /// Checks that `node` is a host or the client.
    pub(crate) fn check_node(&self, node: &str) -> Result<(), SpecError> {
        if node == CLIENT {
            return Ok(());
        }
        self.host_index(node).map(drop)
    }

    pub(crate) fn namespace(&self, node: &str) -> String {
        names::namespace(&self.name, node)
    }
}

pub(crate) fn check_lab_name(name: &str) -> Result<(), SpecError> {
    let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let valid = (1..=MAX_LAB_NAME_CHARS).contains(&name.len())
        && name.chars().all(allowed)
        && !name.starts_with('-')
        && !name.ends_with('-');
    valid.then_some(()).ok_or_else(|| SpecError::LabName(name.to_owned()))
}

fn check_host_name(name: &str) -> Result<(), SpecError> {
    let valid = (1..=MAX_HOST_NAME_CHARS).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name != CLIENT
        && name != SWITCH;
    valid.then_some(()).ok_or_else(|| SpecError::HostName(name.to_owned()))
}

pub(crate) fn check_rate(link: &str, rate_mbps: Option<u64>) -> Result<(), SpecError> {
    match rate_mbps {
        Some(rate_mbps) if !(1..=MAX_RATE_MBPS).contains(&rate_mbps) => {
            Err(SpecError::Rate { link: link.to_owned(), rate_mbps })
        }
        _ => Ok(()),
    }
}

pub(crate) fn check_mtu(link: &str, mtu_bytes: u32) -> Result<(), SpecError> {
    (MIN_MTU_BYTES..=MAX_MTU_BYTES)
        .contains(&mtu_bytes)
        .then_some(())
        .ok_or_else(|| SpecError::Mtu { link: link.to_owned(), mtu_bytes })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(name: &str, hosts: &[&str], links: Vec<LinkSpec>) -> LabSpec {
        let hosts = hosts.iter().map(|host| (*host).to_owned()).collect();
        LabSpec {
            name: name.to_owned(),
            hosts,
            links,
            link_addresses: LinkAddresses::default(),
            own_cpus: false,
            libvirt: false,
            libvirt_qemu: None,
            libvirt_daemon: None,
            machines: None,
        }
    }

    fn message(spec: &LabSpec) -> String {
        spec.validate().expect_err("the specification is wrong").to_string()
    }

    #[test]
    fn names_are_checked() {
        let links = vec![LinkSpec::default()];
        let too_long = "x".repeat(33);
        for name in ["", "-x", "x-", "X", "a/b", "a b", "..", "ü", too_long.as_str()] {
            assert!(message(&spec(name, &["a", "b"], links.clone())).starts_with("lab name"), "{name}");
        }
        for host in ["", "a-b", "1a", "A", "client", "switch", "elevenchars", "a."] {
            assert!(message(&spec("x", &["a", host], links.clone())).starts_with("host name"), "{host}");
        }
        assert!(message(&spec("x", &["a", "a"], links)).contains("named twice"));
    }

    #[test]
    fn counts_and_ranges_are_checked() {
        let link = LinkSpec::default();
        assert!(message(&spec("x", &["a"], vec![link])).contains("2 to 64 hosts"));
        assert!(message(&spec("x", &["a", "b"], vec![])).contains("1 to 64 links"));
        assert!(message(&spec("x", &["a", "b"], vec![link; 65])).contains("1 to 64 links"));
        let stopped = LinkSpec { rate_mbps: Some(0), ..link };
        assert!(message(&spec("x", &["a", "b"], vec![link, stopped])).contains("link e1"));
        let narrow = LinkSpec { mtu_bytes: 1279, ..link };
        assert!(message(&spec("x", &["a", "b"], vec![narrow])).contains("1280 to 65535 bytes"));
    }

    #[test]
    fn addresses_are_found_by_name() {
        let spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default(); 2]);
        assert_eq!(spec.link_address("b", "e1").unwrap().to_string(), "10.77.2.12");
        assert_eq!(spec.management_address("a").unwrap().to_string(), "10.77.0.11");
        assert!(spec.link_address("b", "e2").unwrap_err().to_string().contains("e0, e1"));
    }

    proptest! {
        #[test]
        fn a_valid_name_makes_one_file_name(name in "\\PC{0,40}") {
            if check_lab_name(&name).is_ok() {
                prop_assert!(!name.contains(['/', '.', '\0']) && !name.is_empty());
            }
        }
    }
}
