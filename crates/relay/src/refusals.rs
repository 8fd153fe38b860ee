//! The receiver's log messages about connections that it has closed. Anybody may connect as often as they like, and
//! must not be able to fill the log.

use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::Mutex;

use tracing::{debug, warn};

use crate::error::RelayError;
use crate::sockets::lock;

/// What one receiver has told. Each kind of reason is told once, with who was the first: there are a dozen of them.
#[derive(Debug, Default)]
pub(crate) struct Refusals(Mutex<Vec<&'static str>>);

impl Refusals {
    /// A connection was closed before it said what it is.
    pub(crate) fn closed(&self, peer: SocketAddr, kind: &'static str) {
        self.tell(peer, kind, &kind);
    }

    /// A connection was closed for what it said.
    pub(crate) fn refused(&self, peer: SocketAddr, error: &RelayError) {
        self.tell(peer, kind(error), error);
    }

    fn tell(&self, peer: SocketAddr, kind: &'static str, why: &dyn Display) {
        if self.is_first(kind) {
            warn!(%peer, %why, "a connection to a relay was refused; more like it are logged at debug level");
        } else {
            debug!(%peer, %why, "a connection to a relay was refused");
        }
    }

    fn is_first(&self, kind: &'static str) -> bool {
        let mut logged = lock(&self.0);
        let is_first = !logged.contains(&kind);
        if is_first {
            logged.push(kind);
        }
        is_first
    }
}

/// Not the error's words: of some an unauthenticated peer chooses a part.
fn kind(error: &RelayError) -> &'static str {
    match error {
        RelayError::Malformed(what) => what,
        RelayError::Tls(rustls::Error::InvalidCertificate(_)) => "certificate",
        RelayError::Tls(rustls::Error::AlertReceived(_)) => "alert",
        RelayError::Tls(_) => "TLS",
        RelayError::NoAnswer => "silent",
        RelayError::Truncated => "ended",
        _ => "broken",
    }
}

#[cfg(test)]
mod tests {
    use rustls::CertificateError;

    use super::*;

    #[test]
    fn each_kind_of_reason_is_told_once() {
        let refusals = Refusals::default();
        let certificate = |error| RelayError::Tls(rustls::Error::InvalidCertificate(error));
        let is_logged = |error: &RelayError| refusals.is_first(kind(error));
        assert!(is_logged(&RelayError::Truncated), "an unauthenticated peer");
        assert!(is_logged(&RelayError::Malformed("another version")), "it does not hide the peer's");
        assert!(is_logged(&certificate(CertificateError::Expired)));
        for _ in 0..100 {
            assert!(!is_logged(&RelayError::Truncated));
            assert!(!is_logged(&certificate(CertificateError::UnknownIssuer)));
        }
    }
}
