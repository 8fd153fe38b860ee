//! Certificates that are good no more before their end: looked at in each handshake, from either side.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use jiff::Timestamp;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use crate::peer::Peer;
use crate::validity::Validity;

/// Whose certificates are revoked, and when that was: those that begin later are others.
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
        // Who names nobody is refused by who asks for the name.
        !revoked.is_empty()
            && Peer::from_certificate(certificate).is_ok_and(|peer| {
                revoked.get(&peer).is_some_and(|at| {
                    Validity::of_der(certificate).is_none_or(|validity| validity.not_before <= *at)
                })
            })
    }

    fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), Error> {
        if self.has(certificate) { Err(CertificateError::Revoked.into()) } else { Ok(()) }
    }
}

/// What `verifier` accepts, but for what is revoked.
#[derive(Debug)]
pub(crate) struct NotRevoked<V: ?Sized> {
    pub(crate) revocations: Arc<Revocations>,
    pub(crate) verifier: Arc<V>,
}

impl ClientCertVerifier for NotRevoked<dyn ClientCertVerifier> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
        self.revocations.check(end_entity).map(|()| verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}

impl ServerCertVerifier for NotRevoked<dyn ServerCertVerifier> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let verified =
            self.verifier.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)?;
        self.revocations.check(end_entity).map(|()| verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
