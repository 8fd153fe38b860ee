//! What unauthenticated peers say to either end of a relay.

#![no_main]

use std::num::NonZeroU32;
use std::sync::LazyLock;

use drainpipe_identity::Identity;
use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use drainpipe_relay::fuzzing::{self, HANDSHAKE_HOLDS_BYTES};
use drainpipe_relay::{ClientTls, ServerTls};
use rustls::pki_types::ServerName;

static ENDS: LazyLock<(ServerTls, ClientTls)> = LazyLock::new(ends);

/// The relay's ends on two hosts, which know each other.
fn ends() -> (ServerTls, ClientTls) {
    let directory = tempfile::tempdir().expect("there is room for a few files");
    authority::init(directory.path(), &InitOptions::default()).expect("the directory is empty");
    let load = |name| {
        let options = IssueOptions::valid_days(NonZeroU32::MIN);
        let files = authority::issue_host(directory.path(), name, &options).expect("the authority is new");
        Identity::load(&files.certificate, &files.key, &files.authority).expect("its files are new")
    };
    let host = ServerName::try_from("b").expect("a name of a host");
    (ServerTls::new(load("b").server_config_for("a")), ClientTls::new(load("a").client_config(), host))
}

fn handshake(data: &[u8]) {
    fuzzing::handshake(&ENDS.0, &ENDS.1, data);
}

fn seeds() -> Vec<Vec<u8>> {
    fuzzing::handshake_seeds(&ENDS.0, &ENDS.1)
}

drainpipe_fuzz::target!(run: handshake, seeds: seeds, holds_bytes: HANDSHAKE_HOLDS_BYTES);
