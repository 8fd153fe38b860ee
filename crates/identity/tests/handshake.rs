//! Real TLS handshakes between hosts and operators, good and bad.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use drainpipe_identity::authority::{self, InitOptions, IssueOptions, Issued};
use drainpipe_identity::{Identity, Peer, explain};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::time_provider::TimeProvider;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use tempfile::TempDir;

const DAYS: NonZeroU32 = NonZeroU32::new(30).unwrap();

fn fleet() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    authority::init(directory.path(), &InitOptions::default()).unwrap();
    directory
}

fn load(issued: &Issued) -> Identity {
    Identity::load(&issued.certificate, &issued.key, &issued.authority).unwrap()
}

fn host(fleet: &TempDir, name: &str) -> Identity {
    load(&authority::issue_host(fleet.path(), name, &IssueOptions::valid_days(DAYS)).unwrap())
}

fn operator(fleet: &TempDir, name: &str) -> Identity {
    load(&authority::issue_operator(fleet.path(), name, &IssueOptions::valid_days(DAYS)).unwrap())
}

/// A clock two months ahead, when everything that [`DAYS`] limits has expired.
#[derive(Debug)]
struct Later;

impl TimeProvider for Later {
    fn current_time(&self) -> Option<UnixTime> {
        let two_months = Duration::from_hours(60 * 24);
        let now = UnixTime::now().as_secs();
        Some(UnixTime::since_unix_epoch(Duration::from_secs(now) + two_months))
    }
}

/// The peer that each side saw, or why it saw none.
struct Outcome {
    client: Result<Peer, rustls::Error>,
    server: Result<Peer, rustls::Error>,
}

/// A handshake in memory, until both sides are content or one gives up.
fn shake(client: ClientConfig, server: Arc<ServerConfig>, expected: &'static str) -> Outcome {
    let name = ServerName::try_from(expected).unwrap();
    let mut client: Connection = ClientConnection::new(Arc::new(client), name).unwrap().into();
    let mut server: Connection = ServerConnection::new(server).unwrap().into();
    let (mut client_error, mut server_error) = (None, None);
    for _ in 0..10 {
        pass(&mut client, &mut server, &mut server_error);
        pass(&mut server, &mut client, &mut client_error);
    }
    Outcome { client: outcome(&client, client_error), server: outcome(&server, server_error) }
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

fn outcome(connection: &Connection, error: Option<rustls::Error>) -> Result<Peer, rustls::Error> {
    if let Some(error) = error {
        return Err(error);
    }
    assert!(!connection.is_handshaking(), "the handshake never ended");
    assert_eq!(connection.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    let certificates = connection.peer_certificates().unwrap();
    Ok(Peer::from_certificate(&certificates[0]).unwrap())
}

fn explained(result: Result<Peer, rustls::Error>) -> String {
    let error = result.expect_err("the handshake must fail");
    explain(&error).unwrap_or_else(|| panic!("not explained: {error:?}"))
}

#[test]
fn hosts_of_one_authority_know_each_other() {
    let fleet = fleet();
    let (a, b) = (host(&fleet, "a"), host(&fleet, "b.example"));
    let outcome = shake(a.client_config(), b.server_config(), "b.example");
    assert_eq!(outcome.client.unwrap(), Peer::Host("b.example".into()));
    assert_eq!(outcome.server.unwrap(), Peer::Host("a".into()));
}

#[test]
fn where_one_host_is_expected_no_other_and_no_operator_is_accepted() {
    let fleet = fleet();
    let b = host(&fleet, "b");
    let server = || Arc::new(b.server_config_for("a"));
    let outcome = shake(host(&fleet, "a").client_config(), server(), "b");
    assert_eq!(outcome.server.unwrap(), Peer::Host("a".into()));
    for other in [host(&fleet, "c"), operator(&fleet, "a")] {
        let outcome = shake(other.client_config(), server(), "b");
        assert!(explained(outcome.server).contains("not of the host that was expected"));
        assert!(explained(outcome.client).contains("refused our certificate"));
    }
}

#[test]
fn an_operator_is_known_as_one() {
    let fleet = fleet();
    let (alice, b) = (operator(&fleet, "alice"), host(&fleet, "b"));
    let outcome = shake(alice.client_config(), b.server_config(), "b");
    assert_eq!(outcome.client.unwrap(), Peer::Host("b".into()));
    assert_eq!(outcome.server.unwrap(), Peer::Operator("alice".into()));
}

#[test]
fn an_operator_cannot_pass_for_a_host() {
    let fleet = fleet();
    let (a, b) = (host(&fleet, "a"), operator(&fleet, "b"));
    let outcome = shake(a.client_config(), b.server_config(), "b");
    assert!(explained(outcome.client).contains("an operator's certificate cannot serve"));
    assert!(explained(outcome.server).contains("refused our certificate"));
}

#[test]
fn a_host_of_another_authority_is_refused_by_both() {
    let (ours, theirs) = (fleet(), fleet());
    let (a, b) = (host(&ours, "a"), host(&theirs, "b"));
    let outcome = shake(a.client_config(), b.server_config(), "b");
    assert!(explained(outcome.client).contains("signed by another authority than ours"));
    assert!(explained(outcome.server).contains("another authority signed it"));
}

#[test]
fn a_client_of_another_authority_is_refused() {
    let (ours, theirs) = (fleet(), fleet());
    let options = IssueOptions::valid_days(DAYS);
    let mut a = authority::issue_host(theirs.path(), "a", &options).unwrap();
    let b = host(&ours, "b");
    // A client that trusts us, with a certificate that we do not trust.
    let trusting = ours.path().join("ca.pem");
    let both = theirs.path().join("both.pem");
    let pem = |path| std::fs::read_to_string(path).unwrap();
    std::fs::write(&both, pem(&trusting) + &pem(&a.authority)).unwrap();
    a.authority = both;
    let outcome = shake(load(&a).client_config(), b.server_config(), "b");
    assert!(explained(outcome.client).contains("another authority signed it"));
    assert!(explained(outcome.server).contains("signed by another authority than ours"));
}

#[test]
fn another_host_than_the_one_meant_is_refused_by_name() {
    let fleet = fleet();
    let (a, c) = (host(&fleet, "a"), host(&fleet, "c"));
    let outcome = shake(a.client_config(), c.server_config(), "b");
    let sentence = explained(outcome.client);
    assert!(
        sentence.starts_with("host b was expected, but the certificate presented is of host c:"),
        "{sentence}"
    );
}

#[test]
fn a_host_is_not_known_by_its_address() {
    let fleet = fleet();
    let (a, b) = (host(&fleet, "a"), host(&fleet, "b"));
    let outcome = shake(a.client_config(), b.server_config(), "127.0.0.1");
    assert!(explained(outcome.client).contains("host 127.0.0.1 was expected"));
}

#[test]
fn an_expired_server_is_refused_with_the_date() {
    let fleet = fleet();
    let (a, b) = (host(&fleet, "a"), host(&fleet, "b"));
    let mut client = a.client_config();
    client.time_provider = Arc::new(Later);
    let outcome = shake(client, b.server_config(), "b");
    let sentence = explained(outcome.client);
    let expired = format!("expired at {}", b.not_after());
    assert!(sentence.contains(&expired), "{sentence}");
    assert!(explained(outcome.server).contains("it has expired or is not valid yet, by the peer's clock"));
}

#[test]
fn an_expired_client_is_refused_with_the_date() {
    let fleet = fleet();
    let (a, b) = (host(&fleet, "a"), host(&fleet, "b"));
    let mut server = ServerConfig::clone(&b.server_config());
    server.time_provider = Arc::new(Later);
    let outcome = shake(a.client_config(), Arc::new(server), "b");
    let sentence = explained(outcome.server);
    let expired = format!("expired at {}", a.not_after());
    assert!(sentence.contains(&expired), "{sentence}");
    assert!(explained(outcome.client).contains("it has expired or is not valid yet, by the peer's clock"));
}

#[test]
fn a_client_without_a_certificate_is_refused() {
    let fleet = fleet();
    let b = host(&fleet, "b");
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(fleet.path().join("ca.pem")).unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let anonymous = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let outcome = shake(anonymous, b.server_config(), "b");
    assert!(explained(outcome.server).contains("presented no certificate"));
    assert!(explained(outcome.client).contains("none was presented"));
}

/// Over sockets, errors come wrapped: by rustls in I/O errors, by HTTP libraries in their own.
#[test]
fn a_failure_behind_other_errors_is_explained() {
    let fleet = fleet();
    let (a, c) = (host(&fleet, "a"), host(&fleet, "c"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut connection = ServerConnection::new(c.server_config()).unwrap();
        rustls::Stream::new(&mut connection, &mut socket).read(&mut [0; 16]).unwrap_err()
    });
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let name = ServerName::try_from("b").unwrap();
    let mut connection = ClientConnection::new(Arc::new(a.client_config()), name).unwrap();
    let error = rustls::Stream::new(&mut connection, &mut socket).write(b"x").unwrap_err();
    drop(socket);

    let wrapped = Wrapper(io::Error::other(Wrapper(error)));
    let sentence = explain(&wrapped).expect("explained");
    assert!(sentence.contains("host b was expected"), "{sentence}");
    let sentence = explain(&server.join().unwrap()).expect("explained");
    assert!(sentence.contains("the peer refused our certificate"), "{sentence}");
}

#[derive(Debug, thiserror::Error)]
#[error("request failed")]
struct Wrapper(#[source] io::Error);

#[test]
fn other_failures_are_not_explained() {
    let refused: &(dyn Error + 'static) = &io::Error::from(io::ErrorKind::ConnectionRefused);
    assert_eq!(explain(refused), None);
}

#[test]
fn a_peer_without_tls_is_recognised() {
    let fleet = fleet();
    let name = ServerName::try_from("b").unwrap();
    let config = Arc::new(host(&fleet, "a").client_config());
    let mut client = ClientConnection::new(config, name).unwrap();
    client.read_tls(&mut &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..]).unwrap();
    let error = client.process_new_packets().unwrap_err();
    assert!(explain(&error).expect("explained").contains("does not speak TLS on this port"));
}
