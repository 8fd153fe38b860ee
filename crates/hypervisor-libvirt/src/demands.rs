//! What moving a domain needs: by its XML, and by what libvirt keeps beside it.

use std::time::Duration;

use drainpipe_engine::check::vm::Notice;
use drainpipe_hypervisor::spec::{Accelerator, VmSpec, loses_writes};
use drainpipe_hypervisor::{Demands, Version, VmError};
use drainpipe_libvirt::{Connection, Domain, XmlFlags};

use crate::domain::{DomainDescription, Doubt, Inexpressible, Obstacle};
use crate::errors::failed;
use crate::snapshots::{self, KnownSnapshot};
use crate::versions;

/// Asks what an active domain demands.
pub(crate) async fn ask(
    connection: &Connection,
    domain: &Domain,
    deadline: Duration,
) -> Result<Demands, VmError> {
    let xml = connection.xml(domain, XmlFlags::default(), deadline).await.map_err(failed)?;
    let description = DomainDescription::parse(&xml).map_err(VmError::failed)?;
    let kept = Kept::ask(connection, domain, &description, deadline).await?;
    Ok(of(&description, &kept))
}

/// What libvirt keeps of a domain on its host, and says in no XML.
#[derive(Debug, Clone, Default)]
pub(crate) struct Kept {
    // Asked only of a domain that runs by emulation: it matters for no other.
    qemu: Option<Version>,
    snapshots: Vec<KnownSnapshot>,
    checkpoints: usize,
    has_managed_save: bool,
}

impl Kept {
    pub(crate) async fn ask(
        connection: &Connection,
        domain: &Domain,
        description: &DomainDescription,
        deadline: Duration,
    ) -> Result<Self, VmError> {
        let is_emulated = matches!(description.accelerator(), Ok(Accelerator::Tcg));
        let qemu = if is_emulated { Some(versions::of_qemu(connection, deadline).await?) } else { None };
        Ok(Self {
            qemu,
            snapshots: snapshots::known(connection, domain, deadline).await?,
            checkpoints: connection.checkpoints(domain, deadline).await.map_err(failed)?.len(),
            has_managed_save: connection.has_managed_save(domain, deadline).await.map_err(failed)?,
        })
    }

    fn obstacles(&self, spec: Option<&VmSpec>) -> impl Iterator<Item = Notice> {
        let snapshots = spec.and_then(|spec| snapshots::refusal(&self.snapshots, spec)).map(|what| Notice {
            what,
            remedy: "virsh snapshot-list DOMAIN shows them; virsh snapshot-delete DOMAIN NAME merges one, and with \
                     --metadata only forgets it"
                .into(),
        });
        let emulated = spec.and_then(|spec| self.lost_writes(spec.accelerator));
        let managed_save = self.has_managed_save.then(|| Notice {
            what: "libvirt has a saved state of it on this host (managed save), which would stay here".into(),
            remedy: "virsh managedsave-remove DOMAIN removes it".into(),
        });
        snapshots.into_iter().chain(managed_save).chain(emulated)
    }

    /// libvirt gives whole MiB, so that there is no padding; `virsh migrate` loses the same writes (docs/decisions/0019).
    fn lost_writes(&self, accelerator: Accelerator) -> Option<Notice> {
        let qemu = self.qemu.filter(|qemu| loses_writes(accelerator, *qemu))?;
        Some(Notice {
            what: format!(
                "it runs by emulation, without KVM, and QEMU {qemu} loses writes of such guests during a \
                migration: the guest could crash on the target"
            ),
            remedy:
                "let it use KVM (`<domain type='kvm'>`), or install QEMU 9.0 or later; then boot it again"
                    .into(),
        })
    }

    fn doubts(&self) -> impl Iterator<Item = Notice> {
        let checkpoints = (self.checkpoints > 0).then(|| Notice {
            what: format!("libvirt does not move its {} checkpoints to another host", self.checkpoints),
            remedy: "make a full backup there before the next incremental one".into(),
        });
        checkpoints.into_iter()
    }
}

/// The demands of a domain, by its description and what is kept of it; pure.
pub(crate) fn of(description: &DomainDescription, kept: &Kept) -> Demands {
    let doubts = description.doubts();
    let spec = description.vm_spec();
    let kept_obstacles = kept.obstacles(spec.as_ref().ok());
    let inexpressible = spec.as_ref().err().map_or(&[][..], Vec::as_slice);
    Demands {
        obstacles: (description.obstacles().iter().map(obstacle))
            .chain(kept_obstacles)
            .chain(inexpressible.iter().map(unclear))
            .collect(),
        doubts: doubts.iter().map(doubt).chain(kept.doubts()).collect(),
        needs: description.needs().into_iter().collect(),
    }
}

/// Each ends with a sentence that says what to do.
fn obstacle(obstacle: &Obstacle) -> Notice {
    let text = obstacle.to_string();
    let (what, remedy) = text.rsplit_once(". ").unwrap_or((&text, "shut the domain down"));
    Notice { what: what.into(), remedy: remedy.into() }
}

fn unclear(reason: &Inexpressible) -> Notice {
    Notice { what: reason.to_string(), remedy: "virsh edit DOMAIN changes it".into() }
}

fn doubt(doubt: &Doubt) -> Notice {
    Notice {
        what: doubt.to_string(),
        remedy: "virsh dumpxml DOMAIN shows it; virsh detach-device removes it".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const XML: &str = "<domain type='kvm'><name>web</name><uuid>5f0e5fc1-1d5c-4a3e-9d6c-0f1d7c4a5b60</uuid>\
                       <memory unit='MiB'>64</memory><vcpu>1</vcpu><os><type machine='pc-q35-7.2'>hvm</type></os>\
                       <devices></devices></domain>";

    fn domain(devices: &str) -> DomainDescription {
        DomainDescription::parse(&XML.replace("</devices>", &format!("{devices}</devices>"))).unwrap()
    }

    #[test]
    fn what_is_wrong_is_told_from_what_to_do() {
        let virtiofs = domain(
            "<filesystem type='mount'><driver type='virtiofs'/><source dir='/srv/x'/><target dir='data'/></filesystem>",
        );
        let [notice] = &of(&virtiofs, &Kept::default()).obstacles[..] else { panic!("{virtiofs:?}") };
        assert!(notice.what.contains("virtiofs device is not supported"), "{notice:?}");
        assert!(notice.remedy.starts_with("Unmount it in the guest"), "{notice:?}");
    }

    #[test]
    fn what_libvirt_keeps_beside_a_domain_is_told() {
        let snapshot = |xml: &str| KnownSnapshot { xml: xml.into(), is_current: false };
        let external = snapshot(
            "<domainsnapshot><name>before</name><memory snapshot='external' file='/x'/></domainsnapshot>",
        );
        let kept =
            Kept { snapshots: vec![external], checkpoints: 1, has_managed_save: true, ..Kept::default() };
        let demands = of(&domain(""), &kept);
        let what: Vec<&str> = demands.obstacles.iter().map(|notice| notice.what.as_str()).collect();
        assert!(what[0].contains("the snapshot before has data outside of the domain's disks"), "{what:?}");
        assert!(what[1].contains("managed save"), "{what:?}");
        assert_eq!((demands.doubts.len(), demands.needs), (1, vec![]));
        assert_eq!(of(&domain(""), &Kept::default()), Demands::default());
        let inside = snapshot("<domainsnapshot><name>before</name></domainsnapshot>");
        assert_eq!(of(&domain(""), &Kept { snapshots: vec![inside], ..Kept::default() }), Demands::default());
    }

    #[test]
    fn a_domain_of_which_qemu_loses_writes_stays() {
        let by = |hypervisor: &str, qemu: u32| {
            let text = XML.replace("type='kvm'", &format!("type='{hypervisor}'"));
            let kept = Kept { qemu: Some(Version { major: qemu, minor: 2, micro: 0 }), ..Kept::default() };
            of(&DomainDescription::parse(&text).unwrap(), &kept).obstacles
        };
        let [notice] = &by("qemu", 7)[..] else { panic!("one obstacle") };
        assert!(notice.what.contains("QEMU 7.2.0 loses writes"), "{notice:?}");
        assert!(by("qemu", 9).is_empty() && by("kvm", 7).is_empty());
    }
}
