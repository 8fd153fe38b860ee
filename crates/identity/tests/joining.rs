//! Certificates that are made on request, replaced while in use, and revoked; and how a host without one finds out whom
//! it talks to.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use drainpipe_identity::authority::{self, InitOptions};
use drainpipe_identity::{
    Fingerprint, Identity, JoinedFiles, KeyRequest, LoadError, Peer, Validity, explain, explain_join,
    join_config,
};
use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};
use tempfile::TempDir;

/// A fleet's authority, and the files of its hosts beside it.
struct Fleet(TempDir);

impl Fleet {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        authority::init(&directory.path().join("authority"), &InitOptions::default()).unwrap();
        Self(directory)
    }

    fn authority(&self) -> std::path::PathBuf {
        self.0.path().join("authority")
    }

    fn certify(&self, name: &str, files: &JoinedFiles, earliest: Timestamp) {
        let request = KeyRequest::new().unwrap();
        let validity = Validity::lasting(SignedDuration::from_hours(1), earliest);
        let peer = Peer::Host(name.into());
        let certificate =
            authority::certify(&self.authority(), &request.request_pem, &peer, validity).unwrap();
        files.keep_authority(&authority::certificate_pem(&self.authority()).unwrap()).unwrap();
        request.keep(files, &certificate).unwrap();
    }

    fn files(&self, name: &str) -> JoinedFiles {
        JoinedFiles::within(&self.0.path().join(name))
    }

    fn host(&self, name: &str) -> Identity {
        let files = self.files(name);
        self.certify(name, &files, Timestamp::MIN);
        load(&files)
    }
}

fn load(files: &JoinedFiles) -> Identity {
    Identity::load(&files.host, &files.host, &files.authority).unwrap()
}

/// A handshake in memory, as the client and the server see it: the certificates that each has received.
type Seen = Result<Option<Vec<u8>>, rustls::Error>;

fn shake(client: ClientConfig, server: Arc<ServerConfig>, expected: &'static str) -> [Seen; 2] {
    let name = ServerName::try_from(expected).unwrap();
    let mut client: Connection = ClientConnection::new(Arc::new(client), name).unwrap().into();
    let mut server: Connection = ServerConnection::new(server).unwrap().into();
    let (mut client_error, mut server_error) = (None, None);
    for _ in 0..10 {
        pass(&mut client, &mut server, &mut server_error);
        pass(&mut server, &mut client, &mut client_error);
    }
    [(client, client_error), (server, server_error)].map(|(connection, error)| match error {
        Some(error) => Err(error),
        None => Ok(connection.peer_certificates().map(|chain| chain[0].to_vec())),
    })
}

fn pass(from: &mut Connection, to: &mut Connection, error: &mut Option<rustls::Error>) {
    let mut wire = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut wire).unwrap();
    }
    let mut wire = wire.as_slice();
    while !wire.is_empty() && error.is_none() {
        to.read_tls(&mut wire).unwrap();
        *error = to.process_new_packets().err();
    }
}

#[test]
fn what_is_asked_for_is_a_key_and_no_name() {
    let fleet = Fleet::new();
    let b = fleet.host("b");
    assert_eq!(*b.holder(), Peer::Host("b".into()));
    let mode = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777
    };
    assert_eq!(mode(&fleet.files("b").host), 0o600);
    authority::certify(
        &fleet.authority(),
        "none",
        b.holder(),
        Validity::lasting(SignedDuration::from_hours(1), Timestamp::MIN),
    )
    .unwrap_err();
}

#[test]
fn a_certificate_is_replaced_in_configurations_that_are_in_use() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let (client, server) = (a.client_config(), b.server_config());
    let seen = || shake(client.clone(), Arc::clone(&server), "b").map(|seen| seen.unwrap().unwrap());
    let before = seen();
    for (identity, name) in [(&a, "a"), (&b, "b")] {
        let files = fleet.files(name);
        fleet.certify(name, &files.staged(), Timestamp::MIN);
        identity.replace(&files.staged().host, &files.staged().host, &files.authority).unwrap();
        files.take_staged().unwrap();
        load(&files);
    }
    let after = seen();
    assert!(before[0] != after[0] && before[1] != after[1]);
    // The certificate must be one for this host.
    let files = fleet.files("b");
    let refused = a.replace(&files.host, &files.host, &files.authority).unwrap_err();
    assert!(matches!(refused, LoadError::NoSuccessor(Peer::Host(name)) if name == "b"));
}

#[test]
fn a_revoked_certificate_is_refused_from_either_side_and_a_later_one_is_not() {
    let fleet = Fleet::new();
    let (a, c) = (fleet.host("a"), fleet.host("c"));
    let now = Timestamp::now();
    a.revocations().set(BTreeMap::from([(Peer::Host("c".into()), now)]));
    let [_, server] = shake(c.client_config(), a.server_config(), "a");
    assert!(explain(&server.unwrap_err()).unwrap().contains("revoked"));
    let [client, server] = shake(a.client_config(), c.server_config(), "c");
    assert!(explain(&client.unwrap_err()).unwrap().contains("revoked"));
    assert!(explain(&server.unwrap_err()).unwrap().contains("it is revoked"));
    // An operator with that name is somebody else, and so is a host that joins later.
    a.revocations().set(BTreeMap::from([(Peer::Operator("c".into()), now)]));
    assert!(shake(c.client_config(), a.server_config(), "a")[1].is_ok());
    let earlier = now - SignedDuration::from_secs(10);
    a.revocations().set(BTreeMap::from([(Peer::Host("c".into()), earlier)]));
    let files = fleet.files("c");
    fleet.certify("c", &files, earlier + SignedDuration::from_secs(1));
    assert!(shake(load(&files).client_config(), a.server_config(), "a")[1].is_ok());
    assert!(shake(c.client_config(), a.server_config(), "a")[1].is_err());
}

#[test]
fn who_has_a_token_tells_it_to_the_host_of_the_token_alone() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let token = Fingerprint::of(a.authority());
    let to_join = |identity: &Identity, authority: Fingerprint, host: &'static str| {
        let [client, _] = shake(join_config(authority), Arc::new(identity.join_server_config()), host);
        client.map(drop)
    };
    to_join(&a, token, "a").unwrap();
    // Another host of the same authority, and one of another authority with the same name.
    let other = Fleet::new();
    let elsewhere = other.host("a");
    for refused in [
        to_join(&b, token, "a"),
        to_join(&elsewhere, token, "a"),
        to_join(&a, Fingerprint::of(elsewhere.authority()), "a"),
    ] {
        let why = explain_join(&refused.unwrap_err()).unwrap();
        assert!(why.contains("so the token was not sent"), "{why}");
    }
    // A host that does not let others join demands a certificate, and does not show its authority's.
    let [client, server] = shake(join_config(token), a.server_config(), "a");
    assert!(explain_join(&client.unwrap_err()).unwrap().contains("it lets no host join now"));
    server.unwrap_err();
}

#[test]
fn the_authority_signs_nothing_that_could_be_taken_for_something_else() {
    let fleet = Fleet::new();
    let key = authority::public_key(&fleet.authority()).unwrap();
    let signature = authority::sign(&fleet.authority(), b"text").unwrap();
    assert!(authority::has_signed(&key, b"text", &signature));
    assert!(!authority::has_signed(&key, b"texts", &signature));
    assert!(!authority::has_signed(&key, b"text", &signature[1..]));
    assert!(!authority::has_signed(&[], b"text", &signature));
}
