//! TLS 1.3 cipher suites, the one first that this processor is fastest with.

use std::sync::Arc;

use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::cipher_suite::{
    TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
};

/// What TLS is made with here.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    let cipher_suites = by_speed(has_aes());
    Arc::new(CryptoProvider { cipher_suites, ..rustls::crypto::ring::default_provider() })
}

/// The suites in order of preference. Without instructions for AES the third is several times as fast, and AES
/// in software may tell its key by the time it takes.
fn by_speed(has_aes: bool) -> Vec<SupportedCipherSuite> {
    let aes = [TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384];
    let chacha = [TLS13_CHACHA20_POLY1305_SHA256];
    if has_aes { [&aes[..], &chacha].concat() } else { [&chacha[..], &aes].concat() }
}

/// Whether this processor has instructions for AES-GCM: for AES, and for the multiplication that goes with it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_aes() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

/// Whether this processor has instructions for AES-GCM: for AES, and for the multiplication that goes with it.
#[cfg(target_arch = "aarch64")]
pub(crate) fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull")
}

/// For other processors, this is not known.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(crate) fn has_aes() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aes_comes_first_where_it_is_fast() {
        assert_eq!(by_speed(true)[0].suite(), rustls::CipherSuite::TLS13_AES_128_GCM_SHA256);
        assert_eq!(by_speed(false)[0].suite(), rustls::CipherSuite::TLS13_CHACHA20_POLY1305_SHA256);
        assert_eq!((by_speed(true).len(), by_speed(false).len()), (3, 3));
    }
}
