//! This process's identity and those of its peers: the TLS configurations made from certificate and key.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, WantsServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, ConfigBuilder, RootCertStore, ServerConfig};
use x509_parser::certificate::X509Certificate;

use crate::credential::{Credential, WithAuthority};
use crate::files::{FileError, not_pem, read_certificates, read_private_key};
use crate::narrowed::Narrowed;
use crate::one_host::OneHost;
use crate::peer::{Peer, PeerError};
use crate::pinned::JOIN_PROTOCOL;
use crate::revocation::Revocations;
use crate::suites::{has_aes, provider};
use crate::validity::Validity;

/// Why certificate, key and authority are no identity.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// One of the files is missing, not private, or not what it should be.
    #[error(transparent)]
    File(#[from] FileError),
    /// The key belongs to another certificate.
    #[error(
        "private key {key} does not belong to certificate {certificate}: use both from one `drainpipe pki` run"
    )]
    KeyMismatch {
        /// The key.
        key: PathBuf,
        /// The certificate.
        certificate: PathBuf,
    },
    /// Too late.
    #[error("certificate {path} expired at {since}: replace it with `drainpipe pki`, and with --force")]
    Expired {
        /// The certificate.
        path: PathBuf,
        /// Its last moment.
        since: Timestamp,
    },
    /// Too early.
    #[error(
        "certificate {path} is not valid before {from}, and this host's clock says {now}: set the clock right"
    )]
    NotYetValid {
        /// The certificate.
        path: PathBuf,
        /// Its first moment.
        from: Timestamp,
        /// The time of the check.
        now: Timestamp,
    },
    /// The authority did not sign the certificate.
    #[error(
        "certificate {certificate} is not signed by the authority in {authority}: use the ca.pem that came with the certificate"
    )]
    OtherAuthority {
        /// The certificate.
        certificate: PathBuf,
        /// The authority's certificate.
        authority: PathBuf,
    },
    /// The certificate names no host or operator.
    #[error("{path}: {source}")]
    Holder {
        /// The certificate.
        path: PathBuf,
        /// What is wrong.
        source: PeerError,
    },
    /// What is to take the place of a certificate is somebody else's.
    #[error("the new certificate is of {0}, or of another authority: this host's was left as it is")]
    NoSuccessor(Peer),
    /// TLS takes the certificate or the key for something else.
    #[error("{path} cannot be used for TLS: {source}; replace it with `drainpipe pki`")]
    Unusable {
        /// The certificate, the key or the authority's certificate.
        path: PathBuf,
        /// What TLS says.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// A verified certificate with its key, and the authority whose other certificates are trusted.
///
/// Clones share the certificate, which may be replaced, and what is revoked. `Debug` shows the holder only.
#[derive(Clone)]
pub struct Identity {
    holder: Peer,
    authority: CertificateDer<'static>,
    authority_key: Vec<u8>,
    authority_not_after: Timestamp,
    credential: Arc<Credential>,
    revocations: Arc<Revocations>,
    verifier: Arc<dyn ClientCertVerifier>,
    server: Arc<ServerConfig>,
    client: ClientConfig,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Identity({})", self.holder)
    }
}

impl Identity {
    /// Reads and checks the three files: PEM, the key private, all belonging together and valid now.
    pub fn load(certificate: &Path, key: &Path, authority: &Path) -> Result<Self, LoadError> {
        let authorities = read_certificates(authority, "certificate of the authority")?;
        let chain = read_certificates(certificate, "certificate")?;
        let private_key = read_private_key(key)?;
        let paths = Paths { certificate, key, authority };
        let certified = paths.certified(&chain, &private_key)?;
        let (not_after, authority_not_after) = paths.check_validity(&chain, &authorities)?;
        let roots = paths.roots(&authorities)?;
        let verifier = paths.check_signature(&chain, &roots)?;
        let holder = Peer::from_certificate(&chain[0])
            .map_err(|source| LoadError::Holder { path: certificate.to_owned(), source })?;
        let unusable = |error| unusable(key, error);
        let authority_key = parse(authority, &authorities[0])?.public_key().raw.to_vec();
        let credential = Arc::new(Credential::new(certified, not_after));
        let revocations = Arc::<Revocations>::default();
        let verifier: Arc<dyn ClientCertVerifier> =
            Arc::new(Narrowed { verifier, check: Arc::<Revocations>::clone(&revocations) });
        Ok(Self {
            holder,
            authority: authorities[0].clone(),
            authority_key,
            authority_not_after,
            server: server_config(Arc::clone(&verifier), &credential).map_err(unusable)?,
            client: client_config(roots, &revocations, &credential)
                .map_err(|error| self::unusable(authority, error))?,
            verifier,
            credential,
            revocations,
        })
    }

    /// Reads what is to take the place of this certificate and key. Handshakes from now on have it, also those of
    /// clones and of configurations that were taken before.
    pub fn replace(&self, certificate: &Path, key: &Path, authority: &Path) -> Result<(), LoadError> {
        let new = Self::load(certificate, key, authority)?;
        if new.holder != self.holder || new.authority_key != self.authority_key {
            return Err(LoadError::NoSuccessor(new.holder));
        }
        self.credential.replace_by(&new.credential);
        Ok(())
    }

    /// Certificates that are refused before their end.
    pub fn revocations(&self) -> &Revocations {
        &self.revocations
    }

    /// The authority's certificate; of several the first.
    pub fn authority(&self) -> &CertificateDer<'static> {
        &self.authority
    }

    /// The holder of this certificate.
    pub fn holder(&self) -> &Peer {
        &self.holder
    }

    /// The authority's public key (`SubjectPublicKeyInfo`), which all of a fleet have in common; of
    /// several authorities the first one's.
    pub fn authority_key(&self) -> &[u8] {
        &self.authority_key
    }

    /// Until when the certificate is valid.
    pub fn not_after(&self) -> Timestamp {
        self.credential.not_after()
    }

    /// Until when the authority's certificate is valid; of several the one that ends first, since from then on
    /// the files do not load.
    pub fn authority_not_after(&self) -> Timestamp {
        self.authority_not_after
    }

    /// Until when this certificate, its authority's and those of a peer, which were verified already, are all valid.
    pub fn valid_with(&self, peers_chain: &[CertificateDer<'_>]) -> Timestamp {
        let ends = peers_chain.iter().filter_map(|certificate| {
            let parsed = x509_parser::parse_x509_certificate(certificate).ok()?.1;
            Some(Validity::of(&parsed).not_after)
        });
        let own = self.not_after();
        ends.chain([own, self.authority_not_after]).min().unwrap_or(own)
    }

    /// Serves peers that hold a certificate of the same authority, by TLS 1.3. Who the peer is,
    /// [`Peer::from_certificate`] says.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// As [`Self::server_config`], for one host of all: anybody else is refused during the handshake.
    pub fn server_config_for(&self, host: &str) -> ServerConfig {
        let check = Arc::new(OneHost(Peer::Host(host.to_owned())));
        let verifier = Arc::new(Narrowed { verifier: Arc::clone(&self.verifier), check });
        let builder =
            server_config_builder(verifier).expect("the same provider has TLS 1.3 for server_config");
        finish(builder.with_cert_resolver(Arc::clone(&self.server.cert_resolver)))
    }

    /// Serves a host that has no certificate yet and speaks [`JOIN_PROTOCOL`], by TLS 1.3. It is shown the authority's
    /// certificate too, whose fingerprint it knows. Nobody is known by a connection of this kind.
    pub fn join_server_config(&self) -> ServerConfig {
        let credential = Arc::clone(&self.credential);
        let shown = WithAuthority { credential, authority: self.authority.clone() };
        let builder = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .expect("the same provider has TLS 1.3 for server_config");
        let mut config = finish(builder.with_no_client_auth().with_cert_resolver(Arc::new(shown)));
        config.alpn_protocols = vec![JOIN_PROTOCOL.to_vec()];
        config
    }

    /// Connects to hosts of the same authority, by TLS 1.3. The server name must be the host's
    /// Drainpipe name, not its address.
    pub fn client_config(&self) -> ClientConfig {
        self.client.clone()
    }
}

fn server_config_builder(
    verifier: Arc<dyn ClientCertVerifier>,
) -> Result<ConfigBuilder<ServerConfig, WantsServerCert>, rustls::Error> {
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13])?;
    Ok(builder.with_client_cert_verifier(verifier))
}

fn server_config(
    verifier: Arc<dyn ClientCertVerifier>,
    credential: &Arc<Credential>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let builder = server_config_builder(verifier)?;
    Ok(Arc::new(finish(builder.with_cert_resolver(Arc::<Credential>::clone(credential)))))
}

fn finish(mut config: ServerConfig) -> ServerConfig {
    // A resumed session does not check the client's certificate again, so it could outlast it.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    // A client that is fast with AES offers it first. Here it is slow, which counts as well.
    config.ignore_client_order = !has_aes();
    config
}

fn client_config(
    roots: Arc<RootCertStore>,
    revocations: &Arc<Revocations>,
    credential: &Arc<Credential>,
) -> Result<ClientConfig, Box<dyn std::error::Error + Send + Sync>> {
    let verifier: Arc<dyn ServerCertVerifier> =
        WebPkiServerVerifier::builder_with_provider(roots, provider()).build()?;
    let verifier = Narrowed { verifier, check: Arc::<Revocations>::clone(revocations) };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_client_cert_resolver(Arc::<Credential>::clone(credential));
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The files of an identity, to name them in errors.
struct Paths<'a> {
    certificate: &'a Path,
    key: &'a Path,
    authority: &'a Path,
}

impl Paths<'_> {
    fn certified(
        &self,
        chain: &[CertificateDer<'static>],
        key: &PrivateKeyDer<'static>,
    ) -> Result<CertifiedKey, LoadError> {
        match CertifiedKey::from_der(chain.to_vec(), key.clone_key(), &provider()) {
            Ok(certified) => Ok(certified),
            Err(rustls::Error::InconsistentKeys(_)) => Err(LoadError::KeyMismatch {
                key: self.key.to_owned(),
                certificate: self.certificate.to_owned(),
            }),
            Err(error @ rustls::Error::InvalidCertificate(_)) => Err(unusable(self.certificate, error)),
            Err(error) => Err(unusable(self.key, error)),
        }
    }

    /// TLS does not look at the dates of an authority; so they are looked at here. Answers the last
    /// moment of the certificate, and that of all authorities.
    fn check_validity(
        &self,
        chain: &[CertificateDer<'static>],
        authorities: &[CertificateDer<'static>],
    ) -> Result<(Timestamp, Timestamp), LoadError> {
        let now = Timestamp::now();
        let mut authority_not_after = Timestamp::MAX;
        for authority in authorities {
            let not_after = check_dates(self.authority, &parse(self.authority, authority)?, now)?;
            authority_not_after = authority_not_after.min(not_after);
        }
        let not_after = check_dates(self.certificate, &parse(self.certificate, &chain[0])?, now)?;
        Ok((not_after, authority_not_after))
    }

    fn check_signature(
        &self,
        chain: &[CertificateDer<'static>],
        roots: &Arc<RootCertStore>,
    ) -> Result<Arc<dyn ClientCertVerifier>, LoadError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider())
            .build()
            .map_err(|error| unusable(self.authority, error))?;
        match verifier.verify_client_cert(&chain[0], &chain[1..], UnixTime::now()) {
            Ok(_) => Ok(verifier),
            Err(rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            )) => Err(LoadError::OtherAuthority {
                certificate: self.certificate.to_owned(),
                authority: self.authority.to_owned(),
            }),
            Err(error) => Err(unusable(self.certificate, error)),
        }
    }

    fn roots(&self, authorities: &[CertificateDer<'static>]) -> Result<Arc<RootCertStore>, LoadError> {
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority.clone()).map_err(|error| unusable(self.authority, error))?;
        }
        Ok(Arc::new(roots))
    }
}

fn unusable(path: &Path, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LoadError {
    LoadError::Unusable { path: path.to_owned(), source: source.into() }
}

fn parse<'a>(
    path: &Path,
    certificate: &'a CertificateDer<'static>,
) -> Result<X509Certificate<'a>, FileError> {
    x509_parser::parse_x509_certificate(certificate)
        .map(|(_, parsed)| parsed)
        .map_err(|error| not_pem(path, "certificate", &error))
}

fn check_dates(
    path: &Path,
    certificate: &X509Certificate<'_>,
    now: Timestamp,
) -> Result<Timestamp, LoadError> {
    let Validity { not_before, not_after } = Validity::of(certificate);
    if now > not_after {
        return Err(LoadError::Expired { path: path.to_owned(), since: not_after });
    }
    if now < not_before {
        return Err(LoadError::NotYetValid { path: path.to_owned(), from: not_before, now });
    }
    Ok(not_after)
}
