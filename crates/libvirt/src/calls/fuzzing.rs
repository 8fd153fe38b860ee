use super::agent::OptionalText;
use super::domains::Domains;
use super::jobs::FoundBlockJob;
use super::migration::Cookie;
use super::needed::{Listed, Secret, Volume};
use super::opening::{AuthMethods, Truth};
use super::snapshots::List;
use super::{Begun, Checkpoint, Finished, Prepared, Snapshot, Version};
use crate::domain::{DomainInfo, DomainStatus};
use crate::job_stats::JobStats;
use crate::xdr::{Decode, Decoder};

/// Reads bytes as the answer to each call.
pub(crate) fn read_answers(payload: &[u8]) {
    read::<String>(payload);
    read::<OptionalText>(payload);
    read::<Truth>(payload);
    read::<AuthMethods>(payload);
    read::<Version>(payload);
    read::<Domains>(payload);
    read::<DomainStatus>(payload);
    read::<DomainInfo>(payload);
    read::<JobStats>(payload);
    read::<FoundBlockJob>(payload);
    read::<Listed>(payload);
    read::<Volume>(payload);
    read::<Secret>(payload);
    read::<List<Snapshot>>(payload);
    read::<List<Checkpoint>>(payload);
    read::<Cookie>(payload);
    read::<Begun>(payload);
    read::<Prepared>(payload);
    read::<Finished>(payload);
}

fn read<T: Decode>(payload: &[u8]) {
    drop(Decoder::whole::<T>(payload));
}
