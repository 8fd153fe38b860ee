//! The watch's news about a path.

use std::fmt;

use super::SILENT_AFTER_MS;
use crate::format::{self, duration};

/// Why a path is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is heard from the other end.
    Silent,
    /// The other end hears nothing.
    OneWay,
    /// Small packets arrive and large ones do not, in one direction at least.
    LargePackets,
    /// Hellos were lost that many times within 6.4 s.
    Loss(u8),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent => write!(f, "nothing has come through for {}", duration(SILENT_AFTER_MS)),
            Self::OneWay => f.write_str("the other host receives nothing on it"),
            Self::LargePackets => f.write_str(
                "small packets come through and large ones do not; look for an MTU that is too small on the way",
            ),
            Self::Loss(times) => write!(f, "it lost packets {times} times within a few seconds"),
        }
    }
}

/// Why a path cannot be judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unwatched {
    /// No hello has come through since the beginning, though TCP did.
    Unheard,
    /// The other host's agent does not answer, or does not watch any more.
    AgentAway,
    /// The other host's agent has restarted, and has begun to watch again.
    AgentRestarted,
}

impl fmt::Display for Unwatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unheard => {
                "no hello comes through; open the migration ports for UDP too, in both firewalls"
            }
            Self::AgentAway => "the other host's agent does not watch it; look at that agent",
            Self::AgentRestarted => "the other host's agent has restarted, and is asked to watch again",
        })
    }
}

/// News about a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathNews {
    /// It went out.
    Out(Fault),
    /// It came back.
    Back,
    /// It carries so many Mb/s, or as many again, and has a share to fit.
    Carries(u64),
    /// It is not known whether it is fit.
    Unwatched(Unwatched),
    /// It is known again whether it is fit.
    Watched,
}

impl fmt::Display for PathNews {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Out(fault) => write!(f, "is out: {fault}"),
            Self::Back => f.write_str("is back"),
            Self::Carries(mbps) => write!(f, "counts as one of {}, by what it carries", format::mbps(*mbps)),
            Self::Unwatched(why) => write!(f, "is not watched: {why}"),
            Self::Watched => f.write_str("is watched now"),
        }
    }
}

/// The news, and the path that it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathChange {
    /// Which path.
    pub path: usize,
    /// What has become of it.
    pub news: PathNews,
}
