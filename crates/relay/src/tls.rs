//! The TLS 1.3 handshake, within a deadline, by rustls.

use std::io::{self, Read, Write};
use std::sync::Arc;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::ServerName;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, InsufficientSizeError, UnbufferedStatus,
};
use rustls::{ClientConfig, Error, ServerConfig, SupportedCipherSuite};

use crate::error::RelayError;
use crate::records::{Secrets, Session};

#[cfg(test)]
pub(crate) use self::test_hosts::two_hosts;

/// What a peer may send until the handshake is over, in bytes: its certificates, and one record more.
const HANDSHAKE_BYTES_MAX: usize = 64 << 10;

/// What a sender encrypts with.
#[derive(Debug, Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    host: ServerName<'static>,
}

impl ClientTls {
    /// For a receiver that has the certificate of `host`, and accepts that of `config`.
    pub fn new(mut config: ClientConfig, host: ServerName<'static>) -> Self {
        config.enable_secret_extraction = true;
        Self { config: Arc::new(config), host }
    }
}

/// What a receiver decrypts with.
#[derive(Debug, Clone)]
pub struct ServerTls(Arc<ServerConfig>);

impl ServerTls {
    /// For a sender that `config` accepts; it should be one only.
    pub fn new(mut config: ServerConfig) -> Self {
        config.enable_secret_extraction = true;
        Self(Arc::new(config))
    }
}

/// Begins to encrypt, as the one who connects.
pub(crate) fn connect(socket: impl Read + Write, tls: &ClientTls) -> Result<Session, RelayError> {
    let connection = UnbufferedClientConnection::new(Arc::clone(&tls.config), tls.host.clone())?;
    shake(connection, socket)
}

/// Begins to encrypt, as the one who was connected to.
pub(crate) fn accept(socket: impl Read + Write, tls: &ServerTls) -> Result<Session, RelayError> {
    shake(UnbufferedServerConnection::new(Arc::clone(&tls.0))?, socket)
}

/// Either end of a handshake.
trait Handshake: Sized {
    type Data;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;

    fn finish(self, early: &[u8], incoming: &[u8]) -> Result<Session, Error>;
}

impl Handshake for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn finish(self, early: &[u8], incoming: &[u8]) -> Result<Session, Error> {
        let suite = self.negotiated_cipher_suite();
        let (secrets, kernel) = self.dangerous_into_kernel_connection()?;
        session(suite, secrets, Box::new(kernel), early, incoming)
    }
}

impl Handshake for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, incoming: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(incoming)
    }

    fn finish(self, early: &[u8], incoming: &[u8]) -> Result<Session, Error> {
        let suite = self.negotiated_cipher_suite();
        let (secrets, kernel) = self.dangerous_into_kernel_connection()?;
        session(suite, secrets, Box::new(kernel), early, incoming)
    }
}

fn session(
    suite: Option<SupportedCipherSuite>,
    secrets: rustls::ExtractedSecrets,
    renewal: Box<dyn Secrets>,
    early: &[u8],
    incoming: &[u8],
) -> Result<Session, Error> {
    let suite = suite.and_then(|suite| suite.tls13()).ok_or(Error::HandshakeNotComplete)?;
    Session::new(suite, secrets, renewal, early, incoming)
}

/// What a state of the handshake asks for.
enum HandshakeStep {
    Again,
    Receive,
    Done,
    Failed(Error),
}

fn shake<H: Handshake>(mut connection: H, mut socket: impl Read + Write) -> Result<Session, RelayError> {
    let mut incoming = vec![0; HANDSHAKE_BYTES_MAX];
    let (mut filled, mut outgoing, mut early) = (0, vec![], vec![]);
    loop {
        let UnbufferedStatus { discard, state } = connection.process(&mut incoming[..filled]);
        let step = match state {
            Ok(ConnectionState::EncodeTlsData(data)) => encode(data, &mut outgoing),
            Ok(ConnectionState::TransmitTlsData(data)) => {
                socket.write_all(&outgoing).map_err(RelayError::wire)?;
                outgoing.clear();
                data.done();
                HandshakeStep::Again
            }
            Ok(ConnectionState::ReadTraffic(mut data)) => {
                // The peer's last word of the handshake came together with the first after it.
                while let Some(record) = data.next_record() {
                    early.extend_from_slice(record?.payload);
                }
                HandshakeStep::Again
            }
            Ok(ConnectionState::BlockedHandshake) => HandshakeStep::Receive,
            Ok(ConnectionState::WriteTraffic(_)) => HandshakeStep::Done,
            Ok(_) => HandshakeStep::Failed(Error::HandshakeNotComplete),
            Err(error) => HandshakeStep::Failed(error),
        };
        incoming.copy_within(discard..filled, 0);
        filled -= discard;
        match step {
            HandshakeStep::Again => {}
            HandshakeStep::Receive => filled += receive(&mut socket, &mut incoming[filled..])?,
            HandshakeStep::Done => return Ok(connection.finish(&early, &incoming[..filled])?),
            HandshakeStep::Failed(error) => {
                tell(&mut connection, &mut incoming[..filled], socket);
                return Err(error.into());
            }
        }
    }
}

fn receive(socket: &mut impl Read, room: &mut [u8]) -> Result<usize, RelayError> {
    if room.is_empty() {
        return Err(RelayError::Malformed("a handshake too long"));
    }
    loop {
        match socket.read(room) {
            Ok(0) => return Err(RelayError::Refused),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map_err(RelayError::wire),
        }
    }
}

fn encode<Data>(mut data: EncodeTlsData<'_, Data>, outgoing: &mut Vec<u8>) -> HandshakeStep {
    let begin = outgoing.len();
    loop {
        match data.encode(&mut outgoing[begin..]) {
            Ok(_) => return HandshakeStep::Again,
            Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => {
                outgoing.resize(begin + required_size, 0);
            }
            Err(EncodeError::AlreadyEncoded) => return HandshakeStep::Failed(Error::HandshakeNotComplete),
        }
    }
}

/// Tells the peer why, as far as it still listens: it has to tell its owner.
fn tell(connection: &mut impl Handshake, incoming: &mut [u8], mut socket: impl Write) {
    let mut outgoing = vec![];
    if let Ok(ConnectionState::EncodeTlsData(data)) = connection.process(incoming).state
        && let HandshakeStep::Again = encode(data, &mut outgoing)
    {
        drop(socket.write_all(&outgoing));
    }
}

#[cfg(test)]
mod test_hosts {
    use std::num::NonZeroU32;

    use drainpipe_identity::Identity;
    use drainpipe_identity::authority::{self, InitOptions, IssueOptions};

    use super::*;

    /// A sender and a receiver that accept each other, with certificates of an authority of their own.
    pub(crate) fn two_hosts() -> (ClientTls, ServerTls) {
        let directory = tempfile::tempdir().unwrap();
        authority::init(directory.path(), &InitOptions::default()).unwrap();
        let load = |name| {
            let options = IssueOptions::valid_days(NonZeroU32::MIN);
            let files = authority::issue_host(directory.path(), name, &options).unwrap();
            Identity::load(&files.certificate, &files.key, &files.authority).unwrap()
        };
        let client = ClientTls::new(load("a").client_config(), ServerName::try_from("b").unwrap());
        (client, ServerTls::new(load("b").server_config_for("a")))
    }
}
