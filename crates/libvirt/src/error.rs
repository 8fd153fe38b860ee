use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::Domain;
use crate::xdr::{Decode, Decoder, Malformed};

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody answers at the socket, or not to us.
    #[error(
        "cannot connect to libvirt's socket {}: {source}; is its daemon running (`systemctl status libvirtd \
         virtqemud`), and may this process use the socket?",
        socket.display()
    )]
    CannotConnect {
        /// Path of the socket.
        socket: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The daemon wants to know who we are in a way that we have not.
    #[error(
        "libvirt's daemon at {} demands authentication ({wanted}), which Drainpipe does not support; run as \
        root, or set \
         `auth_unix_rw = \"none\"` in its configuration",
        socket.display()
    )]
    CannotAuthenticate {
        /// Path of the socket.
        socket: PathBuf,
        /// What it would take.
        wanted: String,
    },
    /// The connection has ended, so whether a call took effect is unknown.
    #[error("the connection to libvirt has ended: {0}")]
    Closed(String),
    /// No answer in time. The call may still take effect.
    #[error("libvirt did not answer `{what}` within {} ms", after.as_millis())]
    TimedOut {
        /// The call.
        what: &'static str,
        /// How long it waited.
        after: Duration,
    },
    /// What came, or was to go out, is not what the protocol has.
    #[error("not libvirt's protocol: {0}")]
    Protocol(String),
    /// libvirt refused, or failed.
    #[error("libvirt: {0}")]
    Libvirt(RemoteError),
}

/// What libvirt says when it refuses, or fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message} (error {code} of part {domain})")]
pub struct RemoteError {
    /// libvirt's number of the error (`VIR_ERR_…`).
    pub code: i32,
    /// libvirt's number of the part that it comes from (`VIR_FROM_…`).
    pub domain: i32,
    /// What it says to people.
    pub message: String,
}

impl Error {
    /// libvirt's number of the error, if it is libvirt that failed.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Libvirt(error) => Some(error.code),
            _ => None,
        }
    }

    /// The daemon's hypervisor, or its release, has no such call.
    pub fn is_no_support(&self) -> bool {
        self.code() == Some(3)
    }

    /// The call is for another of a modular libvirt's daemons, at whose socket nobody listens.
    pub fn is_no_daemon(&self) -> bool {
        // A system error of the remote protocol's part is also one of a daemon that has just ended, which is no lack.
        matches!(self, Self::Libvirt(RemoteError { code: 38, domain: 7, message })
            if message.contains("Failed to connect socket"))
    }

    /// Its arguments make no sense to this release.
    pub fn is_invalid_argument(&self) -> bool {
        self.code() == Some(8)
    }

    /// The hypervisor failed.
    pub fn is_operation_failed(&self) -> bool {
        self.code() == Some(9)
    }

    /// There is no such domain, or no more.
    pub fn is_no_domain(&self) -> bool {
        self.code() == Some(42)
    }

    /// There is no such storage pool, or no such volume in it.
    pub fn is_no_storage(&self) -> bool {
        matches!(self.code(), Some(49 | 50))
    }

    /// There is no such secret.
    pub fn is_no_secret(&self) -> bool {
        self.code() == Some(66)
    }

    /// What the domain is doing at present forbids it.
    pub fn is_operation_invalid(&self) -> bool {
        self.code() == Some(55)
    }

    /// Another job of the domain did not end in time.
    pub fn is_operation_timeout(&self) -> bool {
        self.code() == Some(68)
    }

    /// Somebody aborted the job.
    pub fn is_operation_aborted(&self) -> bool {
        self.code() == Some(78)
    }

    /// There is no such snapshot, or no more.
    pub fn is_no_snapshot(&self) -> bool {
        self.code() == Some(72)
    }

    /// The domain has no such metadata.
    pub fn is_no_metadata(&self) -> bool {
        self.code() == Some(80)
    }

    /// libvirt thinks that the migration could harm the guest's disks.
    pub fn is_migrate_unsafe(&self) -> bool {
        self.code() == Some(81)
    }

    /// This hypervisor cannot do it, or not with this domain.
    pub fn is_operation_unsupported(&self) -> bool {
        self.code() == Some(84)
    }

    /// A cancelled Finish has discarded the domain, as it should.
    pub fn is_migrate_finish_ok(&self) -> bool {
        self.code() == Some(93)
    }

    /// Whether the call may have taken effect, or may yet, although it has no result.
    pub fn is_outcome_unknown(&self) -> bool {
        matches!(self, Self::Closed(_) | Self::TimedOut { .. })
    }
}

impl Decode for RemoteError {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let (code, domain) = (from.i32()?, from.i32()?);
        let message = from.optional(Decoder::any_text)?;
        let _level = from.i32()?;
        let _domain = from.optional(Domain::decode)?;
        // The message, and words that went into it.
        let texts = [from.optional(Decoder::any_text)?, from.optional(Decoder::any_text)?];
        let _rest = from.optional(Decoder::any_text)?;
        let _numbers = (from.i32()?, from.i32()?);
        let _network = from.optional(|from| Ok((from.text()?, from.fixed::<16>()?)))?;
        let message = message.or_else(|| texts.into_iter().flatten().next());
        Ok(Self { code, domain, message: message.unwrap_or_else(|| "it does not say what is wrong".into()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xdr::Encoder;

    fn refused(code: i32, message: Option<&str>) -> RemoteError {
        let mut to = Encoder::default();
        to.i32(code);
        to.i32(10);
        to.optional_text(message);
        to.i32(2);
        to.bool(false);
        for text in [Some("%s"), Some("no domain"), None] {
            to.optional_text(text);
        }
        to.i64(-1);
        to.bool(false);
        Decoder::whole(&to.finish().unwrap()).unwrap()
    }

    #[test]
    fn an_error_says_what_libvirt_said() {
        let error = Error::Libvirt(refused(42, Some("Domain not found")));
        assert!(error.is_no_domain() && !error.is_outcome_unknown());
        assert_eq!(error.to_string(), "libvirt: Domain not found (error 42 of part 10)");
        assert_eq!(refused(1, None).message, "%s");
    }

    #[test]
    fn a_daemon_that_is_not_there_is_told_from_other_failures_of_the_system() {
        let of_part = |domain| {
            Error::Libvirt(RemoteError { code: 38, domain, message: "Failed to connect socket".into() })
        };
        assert!(of_part(7).is_no_daemon());
        assert!(!of_part(10).is_no_daemon());
    }

    #[test]
    fn whether_a_call_had_effect_is_said() {
        assert!(Error::Closed("gone".into()).is_outcome_unknown());
        assert!(Error::TimedOut { what: "resume", after: Duration::from_secs(1) }.is_outcome_unknown());
    }
}
