//! The files that a qcow2 image makes QEMU open: the image itself names them, so that its directory is allowed says
//! nothing about them.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use drainpipe_engine::host::vm_resources::NotAllowed;
use drainpipe_hypervisor::qcow2::{self, LENGTH_TOLD_BYTES, OtherFiles};
use rustix::fs::OFlags;

use super::Rules;
use super::opening::{FoundFile, Unusable, find};

/// Images that stand on each other.
const IMAGES_MAX: usize = 32;

/// Refuses an image that has QEMU open what VMs may not use, or that does not show what QEMU would open.
pub(super) fn check(rules: &Rules, path: &Path, image: &FoundFile) -> Result<(), NotAllowed> {
    let mut above = None;
    let mut at = path.to_owned();
    for _ in 0..IMAGES_MAX {
        let named = read(above.as_ref().unwrap_or(image))?;
        if let Some(data) = &named.data {
            resolve(rules, &at, data)?;
        }
        let Some(backing) = &named.backing else { return Ok(()) };
        let (path, file) = resolve(rules, &at, &backing.file)?;
        match backing.format.as_deref() {
            Some("raw") => return Ok(()),
            Some("qcow2") => (at, above) = (path, Some(file)),
            // QEMU would go by what is in the file, and other formats name files too.
            None => {
                let why = format!(
                    "it names `{}` without its format; set it with `qemu-img rebase -u -F`",
                    backing.file
                );
                return Err(NotAllowed::unclear(why));
            }
            Some(format) => {
                return Err(NotAllowed::unclear(format!(
                    "its backing image `{}` has the format {format}",
                    backing.file
                )));
            }
        }
    }
    Err(NotAllowed::unclear(format!("it has more than {IMAGES_MAX} backing images")))
}

/// The file that the image at this path names, as QEMU finds it.
fn resolve(rules: &Rules, image: &Path, named: &str) -> Result<(PathBuf, FoundFile), NotAllowed> {
    if !qcow2::is_path(named) {
        return Err(NotAllowed::names(named));
    }
    let path = image.parent().unwrap_or(image).join(named);
    match find(rules, &path) {
        Ok(file) => Ok((path, file)),
        Err(Unusable::Missing) => {
            Err(NotAllowed::unclear(format!("it names `{named}`, which does not exist")))
        }
        Err(Unusable::NotAllowed(_)) => Err(NotAllowed::names(named)),
    }
}

fn read(image: &FoundFile) -> Result<OtherFiles, NotAllowed> {
    let beginning = beginning(image).map_err(NotAllowed::unclear)?;
    qcow2::other_files(&beginning).map_err(NotAllowed::unclear)
}

/// No more than the image's first cluster.
fn beginning(image: &FoundFile) -> std::io::Result<Vec<u8>> {
    let mut file = File::from(image.open(OFlags::RDONLY)?);
    let mut bytes = Vec::new();
    file.by_ref().take(u64::try_from(LENGTH_TOLD_BYTES).unwrap_or(0)).read_to_end(&mut bytes)?;
    // Whoever reads the image reports what is wrong with it.
    let cluster = qcow2::first_cluster_bytes(&bytes).unwrap_or(LENGTH_TOLD_BYTES);
    let rest = u64::try_from(cluster.saturating_sub(bytes.len())).unwrap_or(0);
    file.take(rest).read_to_end(&mut bytes)?;
    Ok(bytes)
}
