//! The certificate authority of a fleet: a directory with its certificate and its key.
//!
//! ```text
//! ca.pem  ca.key
//! hosts/<name>/      host.pem      host.key      ca.pem
//! operators/<name>/  operator.pem  operator.key  ca.pem
//! ```
//! The directory of a host is all that the host needs. `ca.key` belongs on no host.

use std::fmt::Display;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SigningKey,
};
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use crate::files::{
    FileError, NewFile, check_absent, ensure_private_directory, not_pem, parse_certificates,
    read_private_key, read_text, write_all,
};
use crate::name::{InvalidName, check_name};
use crate::peer::Peer;
use crate::validity::Validity;

/// How long an authority lasts by default: ten years.
const AUTHORITY_VALID_DAYS: NonZeroU32 = NonZeroU32::new(3653).expect("not zero");

/// Longest common name that X.520 allows. It is for people; programs read the alternative names.
const COMMON_NAME_LENGTH_MAX: usize = 64;

/// Why an authority could not be made, or made no certificate.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// Bad name for a host or an operator.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// A file that cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// No authority there.
    #[error("{0} holds no certificate authority: make one with `drainpipe pki init`")]
    NoAuthority(PathBuf),
    /// `ca.key` and `ca.pem` do not belong together.
    #[error("{key} is not the key of {certificate}: restore both from the same backup")]
    KeyMismatch {
        /// The authority's key.
        key: PathBuf,
        /// The authority's certificate.
        certificate: PathBuf,
    },
    /// A certificate must not outlive its authority.
    #[error(
        "the certificate would be valid until {requested}, but its authority only until \
         {authority}: choose fewer days, or make a new authority with `drainpipe pki init`"
    )]
    OutlivesAuthority {
        /// End of the certificate asked for.
        requested: Timestamp,
        /// End of the authority.
        authority: Timestamp,
    },
    /// Ends before it begins.
    #[error("a certificate cannot be valid from {0} until {1}: the end must come after the beginning")]
    EmptyValidity(Timestamp, Timestamp),
    /// A request that is none.
    #[error("this is not a certificate request: {0}")]
    Request(rcgen::Error),
    /// A certificate could not be made.
    #[error("the certificate cannot be made: {0}")]
    Certificate(#[from] rcgen::Error),
}

/// How to make an authority.
#[derive(Debug, Clone, Copy)]
pub struct InitOptions {
    /// From when until when the authority, and so everything it signs, is valid.
    pub validity: Validity,
    /// Replace an authority that is there. No certificate of the old one is good afterwards.
    pub overwrite: bool,
}

/// Ten years, replacing nothing.
impl Default for InitOptions {
    fn default() -> Self {
        Self { validity: Validity::days(AUTHORITY_VALID_DAYS), overwrite: false }
    }
}

/// How to make a certificate of a host or an operator.
#[derive(Debug, Clone)]
pub struct IssueOptions {
    /// From when until when the certificate is valid.
    pub validity: Validity,
    /// Directory for the files, instead of the one inside the authority's.
    pub out: Option<PathBuf>,
    /// Replace a certificate and key that are there.
    pub overwrite: bool,
}

impl IssueOptions {
    /// Valid for so many days from now, in the authority's directory, replacing nothing.
    pub fn valid_days(days: NonZeroU32) -> Self {
        Self { validity: Validity::days(days), out: None, overwrite: false }
    }
}

/// What was made, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Issued {
    /// The holder of the certificate.
    pub peer: Peer,
    /// The certificate.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authority's certificate.
    pub authority: PathBuf,
    /// Until when the certificate is valid.
    pub not_after: Timestamp,
}

/// Makes an authority in `directory`; answers where its certificate is.
pub fn init(directory: &Path, options: &InitOptions) -> Result<PathBuf, AuthorityError> {
    let paths = AuthorityPaths::of(directory);
    let existing = [paths.certificate.clone(), paths.key.clone()];
    check_absent(&existing, options.overwrite)?;
    let key = KeyPair::generate()?;
    let certificate = authority_params(&key, options.validity)?.self_signed(&key)?;
    ensure_private_directory(directory)?;
    let key_pem = Zeroizing::new(key.serialize_pem());
    let certificate_pem = certificate.pem();
    let files = [secret_file(paths.key, &key_pem), public_file(paths.certificate.clone(), &certificate_pem)];
    write_all(&files, options.overwrite)?;
    Ok(paths.certificate)
}

/// Makes a certificate for the key of a request, signed by the authority in `directory`; answers it in PEM. Of the request
/// nothing but the key counts, which must have signed it.
pub fn certify(
    directory: &Path,
    request_pem: &str,
    peer: &Peer,
    validity: Validity,
) -> Result<String, AuthorityError> {
    check_name(peer.name())?;
    let request = CertificateSigningRequestParams::from_pem(request_pem).map_err(AuthorityError::Request)?;
    Ok(Authority::open(directory)?.sign(peer, &request.public_key, validity)?.pem())
}

/// Signs a message with the key of the authority in `directory`. No certificate can be taken for one: it begins with a
/// text that none does.
pub fn sign(directory: &Path, message: &[u8]) -> Result<Vec<u8>, AuthorityError> {
    Ok(Authority::open(directory)?.issuer.key().sign(&to_be_signed(message))?)
}

/// Whether the authority with this public key (`SubjectPublicKeyInfo`) has signed a message.
pub fn has_signed(authority_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
    let Ok((_, key)) = SubjectPublicKeyInfo::from_der(authority_key) else { return false };
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &key.subject_public_key.data);
    key.verify(&to_be_signed(message), signature).is_ok()
}

fn to_be_signed(message: &[u8]) -> Vec<u8> {
    [b"Drainpipe message of the authority, version 1\0", message].concat()
}

/// The public key (`SubjectPublicKeyInfo`) of the authority in `directory`.
pub fn public_key(directory: &Path) -> Result<Vec<u8>, AuthorityError> {
    Ok(Authority::open(directory)?.issuer.key().subject_public_key_info())
}

/// The authority's certificate, in PEM.
pub fn certificate_pem(directory: &Path) -> Result<String, AuthorityError> {
    Ok(Authority::open(directory)?.pem)
}

/// Makes the certificate of host `name`, signed by the authority in `directory`.
pub fn issue_host(directory: &Path, name: &str, options: &IssueOptions) -> Result<Issued, AuthorityError> {
    issue(directory, Peer::Host(name.to_owned()), options)
}

/// Makes the certificate of operator `name`, signed by the authority in `directory`.
pub fn issue_operator(
    directory: &Path,
    name: &str,
    options: &IssueOptions,
) -> Result<Issued, AuthorityError> {
    issue(directory, Peer::Operator(name.to_owned()), options)
}

fn issue(directory: &Path, peer: Peer, options: &IssueOptions) -> Result<Issued, AuthorityError> {
    check_name(peer.name())?;
    let authority = Authority::open(directory)?;
    let (holders, role) = match peer {
        Peer::Host(_) => ("hosts", "host"),
        Peer::Operator(_) => ("operators", "operator"),
    };
    let out = match &options.out {
        Some(out) => out.clone(),
        None => directory.join(holders).join(peer.name()),
    };
    let issued = Issued {
        certificate: out.join(format!("{role}.pem")),
        key: out.join(format!("{role}.key")),
        authority: out.join("ca.pem"),
        not_after: options.validity.to_the_second().not_after,
        peer,
    };
    check_absent(&[issued.certificate.clone(), issued.key.clone()], options.overwrite)?;
    let key = KeyPair::generate()?;
    let certificate = authority.sign(&issued.peer, &key, options.validity)?;
    ensure_private_directory(&out)?;
    write_issued(&issued, &key, &certificate, &authority.pem, options.overwrite)?;
    Ok(issued)
}

fn write_issued(
    issued: &Issued,
    key: &KeyPair,
    certificate: &Certificate,
    authority_pem: &str,
    overwrite: bool,
) -> Result<(), AuthorityError> {
    let key_pem = Zeroizing::new(key.serialize_pem());
    let certificate_pem = certificate.pem();
    let mut files = vec![
        secret_file(issued.key.clone(), &key_pem),
        public_file(issued.certificate.clone(), &certificate_pem),
    ];
    // One directory may hold certificates of a host and of an operator.
    let authority_there = read_text(&issued.authority, AUTHORITY_CERTIFICATE);
    if !authority_there.is_ok_and(|pem| pem == authority_pem) {
        files.push(public_file(issued.authority.clone(), authority_pem));
    }
    Ok(write_all(&files, overwrite)?)
}

fn secret_file(path: PathBuf, contents: &str) -> NewFile<'_> {
    NewFile { path, contents, mode: 0o600 }
}

fn public_file(path: PathBuf, contents: &str) -> NewFile<'_> {
    NewFile { path, contents, mode: 0o644 }
}

/// What `ca.pem` holds, for messages.
const AUTHORITY_CERTIFICATE: &str = "certificate of the authority";

struct AuthorityPaths {
    certificate: PathBuf,
    key: PathBuf,
}

impl AuthorityPaths {
    fn of(directory: &Path) -> Self {
        Self { certificate: directory.join("ca.pem"), key: directory.join("ca.key") }
    }
}

/// An authority, ready to sign.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
    validity: Validity,
}

impl Authority {
    fn open(directory: &Path) -> Result<Self, AuthorityError> {
        let AuthorityPaths { certificate, key } = AuthorityPaths::of(directory);
        if !certificate.exists() && !key.exists() {
            return Err(AuthorityError::NoAuthority(directory.to_owned()));
        }
        let pem = read_text(&certificate, AUTHORITY_CERTIFICATE)?;
        let der = parse_certificates(&certificate, AUTHORITY_CERTIFICATE, &pem)?.swap_remove(0);
        let key_pair = KeyPair::try_from(&read_private_key(&key)?)
            .map_err(|error| not_pem(&key, "private key", &error))?;
        let malformed = |error: &dyn Display| not_pem(&certificate, AUTHORITY_CERTIFICATE, error);
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|error| malformed(&error))?;
        if *parsed.public_key().subject_public_key.data != *key_pair.der_bytes() {
            return Err(AuthorityError::KeyMismatch { key, certificate });
        }
        let validity = Validity::of(&parsed);
        let issuer = Issuer::from_ca_cert_der(&der, key_pair).map_err(|error| malformed(&error))?;
        Ok(Self { pem, issuer, validity })
    }

    fn sign(
        &self,
        peer: &Peer,
        key: &impl PublicKeyData,
        validity: Validity,
    ) -> Result<Certificate, AuthorityError> {
        let validity = validity.to_the_second();
        if validity.not_after > self.validity.not_after {
            return Err(AuthorityError::OutlivesAuthority {
                requested: validity.not_after,
                authority: self.validity.not_after,
            });
        }
        Ok(holder_params(peer, validity)?.signed_by(key, &self.issuer)?)
    }
}

fn params(common_name: &str, validity: Validity) -> Result<CertificateParams, AuthorityError> {
    let Validity { not_before, not_after } = validity;
    if not_after <= not_before {
        return Err(AuthorityError::EmptyValidity(not_before, not_after));
    }
    let mut params = CertificateParams::default();
    params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_1970(not_before);
    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_1970(not_after);
    let common_name: String = common_name.chars().take(COMMON_NAME_LENGTH_MAX).collect();
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

fn since_1970(time: Timestamp) -> Duration {
    Duration::from_secs(u64::try_from(time.as_second()).unwrap_or(0))
}

fn authority_params(key: &KeyPair, validity: Validity) -> Result<CertificateParams, AuthorityError> {
    // Authorities need different names: of two with the same name, the verifier reports a wrong
    // signature where it should report an unknown authority.
    let identifier = CertificateParams::default().key_identifier(key);
    let short = identifier.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
    let mut params = params(&format!("Drainpipe authority {short:08x}"), validity)?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn holder_params(peer: &Peer, validity: Validity) -> Result<CertificateParams, AuthorityError> {
    let mut params = params(&peer.to_string(), validity)?;
    params.is_ca = IsCa::ExplicitNoCa;
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params.subject_alt_names = vec![SanType::URI(peer.uri().try_into()?)];
    if let Peer::Host(name) = peer {
        params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        let dns_name = SanType::DnsName(name.as_str().try_into()?);
        params.subject_alt_names.push(dns_name);
    }
    Ok(params)
}
