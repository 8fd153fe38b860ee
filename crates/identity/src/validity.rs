//! From when until when a certificate is good.

use std::num::NonZeroU32;

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::{CertificateDer, UnixTime};
use x509_parser::certificate::X509Certificate;
use x509_parser::time::ASN1Time;

/// How far the clocks of two hosts may differ when a certificate has just been made.
const CLOCK_DIFFERENCE: SignedDuration = SignedDuration::from_hours(1);

/// From when until when a certificate is valid. Certificates know whole seconds only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// The first moment.
    pub not_before: Timestamp,
    /// The last moment.
    pub not_after: Timestamp,
}

impl Validity {
    /// From now, and a little before for hosts whose clock is late, for so many days.
    pub fn days(days: NonZeroU32) -> Self {
        let now = Timestamp::now();
        let length = SignedDuration::from_hours(24 * i64::from(days.get()));
        Self {
            not_before: now.checked_sub(CLOCK_DIFFERENCE).unwrap_or(Timestamp::MIN),
            not_after: now.checked_add(length).unwrap_or(Timestamp::MAX),
        }
    }

    /// From now, and a little before for hosts whose clock is late, for so long; never from before `earliest`.
    pub fn lasting(length: SignedDuration, earliest: Timestamp) -> Self {
        let now = Timestamp::now();
        let not_before = now.checked_sub(CLOCK_DIFFERENCE).unwrap_or(Timestamp::MIN).max(earliest);
        Self { not_before, not_after: now.checked_add(length).unwrap_or(Timestamp::MAX) }
    }

    pub(crate) fn of_der(certificate: &CertificateDer<'_>) -> Option<Self> {
        x509_parser::parse_x509_certificate(certificate).ok().map(|(_, parsed)| Self::of(&parsed))
    }

    pub(crate) fn of(certificate: &X509Certificate<'_>) -> Self {
        let validity = certificate.validity();
        Self { not_before: from_asn1(validity.not_before), not_after: from_asn1(validity.not_after) }
    }

    pub(crate) fn to_the_second(self) -> Self {
        Self {
            not_before: from_seconds(self.not_before.as_second()),
            not_after: from_seconds(self.not_after.as_second()),
        }
    }
}

fn from_asn1(time: ASN1Time) -> Timestamp {
    from_seconds(time.timestamp())
}

/// The time that a TLS error holds.
pub(crate) fn from_unix(time: UnixTime) -> Timestamp {
    from_seconds(i64::try_from(time.as_secs()).unwrap_or(i64::MAX))
}

/// Times that no calendar holds become the last that it holds: a peer may claim any.
fn from_seconds(seconds: i64) -> Timestamp {
    let outside = if seconds < 0 { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::from_second(seconds).unwrap_or(outside)
}
