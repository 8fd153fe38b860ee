//! Who a certificate says that it is of.

#![no_main]

use std::num::NonZeroU32;

use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use drainpipe_identity::{Peer, check_name};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// What a certificate of a few kilobytes takes.
const HOLDS_BYTES: usize = 1 << 20;

/// Holds: who is named has a name that we give.
fn certificate(data: &[u8]) {
    if let Ok(peer) = Peer::from_certificate(&CertificateDer::from(data)) {
        check_name(peer.name()).expect("a name that is taken is one that we give");
    }
}

/// A certificate of a host, and one of an operator.
fn seeds() -> Vec<Vec<u8>> {
    let directory = tempfile::tempdir().expect("there is room for a few files");
    authority::init(directory.path(), &InitOptions::default()).expect("the directory is empty");
    let options = IssueOptions::valid_days(NonZeroU32::MIN);
    let host = authority::issue_host(directory.path(), "a", &options).expect("the authority is new");
    let operator =
        authority::issue_operator(directory.path(), "alice", &options).expect("the authority is new");
    let read = |path| CertificateDer::from_pem_file(path).expect("it was just written").to_vec();
    [host.certificate, operator.certificate].map(read).to_vec()
}

drainpipe_fuzz::target!(run: certificate, seeds: seeds, holds_bytes: HOLDS_BYTES);
