//! What a daemon can be asked. Numbers and types are those of libvirt's `remote_protocol.x`.

mod agent;
mod domains;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;
mod host;
mod jobs;
mod life;
mod migration;
mod needed;
mod opening;
mod snapshots;

pub use self::domains::{MetadataOf, XmlFlags};
pub use self::host::{CapabilitiesOf, Version};
pub use self::jobs::{BlockJob, JobStatsOf};
pub use self::life::UndefineFlags;
pub use self::migration::{Begun, Finished, Prepared, migrate_flags, migrate_parameters};
pub use self::snapshots::{Checkpoint, Snapshot, snapshot_flags};

/// One bit for each that is set, the first one lowest.
fn bits<const COUNT: usize>(flags: [bool; COUNT]) -> u32 {
    flags.into_iter().rev().fold(0, |bits, flag| bits << 1 | u32::from(flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_flag_is_the_lowest_bit() {
        assert_eq!(bits([true, false, true]), 5);
        assert_eq!(bits([false; 3]), 0);
    }
}
