//! TLS failures as sentences that name the case and the remedy.

use std::error::Error;
use std::io;

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, CertificateError, InvalidMessage, PeerIncompatible};

use crate::validity::from_unix;

/// Longest chain of causes that is followed.
const CAUSES_MAX: usize = 32;
/// Most names of a peer's certificate that are shown, and most characters of each.
const NAMES_MAX: usize = 4;
const NAME_LENGTH_MAX: usize = 80;

/// Says why a TLS connection failed, if that is what `error` is about.
///
/// Looks through the causes of `error`, so errors of HTTP libraries may be given as they are.
pub fn explain(error: &(dyn Error + 'static)) -> Option<String> {
    explain_tls(tls_error(error)?)
}

/// As [`explain`], to a host that has a token and no certificate.
pub fn explain_join(error: &(dyn Error + 'static)) -> Option<String> {
    match tls_error(error)? {
        rustls::Error::InvalidCertificate(
            reason @ (CertificateError::ExpiredContext { .. } | CertificateError::NotValidYetContext { .. }),
        ) => explain_certificate(reason),
        rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure) => Some(
            "it lets no host join now, so the token was not sent: the token was used, has expired, or was \
            made on another host; `drainpipe init` there prints another"
                .to_owned(),
        ),
        rustls::Error::InvalidCertificate(_) => Some(
            "another host answers there than the one on which the token was made, so the token was not \
            sent: check the address, and copy the whole line that `drainpipe init` printed"
                .to_owned(),
        ),
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => Some(
            "it lets no host join now: the token was used or has expired; `drainpipe init` there prints \
            another"
                .to_owned(),
        ),
        other => explain_tls(other),
    }
}

/// Whether `error`, or a cause of it, is that one side does not accept the other's certificate.
pub fn is_for_certificates(error: &(dyn Error + 'static)) -> bool {
    match tls_error(error) {
        Some(rustls::Error::InvalidCertificate(_) | rustls::Error::NoCertificatesPresented) => true,
        Some(rustls::Error::AlertReceived(alert)) => *alert != AlertDescription::ProtocolVersion,
        _ => false,
    }
}

fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let mut cause = Some(error);
    for _ in 0..CAUSES_MAX {
        let current = cause?;
        if let Some(tls) = current.downcast_ref::<rustls::Error>() {
            return Some(tls);
        }
        cause = match current.downcast_ref::<io::Error>() {
            // `source` of an I/O error skips the error that it wraps.
            Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => current.source(),
        };
    }
    None
}

fn explain_tls(error: &rustls::Error) -> Option<String> {
    match error {
        rustls::Error::InvalidCertificate(reason) => explain_certificate(reason),
        rustls::Error::AlertReceived(alert) => explain_alert(*alert),
        rustls::Error::NoCertificatesPresented => Some(
            "the peer presented no certificate: it must present one of the same authority, made \
             with `drainpipe pki host` or `drainpipe pki operator`"
                .to_owned(),
        ),
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => Some(
            "the peer does not speak TLS on this port: check address and port in the configuration"
                .to_owned(),
        ),
        rustls::Error::PeerIncompatible(
            PeerIncompatible::Tls13RequiredForQuic
            | PeerIncompatible::SupportedVersionsExtensionRequired
            | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig
            | PeerIncompatible::ServerDoesNotSupportTls12Or13,
        ) => Some("the peer does not speak TLS 1.3, which Drainpipe requires".to_owned()),
        _ => None,
    }
}

fn explain_certificate(reason: &CertificateError) -> Option<String> {
    Some(match reason {
        CertificateError::ExpiredContext { time, not_after } => format!(
            "the peer's certificate expired at {} (the clock here says {}): replace it on the peer \
             with one made by `drainpipe pki`",
            from_unix(*not_after),
            from_unix(*time)
        ),
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "the peer's certificate is not valid before {}, and the clock here says {}: set the \
             clocks of both hosts right",
            from_unix(*not_before),
            from_unix(*time)
        ),
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the peer's certificate is signed by another authority than ours: both hosts need \
             certificates made by one `drainpipe pki init`, and its ca.pem"
                .to_owned()
        }
        CertificateError::NotValidForNameContext { expected, presented } => {
            explain_other_host(expected, presented)
        }
        CertificateError::InvalidPurposeContext { .. } | CertificateError::InvalidPurpose => {
            "the peer's certificate is not one for a host: an operator's certificate cannot serve; \
             make one with `drainpipe pki host`"
                .to_owned()
        }
        CertificateError::ApplicationVerificationFailure => {
            "the peer's certificate is not of the host that was expected: check which host connects"
                .to_owned()
        }
        CertificateError::Revoked => {
            "the peer's certificate is revoked: if the host is to come back, have it join again".to_owned()
        }
        CertificateError::BadEncoding => {
            "the peer's certificate cannot be decoded: replace it with one made by `drainpipe pki`".to_owned()
        }
        _ => return None,
    })
}

fn explain_other_host(expected: &ServerName<'_>, presented: &[String]) -> String {
    let names: Vec<String> = presented
        .iter()
        .filter_map(|name| name.strip_prefix("DnsName(\"")?.strip_suffix("\")"))
        .take(NAMES_MAX)
        .map(printable)
        .collect();
    let holder =
        if names.is_empty() { "of no host".to_owned() } else { format!("of host {}", names.join(", ")) };
    format!(
        "host {} was expected, but the certificate presented is {holder}: check which address \
         belongs to which host in the configuration",
        expected.to_str()
    )
}

/// The certificate is a peer's, and the text may end up in a terminal.
fn printable(name: &str) -> String {
    name.chars()
        .take(NAME_LENGTH_MAX)
        .map(|character| match character {
            ' '..='~' => character,
            _ => char::REPLACEMENT_CHARACTER,
        })
        .collect()
}

fn explain_alert(alert: AlertDescription) -> Option<String> {
    let reason = match alert {
        // TLS has one alert for both.
        AlertDescription::CertificateExpired => {
            "it has expired or is not valid yet, by the peer's clock: set the clocks right, or replace it"
        }
        AlertDescription::UnknownCA => {
            "another authority signed it: both sides need certificates made by one \
             `drainpipe pki init`"
        }
        AlertDescription::CertificateRequired => {
            "none was presented: one made with `drainpipe pki` is needed"
        }
        AlertDescription::UnsupportedCertificate => {
            "it is made for another purpose: hosts need one made with `drainpipe pki host`"
        }
        AlertDescription::BadCertificate => "it is damaged, or it is of another host than the peer expected",
        AlertDescription::CertificateRevoked => {
            "it is revoked: if this host is to come back, have it join again"
        }
        AlertDescription::DecryptError
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied => "see the peer's log for its reason",
        AlertDescription::ProtocolVersion => {
            return Some("the peer does not speak TLS 1.3, which Drainpipe requires".to_owned());
        }
        _ => return None,
    };
    Some(format!("the peer refused our certificate: {reason}"))
}
