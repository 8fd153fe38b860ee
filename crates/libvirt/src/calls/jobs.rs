use std::time::Duration;

use super::life::with_flags;
use crate::connection::Connection;
use crate::domain::Domain;
use crate::error::Error;
use crate::job_stats::JobStats;
use crate::procedure::{Procedure, remote, urgent};
use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

const ABORT_JOB: Procedure = urgent(164, "abort the job");
const BLOCK_JOB_INFO: Procedure = remote(238, "how far the copy of a disk is");
const JOB_STATS: Procedure = remote(298, "figures of the job");
const SET_MAX_DOWNTIME: Procedure = remote(166, "set the downtime");
const SET_MAX_SPEED: Procedure = remote(207, "set the speed");
const START_POST_COPY: Procedure = remote(364, "start post-copy");

/// Which job of a domain is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobStatsOf {
    /// The one under way.
    UnderWay,
    /// The last one that has ended, which libvirt then forgets.
    Completed,
    /// The same, and libvirt keeps it.
    CompletedKept,
}

/// How far a job is that copies a disk, or merges its images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockJob {
    /// What was gone through. As much as there is only where all is there, but for what the guest writes just now.
    pub done_bytes: u64,
    /// What there is to go through.
    pub total_bytes: u64,
}

/// None where there is no such job.
pub(super) struct FoundBlockJob(Option<BlockJob>);

impl Decode for FoundBlockJob {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let (is_found, _kind, _speed) = (from.i32()? != 0, from.i32()?, from.u64()?);
        let job = BlockJob { done_bytes: from.u64()?, total_bytes: from.u64()? };
        Ok(Self(is_found.then_some(job)))
    }
}

impl Connection {
    /// How far the job of a disk is, which `target` names as the guest does; none where it has none.
    pub async fn block_job(
        &self,
        domain: &Domain,
        target: &str,
        deadline: Duration,
    ) -> Result<Option<BlockJob>, Error> {
        let write = |to: &mut Encoder| {
            domain.encode(to);
            to.text(target);
            to.u32(0);
        };
        let FoundBlockJob(job) = self.call(BLOCK_JOB_INFO, write, deadline).await?;
        Ok(job)
    }

    /// Aborts the job that is under way. Once a migration's Perform has returned, this does nothing, and succeeds.
    pub async fn abort_job(&self, domain: &Domain, deadline: Duration) -> Result<(), Error> {
        self.call(ABORT_JOB, |to| domain.encode(to), deadline).await
    }

    /// How its job is going, or how the last one went.
    pub async fn job_stats(
        &self,
        domain: &Domain,
        of: JobStatsOf,
        deadline: Duration,
    ) -> Result<JobStats, Error> {
        self.call(JOB_STATS, |to| with_flags(to, domain, of.flags()), deadline).await
    }

    /// Pause that its migration may make.
    pub async fn migrate_set_max_downtime(
        &self,
        domain: &Domain,
        downtime_ms: u64,
        deadline: Duration,
    ) -> Result<(), Error> {
        self.call(SET_MAX_DOWNTIME, |to| with_figure(to, domain, downtime_ms), deadline).await
    }

    /// Speed that its migration may have.
    pub async fn migrate_set_max_speed(
        &self,
        domain: &Domain,
        mib_per_second: u64,
        deadline: Duration,
    ) -> Result<(), Error> {
        self.call(SET_MAX_SPEED, |to| with_figure(to, domain, mib_per_second), deadline).await
    }

    /// Has its migration go on after the switch-over; it must have been begun with `POSTCOPY`.
    pub async fn start_post_copy(&self, domain: &Domain, deadline: Duration) -> Result<(), Error> {
        self.call(START_POST_COPY, |to| with_flags(to, domain, 0), deadline).await
    }
}

fn with_figure(to: &mut Encoder, domain: &Domain, figure: u64) {
    domain.encode(to);
    to.u64(figure);
    to.u32(0);
}

impl JobStatsOf {
    fn flags(self) -> u32 {
        match self {
            Self::UnderWay => 0,
            Self::Completed => 1,
            Self::CompletedKept => 3,
        }
    }
}
