//! The holder of a certificate.

use std::fmt;

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::GeneralName;

use crate::name::{InvalidName, check_name};

const HOST_PREFIX: &str = "drainpipe:host:";
const OPERATOR_PREFIX: &str = "drainpipe:operator:";

/// The holder of a certificate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peer {
    /// The agent of the host of this name.
    Host(String),
    /// The person or program of this name.
    Operator(String),
}

/// Why a certificate does not say who holds it.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// Not X.509.
    #[error("the certificate cannot be decoded: {0}")]
    Malformed(String),
    /// No name of ours.
    #[error(
        "the certificate names neither a host nor an operator of Drainpipe: \
         make one with `drainpipe pki host` or `drainpipe pki operator`"
    )]
    NoRole,
    /// More than one name of ours.
    #[error("the certificate names several hosts or operators; it must name one")]
    SeveralRoles,
    /// A name that we never give.
    #[error("the certificate's holder: {0}")]
    Name(#[from] InvalidName),
}

impl Peer {
    /// The holder that a certificate names. The certificate must have been verified already, as
    /// that of [`rustls::CommonState::peer_certificates`] is: here, it is only read.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Result<Self, PeerError> {
        let malformed = |error: &dyn fmt::Display| PeerError::Malformed(error.to_string());
        let (_, parsed) =
            x509_parser::parse_x509_certificate(certificate).map_err(|error| malformed(&error))?;
        let alternative_names =
            parsed.subject_alternative_name().map_err(|error| malformed(&error))?.ok_or(PeerError::NoRole)?;
        let mut roles = alternative_names.value.general_names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => Self::from_uri(uri),
            _ => None,
        });
        let peer = roles.next().ok_or(PeerError::NoRole)?;
        if roles.next().is_some() {
            return Err(PeerError::SeveralRoles);
        }
        check_name(peer.name())?;
        Ok(peer)
    }

    /// The name, whatever the role.
    pub fn name(&self) -> &str {
        match self {
            Self::Host(name) | Self::Operator(name) => name,
        }
    }

    /// The URI that stands for the holder in a certificate.
    pub(crate) fn uri(&self) -> String {
        match self {
            Self::Host(name) => format!("{HOST_PREFIX}{name}"),
            Self::Operator(name) => format!("{OPERATOR_PREFIX}{name}"),
        }
    }

    fn from_uri(uri: &str) -> Option<Self> {
        let host = uri.strip_prefix(HOST_PREFIX).map(str::to_owned);
        let operator = uri.strip_prefix(OPERATOR_PREFIX).map(str::to_owned);
        host.map(Self::Host).or(operator.map(Self::Operator))
    }
}

/// "host a", "operator alice".
impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => write!(formatter, "host {name}"),
            Self::Operator(name) => write!(formatter, "operator {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, KeyPair, SanType};

    use super::*;

    fn certificate_with(uris: &[&str]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        let key = KeyPair::generate().unwrap();
        params.self_signed(&key).unwrap().der().clone()
    }

    #[test]
    fn the_uri_names_the_holder() {
        for peer in [Peer::Host("a.b".into()), Peer::Operator("alice".into())] {
            let certificate = certificate_with(&["https://elsewhere.example/", &peer.uri()]);
            assert_eq!(Peer::from_certificate(&certificate).unwrap(), peer);
        }
    }

    #[test]
    fn certificates_that_name_nobody_are_refused() {
        for uris in [&[][..], &["drainpipe:admin:root"], &["xdrainpipe:host:a"]] {
            let error = Peer::from_certificate(&certificate_with(uris)).unwrap_err();
            assert!(matches!(error, PeerError::NoRole), "{uris:?}: {error}");
        }
    }

    #[test]
    fn certificates_that_name_two_are_refused() {
        let certificate = certificate_with(&["drainpipe:host:a", "drainpipe:operator:b"]);
        let error = Peer::from_certificate(&certificate).unwrap_err();
        assert!(matches!(error, PeerError::SeveralRoles), "{error}");
    }

    #[test]
    fn names_that_we_never_give_are_refused() {
        for uri in ["drainpipe:host:", "drainpipe:host:../a", "drainpipe:operator:A"] {
            let error = Peer::from_certificate(&certificate_with(&[uri])).unwrap_err();
            assert!(matches!(error, PeerError::Name(_)), "{uri}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            prop_assert!(Peer::from_certificate(&bytes.into()).is_err());
        }

        #[test]
        fn a_damaged_certificate_is_judged(at in 0usize..400, bit in 0u8..8) {
            let mut bytes = certificate_with(&["drainpipe:host:a"]).to_vec();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let _ = Peer::from_certificate(&bytes.into());
        }
    }
}
