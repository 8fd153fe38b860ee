//! The certificate and key that this process shows. They may be replaced while it runs: handshakes from then on have the
//! new ones.

use std::sync::{Arc, PoisonError, RwLock};

use jiff::Timestamp;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::CertificateDer;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

/// What is shown now.
#[derive(Debug, Clone)]
struct Shown {
    certified: Arc<CertifiedKey>,
    not_after: Timestamp,
}

/// A certificate with its key.
#[derive(Debug)]
pub(crate) struct Credential(RwLock<Shown>);

impl Credential {
    pub(crate) fn new(certified: CertifiedKey, not_after: Timestamp) -> Self {
        Self(RwLock::new(Shown { certified: Arc::new(certified), not_after }))
    }

    /// Shows what another one does.
    pub(crate) fn replace_by(&self, other: &Self) {
        let shown = other.shown();
        // One assignment leaves it whole.
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = shown;
    }

    pub(crate) fn not_after(&self) -> Timestamp {
        self.shown().not_after
    }

    fn shown(&self) -> Shown {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ResolvesServerCert for Credential {
    fn resolve(&self, _client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown().certified)
    }
}

impl ResolvesClientCert for Credential {
    fn resolve(&self, _authorities: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.shown().certified)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Shows the authority's certificate too, to who has nothing of it but its fingerprint.
#[derive(Debug)]
pub(crate) struct WithAuthority {
    pub(crate) credential: Arc<Credential>,
    pub(crate) authority: CertificateDer<'static>,
}

impl ResolvesServerCert for WithAuthority {
    fn resolve(&self, _client: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let shown = self.credential.shown().certified;
        let mut chain = shown.cert.clone();
        chain.push(self.authority.clone());
        Some(Arc::new(CertifiedKey::new(chain, Arc::clone(&shown.key))))
    }
}
