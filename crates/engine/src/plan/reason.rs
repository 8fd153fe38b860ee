//! Why a plan is as it is.

use std::fmt;

use super::compression::NotCompressed;
use super::incapable::Incapable;
use super::making::{CORE_ENCRYPTS_MBPS, MULTICHANNEL_CONNECTIONS};
use super::rdma::NoRdma;
use super::spreading::NotSpread;
use crate::format::{duration, link_speed, rate};

/// One reason for what a plan is. Its words are for people.
#[derive(Debug, Clone, PartialEq)]
pub enum Reason {
    /// Post-copy was asked for.
    PostCopy,
    /// `direct` was asked for, and cannot be.
    NoRdma(NoRdma),
    /// `auto` found so many paths.
    SeveralPaths {
        /// How many.
        paths: usize,
        /// Why it does not take RDMA.
        no_rdma: NoRdma,
    },
    /// `auto` found one path.
    OnePath {
        /// Why it does not take RDMA.
        no_rdma: NoRdma,
    },
    /// Nothing can go over several paths.
    OverOnePath(NotSpread),
    /// The same, where that was to be.
    NoMultichannel(NotSpread),
    /// `auto` compresses, which sends memory in this share of the time.
    Compressed {
        /// That share; below 1.
        wire_share: f64,
    },
    /// It is not compressed, as was asked for.
    NotCompressed(NotCompressed),
    /// The hypervisor was to pack it, which this one does not.
    NotPackedByHypervisor(Incapable),
    /// It is compressed, as was asked for, and nobody knows whether that pays.
    CompressedUnweighed,
    /// Only the management network makes a path.
    OverManagement,
    /// These paths have no IPv6, which the migration addresses need.
    WithoutIpv6(Vec<String>),
    /// A path costs more than it brings.
    Standby {
        /// Its name.
        path: String,
        /// Its speed, in Mb/s.
        speed_mbps: f64,
        /// The time that it would save, in ms.
        brings_ms: f64,
        /// The time that it may cost, in ms.
        costs_ms: f64,
    },
    /// One connection would carry less, encrypted, than this path.
    SeveralEncrypt {
        /// Its name.
        path: String,
        /// Its speed, in Mb/s; absent where it is not known.
        speed_mbps: Option<u64>,
    },
    /// One connection, encrypted, may carry less than this path, and this hypervisor makes no more.
    OneEncrypts {
        /// The path's name.
        path: String,
        /// Which hypervisor.
        hypervisor: Incapable,
    },
    /// A limit is kept by the hypervisor, whose connections are not its agent's.
    LimitedByHypervisor {
        /// Which one.
        hypervisor: Incapable,
        /// The limit, in Mb/s.
        limit_mbps: u64,
    },
    /// These paths were tried, and cannot be used.
    Failed(Vec<FailedPath>),
    /// What another host says.
    Stated(String),
}

/// A path that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedPath {
    /// Its name.
    pub(super) path: String,
    /// What trying it has shown.
    pub(super) why: String,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PostCopy => f.write_str("over one connection, which post-copy needs in both directions"),
            Self::NoRdma(no_rdma) => no_rdma.fmt(f),
            Self::SeveralPaths { paths, no_rdma } => write!(f, "{paths} paths, {no_rdma}"),
            Self::OnePath { no_rdma } => write!(f, "one path only, {no_rdma}"),
            Self::OverOnePath(why) => write!(f, "over one path: {why}"),
            Self::NoMultichannel(why) => write!(f, "multichannel is not possible: {why}"),
            Self::Compressed { wire_share } => {
                write!(f, "compressed: takes {:.0} % of the time, as predicted", wire_share * 100.0)
            }
            Self::NotCompressed(why) => why.fmt(f),
            Self::NotPackedByHypervisor(hypervisor) => {
                write!(f, "uncompressed: {hypervisor} does not compress what it sends")
            }
            Self::CompressedUnweighed => f.write_str(
                "it cannot be predicted whether a relay keeps up with the paths, because a speed is not \
                known: set speed_mbps of the \
                 [[link]] in agent.toml",
            ),
            Self::OverManagement => f.write_str("over the management network: no other link makes a path"),
            Self::WithoutIpv6(paths) => {
                write!(f, "left out {}: no IPv6, which the migration addresses need", paths.join(", "))
            }
            Self::Standby { path, speed_mbps, brings_ms, costs_ms } => {
                let (brings, costs) = (duration(*brings_ms), duration(*costs_ms));
                write!(
                    f,
                    "{path} is on standby: with {} it brings {brings} and may cost {costs}",
                    rate(*speed_mbps / 1e3)
                )
            }
            Self::SeveralEncrypt { path, speed_mbps } => {
                write!(
                    f,
                    "{MULTICHANNEL_CONNECTIONS} connections share it, because a core of each host encrypts some {}, ",
                    link_speed(CORE_ENCRYPTS_MBPS)
                )?;
                match speed_mbps {
                    Some(speed_mbps) => write!(f, "less than the {} of {path}", link_speed(*speed_mbps)),
                    None => write!(f, "and the speed of {path} is not known"),
                }
            }
            Self::OneEncrypts { path, hypervisor } => write!(
                f,
                "one connection, encrypted, may carry less than {path}: {hypervisor} migrates over one connection only"
            ),
            Self::LimitedByHypervisor { hypervisor, limit_mbps } => {
                let limit = rate(*limit_mbps as f64 / 1e3);
                write!(f, "the limit of {limit} is left to {hypervisor}, whose connections no agent can pace")
            }
            Self::Failed(paths) => {
                let words: Vec<String> = paths.iter().map(ToString::to_string).collect();
                write!(f, "left out {}", words.join(", "))
            }
            Self::Stated(words) => f.write_str(words),
        }
    }
}

impl fmt::Display for FailedPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.why)
    }
}
