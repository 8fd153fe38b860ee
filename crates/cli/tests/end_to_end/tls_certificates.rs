//! Certificates for QEMU's own TLS.

use std::fs;
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

/// The name in the target's certificate, which the source requires.
pub(crate) const TARGET_NAME: &str = "target.test";

/// Writes an authority, and what it has signed for either end, under the names that QEMU looks for.
pub(crate) fn write_certificates(directory: &Path) {
    let write = |name: &str, pem: String| fs::write(directory.join(name), pem).unwrap();
    let authority_key = KeyPair::generate().unwrap();
    let mut authority = named("authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    write("ca-cert.pem", authority.self_signed(&authority_key).unwrap().pem());
    let authority = Issuer::new(authority, authority_key);
    for (end, name) in [("server", TARGET_NAME), ("client", "source.test")] {
        let key = KeyPair::generate().unwrap();
        write(&format!("{end}-cert.pem"), named(name).signed_by(&key, &authority).unwrap().pem());
        write(&format!("{end}-key.pem"), key.serialize_pem());
    }
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}
