//! Block devices as the two ends of a copy, and whether a copy may go there.
//!
//! A device's size is fixed, it holds something already, and it may be the very disk that is copied.

use serde::{Deserialize, Serialize};
use thiserror::Error;
use utoipa::ToSchema;

use super::{CopyReason, DeviceIdentifier, DeviceIdentifierKind, DiskCopy, DiskImage, DiskName};
use crate::format::exact_bytes;

/// How the device mapper's names of devices with several paths begin; those of logical volumes begin with `LVM-`.
const MULTIPATH: &str = "mpath-";

/// An entry of an image's tables of clusters, and one of its counts of references.
const ENTRY_BYTES: u64 = 8;
const COUNT_BYTES: u64 = 2;

/// An image's header, and what its tables take more where they grow.
const RESERVE_CLUSTERS: u64 = 4;

/// A block device, as its host knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskDevice {
    /// What it has.
    pub size_bytes: u64,
    /// The name that it has itself, the same on all hosts; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identifier: Option<DeviceIdentifier>,
}

/// Why a device takes no copy.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnfitDevice {
    /// Nobody has said that it may be overwritten.
    #[error(
        "it is a block device, and everything on it would be lost: to confirm that, name it with --disk {disk}={path}"
    )]
    NotAskedFor {
        /// Which disk was to go there.
        disk: DiskName,
        /// Where.
        path: String,
    },
    /// With a raw disk, the guest sees the device's size.
    #[error(
        "it has {} and {disk} has {}, and a guest must see the same size: make a device of {}, or copy the disk to a file",
        exact_bytes(*there_bytes), exact_bytes(*bytes), exact_bytes(*bytes)
    )]
    OtherSize {
        /// Which disk was to go there.
        disk: DiskName,
        /// What the disk has.
        bytes: u64,
        /// What the device has.
        there_bytes: u64,
    },
    /// An image may become as large as that.
    #[error(
        "it has {}, and the image of {disk} may take {}: make a device of so many, or copy the disk to a file",
        exact_bytes(*there_bytes), exact_bytes(*bytes)
    )]
    TooSmall {
        /// Which disk was to go there.
        disk: DiskName,
        /// What the image may take.
        bytes: u64,
        /// What the device has.
        there_bytes: u64,
    },
    /// Both hosts see it.
    #[error(
        "{disk} is already on this very disk: move the VM without --disk {disk}, because both hosts see it"
    )]
    TheSame {
        /// Which disk was to go there.
        disk: DiskName,
    },
    /// It has no name that tells.
    #[error(
        "{disk} may already be on this very disk, and nothing shows whether it is: if so, move the VM \
        without --disk {disk}; if not, name the device by a path that does not exist on the source"
    )]
    MaybeTheSame {
        /// Which disk was to go there.
        disk: DiskName,
    },
}

impl DiskDevice {
    /// Refuses a device of the target's that must not be overwritten by this copy, or does not fit it.
    pub fn check(&self, copy: &DiskCopy) -> Result<(), UnfitDevice> {
        let (disk, there_bytes) = (copy.disk, self.size_bytes);
        if copy.why != CopyReason::AskedFor {
            return Err(UnfitDevice::NotAskedFor { disk, path: copy.to.clone() });
        }
        if let Some(from) = &copy.from_device {
            self.check_other(from, copy)?;
        }
        match copy.image {
            DiskImage::Raw if copy.size_bytes != there_bytes => {
                Err(UnfitDevice::OtherSize { disk, bytes: copy.size_bytes, there_bytes })
            }
            DiskImage::Qcow2 { cluster_bytes } if image_bytes(copy, cluster_bytes) > there_bytes => {
                let bytes = image_bytes(copy, cluster_bytes);
                Err(UnfitDevice::TooSmall { disk, bytes, there_bytes })
            }
            DiskImage::Raw | DiskImage::Qcow2 { .. } => Ok(()),
        }
    }

    /// Refuses what is or may be the disk itself: it would be written to by two hosts.
    fn check_other(&self, from: &Self, copy: &DiskCopy) -> Result<(), UnfitDevice> {
        let disk = copy.disk;
        match (&from.identifier, &self.identifier) {
            (Some(one), Some(other)) if one == other => Err(UnfitDevice::TheSame { disk }),
            (Some(one), Some(other)) if may_be_of_one(one, other) => Err(UnfitDevice::MaybeTheSame { disk }),
            (Some(_), Some(_)) => Ok(()),
            _ if copy.from == copy.to => Err(UnfitDevice::MaybeTheSame { disk }),
            _ => Ok(()),
        }
    }
}

/// One host may know by several paths what another one knows by one, and these names are not compared.
fn may_be_of_one(one: &DeviceIdentifier, other: &DeviceIdentifier) -> bool {
    let is_multipath = |of: &DeviceIdentifier| {
        of.kind == DeviceIdentifierKind::DeviceMapper && of.value.starts_with(MULTIPATH)
    };
    one.kind != other.kind && (is_multipath(one) || is_multipath(other))
}

/// What the image of a disk may take when all of it is written. On a device it had room before, unless it has more now.
fn image_bytes(copy: &DiskCopy, cluster_bytes: u64) -> u64 {
    let whole = whole_image_bytes(copy.size_bytes, cluster_bytes);
    match &copy.from_device {
        Some(from) if !copy.is_flattened => whole.min(from.size_bytes),
        _ => whole,
    }
}

/// Tables for each cluster, and counts for all of these, which may stand twice while they grow.
fn whole_image_bytes(size_bytes: u64, cluster_bytes: u64) -> u64 {
    let cluster_bytes = cluster_bytes.max(1);
    let clusters_of = |entries: u64, bytes: u64| entries.saturating_mul(bytes).div_ceil(cluster_bytes);
    let data = size_bytes.div_ceil(cluster_bytes);
    let tables = clusters_of(data, ENTRY_BYTES);
    let table_of_tables = clusters_of(tables, ENTRY_BYTES);
    let named = data.saturating_add(tables).saturating_add(table_of_tables);
    let counts = clusters_of(named, COUNT_BYTES) + 1;
    let table_of_counts = clusters_of(counts, ENTRY_BYTES);
    let clusters = named.saturating_add(2 * (counts + table_of_counts)).saturating_add(RESERVE_CLUSTERS);
    clusters.saturating_mul(cluster_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn copy(image: DiskImage) -> DiskCopy {
        DiskCopy {
            disk: DiskName::at(0).unwrap(),
            from: "/dev/vg0/web".into(),
            to: "/dev/vg0/web".into(),
            image,
            size_bytes: GIB,
            allocated_bytes: GIB,
            why: CopyReason::AskedFor,
            is_flattened: false,
            from_device: None,
        }
    }

    fn device(size_bytes: u64, named: Option<(DeviceIdentifierKind, &str)>) -> DiskDevice {
        let identifier = named.map(|(kind, value)| DeviceIdentifier { kind, value: value.into() });
        DiskDevice { size_bytes, identifier }
    }

    fn refused(there: &DiskDevice, copy: &DiskCopy) -> String {
        there.check(copy).unwrap_err().to_string()
    }

    #[test]
    fn nothing_is_overwritten_that_nobody_has_named() {
        let unasked = DiskCopy { why: CopyReason::NotSeen, ..copy(DiskImage::Raw) };
        assert!(refused(&device(GIB, None), &unasked).contains("--disk vda=/dev/vg0/web"));
        assert_eq!(device(GIB, None).check(&copy(DiskImage::Raw)), Ok(()));
    }

    #[test]
    fn a_raw_disk_keeps_the_size_that_its_guest_sees() {
        for other_bytes in [GIB - 512, GIB + 512] {
            let said = refused(&device(other_bytes, None), &copy(DiskImage::Raw));
            assert!(said.contains(&GIB.to_string()) && said.contains(&other_bytes.to_string()), "{said}");
        }
    }

    #[test]
    fn an_image_has_room_for_all_that_it_may_hold() {
        let image = copy(DiskImage::Qcow2 { cluster_bytes: 65_536 });
        // According to `qemu-img measure`.
        let measured_bytes = 1_074_135_040;
        assert!(refused(&device(GIB, None), &image).contains("may take"));
        assert!(device(measured_bytes - 1, None).check(&image).is_err());
        assert_eq!(device(GIB + (4 << 20), None).check(&image), Ok(()));
        let from_device = Some(device(GIB, None));
        let moved = DiskCopy { to: "/dev/vg1/web".into(), from_device, ..image };
        assert_eq!(device(GIB, None).check(&moved), Ok(()), "it was good enough before");
        let flattened = DiskCopy { is_flattened: true, ..moved };
        assert!(device(GIB, None).check(&flattened).is_err());
    }

    #[test]
    fn no_disk_is_copied_to_itself() {
        use DeviceIdentifierKind::{DeviceMapper, Nvme, Scsi};
        let check = |from, there, to: &str| {
            let from_device = Some(device(GIB, from));
            device(GIB, there).check(&DiskCopy { from_device, to: to.into(), ..copy(DiskImage::Raw) })
        };
        let (here, other) = ("/dev/vg0/web", "/dev/vg1/web");
        let disk = DiskName::at(0).unwrap();
        let (the_same, maybe) = (Err(UnfitDevice::TheSame { disk }), Err(UnfitDevice::MaybeTheSame { disk }));
        let volume = |name| Some((DeviceMapper, name));
        assert_eq!(check(volume("LVM-a"), volume("LVM-a"), other), the_same);
        assert_eq!(check(volume("LVM-a"), volume("LVM-b"), here), Ok(()));
        assert_eq!(check(volume("LVM-a"), Some((Scsi, "naa.1")), here), Ok(()));
        assert_eq!(check(volume("mpath-3naa1"), Some((Scsi, "naa.1")), other), maybe);
        assert_eq!(check(Some((Nvme, "eui.1")), Some((Scsi, "naa.1")), other), Ok(()));
        assert_eq!(check(None, volume("LVM-a"), here), maybe);
        assert_eq!(check(None, None, here), maybe);
        assert_eq!(check(None, None, other), Ok(()));
    }

    proptest! {
        #[test]
        fn an_image_may_take_more_than_its_disk(size_bytes: u64, bits in 9_u32..=21) {
            let whole = whole_image_bytes(size_bytes, 1 << bits);
            prop_assert!(whole > size_bytes || whole == u64::MAX);
        }
    }
}
