//! Certificates that are no longer valid before their end: looked at in each handshake, from either side.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use rustls::{CertificateError, Error};

use crate::narrowed::Check;
use crate::peer::Peer;
use crate::validity::Validity;

/// The names whose certificates are revoked, and when that was: certificates that begin later are valid.
#[derive(Debug, Default)]
pub struct Revocations(RwLock<BTreeMap<Peer, Timestamp>>);

impl Revocations {
    /// From now on these, and no others.
    pub fn set(&self, revoked: BTreeMap<Peer, Timestamp>) {
        // One assignment leaves it whole.
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = revoked;
    }

    /// Whether a certificate is revoked, which was verified already.
    pub fn has(&self, certificate: &CertificateDer<'_>) -> bool {
        let revoked = self.0.read().unwrap_or_else(PoisonError::into_inner);
        // A certificate without a name is refused where the name is asked for.
        !revoked.is_empty()
            && Peer::from_certificate(certificate).is_ok_and(|peer| {
                revoked.get(&peer).is_some_and(|at| {
                    Validity::of_der(certificate).is_none_or(|validity| validity.not_before <= *at)
                })
            })
    }
}

impl Check for Revocations {
    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if self.has(certificate) { Err(CertificateError::Revoked.into()) } else { Ok(()) }
    }
}
