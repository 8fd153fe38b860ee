//! What `check --fix` may change on a host: kernel settings that can safely be changed while VMs run and migrations
//! are in flight, and that can be put back.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::format::exact_bytes;

/// Most that a TCP buffer may be raised to: 100 Gb/s with 10 ms there and back. A host with hundreds of
/// connections should not give each of them more.
pub const TCP_BUFFER_BYTES_MAX: u64 = 256 << 20;

/// One setting of a host's kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields, tag = "fix")]
pub enum Fix {
    /// A migration link takes what comes from an address to which another link leads (`rp_filter` = 2).
    LooseReversePathFilter {
        /// The link.
        link: String,
    },
    /// TCP may give one connection so much for receiving (`tcp_rmem`); never less than it may now.
    TcpReceiveBuffer {
        /// At most 256 MiB.
        bytes_max: u64,
    },
    /// TCP may give one connection so much for sending (`tcp_wmem`); never less than it may now.
    TcpSendBuffer {
        /// At most 256 MiB.
        bytes_max: u64,
    },
}

impl fmt::Display for Fix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LooseReversePathFilter { link } => write!(f, "rp_filter of {link} becomes 2 (loose)"),
            Self::TcpReceiveBuffer { bytes_max } => {
                write!(f, "the maximum in tcp_rmem becomes {}", exact_bytes(*bytes_max))
            }
            Self::TcpSendBuffer { bytes_max } => {
                write!(f, "the maximum in tcp_wmem becomes {}", exact_bytes(*bytes_max))
            }
        }
    }
}
