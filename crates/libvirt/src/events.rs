use crate::domain::Domain;
use crate::job_stats::JobStats;
use crate::packet::{Kind, Packet, REMOTE_PROGRAM};
use crate::parameters::PARAMETERS_MAX;
use crate::xdr::{Decode, Decoder, Malformed};

const LIFECYCLE_MESSAGE: i32 = 318;
const MIGRATION_ITERATION_MESSAGE: i32 = 359;
const JOB_COMPLETED_MESSAGE: i32 = 363;

/// What a daemon says unasked, once somebody has subscribed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DomainEvent {
    /// A domain came, went or changed what it does.
    Lifecycle {
        /// Which.
        domain: Domain,
        /// What happened.
        change: Lifecycle,
        /// libvirt's number of the details, which means something else for each change.
        detail: i32,
    },
    /// A job has ended.
    JobCompleted {
        /// The domain that it concerns.
        domain: Domain,
        /// How it went.
        stats: Box<JobStats>,
    },
    /// A migration goes through all of the memory once more.
    MigrationIteration {
        /// The domain that it concerns.
        domain: Domain,
        /// For the how manieth time.
        iteration: i32,
    },
}

impl DomainEvent {
    /// The domain that it is about.
    pub fn domain(&self) -> &Domain {
        match self {
            Self::Lifecycle { domain, .. }
            | Self::JobCompleted { domain, .. }
            | Self::MigrationIteration { domain, .. } => domain,
        }
    }
}

/// What happened to a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "they are what they are called")]
pub enum Lifecycle {
    Defined,
    Undefined,
    Started,
    Suspended,
    Resumed,
    Stopped,
    ShutDown,
    SuspendedByGuest,
    Crashed,
    Unknown(i32),
}

impl From<i32> for Lifecycle {
    fn from(number: i32) -> Self {
        match number {
            0 => Self::Defined,
            1 => Self::Undefined,
            2 => Self::Started,
            3 => Self::Suspended,
            4 => Self::Resumed,
            5 => Self::Stopped,
            6 => Self::ShutDown,
            7 => Self::SuspendedByGuest,
            8 => Self::Crashed,
            unknown => Self::Unknown(unknown),
        }
    }
}

/// What can be subscribed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    Lifecycle,
    MigrationIteration,
    JobCompleted,
}

impl Subject {
    pub(crate) const ALL: [Self; 3] = [Self::Lifecycle, Self::MigrationIteration, Self::JobCompleted];

    /// libvirt's number of it (`VIR_DOMAIN_EVENT_ID_…`).
    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Lifecycle => 0,
            Self::MigrationIteration => 20,
            Self::JobCompleted => 21,
        }
    }

    fn of_message(procedure: i32) -> Option<Self> {
        match procedure {
            LIFECYCLE_MESSAGE => Some(Self::Lifecycle),
            MIGRATION_ITERATION_MESSAGE => Some(Self::MigrationIteration),
            JOB_COMPLETED_MESSAGE => Some(Self::JobCompleted),
            _ => None,
        }
    }
}

/// What a packet says unasked; none if it is nothing that we know.
pub(crate) fn read_event(packet: &Packet) -> Option<Result<DomainEvent, Malformed>> {
    let header = packet.header;
    let is_message = (header.program, header.kind) == (REMOTE_PROGRAM, Kind::Message);
    let subject = Subject::of_message(header.procedure).filter(|_| is_message)?;
    Some(match subject {
        Subject::Lifecycle => Decoder::whole(&packet.payload).map(|LifecycleMessage(event)| event),
        Subject::MigrationIteration => Decoder::whole(&packet.payload).map(|IterationMessage(event)| event),
        Subject::JobCompleted => Decoder::whole(&packet.payload).map(|JobMessage(event)| event),
    })
}

struct LifecycleMessage(DomainEvent);
struct IterationMessage(DomainEvent);
struct JobMessage(DomainEvent);

/// Which subscription it comes by, and the domain that it is about.
fn decode_about(from: &mut Decoder<'_>) -> Result<Domain, Malformed> {
    let _subscription = from.i32()?;
    Domain::decode(from)
}

impl Decode for LifecycleMessage {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let domain = decode_about(from)?;
        Ok(Self(DomainEvent::Lifecycle { domain, change: from.i32()?.into(), detail: from.i32()? }))
    }
}

impl Decode for IterationMessage {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let domain = decode_about(from)?;
        Ok(Self(DomainEvent::MigrationIteration { domain, iteration: from.i32()? }))
    }
}

impl Decode for JobMessage {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let domain = decode_about(from)?;
        let stats = Box::new(JobStats::ended(&from.list(PARAMETERS_MAX)?));
        Ok(Self(DomainEvent::JobCompleted { domain, stats }))
    }
}
