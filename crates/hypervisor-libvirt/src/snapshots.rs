//! What libvirt knows of a domain's snapshots, on its way.
//!
//! libvirt begins no migration of a domain that has snapshots. So it is told to forget them before, and told of them again
//! where the domain then stays. Until it has heard that, they are in a file of the agent's state, on the source and, from
//! before anything is sent, on the target too. The snapshots themselves are in the domain's disks, which both hosts see.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_hypervisor::VmError;
use drainpipe_hypervisor::spec::VmSpec;
use drainpipe_libvirt::{Connection, Domain, Error, snapshot_flags as flags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::domain;
use crate::errors::failed;

/// Most bytes of all snapshots of a domain, which go from agent to agent with one message.
const BYTES_MAX: usize = 384 << 10;

/// One of them, in the form in which libvirt is given it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KnownSnapshot {
    /// With passwords.
    pub(crate) xml: String,
    /// Whether the next one would be based on it.
    #[serde(default)]
    pub(crate) is_current: bool,
}

/// Why the first of them that does not go with its domain does not; pure.
pub(crate) fn refusal(snapshots: &[KnownSnapshot], spec: &VmSpec) -> Option<String> {
    let bytes: usize = snapshots.iter().map(|snapshot| snapshot.xml.len()).sum();
    if bytes > BYTES_MAX {
        let count = snapshots.len();
        return Some(format!(
            "libvirt's records of its {count} snapshots have {bytes} bytes, and at most {BYTES_MAX} go to another host"
        ));
    }
    let read = snapshots.iter().map(|snapshot| domain::snapshot(&snapshot.xml, spec));
    match read.collect::<Result<Vec<_>, _>>() {
        Err(left) => Some(left.to_string()),
        Ok(read) if !domain::are_in_order(&read) => {
            Some("its snapshots are not all different, or one comes before its parent".into())
        }
        Ok(_) => None,
    }
}

/// Those that libvirt knows, each after the one that it is based on.
pub(crate) async fn known(
    connection: &Connection,
    domain: &Domain,
    deadline: Duration,
) -> Result<Vec<KnownSnapshot>, VmError> {
    if connection.snapshot_count(domain, deadline).await.map_err(failed)? == 0 {
        return Ok(vec![]);
    }
    let current = connection.current_snapshot(domain, deadline).await.map_err(failed)?;
    let mut known = vec![];
    for snapshot in connection.snapshots(domain, deadline).await.map_err(failed)? {
        let xml = connection.snapshot_xml(&snapshot, deadline).await.map_err(failed)?;
        let is_current = current.as_ref().is_some_and(|current| current.name == snapshot.name);
        known.push(KnownSnapshot { xml, is_current });
    }
    Ok(known)
}

/// Has libvirt forget all of them, and leave the disks as they are.
pub(crate) async fn forget(
    connection: &Connection,
    domain: &Domain,
    deadline: Duration,
) -> Result<(), VmError> {
    // Children first: libvirt gives those of one that goes another parent.
    for snapshot in connection.snapshots(domain, deadline).await.map_err(failed)?.iter().rev() {
        match connection.forget_snapshot(snapshot, deadline).await {
            Err(error) if error.is_no_snapshot() => {}
            forgotten => forgotten.map_err(failed)?,
        }
    }
    Ok(())
}

/// Tells libvirt of them. It may know some of them already.
pub(crate) async fn tell(
    connection: &Connection,
    domain: &Domain,
    snapshots: &[KnownSnapshot],
    deadline: Duration,
) -> Result<(), Error> {
    for snapshot in snapshots {
        let flags = if snapshot.is_current { flags::REDEFINE | flags::CURRENT } else { flags::REDEFINE };
        connection.create_snapshot(domain, &snapshot.xml, flags, deadline).await?;
    }
    Ok(())
}

/// Where a domain's are kept on a host while libvirt does not know them there.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotFile(PathBuf);

impl SnapshotFile {
    /// Below an agent's state directory.
    pub(crate) fn of_domain(state_directory: &Path, uuid: Uuid) -> Self {
        Self(state_directory.join("snapshots").join(format!("{uuid}.json")))
    }

    /// Whether any are kept.
    pub(crate) fn exists(&self) -> bool {
        self.0.exists()
    }

    pub(crate) fn read(&self) -> Result<Vec<KnownSnapshot>, VmError> {
        let read = match fs::read(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
            read => read.and_then(|bytes| serde_json::from_slice(&bytes).map_err(io::Error::other)),
        };
        read.map_err(|error| self.failed("read", &error))
    }

    /// Whole or not at all, and so that a loss of power does not take it.
    pub(crate) fn write(&self, snapshots: &[KnownSnapshot]) -> Result<(), VmError> {
        self.try_write(snapshots).map_err(|error| self.failed("write", &error))
    }

    fn try_write(&self, snapshots: &[KnownSnapshot]) -> io::Result<()> {
        let directory = self.0.parent().unwrap_or(Path::new("/"));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let new = self.0.with_extension("new");
        let mut options = fs::OpenOptions::new();
        let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec(snapshots)?)?;
        file.sync_all()?;
        fs::rename(&new, &self.0)?;
        File::open(directory)?.sync_all()
    }

    /// libvirt knows them here, or the domain is another host's.
    pub(crate) fn remove(&self) -> Result<(), VmError> {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed("remove", &error)),
            _ => Ok(()),
        }
    }

    fn failed(&self, verb: &str, error: &io::Error) -> VmError {
        let path = self.0.display();
        VmError::failed(format!("cannot {verb} the records of the domain's snapshots, {path}: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::domain::DomainDescription;

    const DEBIAN: &str = include_str!("../tests/domains/debian.xml");

    fn one(name: &str, parent: &str) -> KnownSnapshot {
        let xml = format!("<domainsnapshot><name>{name}</name>{parent}{DEBIAN}</domainsnapshot>");
        KnownSnapshot { xml, is_current: false }
    }

    #[test]
    fn they_go_in_order_and_within_bounds() {
        let spec = DomainDescription::parse(DEBIAN).unwrap().vm_spec().unwrap();
        let chain = [one("a", ""), one("b", "<parent><name>a</name></parent>")];
        assert_eq!(refusal(&chain, &spec), None);
        let [first, second] = chain;
        let said = refusal(&[second, first], &spec).unwrap();
        assert!(said.contains("before its parent"), "{said}");
        let many: Vec<_> = (0..200).map(|number| one(&format!("s{number}"), "")).collect();
        assert!(refusal(&many, &spec).unwrap().contains("200 snapshots"));
    }

    #[test]
    fn they_are_kept_until_they_are_removed_and_nobody_else_reads_them() {
        let state = tempfile::tempdir().unwrap();
        let file = SnapshotFile::of_domain(state.path(), Uuid::from_u128(7));
        assert!(!file.exists() && file.read().unwrap().is_empty());
        let kept = vec![KnownSnapshot { is_current: true, ..one("a", "") }];
        file.write(&kept).unwrap();
        assert_eq!(file.read().unwrap(), kept);
        assert_eq!(fs::metadata(&file.0).unwrap().permissions().mode() & 0o777, 0o600);
        file.remove().unwrap();
        file.remove().unwrap();
        assert!(!file.exists());
    }
}
