//! TLS to the host that has the authority, for a host that knows nothing of it but a token: the other end shows the
//! authority's certificate, which must have the token's fingerprint, and must be the host that the token names.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::suites::provider;
use crate::token::Fingerprint;

/// What a host that wants to join says it speaks, before anything else.
pub const JOIN_PROTOCOL: &[u8] = b"drainpipe-join/1";

/// Most certificates of the other end that are looked at: its own, and the authority's.
const CHAIN_LENGTH_MAX: usize = 4;

/// Connects to a host of the authority that has this fingerprint, without a certificate. The server name must be that of
/// the host.
pub fn join_config(authority: Fingerprint) -> ClientConfig {
    let provider = provider();
    let pinned = Pinned { authority, provider: Arc::clone(&provider) };
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])
        .expect("the provider has TLS 1.3")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(pinned))
        .with_no_client_auth();
    config.alpn_protocols = vec![JOIN_PROTOCOL.to_vec()];
    config
}

#[derive(Debug)]
struct Pinned {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl Pinned {
    /// Verifies as a host of the fleet does, once the authority is known.
    fn verifier(&self, shown: &[CertificateDer<'_>]) -> Result<Arc<WebPkiServerVerifier>, Error> {
        let shown = shown.iter().take(CHAIN_LENGTH_MAX);
        let authority = shown.into_iter().find(|certificate| Fingerprint::of(certificate) == self.authority);
        let authority = authority.ok_or(CertificateError::UnknownIssuer)?.clone().into_owned();
        let mut roots = RootCertStore::empty();
        roots.add(authority)?;
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&self.provider))
            .build()
            .map_err(|error| Error::General(error.to_string()))
    }
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // As an agent does that lets nobody join now.
        if intermediates.is_empty() {
            return Err(CertificateError::ApplicationVerificationFailure.into());
        }
        self.verifier(intermediates)?.verify_server_cert(end_entity, &[], server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.3 is required".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
