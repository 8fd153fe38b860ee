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
    /// The guest's memory.
    pub memory: MemoryStats,
    /// What disks there are to copy.
    pub disk_total_bytes: Option<u64>,
    /// Whether it succeeded, where libvirt says so.
    pub success: Option<bool>,
    /// Why it failed, where libvirt says so.
    pub error: Option<String>,
}

/// How far the guest's memory is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// All of it.
    pub total_bytes: Option<u64>,
    /// What has been sent of it, some of it more than once.
    pub processed_bytes: Option<u64>,
    /// What is still to go.
    pub remaining_bytes: Option<u64>,
    /// Pages that were nothing but zeros.
    pub constant_pages: Option<u64>,
    /// Pages that were sent as they are.
    pub normal_pages: Option<u64>,
    /// Pages that the guest changes.
    pub dirty_pages_per_second: Option<u64>,
    /// Bytes of a page.
    pub page_bytes: Option<u64>,
    /// How often all of it was gone through.
    pub iteration: Option<u64>,
    /// Speed at which it goes.
    pub bytes_per_second: Option<u64>,
}

impl JobStats {
    pub(crate) fn of(kind: JobKind, parameters: &[Parameter]) -> Self {
        let value =
            |name: &str| parameters.iter().find(|parameter| parameter.name == name).map(|found| &found.value);
        let figure = |name: &str| value(name).and_then(Value::as_u64);
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
            memory: MemoryStats::of(figure),
            disk_total_bytes: figure("disk_total"),
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

impl MemoryStats {
    fn of(figure: impl Fn(&str) -> Option<u64>) -> Self {
        Self {
            total_bytes: figure("memory_total"),
            processed_bytes: figure("memory_processed"),
            remaining_bytes: figure("memory_remaining"),
            constant_pages: figure("memory_constant"),
            normal_pages: figure("memory_normal"),
            dirty_pages_per_second: figure("memory_dirty_rate"),
            page_bytes: figure("memory_page_size"),
            iteration: figure("memory_iteration"),
            bytes_per_second: figure("memory_bps"),
        }
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
        assert_eq!((ended.operation, ended.memory.total_bytes), (Some(5), None));
    }

    #[test]
    fn a_job_that_has_ended_may_have_failed() {
        let success = |success| [Parameter { name: "success".into(), value: Value::Boolean(success) }];
        assert_eq!(JobStats::ended(&success(false)).kind, JobKind::Failed);
        assert_eq!(JobStats::ended(&success(true)).kind, JobKind::Completed);
        assert_eq!(JobStats::ended(&[]).kind, JobKind::Completed);
    }
}
