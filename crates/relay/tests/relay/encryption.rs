//! Encrypted relays with real certificates: nothing passes in the clear, and nobody but the one sender gets in.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZeroU32;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use drainpipe_identity::Identity;
use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use drainpipe_relay::{
    ClientTls, RelayError, Sender, SenderSettings, ServerTls, TOKEN_BYTES, Token, Treatment,
};
use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig, ClientConnection, StreamOwned};
use socket2::{Domain, Socket, Type};
use tempfile::TempDir;

use crate::support::{PATIENCE, TOKEN, Target, assert_waits_for_no_wire, eventually, start};

/// The text that fills a guest's memory.
const SECRET: &[u8] = b"the quick brown fox jumps over the lazy dog; ";

/// Hosts whose certificates one authority has signed.
pub(crate) struct Fleet(TempDir);

impl Fleet {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        authority::init(directory.path(), &InitOptions::default()).unwrap();
        Self(directory)
    }

    pub(crate) fn host(&self, name: &str) -> Identity {
        let options = IssueOptions { overwrite: true, ..IssueOptions::valid_days(NonZeroU32::MIN) };
        let files = authority::issue_host(self.0.path(), name, &options).unwrap();
        Identity::load(&files.certificate, &files.key, &files.authority).unwrap()
    }

    fn operator(&self, name: &str) -> Identity {
        let options = IssueOptions::valid_days(NonZeroU32::MIN);
        let files = authority::issue_operator(self.0.path(), name, &options).unwrap();
        Identity::load(&files.certificate, &files.key, &files.authority).unwrap()
    }
}

/// Host b, which expects host a.
fn host_b(of: fn(ServerTls) -> Treatment<ServerTls>, identity: &Identity) -> Target {
    Target::new(of(ServerTls::new(identity.server_config_for("a"))), 1)
}

/// Fails the test unless what a program gives to a sender comes out at its target.
fn assert_passes(sender: &Path, target: &Target) {
    let mut program = UnixStream::connect(sender).unwrap();
    program.write_all(SECRET).unwrap();
    drop(program);
    let mut arrived = vec![];
    target.program.accept().unwrap().0.read_to_end(&mut arrived).unwrap();
    assert_eq!(arrived, SECRET);
}

/// Fails the test unless host a can still send to host b.
fn assert_takes(b: &Target, a: &Identity) {
    let (sender, path) = start(b.settings(Treatment::Encrypted(to_b(a)), 1));
    assert_passes(&path, b);
    assert!(sender.error().is_none() && b.receiver.error().is_none());
}

pub(crate) fn to_b(identity: &Identity) -> ClientTls {
    ClientTls::new(identity.client_config(), ServerName::try_from("b").unwrap())
}

/// Stands between two hosts, sees everything that the sender sends, and may change it.
struct Middle {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Middle {
    fn before(destination: SocketAddr, change: fn(&mut Vec<u8>, usize) -> bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(vec![]));
        let seeing = Arc::clone(&seen);
        thread::spawn(move || {
            let sender = listener.accept().unwrap().0;
            let receiver = TcpStream::connect(destination).unwrap();
            let (mut answers, mut answered) = (receiver.try_clone().unwrap(), sender.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut answers, &mut answered));
            let (mut sender, mut receiver, mut bytes, mut count) = (sender, receiver, vec![0; 65_536], 0);
            while let Ok(read @ 1..) = sender.read(&mut bytes) {
                let mut piece = bytes[..read].to_vec();
                seeing.lock().unwrap().extend_from_slice(&piece);
                let goes_on = change(&mut piece, count);
                count += read;
                if receiver.write_all(&piece).is_err() || !goes_on {
                    break;
                }
            }
            drop(receiver.shutdown(Shutdown::Write));
        });
        Self { address, seen }
    }

    /// A sender that takes this for the target.
    fn sender_to(&self, target: &Target, treatment: Treatment<ClientTls>) -> (Sender, PathBuf) {
        start(SenderSettings { destination: self.address, ..target.settings(treatment, 1) })
    }
}

fn assert_closed(socket: &mut TcpStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut last = vec![];
    match socket.read_to_end(&mut last) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {}
        other => panic!("it is open: {other:?}"),
    }
}

#[test]
fn nothing_passes_in_the_clear_and_all_of_it_arrives() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let content: Vec<u8> = SECRET.iter().copied().cycle().take(3 << 20).collect();
    for is_packed in [false, true] {
        let target = host_b(if is_packed { Treatment::PackedAndEncrypted } else { Treatment::Encrypted }, &b);
        let middle = Middle::before(target.address, |_, _| true);
        let treatment = if is_packed { Treatment::PackedAndEncrypted } else { Treatment::Encrypted };
        let (sender, path) = middle.sender_to(&target, treatment(to_b(&a)));
        let mut program = UnixStream::connect(path).unwrap();
        let sent = content.clone();
        let writing = thread::spawn(move || program.write_all(&sent).unwrap());
        let mut arrived = vec![];
        target.program.accept().unwrap().0.read_to_end(&mut arrived).unwrap();
        writing.join().unwrap();
        assert!(arrived == content, "what goes in comes out");
        assert_eq!((sender.error().map(drop), target.receiver.error().map(drop)), (None, None));
        let suite = sender.cipher_suite().unwrap();
        assert!(suite.starts_with("TLS_") && !suite.contains("CBC"), "{suite}");
        assert_eq!(sender.figures().raw_bytes, content.len() as u64);
        let seen = middle.seen.lock().unwrap();
        assert_eq!(seen[..3], [22, 3, 1], "it begins with a ClientHello");
        assert!(seen.len() > 1 << 10, "{} bytes were seen", seen.len());
        for clear in [&SECRET[..12], &TOKEN.0[..8], b"DRPRELAY"] {
            assert!(!seen.windows(clear.len()).any(|window| window == clear), "{clear:?} was seen");
        }
    }
}

#[test]
fn a_program_that_is_to_stop_waits_for_no_wire() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let target = host_b(Treatment::Encrypted, &b);
    let (sender, path) = start(target.settings(Treatment::Encrypted(to_b(&a)), 1));
    assert_waits_for_no_wire(sender, path, &target);
}

#[test]
fn nobody_but_the_one_sender_gets_in_and_nobody_keeps_it_out() {
    let (fleet, others) = (Fleet::new(), Fleet::new());
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let target = host_b(Treatment::Encrypted, &b);
    let refused = |client: ClientConfig| {
        let client = ClientConnection::new(Arc::new(client), ServerName::try_from("b").unwrap()).unwrap();
        let mut stream = StreamOwned::new(client, TcpStream::connect(target.address).unwrap());
        stream.sock.set_read_timeout(Some(PATIENCE)).unwrap();
        drop(stream.write_all(&[&b"DRPRELAY\x03"[..], &TOKEN.0, &[0]].concat()));
        drop(stream.flush());
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "it was accepted");
    };
    refused(fleet.host("c").client_config());
    refused(fleet.operator("a").client_config());
    refused(others.host("a").client_config());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let anonymous = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptsAnybody(provider.clone())))
        .with_no_client_auth();
    refused(anonymous);
    let old = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AcceptsAnybody(provider)))
        .with_no_client_auth();
    refused(old);
    let clear = [&b"DRPRELAY\x03"[..], &TOKEN.0, &[0]].concat();
    let hello = [22, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    for garbage in [&clear[..], b"GET / HTTP/1.1\r\n\r\n", &[22, 3, 1, 0xff, 0xff], &vec![0; 70_000]] {
        let mut unauthenticated = TcpStream::connect(target.address).unwrap();
        drop(unauthenticated.write_all(garbage));
        assert_closed(&mut unauthenticated);
    }
    let mut truncated = TcpStream::connect(target.address).unwrap();
    truncated.write_all(&hello).unwrap();
    truncated.shutdown(Shutdown::Write).unwrap();
    assert_closed(&mut truncated);
    // More connections than there are places for, all of them silent to the end.
    let silent: Vec<TcpStream> = (0..80).map(|_| TcpStream::connect(target.address).unwrap()).collect();
    for mut unauthenticated in &silent {
        drop(unauthenticated.write_all(&hello));
    }
    assert_takes(&target, &a);
    assert!(TcpStream::connect(target.address).is_err(), "nobody listens any more");
}

#[test]
fn who_comes_from_elsewhere_takes_nobodys_place() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let treatment = Treatment::Encrypted(ServerTls::new(b.server_config_for("a")));
    let target = Target::of_sender(Some(Ipv4Addr::LOCALHOST.into()), treatment, 1);
    for _ in 0..80 {
        let unauthenticated = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        unauthenticated.bind(&SocketAddr::from(([127, 0, 0, 2], 0)).into()).unwrap();
        unauthenticated.connect(&target.address.into()).unwrap();
        assert_closed(&mut unauthenticated.into());
    }
    assert_takes(&target, &a);
}

/// Stands before a host, and closes this many connections once they have said hello. Returns how many have come.
fn closing_proxy_before(destination: SocketAddr, closes: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, come) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counting = Arc::clone(&come);
    thread::spawn(move || {
        for sender in listener.incoming() {
            let mut sender = sender.unwrap();
            let mut hello = [0; 3];
            sender.read_exact(&mut hello).unwrap();
            assert_eq!(hello, [22, 3, 1], "each one begins with a ClientHello");
            if counting.fetch_add(1, Ordering::SeqCst) < closes {
                continue;
            }
            let mut receiver = TcpStream::connect(destination).unwrap();
            receiver.write_all(&hello).unwrap();
            let (mut answers, mut answered) = (receiver.try_clone().unwrap(), sender.try_clone().unwrap());
            thread::spawn(move || io::copy(&mut answers, &mut answered));
            drop(io::copy(&mut sender, &mut receiver));
            drop(receiver.shutdown(Shutdown::Write));
        }
    });
    (address, come)
}

#[test]
fn who_is_shut_out_by_unauthenticated_peers_tries_again_with_another_handshake() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let target = host_b(Treatment::Encrypted, &b);
    let (destination, come) = closing_proxy_before(target.address, 4);
    let settings = target.settings(Treatment::Encrypted(to_b(&a)), 1);
    let (sender, path) = start(SenderSettings { destination, ..settings });
    assert_passes(&path, &target);
    assert_eq!((sender.error().map(drop), come.load(Ordering::SeqCst)), (None, 5));
}

#[test]
fn who_is_never_let_in_gives_up() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let target = host_b(Treatment::Encrypted, &b);
    let (destination, come) = closing_proxy_before(target.address, usize::MAX);
    let settings = target.settings(Treatment::Encrypted(to_b(&a)), 1);
    let (sender, path) = start(SenderSettings { destination, ..settings });
    let _program = UnixStream::connect(path).unwrap();
    eventually("it gives up", || sender.error().is_some());
    let error = sender.error().unwrap();
    assert!(matches!(error, RelayError::Refused | RelayError::Wire(_)), "{error:?}");
    assert_eq!(come.load(Ordering::SeqCst), 5);
}

#[test]
fn a_sender_without_the_token_is_told_that_it_is_refused() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let target = host_b(Treatment::Encrypted, &b);
    let settings = target.settings(Treatment::Encrypted(to_b(&a)), 1);
    let (sender, path) = start(SenderSettings { token: Token([41; TOKEN_BYTES]), ..settings });
    let _program = UnixStream::connect(path).unwrap();
    eventually("it is told", || sender.error().is_some());
    assert!(matches!(sender.error(), Some(RelayError::Refused)), "{:?}", sender.error());
    drop(sender);
    assert_takes(&target, &a);
}

#[test]
fn another_host_at_the_targets_address_gets_nothing() {
    let fleet = Fleet::new();
    let (a, c) = (fleet.host("a"), fleet.host("c"));
    let target = host_b(Treatment::Encrypted, &c);
    let middle = Middle::before(target.address, |_, _| true);
    let (sender, path) = middle.sender_to(&target, Treatment::Encrypted(to_b(&a)));
    let mut program = UnixStream::connect(path).unwrap();
    program.write_all(SECRET).unwrap();
    eventually("it is refused", || sender.error().is_some());
    let error = sender.error().unwrap();
    let is_expected = matches!(
        &error,
        RelayError::Tls(rustls::Error::InvalidCertificate(CertificateError::NotValidForNameContext { .. }))
    );
    assert!(is_expected, "{error:?}");
    assert!(drainpipe_identity::explain(&error).unwrap().contains("host b was expected"));
    let seen = middle.seen.lock().unwrap();
    assert!(!seen.windows(8).any(|window| window == &SECRET[..8]), "no fallback to clear text");
}

#[test]
fn who_does_not_speak_tls_gets_nothing() {
    let fleet = Fleet::new();
    let a = fleet.host("a");
    let target = Target::new(Treatment::Packed, 1);
    let (sender, path) = start(target.settings(Treatment::Encrypted(to_b(&a)), 1));
    let mut program = UnixStream::connect(path).unwrap();
    program.write_all(SECRET).unwrap();
    eventually("it is refused", || sender.error().is_some());
    assert!(target.receiver.error().is_none(), "to the receiver it is an unauthenticated peer");
}

// In the middle of the stream, long after the handshake.
const AT: usize = 1 << 20;
type Change = fn(&mut Vec<u8>, usize) -> bool;
type Expected = fn(&RelayError) -> bool;

#[test]
fn what_was_changed_or_cut_off_on_its_way_ends_it() {
    let fleet = Fleet::new();
    let (a, b) = (fleet.host("a"), fleet.host("b"));
    let cases: [(Change, Expected); 2] = [
        (
            |piece, count| {
                if count < AT && count + piece.len() >= AT {
                    piece[AT - count - 1] ^= 1;
                }
                true
            },
            |error| matches!(error, RelayError::Tls(rustls::Error::DecryptError) | RelayError::Malformed(_)),
        ),
        (|_, count| count < AT, |error| matches!(error, RelayError::Truncated)),
    ];
    let content: Vec<u8> = SECRET.iter().copied().cycle().take(3 << 20).collect();
    for (change, is_expected) in cases {
        let target = host_b(Treatment::Encrypted, &b);
        let middle = Middle::before(target.address, change);
        let (_sender, path) = middle.sender_to(&target, Treatment::Encrypted(to_b(&a)));
        let mut program = UnixStream::connect(path).unwrap();
        let sent = content.clone();
        thread::spawn(move || drop(program.write_all(&sent)));
        let mut arrived = vec![];
        target.program.accept().unwrap().0.read_to_end(&mut arrived).unwrap();
        assert!(arrived.len() < content.len() && content.starts_with(&arrived), "{} bytes", arrived.len());
        eventually("it says why", || target.receiver.error().is_some());
        let error = target.receiver.error().unwrap();
        assert!(is_expected(&error), "{error:?}");
    }
}

/// A client that checks nothing.
#[derive(Debug)]
struct AcceptsAnybody(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AcceptsAnybody {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
