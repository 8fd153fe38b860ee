//! Tests that an HTTP client's error still explains a failed handshake.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::time::Duration;

use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use drainpipe_identity::{Identity, explain};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

const DAYS: NonZeroU32 = NonZeroU32::new(30).unwrap();
const DEADLINE: Duration = Duration::from_secs(20);

fn fleet() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    authority::init(directory.path(), &InitOptions::default()).unwrap();
    directory
}

fn host(fleet: &TempDir, name: &str) -> Identity {
    let issued = authority::issue_host(fleet.path(), name, &IssueOptions::valid_days(DAYS)).unwrap();
    Identity::load(&issued.certificate, &issued.key, &issued.authority).unwrap()
}

/// Answers one request, or fails to shake hands.
async fn serve(listener: TcpListener, identity: Identity) {
    let (socket, _) = listener.accept().await.unwrap();
    let acceptor = TlsAcceptor::from(identity.server_config());
    if let Ok(mut stream) = acceptor.accept(socket).await {
        let _ = stream.read(&mut [0; 4096]).await;
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";
        stream.write_all(answer).await.unwrap();
        let _ = stream.shutdown().await;
    }
}

/// Sends a request to `server` as `client`, which takes it for host "b".
async fn ask(client: &Identity, server: Identity) -> Result<String, reqwest::Error> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let task = tokio::spawn(serve(listener, server));
    let http = reqwest::Client::builder()
        .tls_backend_preconfigured(client.client_config())
        .no_proxy()
        .timeout(DEADLINE)
        .resolve("b", address)
        .build()
        .unwrap();
    let answer = http.get(format!("https://b:{}/", address.port())).send().await;
    tokio::time::timeout(DEADLINE, task).await.unwrap().unwrap();
    answer?.text().await
}

#[tokio::test]
async fn hosts_talk() {
    let fleet = fleet();
    let answer = ask(&host(&fleet, "a"), host(&fleet, "b")).await;
    assert_eq!(answer.unwrap(), "ok");
}

#[tokio::test]
async fn another_host_is_explained() {
    let fleet = fleet();
    let error = ask(&host(&fleet, "a"), host(&fleet, "c")).await.unwrap_err();
    let sentence = explain(&error).unwrap_or_else(|| panic!("not explained: {error:?}"));
    assert!(sentence.contains("host b was expected"), "{sentence}");
}

#[tokio::test]
async fn another_authority_is_explained() {
    let error = ask(&host(&fleet(), "a"), host(&fleet(), "b")).await.unwrap_err();
    let sentence = explain(&error).unwrap_or_else(|| panic!("not explained: {error:?}"));
    assert!(sentence.contains("another authority than ours"), "{sentence}");
}

/// With TLS 1.3, the client is done before the server has checked its certificate: the refusal arrives in place of the
/// answer.
#[tokio::test]
async fn a_refusal_by_the_server_is_explained() {
    let (ours, theirs) = (fleet(), fleet());
    let issued = authority::issue_host(theirs.path(), "a", &IssueOptions::valid_days(DAYS)).unwrap();
    let both = theirs.path().join("both.pem");
    let pem = |path| std::fs::read_to_string(path).unwrap();
    std::fs::write(&both, pem(ours.path().join("ca.pem")) + &pem(issued.authority)).unwrap();
    let a = Identity::load(&issued.certificate, &issued.key, &both).unwrap();
    let error = ask(&a, host(&ours, "b")).await.unwrap_err();
    let sentence = explain(&error).unwrap_or_else(|| panic!("not explained: {error:?}"));
    assert!(sentence.contains("the peer refused our certificate: another authority"), "{sentence}");
}
