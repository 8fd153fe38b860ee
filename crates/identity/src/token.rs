//! What a host must know to join: which host has the authority, the authority's fingerprint, and a secret that is good
//! once.

use std::fmt;
use std::str::FromStr;

use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::name::check_name;

const FINGERPRINT_BYTES: usize = 32;
/// 128 bits: nobody finds it by trying.
const SECRET_BYTES: usize = 16;
/// Longest text that is looked at.
const LENGTH_MAX: usize = 400;

/// SHA-256 of the authority's certificate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; FINGERPRINT_BYTES]);

impl Fingerprint {
    /// The fingerprint of this certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(sha256(certificate))
    }

    /// The fingerprint of the first certificate in this PEM; none if there is none.
    pub fn of_pem(pem: &str) -> Option<Self> {
        CertificateDer::from_pem_slice(pem.as_bytes()).ok().map(|certificate| Self::of(&certificate))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&to_hex(&self.0))
    }
}

/// The secret of a token. It is kept by its hash alone.
#[derive(Clone, PartialEq, Eq)]
pub struct JoinSecret([u8; SECRET_BYTES]);

impl JoinSecret {
    /// A new one; none if the system provides no random bytes.
    pub fn random() -> Option<Self> {
        let mut bytes = [0; SECRET_BYTES];
        SystemRandom::new().fill(&mut bytes).ok()?;
        Some(Self(bytes))
    }

    /// As it is kept.
    pub fn hash(&self) -> String {
        to_hex(&sha256(&self.0))
    }
}

/// Not the secret.
impl fmt::Debug for JoinSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JoinSecret")
    }
}

impl fmt::Display for JoinSecret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&to_hex(&self.0))
    }
}

impl FromStr for JoinSecret {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        from_hex(text).map(Self).ok_or(InvalidToken("its secret is not 32 hexadecimal digits"))
    }
}

/// A token: `HOST:FINGERPRINT:SECRET`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinToken {
    /// The host that has the authority. No other holder of a certificate learns the secret.
    pub host: String,
    /// The authority's certificate.
    pub authority: Fingerprint,
    /// What is good once.
    pub secret: JoinSecret,
}

/// A text that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this is not a token: {0}; copy the whole line that `drainpipe init` printed")]
pub struct InvalidToken(&'static str);

impl fmt::Display for JoinToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{:?}:{}", self.host, self.authority, self.secret)
    }
}

impl FromStr for JoinToken {
    type Err = InvalidToken;

    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        if text.len() > LENGTH_MAX {
            return Err(InvalidToken("it is too long"));
        }
        let mut parts = text.split(':');
        let (Some(host), Some(authority), Some(secret), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(InvalidToken("it does not have three parts with colons between them"));
        };
        check_name(host).map_err(|_| InvalidToken("it does not begin with a host's name"))?;
        let authority = from_hex(authority).map(Fingerprint);
        let authority = authority.ok_or(InvalidToken("its fingerprint is not 64 hexadecimal digits"))?;
        Ok(Self { host: host.into(), authority, secret: secret.parse()? })
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    digest(&SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

/// In lower case.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |four: u8| char::from(DIGITS[usize::from(four)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// Accepts lower case only, so that each value has one text.
fn from_hex<const LENGTH: usize>(text: &str) -> Option<[u8; LENGTH]> {
    let digits: Vec<u8> = text
        .bytes()
        .map(|letter| match letter {
            b'0'..=b'9' => Some(letter - b'0'),
            b'a'..=b'f' => Some(letter - b'a' + 10),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| (pair[0] << 4) | pair[1]).collect();
    if digits.len() == 2 * LENGTH { bytes.try_into().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(host: &str) -> JoinToken {
        JoinToken {
            host: host.into(),
            authority: Fingerprint([7; 32]),
            secret: JoinSecret::random().unwrap(),
        }
    }

    #[test]
    fn a_token_is_read_as_it_is_written_and_tells_no_log_its_secret() {
        let token = token("a.example");
        assert_eq!(token.to_string().parse(), Ok(token.clone()));
        assert!(!format!("{token:?}").contains(&token.secret.to_string()));
        assert_ne!(token.secret.hash(), JoinSecret::random().unwrap().hash());
    }

    #[test]
    fn what_is_cut_off_is_no_token() {
        let text = token("a").to_string();
        for length in 0..text.len() {
            text[..length].parse::<JoinToken>().unwrap_err();
        }
        for wrong in [text.to_uppercase(), format!("{text}0"), format!("{text}:"), format!("A{text}")] {
            wrong.parse::<JoinToken>().unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn any_text_is_judged(text in ".{0,500}") {
            if let Ok(token) = text.parse::<JoinToken>() {
                prop_assert_eq!(token.to_string(), text);
            }
        }
    }
}
