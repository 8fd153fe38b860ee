//! Accepts only one host of all whose certificates the authority has signed.

use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Error};

use crate::narrowed::Check;
use crate::peer::Peer;

/// Accepts this host.
#[derive(Debug)]
pub(crate) struct OneHost(pub(crate) Peer);

impl Check for OneHost {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        match Peer::from_certificate(certificate) {
            Ok(peer) if peer == self.0 => Ok(()),
            _ => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }
}
