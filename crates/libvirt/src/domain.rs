use crate::xdr::{Decode, Decoder, Encode, Encoder, Malformed};

/// A VM as libvirt names it, at the time that it said so.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Domain {
    /// Its name, unique on its host.
    pub name: String,
    /// Its UUID, which decides where libvirt looks for it.
    pub uuid: [u8; 16],
    /// libvirt's number of it while it is active, running or paused; none while it is off.
    pub id: Option<i32>,
}

/// What a domain is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DomainState {
    /// libvirt does not say.
    NoState,
    /// Its guest runs.
    Running,
    /// Its guest waits for something.
    Blocked,
    /// Its guest is stopped, and there.
    Paused,
    /// Its guest is about to be off.
    ShuttingDown,
    /// There is nothing but its definition.
    Off,
    /// Its guest has crashed, and is kept to be looked at.
    Crashed,
    /// Its guest has suspended itself to memory.
    Suspended,
    /// Something that we do not know.
    Unknown(i32),
}

impl DomainState {
    /// Whether its guest may be running.
    pub fn may_run(self) -> bool {
        matches!(self, Self::NoState | Self::Running | Self::Blocked | Self::ShuttingDown | Self::Unknown(_))
    }
}

impl From<i32> for DomainState {
    fn from(number: i32) -> Self {
        match number {
            0 => Self::NoState,
            1 => Self::Running,
            2 => Self::Blocked,
            3 => Self::Paused,
            4 => Self::ShuttingDown,
            5 => Self::Off,
            6 => Self::Crashed,
            7 => Self::Suspended,
            unknown => Self::Unknown(unknown),
        }
    }
}

/// What a domain is doing, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainStatus {
    /// What it is doing.
    pub state: DomainState,
    /// libvirt's number of the reason, which means something else in each state.
    pub reason: i32,
}

impl DomainStatus {
    /// Paused, and still the source or the target of a migration.
    pub fn is_paused_by_migration(self) -> bool {
        (self.state, self.reason) == (DomainState::Paused, 2)
    }

    /// Paused, for its memory is missing in part: the connection of a post-copy failed.
    pub fn is_paused_by_failed_post_copy(self) -> bool {
        (self.state, self.reason) == (DomainState::Paused, 13)
    }
}

/// Figures of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainInfo {
    /// What it is doing.
    pub state: DomainState,
    /// Memory that it may have.
    pub memory_max_kib: u64,
    /// Memory that it has.
    pub memory_kib: u64,
    /// How many vCPUs it has.
    pub vcpus: u32,
    /// CPU time that it has used since it was started.
    pub cpu_time_ns: u64,
}

impl Encode for Domain {
    fn encode(&self, to: &mut Encoder) {
        to.text(&self.name);
        to.fixed(&self.uuid);
        to.i32(self.id.unwrap_or(-1));
    }
}

impl Decode for Domain {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let (name, uuid, id) = (from.text()?, from.fixed()?, from.i32()?);
        Ok(Self { name, uuid, id: Some(id).filter(|id| *id >= 0) })
    }
}

impl Decode for DomainStatus {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self { state: from.i32()?.into(), reason: from.i32()? })
    }
}

impl Decode for DomainInfo {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            state: from.i32()?.into(),
            memory_max_kib: from.u64()?,
            memory_kib: from.u64()?,
            vcpus: from.u32()?,
            cpu_time_ns: from.u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_that_is_off_has_no_number() {
        for id in [None, Some(0), Some(7)] {
            let domain = Domain { name: "vm".into(), uuid: [3; 16], id };
            let mut to = Encoder::default();
            domain.encode(&mut to);
            assert_eq!(Decoder::whole(&to.finish().unwrap()), Ok(domain));
        }
    }

    #[test]
    fn only_what_surely_stands_still_may_not_run() {
        assert!(DomainState::Unknown(99).may_run() && DomainState::Running.may_run());
        assert!(!DomainState::Paused.may_run() && !DomainState::Off.may_run());
    }
}
