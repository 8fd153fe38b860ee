//! What a host says that nobody knows yet: a token, or a request for a certificate.

#![no_main]

use std::num::NonZeroU32;
use std::sync::LazyLock;

use drainpipe_identity::authority::{self, InitOptions};
use drainpipe_identity::{JoinToken, KeyRequest, Peer, Validity};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// What a request of a few kilobytes takes, and the certificate for it.
const HOLDS_BYTES: usize = 1 << 20;

static AUTHORITY: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
    let directory = tempfile::tempdir().expect("there is room for a few files");
    authority::init(directory.path(), &InitOptions::default()).expect("the directory is empty");
    directory
});

/// Holds: a token has one text. Whatever is asked for, the certificate is of the host that the authority names.
fn joining(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    if let Ok(token) = text.parse::<JoinToken>() {
        assert_eq!(token.to_string(), text);
    }
    let named = Peer::Host("b".into());
    if let Ok(pem) = authority::certify(AUTHORITY.path(), text, &named, Validity::days(NonZeroU32::MIN)) {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).expect("it was just made");
        assert_eq!(Peer::from_certificate(&certificate).expect("it names a host"), named);
    }
}

/// A token, and a request.
fn seeds() -> Vec<Vec<u8>> {
    let request = KeyRequest::new().expect("there is a key for everybody").request_pem;
    let token = format!("a:{}:{}", "0f".repeat(32), "9c".repeat(16));
    [request, token].map(String::into_bytes).to_vec()
}

drainpipe_fuzz::target!(run: joining, seeds: seeds, holds_bytes: HOLDS_BYTES);
