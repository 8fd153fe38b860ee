//! What libvirt knows about a domain's snapshot. It moves with the domain if the snapshot itself is in disks that move
//! too.
//!
//! To revert to a snapshot, libvirt starts the domain from which it was made. So what another host sends of a snapshot
//! is judged like a domain's XML ([`super::trust`]), and may name only disks of the incoming domain.

use std::collections::BTreeSet;

use drainpipe_hypervisor::spec::VmSpec;

use super::element::{self, Element};
use super::error::DomainXmlError;
use super::trust::{self, Untrusted};
use super::words::plain;
use super::{DomainDescription, describe};

/// Elements of a snapshot, each at most once.
const OF_SNAPSHOT: &[&str] = &[
    "cookie",
    "creationTime",
    "description",
    "disks",
    "domain",
    "inactiveDomain",
    "memory",
    "name",
    "parent",
    "state",
];
/// libvirt makes a file of this name, with four letters more.
const NAME_BYTES_MAX: usize = 250;

/// What a snapshot is called, and what it is based on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name, unique in its domain.
    pub name: String,
    /// The name of the one before it.
    pub parent: Option<String>,
}

/// Why a snapshot does not go with its domain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Left {
    /// It cannot be read.
    #[error("what libvirt knows of a snapshot cannot be read: {0}")]
    Xml(DomainXmlError),
    /// No name for one.
    #[error("a snapshot has no name that libvirt would give it: `{}`", plain(.0))]
    Name(String),
    /// Its data are in files of their own.
    #[error("the snapshot {} has data outside of the domain's disks, which would stay behind", plain(name))]
    External {
        /// Its name.
        name: String,
    },
    /// The snapshot is of another domain.
    #[error("the snapshot {} is of a domain with another name or UUID", plain(name))]
    OtherDomain {
        /// Its name.
        name: String,
    },
    /// The domain had another disk then.
    #[error(
        "the snapshot {} is of the domain with the disk {}, which it does not have any more in this format",
        plain(name),
        plain(path)
    )]
    OtherDisk {
        /// Its name.
        name: String,
        /// Path of the disk.
        path: String,
    },
    /// The domain could not come itself.
    #[error("the snapshot {} is of a domain that no host accepts: {}", plain(name), why)]
    Untrusted {
        /// Its name.
        name: String,
        /// Why not.
        why: String,
    },
}

/// What a snapshot of the domain of this specification is, or why it does not go along.
pub fn snapshot(xml: &str, spec: &VmSpec) -> Result<Snapshot, Left> {
    let document = element::parse(xml).map_err(Left::Xml)?;
    let root = Element::root(&document);
    if root.name() != "domainsnapshot" || root.namespace().is_some() {
        return Err(Left::Xml(DomainXmlError::NotADomain { root: plain(root.name()) }));
    }
    let name = root.at("name").and_then(Element::text).unwrap_or_default();
    if !is_name(&name) {
        return Err(Left::Name(name));
    }
    let untrusted = |why: Untrusted| Left::Untrusted { name: name.clone(), why: why.to_string() };
    trust::check_own(root).map_err(untrusted)?;
    trust::check_once(root, OF_SNAPSHOT).map_err(untrusted)?;
    for part in root.elements() {
        check_part(part, spec).map_err(untrusted)?;
    }
    if is_external(root) {
        return Err(Left::External { name });
    }
    for domain in ["domain", "inactiveDomain"].into_iter().filter_map(|element| root.at(element)) {
        check_domain(domain, &name, spec)?;
    }
    Ok(Snapshot { name, parent: root.at("parent/name").and_then(Element::text) })
}

/// Whether each comes after the one that it is based on, and none twice: in this order libvirt takes them.
pub fn are_in_order(snapshots: &[Snapshot]) -> bool {
    let mut known = BTreeSet::new();
    snapshots.iter().all(|snapshot| {
        let has_parent = snapshot.parent.as_ref().is_none_or(|parent| known.contains(parent));
        has_parent && known.insert(&snapshot.name)
    })
}

fn is_name(name: &str) -> bool {
    let is_plain = !name.contains('/') && !name.chars().any(char::is_control);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && is_plain
}

fn check_part(part: Element<'_>, spec: &VmSpec) -> Result<(), Untrusted> {
    trust::check_own(part)?;
    trust::check_known(part, OF_SNAPSHOT)?;
    match part.name() {
        "description" => Ok(()),
        "domain" | "inactiveDomain" => trust::check(part, spec),
        // Snapshots in files of their own are reported as such.
        "disks" | "memory" => part.within().try_for_each(trust::check_own),
        _ => part.within().try_for_each(|within| trust::check_part(part, within, spec)),
    }
}

/// Whether anything of it is in another file than the domain's disks.
fn is_external(root: Element<'_>) -> bool {
    let is_inside = |part: Element<'_>| {
        matches!(part.attribute("snapshot"), None | Some("internal" | "no" | "none"))
            && part.attribute("file").is_none()
            && part.elements().next().is_none()
    };
    let disks = root.all("disks").flat_map(Element::elements);
    !root.all("memory").chain(disks).all(is_inside)
        || root.at("state").and_then(Element::text).as_deref() == Some("disk-snapshot")
}

fn check_domain(domain: Element<'_>, name: &str, spec: &VmSpec) -> Result<(), Left> {
    let untrusted = |why: String| Left::Untrusted { name: name.into(), why };
    let description = describe(domain).map_err(|why| untrusted(why.to_string()))?;
    if description.name != spec.name.as_str() || Some(description.uuid) != spec.uuid {
        return Err(Left::OtherDomain { name: name.into() });
    }
    if let Some(obstacle) = description.obstacles().first() {
        return Err(untrusted(obstacle.to_string()));
    }
    match other_disk(&description, spec).map_err(untrusted)? {
        Some(path) => Err(Left::OtherDisk { name: name.into(), path }),
        None => Ok(()),
    }
}

/// The format counts too: what a guest writes to a raw disk must not be read as anything else.
fn other_disk(description: &DomainDescription, spec: &VmSpec) -> Result<Option<String>, String> {
    let described = description.vm_spec();
    let described =
        described.map_err(|reasons| reasons.first().map_or_else(String::new, ToString::to_string))?;
    let is_known = |path, format| spec.disks.iter().any(|disk| disk.path == path && disk.format == format);
    let other = described.disks.into_iter().find(|disk| !is_known(disk.path.clone(), disk.format));
    Ok(other.map(|disk| disk.path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DEBIAN: &str = include_str!("../../tests/domains/debian.xml");

    fn spec() -> VmSpec {
        DomainDescription::parse(DEBIAN).unwrap().vm_spec().unwrap()
    }

    /// A snapshot's XML as libvirt prints it, with this beside the domain.
    fn with(more: &str, domain: &str) -> String {
        format!(
            "<domainsnapshot><name>before</name><state>running</state><creationTime>1700000000</creationTime>\
             {more}{domain}<cookie><cpu mode='custom' match='exact'><model>qemu64</model></cpu></cookie>\
             </domainsnapshot>"
        )
    }

    fn said(more: &str, domain: &str) -> String {
        snapshot(&with(more, domain), &spec()).map_or_else(|left| left.to_string(), |_| String::new())
    }

    #[test]
    fn what_is_in_the_domains_disks_goes_along() {
        let inside = "<parent><name>first</name></parent><memory snapshot='internal'/>\
                      <disks><disk name='vda' snapshot='internal'/><disk name='sda' snapshot='no'/></disks>";
        let expected = Snapshot { name: "before".into(), parent: Some("first".into()) };
        assert_eq!(snapshot(&with(inside, DEBIAN), &spec()), Ok(expected));
    }

    #[test]
    fn what_is_in_files_of_its_own_stays() {
        for outside in [
            "<memory snapshot='external' file='/srv/vms/memory'/>",
            "<memory file='/srv/vms/memory'/>",
            "<disks><disk name='vda' snapshot='external' type='file'><source file='/x'/></disk></disks>",
            "<disks><disk name='vda' snapshot='internal'><source file='/etc/shadow'/></disk></disks>",
        ] {
            assert!(said(outside, DEBIAN).contains("outside of the domain's disks"), "{outside}");
        }
    }

    #[test]
    fn what_a_revert_would_open_is_the_domains_own() {
        for (from, to, expected) in [
            ("/srv/vms/web-1.qcow2", "/etc/shadow", "no other host may have opened"),
            ("<name>web-1</name>", "<name>other</name>", "another name or UUID"),
            ("</devices>", "<hostdev mode='subsystem' type='usb'/></devices>", "no other host may send"),
        ] {
            assert!(DEBIAN.contains(from), "{from}");
            let said = said("", &DEBIAN.replacen(from, to, 1));
            assert!(said.contains(expected), "{from}: {said}");
        }
    }

    #[test]
    fn a_raw_disk_is_not_read_as_another_one() {
        let mut raw = spec();
        raw.disks[0].format = drainpipe_hypervisor::spec::DiskFormat::Raw;
        let left = snapshot(&with("", DEBIAN), &raw).unwrap_err();
        assert!(matches!(left, Left::OtherDisk { .. }), "{left}");
    }

    #[test]
    fn nothing_else_gets_in() {
        for more in [
            "<x/>",
            "<active>1</active>",
            "<state>running</state>",
            "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>",
            "<parent><name>/etc/passwd</name></parent>",
        ] {
            assert_ne!(said(more, DEBIAN), "", "{more}");
        }
        for name in ["", ".x", "a/b", &"x".repeat(251)] {
            let xml = with("", DEBIAN).replacen("<name>before</name>", &format!("<name>{name}</name>"), 1);
            assert!(matches!(snapshot(&xml, &spec()), Err(Left::Name(_))), "{name}");
        }
    }

    #[test]
    fn parents_come_first() {
        let one = |name: &str, parent: Option<&str>| Snapshot {
            name: name.into(),
            parent: parent.map(str::to_owned),
        };
        assert!(are_in_order(&[one("a", None), one("b", Some("a")), one("c", Some("a"))]));
        assert!(!are_in_order(&[one("b", Some("a")), one("a", None)]));
        assert!(!are_in_order(&[one("a", None), one("a", None)]));
    }

    proptest! {
        #[test]
        fn any_text_is_read(xml in "\\PC*") {
            drop(snapshot(&xml, &spec()));
        }
    }
}
