use crate::parameters::{PARAMETERS_MAX, Parameter, Value};
use crate::xdr::{Decode, Decoder, Malformed};

/// Whether a domain has a job, and what became of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum JobKind {
    /// It has none.
    #[default]
    None,
    /// It has one, whose end is known.
    Bounded,
    /// It has one, whose end is not known: a migration is one.
    Unbounded,
    /// Its last one has completed.
    Completed,
    /// Its last one has failed.
    Failed,
    /// Its last one was aborted.
    Cancelled,
    /// Something that we do not know.
    Unknown(i32),
}

impl From<i32> for JobKind {
    fn from(number: i32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::Bounded,
            2 => Self::Unbounded,
            3 => Self::Completed,
            4 => Self::Failed,
            5 => Self::Cancelled,
            unknown => Self::Unknown(unknown),
        }
    }
}

impl JobKind {
    /// Whether there may be a job now.
    pub fn may_be_under_way(self) -> bool {
        matches!(self, Self::Bounded | Self::Unbounded | Self::Unknown(_))
    }
}

/// What libvirt says of a job, mostly a migration. A figure that is none was not said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobStats {
    /// Whether there is one, and what became of it.
    pub kind: JobKind,
    /// libvirt's number of what it does: 5 is a migration away, 4 one to here.
    pub operation: Option<i32>,
    /// Since it began.
    pub time_elapsed_ms: Option<u64>,
    /// How long the guest stood still, of a job that has ended.
    pub downtime_ms: Option<u64>,
    /// How long it would, of a job under way.
    pub downtime_expected_ms: Option<u64>,
    /// What came before the first byte.
    pub setup_ms: Option<u64>,
    /// Memory and disks together.
    pub data_total_bytes: Option<u64>,
    /// How many of them are there.
    pub data_processed_bytes: Option<u64>,
    /// How many of them are still to go.
    pub data_remaining_bytes: Option<u64>,
    /// The guest's memory.
    pub memory_total_bytes: Option<u64>,
    /// What has been sent of it, some of it more than once.
    pub memory_processed_bytes: Option<u64>,
    /// What is still to go.
    pub memory_remaining_bytes: Option<u64>,
    /// Pages that were nothing but zeros.
    pub memory_constant_pages: Option<u64>,
    /// Pages that were sent as they are.
    pub memory_normal_pages: Option<u64>,
    /// The bytes of these.
    pub memory_normal_bytes: Option<u64>,
    /// Pages that the guest changes.
    pub memory_dirty_pages_per_second: Option<u64>,
    /// Bytes of a page.
    pub memory_page_bytes: Option<u64>,
    /// How often all of the memory was gone through.
    pub memory_iteration: Option<u64>,
    /// Speed at which memory goes.
    pub memory_bytes_per_second: Option<u64>,
    /// Pages that the target asked for, in post-copy.
    pub memory_post_copy_requests: Option<u64>,
    /// What disks there are to copy.
    pub disk_total_bytes: Option<u64>,
    /// How many of them are there.
    pub disk_processed_bytes: Option<u64>,
    /// How many of them are still to go.
    pub disk_remaining_bytes: Option<u64>,
    /// Speed at which disks go.
    pub disk_bytes_per_second: Option<u64>,
    /// How much QEMU slows the guest down, by auto-converge.
    pub throttle_percent: Option<u64>,
    /// Whether it succeeded, where libvirt says so.
    pub success: Option<bool>,
    /// Why it failed, where libvirt says so.
    pub error: Option<String>,
}

impl JobStats {
    pub(crate) fn of(kind: JobKind, parameters: &[Parameter]) -> Self {
        let value =
            |name: &str| parameters.iter().find(|parameter| parameter.name == name).map(|found| &found.value);
        let figure = |name| value(name).and_then(Value::as_u64);
        let downtime_ms = figure("downtime");
        let is_under_way = kind.may_be_under_way();
        Self {
            kind,
            operation: figure("operation").and_then(|number| number.try_into().ok()),
            time_elapsed_ms: figure("time_elapsed"),
            // libvirt has one name for both.
            downtime_ms: downtime_ms.filter(|_| !is_under_way),
            downtime_expected_ms: downtime_ms.filter(|_| is_under_way),
            setup_ms: figure("setup_time"),
            data_total_bytes: figure("data_total"),
            data_processed_bytes: figure("data_processed"),
            data_remaining_bytes: figure("data_remaining"),
            memory_total_bytes: figure("memory_total"),
            memory_processed_bytes: figure("memory_processed"),
            memory_remaining_bytes: figure("memory_remaining"),
            memory_constant_pages: figure("memory_constant"),
            memory_normal_pages: figure("memory_normal"),
            memory_normal_bytes: figure("memory_normal_bytes"),
            memory_dirty_pages_per_second: figure("memory_dirty_rate"),
            memory_page_bytes: figure("memory_page_size"),
            memory_iteration: figure("memory_iteration"),
            memory_bytes_per_second: figure("memory_bps"),
            memory_post_copy_requests: figure("memory_postcopy_requests"),
            disk_total_bytes: figure("disk_total"),
            disk_processed_bytes: figure("disk_processed"),
            disk_remaining_bytes: figure("disk_remaining"),
            disk_bytes_per_second: figure("disk_bps"),
            throttle_percent: figure("auto_converge_throttle"),
            success: match value("success") {
                Some(Value::Boolean(success)) => Some(*success),
                _ => None,
            },
            error: match value("errmsg") {
                Some(Value::String(error)) => Some(error.clone()),
                _ => None,
            },
        }
    }

    /// As an event says it, which comes when a job has ended.
    pub(crate) fn ended(parameters: &[Parameter]) -> Self {
        let ended = Self::of(JobKind::Completed, parameters);
        if ended.success == Some(false) { Self { kind: JobKind::Failed, ..ended } } else { ended }
    }
}

impl Decode for JobStats {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let kind = from.i32()?.into();
        Ok(Self::of(kind, &from.list(PARAMETERS_MAX)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(kind: JobKind) -> JobStats {
        JobStats::of(kind, &[Parameter::large("downtime", 300), Parameter::int("operation", 5)])
    }

    #[test]
    fn the_pause_of_a_job_under_way_is_expected_only() {
        let under_way = stats(JobKind::Unbounded);
        assert_eq!((under_way.downtime_ms, under_way.downtime_expected_ms), (None, Some(300)));
        let ended = stats(JobKind::Completed);
        assert_eq!((ended.downtime_ms, ended.downtime_expected_ms), (Some(300), None));
        assert_eq!((ended.operation, ended.memory_total_bytes), (Some(5), None));
    }

    #[test]
    fn a_job_that_has_ended_may_have_failed() {
        let success = |success| [Parameter { name: "success".into(), value: Value::Boolean(success) }];
        assert_eq!(JobStats::ended(&success(false)).kind, JobKind::Failed);
        assert_eq!(JobStats::ended(&success(true)).kind, JobKind::Completed);
        assert_eq!(JobStats::ended(&[]).kind, JobKind::Completed);
    }
}
