//! An interrupted copy: whether the target keeps its part, and which copy may continue from it. A disk that its VM has
//! left can be continued from in the same way, when the VM comes back.
//!
//! Nobody relies on what a kept part holds. The next copy compares each range of it, by a digest, with what the source
//! has then, and sends what differs. So it does not matter what was durable when the copy broke, nor what the guest
//! has written since. A range that is found to be the same must be durable by the next flush, although no hypervisor
//! wrote it in this attempt: so whoever takes up a part first makes all of it durable.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{DiskCopy, DiskImage};

const SECONDS_PER_HOUR: u64 = 3600;

/// What is there of a disk whose copy was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptPart {
    /// What its file holds.
    pub image: DiskImage,
    /// What the guest sees of it.
    pub size_bytes: u64,
    /// What its file may take when all is there.
    pub room_bytes: u64,
}

/// What a file takes, and what is free beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRoom {
    /// What the file takes.
    pub taken_bytes: u64,
    /// What is free on its file system.
    pub free_bytes: u64,
}

/// Why nothing is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NotKept {
    /// Nobody wants it.
    #[error("this host keeps none (`keep_interrupted_h`)")]
    NotWanted,
    /// It could not be ended here.
    #[error("there is no room for the rest of it")]
    NoRoom,
}

impl KeptPart {
    /// The part that a copy has begun.
    pub fn of(copy: &DiskCopy) -> Self {
        Self { image: copy.image, size_bytes: copy.size_bytes, room_bytes: copy.room_bytes() }
    }

    /// Keeps the source's disk: a copy that comes back to it may continue from it. None if the copy is of another
    /// kind.
    pub fn of_source(copy: &DiskCopy) -> Option<Self> {
        (!copy.is_flattened).then(|| Self::of(copy))
    }

    /// Whether a copy may go on from it: the file must be like the one that would be made.
    pub fn is_like(&self, copy: &DiskCopy) -> bool {
        (self.image, self.size_bytes) == (copy.image, copy.size_bytes)
    }

    /// Until when it is kept, in seconds since 1970.
    pub fn until_s(&self, now_s: u64, keep_h: u32, room: FileRoom) -> Result<u64, NotKept> {
        if keep_h == 0 {
            return Err(NotKept::NotWanted);
        }
        if self.room_bytes.saturating_sub(room.taken_bytes) > room.free_bytes {
            return Err(NotKept::NoRoom);
        }
        Ok(now_s.saturating_add(u64::from(keep_h) * SECONDS_PER_HOUR))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::storage::{CopyReason, DiskName};

    fn copy(size_bytes: u64) -> DiskCopy {
        DiskCopy {
            disk: DiskName::at(0).unwrap(),
            from: "/srv/a".into(),
            to: "/srv/b".into(),
            image: DiskImage::Raw,
            size_bytes,
            allocated_bytes: 60,
            why: CopyReason::NotSeen,
            is_flattened: false,
            from_device: None,
        }
    }

    #[test]
    fn only_a_copy_of_the_same_kind_goes_on_from_it() {
        let part = KeptPart::of(&copy(100));
        assert!(part.is_like(&DiskCopy { to: "/srv/c".into(), allocated_bytes: 70, ..copy(100) }));
        assert!(!part.is_like(&copy(101)));
        assert!(!part.is_like(&DiskCopy { image: DiskImage::Qcow2 { cluster_bytes: 65_536 }, ..copy(100) }));
    }

    #[test]
    fn it_is_kept_for_as_long_as_is_wanted() {
        let part = KeptPart::of(&copy(100));
        let room = FileRoom { taken_bytes: 20, free_bytes: 40 };
        assert_eq!(part.until_s(1_000, 2, room), Ok(8_200));
        assert_eq!(part.until_s(1_000, 0, room), Err(NotKept::NotWanted));
        assert_eq!(part.until_s(1_000, 2, FileRoom { free_bytes: 39, ..room }), Err(NotKept::NoRoom));
    }

    proptest! {
        #[test]
        fn what_is_kept_has_room_for_its_rest(
            room_bytes: u64, taken_bytes: u64, free_bytes: u64, now_s: u64, keep_h: u32,
        ) {
            let part = KeptPart { room_bytes, ..KeptPart::of(&copy(100)) };
            if let Ok(until_s) = part.until_s(now_s, keep_h, FileRoom { taken_bytes, free_bytes }) {
                prop_assert!(room_bytes <= taken_bytes.saturating_add(free_bytes));
                prop_assert!(until_s > now_s || now_s == u64::MAX);
            }
        }
    }
}
